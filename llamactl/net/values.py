"""Output tensors whose values change on the way: cast, turned, shifted, unpacked, averaged; block by block."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor

from llamactl.checkpoint.files import Files, row_bytes
from llamactl.checkpoint.held import FLOATS
from llamactl.checkpoint.moves import NOTHING, Band
from llamactl.checkpoint.plan import Output, Piece
from llamactl.checkpoint.rows import Source, rows
from llamactl.errors import InputRefused
from llamactl.net.weights_bytes import buffer
from llamactl.net.weights_gguf import packed, unpacked
from llamactl.net.weights_mapped import DTYPES

BLOCK = 512 << 10  # bytes at once: they stay in the cache between one pass and the next
_BITS = {torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80), torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000),
         torch.float16: (torch.int16, 0x7FFF, 0x7C00), torch.float64: (torch.int64, 2**63 - 1, 0x7FF << 52)}


class Values:
    """Computes outputs. clamp: values too large for the type become its largest instead of an error; counted by name.
    """

    def __init__(self, files: Files, *, clamp: bool = False) -> None:
        self.files, self.clamp = files, clamp
        self.clamped: dict[str, int] = {}
        self.flushed: dict[str, int] = {}

    def blocks(self, o: Output) -> Iterator[memoryview]:
        """The bytes of an output, in order. A block is good until the next is asked for."""
        for x in self._floats(o):
            out = self._typed(o, x)
            yield buffer(out)

    def check(self, o: Output) -> None:
        """Raise InputRefused convert-overflow where a finite value of the sources does not fit the output's type.

        Values that the type rounds to zero are counted in `flushed`.
        """
        target = DTYPES.get(o.dtype)
        if target is None or all(_fits(p.dtype, o.dtype) for p in o.sources):
            return
        info = torch.finfo(target)
        for x in self._floats(o):
            code, least, largest = _extent(x)
            if least <= (zero := info.smallest_normal * info.eps / 2):  # half of the smallest: the tie goes to zero
                small = torch.tensor(zero, dtype=x.dtype).view(code.dtype)
                self._count(self.flushed, o, torch.count_nonzero(code <= small) - torch.count_nonzero(code == 0))
            if largest > info.max:
                over = x.isfinite() & x.to(target).isinf()
                if over.any() and not self.clamp:
                    raise InputRefused("convert-overflow", f"{o.name}: {float(x[over].double().abs().max()):,g} is "
                                       f"beyond what {o.dtype} holds ({info.max:,g})",
                                       help="choose bf16 or fp32, or --allow-overflow to clamp")
                self._count(self.clamped, o, over.sum())

    @staticmethod
    def _count(counts: dict[str, int], o: Output, count: Tensor) -> None:
        if n := int(count):
            counts[o.name] = counts.get(o.name, 0) + n

    def tensor(self, o: Output) -> Tensor:
        """All of an output before the cast to its type, (rows, cols) in float64."""
        return torch.cat([x.double() for x in self._floats(o)])

    def exact(self, o: Output) -> bool:
        """Whether every value of `o` is held exactly by the type it is to be written in."""
        target = DTYPES[o.dtype]
        return all(torch.equal(x.to(target).to(x.dtype), x) for x in self._floats(o))

    def _typed(self, o: Output, x: Tensor) -> Tensor:
        if o.dtype not in DTYPES:
            return packed(x.float(), o.dtype)
        target = DTYPES[o.dtype]
        if o.name in self.clamped:
            limit = torch.finfo(target).max
            x = x if x.dtype is torch.float64 else x.float()  # in bf16 the limit itself would be rounded up
            x = torch.where(x.isfinite(), x.clamp(-limit, limit), x)
        if x.dtype is torch.bfloat16 and target is torch.float16:
            x = x.float()  # in two steps, more than twice as fast as in one
        if x.dtype is torch.float64 and target.itemsize == 2:
            x = _odd(x)
        return x.to(target).contiguous()

    def _floats(self, o: Output) -> Iterator[Tensor]:
        """Rows of an output before the cast to its type, block by block; (rows, cols)."""
        kinds = {p.dtype for p in o.sources}
        rects = o.rects
        plain = len(o.terms) == 1 and len(kinds) == 1 and not any(r.turned or r.source == NOTHING for r in rects)
        if plain and len({r.add for r in rects}) == 1 and (kinds <= DTYPES.keys() or len(o.terms[0]) == 1):
            yield from self._by_bytes(o, kinds.pop(), rects[0].add)
        else:
            yield from self._by_matrices(o)

    def _by_bytes(self, o: Output, kind: str, add: float) -> Iterator[Tensor]:
        with ExitStack() as stack:
            sources = [Source(stack.enter_context(self.files.view(p.key)), row_bytes(kind, p.cols), FLOATS.get(kind, 0))
                       for p in o.sources]
            wide = row_bytes(kind, o.cols)
            for block in rows(o.terms[0], sources, o.rows, wide, BLOCK):
                x = _tensor(block, kind, len(block) // wide, o.cols)
                yield _shifted(x, add)
                del x, block

    def _by_matrices(self, o: Output) -> Iterator[Tensor]:
        """Any rectangles, in float64 where a mean is taken, so that it is rounded once."""
        with ExitStack() as stack:
            matrices = [self._matrix(p, stack) for p in o.sources]
            wide = torch.float64 if len(o.terms) > 1 else _widest(matrices, any(r.add for r in o.rects))
            at_once = max(1, BLOCK // max(1, o.cols * wide.itemsize))
            for start in range(0, o.rows, at_once):
                end = min(o.rows, start + at_once)
                x = _assembled(o.terms[0], matrices, start, end, o.cols, wide)
                for term in o.terms[1:]:
                    x += _assembled(term, matrices, start, end, o.cols, wide)
                yield x / len(o.terms) if len(o.terms) > 1 else x
            matrices.clear()

    def _matrix(self, p: Piece, stack: ExitStack) -> Tensor:
        return _tensor(stack.enter_context(self.files.view(p.key)), p.dtype, p.rows, p.cols)


def _tensor(data: bytes | memoryview, kind: str, n: int, cols: int) -> Tensor:
    """Bytes as (n, cols), quantised ones unpacked to float32."""
    if not n * cols:
        return torch.empty((n, cols), dtype=DTYPES.get(kind, torch.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a buffer that cannot be written to: none is
        raw = torch.frombuffer(data, dtype=torch.uint8)
    if kind not in DTYPES:
        return unpacked(raw, kind, (n, cols))
    if raw.data_ptr() % FLOATS[kind]:
        raw = raw.clone()
    return raw.view(DTYPES[kind]).view(n, cols)


def _shifted(x: Tensor, add: float) -> Tensor:
    return x if not add else (x if x.dtype is torch.float64 else x.float()) + add


def _widest(matrices: list[Tensor], shifted: bool) -> torch.dtype:
    """A type that holds every value of all of them exactly."""
    kinds = {m.dtype for m in matrices}
    if torch.float64 in kinds:
        return torch.float64
    return kinds.pop() if len(kinds) == 1 and not shifted else torch.float32


def _assembled(term: tuple[Band, ...], matrices: list[Tensor], start: int, end: int, cols: int, wide: torch.dtype
               ) -> Tensor:
    """Rows start .. end - 1 of one term."""
    out = torch.zeros((end - start, cols), dtype=wide)
    for left, width, column in term:
        first = bisect_right(column, start, key=lambda r: r.row) - 1
        for r in column[max(first, 0) :]:
            if r.row >= end:
                break
            top, bottom = max(r.row, start), min(r.row + r.rows, end)
            if top >= bottom or r.source == NOTHING:
                continue
            m = matrices[r.source].t() if r.turned else matrices[r.source]
            at = r.from_row + top - r.row
            x = m[at : at + bottom - top, r.from_col : r.from_col + width].to(wide)
            out[top - start : bottom - start, left : left + width] = x + r.add if r.add else x
    return out


def _fits(source: str, target: str) -> bool:
    """Whether every finite value of one type has a finite one in the other."""
    return source == target or target == "F64" or source == "F16" or (source == "BF16" and target == "F32")


def _odd(x: Tensor) -> Tensor:
    """float64 as float32 rounded to odd, so that rounding once more to 16 bits is as good as rounding once."""
    y = x.float()
    y = torch.where(y.double().abs() > x.abs(), torch.nextafter(y, torch.zeros_like(y)), y)
    inexact = x.isfinite() & (y.double() != x)
    return torch.where(inexact, (y.view(torch.int32) | 1).view(torch.float32), y)


def _extent(x: Tensor) -> tuple[Tensor, float, float]:
    """(the bits of |x|, the least |x|, the largest): by the bits, whose order is that of the values; inf for NaN."""
    kind, mask, top = _BITS[x.dtype]
    code = x.contiguous().view(kind) & mask
    if not x.numel():
        return code, float("inf"), 0.0
    ends = torch.aminmax(code)
    least, largest = (float("inf") if int(c) >= top else float(c.view(x.dtype)) for c in (ends.min, ends.max))
    return code, least, largest
