"""Every output tensor of a conversion with its sources and operations, before a byte is written.

Each stored tensor of the target layout is made of canonical tensors (the target's naming table), each of them lies in
stored tensors of the source (the source's table); positions on both sides give the rectangles in between. That every
element is filled exactly once is checked here, for all tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from llamactl.checkpoint.files import Files, row_bytes
from llamactl.checkpoint.held import FLOATS
from llamactl.checkpoint.moves import NOTHING, Band, Rect, among, bands, cut, joined, rectangles
from llamactl.spec.carried import carried
from llamactl.spec.model import Model, Tensor
from llamactl.spec.naming import RopePairs, Rule, Stored, rule, stored_tensors
from llamactl.spec.parts import Attention
from llamactl.spec.windows import Window, grid, matrix, windows

Pick = Callable[[Stored, Sequence[str]], str]  # (output, dtypes of its sources) -> its dtype


class Piece(NamedTuple):
    """One source matrix of an output: the key of its bytes, its tensor's name, its type and size."""

    key: str
    name: str
    dtype: str
    rows: int
    cols: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One tensor to write. rows x cols: its matrix. terms: what it is the mean of, nearly always one.

    how: "copy" one source as it is, "rows" rows of sources in another order, "widen" the same from bf16 to fp32,
    "values" to be computed, "given" bytes known from the start. ops: the same in words.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    rows: int
    cols: int
    sources: tuple[Piece, ...]
    terms: tuple[tuple[Band, ...], ...]
    how: str
    ops: tuple[str, ...] = ()
    data: bytes | None = None

    @property
    def rects(self) -> tuple[Rect, ...]:
        return tuple(r for term in self.terms for _, _, column in term for r in column)


class Side(NamedTuple):
    """A model in a layout: its naming table. at: canonical name -> (as it is stored, the name in the file)."""

    model: Model
    layout: str
    rules: tuple[Rule, ...]
    at: Mapping[str, tuple[Stored, str]] = {}


class Slice(NamedTuple):
    """A part of an output tensor, for layouts that spread one over several files."""

    row: int
    col: int
    rows: int
    cols: int
    shape: tuple[int, ...]


def given(name: str, dtype: str, shape: tuple[int, ...], data: bytes, why: str) -> Output:
    """An output whose bytes are known."""
    return Output(name=name, dtype=dtype, shape=shape, nbytes=len(data), rows=1, cols=1, sources=(), terms=(),
                  how="given", ops=(why,), data=data)


def retyped(o: Output, dtype: str) -> Output:
    """The same tensor in another type."""
    if o.dtype == dtype:
        return o
    how = _how(o.terms, o.sources, dtype, o.rows, o.cols)
    nbytes = o.rows * row_bytes(dtype, o.cols) if o.rows * o.cols else 0
    return replace(o, dtype=dtype, nbytes=nbytes, how=how, ops=(*o.ops, f"{o.dtype} -> {dtype}"))


def canonical(model: Model) -> tuple[Rule, ...]:
    """The table of a layout in which every tensor stands by itself under its canonical name."""
    return tuple(rule(t, t) for t in dict.fromkeys(t.template for t in model.tensors()))


def whole(files: Files, name: str) -> Output:
    """A stored tensor as it is, whatever it means."""
    held, parts = files.tensors[name], files.parts(name)
    rows, cols = matrix(held.shape)
    pieces = tuple(Piece(p.key, name, held.dtype, p.rows, p.cols) for p in parts or ()) or (
        Piece(name, name, held.dtype, rows, cols),)
    places = [(p.row, p.col, p.rows, p.cols) for p in parts or ()] or [(0, 0, rows, cols)]
    rects = [Rect(row, col, tall, wide, n) for n, (row, col, tall, wide) in enumerate(places)]
    return Output(name=name, dtype=held.dtype, shape=held.shape, nbytes=held.nbytes, rows=rows, cols=cols,
                  sources=pieces, terms=(bands(rects, rows, cols),), how="copy" if parts is None else "rows")


class Planner:
    """Plans the tensors of `target` out of `source`, whose bytes are in `files`."""

    def __init__(self, files: Files, source: Side, target: Side, pick: Pick) -> None:
        self.files, self.source, self.target, self.pick = files, source, target, pick
        self._held = {t.name: t for stored, _ in source.at.values() for t in stored.of}
        self._windows: dict[str, dict[str, Window]] = {}
        self._made: dict[Any, tuple[tuple[Rect, ...], ...]] = {}  # the same in every layer alike
        self.taken: set[str] = set()  # names in the file

    def outputs(self) -> list[Output]:
        """Every tensor of the target, whole, in the model's order."""
        return [self.output(s) for s in stored_tensors(self.target.model, self.target.rules)]

    def output(self, stored: Stored, part: Slice | None = None, name: str | None = None) -> Output:
        """One tensor, or one part of it. Raises InputRefused convert-shape, ValueError where a table is not one-to-one.

        name: in the output file, where that is not the layout's.
        """
        sources: dict[str, int] = {}
        terms = self._terms(stored, sources)
        names = list(sources)
        self.taken.update(names)
        pieces, first = self._pieces(names, stored)
        if len(pieces) > len(names):
            parts = [[(p.row, p.col, p.rows, p.cols) for p in self.files.parts(n) or ()] or [(0, 0, *self._grid(n))]
                     for n in names]
            terms = tuple(joined(among(t, parts, first)) for t in terms)
        rows, cols = grid(stored)
        if part is not None:
            terms = tuple(joined(cut(t, *part[:4])) for t in terms)
            rows, cols = part.rows, part.cols
        shape = stored.shape if part is None else part.shape
        dtype = self.pick(stored, [p.dtype for p in pieces])
        filled = tuple(bands(t, rows, cols) for t in terms)
        used = sorted({r.source for t in terms for r in t} - {NOTHING})
        if len(used) < len(pieces):  # a part of the output may need a part of the files alone
            new = {n: i for i, n in enumerate(used)} | {NOTHING: NOTHING}
            filled = tuple(tuple((a, b, tuple(r._replace(source=new[r.source]) for r in column))
                                 for a, b, column in term) for term in filled)
            pieces = [pieces[n] for n in used]
        how = _how(filled, pieces, dtype, rows, cols)
        return Output(name=name or stored.name, dtype=dtype, shape=shape, nbytes=rows * row_bytes(dtype, cols)
                      if rows * cols else 0, rows=rows, cols=cols, sources=tuple(pieces), terms=filled, how=how,
                      ops=self._ops(stored, names, filled, pieces, dtype))

    def _terms(self, stored: Stored, sources: dict[str, int]) -> tuple[tuple[Rect, ...], ...]:
        """Rectangles out of whole source tensors, which are numbered into `sources`."""
        of = [(t, carried(t, self._held, self._heads(t))) for t in stored.of]
        key: list[Any] = [stored.rule, stored.shape, self._layer(self.target.model, stored.of[0])]
        for t, taken in of:
            for x in taken:
                if not x.name:
                    key.append((t.shape, t.e))
                    continue
                held, file = self.source.at[x.name]
                number = sources.setdefault(file, len(sources))
                key += [number, held.rule, held.shape, self._layer(self.source.model, held.of[0]),
                        [c.name for c in held.of].index(x.name) if len(held.of) > 1 else 0, t.e, len(x.rows)]
        if (made := self._made.get(known := tuple(key))) is None:
            made = self._made[known] = self._rects(stored, of, sources)
        return made

    def _rects(self, stored: Stored, of: Sequence[tuple[Tensor, Any]], sources: Mapping[str, int]
               ) -> tuple[tuple[Rect, ...], ...]:
        wanted = windows(stored, self.target.model)
        count = max(len(taken) for _, taken in of)
        terms: list[list[Rect]] = [[] for _ in range(count)]
        for t, taken in of:
            for n in range(count):
                x = taken[n % len(taken)]
                if x.name:
                    held, file = self.source.at[x.name]
                    terms[n] += rectangles(sources[file], self._window(held)[x.name], wanted[t.name], x.rows, x.to)
                rows = t.shape[0] if t.shape else 1
                if len(x.to) < rows:
                    rest = range(len(x.to), rows)
                    nothing = Window(range(rows), range(matrix(t.shape)[1]))
                    terms[n] += [r._replace(source=NOTHING, from_row=0, from_col=0, add=0.0) for r in
                                 rectangles(NOTHING, nothing, wanted[t.name], rest, rest)]
        return tuple(joined(t) for t in terms)

    def _window(self, held: Stored) -> dict[str, Window]:
        if held.name not in self._windows:
            self._windows = {held.name: windows(held, self.source.model)}  # one is enough: its neighbours come next
        return self._windows[held.name]

    def _pieces(self, names: Sequence[str], stored: Stored) -> tuple[list[Piece], list[int]]:
        pieces: list[Piece] = []
        first: list[int] = []
        for name in names:
            held, parts = self.files.tensors[name], self.files.parts(name)
            first.append(len(pieces))
            pieces += [Piece(p.key, name, held.dtype, p.rows, p.cols) for p in parts or ()] or [
                Piece(name, name, held.dtype, *self._grid(name))]
        return pieces, first

    def _grid(self, name: str) -> tuple[int, int]:
        """The matrix of a stored tensor, as its windows count."""
        if not hasattr(self, "_grids"):
            self._grids = {file: grid(s) for s, file in self.source.at.values()}
        return self._grids[name]

    def _heads(self, t: Tensor) -> tuple[int, int]:
        if t.i < 0 or not t.template.startswith("layers."):
            return (1, 1)
        a, b = (m.layers[t.i].attn for m in (self.source.model, self.target.model))
        return tuple(x.n_kv_heads if isinstance(x, Attention) else 1 for x in (a, b))  # type: ignore[return-value]

    @staticmethod
    def _layer(model: Model, t: Tensor) -> int:
        return id(model.layers[t.i]) if t.i >= 0 and t.template.startswith("layers.") else -1

    def _ops(self, stored: Stored, names: Sequence[str], terms: tuple[tuple[Band, ...], ...],
             pieces: Sequence[Piece], dtype: str) -> tuple[str, ...]:
        """What is done, in words for people; told from the rectangles themselves."""
        rects = [r for _, _, column in terms[0] for r in column] if terms else []
        out = []
        if any(r.turned for r in rects):
            out.append("transposed")
        if len({(r.source, r.col) for r in rects}) < len(rects):
            paired = [next((op.pairs for op in rule.ops if isinstance(op, RopePairs)), None)
                      for rule in (*(self.source.at[t.name][0].rule for t in stored.of if t.name in self.source.at),
                                   stored.rule)]
            out.append("rows put in RoPE's other order" if any(paired) else "rows reordered")
        if len(pieces) > 1:
            out.append(f"{len(pieces)} pieces joined")
        elif pieces and pieces[0].rows * pieces[0].cols > sum(r.rows * r.cols for r in rects if r.source != NOTHING):
            out.append(f"part of {pieces[0].name}")
        if any(r.source == NOTHING for r in rects):
            out.append("rows of zeros added")
        if len(terms) > 1:
            out.append(f"mean of {len(terms)} heads")
        out += [f"{add:+g}" for add in sorted({r.add for r in rects} - {0.0})]
        out += [f"{kind} -> {dtype}" for kind in sorted({p.dtype for p in pieces} - {dtype})]
        return tuple(out)


def _how(terms: tuple[tuple[Band, ...], ...], pieces: Sequence[Piece], dtype: str, rows: int, cols: int) -> str:
    if not rows * cols:
        return "rows"
    rects = [r for _, _, column in terms[0] for r in column]
    if len(terms) > 1 or any(r.turned or r.add for r in rects):
        return "values"
    if pieces and all(p.dtype == "BF16" for p in pieces) and dtype == "F32":
        return "widen"
    if any(p.dtype != dtype for p in pieces):
        return "values"
    if len(rects) == 1 and rects[0].source != NOTHING and (rows, cols) == pieces[rects[0].source][3:]:
        return "copy"
    if dtype not in FLOATS and (len(terms[0]) > 1 or any(r.from_col or r.cols != pieces[r.source].cols for r in rects)):
        return "values"
    return "rows"
