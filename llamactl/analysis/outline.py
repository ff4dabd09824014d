"""A model as a drawing needs it: its parts in the order a token meets them, what each is, holds and keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from llamactl.analysis.formulas import embedding, logits, softmax
from llamactl.spec.changes import each_layer
from llamactl.spec.features import attention, features
from llamactl.spec.latent import LatentAttention
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import Attention, Leaf, LearnedPositions, MoE, Norm

BLOCK = ("attn_norm", "state", "attn", "attn_post_norm", "mlp_norm", "mlp", "mlp_post_norm")
DRAWN_IN = {"cross": "attn", "attn_gate": "attn", "mlp_gate": "mlp"}  # first word of a tensor's path -> its part


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a drawing. kind: what it is, among those that render.parts explains. words: its own numbers.

    params: in the whole model. each: in one block, None where blocks differ or outside them. blocks: how many have it,
    0 outside them. lines: how the numbers of one come about, each a product that was multiplied out and found equal;
    what a block holds of the part is the sum of what they say. fill: what stands in its formula's place.
    """

    kind: str
    words: str
    fill: str = ""
    params: int
    each: int | None = None
    blocks: int = 0
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """parts: by key, of BLOCK, "embed", "pos_embed", "embed_norm", "rotation", "norm", "head", "other"; a key that is
    not there is a part that is not.

    parallel: attention and feed-forward read the same input. after_sum: norms after a branch act on the sum (2017).
    uniform: whether all blocks are alike; else each part is drawn as most of the blocks that have it hold it, and words
    tell of all.
    """

    layers: int
    parallel: bool
    after_sum: bool
    uniform: bool
    parts: dict[str, Part]


class _Row(NamedTuple):
    """A part as it is read. lines: with the elements that each counts, 0 for what is no parameter."""

    key: str
    kind: str
    words: str
    lines: Iterable[tuple[str, int]] = ()
    layer: Layer | None = None
    fill: str = ""


def outline(model: Model) -> Outline:
    """Read `model` part by part; the parts' parameters sum to its total."""
    layers = model.distinct_layers()
    most = max(layers, key=lambda x: x[1])[0]
    inside = [(_sums(x.leaves()), n) for x, n in layers]
    outside = _sums(model.outer_leaves())
    parts: dict[str, Part] = {}
    for row in (*_outer(model), *_block(model)):
        here = [(sums.pop(row.key, 0), n) for sums, n in inside] if row.key in BLOCK else []
        alike = len({x for x, _ in here}) == 1
        own = (outside if row.layer is None else _sums(row.layer.leaves()))[row.key]
        parts[row.key] = Part(
            kind=row.kind, words=row.words, fill=row.fill, each=here[0][0] if alike else None,
            blocks=sum(n for x, n in layers if _has(x, row.key)), lines=_closed(tuple(row.lines), own),
            params=sum(x * n for x, n in here) + outside.pop(row.key, 0))
    left = outside.total() + sum(n * sums.total() for sums, n in inside)
    if left:
        names = dict.fromkeys([*outside, *(k for s, _ in inside for k in s)])
        parts["other"] = Part(kind="other", words=", ".join(names), params=left)
    return Outline(layers=model.n_layers, parallel=most.parallel, after_sum=most.post_residual,
                   uniform=len(layers) == 1, parts=parts)


def _closed(lines: Sequence[tuple[str, int]], own: int) -> tuple[str, ...]:
    """The lines, and one for what they leave out of the part's parameters in its block."""
    left = own - sum(n for _, n in lines)
    return (*(text for text, _ in lines), *([f"beside these: {left:,}"] if lines and left else []))


def _sums(leaves: Iterable[Leaf]) -> Counter[str]:
    """Parameters by the first word of the path."""
    out: Counter[str] = Counter()
    for leaf in leaves:
        if leaf.kind == "param":
            first = leaf.path.split(".")[0]
            out[DRAWN_IN.get(first, first)] += leaf.elements
    return out


def _has(layer: Layer, key: str) -> bool:
    if key == "rotation":
        return layer.attn is not None and (layer.attn.rope is not None or bool(getattr(layer.attn, "alibi", False)))
    return getattr(layer, key, None) is not None


def _outer(model: Model) -> Iterator[_Row]:
    embed, place = model.embed, model.positions
    yield _Row("embed", "embedding", f"{embed.vocab:,} x {embed.dim:,}",
               _product("table", (embed.vocab, embed.dim), _only(embed.leaves())), fill=embedding(model))
    if isinstance(place, LearnedPositions):
        yield _Row("pos_embed", "learned", f"{place.rows:,} x {place.dim:,}",
                   _product("table", (place.rows, place.dim), _only(place.leaves())))
    elif place is not None:
        yield _Row("pos_embed", "sinusoidal", "no parameters")
    if model.embed_norm:
        yield _Row("embed_norm", *_norm(model.embed_norm))
    if model.norm:
        yield _Row("norm", *_norm(model.norm))
    if model.tied:
        yield _Row("head", "tied", "the token embedding again", list(_vectors(model.head.leaves())), fill=logits(model))
    else:
        head = model.head
        yield _Row("head", "untied", f"{head.vocab:,} x {head.hidden:,}", [
            *_product("matrix", (head.vocab, head.hidden), _only(head.leaves())), *_vectors(head.leaves())],
            fill=logits(model))


def _block(model: Model) -> Iterator[_Row]:
    """Each part of a block, as most of the layers that have it hold it."""
    told = {f.name: f.text for f in features(model)}
    layers = model.distinct_layers()
    for key in (*BLOCK, "rotation"):
        have = [(x, n) for x, n in layers if _has(x, key)]
        if have:
            layer = max(have, key=lambda x: x[1])[0]
            yield _part(model, layer, key, told)._replace(layer=None if key == "rotation" else layer)


def _part(model: Model, layer: Layer, key: str, told: dict[str, str]) -> _Row:
    a, ff = layer.attn, layer.mlp
    if key.endswith("norm"):
        return _Row(key, *_norm(getattr(layer, key)))
    if key == "state":
        assert layer.state is not None
        return _Row(key, "state", attention(each_layer(model, lambda x: replace(x, attn=None))),
                    _matrices(layer.state.leaves()))
    if key == "mlp":
        assert ff is not None
        if isinstance(ff, MoE):
            whole = _sums(layer.leaves())[key]
            return _Row(key, "moe", told["feed-forward"], _experts(ff, whole))
        lines = [*_product("matrices", (3 if ff.gated else 2, ff.hidden, ff.ffn), _only(ff.leaves())),
                 *_vectors(ff.leaves())]
        return _Row(key, "gated" if ff.gated else "plain", told["feed-forward"], lines)
    assert a is not None
    if key == "rotation":
        return _rotation(model, a, told["positions"])
    words = attention(each_layer(model, lambda x: replace(x, state=None)))
    if isinstance(a, LatentAttention):
        return _Row(key, "mla", words, [*_matrices(a.leaves()), *_expanded(a), *_kept(model, layer)],
                    fill=softmax(a))
    kind = "mha" if a.n_kv_heads == a.n_heads else "mqa" if a.n_kv_heads == 1 else "gqa"
    return _Row(key, kind, words, [*_heads(a), *_kept(model, layer)], fill=softmax(a))


def _rotation(model: Model, a: Attention | LatentAttention, told: str) -> _Row:
    """pairs: of each rotation in the order they are told."""
    if a.rope is not None:
        ropes = [x.attn.rope for x, _ in model.distinct_layers() if x.attn is not None and x.attn.rope is not None]
        pairs = dict.fromkeys(f"{rope.dim // 2}" for rope in ropes)
        return _Row("rotation", "rope", f"{told}; {' and '.join(pairs)} pairs")
    assert isinstance(a, Attention)
    return _Row("rotation", "alibi", f"{a.n_heads} slopes")


def _norm(norm: Norm) -> tuple[str, str]:
    size = sum(leaf.elements for leaf in norm.leaves(""))
    vectors = size // norm.dim if norm.dim else 0
    said = {0: "no parameters", 1: f"{norm.dim:,} scales", 2: f"{norm.dim:,} scales and as many shifts"}
    layer = norm.kind == "layer"
    form = "-offset" if norm.offset else "-bare" if not size else "-scale" if layer and not norm.bias else ""
    words = said.get(vectors, f"{size:,} parameters") + (", added to 1" if norm.offset else "")
    return ("layernorm" if layer else "rmsnorm") + form, words


def _only(leaves: Sequence[Leaf]) -> int:
    return sum(leaf.elements for leaf in leaves if leaf.path.endswith("weight"))


def _product(what: str, factors: tuple[int, ...], equals: int, unit: str = "") -> list[tuple[str, int]]:
    """`what: a x b = c`, said only where it is so. With a unit it is no parameters."""
    if prod(factors) != equals:
        return []
    return [(f"{what}: {' x '.join(f'{f:,}' for f in factors)} = {equals:,}{unit}", 0 if unit else equals)]


def _heads(a: Attention) -> Iterator[tuple[str, int]]:
    """The projections of one block; without K and V where they are another layer's."""
    size = {leaf.path: leaf.elements for leaf in a.leaves()}
    for name, heads, word in (("q", a.n_heads, "query head"), ("k", a.n_kv_heads, "KV head"),
                              ("v", a.n_kv_heads, "KV head"), ("o", a.n_heads, "query head"),
                              ("gate", a.n_heads, "query head")):
        if f"{name}.weight" in size:
            many = f"{heads} {word}{'' if heads == 1 else 's'}"
            yield from _product(f"{name}, {many}", (heads, a.head_dim, a.hidden), size[f"{name}.weight"])
    yield from _vectors(a.leaves())


def _matrices(leaves: Sequence[Leaf]) -> Iterator[tuple[str, int]]:
    """Every matrix by its own name, then the vectors."""
    for leaf in leaves:
        if leaf.kind == "param" and len(leaf.shape) > 1:
            yield from _product(leaf.path.removesuffix(".weight"), leaf.shape, leaf.elements)
    yield from _vectors(leaves)


def _vectors(leaves: Sequence[Leaf]) -> Iterator[tuple[str, int]]:
    """Biases together, norms together, every other vector by its name."""
    sums: Counter[str] = Counter()
    for leaf in leaves:
        if leaf.kind == "param" and len(leaf.shape) == 1:
            word = "norms" if leaf.role == "norms" else "biases" if leaf.path.endswith(".bias") else leaf.path
            sums[word] += leaf.elements
    yield from ((f"{word}: {n:,}", n) for word, n in sums.items())


def _expanded(a: LatentAttention) -> Iterator[tuple[str, int]]:
    full, kept = a.cache().expand(), a.cache().elements
    if a.kv_rank + a.qk_rope == kept:
        held = f"a latent of {a.kv_rank:,} and a rotated key of {a.qk_rope:,}"
        yield f"kept: {held}, {kept:,} elements a token and layer", 0
    yield f"expanded, its {a.n_heads} heads would keep {full.elements:,} elements a token and layer", 0


def _kept(model: Model, layer: Layer) -> Iterator[tuple[str, int]]:
    """What one layer of this kind keeps, and all layers that keep something."""
    for c in layer.caches():
        if c.kind == "indexer":
            yield f"kept for its indexer: {c.elements:,} elements a token and layer", 0
        elif c.kind != "latent" and c.k_dim == c.v_dim:
            yield from _product("kept, K and V", (2, c.heads, c.k_dim), c.elements, " elements a token and layer")
    caches = [(c, n) for x, n in model.distinct_layers() for c in x.caches()]
    every = sum(n * c.elements for c, n in caches)
    own = sum(c.elements for c in layer.caches())
    unit = " elements a token" + (", until windows are full" if any(c.window for c, _ in caches) else "")
    if own and every == model.n_layers * own:
        yield from _product("kept in all layers", (model.n_layers, own), every, unit)
    elif every:
        yield f"kept in all layers: {every:,}{unit}", 0


def _experts(m: MoE, whole: int) -> Iterator[tuple[str, int]]:
    """One expert and all of them, what runs for every token, and what a token meets. whole: parameters of the part."""
    one, biases = _only(m.expert.leaves()), sum(x.elements for x in m.expert.leaves()) - _only(m.expert.leaves())
    matrices = 3 if m.expert.gated else 2
    yield from ((text, 0) for text, _ in _product("one expert", (matrices, m.expert.hidden, m.expert.ffn), one))
    yield from _product("all experts", (m.n_experts, one), m.n_experts * one)
    if biases:
        yield from _product("their biases", (m.n_experts, biases), m.n_experts * biases)
    beside = whole - m.n_experts * (one + biases)
    told = list(_beside(m))
    yield from told
    if left := beside - sum(n for _, n in told):
        yield f"beside these: {left:,}", left
    also = " and what stands beside them" if beside else ""
    yield f"run for a token: {m.top_k} of {m.n_experts} experts{also}, {m.top_k * (one + biases) + beside:,}", 0


def _beside(m: MoE) -> Iterator[tuple[str, int]]:
    """What runs for every token: the shared expert, the router, their gate and biases."""
    if m.shared is not None:
        yield from _product("shared expert", (3 if m.shared.gated else 2, m.shared.hidden, m.shared.ffn),
                            _only(m.shared.leaves()))
    rest = [x for x in m.leaves() if not x.path.startswith("experts.") and not (
        x.path.startswith("shared.") and x.path.endswith("weight"))]
    yield from _matrices(rest)
