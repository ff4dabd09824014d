"""Canonical tensors <-> tensors as a checkpoint layout stores them: one table a layout, read both ways.

A Rule says which canonical tensors (`layers.{i}.attn.q.weight`, (out, in)) make one stored tensor, and by which
operations, written in the order canonical -> stored. The way back is derived: `read` undoes the operations from last
to first. Nothing here knows a family; arch/ holds the tables.

Arrays are anything that can be sliced and indexed by a list along its first axis, has swapaxes, and from which a
number can be taken (numpy, torch, windows.Traced); shapes are plain tuples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from llamactl.spec.model import Model, Tensor
from llamactl.spec.parts import Attention
from llamactl.spec.rope import Rope

Shape = tuple[int, ...]


class Place(NamedTuple):
    """Where a tensor stands, for operations that need more than its shape. groups: heads whose rows lie together.

    rope: the rotation of the layer's heads, None without one.
    """

    groups: int
    rope: Rope | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """Several tensors along axis 0 as one. The only place where their order is written.

    concat: one after the other. per_group: for each KV head its rows of every tensor in turn (GPT-NeoX, Falcon:
    [q.. k v] per head or group). interleaved: row by row (gpt-oss: gate, up, gate, up, ...). transposed: each turned to
    (in, out), then one after the other (DBRX's experts).
    """

    order: str = "concat"

    def stored(self, shapes: Sequence[Shape]) -> Shape:
        if self.order == "transposed":
            return (sum(s[1] for s in shapes), shapes[0][0])
        return (sum(s[0] for s in shapes), *shapes[0][1:])

    def read(self, array: Any, shapes: Sequence[Shape], place: Place) -> list[Any]:
        rows = [s[0] for s in shapes]
        if self.order == "concat":
            starts = [sum(rows[:n]) for n in range(len(rows))]
            return [array[a : a + r] for a, r in zip(starts, rows, strict=True)]
        if self.order == "transposed":
            starts = [sum(s[1] for s in shapes[:n]) for n in range(len(shapes))]
            return [array[a : a + s[1]].swapaxes(-1, -2) for a, s in zip(starts, shapes, strict=True)]
        if self.order == "interleaved":
            return [array[n :: len(rows)] for n in range(len(rows))]
        if self.order != "per_group":
            raise ValueError(f"{self.order!r} is no order of fused tensors")
        groups, out, start = place.groups, [], 0
        wide = sum(rows) // groups
        for r in rows:
            each = r // groups
            out.append(array[[g * wide + start + n for g in range(groups) for n in range(each)]])
            start += each
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Transposed:
    """Stored (in, out): GPT-2's Conv1D and the batched experts of Llama 4 and gpt-oss. Never decided from a shape."""

    def stored(self, shapes: Sequence[Shape]) -> Shape:
        (shape,) = shapes
        return (*shape[:-2], shape[-1], shape[-2])

    def read(self, array: Any, shapes: Sequence[Shape], place: Place) -> list[Any]:
        return [array.swapaxes(-1, -2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopePairs:
    """The rows of each head of q or k (weight or bias) in another order of rotation.

    pairs: as stored: "adjacent" rotates rows (2j, 2j + 1), "half" rows (j, j + dim/2). The canonical order is that of
    the layer's Rope. Rows that do not rotate stay; a layer without rotation is reordered as if all of a head rotated.
    """

    pairs: str = "adjacent"

    def stored(self, shapes: Sequence[Shape]) -> Shape:
        (shape,) = shapes
        return shape

    def read(self, array: Any, shapes: Sequence[Shape], place: Place) -> list[Any]:
        head = shapes[0][0] // place.groups
        canonical, dim = (place.rope.pairs, place.rope.dim) if place.rope else ("half", head - head % 2)
        if canonical == self.pairs:
            return [array]
        return [array[turned_rows(self.pairs, canonical, place.groups, head, dim)]]


@lru_cache(64)
def turned_rows(stored: str, canonical: str, groups: int, head: int, dim: int) -> list[int]:
    """The stored row of each canonical row; made once, for every layer asks for the same. Not to be changed."""
    of = _rows(stored, dim)  # stored row r is the `of[r]`-th in order of (pair, member), and so is canonical
    at = {lane: row for row, lane in enumerate(of)}
    back = [at[lane] for lane in _rows(canonical, dim)] + list(range(dim, head))
    return [g * head + row for g in range(groups) for row in back]


def _rows(pairs: str, dim: int) -> list[tuple[int, int]]:
    """(pair, member of it) of each row of a head that rotates `dim` of them."""
    if pairs not in ("half", "adjacent"):
        raise ValueError(f"{pairs!r} is no order of pairs")
    half = dim // 2
    return [(r % half, r // half) if pairs == "half" else (r // 2, r % 2) for r in range(dim)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """Stored with `by` added: GGUF keeps the factors 1 + w of Gemma's norms, whose own files keep w."""

    by: float = 1.0

    def stored(self, shapes: Sequence[Shape]) -> Shape:
        (shape,) = shapes
        return shape

    def read(self, array: Any, shapes: Sequence[Shape], place: Place) -> list[Any]:
        return [array - self.by]


Op = Fused | Transposed | RopePairs | Offset


class Rule(NamedTuple):
    """`of` canonical templates -> one `stored` template. stacked: all experts `{e}` in one tensor along axis 0.

    groups: which head count groups the rows for Fused per_group and RopePairs: the layer's KV heads, or all ("heads").
    """

    of: tuple[str, ...]
    stored: str
    ops: tuple[Op, ...] = ()
    stacked: bool = False
    groups: str = "kv_heads"


def rule(stored: str, *of: str, ops: tuple[Op, ...] = (), stacked: bool = False, groups: str = "kv_heads") -> Rule:
    """A Rule, written the way tables read best: the stored name, then what it is made of."""
    return Rule(of=of, stored=stored, ops=ops, stacked=stacked, groups=groups)


class Stored(NamedTuple):
    """One tensor of a checkpoint: its name and shape there, the canonical tensors in it, the rule that says so."""

    name: str
    shape: Shape
    of: tuple[Tensor, ...]
    rule: Rule


def stored_tensors(model: Model, rules: Iterable[Rule]) -> Iterator[Stored]:
    """Every stored tensor of `model` under `rules`. KeyError if a canonical tensor has no rule: a table is complete."""
    by_template = {template: r for r in rules for template in r.of}
    groups: dict[str, tuple[Rule, list[Tensor]]] = {}
    for tensor in model.tensors():
        r = by_template[tensor.template]
        name = _fill(r.stored, tensor, keep_e=r.stacked)
        groups.setdefault(name, (r, []))[1].append(tensor)
    for name, (r, tensors) in groups.items():
        yield Stored(name=name, shape=_shape(r, tensors), of=tuple(tensors), rule=r)


def read(stored: Stored, array: Any, model: Model) -> dict[str, Any]:
    """The canonical arrays in one stored array: {canonical name: array}."""
    n = len(stored.of) // len(stored.rule.of)
    if not stored.rule.stacked:
        return _unpack(stored.rule, stored.of, array, model)
    by_expert: dict[int, list[Tensor]] = {}
    for t in stored.of:
        by_expert.setdefault(t.e, []).append(t)
    assert len(by_expert) == n
    out: dict[str, Any] = {}
    for e, tensors in sorted(by_expert.items()):
        out.update(_unpack(stored.rule, _in_order(stored.rule, tensors), array[e], model))
    return out


def read_expert(stored: Stored, e: int, array: Any, model: Model) -> dict[str, Any]:
    """The canonical arrays of expert `e` alone; array: its entry of a stacked tensor, the `e`-th along axis 0."""
    return _unpack(stored.rule, [t for t in stored.of if t.e == e], array, model)


def _unpack(r: Rule, tensors: Sequence[Tensor], array: Any, model: Model) -> dict[str, Any]:
    tensors = _in_order(r, tensors)
    before: list[list[Shape]] = [[t.shape for t in tensors]]
    for op in r.ops:
        before.append([op.stored(before[-1])])
    parts = [array]
    for op, shapes in zip(reversed(r.ops), reversed(before[:-1]), strict=True):
        parts = op.read(parts[0], shapes, _place(r, tensors[0], model))
    return {t.name: a for t, a in zip(tensors, parts, strict=True)}


def _place(r: Rule, tensor: Tensor, model: Model) -> Place:
    attn = model.layers[tensor.i].attn if tensor.template.startswith("layers.{i}.attn.") else None
    return Place(groups=_groups(r, tensor, model), rope=attn.rope if attn else None)


def _groups(r: Rule, tensor: Tensor, model: Model) -> int:
    layer = model.layers[tensor.i] if tensor.i >= 0 else None
    if layer is None:
        return 1
    if layer.state is not None and ".state." in tensor.template:
        from llamactl.spec.state import GatedDeltaNet

        return layer.state.k_heads if isinstance(layer.state, GatedDeltaNet) else 1
    if isinstance(layer.attn, Attention):
        return layer.attn.n_heads if r.groups == "heads" else layer.attn.n_kv_heads
    return layer.attn.n_heads if layer.attn is not None else 1


def _shape(r: Rule, tensors: Sequence[Tensor]) -> Shape:
    experts = {t.e for t in tensors} if r.stacked else {None}
    one = _in_order(r, [t for t in tensors if not r.stacked or t.e == tensors[0].e])
    shapes: list[Shape] = [t.shape for t in one]
    for op in r.ops:
        shapes = [op.stored(shapes)]
    (shape,) = shapes
    return (len(experts), *shape) if r.stacked else shape


def _in_order(r: Rule, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors in the rule's order; the model may enumerate them in another."""
    return sorted(tensors, key=lambda t: r.of.index(t.template))


def _fill(template: str, tensor: Tensor, keep_e: bool) -> str:
    name = template.replace("{i}", str(tensor.i))
    return name if keep_e else name.replace("{e}", str(tensor.e))
