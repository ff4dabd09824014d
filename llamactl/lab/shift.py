"""Does a text care where it stands?

Source: RoFormer, arXiv:2104.09864, section 3.2.2, equation 16; learned positions: GPT-2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llamactl.analysis.ablation import Ablation
from llamactl.analysis.experiment import Claim, Finding, Outcome, found, skipped
from llamactl.lab._drawn import Drawn
from llamactl.lab._setting import NO_CHECKPOINT, TABLE, Checkpoint, Setting
from llamactl.net.generate import positions
from llamactl.verify.ablate import SHIFTS, Ablated, ablate

LOSS, LOGITS = 1e-5, 4e-3  # nats per token, and a logit: what rounding of angles does in fp32
MOVED = 0.01  # a logit: what a table, or another distance, does at least, far above rounding
SPREAD, SPREAD_WHAT = "rope_scaling=linear:0.5", "every position doubled: largest change of a logit"
TOKENS = 64
WHAT = "all positions further on"
SMALL = ("n_layers=2", "hidden=64", "n_heads=8", "head_dim=8", "ffn=96", "vocab=256", "context=8192")
STAYS = "with RoPE the loss and the logits stay where they are, for distances alone count"
MOVES = "with learned positions the logits move"


def run(given: Setting) -> Outcome:
    """Drawn weights with rotations and with a table, then the trained ones."""
    rope: list[Finding] = []
    table: list[Finding] = []
    for name, to in (("llama-3-8b", rope), ("gpt2", table)):
        edits = ("n_kv_heads=2", *SMALL) if to is rope else SMALL
        model = given.small(name, *edits)
        ids = torch.randint(256, (TOKENS,), generator=given.draws()).tolist()
        done = ablate(model, Drawn(model, given.draws()), ids, edits=(SPREAD,) if to is rope else (), shifts=SHIFTS)
        of = f"drawn weights, {name}'s block, {TOKENS} tokens"
        for row in _in_order(done):
            to += _row(row, of, to is table)
        to += [_spread(row, of) for row in done.rows if row.edit == SPREAD]
    for kind in given.lacking():
        (table if TABLE in kind else rope).append(skipped(WHAT, NO_CHECKPOINT, of=kind))
    for c in given.checkpoints:
        given.tell(f"shift: {c.id}")
        (table if c.positions == TABLE else rope).extend(_trained(c))
    return Outcome(claims=(Claim(claim=STAYS, formula="(R_(m+s) q) . (R_(n+s) k) = (R_m q) . (R_n k)",
                                 findings=tuple(rope)),
                           Claim(claim=MOVES, formula="x_i + p_(m+s)", findings=tuple(table))))


def _in_order(done: Ablated) -> list[Ablation]:
    """The shifts from the nearest on: `ablate` ranks them by what they change."""
    return sorted((r for r in done.rows if r.kind == "shift"), key=_by)


def _by(row: Ablation) -> int:
    return int(row.edit.removeprefix("shift="))


def _spread(row: Ablation, of: str) -> Finding:
    """The same tokens, twice as far apart: a network that turns nothing would stay under every limit of a shift."""
    far = float("nan") if row.max_abs_dlogit is None else row.max_abs_dlogit
    return found(SPREAD_WHAT, far, of=of, expected=MOVED, relation=">=", note=row.note, ours=True)


def _trained(c: Checkpoint) -> Iterator[Finding]:
    """As the others; where the table is too short for the shifts, half a text moved by half of it as well."""
    if c.positions is None:
        yield skipped(WHAT, c.otherwise, of=c.id)
        return
    learned, note = c.positions == TABLE, "" if c.read else ", made-up tokens"
    done = c.ablated((), SHIFTS)
    for row in _in_order(done):
        yield from _row(row, f"{c.id}, {len(c.ids):,} tokens{note}", learned, c.unread(done.base_loss) is None)
    rows = positions(c.model)
    if learned and rows is not None and rows < SHIFTS[0] + len(c.ids):
        half = rows // 2
        short = c.ablated((), (half,), tokens=half)
        (row,) = short.rows
        yield from _row(row, f"{c.id}, {half:,} tokens{note}", True, c.unread(short.base_loss) is None)


def _row(row: Ablation, of: str, learned: bool, read: bool = False) -> Iterator[Finding]:
    """Loss and largest logit of one shift, held to what a table or a rotation does. read: the weights can read these
    tokens; where not, what a table does to the loss says nothing.
    """
    by = f"{_by(row):,} further on"
    if row.change is None or row.max_abs_dlogit is None:
        yield skipped(by, row.note or row.status, of=of)
        return
    loss = abs(row.change)
    if learned:
        if read:
            yield found(f"{by}: change of the loss", row.change, of=of, unit="nats per token",
                        note=None if row.standard_error is None else f"standard error {row.standard_error:.2g}")
        yield found(f"{by}: largest change of a logit", row.max_abs_dlogit, of=of, expected=MOVED, relation=">=",
                    ours=True)
        return
    yield found(f"{by}: change of the loss", loss, of=of, unit="nats per token", expected=LOSS, relation="<=",
                ours=True)
    yield found(f"{by}: largest change of a logit", row.max_abs_dlogit, of=of, expected=LOGITS, relation="<=",
                ours=True)
