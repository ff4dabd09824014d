"""The view of `llamactl convert`: what was done and how it was checked; with --dry-run or -v every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamactl.analysis.conversion import ConvertReport, LogitsProof, Proof
from llamactl.render.document import Block, Column, Document, Facts, Table
from llamactl.render.units import count, size

_HOW = {"copy": "copied as they are", "rows": "rows in another order or place", "widen": "widened to fp32",
        "values": "computed", "given": "made from the config"}


def view(reports: Sequence[ConvertReport], *, verbose: bool = False, sources: Sequence[str] = (), **_: Any) -> Document:
    """Facts, the files, and the plan where it is asked for."""
    (r,) = reports
    by = {how: sum(t.how == how for t in r.tensors) for how in _HOW}
    pairs = [
        ("from", f"{r.id} ({r.source_layout}, {r.family})"),
        ("to", f"{r.path} ({r.target_layout})" + (", not written: --dry-run" if r.dry_run else "")),
        ("parameters", count(r.parameters)),
        ("tensors", f"{count(len(r.tensors))}: " + ", ".join(f"{count(n)} {_HOW[how]}" for how, n in by.items() if n)),
        ("bytes", size(r.total_bytes)),
        *(("ignored", f"{name}: {why}") for name, why in r.ignored[:10]),
        *((("ignored", f"{len(r.ignored) - 10:,} more"),) if len(r.ignored) > 10 else ()),
    ]
    if not r.dry_run:
        pairs += proven(r.proof)
    files = Table("files", (Column("file"), Column("bytes", "bytes")), tuple((f.name, f.nbytes) for f in r.files))
    blocks: list[Block] = [Facts("", tuple(pairs)), files]
    columns = tuple(Column(c) for c in ("tensor", "file", "dtype", "shape", "how", "from", "operations"))
    rows = tuple((t.name, t.file, t.dtype, "x".join(map(str, t.shape)) or "scalar", t.how, ", ".join(t.sources) or "-",
                  "; ".join(t.ops) or "-") for t in r.tensors)
    if r.dry_run or verbose:
        blocks.append(Table("plan", columns, rows))
    machine = Table("", (*columns[:5], Column("nbytes", "count"), Column("digest"), *columns[5:]), tuple(
        (*row[:5], t.nbytes, t.digest, *row[5:]) for row, t in zip(rows, r.tensors, strict=True)))
    return Document(tuple(blocks), machine, (r.total_bytes,))


def proven(p: Proof | None) -> list[tuple[str, str]]:
    """How the output was checked, in words."""
    if p is None:
        return [("proof", "none: --no-proof")]
    each = ((p.exact, "the source's bit for bit"), (p.cast, "the source's, rounded to the new type"),
            (p.rounded, "the source's up to the rounding of the 1 that this layout adds"),
            (p.changed, "changed as asked"))
    words = [f"{count(n)} tensors {what}" for n, what in each if n]
    logits = _logits(p.logits) if p.logits else f"not compared: {p.logits_not_run}"
    return [("read back", "; ".join(words) or f"not: {p.logits_not_run}"), ("logits", logits)]


def _logits(p: LogitsProof) -> str:
    text = ("identical" if p.max_abs_dlogit == 0 else f"at most {p.max_abs_dlogit:.2g} apart, KL up to {p.max_kl:.2g} "
            f"nats, same first choice {100 * p.top1_agreement:.0f}%") + f" on {p.tokens:,} tokens in fp32"
    if p.loss_source is not None and p.loss_output is not None:
        text += f"; loss on the text {p.loss_source:.4f} before, {p.loss_output:.4f} after"
    return text
