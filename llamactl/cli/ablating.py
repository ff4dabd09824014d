"""`ablate` at work: open the model, turn the text into tokens, measure, report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamactl.analysis.verification import TEXTS
from llamactl.cli.memory import enough
from llamactl.cli.options import Access, Output
from llamactl.errors import NotAvailable, OutputError, UsageError, printable

if TYPE_CHECKING:
    from llamactl.analysis.ablation import AblateReport
    from llamactl.cli.runnable import Opened
    from llamactl.spec.model import Model

EXACT = 1e-3  # nats: far above what moving all positions does to a sum of rounded numbers, far below any real change
TOKENS = 1024
FEW = 64  # tokens
Warnings = list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line, checked. edits, tokens: None for what fits the model."""

    ref: str | None
    text: str | None
    edits: tuple[str, ...] | None
    tokens: int | None
    threads: int | None
    plot: str | None
    force: bool

    def inputs(self) -> dict[str, Any]:
        """What the JSON says was asked for."""
        return {"text": self.text, "edits": None if self.edits is None else list(self.edits), "tokens": self.tokens,
                "threads": self.threads, "plot": self.plot}


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The tokens, and where they are from."""

    ids: list[int]
    text: str


def run(asked: Asked, out: Output, reach: Access) -> None:
    """Do what is asked, and print it. Raises LlamactlError."""
    from llamactl.api import Loaded
    from llamactl.cli.located import need_torch
    from llamactl.cli.runnable import open_model
    from llamactl.cli.show import draw, show

    if asked.plot is not None:
        check_picture(asked.plot, asked.force)
    need_torch()
    opened = open_model(asked.ref, reach)
    from llamactl.verify.ablations import chosen

    edits = chosen(opened.model) if asked.edits is None else asked.edits
    said: Warnings = list(opened.warnings)
    words = read_words(asked, opened, said)
    report = _measured(asked, opened, words, edits, out)
    said += _odd(report, opened.model)
    draw("ablate", [report], asked.plot, asked.force)
    show("ablate", [Loaded(model=opened.model, source=opened.source)], [report], asked.inputs(), out, warnings=said)


def check_picture(file: str, force: bool) -> None:
    """Refuse before the work what could not be drawn or written after it. Raises UsageError, NotAvailable, OutputError.
    """
    from llamactl.render.plot import form_of

    form_of(file)
    check_file(file, force)


def check_file(file: str, force: bool) -> None:
    """Refuse before the work what could not be written after it. Raises OutputError."""
    if os.path.lexists(file) and not force:
        raise OutputError("exists", "is there already", path=file, help="--force replaces it")
    folder = os.path.dirname(file) or "."
    if not os.path.isdir(folder):
        raise OutputError("not-written", "could not be written: no such folder", path=folder)


def read_words(asked: Asked, opened: Opened, said: Warnings) -> Words:
    """The first tokens of the text, as many as are asked for and as the model has positions. Adds to `said`.

    Raises what the room tokens does where a text is given, UsageError text-too-short, and check_ids.
    """
    from llamactl import tokens
    from llamactl.cli.prompt import read_prompt
    from llamactl.cli.running import place
    from llamactl.net.generate import check_ids, positions

    model = opened.model
    wanted = asked.tokens or TOKENS
    most = min(x for x in (wanted, positions(model), model.context.usable) if x is not None)
    if asked.tokens is not None and most < wanted:
        said.append(("tokens-cut", f"{wanted:,} tokens, but this model has {most:,} positions: the first {most:,} are "
                     "taken"))
    tokenizer = None
    try:
        tokenizer = tokens.open_tokenizer(place(opened), model_type=model.model_type, vocab=model.embed.vocab)
    except NotAvailable as e:
        if asked.text is not None:
            raise
        said.append(("no-tokenizer", f"{e.message}: the tokens are made up, and the loss on them says little about "
                     "the weights; the ranking of edits may be another one on real text"))
    if asked.text is None:
        from llamactl.verify.probe import probe

        found = probe(model, tokenizer, most)
        words = Words(ids=list(found.ids)[:most], text=TEXTS[found.source])
    else:
        assert tokenizer is not None
        prompt = read_prompt(None, asked.text, False)
        words = Words(ids=tokenizer.encode(prompt)[:most], text=printable(asked.text))
    if len(words.ids) < 2:
        raise UsageError("text-too-short", f"the text has {len(words.ids)} tokens, and a loss takes two or more",
                         help="give a longer text with --text")
    check_ids(model, words.ids)
    if asked.tokens is not None and len(words.ids) < most:
        said.append(("tokens-cut", f"{most:,} tokens, but the text has only {len(words.ids):,}"))
    if len(words.ids) < FEW:
        said.append(("few-tokens", f"only {len(words.ids):,} tokens: edits of positions and of long reach hardly show"))
    return words


def _measured(asked: Asked, opened: Opened, words: Words, edits: tuple[str, ...], out: Output) -> AblateReport:
    """The report. Running out of memory becomes one line."""
    from llamactl.analysis.ablation import AblateReport
    from llamactl.net import device as devices
    from llamactl.verify.ablate import ablate

    if asked.threads is not None:
        devices.use_threads(asked.threads)
    model = opened.model
    with enough("lower --tokens", f"out of memory with {len(words.ids):,} tokens"):
        found = ablate(model, opened.weights, words.ids, edits=edits, tell=_teller(out))
    return AblateReport(
        id=opened.source.id, family=model.family, model_type=model.model_type, tokens=len(words.ids),
        predicted=len(words.ids) - 1, text=words.text, dtype="fp32", streamed=found.streamed,
        base_loss=found.base_loss, ablations=found.rows, norms=found.norms, kv_copy=found.kv_copy)


def _odd(report: AblateReport, model: Model) -> Warnings:
    """A warning for each edit without a loss, and where moving all positions is not nothing though it must be."""
    out = []
    for x in report.ablations:
        if x.status == "not-finite":
            out.append(("not-finite", f"{x.edit}: {x.note}; it stands after those that have one"))
        if x.kind == "shift" and model.positions is None and x.change is not None and abs(x.change) > EXACT:
            out.append(("shift", f"{x.edit} changes the loss by {x.change:+.2g}, though only distances count here"))
    return out


def _teller(out: Output) -> Callable[[str], None]:
    """What says on a terminal which edit is measured; nothing elsewhere."""
    silent = out.format == "json" or out.quiet or "CI" in os.environ or not sys.stderr.isatty()

    def tell(what: str) -> None:
        print(f"measuring {printable(what)}", file=sys.stderr)

    return (lambda _: None) if silent else tell
