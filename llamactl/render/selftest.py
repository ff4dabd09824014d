"""The view of `llamactl verify --selftest`: what is seen, what has a name, and what cannot be seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llamactl.analysis.selftest import Planted, SelftestReport
from llamactl.render.document import Block, Cell, Column, Document, Facts, Table
from llamactl.render.units import count
from llamactl.render.verdict import number

FEW = 12  # groups of equivalent edits that are shown
WORDS = {"yes": "yes", "equivalent": "with others", "no": "no", "not-finite": "not finite", "no-op": "no-op here",
         "cannot-run": "cannot run"}
_COLUMNS = ("edit", "scope", "words", "named", "seen", "max_abs_dlogit", "max_kl", "tokens", "equivalent", "shows")


def view(reports: Sequence[SelftestReport], *, verbose: bool = False, **_: Any) -> Document:
    """Counts, the edits by kind, which ones nothing tells apart, and all that are not seen; with verbose every row."""
    (r,) = reports
    blocks: list[Block] = [Facts(f"selftest of {r.id} (family {r.family})", tuple(_facts(r)))]
    if r.planted:
        blocks.append(_kinds(r))
    if same := list(_same(r)):
        lines = [(f"{n}", x) for n, x in enumerate(same if verbose else same[:FEW], 1)]
        if len(lines) < len(same):
            lines.append(("", f"and {count(len(same) - len(lines))} more; -v and --json list them all"))
        blocks.append(Facts("same logits here", tuple(lines)))
    if r.blind_spots:
        blocks.append(_blind(r))
    if verbose:
        blocks.append(_rows(r))
    if r.limits:
        blocks.append(Facts("left out", tuple(("-", x) for x in r.limits)))
    shows = {(b.edit, b.scope): b.shows for b in r.blind_spots}
    rows = tuple(_flat(x, shows.get((x.edit, x.scope))) for x in r.planted)
    return Document(tuple(blocks), Table("", tuple(map(Column, _COLUMNS)), rows), (r.totals.seen,))


def _facts(r: SelftestReport) -> Iterator[tuple[str, str]]:
    t, f = r.totals, r.floor
    yield "text", f"{count(r.tokens)} tokens: {r.text}"
    yield "arithmetic", f"logits up to {f.limit:.2g} apart count as the same"
    most = "" if t.most_tokens is None else f", the last of them on {count(t.most_tokens)} tokens"
    yield "seen", f"{count(t.seen)} of {count(t.planted)} mistakes{most}"
    yield "named", (f"{count(t.named)} alone, {count(t.equivalent)} together with others that give the same logits "
                    "here")
    rest = ((t.not_named, "seen, and left out by the search"), (t.not_finite, "seen, with logits that are not finite"),
            (t.no_op, "not seen"), (t.cannot_run, "cannot be run"))
    for n, what in rest:
        if n:
            yield ("no name" if what.startswith("seen") else what), f"{count(n)}" + (
                f" {what}" if what.startswith("seen") else "")
    if r.checked:
        yield "searched for", (f"{count(r.checked)} of them from logits alone, in up to {r.check_seconds:g} s: "
                               f"{count(r.checked_named)} named")
    else:
        yield "searched for", f"none of them within {r.check_seconds:g} s: --seconds gives more time"
    for m in r.missed:
        yield "missed", f"{m.edit} ({m.scope}): the search found {m.said or 'nothing'}"


def _kinds(r: SelftestReport) -> Table:
    """One row an edit's name; tokens: that the last of its seen ones needs."""
    by: dict[str, list[Planted]] = {}
    for x in r.planted:
        by.setdefault(x.edit.partition("=")[0], []).append(x)
    columns = (Column("edit"), *(Column(c, "count") for c in ("planted", "seen", "named alone", "with others",
                                                              "not seen", "tokens")))
    return Table("by edit", columns, tuple(_kind(name, some) for name, some in by.items()))


def _kind(name: str, some: Sequence[Planted]) -> tuple[Cell, ...]:
    def of(word: str) -> int:
        return sum(x.named == word for x in some)

    return (name, len(some) - of("cannot-run"), sum(x.seen for x in some), of("yes"), of("equivalent"), of("no-op"),
            max((x.tokens for x in some if x.tokens is not None), default=None))


def _same(r: SelftestReport) -> Iterator[str]:
    """Groups of edits that give the same logits; one in a layer is not told again where the whole model has it."""
    told: set[frozenset[str]] = set()
    for x in r.planted:
        if not x.equivalent:
            continue
        layer = x.scope.startswith("layer ")
        all_ = [f"{x.edit} in {x.scope}" if layer else x.edit, *x.equivalent]
        key = frozenset(e.removesuffix(f" in {x.scope}") for e in all_)
        if not any(key <= group for group in told):
            told.add(key)
            yield " = ".join(all_)


def _blind(r: SelftestReport) -> Table:
    """Those that are not seen; one edit in two places is one row."""
    by: dict[str, list[tuple[str, str]]] = {}
    for b in r.blind_spots:
        by.setdefault(b.edit, []).append((b.scope, b.shows))
    columns = (Column("edit"), Column("where"), Column("what shows it"))
    return Table("blind spots: not seen on this text", columns, tuple(
        (edit, ", ".join(s for s, _ in some), some[0][1]) for edit, some in by.items()))


def _rows(r: SelftestReport) -> Table:
    columns = (Column("edit"), Column("where"), Column("named"), Column("max |dlogit|", "number"), Column(
        "max KL", "number"), Column("tokens", "count"), Column("what"))
    return Table("all of them", columns, tuple(
        (x.edit, x.scope, WORDS[x.named], None if x.max_abs_dlogit is None else number(x.max_abs_dlogit),
         None if x.max_kl is None else number(x.max_kl), x.tokens, x.words) for x in r.planted))


def _flat(x: Planted, shows: str | None) -> tuple[Cell, ...]:
    return (x.edit, x.scope, x.words, x.named, str(x.seen).lower(), x.max_abs_dlogit, x.max_kl, x.tokens,
            " | ".join(x.equivalent) or None, shows)
