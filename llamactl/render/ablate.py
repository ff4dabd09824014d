"""The view of `llamactl ablate`: what the weights lose under each edit, and what must not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamactl.analysis.ablation import AblateReport, Ablation, KvCopy
from llamactl.render.document import Block, Cell, Column, Document, Facts, Lines, Table
from llamactl.render.units import count, share

_COLUMNS = ("model", "edit", "kind", "status", "loss", "base_loss", "change", "change_percent", "standard_error",
            "max_abs_dlogit", "bit_equal", "not_finite", "what", "note")
_WORDS = {"not-finite": "not finite", "not-applicable": "not run"}


def view(reports: Sequence[AblateReport], *, verbose: bool = False, sources: Sequence[str] = (), chart: bool = False,
         **_: Any) -> Document:
    """Facts, the edits by their change, on a terminal a bar for each; with verbose what every norm reads."""
    blocks: list[Block] = []
    for n, r in enumerate(reports):
        blocks.append(Facts(f"{r.id} ({', '.join([f'family {r.family}', *sources[n:n + 1]])})", tuple(_facts(r))))
        if r.ablations:
            blocks.append(_table(r))
        if chart and (bars := _bars(r.ablations)):
            blocks.append(Lines("change of the loss, nats per token", tuple(bars)))
        if verbose and r.norms is not None:
            blocks.append(Table("what each norm reads, |mean| / RMS of a row over the tokens",
                                (Column("layer"), Column("norm"), Column("median", "share"), Column("worst", "share")),
                                tuple(("-" if x.layer is None else str(x.layer), x.norm, x.median, x.worst)
                                      for x in r.norms.norms)))
            blocks.append(Facts("how it is computed", _origins(r)))
    main = Table("", tuple(Column(c) for c in _COLUMNS), tuple(_flat(r, x) for r in reports for x in r.ablations))
    return Document(tuple(blocks), main, tuple(r.base_loss for r in reports))


def _facts(r: AblateReport) -> list[tuple[str, str]]:
    out = [("text", f"{count(r.tokens)} tokens: {r.text}"),
           ("base loss", f"{r.base_loss:.4f} nats per token over {count(r.predicted)} of them, in {r.dtype}")]
    if r.norms is not None:
        out.append(("norm inputs", f"|mean| / RMS {share(r.norms.median)} in the median norm, {share(r.norms.worst)} "
                    f"in the worst ({r.norms.worst_at})"))
    if r.kv_copy is not None:
        out.append(("as MHA", _copy(r.kv_copy)))
    return out


def _copy(c: KvCopy) -> str:
    made = (f"each of {c.n_kv_heads} KV heads copied to {c.n_heads // c.n_kv_heads} query heads: "
            f"{count(c.params_copied)} parameters for {count(c.params)}, ")
    if c.bit_equal:
        return made + "logits equal to the last bit"
    return made + ("logits not finite" if c.max_abs_dlogit is None else f"logits differ by {c.max_abs_dlogit:.2g} at "
                   "most: the kernels sum in another order here")


def _table(r: AblateReport) -> Table:
    columns = (Column("edit"), Column("loss", "number"), Column("change", "number"), Column("percent", "number"),
               Column("+-", "number"), Column("max |dlogit|", "number"), Column("what"))
    return Table("", columns, tuple(_row(x) for x in r.ablations))


def _row(x: Ablation) -> tuple[Cell, ...]:
    what = "; ".join(t for t in (x.what, x.note) if t)
    far = "0, bit for bit" if x.bit_equal else None if x.max_abs_dlogit is None else f"{x.max_abs_dlogit:.2g}"
    if x.loss is None or x.change is None:
        return (x.edit, _WORDS[x.status], None, None, None, far, what)
    percent = None if x.change_percent is None else f"{x.change_percent:+.1f}%"
    return (x.edit, f"{x.loss:.4f}", _signed(x.change), percent,
            None if x.standard_error is None else f"{x.standard_error:.2g}", far, what)


def _signed(x: float) -> str:
    """0.17 -> +0.1700; what four digits would call nothing is said in full: +2.9e-07."""
    return f"{x:+.4f}" if abs(x) >= 5e-5 or x == 0 else f"{x:+.1e}"


def _bars(rows: Sequence[Ablation], width: int = 40) -> list[str]:
    """A bar for each measured edit, as long as the change; one that lowers the loss is drawn with `-`."""
    found = [(x.edit, x.change) for x in rows if x.change is not None]
    most = max((abs(c) for _, c in found), default=0.0)
    wide = max((len(e) for e, _ in found), default=0)
    if not most:
        return []
    return [f"{e.rjust(wide)}  {('#' if c > 0 else '-') * round(width * abs(c) / most)}".ljust(wide + 2 + width)
            + f"  {_signed(c)}" for e, c in found]


def _origins(r: AblateReport) -> tuple[tuple[str, str], ...]:
    held = "read from the files for each edit anew" if r.streamed else "kept in memory between the edits"
    return (
        ("loss", "mean of -ln p of each token after those before it, in fp64 from fp32 logits"),
        ("+-", "standard error of the mean difference, token by token, as if tokens were independent"),
        ("shift", "all positions moved together: nothing changes where only distances count"),
        ("weights", held),
    )


def _flat(r: AblateReport, x: Ablation) -> tuple[Cell, ...]:
    equal = None if x.bit_equal is None else str(x.bit_equal).lower()
    return (r.id, x.edit, x.kind, x.status, x.loss, r.base_loss, x.change, x.change_percent, x.standard_error,
            x.max_abs_dlogit, equal, x.not_finite, x.what, x.note)
