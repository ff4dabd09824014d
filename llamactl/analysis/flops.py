"""Floating-point operations of a forward pass, part by part; a multiply-add is two.

Matrix products and convolutions are counted, as torch's FlopCounterMode counts them; norms, softmax, activations,
rotations and embedding look-ups are not products and are left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from llamactl.analysis.dtypes import silent, weights_dtype
from llamactl.analysis.kvcache import past
from llamactl.errors import InputRefused, UsageError
from llamactl.spec.latent import LatentAttention
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import Attention, MoE

PHASES = ("prefill", "decode")
_PART = {"attention.q": "q", "attention.k": "k", "attention.v": "v", "attention.o": "o",
         "attention.other": "attention other", "feed_forward.gate": "gate", "feed_forward.up": "up",
         "feed_forward.down": "down", "feed_forward.router": "router",
         "feed_forward.routed_experts": "routed experts", "feed_forward.shared_experts": "shared experts",
         "state_space": "state space projections", "other": "other"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsReport:
    """What `llamactl flops` says of one model, for `batch` sequences.

    phase prefill: `tokens` new tokens each, logits at every position. decode: one new token each, the `tokens`-th, over
    a cache of those before. parts sum to total. total counts causal pairs of positions exactly; total_full_attention
    counts the whole S x S square, as eager attention computes it. mla: the total with the latent expanded to every
    head's K and V, and with the projections absorbed into the query; None without latent attention.
    weights_bytes_read: the parameters that these tokens touch, once. intensity: total over all bytes read.
    """

    id: str
    family: str
    model_type: str
    phase: str
    tokens: int
    batch: int
    parts: dict[str, int]
    total: int
    total_full_attention: int
    per_token: float
    mla: dict[str, int] | None
    mla_counted: str | None
    weights_bytes_read: int
    cache_bytes_read: int
    intensity: float
    dtype: str
    not_counted: tuple[str, ...]
    notes: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the names that schema 1 fixes."""
        return asdict(self)

    def _repr_html_(self) -> str:
        from llamactl.render import html

        return html("flops", [self])


def pairs(tokens: int, window: int | None, chunked: bool, phase: str) -> int:
    """(query, key) pairs that a causal layer computes for one head.

    prefill: 1 + 2 + ... + tokens, each term at most the window. decode: the last of those terms.
    """
    if phase == "decode":
        if window is None:
            return tokens
        return (tokens - 1) % window + 1 if chunked else min(tokens, window)
    if window is None or tokens <= window:
        return tokens * (tokens + 1) // 2
    if chunked:
        whole, rest = divmod(tokens, window)
        return whole * window * (window + 1) // 2 + rest * (rest + 1) // 2
    return window * (window + 1) // 2 + (tokens - window) * window


def flops(model: Model, tokens: int, *, phase: str = "prefill", batch: int = 1, id: str | None = None) -> FlopsReport:
    """Count `model` over `tokens` positions.

    Raises UsageError for an unknown phase, InputRefused for a model with products that are not described.
    """
    if phase not in PHASES:
        raise UsageError("phase", f"{phase!r} is neither prefill nor decode")
    _judgeable(model, id)
    new = tokens if phase == "prefill" else 1
    square = tokens * tokens if phase == "prefill" else tokens
    latent = any(isinstance(layer.attn, LatentAttention) for layer in model.layers)
    ways = {way: _count(model, tokens, new, phase, way) for way in ("expanded", "absorbed")}
    counted = "expanded" if phase == "prefill" else "absorbed"
    parts = ways[counted]
    full = _count(model, tokens, new, phase, counted, square)
    total = sum(parts.values()) * batch
    weights, cache = elements_read(model, tokens, new, batch)
    dtype, _ = weights_dtype(model, None)
    moved = dtype.bytes(weights) + dtype.bytes(cache)
    state = any(layer.state for layer in model.layers)
    return FlopsReport(
        id=id or model.model_type, family=model.family, model_type=model.model_type, phase=phase, tokens=tokens,
        batch=batch, parts={k: v * batch for k, v in parts.items()}, total=total,
        total_full_attention=sum(full.values()) * batch, per_token=total / (new * batch),
        mla={w: sum(p.values()) * batch for w, p in ways.items()} if latent else None,
        mla_counted=counted if latent else None, weights_bytes_read=dtype.bytes(weights),
        cache_bytes_read=dtype.bytes(cache), intensity=total / moved, dtype=dtype.name,
        not_counted=("the recurrence of state-space layers",) if state else (),
        notes=(*past(model, [tokens]), *silent(model, None, "")))


def _judgeable(model: Model, id: str | None) -> None:
    """Refuse what has products that nothing here describes: sparse patterns, and one family's own parts."""
    why = None
    if model.extra or any(layer.extra for layer in model.layers):
        why = "it has parts of its own beside attention and feed-forward"
    elif any(isinstance(x.attn, Attention) and x.attn.sparse for x in model.layers):
        why = "its attention is block-sparse"
    elif any(isinstance(x.attn, LatentAttention) and x.attn.indexer for x in model.layers):
        why = "an indexer chooses the tokens its attention reads"
    if why:
        raise InputRefused("flops-unsupported", f"operations are not counted for this model: {why}", path=id)


def _count(model: Model, tokens: int, new: int, phase: str, way: str, square: int | None = None) -> Counter[str]:
    """Flops by part for one sequence. square: pairs to charge every layer with, instead of the causal ones."""
    out: Counter[str] = Counter()
    for layer, n in model.distinct_layers():
        for part, value in _layer(layer, tokens, new, phase, way, square).items():
            out[part] += n * value
    out["output head"] = 2 * new * model.head.vocab * model.head.hidden
    return out


def _layer(layer: Layer, tokens: int, new: int, phase: str, way: str, square: int | None) -> Counter[str]:
    out: Counter[str] = Counter()
    for leaf in layer.leaves():
        if leaf.kind != "param" or len(leaf.shape) < 2 or not leaf.path.endswith(".weight") or leaf.role == "norms":
            continue
        if isinstance(layer.attn, LatentAttention) and leaf.path in ("attn.k_b.weight", "attn.v_b.weight"):
            continue
        used = leaf.elements
        if leaf.role == "feed_forward.routed_experts" and isinstance(layer.mlp, MoE):
            used = leaf.elements // layer.mlp.n_experts * layer.mlp.top_k
        out[_PART[leaf.role]] += 2 * new * used
    a = layer.attn
    if isinstance(a, Attention):
        n = square if square is not None else pairs(tokens, a.window, a.window_kind == "chunked", phase)
        out["attention scores"] += 2 * a.n_heads * a.head_dim * n
        out["attention values"] += 2 * a.n_heads * a.head_dim * n
    elif isinstance(a, LatentAttention):
        out.update(_latent(a, tokens, new, square if square is not None else pairs(tokens, None, False, phase), way))
    return out


def _latent(a: LatentAttention, tokens: int, new: int, n: int, way: str) -> Counter[str]:
    """Expanded: K and V of all `tokens` rebuilt from the latent, scores over qk_nope + qk_rope.

    Absorbed: k_b is applied to the query and v_b to the mixed latent, so scores and values run over the latent itself.
    """
    k_b, v_b = a.n_heads * a.qk_nope * a.kv_rank, a.n_heads * a.v_dim * a.kv_rank
    if way == "expanded":
        return Counter({"k": 2 * tokens * k_b, "v": 2 * tokens * v_b,
                        "attention scores": 2 * a.n_heads * (a.qk_nope + a.qk_rope) * n,
                        "attention values": 2 * a.n_heads * a.v_dim * n})
    return Counter({"k": 2 * new * k_b, "v": 2 * new * v_b,
                    "attention scores": 2 * a.n_heads * (a.kv_rank + a.qk_rope) * n,
                    "attention values": 2 * a.n_heads * a.kv_rank * n})


def elements_read(model: Model, tokens: int, new: int, batch: int) -> tuple[int, int]:
    """(parameters read, cache elements read). Of the routed experts, at most top_k a token are read."""
    weights = cache = 0
    for layer, n in model.distinct_layers():
        for leaf in layer.leaves():
            used = leaf.elements
            if leaf.role == "feed_forward.routed_experts" and isinstance(layer.mlp, MoE):
                hit = min(layer.mlp.n_experts, layer.mlp.top_k * new * batch)
                used = leaf.elements // layer.mlp.n_experts * hit
            weights += n * used
        for c in layer.caches():
            cache += n * batch * c.elements * min(tokens, c.window or tokens)
    head = model.head.vocab * model.head.hidden  # tied or not, it is read once; of the embedding only some rows
    norms = sum(leaf.elements for leaf in model.outer_leaves() if leaf.role in ("norms", "other"))
    return weights + head + norms, cache
