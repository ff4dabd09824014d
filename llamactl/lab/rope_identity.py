"""Does the score of a rotated query and key depend on their distance alone?

Source: RoFormer, arXiv:2104.09864, section 3.2.2, equation 16; a learned table: GPT-2.

Every score is q . k, as it is before attention scales it. fp64 takes its angles in fp64 too. shapes: N draws, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from llamactl.analysis.experiment import Cell, Claim, Finding, Grid, Outcome, found, skipped
from llamactl.lab._drawn import network
from llamactl.lab._setting import NO_CHECKPOINT, Checkpoint, Setting
from llamactl.net import kernels
from llamactl.net.attention import SelfAttention
from llamactl.net.decoder import Decoder
from llamactl.net.positions import RopeTable, Turn, rotate
from llamactl.spec.parts import Attention, LearnedPositions
from llamactl.spec.rope import Rope

OFFSETS = (0, 1, 7, 63, 200)
SHIFTS = (0, 1, 10, 100, 1_000, 10_000, 100_000)
NEAR = 1_000  # the shift up to which a head is held to HEAD
DRAWS, STEPS = 200, 4_000  # of q and k: for the spreads, and for one step closer
PAIR, HEAD, SAME, STEP = 2e-6, 3e-4, 1e-4, 1.0  # the claim is of real numbers; what rounding does to it is ours
FP64 = {2: 1e-14, 32: 1e-10}  # by width
TIMES = 1_000  # what a table changes a score by, over what a rotation does: at least
TEXT = 64  # pairs of tokens for the learned table
TABLE = 1_024  # GPT-2's
EXACT = "its angles are whole numbers, which fp32 holds exactly"
CLAIM = "the score of a rotated query and key depends on the distance of their positions alone"
FORMULA = "(R_m q) . (R_n k) = q . R_(n-m) k"


class Rotated(NamedTuple):
    """Pairs of q and k (N, 1, 1, D), and the table that turns them."""

    q: Tensor
    k: Tensor
    table: RopeTable
    pairs: str

    def score(self, m: int, n: int) -> Tensor:
        """(N,) q at position m against k at n."""
        q, k = (rotate(x, Turn(self.table.cos[at : at + 1], self.table.sin[at : at + 1]), self.pairs)
                for x, at in ((self.q, m), (self.k, n)))
        return (q * k).sum(-1).flatten().cpu()

    def alone(self, pair: int) -> Rotated:
        """The same with all lanes of q and k zero but those of one pair."""
        half = self.q.shape[-1] // 2
        lanes = torch.zeros(2 * half, dtype=self.q.dtype, device=self.q.device)
        lanes[[pair, pair + half]] = 1
        return self._replace(q=self.q * lanes, k=self.k * lanes)

    def spread(self, offset: int, most: int) -> Tensor:
        """(N,) largest less smallest score at one distance, over the shifts up to `most`."""
        scores = torch.stack([self.score(s + offset, s) for s in SHIFTS if s <= most])
        return scores.amax(0) - scores.amin(0)

    def rounding(self, offset: int, most: int) -> Tensor:
        """(N,) what the spread may be where each angle is rounded once: half a unit in its last place for each of m
        and n, times the lengths of the pair of q and of k; and 32 roundings of the sum itself.
        """
        half, q, k = self.q.shape[-1] // 2, self.q.cpu(), self.k.cpu()
        weight = (q[..., :half].hypot(q[..., half:]) * k[..., :half].hypot(k[..., half:])).flatten(1).double()
        far = sorted((s for s in SHIFTS if s <= most), reverse=True)[:2]  # the two of largest error
        own = self.table.frequencies.cpu()
        error = sum((_half_unit(own, at) for s in far for at in (s + offset, s)), torch.zeros_like(own).double())
        eps = torch.finfo(self.q.dtype).eps
        return weight @ error + 32 * eps * weight.sum(-1)


def run(given: Setting) -> Outcome:
    """Spreads over positions in fp32 and fp64, a pair and a head; one step closer; and what a learned table does."""
    rope = Rope(dim=2, theta=10_000.0)
    head = replace(rope, dim=32)
    made = {(r.dim, dtype): _rotated(given, r, dtype) for r in (rope, head)
            for dtype in (torch.float32, *((torch.float64,) if given.wide else ()))}
    claims = [Claim(claim=CLAIM, formula=FORMULA, findings=tuple(_spreads(made)) + (() if given.wide else (
        skipped("in fp64", "the device has no fp64", of="drawn q and k"),)))]
    claims.append(_steps(given))
    claims.append(_learned(given))
    return Outcome(claims=tuple(claims), grids=(_grid(made),))


def _rotated(given: Setting, rope: Rope, dtype: torch.dtype, count: int = DRAWS) -> Rotated:
    draws = given.draws()
    q, k = (torch.randn(count, 1, 1, rope.dim, generator=draws, dtype=torch.float64).to(dtype).to(given.device)
            for _ in range(2))
    model = given.describe("smollm2-135m")
    with kernels.plain() if dtype is torch.float64 else nullcontext():
        table = RopeTable(rope, model, dtype=dtype, device=given.device, length=1)
        return Rotated(q, k, table.upto(max(SHIFTS) + max(OFFSETS) + 1), rope.pairs)


def _spreads(made: dict[tuple[int, torch.dtype], Rotated]) -> Iterator[Finding]:
    for (dim, dtype), r in made.items():
        name = f"{'one pair of 1 rad a position' if dim == 2 else f'a head of {dim}'}, fp{torch.finfo(dtype).bits}"
        of, far = f"{DRAWS} drawn q and k", max(SHIFTS)
        all_ = torch.stack([r.spread(x, far) for x in OFFSETS])
        if dim == 2 or dtype is torch.float64:
            limit = FP64[dim] if dtype is torch.float64 else PAIR
            yield found(f"{name}: spread to {far:,}, of 99 in 100", float(all_.flatten().quantile(0.99)), of=of,
                        spread=all_.flatten().tolist(), expected=limit, relation="<=", ours=True,
                        note=EXACT if limit == PAIR else None)
            continue
        own = float(r.table.frequencies[1])
        yield from _bounded(f"one pair of {own:.2g} rad a position, fp32", r.alone(1), own)
        near = torch.stack([r.spread(x, NEAR) for x in OFFSETS])
        yield found(f"{name}: spread to {NEAR:,}, of 99 in 100", float(near.flatten().quantile(0.99)), of=of,
                    spread=near.flatten().tolist(), expected=HEAD, relation="<=", ours=True)
        yield from _bounded(name, r, own)


def _bounded(name: str, r: Rotated, frequency: float) -> Iterator[Finding]:
    """The spread over all shifts where angles are rounded, and its share of what that allows. frequency: the fastest
    that is not 1, whose angles are the farthest apart.
    """
    of, far = f"{DRAWS} drawn q and k", max(SHIFTS)
    all_ = torch.stack([r.spread(x, far) for x in OFFSETS])
    at = torch.tensor([frequency])
    angle, unit = frequency * far, 2 * float(_half_unit(at, far))
    yield found(f"{name}: spread to {far:,}", float(all_.max()), of=of, spread=all_.flatten().tolist(),
                note=f"median {float(all_.median()):.1e}; it grows with the position: in fp32 angles near "
                f"{angle:,.0f} rad stand {unit:.1e} apart, in fp64 they do not")
    share = torch.stack([r.spread(x, far) / r.rounding(x, far) for x in OFFSETS])
    yield found(f"{name}: that spread / what rounding of the angles allows", float(share.max()), of=of,
                spread=share.flatten().tolist(), expected=1.0, relation="<=", ours=True)


def _half_unit(frequencies: Tensor, at: int) -> Tensor:
    """Half a unit in the last place of the angles at a position; 0 where the angle is a whole number held exactly."""
    angles = frequencies * at
    unit = torch.nextafter(angles, torch.full_like(angles, torch.inf)) - angles
    return torch.where(frequencies == 1, 0.0, unit.double() / 2)


def _steps(given: Setting) -> Claim:
    """(10, 3) against (1010, 1003) and (10, 4), in a head of SmolLM2's."""
    attn = given.describe("smollm2-135m").layers[0].attn
    assert isinstance(attn, Attention)
    assert attn.rope is not None
    r = _rotated(given, attn.rope, torch.float32, STEPS)
    here, there, closer = (r.score(*at).double() for at in ((10, 3), (1_010, 1_003), (10, 4)))
    same, step = (here - there).abs(), (here - closer).abs()
    of = f"{STEPS:,} drawn q and k, head {attn.head_dim}, base {attn.rope.theta:,.0f}"
    return Claim(claim="the same distance far away changes nothing, one step closer changes a lot", formula=FORMULA,
                 findings=(found("(10, 3) less (1010, 1003), fp32: median", float(same.median()), of=of,
                                 spread=same.tolist(), expected=SAME, relation="<=", ours=True),
                           found("(10, 3) less (10, 4): median", float(step.median()), of=of, spread=step.tolist(),
                                 expected=STEP, relation=">=", ours=True)))


def _learned(given: Setting) -> Claim:
    """The same pairs of tokens in one network with a table, and in the same with rotations."""
    model = given.small("gpt2", "n_layers=1", "n_heads=2", "head_dim=32", "hidden=64", "vocab=256")
    assert isinstance(model.positions, LearnedPositions)
    table = network(model, given.draws(), given.device)
    turned = network(given.small("gpt2", "n_layers=1", "n_heads=2", "head_dim=32", "hidden=64", "vocab=256",
                                 "positions=rope"), given.draws(), given.device)
    a, b = (_moved(net, model.positions.rows) for net in (table, turned))
    of = f"a drawn network with {model.positions.rows:,} positions"
    findings = [
        found("spread with a learned table: median", float(a.median()), of=of, spread=a.tolist()),
        found("spread with RoPE: median", float(b.median()), of=of, spread=b.tolist(), expected=HEAD, relation="<=",
              ours=True),
        found("table / RoPE", float(a.median() / b.median()), of=of, expected=TIMES, relation=">=", ours=True)]
    findings += [skipped("spread in trained weights", NO_CHECKPOINT, of=kind) for kind in given.lacking()]
    findings += [x for c in given.checkpoints for x in _trained(c)]
    return Claim(claim="with a learned table the same pair of tokens at the same distance scores otherwise elsewhere",
                 formula="q = W_q norm(x_i + p_m), k = W_k norm(x_j + p_n)", findings=tuple(findings))


def _trained(c: Checkpoint) -> Iterator[Finding]:
    """The first layer of trained weights."""
    table, what = c.model.positions, "spread in the first layer: median"
    if c.positions is None:
        yield skipped(what, c.otherwise, of=c.id)
        return
    attn = c.model.layers[0].attn
    if not isinstance(attn, Attention) or (attn.rope is None) == (table is None):
        yield skipped(what, "its first layer turns no plain queries and keys", of=c.id)
        return
    rows = table.rows - table.offset if isinstance(table, LearnedPositions) else TABLE
    spread = _moved(c.network(1), rows)
    limit, relation = (HEAD, "<=") if table is None else (100 * HEAD, ">=")
    yield found(what, float(spread.median()), of=c.id, spread=spread.tolist(), expected=limit, relation=relation,
                note=f"over {rows:,} positions, {'a learned table' if table else 'RoPE'}", ours=True)


@torch.no_grad()
def _moved(net: Decoder, rows: int) -> Tensor:
    """Spread of the score of each of some pairs of tokens, 7 apart, over places of a table of `rows`."""
    vocab = net.model.embed.vocab
    ids = torch.arange(2 * TEXT, device=net.device)[:, None] * (vocab // (2 * TEXT))
    ids = ids.clamp_max(vocab - 1)
    scores = []
    for s in (0, 1, 10, 100, rows - 8):
        if s + 7 < rows:
            (q, _), (_, k) = (_meet(net, some, at) for some, at in ((ids[:TEXT], s + 7), (ids[TEXT:], s)))
            groups = q.shape[1] // k.shape[1]
            scores.append((q * k.repeat_interleave(groups, 1)).sum(-1).flatten())
    all_ = torch.stack(scores).cpu()
    return all_.amax(0) - all_.amin(0)


def _meet(net: Decoder, ids: Tensor, at: int) -> tuple[Tensor, Tensor]:
    """q and k (B, H, 1, D) of tokens (B, 1) at one position of the first layer, as they meet in the scores."""
    step, block = net.step(1, at), net.layers[0]
    x = net.embedded(ids, step)
    attn, norm = block.attn, block.attn_norm
    assert isinstance(attn, SelfAttention)
    q, k, _ = attn.ready(x if norm is None else norm(x), step)  # type: ignore[operator]
    return q, k


def _grid(made: dict[tuple[int, torch.dtype], Rotated]) -> Grid:
    """Median and largest spread for each distance."""
    rows: list[tuple[Cell, ...]] = []
    for (dim, dtype), r in made.items():
        for offset in OFFSETS:
            cells = [float(x) for most in (NEAR, max(SHIFTS)) for x in (
                r.spread(offset, most).median(), r.spread(offset, most).max())]
            rows.append((dim, f"fp{torch.finfo(dtype).bits}", offset, *cells))
    columns = ("width", "dtype", "distance", f"median to {NEAR:,}", f"largest to {NEAR:,}",
               f"median to {max(SHIFTS):,}", f"largest to {max(SHIFTS):,}")
    return Grid(title="spread of the score over positions", columns=columns, rows=tuple(rows))
