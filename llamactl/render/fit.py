"""The view of `llamactl fit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamactl.analysis.fit import MOST, FitReport
from llamactl.render.document import Block, Cell, Column, Document, Facts, Table
from llamactl.render.units import count, size


def view(reports: Sequence[FitReport], *, sources: Sequence[str] = (), **_: Any) -> Document:
    """The verdict, where the memory goes, how far it reaches, how fast it can be."""
    blocks: list[Block] = []
    for n, r in enumerate(reports):
        blocks.append(Facts(f"{r.id} ({', '.join([f'family {r.family}', *sources[n:n + 1]])})", tuple(_facts(r))))
        parts = (("weights", r.weights_bytes), ("KV cache", r.kv_cache_bytes), ("fixed state", r.state_bytes),
                 ("activations", r.activations_bytes), ("overhead", r.overhead_bytes))
        rows: list[tuple[Cell, ...]] = [(name, b, b / r.memory_bytes) for name, b in parts if b]
        blocks.append(Table("", (Column("on each device"), Column("bytes", "count"), Column("of its memory", "share")),
                            (*rows, ("total", r.total_bytes, r.total_bytes / r.memory_bytes))))
    names = ("model", "gpu", "devices", "tp", "ctx", "batch", "total_bytes", "memory_bytes", "fits", "max_ctx",
             "max_batch")
    main = Table("", tuple(Column(c) for c in names), tuple(
        (r.id, r.gpu, r.devices, r.tp, r.ctx, r.batch, r.total_bytes, r.memory_bytes, str(r.fits).lower(), r.max_ctx,
         r.max_batch) for r in reports))
    return Document(tuple(blocks), main, tuple(r.total_bytes for r in reports))


def _facts(r: FitReport) -> list[tuple[str, str]]:
    many = f" x {r.devices}, {r.tp} to a copy" if r.devices > 1 else ""
    sequences = f" x {count(r.batch)} sequences" if r.batch > 1 else ""
    verdict = (f"yes, {size(r.free_bytes)} left" if r.fits else f"no, {size(-r.free_bytes)} too much")
    out = [("fits", f"{verdict} on each device"),
           ("on", f"{r.gpu}{many}, {size(r.memory_bytes)} each"),
           ("at", f"{count(r.ctx)} tokens{sequences}, weights in {r.weights_dtype}, cache in {r.kv_dtype}"),
           ("longest context", _most(r.max_ctx, f"for {count(r.batch)} sequence{'s' if r.batch > 1 else ''}")),
           ("largest batch", _most(r.max_batch, f"at {count(r.ctx)} tokens"))]
    if r.decode_tokens_per_s:
        out.append(("decode, at best", f"{r.decode_tokens_per_s:,.1f} tokens/s in all, bound by {r.decode_bound}"))
    if r.prefill_seconds:
        out.append(("prefill, at best", f"{r.prefill_seconds:,.3f} s, bound by {r.prefill_bound}"))
    return out


def _most(n: int, where: str) -> str:
    return f"none {where}" if n == 0 else f"{count(n)} {where}" if n < MOST else f"no limit below 2^32 {where}"
