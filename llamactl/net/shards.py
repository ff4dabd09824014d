"""What one of several processes holds of a model: a smaller Model, and which slice of each whole tensor its own are.

Heads go by whole groups of a KV head, as evenly as they come (3 groups on 2 ranks: 1 and 2); with more ranks than KV
heads, ranks share one, each with some of its query heads. Feed-forwards are cut along their inner width, every expert
of a mixture too; the table and the head along the vocabulary. Everything else is whole on every rank.

A rank's share is a Model of its own, so `build` makes its network and nothing is written twice; the one addition is the
sum over ranks after each branch (net.parallel). (torch's DTensor wants even shares, and 3 groups on 2 ranks have none.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from llamactl.errors import UsageError
from llamactl.spec.latent import LatentAttention
from llamactl.spec.model import Layer, Model, Tensor
from llamactl.spec.parts import MLP, Attention, FeedForward, Mixer, MoE, Norm


class Cut(NamedTuple):
    """Which part of a tensor: rows or columns start..stop, the tensors numbered start..stop of a row of them, or none:
    zeros, because rank 0 adds this bias for all."""

    kind: str
    start: int = 0
    stop: int = 0


class Slice(NamedTuple):
    """Where one tensor of a share comes from. name: the whole one's, canonical. cut: None for all of it."""

    name: str
    cut: Cut | None = None


class Heads(NamedTuple):
    """Query heads first..stop and KV heads kv_first..kv_stop of one rank. owns: it is the first rank with those."""

    first: int
    stop: int
    kv_first: int
    kv_stop: int
    owns: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The share of rank `rank` of `world`. slices: of each of `model`'s tensors. vocab: the rows of its logits."""

    rank: int
    world: int
    model: Model
    slices: Mapping[str, Slice]
    vocab: tuple[int, int]


Cuts = dict[str, Cut]


def span(n: int, rank: int, world: int) -> tuple[int, int]:
    """The part of n things that `rank` gets: their numbers differ by one at most."""
    return n * rank // world, n * (rank + 1) // world


def heads(n_heads: int, n_kv_heads: int, rank: int, world: int) -> Heads:
    """The heads of one rank; each has at least one query head while world <= n_heads."""
    group = n_heads // n_kv_heads
    if world <= n_kv_heads:
        a, b = span(n_kv_heads, rank, world)
        return Heads(a * group, b * group, a, b, True)
    kv = ((rank + 1) * n_kv_heads - 1) // world  # the last group whose ranks begin here or before
    begin, end = span(world, kv, n_kv_heads)
    a, b = span(group, rank - begin, end - begin)
    return Heads(kv * group + a, kv * group + b, kv, kv + 1, rank == begin)


def spread(norm: Norm | None, n_heads: int, head_dim: int) -> bool:
    """Whether a norm is taken over all heads at once, so that ranks must agree on its mean."""
    return norm is not None and not norm.heads and n_heads > 1 and norm.dim == n_heads * head_dim


def shard(model: Model, rank: int, world: int) -> Shard:
    """The share of `rank` in a world of ranks. Raises UsageError (tp-range) where a rank would have nothing to do."""
    most, what = largest(model)
    if not 1 <= world <= most:
        raise UsageError("tp-range", f"{world} processes, but there are {most} {what} to share among them",
                         help=f"at most --tp {most}")
    made = {layer: _layer(layer, rank, world) for layer, _ in model.distinct_layers()}
    a, b = span(model.embed.vocab, rank, world)
    c, d = (a, b) if model.head.tied else span(model.head.vocab, rank, world)
    local = replace(model, embed=replace(model.embed, vocab=b - a), head=replace(model.head, vocab=d - c), sections=(),
                    layers=tuple(made[layer][0] for layer in model.layers))
    outer = {"embed.weight": Cut("rows", a, b), "head.weight": Cut("rows", c, d), "head.bias": Cut("rows", c, d)}
    cuts = [made[layer][1] for layer in model.layers]
    slices = {t.name: _slice(t, outer if t.i < 0 else cuts[t.i]) for t in local.tensors()}
    return Shard(rank=rank, world=world, model=local, slices=slices, vocab=(c, d))


def largest(model: Model) -> tuple[int, str]:
    """The most ranks that all have something to do in every layer, and what there are so many of."""
    counts = [(model.embed.vocab, "tokens in the vocabulary"), (model.head.vocab, "tokens in the vocabulary")]
    for layer, _ in model.distinct_layers():
        if layer.attn is not None:
            counts.append((layer.attn.n_heads, "attention heads"))
        mlp = layer.mlp
        inner = (mlp,) if isinstance(mlp, MLP) else (mlp.expert, mlp.shared) if isinstance(mlp, MoE) else ()
        counts += [(m.ffn, "columns in a feed-forward") for m in inner if m is not None]
    return min(counts)


def _slice(t: Tensor, cuts: Cuts) -> Slice:
    cut = cuts.get(t.template.removeprefix("layers.{i}."))
    if cut is not None and cut.kind == "numbers":
        return Slice(t.template.replace("{i}", str(t.i)).replace("{e}", str(t.e + cut.start)))
    return Slice(t.name, cut)


@lru_cache(maxsize=1024)
def _layer(layer: Layer, rank: int, world: int) -> tuple[Layer, Cuts]:
    """A layer's share, and the cuts of its tensors by path."""
    attn, of_attn = _mixer(layer.attn, rank, world)
    mlp, of_mlp = _feed_forward(layer.mlp, rank, world)
    cuts = {**{f"attn.{path}": cut for path, cut in of_attn.items()},
            **{f"mlp.{path}": cut for path, cut in of_mlp.items()}}
    return replace(layer, attn=attn, mlp=mlp), cuts


def _mixer(part: Mixer | None, rank: int, world: int) -> tuple[Mixer | None, Cuts]:
    if part is None:
        return None, {}
    return _latent(part, rank, world) if isinstance(part, LatentAttention) else _attention(part, rank, world)


def _attention(part: Attention, rank: int, world: int) -> tuple[Attention, Cuts]:
    h = heads(part.n_heads, part.n_kv_heads, rank, world)
    d = part.head_dim
    q, kv = Cut("rows", h.first * d, h.stop * d), Cut("rows", h.kv_first * d, h.kv_stop * d)
    cuts = dict(_linears(("q", "gate"), q))
    cuts |= dict(_linears(("k", "v"), kv))
    cuts |= {"o.weight": Cut("columns", q.start, q.stop), "sinks": Cut("rows", h.first, h.stop)} | _added("o", rank)
    norms: dict[str, Any] = {}
    for name, norm, n, first, stop in (("q_norm", part.q_norm, part.n_heads, h.first, h.stop),
                                       ("k_norm", part.k_norm, part.n_kv_heads, h.kv_first, h.kv_stop)):
        norms[name] = norm
        if norm is not None and norm.heads:
            norms[name] = replace(norm, heads=stop - first)
            cuts |= {f"{name}.{{e}}.{leaf}": Cut("numbers", first, stop) for leaf in ("weight", "bias")}
        elif norm is not None and spread(norm, n, d):
            norms[name] = replace(norm, dim=(stop - first) * d)
            cuts |= dict(_linears((name,), Cut("rows", first * d, stop * d)))
    return replace(part, n_heads=h.stop - h.first, n_kv_heads=h.kv_stop - h.kv_first, **norms), cuts


def _latent(part: LatentAttention, rank: int, world: int) -> tuple[LatentAttention, Cuts]:
    """The latent and the rotated key are whole on each rank, and so is its cache; heads are cut."""
    a, b = span(part.n_heads, rank, world)
    widths = {"q": part.qk_nope + part.qk_rope, "q_b": part.qk_nope + part.qk_rope, "k_b": part.qk_nope,
              "v_b": part.v_dim}
    cuts = {f"{name}.weight": Cut("rows", a * width, b * width) for name, width in widths.items()}
    cuts |= {"o.weight": Cut("columns", a * part.v_dim, b * part.v_dim)} | _added("o", rank)
    return replace(part, n_heads=b - a), cuts


def _feed_forward(part: FeedForward | None, rank: int, world: int) -> tuple[FeedForward | None, Cuts]:
    if part is None or isinstance(part, MLP):
        return (None, {}) if part is None else _mlp(part, rank, world)
    expert, of_expert = _mlp(part.expert, rank, world)
    cuts = {f"experts.{{e}}.{path}": cut for path, cut in of_expert.items()}
    shared = None
    if part.shared is not None:
        shared, of_shared = _mlp(part.shared, rank, world)
        cuts |= {f"shared.{path}": cut for path, cut in of_shared.items()}
    return replace(part, expert=expert, shared=shared), cuts


def _mlp(part: MLP, rank: int, world: int) -> tuple[MLP, Cuts]:
    a, b = span(part.ffn, rank, world)
    cuts = dict(_linears(("gate", "up"), Cut("rows", a, b)))
    cuts |= {"down.weight": Cut("columns", a, b)} | _added("down", rank)
    return replace(part, ffn=b - a), cuts


def _linears(names: tuple[str, ...], rows: Cut) -> Iterator[tuple[str, Cut]]:
    return ((f"{name}.{leaf}", rows) for name in names for leaf in ("weight", "bias"))


def _added(name: str, rank: int) -> Cuts:
    """The bias of a sum over ranks, which rank 0 alone adds."""
    return {f"{name}.bias": Cut("zeros")} if rank else {}
