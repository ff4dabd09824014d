"""A model as a drawing needs it: its parts in the order a token meets them, what each is, holds and keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from llamactl.spec.features import features
from llamactl.spec.latent import LatentAttention
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import MLP, Attention, Leaf, LearnedPositions, MoE, Norm

OUTER = ("embed", "pos_embed", "embed_norm", "norm", "head")
BLOCK = ("attn_norm", "attn", "attn_post_norm", "mlp_norm", "mlp", "mlp_post_norm")
MIXERS = {"cross": "attn", "state": "attn"}  # first word of a tensor's path -> the part it is drawn in


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a drawing. kind: what it is, among those that render.parts explains. words: its own numbers.

    params: in the whole model. each: in one block, None where blocks differ or outside them. lines: how the numbers
    come about, each a product that was multiplied out and found equal.
    """

    kind: str
    words: str
    params: int
    each: int | None = None
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """parts: by key, of OUTER, "rotation", "other" and BLOCK; a key that is not there is a part that is not.

    parallel: attention and feed-forward read the same input. after_sum: norms after a branch act on the sum (2017).
    uniform: whether all blocks are alike; else the drawing shows the most common one, and words tell of all.
    """

    layers: int
    parallel: bool
    after_sum: bool
    uniform: bool
    parts: dict[str, Part]


def outline(model: Model) -> Outline:
    """Read `model` part by part; the parts' parameters sum to its total."""
    told = {f.name: f.text for f in features(model)}
    layers = model.distinct_layers()
    layer = max(layers, key=lambda x: x[1])[0]
    inside = [(_sums(x.leaves()), n) for x, n in layers]
    outside = _sums(model.outer_leaves())
    parts: dict[str, Part] = {}
    for key, kind, words, lines in (*_outer(model), *_block(model, layer, told)):
        here = [(sums.pop(key, 0), n) for sums, n in inside] if key in BLOCK else []
        alike = len({x for x, _ in here}) == 1
        parts[key] = Part(kind=kind, words=words, lines=tuple(lines), each=here[0][0] if alike else None,
                          params=sum(x * n for x, n in here) + outside.pop(key, 0))
    left = outside.total() + sum(n * sums.total() for sums, n in inside)
    if left:
        parts["other"] = Part(kind="other", words="what the drawing leaves out: "
                              + ", ".join(dict.fromkeys([*outside, *(k for s, _ in inside for k in s)])), params=left)
    return Outline(layers=model.n_layers, parallel=layer.parallel, after_sum=layer.post_residual,
                   uniform=len(layers) == 1, parts=parts)


def _sums(leaves: Iterator[Leaf] | Sequence[Leaf]) -> Counter[str]:
    """Parameters by the first word of the path."""
    out: Counter[str] = Counter()
    for leaf in leaves:
        if leaf.kind == "param":
            first = leaf.path.split(".")[0]
            out[MIXERS.get(first, first)] += leaf.elements
    return out


_Row = tuple[str, str, str, list[str]]


def _outer(model: Model) -> Iterator[_Row]:
    embed, place = model.embed, model.positions
    yield ("embed", "embedding", f"{embed.vocab:,} x {embed.dim:,}",
           _product("table", (embed.vocab, embed.dim), _only(embed.leaves())))
    if isinstance(place, LearnedPositions):
        yield ("pos_embed", "learned", f"{place.rows:,} x {place.dim:,}",
               _product("table", (place.rows, place.dim), _only(place.leaves())))
    elif place is not None:
        yield "pos_embed", "sinusoidal", "no parameters", []
    if model.embed_norm:
        yield ("embed_norm", *_norm(model.embed_norm))
    if model.norm:
        yield ("norm", *_norm(model.norm))
    if model.tied:
        yield "head", "tied", "the token embedding again", []
    else:
        yield ("head", "untied", f"{model.head.vocab:,} x {model.head.hidden:,}",
               _product("matrix", (model.head.vocab, model.head.hidden), _only(model.head.leaves())))


def _block(model: Model, layer: Layer, told: dict[str, str]) -> Iterator[_Row]:
    for key in ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm"):
        norm: Norm | None = getattr(layer, key)
        if norm:
            yield (key, *_norm(norm))
    a = layer.attn
    if isinstance(a, LatentAttention):
        yield "attn", "mla", told["attention"], [*_latent(a), *_cached(model, layer)]
    elif a is not None:
        kind = "mha" if a.n_kv_heads == a.n_heads else "mqa" if a.n_kv_heads == 1 else "gqa"
        yield "attn", kind, told["attention"], [*_heads(a), *_cached(model, layer)]
    elif layer.state is not None:
        yield "attn", "state", told["attention"], []
    if a is not None and a.rope is not None:
        yield "rotation", "rope", _rotates(a.rope.theta, a.rope.dim, a.rope.scaling.kind if a.rope.scaling else ""), []
    elif isinstance(a, Attention) and a.alibi:
        yield "rotation", "alibi", f"{a.n_heads} slopes", []
    ff = layer.mlp
    if isinstance(ff, MoE):
        yield "mlp", "moe", told["feed-forward"], _experts(ff)
    elif ff is not None:
        yield "mlp", "gated" if ff.gated else "plain", told["feed-forward"], _mlp(ff)


def _rotates(theta: float, dim: int, scheme: str) -> str:
    return f"base {theta:,.10g}, {dim // 2} pairs" + (f", {scheme}" if scheme else "")


def _norm(norm: Norm) -> tuple[str, str, list[str]]:
    size = sum(leaf.elements for leaf in norm.leaves(""))
    vectors = size // norm.dim if norm.dim else 0
    said = {0: "no parameters", 1: f"{norm.dim:,} scales", 2: f"{norm.dim:,} scales and as many shifts"}
    return "layernorm" if norm.kind == "layer" else "rmsnorm", said.get(vectors, f"{size:,} parameters"), []


def _only(leaves: Sequence[Leaf]) -> int:
    return sum(leaf.elements for leaf in leaves if leaf.path.endswith("weight"))


def _product(what: str, factors: tuple[int, ...], equals: int, unit: str = "") -> list[str]:
    """`what: a x b = c`, said only where it is so."""
    if prod(factors) != equals:
        return []
    return [f"{what}: {' x '.join(f'{f:,}' for f in factors)} = {equals:,}{unit}"]


def _heads(a: Attention) -> list[str]:
    """The four projections of one block; without K and V where they are another layer's."""
    size = {leaf.path: leaf.elements for leaf in a.leaves()}
    out = []
    for name, heads, word in (("q", a.n_heads, "query heads"), ("k", a.n_kv_heads, "KV heads"),
                              ("v", a.n_kv_heads, "KV heads"), ("o", a.n_heads, "query heads")):
        if f"{name}.weight" in size:
            out += _product(f"{name}, {heads} {word}", (heads, a.head_dim, a.hidden), size[f"{name}.weight"])
    bias = sum(n for path, n in size.items() if path.endswith(".bias") and "norm" not in path)
    return [*out, *([f"biases: {bias:,}"] if bias else [])]


def _latent(a: LatentAttention) -> list[str]:
    full, kept = a.cache().expand(), a.cache().elements
    held = f"kept: a latent of {a.kv_rank:,} and a rotated key of {a.qk_rope:,}, {kept:,} elements a token and layer"
    return [*([held] if a.kv_rank + a.qk_rope == kept else []),
            f"expanded, its {a.n_heads} heads would keep {full.elements:,} elements a token and layer"]


def _cached(model: Model, layer: Layer) -> list[str]:
    """What one layer of this kind keeps, and all layers that keep something."""
    kept = [c for c in layer.caches() if c.kind != "indexer"]
    every = sum(n * c.elements for x, n in model.distinct_layers() for c in x.caches())
    out = []
    for c in kept:
        if c.kind != "latent" and c.k_dim == c.v_dim:
            out += _product("kept, K and V", (2, c.heads, c.k_dim), c.elements, " elements a token and layer")
    if len(kept) == 1 and every == model.n_layers * kept[0].elements:
        out += _product("kept in all layers", (model.n_layers, kept[0].elements), every, " elements a token")
    elif every:
        out.append(f"kept in all layers: {every:,} elements a token")
    return out


def _mlp(m: MLP) -> list[str]:
    size = sum(leaf.elements for leaf in m.leaves() if leaf.path.endswith("weight"))
    bias = sum(leaf.elements for leaf in m.leaves()) - size
    lines = _product("matrices", (3 if m.gated else 2, m.hidden, m.ffn), size)
    return [*lines, *([f"biases: {bias:,}"] if bias else [])]


def _experts(m: MoE) -> list[str]:
    one = sum(leaf.elements for leaf in m.expert.leaves() if leaf.path.endswith("weight"))
    lines = [*_product("one expert", (3 if m.expert.gated else 2, m.expert.hidden, m.expert.ffn), one),
             *_product("all experts", (m.n_experts, one), m.n_experts * one)]
    return [*lines, *_product("run for a token", (m.top_k, one), m.top_k * one)]
