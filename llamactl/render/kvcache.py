"""The view of `llamactl kv-cache`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamactl.analysis.kvcache import KvCacheReport, KvGroup
from llamactl.render.document import Block, Cell, Column, Document, Facts, Lines, Table
from llamactl.render.units import count, layer_ranges, ratio, scaled, share, size


def group_name(g: KvGroup) -> str:
    """"52 sliding@1024", "10 full"."""
    window = f"@{g.window}" if g.window and g.kind != "full" else ""
    return f"{g.layers} {g.kind}{window}"


def view(reports: Sequence[KvCacheReport], *, verbose: bool = False, reads: Sequence[Any] = (),
         sources: Sequence[str] = (), chart: bool = False) -> Document:
    """Facts, groups where there are several, and a line for each context, batch and dtype."""
    blocks: list[Block] = []
    for n, r in enumerate(reports):
        blocks.append(Facts(f"{r.id} ({', '.join(w for w in (f'family {r.family}', *sources[n:n + 1]) if w)})",
                            tuple(_facts(r))))
        if len(r.groups) > 1:
            blocks.append(_groups(r))
        if len(r.at) > 1:
            blocks.append(_at(r))
            if chart:
                blocks.append(Lines("", tuple(_chart(r))))
        if verbose:
            blocks.append(Lines("how it is counted", tuple(_formula(r))))
    if verbose:
        for r, read in zip(reports, reads, strict=False):
            blocks.append(Table(f"where the numbers of {r.id} come from", (Column("config key"), Column("value"),
                          Column("from")), tuple((k, str(v)[:60], how) for k, v, how in dict.fromkeys(read))))
    return Document(tuple(blocks), _csv(reports), tuple(a.kv_cache_bytes for r in reports for a in r.at))


def _dtypes(k: str, v: str) -> str:
    return k if k == v else f"K {k}, V {v}"


def _facts(r: KvCacheReport) -> list[tuple[str, str]]:
    last = r.at[-1]
    kept = r.elements_per_token_full + r.elements_per_token_windowed
    device = f" on each of {r.tp} devices" if r.tp > 1 else ""
    out = []
    if len(r.at) == 1:
        many = f" for {last.batch} sequences" if last.batch > 1 else ""
        out.append((f"cache at {count(last.ctx)}", f"{size(last.kv_cache_bytes)}{many}{device}"))
    dtypes = _dtypes(r.k_dtype, r.v_dtype)
    if r.bytes_per_token is not None:
        out.append(("per token", f"{size(r.bytes_per_token)} for {count(kept)} elements in {dtypes}{device}"))
    else:
        out.append(("per token", f"{count(kept)} elements in {dtypes}{device}; growth is not even at this context"))
    full = f"{size(last.full_heads_bytes)}, " if len(r.at) == 1 else ""
    out.append(("with full heads", f"{full}{ratio(r.full_heads_ratio)} as much"))
    shared = f" + {r.kv_shared_layers} that read another's" if r.kv_shared_layers else ""
    out.append(("layers", (" + ".join(group_name(g) for g in r.groups) or "none keeps a cache") + shared))
    if r.state_elements:
        out.append(("fixed state", f"{size(last.state_bytes)} for {count(r.state_elements)} elements a sequence"))
    out.append(("weights beside it", f"{size(r.weights_bytes)} in {r.weights_dtype}"))
    out.append(("context", _context(r)))
    out.append(("counted as", f"{r.engine}: {r.definition}"))
    return out


def _context(r: KvCacheReport) -> str:
    if r.usable_context is None:
        return f"no limit stated ({r.context_why})"
    if r.trained_context != r.usable_context and r.trained_context is not None:
        return f"trained for {count(r.trained_context)}, usable to {count(r.usable_context)} ({r.context_why})"
    return f"trained for {count(r.usable_context)} ({r.context_why})"


def _groups(r: KvCacheReport) -> Table:
    head = (Column("layers"), Column("which"), Column("heads", "count"), Column("elements per token", "count"),
            Column("bytes per token", "count"), Column(f"share at {count(r.at[-1].ctx)}", "share"))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (group_name(g), layer_ranges(g.layer_ranges), g.heads, g.elements_per_token, g.bytes_per_token, g.share)
        for g in r.groups)
    return Table("", head, rows)


def _at(r: KvCacheReport) -> Table:
    several = len({(a.k_dtype, a.v_dtype) for a in r.at}) > 1
    batches = any(a.batch != 1 for a in r.at)
    head = [Column("context", "count"), *([Column("batch", "count")] if batches else []),
            *([Column("dtype")] if several else []), Column("cache, bytes", "count"), Column(""),
            Column("full heads, bytes", "count")]
    rows = [(a.ctx, *((a.batch,) if batches else ()), *((_dtypes(a.k_dtype, a.v_dtype),) if several else ()),
             a.kv_cache_bytes, scaled(a.kv_cache_bytes), a.full_heads_bytes) for a in r.at]
    return Table("", tuple(head), tuple(rows))


def _chart(r: KvCacheReport, width: int = 40) -> list[str]:
    """Bars of the cache over the contexts, for the first batch and dtype; beside the weights as a yardstick."""
    first = r.at[0]
    rows = [(count(a.ctx), a.kv_cache_bytes) for a in r.at
            if (a.batch, a.k_dtype, a.v_dtype) == (first.batch, first.k_dtype, first.v_dtype)]
    if len(rows) < 2:
        return []
    rows.append(("weights", r.weights_bytes))
    most, wide = max(n for _, n in rows), max(len(label) for label, _ in rows)
    return [f"{label.rjust(wide)}  {('#' * max(1, round(width * n / most))).ljust(width)}  {scaled(n).split(',')[0]}"
            for label, n in rows]


def _formula(r: KvCacheReport) -> list[str]:
    """The product for each group with its numbers filled in."""
    out = []
    for g in r.groups:
        per_layer = (f"({g.k_dim} + {g.v_dim})" if g.v_dim else f"{g.k_dim}")
        out.append(f"{g.layers} layers x {g.heads} heads x {per_layer} = {count(g.elements_per_token)} elements = "
                   f"{count(g.bytes_per_token)} B per token")
    last = r.at[-1]
    tokens = " + ".join(f"{count(part)} B" for part in last.group_bytes)
    out.append(f"{count(last.batch)} x {count(last.ctx)} tokens: {tokens} = {count(last.kv_cache_bytes)} B")
    shares = ", ".join(f"{group_name(g)} {share(g.share)}" for g in r.groups)
    return [*out, f"shares: {shares}"]


def _csv(reports: Sequence[KvCacheReport]) -> Table:
    names = ("model", "ctx", "batch", "k_dtype", "v_dtype", "engine", "tp", "kv_cache_bytes", "state_bytes",
             "full_heads_bytes", "weights_bytes")
    return Table("", tuple(Column(n) for n in names), tuple(
        (r.id, a.ctx, a.batch, a.k_dtype, a.v_dtype, r.engine, r.tp, a.kv_cache_bytes, a.state_bytes,
         a.full_heads_bytes, r.weights_bytes) for r in reports for a in r.at))
