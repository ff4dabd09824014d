"""What the checks see: a norm, a gate or a rotation that leaves something out. And whose limits are whose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from llamactl import lab
from llamactl.analysis.experiment import OURS, Experiment
from llamactl.lab import norm, rope_stretch, shift, swiglu
from llamactl.lab._drawn import Drawn
from llamactl.lab._setting import Checkpoint, Setting
from llamactl.net import attention
from llamactl.net.blocks import FeedForward, RowNorm

KINDS = ("RMSNorm", "LayerNorm")


def normed(self: Any, x: Tensor, gain: Tensor | None, bias: Tensor | None, *, eps: float = 1e-6, outside: bool = False
           ) -> Tensor:
    """RowNorm._norm with another epsilon, or with it outside the root."""
    if self.part.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    square = x.square().mean(-1, keepdim=True)
    out = x / (square.sqrt() + eps if outside else (square + eps).sqrt())
    out = out if gain is None else out * gain
    return out if bias is None else out + bias


SLIPS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "as it is": (normed, ()),
    "g dropped": (lambda self, x, g, b: normed(self, x, None, b), KINDS),
    "b dropped": (lambda self, x, g, b: normed(self, x, g, None), ("LayerNorm",)),
    "eps 0": (lambda self, x, g, b: normed(self, x, g, b, eps=0.0), KINDS),
    "eps 1e-5": (lambda self, x, g, b: normed(self, x, g, b, eps=1e-5), KINDS),
    "eps 1e-7": (lambda self, x, g, b: normed(self, x, g, b, eps=1e-7), KINDS),
    "eps outside": (lambda self, x, g, b: normed(self, x, g, b, outside=True), KINDS),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_norm_that_leaves_something_out_is_seen(setting: Any, monkeypatch: pytest.MonkeyPatch, slip: str) -> None:
    wrong, seen = SLIPS[slip]
    monkeypatch.setattr(RowNorm, "_norm", wrong)
    made = list(norm._alike(setting()))
    assert len(made) == 4
    assert {f.what.split(":")[0] for f in made if f.verdict == "differs"} == set(seen)
    assert {f.what.split(":")[0] for f in made if f.verdict == "holds"} == set(KINDS) - set(seen)


def test_correlations_are_of_norms_that_change_nothing_else(done: Callable[..., Experiment]) -> None:
    rms, layer = norm._norms(64, torch.device("cpu"))
    assert torch.equal(rms.weight, torch.ones(64))
    assert torch.equal(layer.bias, torch.zeros(64))
    assert done("norm").claims[1].formula.endswith("with g = 1 and b = 0")


FORMS: dict[str, Callable[[FeedForward, Tensor], Tensor]] = {
    "Swish on the wrong matrix": lambda m, x: m.down(m.gate(x) * F.silu(m.up(x))),
    "no up": lambda m, x: m.down(F.silu(m.gate(x))),
    "no gate": lambda m, x: m.down(F.silu(m.up(x))),
    "no activation": lambda m, x: m.down(m.gate(x) * m.up(x)),
}


@pytest.mark.parametrize("form", FORMS)
def test_another_feed_forward_is_seen(setting: Any, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    assert swiglu._gated(setting()).verdict == "holds"
    monkeypatch.setattr(FeedForward, "forward", FORMS[form])
    f = swiglu._gated(setting())
    assert f.verdict == "differs"
    assert f.value > 0.1


def test_rounding_of_a_feed_forward_is_far_below_its_limit(setting: Any) -> None:
    assert all(swiglu._gated(setting(seed=s)).value < swiglu.ROUNDING / 2 for s in range(8))


def test_a_network_that_turns_nothing_is_seen(done: Callable[..., Experiment], pick: Any,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shift leaves it where it is; twice the distance does too, and must not."""
    right = pick(done("shift"), shift.SPREAD_WHAT)
    assert (right.verdict, right.of) == ("holds", "drawn weights, llama-3-8b's block, 64 tokens")
    assert right.value > 100 * shift.MOVED
    monkeypatch.setattr(attention, "rotate", lambda x, turn, pairs: x)
    e = done("shift", seed=3)
    assert pick(e, "500 further on: largest change", "drawn weights, llama").verdict == "holds"
    assert pick(e, shift.SPREAD_WHAT).verdict == "differs"


def llama(given: Setting, drawn: Any) -> Checkpoint:
    """Drawn weights with RMSNorm and SwiGLU."""
    model = given.small("llama-3-8b", "n_kv_heads=2", *shift.SMALL)
    return replace(drawn("rope"), id="llama", model=model, source=Drawn(model, given.draws()))


def test_what_the_mean_is_worth_is_measured_on_trained_weights(setting: Any, drawn: Any,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    c = llama(setting(), drawn)

    def made() -> Any:
        return {f.what: f for f in norm._read(c)}

    assert made()[norm.CENTRED_WHAT].note.startswith("the tokens are made up")
    monkeypatch.setattr(Checkpoint, "unread", lambda self, loss: None)
    f = made()[norm.CENTRED_WHAT]
    (row,) = c.ablated(("norm_kind=layer",)).rows
    assert (f.value, f.verdict, f.unit) == (row.change, "measured", "nats per token")
    assert f.value != 0
    assert f.note == f"standard error {row.standard_error:.2g}"
    assert made()["loss"].value == pytest.approx(row.loss - row.change)


def test_a_limit_that_nobody_else_draws_is_called_ours(done: Callable[..., Experiment]) -> None:
    limits = [f for c in lab.cards() for x in done(c.name).claims for f in x.findings if f.relation in ("<=", ">=")]
    assert len(limits) > 20
    assert [f.what for f in limits if OURS not in (f.note or "").split("; ")] == []


# --- what is read of what is given


class Watched(Setting):
    """A setting that notes what is read of it."""

    seen: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in {f.name for f in fields(Setting)}:
            Watched.seen.add(name)
        return super().__getattribute__(name)


class WatchedCheckpoint(Checkpoint):
    """A checkpoint that notes whether its tokens are read."""

    def __getattribute__(self, name: str) -> Any:
        if name == "ids":
            Watched.seen.add("tokens")
        return super().__getattribute__(name)


@pytest.fixture
def watched(setting: Any, drawn: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    monkeypatch.setattr(norm, "SECONDS", 1e-3)  # no time is looked at
    monkeypatch.setattr(rope_stretch, "METHODS", (None,))
    Watched.seen = set()
    given = setting(steps=1)
    c = llama(given, drawn)
    own = WatchedCheckpoint(**{f.name: getattr(c, f.name) for f in fields(c)})
    yield Watched(**{f.name: getattr(given, f.name) for f in fields(given)} | {"checkpoints": (own,)})
    Watched.seen = set()


@pytest.mark.parametrize("card", lab.cards(), ids=lambda c: c.name)
def test_what_an_experiment_reads_is_read_off_its_file(watched: Setting, card: Any) -> None:
    Watched.seen.clear()
    lab.run(card, watched)
    assert Watched.seen & {"checkpoints", "text", "steps", "tokens"} == lab.uses(card)
