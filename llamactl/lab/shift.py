"""Does a text care where it stands?

Source: RoFormer, arXiv:2104.09864, section 3.3; learned positions: GPT-2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llamactl.analysis.ablation import Ablation
from llamactl.analysis.experiment import Claim, Finding, Outcome, found, skipped
from llamactl.lab._drawn import Drawn
from llamactl.lab._setting import NO_CHECKPOINT, Checkpoint, Setting
from llamactl.net.generate import positions
from llamactl.verify.ablate import SHIFTS, ablate

LOSS, LOGITS = 1e-5, 4e-3  # nats per token, and a logit: what rounding of angles does in fp32
MOVED = 0.01  # a logit: what a table does at least, far above rounding
TOKENS = 64
SMALL = ("n_layers=2", "hidden=64", "n_heads=8", "head_dim=8", "ffn=96", "vocab=256", "context=8192")
ROPE = "with RoPE the loss and the logits stay where they are"
TABLE = "with learned positions they do not, and past the table's end there are none"


def run(given: Setting) -> Outcome:
    """Drawn weights with rotations and with a table, then the trained ones."""
    rope: list[Finding] = []
    table: list[Finding] = []
    for name, to in (("llama-3-8b", rope), ("gpt2", table)):
        edits = ("n_kv_heads=2", *SMALL) if to is rope else SMALL
        model = given.small(name, *edits)
        ids = torch.randint(256, (TOKENS,), generator=given.draws()).tolist()
        done = ablate(model, Drawn(model, given.draws()), ids, edits=(), shifts=SHIFTS)
        for row in done.rows:
            to += _row(row, f"drawn weights, {name}'s block, {TOKENS} tokens", to is table)
    for kind in given.lacking():
        (table if "learned" in kind else rope).append(skipped("all positions further on", NO_CHECKPOINT, of=kind))
    for c in given.checkpoints:
        given.tell(f"shift: {c.id}")
        (table if c.learned else rope).extend(_trained(c))
    return Outcome(claims=(Claim(claim=ROPE, formula="(R_(m+s) q) . (R_(n+s) k) = (R_m q) . (R_n k)",
                                 findings=tuple(rope)),
                           Claim(claim=TABLE, formula="x_i + p_(m+s)", findings=tuple(table))))


def _trained(c: Checkpoint) -> Iterator[Finding]:
    """As the others; where the table is too short for the shifts, half a text moved by half of it as well."""
    note = "" if c.read else ", made-up tokens"
    for row in c.ablated((), SHIFTS).rows:
        yield from _row(row, f"{c.id}, {len(c.ids):,} tokens{note}", c.learned)
    rows = positions(c.model)
    if c.learned and rows is not None and rows < SHIFTS[0] + len(c.ids):
        half = rows // 2
        (row,) = c.ablated((), (half,), tokens=half).rows
        yield from _row(row, f"{c.id}, {half:,} tokens{note}", True)


def _row(row: Ablation, of: str, learned: bool) -> Iterator[Finding]:
    """Loss and largest logit of one shift, held to what a table or a rotation does."""
    by = f"{int(row.edit.removeprefix('shift=')):,} further on"
    if row.change is None or row.max_abs_dlogit is None:
        yield skipped(by, row.note or row.status, of=of)
        return
    loss = abs(row.change)
    if learned:
        yield found(f"{by}: change of the loss", row.change, of=of, unit="nats per token",
                    note=None if row.standard_error is None else f"standard error {row.standard_error:.2g}")
        yield found(f"{by}: largest change of a logit", row.max_abs_dlogit, of=of, expected=MOVED, relation=">=")
        return
    yield found(f"{by}: change of the loss", loss, of=of, unit="nats per token", expected=LOSS, relation="<=")
    yield found(f"{by}: largest change of a logit", row.max_abs_dlogit, of=of, expected=LOGITS, relation="<=")
