"""How far the second logits are from the first, in numbers for the report; whatever the two hold.

shapes: T tokens, V vocabulary entries, K of them known. Everything is computed in fp64, some rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llamactl.analysis.verification import Measures
from llamactl.net.divergence import blocks, kl

BEST = 5
QUARTERS = 4


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known of each token, (rows,) tensors in the order of the text."""

    kl: list[Tensor] = field(default_factory=list)
    relative: list[Tensor] = field(default_factory=list)
    top1: list[Tensor] = field(default_factory=list)
    top5: list[Tensor] = field(default_factory=list)
    losses: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))


@torch.no_grad()
def measure(a: Tensor, b: Tensor, ids: Sequence[int] | Tensor | None, limit: float) -> Measures:
    """Measures of b (T, V) against a (T, V) on the tokens `ids` (T,), without which there is no loss.

    limit: the |dlogit| beyond which a column counts. Infinities and NaNs are counted, and what depends on them is None.
    ValueError for other or different shapes.
    """
    if a.shape != b.shape or a.dim() != 2 or not a.numel():
        raise ValueError(f"logits are {tuple(a.shape)} and {tuple(b.shape)}, not both (tokens, vocabulary)")
    said = _next(ids, *a.shape)
    found, largest, odd = _Found(), 0.0, [0, 0]
    beyond = torch.zeros(a.shape[1], dtype=torch.bool)
    for at, (x, y) in blocks(a, b):
        d = x - y
        size = d.abs()
        top = float(size.max())
        if not math.isfinite(top):
            odd = [n + int((~t.isfinite()).sum()) for n, t in zip(odd, (x, y), strict=True)]
        largest = max(largest, top) if not math.isnan(largest + top) else math.nan
        beyond |= (~(size <= limit)).any(0)  # a NaN is beyond every limit
        _rows(found, x, y, d, None if said is None else said[at : at + len(x)])
    numbers = _numbers(torch.cat(found.kl))
    loss = [_mean(_numbers(torch.cat(each))) if each else None for each in found.losses]
    return Measures(
        tokens=len(a), max_kl=_most(numbers), mean_kl=_mean(numbers), max_abs_dlogit=_number(largest),
        max_relative=_most(_numbers(torch.cat(found.relative))), top1_agreement=_mean(_numbers(torch.cat(found.top1))),
        top5_agreement=_mean(_numbers(torch.cat(found.top5))), kl_position_0=numbers[0],
        kl_by_quarter=_by_quarter(numbers), kl_by_position=numbers, columns=int(beyond.sum()), columns_of=a.shape[1],
        first_column=_first(beyond), loss_first=loss[0], loss_second=loss[1], non_finite=(odd[0], odd[1]))


@torch.no_grad()
def measure_top(values: Tensor, indices: Tensor, b: Tensor, ids: Sequence[int] | Tensor | None, limit: float
                ) -> Measures:
    """Measures of b (T, V) where of the first logits only the K largest are known: values and their columns (T, K).

    Differences are those of the known entries; KL, relative error and the first loss do not exist. top5_agreement:
    None where K < 5. ValueError for other shapes, and for a column that is none of b's.
    """
    if values.dim() != 2 or values.shape != indices.shape or b.shape[:-1] != values.shape[:1] or not values.numel():
        raise ValueError(f"values {tuple(values.shape)}, columns {tuple(indices.shape)}, logits {tuple(b.shape)}")
    if int(indices.min()) < 0 or int(indices.max()) >= b.shape[1]:
        raise ValueError(f"columns {int(indices.min())}..{int(indices.max())} of {b.shape[1]:,}")
    said = _next(ids, *b.shape)
    d = (values.double() - b.gather(1, indices).double()).abs()
    wrong, largest = ~(d <= limit), float(d.max())
    beyond = torch.zeros(b.shape[1], dtype=torch.bool)
    beyond[indices[wrong]] = True
    odd = (int((~values.isfinite()).sum()), sum(int((~y.isfinite()).sum()) for _, (y,) in blocks(b)))
    k = min(BEST, b.shape[1])
    top1, top5, nats = [], [], []
    for at, (y,) in blocks(b):
        best, known = y.topk(k).indices, values[at : at + len(y)].double()
        order = indices[at : at + len(y)].gather(1, known.argsort(dim=1, descending=True, stable=True))
        sure = known.isfinite().all(-1) & y.isfinite().all(-1)
        top1.append(_sure(best[:, 0] == order[:, 0], sure))
        top5.append(_sure(_shared(best, order[:, :k]), sure))
        if said is not None:
            nats.append(_loss(y.log_softmax(-1), said[at : at + len(y)]))
    none: tuple[float | None, ...] = (None,) * len(b)
    return Measures(
        tokens=len(b), max_kl=None, mean_kl=None, max_abs_dlogit=_number(largest), max_relative=None,
        top1_agreement=_mean(_numbers(torch.cat(top1))),
        top5_agreement=_mean(_numbers(torch.cat(top5))) if values.shape[1] >= k else None, kl_position_0=None,
        kl_by_quarter=none[:QUARTERS] if len(b) >= QUARTERS else (None,) * QUARTERS, kl_by_position=none,
        columns=int(beyond.sum()), columns_of=b.shape[1], first_column=_first(beyond), loss_first=None,
        loss_second=_mean(_numbers(torch.cat(nats))) if nats else None, non_finite=odd)


@torch.no_grad()
def gap(a: Tensor, b: Tensor) -> float:
    """The largest |a - b| of two (T, V), infinite where it does not exist: all that a search for the cause looks at."""
    if a.shape != b.shape:
        raise ValueError(f"logits are {tuple(a.shape)} and {tuple(b.shape)}")
    largest = max((float((x - y).abs().max()) for _, (x, y) in blocks(a, b)), key=lambda d: math.inf if d != d else d)
    return largest if math.isfinite(largest) else math.inf


def common(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, str | None]:
    """The columns that both (T, V) and (T, V') have, as views, and what is left out, in words; None for nothing."""
    first, second = a.shape[1], b.shape[1]
    if first == second:
        return a, b, None
    both, which = min(first, second), "first" if first > second else "second"
    said = (f"the first has {first:,} vocabulary entries, the second {second:,}: entries {both:,} to "
            f"{max(first, second) - 1:,} of the {which} are compared with nothing")
    return a[:, :both], b[:, :both], said


def _rows(found: _Found, x: Tensor, y: Tensor, d: Tensor, said: Tensor | None) -> None:
    """Take in some rows of both, and of their difference; NaN for what a row that is not finite does not have."""
    p, q = x.log_softmax(-1), y.log_softmax(-1)
    found.kl.append(kl(p, q))
    off, of = ((t - t.mean(-1, keepdim=True)).norm(dim=-1) for t in (d, x))
    found.relative.append(torch.where(off == 0, off, off / of))
    k = min(BEST, x.shape[1])
    first, second = x.topk(k).indices, y.topk(k).indices
    sure = d.isfinite().all(-1)
    found.top1.append(_sure(first[:, 0] == second[:, 0], sure))
    found.top5.append(_sure(_shared(first, second), sure))
    if said is not None:
        for nats, chance in zip(found.losses, (p, q), strict=True):
            nats.append(_loss(chance, said))


def _shared(a: Tensor, b: Tensor) -> Tensor:
    """(rows,) the share of the k entries of each row of a that the row of b has too."""
    return (a[:, :, None] == b[:, None, :]).any(-1).double().mean(-1)


def _sure(x: Tensor, sure: Tensor) -> Tensor:
    return torch.where(sure, x.double(), math.nan)


def _next(ids: Sequence[int] | Tensor | None, tokens: int, vocab: int) -> Tensor | None:
    """(T - 1,) what each token but the last is followed by; None where there is no loss to be had."""
    if ids is None:
        return None
    said = torch.as_tensor(ids, dtype=torch.long)
    if said.shape != (tokens,):
        raise ValueError(f"ids are {tuple(said.shape)}, for {tokens} tokens")
    told = said[1:]
    return told if len(told) and int(told.min()) >= 0 and int(told.max()) < vocab else None


def _loss(chance: Tensor, said: Tensor) -> Tensor:
    """Nats of the tokens `said`, one fewer than rows at the end of the text."""
    return -chance[: len(said)].gather(1, said[:, None])[:, 0]


def _number(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _numbers(x: Tensor) -> tuple[float | None, ...]:
    return tuple(map(_number, x.tolist()))


def _most(x: Sequence[float | None]) -> float | None:
    known = [value for value in x if value is not None]
    return max(known) if known and len(known) == len(x) else None


def _mean(x: Sequence[float | None]) -> float | None:
    known = [value for value in x if value is not None]
    return _number(math.fsum(known) / len(known)) if known and len(known) == len(x) else None


def _by_quarter(x: Sequence[float | None]) -> tuple[float | None, ...]:
    at = [len(x) * n // QUARTERS for n in range(QUARTERS + 1)]
    return tuple(_mean(x[start:end]) for start, end in zip(at, at[1:], strict=False))


def _first(beyond: Tensor) -> int | None:
    found = beyond.nonzero()
    return int(found[0, 0]) if len(found) else None
