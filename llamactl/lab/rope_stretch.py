"""Which rotated pairs meet angles beyond training when the context is stretched?

Source: linear, arXiv:2306.15595; NTK-aware and YaRN, arXiv:2309.00071; llama3, Meta's Llama 3.1 code; LongRoPE,
arXiv:2402.13753; ALiBi, arXiv:2108.12409.

The description counts such pairs by arithmetic (`llamactl rope`). Here the network's own table of cosines and sines is
read back as angles, and each angle of the longer context is looked for among those of the trained one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from llamactl.analysis.experiment import Claim, Finding, Grid, Outcome, found
from llamactl.analysis.rope import restretch, rope
from llamactl.lab._setting import Setting
from llamactl.net import kernels
from llamactl.net.attention import SelfAttention, Step
from llamactl.net.positions import RopeTable, alibi_slopes
from llamactl.spec.model import Model
from llamactl.spec.parts import Attention
from llamactl.spec.rope import Rope

TARGET = 32_768
METHODS = (None, "linear", "ntk", "yarn", "llama3")
MODEL, LONG, LLAMA31 = "llama-3-8b", "phi-3-mini-128k", "llama-3.1-8b"
HEADS, FAR = 8, 1_024  # of ALiBi's slopes; a distance to show a penalty at
TURN = 2 * math.pi
EXACT = 1e-9  # in fp64


def run(given: Setting) -> Outcome:
    """Unseen pairs under each scheme, Llama 3.1's 64 pairs, and ALiBi's slopes as its attention shows them."""
    own = [(name, None, given.describe(name).context.usable or TARGET) for name in (LLAMA31, LONG)]
    cases = [*((MODEL, m, TARGET) for m in METHODS), *((name, None, TARGET) for name, _, _ in own), *own]
    findings, rows, otherwise = [], [], 0
    for name, method, target in cases:
        given.tell(f"rope-stretch: {name}, {method or 'as it is'}, {target:,} positions")
        model = given.describe(name)
        (read,) = rope(model, target=target, method=method).rotations
        scheme = read.scheme if method is None and read.scheme != "default" else method or "none"
        seen = _unseen(model, method, target)
        findings.append(found(f"{scheme}: pairs with unseen angles at {target:,}", sum(seen), unit="pairs",
                              of=f"{name}, {len(seen)} pairs", expected=read.unseen))
        otherwise += sum(p.unseen != x for p, x in zip(read.pairs, seen, strict=True))
        rows.append((scheme, name, read.trained_context, target, read.untouched, read.blended, read.slowed, sum(seen),
                     _listed([j for j, x in enumerate(seen) if x])))
    columns = ("scheme", "model", "trained positions", "positions", "untouched", "slowed less", "slowed most",
               "unseen", "which unseen")
    return Outcome(
        claims=(Claim(claim="a pair that made no whole turn in training meets new angles past it, unless it is slowed "
                            "as much as the context grows",
                      formula="positions x frequency > trained positions x trained frequency, where that is < 2 pi; "
                              "claimed: what `llamactl rope` counts by it",
                      findings=(*findings, found("pairs judged otherwise than by arithmetic", otherwise,
                                                 of="all schemes", expected=0))),
                Claim(claim="Llama 3.1 slows 29 of its 64 pairs by 8, leaves 29 and blends 6",
                      formula="by turns in 8,192 positions: under 1, over 4, between", findings=tuple(_llama31(given))),
                Claim(claim="ALiBi has no angles: a penalty grows with the distance, at another rate in each head",
                      formula="slope_i = 2^(-8 i / n), score - slope_i x distance", findings=tuple(_alibi(given)))),
        grids=(Grid(title="pairs under each scheme", columns=columns, rows=tuple(rows)), _penalties()))


def _unseen(model: Model, method: str | None, target: int) -> list[bool]:
    """Of each pair, whether some angle up to `target` is further from all trained ones than those stand apart."""
    layer = model.layers[0].attn
    assert isinstance(layer, Attention)
    assert layer.rope is not None
    bare = replace(layer.rope, scaling=None)
    trained = model.context.trained or 0
    now = layer.rope if method is None else restretch(layer.rope, method, trained, target)
    seen, asked = _angles(bare, model, trained), _angles(now, model, target)
    steps = [float(x) for x in seen[:, 1] - seen[:, 0]]  # the angle of one position: none is beyond a turn
    return [_far(s.sort().values, a) > step * (1 + 1e-6) for s, a, step in zip(seen, asked, steps, strict=True)]


def _angles(rope: Rope, model: Model, length: int) -> Tensor:
    """(pairs, length) angles in 0 .. 2 pi of the network's own table, in fp64."""
    with kernels.plain():
        table = RopeTable(rope, model, dtype=torch.float64, device="cpu", length=length).upto(length)
    half = rope.dim // 2
    found = torch.atan2(table.sin[:length, half:], table.cos[:length, half:]).t().contiguous()
    return torch.where(found < 0, found + TURN, found)


def _far(seen: Tensor, asked: Tensor) -> float:
    """The largest distance, around the circle, of an asked angle from the nearest seen one (sorted)."""
    ring = torch.cat((seen[-1:] - TURN, seen, seen[:1] + TURN))
    at = torch.searchsorted(ring, asked).clamp(1, len(ring) - 1)
    return float(torch.minimum(asked - ring[at - 1], ring[at] - asked).abs().max())


def _listed(pairs: list[int]) -> str:
    """0, 1, 2, 5 -> 0-2, 5."""
    runs: list[list[int]] = []
    for j in pairs:
        if runs and runs[-1][1] == j - 1:
            runs[-1][1] = j
        else:
            runs.append([j, j])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"


def _llama31(given: Setting) -> Iterator[Finding]:
    """As its config has it, the slowing read off the network's table at position 1."""
    model = given.describe(LLAMA31)
    layer = model.layers[0].attn
    assert isinstance(layer, Attention)
    assert layer.rope is not None
    bare, now = (_angles(r, model, 2)[:, 1] for r in (replace(layer.rope, scaling=None), layer.rope))
    ratio = bare / now
    for what, kind, expected in (("slowed by 8", (ratio - 8).abs() < 1e-6, 29), ("left alone", (ratio - 1).abs() < 1e-6,
                                 29), ("blended", ((ratio - 1).abs() >= 1e-6) & ((ratio - 8).abs() >= 1e-6), 6)):
        yield found(what, int(kind.sum()), of=f"{LLAMA31}, {len(ratio)} pairs", unit="pairs", expected=expected)


def _alibi(given: Setting) -> Iterator[Finding]:
    """Slopes as the attention adds them: with q = 0 a token's shares are exp(-slope x distance), to a factor."""
    t, wide = 16, torch.float64  # in fp32, logarithms of small shares lose digits
    part = Attention(hidden=HEADS * t, n_heads=HEADS, n_kv_heads=HEADS, head_dim=t, alibi=True)
    attn = SelfAttention(part, dtype=wide, device="cpu")
    zeros = torch.zeros(1, HEADS, t, t, dtype=wide)
    v = torch.eye(t, dtype=wide).expand_as(zeros)
    shares = attn.attend(zeros, zeros, v, Step(0, t, device="cpu", dtype=wide))
    logs = shares.view(t, HEADS, t)[-1].log()  # (heads, keys) of the last token
    slopes = logs[:, 1:] - logs[:, :-1]
    want, of = 2.0 ** (-8 * torch.arange(1, HEADS + 1).double() / HEADS), "q and k all zero"
    for i in (1, HEADS):
        own = slopes[i - 1]
        yield found(f"slope of head {i} of {HEADS}", float(own.median()), of=of, spread=own.tolist(),
                    expected=float(want[i - 1]), tolerance=EXACT)
    off = (slopes / want[:, None] - 1).abs().amax(-1)
    yield found(f"slopes of all {HEADS} heads: largest share by which one is off", float(off.max()), of=of,
                spread=off.tolist(), expected=0.0, tolerance=EXACT)


def _penalties() -> Grid:
    rows = tuple((i, slope, -slope * FAR, -slope * TARGET) for i, slope in enumerate(alibi_slopes(HEADS), 1))
    return Grid(title="ALiBi: what is added to a score", columns=("head", "slope", f"at a distance of {FAR:,}",
                                                                  f"at {TARGET:,}"), rows=rows)
