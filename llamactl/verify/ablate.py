"""The loss of trained weights under edits, on one text; and two changes that must leave it where it is.

Everything is computed in fp32, a layer at a time. Logits stand in memory for some rows at once, never for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llamactl.analysis.ablation import Ablation, KvCopy, NormInput, NormInputs, ranked, summary
from llamactl.errors import InputRefused, LlamactlError
from llamactl.net.decoder import Source
from llamactl.net.streamed import Streamed
from llamactl.net.taken import Taking
from llamactl.spec.changes import each_layer
from llamactl.spec.edits import apply
from llamactl.spec.model import Model
from llamactl.spec.parts import Attention, LearnedPositions, SinusoidalPositions
from llamactl.verify.ablations import same, words
from llamactl.verify.network import Kept
from llamactl.verify.trained import NewWeights, Trained

SHIFTS = (500, 5000)
HELD_BYTES = 2_000_000_000  # of weights in fp32: up to these they are kept between the edits
LOGIT_BYTES = 32 << 20  # of fp32 logits at once; some six of these stand in memory
_NORMS = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
_SAME = "the model is that way already"
Tell = Callable[[str], None]


class Ablated(NamedTuple):
    """What `ablate` found. streamed: weights were read for each edit anew."""

    base_loss: float
    rows: tuple[Ablation, ...]
    norms: NormInputs | None
    kv_copy: KvCopy | None
    streamed: bool


class Apart(NamedTuple):
    """A second model's losses of T - 1 tokens in fp64, and how far its logits are from the first's; NaN if one is."""

    losses: Tensor
    max_abs: float
    equal: bool


@torch.no_grad()
def ablate(model: Model, source: Source, ids: Sequence[int], *, edits: Sequence[str], shifts: Sequence[int] = SHIFTS,
           copies: bool = True, tell: Tell = lambda _: None) -> Ablated:
    """The loss of `model` on `ids`, two or more, and under each of `edits` (see spec.edits), each made alone.

    shifts: tokens by which all positions are moved. copies: also with a KV head for each query head. tell: told what
    is computed next. An edit that needs weights that nobody trained, or that the network cannot compute, becomes a row
    that says so.
    Errors: UsageError for an edit that has no meaning for this model; InputRefused where the model itself does not run,
    and not-finite where it has no loss.
    """
    models = [(edit, apply(model, edit)) for edit in edits]
    held = 4 * model.total() < HELD_BYTES
    weights = Kept(source) if held else source
    tell("the model as it is")
    base = _Base(model, weights, torch.tensor([list(ids)]))
    rows = []
    for edit, edited in models:
        tell(edit)
        rows.append(_row(base, Ablation(edit=edit, what=words(model, edit)), edited))
    for by in shifts:
        tell(f"shift={by}")
        rows.append(_shift(base, by))
    copy = None
    if copies:
        tell("KV heads copied")
        copy = _kv_copy(base)
    return Ablated(base.loss, ranked(rows), base.norms, copy, not held)


class _Base:
    """The model as it is: its stream, its losses, what its norms read."""

    def __init__(self, model: Model, source: Source, ids: Tensor) -> None:
        self.model, self.source, self.ids = model, source, ids
        self.run = Streamed(model, source, ids)
        found: list[NormInput] = []
        self.x = _stream(self.run, found)
        self.norms = summary(found)
        self.losses = torch.cat([_losses(said, targets) for (said,), targets in _blocks(ids, (self.run, self.x))])
        bad = (~self.losses.isfinite()).nonzero()
        if len(bad):
            raise InputRefused("not-finite", f"{len(bad):,} of {len(self.losses):,} tokens have no finite loss, the "
                               f"first of them token {int(bad[0]) + 1:,}: nothing can be held against it",
                               help="look for the weights with llamactl inspect")
        self.loss = _mean(self.losses)

    def apart(self, edited: Model) -> tuple[Apart, str | None]:
        """How far the edited model is from this one, and what was made of the weights. Raises NewWeights."""
        trained = Trained(self.source, self.model, edited)
        other = Streamed(edited, Taking(trained, edited), self.ids)
        y = _stream(other)
        losses, most, equal = [], 0.0, True
        for (a, b), targets in _blocks(self.ids, (self.run, self.x), (other, y)):
            losses.append(_losses(b, targets))
            equal = equal and torch.equal(a, b)
            far = float((b - a).abs().max())
            most = far if math.isnan(far) else max(most, far)  # once NaN, always: max(NaN, x) is NaN
        return Apart(torch.cat(losses), most, equal), "; ".join(trained.did) or None


def _row(base: _Base, row: Ablation, edited: Model) -> Ablation:
    if same(base.model, edited):
        return replace(row, loss=base.loss, change=0.0, change_percent=0.0, standard_error=0.0, max_abs_dlogit=0.0,
                       bit_equal=True, note=_SAME)
    try:
        found, note = base.apart(edited)
    except NewWeights as e:
        return replace(row, status="not-applicable", note=f"needs new weights: {e}")
    except LlamactlError as e:
        return replace(row, status="not-applicable", note=e.message)
    bad = int((~found.losses.isfinite()).sum())
    far = found.max_abs if math.isfinite(found.max_abs) else None
    if bad:
        said = f"{bad:,} of {len(found.losses):,} tokens have no finite loss"
        return replace(row, status="not-finite", not_finite=bad, max_abs_dlogit=far, bit_equal=False,
                       note="; ".join(x for x in (said, note) if x))
    differences = found.losses - base.losses
    change, n = _mean(differences), len(differences)
    return replace(row, loss=_mean(found.losses), change=change,
                   change_percent=100 * change / base.loss if base.loss else None,
                   standard_error=float(differences.std()) / math.sqrt(n) if n > 1 else None, max_abs_dlogit=far,
                   bit_equal=found.equal, note=note)


def _shift(base: _Base, by: int) -> Ablation:
    """All positions moved by `by`; past the end of a table it is not run."""
    row = Ablation(edit=f"shift={by}", kind="shift", what=f"all positions are {by:,} further on")
    model, tokens = base.model, base.ids.shape[1]
    table = model.positions
    if isinstance(table, SinusoidalPositions):
        return replace(row, status="not-applicable", note="sinusoids are computed from 0 on here")
    if isinstance(table, LearnedPositions) and by + tokens > table.rows - table.offset:
        return replace(row, status="not-applicable", note=f"the table of positions ends at "
                       f"{table.rows - table.offset:,}, before {by:,} + {tokens:,}")
    edited = moved(model, by)
    found = _row(base, row, edited)
    return replace(found, note="no position is told here, only distances") if same(model, edited) else found


def moved(model: Model, by: int) -> Model:
    """`model` with every position `by` further on, learned ones too."""
    def one(attn: Any) -> Any:
        if attn is None or attn.rope is None:
            return attn
        return replace(attn, rope=replace(attn.rope, start=attn.rope.start + by))

    out = each_layer(model, lambda x: replace(x, attn=one(x.attn)))
    table = model.positions
    return replace(out, positions=replace(table, offset=table.offset + by)) if isinstance(
        table, LearnedPositions) else out


def _kv_copy(base: _Base) -> KvCopy | None:
    """The model with a KV head for each query head. None where it is so already, or layers differ in their heads."""
    kinds = {(x.attn.n_heads, x.attn.n_kv_heads) for x in base.model.layers if isinstance(x.attn, Attention)}
    if len(kinds) != 1:
        return None
    ((heads, kv),) = kinds
    if heads == kv:
        return None
    try:
        edited = apply(base.model, f"n_kv_heads={heads}")
        found, _ = base.apart(edited)
    except (NewWeights, LlamactlError):
        return None
    return KvCopy(n_heads=heads, n_kv_heads=kv, params=base.model.total(), params_copied=edited.total(),
                  bit_equal=found.equal, max_abs_dlogit=found.max_abs if math.isfinite(found.max_abs) else None)


def _blocks(ids: Tensor, *runs: tuple[Streamed, Tensor]) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Rows of the logits of each run, and the token that came after each row."""
    height = max(1, LOGIT_BYTES // (4 * runs[0][0].model.head.vocab))
    for start in range(0, ids.shape[1], height):
        rows = slice(start, start + height)
        yield [run.head(x[0, rows]) for run, x in runs], ids[0, start + 1 : start + 1 + height]


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p of each target, in fp64; the last row of a text has none."""
    said = logits[: len(targets)].double().log_softmax(-1)
    return -said.gather(-1, targets[:, None])[:, 0]


def _mean(x: Tensor) -> float:
    return math.fsum(x.tolist()) / len(x)


def _stream(run: Streamed, found: list[NormInput] | None = None) -> Tensor:
    """(1, T, hidden) after the last layer. found: gets what each norm over the stream is given."""
    x = run.embedded()
    for i in range(run.model.n_layers):
        block = run.block(i)
        hooks = [part.register_forward_pre_hook(_reads(found, i, name)) for name in _NORMS
                 if found is not None and (part := getattr(block, name)) is not None]
        x = block(x, run.step)
        for hook in hooks:
            hook.remove()
    if found is not None and run.net.norm is not None:
        found.append(_read(x, None, "norm"))
    return x


def _reads(found: list[NormInput], layer: int, name: str) -> Callable[[Any, tuple[Tensor, ...]], None]:
    """A hook that notes what a norm is given."""
    def note(_: Any, given: tuple[Tensor, ...]) -> None:
        found.append(_read(given[0], layer, name))

    return note


def _read(x: Tensor, layer: int | None, name: str) -> NormInput:
    """|mean| / RMS of the rows of x."""
    wide = x.double()
    share = (wide.mean(-1).abs() / wide.square().mean(-1).sqrt()).flatten()
    share = share[share.isfinite()]  # a row of zeros has none
    if not len(share):
        return NormInput(layer=layer, norm=name, median=None, worst=None)
    return NormInput(layer=layer, norm=name, median=float(share.median()), worst=float(share.max()))
