"""What one stored tensor holds, told from its bytes as they pass: memory is a few blocks, whatever its size.

Of quantised types only the scales are looked at: with finite scales every value is finite, and without any it is zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from llamactl.checkpoint.digest import Digest, digest
from llamactl.checkpoint.gguf import GGML_TYPES
from llamactl.net.weights_bytes import buffer
from llamactl.net.weights_gguf import unpacked
from llamactl.net.weights_mapped import DTYPES

BLOCK = 1 << 20  # bytes at once: they stay in the cache from one look to the next
READ = {**DTYPES, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
# Where a block of each type keeps its fp16 scales, and minima where it has them (ggml-common.h): byte offsets.
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
          "Q6_K": (208,)}
_BLOCKS = {t.name: t for t in GGML_TYPES.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """nan, inf: how many; first_nan, first_inf: flat index of the first, None without. digest: of all bytes.

    least, largest: of the finite values, None without one and for quantised types. zero: no value but 0. read: False
    for a type whose values are not read; nothing but the digest is known of it. mean, negative: of the finite values
    and the share of them below 0, where `sums` asked. zero_rows: (how many, the first). twins: (rows that repeat an
    earlier one that is not zero, the first such pair), where `rows` asked.
    """

    elements: int
    digest: str
    nan: int = 0
    inf: int = 0
    first_nan: int | None = None
    first_inf: int | None = None
    least: float | None = None
    largest: float | None = None
    zero: bool = False
    read: bool = True
    mean: float | None = None
    negative: float | None = None
    zero_rows: tuple[int, int] | None = None
    twins: tuple[int, tuple[int, int]] | None = None

    @property
    def constant(self) -> bool:
        """Whether all values are one, which is finite."""
        return self.zero or (self.least is not None and self.least == self.largest and not self.nan + self.inf)

    @property
    def absmax(self) -> float:
        """The largest finite |value|, 0 where there is none."""
        return max(abs(self.least or 0.0), abs(self.largest or 0.0))


def scan(data: memoryview, dtype: str, seen: Callable[[int], None], *, sums: bool = False, rows: int = 0) -> Facts:
    """One tensor, read once. rows: how many it has, to look at each of them; 0 leaves them alone."""
    wide = len(data) // rows if rows else 0
    found = _Values(dtype, sums) if dtype in READ else _Blocks(dtype) if dtype in SCALES else None
    by_row = _Rows() if found and 0 < wide <= BLOCK else None
    unit = wide if by_row else found.unit if found else 1
    at_once = max(1, BLOCK // unit) * unit
    whole = Digest()
    room = torch.empty(min(len(data), at_once), dtype=torch.uint8)
    for at in range(0, len(data), at_once):
        n = min(len(data) - at, at_once)
        raw = room[:n]
        buffer(raw)[:] = data[at : at + n]  # files promise no alignment
        whole.update(buffer(raw))
        if found is not None:
            sizes = found.take(raw, n // wide if by_row else 1)
            if by_row is not None:
                by_row.take(buffer(raw), wide, sizes)
        seen(n)
    if found is None:
        return Facts(elements=0, digest=whole.hexdigest(), read=False)
    return replace(found.facts(whole.hexdigest()), zero_rows=by_row.zero if by_row else None,
                   twins=by_row.twins() if by_row else None)


def merged(parts: Sequence[tuple[Facts, Callable[[int], int]]]) -> Facts:
    """Facts of a tensor that lies in several pieces. With each: its own flat index -> that of the whole."""
    facts = [f for f, _ in parts]
    known = [f for f in facts if f.mean is not None]
    n = sum(f.elements for f in known)

    def first(which: str) -> int | None:
        return min((of(i) for f, of in parts if (i := getattr(f, which)) is not None), default=None)

    return Facts(
        elements=sum(f.elements for f in facts), digest=digest("".join(f.digest for f in facts).encode()),
        nan=sum(f.nan for f in facts), inf=sum(f.inf for f in facts),
        first_nan=first("first_nan"), first_inf=first("first_inf"),
        least=min((f.least for f in facts if f.least is not None), default=None),
        largest=max((f.largest for f in facts if f.largest is not None), default=None),
        zero=all(f.zero for f in facts), read=all(f.read for f in facts),
        mean=sum((f.mean or 0.0) * f.elements for f in known) / n if n else None,
        negative=sum((f.negative or 0.0) * f.elements for f in known) / n if n else None)


class _Values:
    """Plain floats."""

    def __init__(self, dtype: str, sums: bool) -> None:
        self.dtype, self.sums = READ[dtype], sums
        self.unit = self.dtype.itemsize
        self.elements = self.nan = self.inf = self.finite = self.below = 0
        self.first: list[int | None] = [None, None]
        self.ends: list[float] = [float("inf"), float("-inf")]
        self.total = 0.0

    def take(self, raw: Tensor, rows: int) -> Tensor:
        """Look at a block; the largest |value| of each of its `rows`, NaN where there is one."""
        x = raw.view(self.dtype)
        x = x.float() if x.element_size() == 1 else x
        if not x.numel():
            return torch.empty(0)
        ends = torch.aminmax(x.view(rows, -1), dim=1) if rows > 1 else torch.aminmax(x.view(-1))
        least, largest = float(ends.min.min()), float(ends.max.max())
        if isfinite(least) and isfinite(largest):
            self._finite(x, least, largest)
        else:
            self._odd(x)
        self.elements += x.numel()
        return torch.maximum(-ends.min, ends.max).view(-1)

    def _finite(self, x: Tensor, least: float, largest: float) -> None:
        self.ends = [min(self.ends[0], least), max(self.ends[1], largest)]
        self.finite += x.numel()
        if self.sums:
            self.total += float(x.sum(dtype=torch.float64))
            self.below += int(torch.count_nonzero(x < 0))

    def _odd(self, x: Tensor) -> None:
        nan, inf = x.isnan(), x.isinf()
        self.nan, self.inf = self.nan + int(nan.sum()), self.inf + int(inf.sum())
        for i, where in enumerate((nan, inf)):
            if self.first[i] is None and where.any():
                self.first[i] = self.elements + int(where.to(torch.uint8).argmax())
        alone = x[~(nan | inf)]
        if alone.numel():
            self._finite(alone, float(alone.min()), float(alone.max()))

    def facts(self, code: str) -> Facts:
        known = self.finite > 0
        return Facts(
            elements=self.elements, digest=code, nan=self.nan, inf=self.inf, first_nan=self.first[0],
            first_inf=self.first[1], least=self.ends[0] if known else None, largest=self.ends[1] if known else None,
            zero=self.finite == self.elements > 0 and self.ends == [0.0, 0.0],
            mean=self.total / self.finite if self.sums and known else None,
            negative=self.below / self.finite if self.sums and known else None)


class _Blocks:
    """Quantised blocks, by their scales; only blocks with one that is not finite are unpacked."""

    def __init__(self, dtype: str) -> None:
        self.kind, self.block = dtype, _BLOCKS[dtype].block
        self.unit = _BLOCKS[dtype].block_bytes
        self.elements = self.nan = self.inf = 0
        self.first: list[int | None] = [None, None]
        self.zero = True

    def take(self, raw: Tensor, rows: int) -> Tensor:
        blocks = raw.view(-1, self.unit)
        scales = torch.cat([blocks[:, at : at + 2] for at in SCALES[self.kind]], 1).view(torch.float16).abs()
        sizes = scales.amax(1).float()
        if not bool((sizes < float("inf")).all()):
            self._odd(blocks, (~sizes.isfinite()).nonzero().view(-1))
        self.zero = self.zero and not bool((sizes != 0).any())
        self.elements += len(blocks) * self.block
        return sizes.view(rows, -1).amax(1)

    def _odd(self, blocks: Tensor, at: Tensor) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # infinity times 0
            x = unpacked(blocks[at].contiguous().view(-1), self.kind, (len(at), self.block))
        for i, where in enumerate((x.isnan(), x.isinf())):
            if self.first[i] is None and where.any():
                one, column = divmod(int(where.view(-1).to(torch.uint8).argmax()), self.block)
                self.first[i] = self.elements + int(at[one]) * self.block + column
        self.nan, self.inf = self.nan + int(x.isnan().sum()), self.inf + int(x.isinf().sum())

    def facts(self, code: str) -> Facts:
        return Facts(elements=self.elements, digest=code, nan=self.nan, inf=self.inf, first_nan=self.first[0],
                     first_inf=self.first[1], zero=self.zero and self.elements > 0)


class _Rows:
    """The rows of a table: which are zero, and which are there twice."""

    def __init__(self) -> None:
        self.zero: tuple[int, int] | None = None
        self.count = 0
        self.codes: list[Tensor] = []
        self.at: list[Tensor] = []

    def take(self, block: memoryview, wide: int, sizes: Tensor) -> None:
        zero = sizes == 0
        if n := int(zero.sum()):
            before, first = self.zero or (0, self.count + int(zero.to(torch.uint8).argmax()))
            self.zero = (before + n, first)
        other = (~zero).nonzero().view(-1)
        self.codes.append(torch.tensor([_code(block[i * wide : (i + 1) * wide]) for i in other.tolist()],
                                       dtype=torch.int64))
        self.at.append(other + self.count)
        self.count += len(sizes)

    def twins(self) -> tuple[int, tuple[int, int]] | None:
        if not self.codes:
            return None
        codes, order = torch.sort(torch.cat(self.codes), stable=True)
        again = (codes[1:] == codes[:-1]).nonzero().view(-1)
        if not len(again):
            return None
        at = torch.cat(self.at)[order]
        first = again[int(at[again + 1].argmin())]
        return len(again), (int(at[first]), int(at[first + 1]))


def _code(row: memoryview) -> int:
    return int(digest(row)[:15], 16)  # 60 bits, for int64 has a sign
