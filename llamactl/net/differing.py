"""How far two tensors are apart, told from their bytes as they pass: memory is a few blocks, whatever their size."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

import torch
from torch import Tensor

from llamactl.checkpoint.emit import Block
from llamactl.checkpoint.held import FLOATS
from llamactl.net.weights_mapped import DTYPES

AT_ONCE = 1 << 18  # elements: some MB with all that is computed of them, and within the cache
ROUNDING = 2.0**-22  # of 1 + w in float32, twice
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Difference:
    """Two tensors of one shape, a and b, compared value by value.

    bits: the same bytes, never so for different types. cast: a in b's type is b, or b in a's type is a; a finite value
    never becomes an infinite one. near: the same within the rounding of a 1 that was added and taken away again; only
    told of shifted tensors. elements, differing, nans, not_finite, max_abs, largest (finite |a|): as in
    analysis.diff.Numbers; max_abs is None without a finite pair.
    """

    def __init__(self, a: Iterator[Block], b: Iterator[Block], kinds: tuple[str, str], *, shifted: bool = False
                 ) -> None:
        """a, b: bytes, row after row, in whole elements. kinds: their plain types. ValueError for different lengths."""
        self.bits = kinds[0] == kinds[1]
        self.elements = self.differing = self.not_finite = 0
        self.nans = (0, 0)
        self.max_abs: float | None = None
        self.largest = 0.0
        self._casts, self._near = [True, True], [shifted, shifted]
        self._wide = torch.float64 if "F64" in kinds else torch.float32
        for x, y in _aligned(a, b, kinds):
            self._take(x, y)

    @property
    def cast(self) -> bool:
        return any(self._casts)

    @property
    def near(self) -> bool:
        return any(self._near)

    def _take(self, a: Tensor, b: Tensor) -> None:
        self.elements += a.numel()
        if self.bits:
            kind = _BITS[a.element_size()]
            self.bits = torch.equal(a.view(kind), b.view(kind))
        if self.bits:
            self._finite(a, None)
            return
        ways = ((a, b), (b, a))
        self._casts = [held and _same(x.to(y.dtype), y, x) for held, (x, y) in zip(self._casts, ways, strict=True)]
        self._near = [held and _near(x, y) for held, (x, y) in zip(self._near, ways, strict=True)]
        x, y = a.to(self._wide), b.to(self._wide)
        d = (x - y).abs_()
        if isfinite(float(d.max())):  # then all of x and y is
            self.differing += int(torch.count_nonzero(d))
            self._finite(x, d)
        else:
            self._slowly(x.double(), y.double())

    def _slowly(self, x: Tensor, y: Tensor) -> None:
        """A block with infinities or NaNs, or with a difference beyond the type."""
        nan = x.isnan(), y.isnan()
        self.nans = (self.nans[0] + int(nan[0].sum()), self.nans[1] + int(nan[1].sum()))
        other = ~((x == y) | (nan[0] & nan[1]))
        finite = x.isfinite() & y.isfinite()
        self.differing += int(other.sum())
        odd = int((other & ~finite).sum())
        self.not_finite += odd
        alone = x[x.isfinite()]
        if alone.numel():
            self.largest = max(self.largest, float(alone.abs().max()))
        if finite.any():
            self._finite(x[finite], (x[finite] - y[finite]).abs())

    def _finite(self, x: Tensor, d: Tensor | None) -> None:
        """Take in finite pairs: a's values and the differences, None where the bytes are the same, NaNs and all."""
        size = x.abs()
        if d is None:
            nans = int(torch.isnan(size).sum())
            self.nans = (self.nans[0] + nans, self.nans[1] + nans)
            size = size[size.isfinite()] if nans or bool(size.isinf().any()) else size
            if size.numel():
                self.max_abs = max(self.max_abs or 0.0, 0.0)
                self.largest = max(self.largest, float(size.max()))
            return
        self.max_abs = max(self.max_abs or 0.0, float(d.max()))
        self.largest = max(self.largest, float(size.max()))


def _same(cast: Tensor, want: Tensor, source: Tensor) -> bool:
    """Whether a cast gave what is wanted: NaN for NaN, and infinite only where the source is."""
    if torch.equal(cast, want):
        return bool(cast.isfinite().all()) or torch.equal(source.isinf(), want.isinf())
    if not cast.isnan().any():
        return False
    both = cast.isnan() & want.isnan()
    return bool(((cast == want) | both).all()) and torch.equal(source.isinf(), want.isinf())


def _near(source: Tensor, want: Tensor) -> bool:
    """Whether each value wanted is what a value within the rounding becomes in its type."""
    x = source.double()
    away = ROUNDING * (1 + x.abs())
    return bool((((x - away).to(want.dtype) <= want) & (want <= (x + away).to(want.dtype))).all())


def _aligned(a: Iterator[Block], b: Iterator[Block], kinds: tuple[str, str]) -> Iterator[tuple[Tensor, Tensor]]:
    """The same elements of both, however their bytes are cut into blocks."""
    wide = [FLOATS[k] for k in kinds]
    x = y = memoryview(b"")
    while True:
        x, y = x or _next(a), y or _next(b)
        n = min(len(x) // wide[0], len(y) // wide[1], AT_ONCE)
        if not n:
            if len(x) or len(y):
                raise ValueError("one tensor ends before the other")
            return
        yield _tensor(x[: n * wide[0]], kinds[0]), _tensor(y[: n * wide[1]], kinds[1])
        x, y = x[n * wide[0] :], y[n * wide[1] :]


def _next(blocks: Iterator[Block]) -> memoryview:
    return memoryview(next((block for block in blocks if len(block)), b""))


def _tensor(data: memoryview, kind: str) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=DTYPES[kind])  # a copy: files promise no alignment
