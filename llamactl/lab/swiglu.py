"""What is a gate in the feed-forward worth, and how wide may it be for the same parameters?

Source: GLU Variants Improve Transformer, arXiv:2002.05202; LLaMA, arXiv:2302.13971, section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llamactl.analysis.experiment import Claim, Finding, Grid, Outcome, found, skipped
from llamactl.lab._drawn import network
from llamactl.lab._setting import NO_CHECKPOINT, Checkpoint, Setting
from llamactl.net.blocks import ACTIVATIONS, FeedForward
from llamactl.spec.model import Model
from llamactl.spec.parts import MLP, ffn_width

VALUES = ((2.0, 1.7616), (-2.0, -0.2384))
DERIVED = (("smollm2-135m", 1), ("llama-7b", 256), ("llama-2-7b", 256), ("llama-13b", 256), ("llama-65b", 256))
OTHER = ("llama-3-8b",)  # its width is another choice: 3.5 d
ROWS, ROUNDING = 64, 1e-5
EDITS = ("activation=gelu", "gate=false")


def run(given: Setting) -> Outcome:
    """Swish at two points, widths derived, and what the edits cost trained weights."""
    return Outcome(
        claims=(Claim(claim="Swish(2) = 1.7616, Swish(-2) = -0.2384: not zero below zero",
                      formula="Swish(x) = x / (1 + e^-x)", findings=tuple(_swish(given))),
                Claim(claim="the gate's product goes through Swish and scales the other's, number by number",
                      formula="W_down (Swish(W_gate x) * W_up x)", findings=(_gated(given),)),
                Claim(claim="three matrices of width 8d/3 hold what two of 4d do; widths in use are that, rounded up",
                      formula="3 d f = 2 d (4 d), f = 8 d / 3, up to a multiple", findings=tuple(_widths(given))),
                Claim(claim="trained weights miss their gate more than the shape of its curve",
                      formula="loss(edited) - loss, nats per token", findings=tuple(_costs(given)))),
        grids=(_grid(given),))


def _swish(given: Setting) -> Iterator[Finding]:
    for x, expected in VALUES:
        at = torch.tensor([x], dtype=torch.float32, device=given.device)
        yield found(f"Swish({x:g})", float(ACTIVATIONS["silu"](at)), of="the network's activation, fp32",
                    expected=expected, tolerance=5e-5)


@torch.no_grad()
def _gated(given: Setting) -> Finding:
    """The network's feed-forward against the formula in fp64, with the same drawn matrices."""
    net = network(given.small("smollm2-135m", "n_layers=1", "vocab=256"), given.draws(), given.device)
    part = net.layers[0].mlp
    assert isinstance(part, FeedForward)
    assert part.gate is not None
    x = torch.randn(ROWS, net.model.hidden, generator=given.draws())
    gate, up, down = (m.weight.cpu().double() for m in (part.gate, part.up, part.down))
    z = x.double() @ gate.T
    want = (z / (1 + (-z).exp()) * (x.double() @ up.T)) @ down.T
    far = (part(x.to(given.device)).cpu().double() - want).abs().max()
    return found("the network's less the formula's in fp64, largest", float(far), expected=ROUNDING, relation="<=",
                 of=f"smollm2-135m's feed-forward, drawn weights, {ROWS} rows", ours=True)


def _mlp(model: Model) -> MLP:
    part = model.layers[0].mlp
    assert isinstance(part, MLP)
    return part


def _size(part: MLP) -> int:
    return sum(x.elements for x in part.leaves())


def _widths(given: Setting) -> Iterator[Finding]:
    for name, multiple in DERIVED:
        model = given.describe(name)
        yield found(f"8d/3 up to a multiple of {multiple}", ffn_width(model.hidden, multiple),
                    of=f"{name}: d {model.hidden:,}", expected=_mlp(model).ffn)
    model = given.describe("smollm2-135m")
    wide = _mlp(given.small("smollm2-135m", "gate=false", f"ffn={4 * model.hidden}"))
    yield found("three matrices of 8d/3 less two of 4d", _size(_mlp(model)) - _size(wide),
                of=f"smollm2-135m: {_size(wide):,}", unit="parameters", expected=0)


def _grid(given: Setting) -> Grid:
    """Gated feed-forwards beside two plain matrices of 4d."""
    rows = []
    for name in (*(n for n, _ in DERIVED), *OTHER):
        model = given.describe(name)
        own = _size(_mlp(model))
        plain = _size(_mlp(given.small(name, "gate=false", f"ffn={4 * model.hidden}")))
        rows.append((name, model.hidden, round(8 * model.hidden / 3, 2), _mlp(model).ffn, own, plain,
                     round(own / plain, 4)))
    return Grid(title="feed-forward of one block", columns=("model", "d", "8d/3", "its width", "its parameters",
                                                            "two matrices of 4d", "ratio"), rows=tuple(rows))


def _costs(given: Setting) -> Iterator[Finding]:
    if not given.checkpoints:
        yield skipped("loss under GELU, and without the gate", NO_CHECKPOINT, unit="nats per token")
    for c in given.checkpoints:
        given.tell(f"swiglu: {c.id} without its gate")
        yield from _cost(c)


def _cost(c: Checkpoint) -> Iterator[Finding]:
    part, what = c.model.layers[0].mlp, "loss under GELU, and without the gate"
    if not isinstance(part, MLP) or not part.gated or part.activation != "silu":
        yield skipped(what, "it has no SwiGLU", of=c.id, unit="nats per token")
        return
    done = c.ablated(EDITS)
    if why := c.unread(done.base_loss):
        yield skipped(what, why, of=c.id, unit="nats per token")
        return
    yield found("loss", done.base_loss, of=c.id, unit="nats per token")
    change = {r.edit: r.change for r in done.rows if r.change is not None}
    for edit, what in zip(EDITS, ("GELU for Swish", "no gate"), strict=True):
        row = next(r for r in done.rows if r.edit == edit)
        yield found(f"{what}: the loss rises by", change.get(edit, float("nan")), of=c.id, unit="nats per token",
                    expected=0.0, relation=">=",
                    note=None if row.standard_error is None else f"standard error {row.standard_error:.2g}")
    gelu, bare = (change.get(e, float("nan")) for e in EDITS)
    yield found("no gate / GELU", bare / gelu if gelu else float("nan"), of=c.id, unit="times", expected=1.0,
                relation=">=")
