"""Edits whose value is a number that no list holds: found by bringing the logits nearest, and then rounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
SPARE = 32  # tokens beyond the width of the stream that a fitted matrix has to hold for


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
        own = a.scale if a.scale is not None else a.head_dim**-0.5
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
        n = 1 if seen else min(TOKENS, net.tokens)
        text = fit(f, lambda x, n=n: _off(net, target, Change(x), n), target.limit,  # type: ignore[misc]
                   lambda x: all(target.reached(net, [Change(x)], n) for n in stages), late)
        out += [Change(text)] if text else []
    return out


def fitted_block(model: Model, far: Callable[[str], float], floor: float, holds: Callable[[str], bool],
                 late: Callable[[], bool]) -> list[str]:
    """The same for one block: far, the error that an edit leaves there; floor, what counts as arithmetic."""
    out = []
    for f in (*_fits(model), *_BLOCK):
        if f.inner and (text := fit(f, far, floor, holds, late)):
            out.append(text)
    return out


def fit(f: Fit, far: Callable[[str], float], limit: float, holds: Callable[[str], bool], late: Callable[[], bool]
        ) -> str | None:
    """The edit whose number leaves nothing, with as few digits as will do; None without one."""
    best = _least(f, far, limit, late)
    if best is None:
        return None
    for digits in range(1, 8):
        text = f.edit.format(repr(float(f"{best:.{digits}g}")))
        if far(text) <= limit and holds(text):
            return text
    return None


@torch.no_grad()
def other_head(net: Network, target: Target) -> Tensor | None:
    """The head's matrix (V, D) that makes the right stream the logits, where there is exactly one that does.

    None where the logits are not linear in the stream, and where the text is too short to tell: of T tokens D are used
    up by the fit, and only those beyond them prove anything.
    """
    part = net.model.head
    if net.tokens < net.model.hidden + SPARE or part.softcap or part.bias or part.unit_rows:
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


def _off(net: Network, target: Target, change: Change, n: int) -> float:
    got = net.logits([change], n)
    return math.inf if got is None else target.off(got)


def _least(f: Fit, far: Callable[[str], float], limit: float, late: Callable[[], bool]) -> float | None:
    """The number that brings two sides nearest; None where none comes within reach."""
    def at(log: float) -> float:
        return far(f.edit.format(repr(math.exp(log))))

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
    a, b = grid[max(least - 1, 0)], grid[min(least + 1, POINTS - 1)]
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
    return math.exp(c if fc < fd else d) if min(fc, fd) <= limit else None
