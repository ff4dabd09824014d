"""`verify --selftest` at work: mistakes planted in the checkpoint's own network, and the list of blind spots."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from llamactl.analysis.verification import TEXTS
from llamactl.cli.located import Located
from llamactl.cli.memory import enough
from llamactl.cli.options import Output
from llamactl.cli.progress import Words
from llamactl.errors import UsageError, printable

if TYPE_CHECKING:
    from llamactl.cli.given import Given
    from llamactl.cli.runnable import Opened
    from llamactl.cli.verifying import Asked

TOKENS = 128  # of the probe: hundreds of networks are run on it
SECONDS = 60  # of looking for some of the mistakes, where --seconds was not given


def run(at: Located, asked: Asked, out: Output) -> int:
    """Plant, search, print; 1 where the search missed a mistake that has a name. Raises LlamactlError."""
    from llamactl.api import Loaded
    from llamactl.cli.runnable import opened
    from llamactl.cli.show import show
    from llamactl.verify.selftest import selftest

    for option, value in (("--report", asked.report), ("--junit", asked.junit), ("--annotate", asked.annotate),
                          ("--accept", asked.accept)):
        if value:
            raise UsageError("usage", f"--selftest has no verdict for {option}: leave it out")
    first = opened(at)
    words = _tokens(first, asked)
    seconds = float(SECONDS if asked.seconds is None else asked.seconds)
    text = printable(asked.text) if words.source == "text" and asked.text is not None else TEXTS[words.source]
    with enough("give fewer --tokens", f"out of memory with {len(words.ids):,} tokens"), Words(out) as say:
        report = selftest(first.model, first.weights, words.ids, id=first.source.id, text=text, seconds=seconds,
                          say=say)
    show("verify", [Loaded(model=first.model, source=first.source)], [report], asked.inputs(), out,
         warnings=first.warnings, result=report.to_dict())
    if report.passed:
        return 0
    m = report.missed[0]
    print(f"error[selftest]: {len(report.missed)} of {report.checked} mistakes that have a name were not found, the "
          f"first of them {m.edit} ({m.scope})", file=sys.stderr)
    return 1


def _tokens(first: Opened, asked: Asked) -> Given:
    """What is asked for, or the beginning of verify's probe. Raises what cli.given does, and UsageError text-too-short.
    """
    from dataclasses import replace

    from llamactl.cli.given import given

    found = given(first, asked.tokens, asked.text)
    if asked.tokens is None and asked.text is None:
        found = replace(found, ids=found.ids[:TOKENS])
    if len(found.ids) < 2:
        raise UsageError("text-too-short", "one token sees itself alone: nothing about attention can be seen",
                         help="give some hundred tokens, or none for a passage that comes with llamactl")
    return found
