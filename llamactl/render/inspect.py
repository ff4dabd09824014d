"""The view of `llamactl inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamactl.analysis.inspect import Group, InspectReport, shaped
from llamactl.render.document import Block, Cell, Column, Document, Facts, Lines, Table
from llamactl.render.units import count, size

FEW = 8  # names of a list that are shown; -v and the JSON have them all


def view(reports: Sequence[InspectReport], *, verbose: bool = False, reads: Sequence[Any] = (),
         sources: Sequence[str] = (), **_: Any) -> Document:
    """Facts, the dtypes, and what does not fit, for each checkpoint."""
    blocks: list[Block] = []
    for n, r in enumerate(reports):
        words = (f"family {r.family}" if r.family else "no description", *sources[n : n + 1])
        blocks.append(Facts(f"{r.id} ({', '.join(words)})", tuple(_facts(r))))
        blocks.append(_dtypes(r))
        blocks += _lists(r, None if verbose else FEW)
        if verbose:
            rows = tuple((f.name, f.tensors, f.file_bytes) for f in r.files)
            blocks.append(Table("files", (Column("file"), Column("tensors", "count"), Column("bytes", "count")), rows))
    if verbose:
        for r, read in zip(reports, reads, strict=False):
            if read:
                blocks.append(Table(f"where the numbers of {r.id} come from", (
                    Column("config key"), Column("value"), Column("from")),
                    tuple((k, str(v)[:60], how) for k, v, how in dict.fromkeys(read))))
    return Document(tuple(blocks), _csv(reports), tuple(r.parameters.files or 0 for r in reports))


def _facts(r: InspectReport) -> list[tuple[str, str]]:
    held = "not countable" if r.parameters.files is None else count(r.parameters.files)
    said = f"config says {count(r.parameters.config)}; " if r.parameters.config is not None else ""
    out = [("parameters", f"{said}files hold {held}"),
           ("names and shapes", _agreement(r)),
           ("tensors", f"{count(r.tensors)} in {_many(len(r.files), 'file')}"),
           ("bytes", f"{size(r.weights_bytes)} of data, {count(sum(f.file_bytes for f in r.files))} B of files")]
    if r.index is not None:
        out.append(("index", _index(r)))
    if r.names:
        out.append(("prefixes", r.names))
    if r.head:
        stored = f"stored as {r.head.name}" if r.head.stored else "not stored"
        out.append(("output head", f"{'tied' if r.head.tied else 'untied'}, {stored} ({r.head.tied_why})"))
    if r.dtype_stored and r.dtype_config and not r.quantization.found:
        out.append(("dtype", f"{r.dtype_stored}, as the config says" if r.dtype_stored == r.dtype_config
                    else f"{r.dtype_stored}, but the config says {r.dtype_config}"))
    if r.quantization.config or r.quantization.found or r.quantization.unread:
        out += _quantization(r)
    groups = (("buffers", (r.buffers,)), ("ignored", r.ignored), ("not counted", r.extra))
    out += [(label, _group(g)) for label, all_ in groups for g in all_ if g.tensors]
    if r.copies:
        out.append(("copies", f"not read, not counted: {', '.join(r.copies)}"))
    return out


def _agreement(r: InspectReport) -> str:
    if r.agrees:
        return "as the metadata has them, block by block" if r.compared == "block" else "all as the config has them"
    if r.not_judged:
        return f"not judged: {r.not_judged}"
    if r.agrees is None:
        return "not compared: no description"
    return (f"{count(len(r.missing))} missing, {count(len(r.unexpected))} unexpected, {count(len(r.reshaped))} shaped "
            "otherwise")


def _many(n: int, what: str) -> str:
    return f"{count(n)} {what}{'' if n == 1 else 's'}"


def _index(r: InspectReport) -> str:
    i = r.index
    assert i is not None
    size_ = {True: f"total_size {count(i.total_size or 0)} B is right", None: "no total_size",
             False: f"total_size {count(i.total_size or 0)} B is wrong"}[i.total_size_agrees]
    faults = [f"{count(len(names))} {what}" for names, what in (
        (i.not_listed, "stored but not listed"), (i.not_stored, "listed but not stored"),
        (i.not_read, "shards it does not name")) if names]
    return f"lists {_many(i.tensors, 'tensor')}, {', '.join(faults) or 'all stored, and no others'}; {size_}"


def _quantization(r: InspectReport) -> list[tuple[str, str]]:
    said = f"the config says {r.quantization.config}" if r.quantization.config else "the config says nothing of it"
    if not r.quantization.found:
        return [("quantised", f"{said}; {'not read' if r.quantization.unread else 'the files hold plain weights'}")]
    out = []
    for n, c in enumerate(r.quantization.found):
        out.append(("" if n else "quantised", f"{c.kind}, {c.bits} bits: {_many(c.weights, 'weight')} of "
                    f"{count(c.elements)} elements in {count(c.weights_bytes)} B with scales"))
    out.append(("", said))
    return out


def _group(g: Group) -> str:
    return f"{_many(g.tensors, 'tensor')}, {count(g.elements)} elements: {g.why}"


def _dtypes(r: InspectReport) -> Table:
    head = (Column("stored dtype"), Column("tensors", "count"), Column("elements", "count"), Column("bytes", "count"),
            Column("share", "share"))
    return Table("", head, tuple((d.dtype, d.tensors, d.elements, d.weights_bytes,
                                  d.weights_bytes / r.weights_bytes if r.weights_bytes else 0.0) for d in r.dtypes))


def _lists(r: InspectReport, most: int | None) -> list[Block]:
    lists = (("missing", r.missing), ("unexpected", r.unexpected),
             ("shaped otherwise", [shaped(x) for x in r.reshaped]),
             ("not listed by the index", r.index.not_listed if r.index else ()))
    out: list[Block] = []
    for title, names in lists:
        if names:
            rest = len(names) - (most or len(names))
            more = (f"... and {count(rest)} more; -v and --json list them all",) if rest > 0 else ()
            out.append(Lines(f"{title} ({count(len(names))})", (*names[:most], *more)))
    return out


def _csv(reports: Sequence[InspectReport]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for r in reports:
        facts: dict[str, Cell] = {
            "parameters_config": r.parameters.config, "parameters_files": r.parameters.files, "tensors": r.tensors,
            "elements": r.elements, "weights_bytes": r.weights_bytes, "files": len(r.files),
            "missing": len(r.missing), "unexpected": len(r.unexpected), "reshaped": len(r.reshaped),
            **{f"{d.dtype}_bytes": d.weights_bytes for d in r.dtypes}, "clean": str(r.clean).lower()}
        rows += [(r.id, name, value) for name, value in facts.items()]
    return Table("", (Column("model"), Column("fact"), Column("value", "count")), tuple(rows))
