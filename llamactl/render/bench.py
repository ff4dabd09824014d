"""The view of `llamactl bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamactl.analysis.bench import OURS, BenchReport, Row, Spread
from llamactl.render.document import Block, Cell, Column, Document, Facts, Table
from llamactl.render.generate import quality
from llamactl.render.units import count, share, size

_COLUMNS = ("model", "engine", "engine_version", "device", "dtype", "threads", "phase", "tokens", "batch", "new",
            "rounds", "tokens_per_second_median", "tokens_per_second_min", "tokens_per_second_max", "share",
            "ratio_median", "ratio_min", "ratio_max", "load_seconds", "first_token_seconds", "private_bytes")


def view(reports: Sequence[BenchReport], *, verbose: bool = False, sources: Sequence[str] = (), **_: Any) -> Document:
    """Facts, a table of engines and one of cases for each model."""
    blocks: list[Block] = []
    for n, r in enumerate(reports):
        blocks.append(Facts(f"{r.id} ({', '.join([f'family {r.family}', *sources[n:n + 1]])})", tuple(_facts(r))))
        names = Column("engine"), Column("version"), Column("weights"), Column("load", "number"), \
            Column("first token", "number"), Column("own memory", "bytes")
        blocks.append(Table("", names, tuple(
            (e.name, e.version, e.dtype or "other", f"{e.load_seconds:.3g} s", f"{e.first_token_seconds:.3g} s",
             e.private_bytes) for e in r.engines)))
        rivals = len(r.engines) > 1
        columns = [Column("case"), Column("batch", "count"), Column("engine"), Column("tokens/s", "number"),
                   Column("min..max", "number"), Column("of the device", "number")]
        columns += [Column(f"{OURS} / it", "ratio"), Column("min..max", "ratio")] if rivals else []
        rows = tuple(_row(x, rivals) for x in r.rows)
        blocks.append(Table("", tuple(columns), rows))
        if verbose:
            blocks.append(Facts("where these come from", _origins(r)))
    main = Table("", tuple(Column(c) for c in _COLUMNS), tuple(_flat(r, x) for r in reports for x in r.rows))
    return Document(tuple(blocks), main, tuple(_main_value(r) for r in reports))


def rate(x: float) -> str:
    """41.234 -> 41.2, 1234.6 -> 1,235."""
    return f"{x:,.1f}" if x < 1000 else f"{x:,.0f}"


def _main_value(r: BenchReport) -> float:
    """llamactl's median rate in the first case of new tokens."""
    return next(x.tokens_per_second.median for x in r.rows if x.phase == "decode" and x.engine == OURS)


def _row(x: Row, rivals: bool) -> tuple[Cell, ...]:
    case = f"prompt of {count(x.tokens)}" if x.phase == "prefill" else f"{count(x.new)} after {count(x.tokens)}"
    s = x.tokens_per_second
    of = "memory" if x.phase == "decode" else "matmul"
    row: tuple[Cell, ...] = (case, x.batch, x.engine, rate(s.median), f"{rate(s.min)}..{rate(s.max)}",
                             None if x.share is None else f"{share(x.share)} {of}")
    if not rivals:
        return row
    if x.ratio is None:
        return (*row, None, None)
    return (*row, f"{x.ratio.median:.2f}x", f"{x.ratio.min:.2f}..{x.ratio.max:.2f}")


def _facts(r: BenchReport) -> list[tuple[str, str]]:
    how = [w for w, on in (("int8 matrices", r.quant), ("compiled", r.compiled), ("packed", r.packed)) if on]
    out = [("computed", ", ".join([f"in {r.dtype} on {r.device_name}", *how])),
           ("weights", size(r.weights_bytes)),
           *([("int8", f"against {r.dtype} {quality(r.quant_quality)}")] if r.quant_quality else []),
           ("rounds", f"{count(r.repeat)} that count, after one that does not; medians, and the least to the most")]
    if r.bandwidth_bytes_per_second is not None:
        out.append(("memory", f"{r.bandwidth_bytes_per_second / 1e9:,.1f} GB/s, measured"))
    if r.matmul_flops_per_second is not None:
        out.append(("matmul", f"{r.matmul_flops_per_second / 1e9:,.1f} GFLOP/s in {r.dtype}, measured"))
    return out


def _origins(r: BenchReport) -> tuple[tuple[str, str], ...]:
    moves = "copied (read and written) on the device" if r.device == "cuda" else "read by a sum"
    return (
        ("tokens/s", "of all sequences of the batch; in decode from the first new token to the last"),
        ("of memory", "bytes of weights and cache that the middle new token reads, times steps a second, over the "
                      f"fastest that 2^28 bytes or more were {moves} between the rounds"),
        ("of matmul", "operations of the prompts with logits at the last position, over the fastest product of square "
                      "matrices between the rounds"),
        ("ratio", f"{OURS}'s rate over the engine's in the same round: median, and the least to the most"),
        ("load", "from the files to a network that can be called, imports left out; the first engine may wait for "
                 "the disk"),
        ("first token", f"the first prompt after that, {count(r.first_token_prompt)} tokens, cold"),
        ("own memory", "anonymous memory that loading and the first prompt added; mapped files are not in it"),
    )


def _flat(r: BenchReport, x: Row) -> tuple[Cell, ...]:
    e = next(e for e in r.engines if e.name == x.engine)
    return (r.id, x.engine, e.version, r.device, e.dtype, r.threads, x.phase, x.tokens, x.batch, x.new, len(x.seconds),
            *_three(x.tokens_per_second), x.share, *_three(x.ratio), e.load_seconds, e.first_token_seconds,
            e.private_bytes)


def _three(s: Spread | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if s is None else (s.median, s.min, s.max)
