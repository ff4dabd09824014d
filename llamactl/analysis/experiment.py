"""What `lab` reports: experiments, each a few claims with what was measured beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

VERDICTS = ("differs", "holds", "measured", "skipped")
RELATIONS: dict[str, Callable[[float, float, float], bool]] = {
    "=": lambda value, expected, tolerance: abs(value - expected) <= tolerance,
    "<=": lambda value, expected, tolerance: value <= expected + tolerance,
    ">=": lambda value, expected, tolerance: value >= expected - tolerance,
}
Cell = str | int | float | None
OURS = "limit of ours"  # in a note: nobody but the lab draws the line there


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One measured value. of: what it was measured on. lowest, highest: of the `samples` values that `value` sums
    up (repetitions, or one for each layer, norm or window), None for a single one.

    expected, relation, tolerance: what is claimed of `value`, or its limit (value = expected within tolerance, value <=
    expected); None where there is neither. Where the note says OURS, the limit is the lab's own.

    verdict: holds | differs | measured (nothing is claimed) | skipped. value: None where it was not measured or is no
    number. note: why it was skipped, or what decides the value.
    """

    what: str
    of: str
    unit: str
    value: int | float | None
    lowest: int | float | None
    highest: int | float | None
    samples: int
    expected: int | float | None
    relation: str | None
    tolerance: float | None
    verdict: str
    note: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What is said, the formula it is said with, and what was found."""

    claim: str
    formula: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Numbers beside each other; units stand in the columns' names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve of a chart: values at `at`."""

    name: str
    at: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over one axis. across, up: what the axes are, with the unit."""

    title: str
    across: str
    up: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A text that came out."""

    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one experiment hands back."""

    claims: tuple[Claim, ...]
    grids: tuple[Grid, ...] = ()
    charts: tuple[Chart, ...] = ()
    passages: tuple[Passage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """An experiment in the list. title: what it asks, source: where the claims are from."""

    name: str
    title: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LabList:
    """What `llamactl lab list` says."""

    experiments: tuple[Card, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _repr_html_(self) -> str:
        from llamactl.render import html

        return html("lab", [self])


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One experiment that was run. verdict: the first of VERDICTS that any finding has. seconds: it took."""

    name: str
    title: str
    source: str
    verdict: str
    seconds: float
    claims: tuple[Claim, ...]
    grids: tuple[Grid, ...]
    charts: tuple[Chart, ...]
    passages: tuple[Passage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabReport:
    """What `llamactl lab run` found. device: as it calls itself. checkpoints: ids of the trained weights given; text:
    what they were run on, and how many tokens of it; None where none was run.
    """

    verdict: str
    seed: int
    device: str
    threads: int
    torch: str
    checkpoints: tuple[str, ...]
    text: str | None
    experiments: tuple[Experiment, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def differing(self) -> tuple[str, ...]:
        """Findings that do not hold, as "experiment: what"."""
        return tuple(f"{e.name}: {f.what}" for e in self.experiments for c in e.claims for f in c.findings
                     if f.verdict == "differs")

    def _repr_html_(self) -> str:
        from llamactl.render import html

        return html("lab", [self])


def found(what: str, value: float, *, of: str, unit: str = "", spread: Sequence[float] = (),
          expected: float | None = None, relation: str = "=", tolerance: float = 0.0, note: str | None = None,
          ours: bool = False) -> Finding:
    """A finding and its verdict. spread: the values that `value` sums up. What is no number never holds.

    ours: `expected` is a limit of the lab's own, which the note says.
    """
    fine = math.isfinite(value)
    verdict = "measured"
    if expected is not None:
        verdict = "holds" if fine and RELATIONS[relation](value, expected, tolerance) else "differs"
    said = (None if fine else f"the value is {value}", OURS if ours and expected is not None else None, note)
    note = "; ".join(x for x in said if x) or None
    known = [x for x in spread if math.isfinite(x)]
    return Finding(what=what, of=of, unit=unit, value=value if fine else None, lowest=min(known, default=None),
                   highest=max(known, default=None), samples=max(1, len(spread)), expected=expected,
                   relation=None if expected is None else relation, tolerance=None if expected is None else tolerance,
                   verdict=verdict, note=note)


def skipped(what: str, why: str, *, of: str = "a checkpoint", unit: str = "") -> Finding:
    """A finding that was not measured."""
    return Finding(what=what, of=of, unit=unit, value=None, lowest=None, highest=None, samples=0, expected=None,
                   relation=None, tolerance=None, verdict="skipped", note=why)


def overall(verdicts: Iterable[str]) -> str:
    """One verdict for several: the first of VERDICTS that is among them."""
    there = set(verdicts)
    return next((v for v in VERDICTS if v in there), "skipped")
