"""Edits whose value is a number that no list holds: found by bringing the logits nearest, and then rounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from llamactl.spec.misread import attention
from llamactl.spec.mistakes import Change
from llamactl.spec.model import Model
from llamactl.verify.matching import Target
from llamactl.verify.network import Network

POINTS = 20  # of the first, coarse look
STEPS = 32  # of the fine one
TOKENS = 16
SPARE = 16  # tokens beyond the width of the stream that a fitted matrix has to hold for


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """edit with a place for its number; between lo and hi, by factors. blind: as in spec.mistaken.Tries.

    inner: it changes blocks.
    """

    edit: str
    lo: float
    hi: float
    blind: bool
    inner: bool = True


def _fits(model: Model) -> list[Fit]:
    a = attention(model)
    out = []
    if a is not None and a.rope is not None:
        out += [Fit(edit="rope_theta={}", lo=10.0, hi=1e9, blind=True),
                Fit(edit="rope_scaling=linear:{}", lo=1 / 64, hi=64.0, blind=True)]
    if a is not None:
        own = a.scale if a.scale is not None else a.usual_scale
        out += [Fit(edit="attn_scale={}", lo=abs(own) / 100, hi=abs(own) * 100, blind=True),
                Fit(edit="attn_softcap={}", lo=0.5, hi=500.0, blind=True)]
    out += [Fit(edit="logits_scale={}", lo=0.01, hi=100.0, blind=False, inner=False),
            Fit(edit="embed_scale={}", lo=0.01, hi=1000.0, blind=False, inner=False),
            Fit(edit="norm_eps={}", lo=1e-9, hi=1e-1, blind=False),
            Fit(edit="norm_eps={}:final", lo=1e-9, hi=1e-1, blind=False, inner=False),
            Fit(edit="residual_scale={}", lo=0.05, hi=20.0, blind=False),
            Fit(edit="logits_softcap={}", lo=1.0, hi=500.0, blind=False, inner=False)]
    return out


_BLOCK = tuple(Fit(edit=f"norm_eps={{}}:{place}", lo=1e-9, hi=1e-1, blind=False) for place in ("attn", "mlp"))


def fitted(net: Network, target: Target, *, seen: bool, stages: Sequence[int], late: Callable[[], bool]
           ) -> list[Change]:
    """Changes with a fitted number that leave nothing but arithmetic. seen: as in sweep.swept."""
    out = []
    for f in _fits(net.model):
        if late():
            break
        if f.blind == seen and not f.edit.startswith("norm_eps"):
            continue
        lengths = [1] if seen else sorted({min(n, net.tokens) for n in (TOKENS, 8 * TOKENS, net.tokens)})
        fars = [partial(_off_by, net, target, n) for n in lengths]
        text = fit(f, fars, target.limit, lambda x: all(target.reached(net, [Change(x)], n) for n in stages), late)
        out += [Change(text)] if text else []
    return out


def fitted_block(model: Model, fars: Sequence[Callable[[str], float]], floor: float, holds: Callable[[str], bool],
                 late: Callable[[], bool]) -> list[str]:
    """The same for one block. fars: the error that an edit leaves there, on growing parts of the text."""
    out = []
    for f in (*_fits(model), *_BLOCK):
        if f.inner and (text := fit(f, fars, floor, holds, late)):
            out.append(text)
    return out


def fit(f: Fit, fars: Sequence[Callable[[str], float]], limit: float, holds: Callable[[str], bool],
        late: Callable[[], bool]) -> str | None:
    """The edit whose number leaves nothing, with as few digits as will do; None without one.

    A short text finds about where it is, and each longer one more exactly: there small errors of a frequency add up.
    """
    best = _least(f, fars[0], limit, late)
    wide = math.log(1.1)
    for n, far in enumerate(fars):
        if best is None or late():
            return None
        for digits in range(1, 8):
            text = f.edit.format(repr(float(f"{best:.{digits}g}")))
            if far(text) <= limit and holds(text):
                return text
        if n + 1 < len(fars):
            at = math.log(best)
            best = math.exp(_golden(_logarithmic(f, fars[n + 1]), at - wide, at + wide, limit, late)[0])
            wide /= 8
    return None


@torch.no_grad()
def other_head(net: Network, target: Target) -> Tensor | None:
    """The head's matrix (V, D) that makes the right stream the logits, where there is exactly one that does.

    None where the logits are not linear in the stream, and where the text is too short to tell: of T tokens D are used
    up by the fit, and only those beyond them prove anything.
    """
    part = net.model.head
    if net.tokens < net.model.hidden + SPARE or part.softcap or part.bias or part.unit_rows or (
            target.log_probs or target.logits.shape[1] != part.vocab):
        return None
    run = net.opened((), net.tokens)
    assert run is not None
    x = run.normed(net.streams(net.tokens)[-1])[0].double() * (part.scale or 1.0)
    half = net.model.hidden + SPARE // 2
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    fit, rest = order[:half], order[half:]
    weight = torch.linalg.lstsq(x[fit], target.logits[fit].double()).solution
    if float((x[rest] @ weight - target.logits[rest]).abs().max()) > target.limit:
        return None
    found: Tensor = weight.t().float().contiguous()
    return found


def _least(f: Fit, far: Callable[[str], float], limit: float, late: Callable[[], bool]) -> float | None:
    """The number that brings two sides nearest; None where none comes within reach."""
    at = _logarithmic(f, far)
    lo, hi = math.log(f.lo), math.log(f.hi)
    grid = [lo + (hi - lo) * k / (POINTS - 1) for k in range(POINTS)]
    found = []
    for x in grid:
        if late():
            return None
        found.append(at(x))
    least = min(range(POINTS), key=lambda k: found[k])
    if found[least] > 0.7 * sorted(found)[POINTS // 2]:
        return None  # no valley
    best, left = _golden(at, grid[max(least - 1, 0)], grid[min(least + 1, POINTS - 1)], limit, late)
    return math.exp(best) if left <= limit else None


def _logarithmic(f: Fit, far: Callable[[str], float]) -> Callable[[float], float]:
    return lambda log: far(f.edit.format(repr(math.exp(log))))


def _golden(at: Callable[[float], float], a: float, b: float, limit: float, late: Callable[[], bool]
            ) -> tuple[float, float]:
    """(where, how little) the least of `at` between a and b is, by golden sections; enough once it is arithmetic."""
    golden = (math.sqrt(5) - 1) / 2
    c, d = b - golden * (b - a), a + golden * (b - a)
    fc, fd = at(c), at(d)
    for _ in range(STEPS):
        if fc < fd:
            b, d, fd = d, c, fc
            c = b - golden * (b - a)
            fc = at(c)
        else:
            a, c, fc = c, d, fd
            d = a + golden * (b - a)
            fd = at(d)
        if min(fc, fd) <= limit / 4 or late():
            break
    return (c, fc) if fc < fd else (d, fd)


def _off_by(net: Network, target: Target, n: int, text: str) -> float:
    got = net.logits([Change(text)], n)
    return math.inf if got is None else target.off(got)
