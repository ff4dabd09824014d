"""The view of `llamactl flops`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamactl.analysis.flops import FlopsReport
from llamactl.render.document import Block, Cell, Column, Document, Facts, Table
from llamactl.render.units import count, size

_SCALE = ((10**18, "EFLOP"), (10**15, "PFLOP"), (10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP"))


def view(reports: Sequence[FlopsReport], *, sources: Sequence[str] = (), **_: Any) -> Document:
    """Facts and a table of parts for each model."""
    blocks: list[Block] = []
    for n, r in enumerate(reports):
        blocks.append(Facts(f"{r.id} ({', '.join([f'family {r.family}', *sources[n:n + 1]])})", tuple(_facts(r))))
        rows: list[tuple[Cell, ...]] = [(part, value, value / r.total) for part, value in r.parts.items() if value]
        blocks.append(Table("", (Column("part"), Column("operations", "count"), Column("share", "share")),
                            (*rows, ("total", r.total, 1.0))))
    main = Table("", tuple(Column(c) for c in ("model", "phase", "tokens", "batch", "part", "flops")), tuple(
        (r.id, r.phase, r.tokens, r.batch, part, value) for r in reports
        for part, value in (*r.parts.items(), ("total", r.total), ("total_full_attention", r.total_full_attention))))
    return Document(tuple(blocks), main, tuple(r.total for r in reports))


def flop(n: float) -> str:
    """35559309312 -> 35,559,309,312 (35.56 GFLOP)."""
    short = next((f" ({n / s:.2f} {unit})" for s, unit in _SCALE if n >= s), "")
    return f"{n:,.0f}{short}"


def _facts(r: FlopsReport) -> list[tuple[str, str]]:
    many = f" in each of {r.batch} sequences" if r.batch > 1 else ""
    what = (f"prefill of {count(r.tokens)} tokens{many}" if r.phase == "prefill"
            else f"decode of token {count(r.tokens)}{many}")
    out = [(what, flop(r.total)), ("per new token", flop(r.per_token))]
    if r.total_full_attention != r.total:
        out.append(("with the full square", f"{flop(r.total_full_attention)}: every position attending to all "
                    f"{count(r.tokens)}"))
    if r.mla:
        out += [("latent, " + way, flop(n) + (", counted here" if way == r.mla_counted else ""))
                for way, n in r.mla.items()]
    out.append(("bytes read", f"{size(r.weights_bytes_read)} of weights, {size(r.cache_bytes_read)} of cache, in "
                f"{r.dtype}"))
    out.append(("intensity", f"{r.intensity:,.2f} operations a byte"))
    out.append(("counted as", "a multiply-add is 2; products and convolutions only, logits at every new position"))
    out += [("not counted", x) for x in r.not_counted]
    return out
