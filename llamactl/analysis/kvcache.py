"""Bytes that attention keeps per token, per layer group, at a context: 2 x layers x n_kv_heads x head_dim elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from llamactl.analysis.dtypes import named, silent, unknown_dtype, weights, weights_dtype
from llamactl.analysis.engines import ENGINES, Engine
from llamactl.analysis.layers import Ranges, ranges
from llamactl.errors import UsageError
from llamactl.spec.dtype import DType, find_dtype
from llamactl.spec.model import Model
from llamactl.spec.parts import Attention, Cache

WINDOWED = ("sliding", "chunked")
STATE_TP = "how engines split a recurrent state over devices differs, so --tp is not costed for this model"

@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Layers that cache alike. kind: full | sliding | chunked | latent.

    heads x (k_dim + v_dim) elements per token and layer; elements_per_token is the sum over the group's `layers`.
    bytes_per_token: of the whole group, on one device. share: of the cache at the last context.
    """

    kind: str
    layers: int
    layer_ranges: Ranges
    window: int | None
    heads: int
    k_dim: int
    v_dim: int
    elements_per_token: int
    bytes_per_token: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KvAt:
    """The cache of `batch` sequences of `ctx` tokens each, in bytes on one device."""

    ctx: int
    batch: int
    k_dtype: str
    v_dtype: str
    kv_cache_bytes: int
    state_bytes: int
    full_heads_bytes: int
    group_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheReport:
    """What `llamactl kv-cache` says of one model.

    elements_per_token_full / _windowed: over all layers without and with a window. state_elements: fixed, per sequence,
    costed in the model's dtype.
    full_heads_ratio: elements if every query head kept its own K and V, over the elements kept.
    bytes_per_token: None where the cache no longer grows in proportion at the last context (a window is full, pages
    are padded). tp: devices the KV heads are spread over; all bytes are then those of one device.
    """

    id: str
    family: str
    model_type: str
    groups: tuple[KvGroup, ...]
    elements_per_token_full: int
    elements_per_token_windowed: int
    state_elements: int
    k_dtype: str
    v_dtype: str
    engine: str
    definition: str
    tp: int
    weights_bytes: int
    weights_dtype: str
    full_heads_ratio: float
    at: tuple[KvAt, ...]
    bytes_per_token: int | None
    trained_context: int | None
    usable_context: int | None
    context_why: str
    kv_shared_layers: int
    expanded: bool
    notes: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the names that schema 1 fixes."""
        return asdict(self)

    def _repr_html_(self) -> str:
        from llamactl.render import html

        return html("kv-cache", [self])


class _Group(NamedTuple):
    """Equal layers: what one of them keeps, as a whole (`cache`) and on one device (`local`)."""

    cache: Cache
    local: Cache
    where: Ranges
    layers: int


def kv_cache(
    model: Model,
    ctx: int | Sequence[int],
    *,
    batch: int | Sequence[int] = 1,
    dtype: str | Sequence[str | None] | None = None,
    k_dtype: str | None = None,
    v_dtype: str | None = None,
    tp: int = 1,
    engine: str = "arch",
    step: int | None = None,
    expanded: bool = False,
    id: str | None = None,
) -> KvCacheReport:
    """Cost the cache of `model` at every ctx x batch x dtype.

    dtype: of K and V, default the config's. tp: devices that share the KV heads. step: see Engine.
    expanded: keep MLA's K and V of every head instead of the latent.
    Raises UsageError where an engine does not have a dtype, or tp does not divide the heads.
    """
    contexts = [ctx] if isinstance(ctx, int) else list(ctx)
    batches = [batch] if isinstance(batch, int) else list(batch)
    words = [dtype] if dtype is None or isinstance(dtype, str) else list(dtype)
    e = find_engine(engine)
    step = (e.step or 0) if step is None else step
    pairs = [_dtypes(model, e, k_dtype or word, v_dtype or word) for word in words]
    groups = _groups(model, e, tp, expanded)
    state = sum(n * layer.state_elements() for layer, n in model.distinct_layers())
    if state and tp > 1:
        raise UsageError("tp", STATE_TP)
    state_bytes = weights_dtype(model, None)[0].bytes(state)
    at = tuple(_at(groups, e, step, c, n, k, v, state_bytes) for k, v in pairs for n in batches for c in contexts)
    k, v = pairs[-1]
    last = at[-1]
    per_token = [g.layers * token_bytes(g.local, k, v) for g in groups]
    linear = last.kv_cache_bytes == last.ctx * last.batch * sum(per_token)
    windowed = sum(g.layers * g.cache.elements for g in groups if g.cache.kind in WINDOWED)
    kept = sum(g.layers * g.cache.elements for g in groups)
    full = sum(g.layers * g.cache.expand().elements for g in groups)
    beside = weights(model, None)
    shared = sum(isinstance(x.attn, Attention) and x.attn.shares_kv for x in model.layers)
    return KvCacheReport(
        id=id or model.model_type, family=model.family, model_type=model.model_type,
        groups=tuple(
            KvGroup(kind=g.cache.kind, layers=g.layers, layer_ranges=g.where, window=g.cache.window,
                    heads=g.cache.heads, k_dim=g.cache.k_dim, v_dim=g.cache.v_dim,
                    elements_per_token=g.layers * g.cache.elements, bytes_per_token=b,
                    share=part / last.kv_cache_bytes if last.kv_cache_bytes else 0.0)
            for g, b, part in zip(groups, per_token, last.group_bytes, strict=True)),
        elements_per_token_full=kept - windowed, elements_per_token_windowed=windowed, state_elements=state,
        k_dtype=k.name, v_dtype=v.name, engine=e.name, definition=e.definition.format(step=step), tp=tp,
        weights_bytes=beside.bytes, weights_dtype=beside.dtype,
        full_heads_ratio=full / kept if kept else 1.0, at=at, bytes_per_token=sum(per_token) if linear else None,
        trained_context=model.context.trained, usable_context=model.context.usable, context_why=model.context.why,
        kv_shared_layers=shared, expanded=expanded,
        notes=(*_notes(groups, k, v), *past(model, contexts),
               *silent(model, e.default_dtype or words[0] or k_dtype)),
    )


def cost_of(model: Model, dtype: DType, tp: int = 1) -> tuple[Callable[[int, int], int], int]:
    """(bytes of the cache on one device as a function of (ctx, batch), bytes of fixed state per sequence)."""
    e = find_engine("arch")
    groups = _groups(model, e, tp, False)

    def cost(ctx: int, batch: int) -> int:
        return sum(g.layers * e.cells(g.cache, ctx, batch, 0) * token_bytes(g.local, dtype, dtype) for g in groups)

    state = sum(n * layer.state_elements() for layer, n in model.distinct_layers())
    if state and tp > 1:
        raise UsageError("tp", STATE_TP)
    return cost, weights_dtype(model, None)[0].bytes(state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """A group of layers as the numbers its cost is made of: bytes[dtype] x batch x min(ctx, window) in all its layers.

    full_bytes: the same if every query head kept its own K and V. padded: dtypes whose blocks a row does not fill.
    """

    kind: str
    layers: int
    layer_ranges: Ranges
    window: int | None
    heads: int
    k_dim: int
    v_dim: int
    elements: int
    bytes: dict[str, int]
    full_bytes: dict[str, int]
    padded: tuple[str, ...]


def coefficients(model: Model) -> tuple[Coefficients, ...]:
    """What `kv_cache` multiplies at every context, for each dtype that the architecture's definition has."""
    e = find_engine("arch")
    dtypes = [named(name) for name in e.dtypes]
    return tuple(
        Coefficients(kind=c.kind, layers=g.layers, layer_ranges=g.where, window=c.window, heads=c.heads, k_dim=c.k_dim,
                     v_dim=c.v_dim, elements=g.layers * c.elements,
                     bytes={d.name: g.layers * token_bytes(c, d, d) for d in dtypes},
                     full_bytes={d.name: g.layers * token_bytes(c.expand(), d, d) for d in dtypes},
                     padded=tuple(d.name for d in dtypes if _notes((g,), d, d)))
        for g in _groups(model, e, 1, False) for c in (g.cache,))


def token_bytes(cache: Cache, k: DType, v: DType) -> int:
    """Bytes of one token in one layer; a row of K or V takes whole blocks of its dtype."""
    return k.bytes(cache.heads * cache.k_dim) + v.bytes(cache.heads * cache.v_dim)


def find_engine(name: str) -> Engine:
    """The engine of that name; UsageError naming a near one."""
    if name not in ENGINES:
        from difflib import get_close_matches

        near = get_close_matches(name, ENGINES, 1)
        raise UsageError("engine", f"{name!r} is not a known engine",
                         help=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(ENGINES)}")
    return ENGINES[name]


def _dtypes(model: Model, e: Engine, k: str | None, v: str | None) -> tuple[DType, DType]:
    default = e.default_dtype or weights_dtype(model, None)[0].name
    found = []
    for word in (k or default, v or default):
        one = find_dtype(word)
        if one is None:
            raise unknown_dtype(word)
        if one.name not in e.dtypes:
            raise UsageError("dtype", f"{one.name} is not a cache dtype of engine {e.name}",
                             help=f"it keeps {', '.join(e.dtypes)}")
        found.append(one)
    return found[0], found[1]


def _groups(model: Model, e: Engine, tp: int, expanded: bool) -> list[_Group]:
    """Layers grouped by what they keep, in order of appearance."""
    by_cache: dict[Cache, list[int]] = {}
    seen: dict[int, tuple[Cache, ...]] = {}
    for i, layer in enumerate(model.layers):
        if id(layer) not in seen:
            seen[id(layer)] = tuple(_effective(c, model, e, expanded) for c in layer.caches())
        for cache in seen[id(layer)]:
            by_cache.setdefault(cache, []).append(i)
    return [_Group(cache=c, local=_local(c, tp), where=ranges(found), layers=len(found))
            for c, found in by_cache.items()]


def _effective(cache: Cache, model: Model, e: Engine, expanded: bool) -> Cache:
    """The layer's cache as the engine sees it; a window that the context never outgrows is no window by name."""
    if expanded and cache.kind == "latent":
        cache = cache.expand()
    if e.expands_heads and cache.hf_heads:
        cache = replace(cache, heads=cache.hf_heads)
    if cache.window is not None:
        if e.name not in model.window_engines:
            return replace(cache, kind="full", window=None)
        if model.context.usable is not None and cache.window >= model.context.usable:
            return replace(cache, kind="full")
    return cache


def _local(cache: Cache, tp: int) -> Cache:
    """One device's part: its share of the KV heads, at least one whole head; a latent is kept whole on each."""
    if tp == 1 or cache.kind == "indexer":
        return cache
    if cache.full_heads % tp:
        raise UsageError("tp", f"{tp} devices cannot share {cache.full_heads} attention heads evenly",
                         help="choose a --tp that divides the heads")
    local = replace(cache, full_heads=cache.full_heads // tp)
    if cache.kind == "latent":
        return local
    if cache.heads % tp and tp % cache.heads:
        raise UsageError("tp", f"{tp} devices cannot share {cache.heads} KV heads evenly, nor repeat them",
                         help="choose a --tp that divides the KV heads or is a multiple of them")
    return replace(local, heads=max(1, cache.heads // tp))


def _at(groups: Sequence[_Group], e: Engine, step: int, ctx: int, batch: int, k: DType, v: DType, state: int) -> KvAt:
    cells = [g.layers * e.cells(g.cache, ctx, batch, step) for g in groups]
    parts = tuple(n * token_bytes(g.local, k, v) for n, g in zip(cells, groups, strict=True))
    full = sum(n * token_bytes(g.local.expand(), k, v) for n, g in zip(cells, groups, strict=True))
    return KvAt(ctx=ctx, batch=batch, k_dtype=k.name, v_dtype=v.name, kv_cache_bytes=sum(parts),
                state_bytes=state * batch, full_heads_bytes=full, group_bytes=parts)


def past(model: Model, contexts: Sequence[int]) -> tuple[tuple[str, str], ...]:
    """A context past what the model was made for: the bytes are right there, the text may not be."""
    usable, most = model.context.usable, max(contexts)
    if usable is None or most <= usable:
        return ()
    return (("context-exceeded", f"{most:,} tokens is past the {usable:,} positions this model was made for "
             f"({model.context.why}): the bytes are right, the quality of its text there is not promised"),)


def _notes(groups: Sequence[_Group], k: DType, v: DType) -> tuple[tuple[str, str], ...]:
    """Rows that do not fill whole blocks: the engines that have these formats refuse such a model."""
    for g in groups:
        for d, dim in ((k, g.cache.k_dim), (v, g.cache.v_dim)):
            if d.block > 2 and dim % d.block:
                return (("block-remainder", f"head dimension {dim} is not a multiple of {d.name}'s block of {d.block}; "
                         "rows are padded here, and llama.cpp refuses this cache type"),)
    return ()
