"""Two located checkpoints for `diff`: what each stores, by canonical name, and which of it belongs together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from llamactl import arch
from llamactl.checkpoint.held import FLOATS, Held
from llamactl.cli.located import Located, open_files
from llamactl.errors import InputRefused
from llamactl.spec.model import Model

if TYPE_CHECKING:
    from llamactl.checkpoint.account import Account
    from llamactl.checkpoint.files import Files
    from llamactl.checkpoint.plan import Output as Tensor

Notes = tuple[tuple[str, str], ...]
Shape = tuple[int, ...]


class Half(NamedTuple):
    """A tensor on one side: canonical shape, names in the files, stored types.

    output: how it is made of the files, None for a type that no model computes with. odd: why it cannot be made.
    """

    shape: Shape
    stored: tuple[str, ...]
    dtype: str
    output: Tensor | None = None
    odd: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One checkpoint. halves: by canonical name. lacks: what its config asks for and its files do not hold.

    beside: by stored name, what the model has no part for. left_out: those of them whose reason is known.
    """

    label: str
    at: Located
    files: Files
    halves: Mapping[str, Half]
    lacks: frozenset[str]
    beside: Mapping[str, Half]
    left_out: Mapping[str, str]


class Pair(NamedTuple):
    """One name, and what either side has under it."""

    name: str
    a: Half | None
    b: Half | None
    note: str | None = None


def open_side(label: str, at: Located) -> Side:
    """Everything a checkpoint stores, under the names by which it can be compared."""
    from llamactl.checkpoint.plan import Planner, canonical, whole
    from llamactl.checkpoint.plan import Side as Layout
    from llamactl.cli.proving import natural
    from llamactl.spec.naming import stored_tensors

    files = open_files(at)
    model, found, odd, lacks = _matched(at, files)
    rules = canonical(model)
    planner = Planner(files, Layout(model, at.layout, (), found.at), Layout(model, "canonical", rules), natural)
    halves = {s.name: _half(planner.output(s)) for s in stored_tensors(model, rules) if s.name in found.at}
    beside = {name: _half(whole(files, name)) if files.tensors[name].dtype in FLOATS else
              Half(files.tensors[name].shape, (name,), files.tensors[name].dtype)
              for name in (*found.strangers, *found.left_out)}
    return Side(label=label, at=at, files=files, halves={**halves, **odd}, lacks=lacks, beside=beside,
                 left_out=found.left_out)


def _half(o: Tensor) -> Half:
    return Half(o.shape, tuple(dict.fromkeys(p.name for p in o.sources)),
                 "+".join(sorted({p.dtype for p in o.sources})), o)


def _matched(at: Located, files: Files) -> tuple[Model, Account, dict[str, Half], frozenset[str]]:
    """The model as its files have it, where its tensors lie, those of another shape, and those that are not there.

    A head that is stored beside a tied embedding is compared too: then the model is read as untied.
    """
    from llamactl.spec.changes import set_tie

    found, odd, lacks = _accounted(at, at.model, files)
    if found.twin is None:
        return at.model, found, odd, lacks
    model = set_tie(at.model, False)
    return (model, *_accounted(at, model, files))


def _accounted(at: Located, model: Model, files: Files) -> tuple[Account, dict[str, Half], frozenset[str]]:
    """As account.account says; but a model with holes is accounted for too, if half of what its config says is there.
    """
    from llamactl.checkpoint.account import account
    from llamactl.spec.naming import stored_tensors
    from llamactl.spec.prefixes import best

    rules = arch.names(model, at.layout)

    def look(tensors: Mapping[str, Held]) -> Account:
        return account(at.path, tensors, model, rules, layout=at.layout, ignored=arch.ignored(model, at.layout),
                       packed=at.layout != "gguf", whole=True)

    try:
        return look(files.tensors), {}, frozenset()
    except InputRefused as e:
        if e.code not in ("weights-missing", "weights-shape"):
            raise
        want = {s.name: s for s in stored_tensors(model, rules)}
        own = {name: n for n, name in best(list(files.tensors), want)[1].items()}
        if 2 * len(own.keys() & want.keys()) < len(want):
            raise
    held = {name: files.tensors[n] for name, n in own.items()}
    wrong = {name for name in want if name in held and held[name].shape != want[name].shape}
    filled = {name: Held(name=name, dtype="F32", shape=s.shape, nbytes=0) for name, s in want.items()
              if name in wrong or name not in held}
    found = look({**held, **filled})
    odd = {t.name: Half(held[name].shape, (own[name],), held[name].dtype, None, "the config says "
                         + "x".join(map(str, want[name].shape))) for name in wrong for t in want[name].of}
    lacks = frozenset(t.name for name in want if name not in held for t in want[name].of)
    here = {name: (s, own[n]) for name, (s, n) in found.at.items() if n not in filled}
    return replace(found, at=here, left_out={own[n]: why for n, why in found.left_out.items()},
                   strangers=tuple(own[n] for n in found.strangers),
                   twin=None if found.twin is None or found.twin in filled else own[found.twin]), odd, lacks


def paired(a: Side, b: Side) -> tuple[list[Pair], Notes]:
    """Every name of either side, in the order of the model."""
    from llamactl.checkpoint.account import listed

    pairs: list[Pair] = []
    notes: list[tuple[str, str]] = []
    alone: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys((*a.halves, *b.halves)):
        one, note = _found(a, name)
        other, more = _found(b, name)
        pairs.append(Pair(name, one, other, note or more))
    if none := sorted(a.lacks & b.lacks):
        notes.append(("weights-missing", f"{len(none):,} tensors of the model are in neither's files: {listed(none)}"))
    for name in dict.fromkeys((*a.beside, *b.beside)):
        one, other = a.beside.get(name), b.beside.get(name)
        why = a.left_out.get(name) or b.left_out.get(name)
        if why and a.at.layout != b.at.layout and (one is None or other is None):
            alone.setdefault((a.label if one else b.label, why), []).append(name)
            continue
        pairs.append(Pair(name, one, other, "no part of the described model" + (f": {why}" if why else "")))
    notes += [("diff-left-out", f"{len(names):,} tensors are in {label} alone and have no place in the other layout "
               f"({why}): {listed(names, 5)}") for (label, why), names in alone.items()]
    return pairs, tuple(notes)


def _found(s: Side, name: str) -> tuple[Half | None, str | None]:
    """What a side has under a name; a tied head is the embedding."""
    half = s.halves.get(name)
    if half is not None:
        return half, half.odd and f"{s.label}: {half.odd}"
    if name == "head.weight" and s.at.model.tied and "embed.weight" in s.halves:
        return s.halves["embed.weight"], f"{s.label} is tied: its token embedding is the head"
    return None, f"{s.label}'s config has it, its files do not" if name in s.lacks else None
