"""What `verify --selftest` found: every known mistake planted in one model; which show, and which have a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llamactl.analysis.verification import Floor

NAMED = ("yes", "equivalent", "no", "not-finite", "no-op", "cannot-run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """One mistake made in the right network. edit, scope: as in Explanation; words: in plain words.

    named: yes | equivalent (other edits give the same logits, listed in `equivalent`) | no (seen, and the search does
    not try it here) | not-finite (seen, and NaN has no name) | no-op (not seen on this text) | cannot-run.
    seen: logits beyond the limit. max_abs_dlogit, max_kl (nats): None where not finite or not run. tokens: the shortest
    beginning of the text that shows it.
    """

    edit: str
    scope: str
    words: str
    named: str
    seen: bool = False
    max_abs_dlogit: float | None = None
    max_kl: float | None = None
    tokens: int | None = None
    equivalent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlindSpot:
    """A mistake that this text does not show. shows: what might, in words."""

    edit: str
    scope: str
    words: str
    shows: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """planted: rows that could be run; seen of them; and of the seen: named alone, with others, left out, not finite.

    most_tokens: the longest beginning that one of the seen needs.
    """

    planted: int
    seen: int
    named: int
    equivalent: int
    not_named: int
    not_finite: int
    no_op: int
    cannot_run: int
    most_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """A mistake that has a name, and that the search did not find. said: what it found instead, None for nothing."""

    edit: str
    scope: str
    said: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestReport:
    """The honest list of what `verify` can and cannot see of one model on one text.

    text: the tokens, in words. checked: mistakes that the search itself was given as logits alone, drawn in a fixed
    order, within check_seconds; checked_named: how many it named, or an equivalent of them. limits: what was left out.
    """

    id: str
    family: str
    text: str
    tokens: int
    floor: Floor
    totals: Totals
    planted: tuple[Planted, ...]
    blind_spots: tuple[BlindSpot, ...]
    check_seconds: float
    checked: int
    checked_named: int
    missed: tuple[Missed, ...]
    limits: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.missed

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def totals(rows: Sequence[Planted]) -> Totals:
    """Rows counted."""
    count = {word: sum(r.named == word for r in rows) for word in NAMED}
    return Totals(planted=len(rows) - count["cannot-run"], seen=sum(r.seen for r in rows), named=count["yes"],
                  equivalent=count["equivalent"], not_named=count["no"], not_finite=count["not-finite"],
                  no_op=count["no-op"], cannot_run=count["cannot-run"],
                  most_tokens=max((r.tokens for r in rows if r.tokens is not None), default=None))
