"""Does a model fit on these devices, how far, and how fast at best: weights, cache, activations, overhead, roofline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from llamactl.analysis.dtypes import silent, unknown_dtype, weights_dtype
from llamactl.analysis.flops import flops
from llamactl.analysis.kvcache import cost_of, past
from llamactl.errors import InputRefused, UsageError
from llamactl.spec.dtype import DType, find_dtype
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import MLP, Attention, Leaf, MoE

MOST = 1 << 32  # tokens or sequences past which no search goes


class Device(Protocol):
    """What fit needs to know of an accelerator; see source.gpus.Gpu."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def bandwidth(self) -> float | None: ...
    @property
    def rates(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """What `llamactl fit` says of one model on `devices` equal devices. All bytes are those of one device.

    activations_bytes: the widest layer's working set for `step` tokens, and fp32 logits of the batch. overhead_bytes:
    runtime context and fragmentation, as stated. max_ctx: the longest context for this batch, max_batch: the largest
    batch at this context, both by the exact cache and 0 where not even one fits; at most 2^32. Rates are upper bounds
    by memory traffic and arithmetic, without communication; None where the device's numbers are not known.
    """

    id: str
    family: str
    model_type: str
    gpu: str
    devices: int
    tp: int
    memory_bytes: int
    ctx: int
    batch: int
    weights_dtype: str
    kv_dtype: str
    weights_bytes: int
    kv_cache_bytes: int
    state_bytes: int
    activations_bytes: int
    overhead_bytes: int
    total_bytes: int
    free_bytes: int
    fits: bool
    max_ctx: int
    max_batch: int
    decode_tokens_per_s: float | None
    decode_bound: str | None
    prefill_seconds: float | None
    prefill_bound: str | None
    step: int
    notes: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the names that schema 1 fixes."""
        return asdict(self)

    def _repr_html_(self) -> str:
        from llamactl.render import html

        return html("fit", [self])


def fit(
    model: Model,
    gpu: Device,
    devices: int,
    ctx: int,
    *,
    batch: int = 1,
    weights: str | None = None,
    kv: str | None = None,
    tp: int | None = None,
    overhead: int = 1 << 30,
    step: int = 2048,
    id: str | None = None,
) -> FitReport:
    """Judge `model` on `devices` of `gpu` at `ctx` tokens x `batch`. tp: devices per copy of the model, default all.

    weights, kv: dtypes, default the config's. overhead: bytes a device keeps for itself. step: tokens computed at once.
    Raises UsageError where tp does not divide the devices or the heads.
    """
    tp = devices if tp is None else tp
    if devices % tp:
        raise UsageError("tp", f"{devices} devices are no multiple of {tp}, the devices of one copy of the model")
    w = _dtype(weights, model)
    k = _dtype(kv, model)
    copies = devices // tp
    share = -(-batch // copies)  # sequences of the busiest copy
    cost, state = cost_of(model, k, tp)
    held = sharded_bytes(model, w, tp)

    def total(c: int, b: int) -> int:
        return held + cost(c, b) + state * b + activations(model, min(step, c * b), b, w, tp) + overhead

    used = total(ctx, share)
    speed = _Roofline(model, gpu, ctx, share, w, k, tp, held)
    return FitReport(
        id=id or model.model_type, family=model.family, model_type=model.model_type, gpu=gpu.name, devices=devices,
        tp=tp, memory_bytes=gpu.memory_bytes, ctx=ctx, batch=batch, weights_dtype=w.name, kv_dtype=k.name,
        weights_bytes=held, kv_cache_bytes=cost(ctx, share), state_bytes=state * share,
        activations_bytes=activations(model, min(step, ctx * share), share, w, tp), overhead_bytes=overhead,
        total_bytes=used, free_bytes=gpu.memory_bytes - used, fits=used <= gpu.memory_bytes,
        max_ctx=largest(lambda c: total(c, share) <= gpu.memory_bytes),
        max_batch=copies * largest(lambda b: total(ctx, b) <= gpu.memory_bytes),
        decode_tokens_per_s=speed.decode_rate(copies), decode_bound=speed.decode_bound,
        prefill_seconds=speed.prefill, prefill_bound=speed.prefill_bound, step=step,
        notes=(*past(model, [ctx]), *silent(model, weights, "--weights-dtype")))


def largest(fits: Callable[[int], bool]) -> int:
    """The largest n in 1..2^32 for which `fits` holds, 0 for none; fits must not come back once it is lost."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= MOST and fits(high):
        low, high = high, high * 2
    high = min(high, MOST + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def sharded_bytes(model: Model, dtype: DType, tp: int) -> int:
    """Weights that one of `tp` devices holds: matrices are cut, norms, routers and latent down-projections repeated."""
    elements = sum(n * sum(_local(leaf, layer, tp) for leaf in layer.leaves())
                   for layer, n in model.distinct_layers())
    elements += sum(-(-leaf.elements // tp) if leaf.role in ("token_embedding", "lm_head") else leaf.elements
                    for leaf in model.outer_leaves())
    return dtype.bytes(elements)


def _local(leaf: Leaf, layer: Layer, tp: int) -> int:
    if leaf.role in ("attention.k", "attention.v") and isinstance(layer.attn, Attention):
        kv = layer.attn.n_kv_heads
        return leaf.elements // kv * max(1, kv // tp)
    if leaf.role in ("norms", "feed_forward.router", "attention.other") or leaf.path.startswith("attn.q_a"):
        return leaf.elements
    return -(-leaf.elements // tp)


def activations(model: Model, tokens: int, batch: int, dtype: DType, tp: int) -> int:
    """tokens x (2 x hidden + the widest branch, cut over tp) in `dtype`, and batch x vocabulary logits in fp32."""
    widest = 0
    for layer, _ in model.distinct_layers():
        a, ff = layer.attn, layer.mlp
        if isinstance(a, Attention):
            widest = max(widest, (2 * a.n_heads + 2 * a.n_kv_heads) * a.head_dim)
        if isinstance(ff, MLP):
            widest = max(widest, (2 if ff.gated else 1) * ff.ffn)
        if isinstance(ff, MoE):
            widest = max(widest, ff.top_k * 2 * ff.expert.ffn + (2 * ff.shared.ffn if ff.shared else 0))
    plain = dtype if dtype.block == 1 and dtype.block_bytes >= 2 else _named("bf16")
    return plain.bytes(tokens * (2 * model.hidden + -(-widest // tp))) + 4 * batch * -(-model.head.vocab // tp)


class _Roofline:
    """Upper bounds from one device's memory traffic and arithmetic; communication is left out."""

    def __init__(self, model: Model, gpu: Device, ctx: int, batch: int, w: DType, k: DType, tp: int,
                 held: int) -> None:
        rate = gpu.rates.get(w.name) or gpu.rates.get("bf16")
        self.batch = batch
        self.decode_time = self.prefill = None
        self.decode_bound = self.prefill_bound = None
        if gpu.bandwidth is None:
            return
        try:
            one = flops(model, ctx, phase="decode", batch=batch)
        except InputRefused:  # its operations are not counted, so no speed is claimed either
            return
        scale = held / max(1, weights_dtype(model, None)[0].bytes(model.total()))
        cost, state = cost_of(model, k, tp)
        moved = one.weights_bytes_read * scale + cost(ctx, batch) + state * batch
        self.decode_time, self.decode_bound = _slower(moved / gpu.bandwidth, one.total / tp / rate if rate else None)
        if rate:
            prompt = flops(model, ctx, phase="prefill", batch=batch)
            self.prefill, self.prefill_bound = _slower((held + cost(ctx, batch)) / gpu.bandwidth,
                                                       prompt.total / tp / rate)

    def decode_rate(self, copies: int) -> float | None:
        """Tokens a second over all sequences of all copies."""
        return self.batch * copies / self.decode_time if self.decode_time else None


def _slower(memory: float, arithmetic: float | None) -> tuple[float, str]:
    if arithmetic is not None and arithmetic > memory:
        return arithmetic, "arithmetic"
    return memory, "memory bandwidth"


def _dtype(word: str | None, model: Model) -> DType:
    if word is None:
        return weights_dtype(model, None)[0]
    found = find_dtype(word)
    if found is None:
        raise unknown_dtype(word)
    return found


def _named(name: str) -> DType:
    found = find_dtype(name)
    assert found is not None
    return found
