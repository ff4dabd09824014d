"""The view of `llamactl params`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamactl.analysis.params import ATTENTION, FEED_FORWARD, ParamsReport
from llamactl.render.document import Block, Cell, Column, Document, Facts, Lines, Table
from llamactl.render.units import count, layer_ranges, share, size

LABELS = {
    "token_embedding": "token embedding", "position_embedding": "position embedding", "state_space": "state space",
    "lm_head": "output head", "routed_experts": "routed experts", "shared_experts": "shared experts",
}


def components(report: ParamsReport) -> list[tuple[str, int, int]]:
    """(label, parameters, depth) in reading order; parts that the model lacks are left out."""
    c = report.components
    out = [("token_embedding", c.token_embedding, 0), ("position_embedding", c.position_embedding, 0)]
    for name, part, keys in (("attention", c.attention, ATTENTION), ("feed_forward", c.feed_forward, FEED_FORWARD)):
        out.append((name, part["total"], 0))
        out += [(k, part[k], 1) for k in keys if part[k]]
    out += [(k, getattr(c, k), 0) for k in ("norms", "state_space", "lm_head", "vision", "projector", "other")]
    return [(n, v, d) for n, v, d in out if v]


def label(name: str, depth: int) -> str:
    """A component's name as a row shows it, indented by its depth."""
    return "  " * depth + LABELS.get(name, name.replace("_", "-") if name == "feed_forward" else name)


def view(reports: Sequence[ParamsReport], *, by: str = "component", tree: bool = False, verbose: bool = False,
         reads: Sequence[Any] = (), files: Sequence[Any] | None = None, sources: Sequence[str] = ()) -> Document:
    """One model: facts and a table. Several: a column each."""
    blocks: list[Block] = []
    if len(reports) == 1:
        r = reports[0]
        blocks.append(Facts(f"{r.id} ({', '.join(w for w in (f'family {r.family}', *sources[:1]) if w)})",
                            tuple(_facts(r))))
        if tree:
            blocks.append(Lines("", tuple(_tree(r))))
        elif by == "layer":
            blocks.append(_by_layer(r))
        else:
            blocks.append(_single(r))
    else:
        blocks.append(_columns(reports))
        if tree:
            blocks += [Lines(r.id, tuple(_tree(r))) for r in reports]
        elif by == "layer":
            blocks += [_by_layer(r) for r in reports]
    blocks += [Table(f"not counted in {r.id}" if len(reports) > 1 else "not counted", (
        Column("what"), Column("parameters", "count"), Column("why")),
        tuple((x["what"], x["params"], x["why"]) for x in r.not_counted)) for r in reports if r.not_counted]
    for r, f in zip(reports, files or (), strict=False):
        blocks.append(Facts(f"files of {r.id}", tuple(f.facts())))
    if verbose:
        for r, read in zip(reports, reads, strict=False):
            blocks.append(Table(f"where the numbers of {r.id} come from", (Column("config key"), Column("value"),
                          Column("from")), tuple((k, str(v)[:60], how) for k, v, how in dict.fromkeys(read))))
    return Document(tuple(blocks), _csv(reports, by), tuple(r.total for r in reports))


def _facts(r: ParamsReport) -> list[tuple[str, str]]:
    same = len(r.layer_groups) == 1
    out = [("parameters", count(r.total))]
    if r.text_total != r.total:
        out.append(("language model alone", count(r.text_total)))
    out.append(("weights", f"{size(r.weights_bytes)} in {r.dtype} ({r.dtype_from})"))
    if r.quantization:
        out.append(("quantised", f"by {r.quantization}: the files are smaller than that; --weights reads them"))
    if r.active:
        out += [("active per token", f"{count(r.active.all)} with everything"),
                ("", f"{count(r.active.minus_input_embedding)} without the input embedding"),
                ("", f"{count(r.active.minus_embedding_and_head)} without embedding and head")]
    out.append(("layers", f"{r.layers} of {count(r.layer_groups[0].params)}" if same
                else f"{r.layers} of {len(r.layer_groups)} kinds, {count(r.blocks_total)} in all"))
    out.append(("feed-forward share", f"{share(r.ffn_share_blocks)} of the blocks, {share(r.ffn_share_model)} of the "
                "language model"))
    out.append(("output head", f"{'tied' if r.tied else 'untied'}: {r.tied_why}"))
    if r.biases:
        out.append(("biases", f"{count(r.biases)}, counted with their matrices and norms"))
    return out


def _single(r: ParamsReport) -> Table:
    per_block = len(r.layer_groups) == 1
    head = [Column("component"), Column("parameters", "count"), Column("share", "share")]
    rows: list[tuple[Cell, ...]] = []
    inside = {"attention", "feed_forward"}
    for name, n, depth in components(r):
        row: list[Cell] = [label(name, depth), n, n / r.total]
        if per_block:
            in_blocks = depth or name in inside
            row.append(n // r.layers if in_blocks else r.layer_groups[0].norms if name == "norms" else None)
        rows.append(tuple(row))
    last: list[Cell] = ["total", r.total, 1.0]
    if per_block:
        head.append(Column("in each block", "count"))
        last.append(r.layer_groups[0].params)
    return Table("", tuple(head), (*rows, tuple(last)))


def _columns(reports: Sequence[ParamsReport]) -> Table:
    every: dict[tuple[str, int], list[int]] = {}
    order: list[tuple[str, int]] = []
    for name, depth in [(n, d) for r in reports for n, _, d in components(r)]:
        if (name, depth) not in every:
            every[name, depth] = []
            order.append((name, depth))
    rank = ["token_embedding", "position_embedding", "attention", *ATTENTION[:-1], "other", "feed_forward",
            *FEED_FORWARD, "norms", "state_space", "lm_head", "vision", "projector"]
    order.sort(key=lambda key: rank.index(key[0]) if key[0] in rank else len(rank))
    values = [{(n, d): v for n, v, d in components(r)} for r in reports]
    rows: list[tuple[Cell, ...]] = [(label(*key), *(v.get(key, 0) for v in values)) for key in order]
    rows.append(("total", *(r.total for r in reports)))
    if any(r.text_total != r.total for r in reports):
        rows.append(("language model alone", *(r.text_total for r in reports)))
    if any(r.active for r in reports):
        for key, text in (("all", "active per token"), ("minus_input_embedding", "  without input embedding"),
                          ("minus_embedding_and_head", "  without embedding and head")):
            rows.append((text, *(getattr(r.active, key) if r.active else None for r in reports)))
    rows.append(("weights, bytes", *(r.weights_bytes for r in reports)))
    rows.append(("  dtype", *(r.dtype for r in reports)))
    rows.append(("layers", *(r.layers for r in reports)))
    rows.append(("feed-forward share of blocks", *(share(r.ffn_share_blocks) for r in reports)))
    rows.append(("feed-forward share of model", *(share(r.ffn_share_model) for r in reports)))
    rows.append(("output head", *("tied" if r.tied else "untied" for r in reports)))
    return Table("", (Column("component"), *(Column(r.id, "count") for r in reports)), tuple(rows))


def _by_layer(r: ParamsReport) -> Table:
    head = (Column("layers"), Column("number", "count"), Column("each", "count"), Column("attention", "count"),
            Column("feed-forward", "count"), Column("norms", "count"), Column("together", "count"))
    rows: list[tuple[Cell, ...]] = [
        (layer_ranges(g.ranges), g.layers, g.params, g.attention, g.feed_forward, g.norms, g.layers * g.params)
        for g in r.layer_groups]
    rows.append(("outside the blocks", None, None, None, None, None, r.total - r.blocks_total))
    rows.append(("total", r.layers, None, None, None, None, r.total))
    return Table(r.id, head, tuple(rows))


def _tree(r: ParamsReport) -> list[str]:
    """Components as an indented tree with their counts in one column."""
    c = r.components
    nodes: list[tuple[int, str, int]] = [(0, r.id, r.total), (1, "token embedding", c.token_embedding)]
    if c.position_embedding:
        nodes.append((1, "position embedding", c.position_embedding))
    nodes.append((1, f"blocks ({r.layers})", r.blocks_total))
    for g in r.layer_groups:
        nodes.append((2, f"layers {layer_ranges(g.ranges)}: {g.layers} of", g.params))
        nodes += [(3, "attention", g.attention), (3, "feed-forward", g.feed_forward), (3, "norms", g.norms)]
    outside = c.norms - sum(g.layers * g.norms for g in r.layer_groups)
    nodes += [(1, name, n) for name, n in (("norms outside the blocks", outside), ("output head", c.lm_head),
                                           ("vision tower", c.vision), ("projector", c.projector)) if n]
    texts = ["  " * d + name for d, name, _ in nodes]
    wide, digits = max(map(len, texts)), max(len(count(n)) for *_, n in nodes)
    return [f"{text.ljust(wide)}  {count(n).rjust(digits)}" for text, (*_, n) in zip(texts, nodes, strict=True)]


def _csv(reports: Sequence[ParamsReport], by: str) -> Table:
    if by == "layer":
        return Table("", tuple(Column(x) for x in ("model", "layers", "number", "params_each", "attention",
                                                   "feed_forward", "norms")),
                     tuple((r.id, layer_ranges(g.ranges, whole=True), g.layers, g.params, g.attention, g.feed_forward,
                            g.norms) for r in reports for g in r.layer_groups))
    rows: list[tuple[Cell, ...]] = []
    for r in reports:
        above = ""
        for name, n, depth in components(r):
            above = above if depth else name
            rows.append((r.id, f"{above}.{name}" if depth else name, n))
        rows += [(r.id, "total", r.total), (r.id, "text_total", r.text_total)]
        if r.active:
            rows += [(r.id, f"active.{k}", getattr(r.active, k)) for k in (
                "all", "minus_input_embedding", "minus_embedding_and_head")]
        rows.append((r.id, "weights_bytes", r.weights_bytes))
    return Table("", (Column("model"), Column("component"), Column("params", "count")), tuple(rows))
