"""The verdict: equal, same, explained, different or not to be judged; and what never passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from llamactl import arch
from llamactl.analysis.verification import Probe, Side, VerifyReport
from llamactl.errors import InputRefused
from llamactl.net import streamed
from llamactl.spec.edits import apply
from llamactl.spec.mistakes import Change
from llamactl.spec.model import Model
from llamactl.verify.compared import Setting, compared, run_here
from llamactl.verify.floor import floor
from llamactl.verify.network import Network
from llamactl.verify.other import Other, of_checkpoint, of_saved, ran
from llamactl.verify.saved import Saved

SIDE = Side(label="the checkpoint", kind="checkpoint", ref="x")
SETTING = Setting(subject="the candidate", by="the checkpoint")
N = 64


class At:
    """One golden on one text: its logits, the stream after each layer, and verdicts on others."""

    def __init__(self, networks: ModuleType, name: str, n: int = N) -> None:
        g = networks.golden(name)
        self.model: Model = g.model
        self.source = networks.Held(g.tensors)
        ids = torch.randint(1, 90, (n,), generator=torch.Generator().manual_seed(1)).tolist()
        self.ids, self.ours = run_here(self.model, self.source, ids)
        self.net = Network(self.model, self.source, self.ids)
        self.limit = floor(self.model, self.source, self.ids, self.ours)[0].limit

    def wrong(self, *changes: Change) -> Tensor:
        got = self.net.logits(changes, N)
        assert got is not None
        return got

    def judge(self, logits: Tensor | None, setting: Setting = SETTING, **more: Any) -> VerifyReport:
        other = Other(kind="logits", ref="x", logits=logits, **more)
        return self.against(other, setting)

    def against(self, other: Other, setting: Setting = SETTING) -> VerifyReport:
        said = compared(self.model, self.source, self.ids, self.ours, other, (SIDE, SIDE),
                        Probe(tokens=self.ids.shape[1], source="given"), setting)
        assert (said.sides, said.floor is not None, said.measures is not None) == ((SIDE, SIDE), True, True)
        assert said.passed is (said.verdict in ("equal", "same"))
        return said


@pytest.fixture(scope="module")
def at(networks: ModuleType) -> Callable[..., At]:
    made: dict[Any, At] = {}

    def get(name: str = "llama", n: int = N) -> At:
        if (name, n) not in made:
            made[name, n] = At(networks, name, n)
        return made[name, n]

    return get


# ---- the same


def test_equal_is_bit_for_bit(at: Any) -> None:
    a = at()
    r = a.judge(a.ours.clone())
    assert (r.verdict, r.measures.max_abs_dlogit, r.explanations, r.first_difference) == ("equal", 0.0, (), None)
    assert "bit" in r.why
    assert r.measures.top1_agreement == 1.0
    assert a.judge(a.ours.double()).verdict == "equal"  # widened


def test_one_bit_is_the_same(at: Any) -> None:
    a = at()
    one = a.ours.clone()
    one[3, 5] = torch.nextafter(one[3, 5], torch.tensor(1e9))
    r = a.judge(one)
    assert r.verdict == "same"
    assert f"{r.floor.limit:.2g}" in r.why


def test_the_limit_is_a_multiple_of_what_arithmetic_does(at: Any) -> None:
    a = at()
    inside, outside = a.ours.clone(), a.ours.clone()
    inside[10, 7] += 0.9 * a.limit
    outside[10, 7] += 1.2 * a.limit
    assert a.judge(inside).verdict == "same"
    r = a.judge(outside, replace(SETTING, sweep=False))
    assert (r.verdict, r.explanations) == ("different", ())
    assert r.measures.max_abs_dlogit == pytest.approx(1.2 * a.limit, rel=0.05)
    assert f"{a.limit:.2g}" in r.why


# ---- a mistake


def test_an_explained_difference(at: Any) -> None:
    a = at()
    r = a.judge(a.wrong(Change("activation=gelu")))
    assert r.verdict == "explained"
    (e,) = r.explanations
    assert (e.edit, e.scope) == ("activation=gelu", "all layers")
    assert e.residual <= a.limit < r.measures.max_abs_dlogit
    assert (r.first_difference.where, r.tried > 10) == ("all layers", True)
    assert r.why == f"the candidate is the checkpoint with this mistake: {e.words} (all layers)"


def test_the_judged_side_may_be_the_one_that_runs(at: Any) -> None:
    """A reference without a network: the edits lead from the checkpoint to it, and losses change sides."""
    a = at()
    r = a.judge(a.wrong(Change("activation=gelu")), replace(SETTING, subject="the checkpoint", by="the reference",
                                                            reverse=True))
    assert r.why.startswith("the reference is the checkpoint with this change: the activation is gelu")
    usual = a.judge(a.wrong(Change("activation=gelu")))
    assert (r.measures.loss_first, r.measures.loss_second) == (usual.measures.loss_second, usual.measures.loss_first)


def test_one_layer_from_logits_alone(at: Any) -> None:
    a = at()
    change = Change("mlp=linear", 1)
    r = a.judge(a.wrong(change))
    assert r.verdict == "explained"
    assert [(e.edit, e.scope) for e in r.explanations] == [("mlp=linear", "layer 1")]
    assert r.first_difference.where == "layer 1"
    blind = a.judge(a.wrong(change), replace(SETTING, sweep=False))
    assert (blind.verdict, blind.explanations) == ("different", ())
    assert blind.first_difference.where.startswith("the first token is wrong already")


def test_equivalent_mistakes_are_told_together(at: Any) -> None:
    a = at()
    r = a.judge(a.wrong(Change("positions=none")))
    (e,) = r.explanations
    assert {e.edit, *e.equivalent} >= {"positions=none", "rope_on=none"}
    assert "no text that was tried tells them apart" in e.separate


def test_nothing_is_looked_for_where_it_is_not_asked(at: Any) -> None:
    a = at()
    r = a.judge(a.wrong(Change("activation=gelu")), replace(SETTING, explain=False))
    assert (r.verdict, r.explanations, r.tried) == ("different", (), 0)
    late = a.judge(a.wrong(Change("mlp=linear", 1)), replace(SETTING, seconds=0.0))
    assert (late.verdict, late.explanations) == ("different", ())
    assert any("stopped after 0 s" in x for x in late.limits)


def test_noise_gets_no_name(at: Any) -> None:
    a = at()
    noise = torch.randn(a.ours.shape, generator=torch.Generator().manual_seed(0))
    r = a.judge(a.ours + 20 * a.limit * noise, replace(SETTING, sweep=False))
    assert (r.verdict, r.explanations) == ("different", ())


def test_where_q_and_k_are_blind(at: Any) -> None:
    a = at()
    got = a.wrong(Change("rope_theta=333"))
    r = a.judge(got, replace(SETTING, seconds=0.0))
    assert r.measures.kl_position_0 < 1e-9
    assert "the first token is right" in r.first_difference.where


# ---- no numbers


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sides", ["theirs", "ours", "both"])
def test_nan_never_passes(bad: float, sides: str, at: Any) -> None:
    a = at()
    ours, theirs = a.ours.clone(), a.ours.clone()
    if sides != "theirs":
        ours[7, 3] = bad
    if sides != "ours":
        theirs[7, 3] = bad
    r = compared(a.model, a.source, a.ids, ours, Other(kind="logits", ref="x", logits=theirs), (SIDE, SIDE),
                 Probe(tokens=N, source="given"), SETTING)
    assert (r.verdict, r.passed, r.explanations) == ("different", False, ())
    assert r.measures.non_finite == (int(sides != "theirs"), int(sides != "ours"))
    assert "NaN" in r.why
    assert f"1 of the {'second' if sides == 'theirs' else 'first'}" in r.why


def test_all_nan_on_both_sides(at: Any) -> None:
    a = at()
    bad = torch.full_like(a.ours, float("nan"))
    r = compared(a.model, a.source, a.ids, bad, Other(kind="logits", ref="x", logits=bad), (SIDE, SIDE),
                 Probe(tokens=N, source="given"), SETTING)
    assert r.verdict == "different"
    assert r.measures.non_finite == (bad.numel(), bad.numel())
    assert (r.measures.max_kl, r.measures.max_abs_dlogit) == (None, None)


def test_the_layer_where_nan_begins(at: Any) -> None:
    a = at()
    streams = [x[0] for x in a.net.streams(N)]
    outputs = [streams[1], torch.full_like(streams[2], float("nan")), torch.full_like(streams[3], float("nan"))]
    r = a.judge(torch.full_like(a.ours, float("nan")), embedded=streams[0], inputs=tuple(streams[:1] + outputs[:2]),
                outputs=tuple(outputs))
    assert (r.verdict, r.first_difference.where) == ("different", "layer 1")


# ---- what cannot be judged


@pytest.mark.parametrize("wrong", [False, True])
def test_one_token_proves_nothing(wrong: bool, at: Any) -> None:
    a = at(n=1)
    got = a.net.logits([Change("rope_pairs=adjacent")] if wrong else [], 1)
    assert got is not None
    r = a.judge(got)
    assert (r.verdict, r.passed) == ("cannot-judge", False)
    assert "one token" in r.why
    off = a.net.logits([Change("activation=gelu")], 1)
    assert off is not None
    assert a.judge(off).verdict in ("different", "explained")  # what one token does show


def test_a_window_that_is_not_passed(at: Any) -> None:
    short, long = at("gemma2", 8), at("gemma2", 9)
    r = short.judge(short.ours.clone())
    assert r.verdict == "cannot-judge"
    assert "window of 8" in r.why
    assert long.judge(long.ours.clone()).verdict == "equal"
    assert short.judge(short.ours.clone(), replace(SETTING, windows=False)).verdict == "equal"  # verify's own probe
    assert at(n=8).judge(at(n=8).ours.clone()).verdict == "equal"  # without a window


def test_a_16_bit_side_that_is_as_near_as_16_bits_are(at: Any) -> None:
    a = at()
    low = streamed.logits(a.model, a.source, a.ids, dtype=torch.bfloat16)[0]
    r = a.judge(low, computed_in="bf16")
    assert (r.verdict, r.explanations) == ("cannot-judge", ())
    assert "bf16" in r.why
    assert any("fp32" in x for x in r.limits)
    far = a.judge(a.wrong(Change("activation=relu")).bfloat16().float(), computed_in="bf16")
    assert (far.verdict, far.explanations) == ("different", ())
    assert "further off" in far.why


# ---- other forms of logits


def test_another_vocabulary_is_told(at: Any) -> None:
    """Padded rows, or rows left out: the rest is compared, and that they differ is said."""
    a = at()
    for theirs, size in ((torch.cat((a.ours, torch.zeros(N, 7)), 1), 104), (a.ours[:, :90], 90)):
        r = a.judge(theirs.clone())
        assert any(f"{size}" in x and "97" in x for x in r.limits), r.limits
        assert r.verdict == "same" or not r.passed
        bad = theirs.clone()
        bad[5, 5] += 1
        assert not a.judge(bad, replace(SETTING, explain=False)).passed


def test_another_number_of_tokens_is_refused(at: Any) -> None:
    a = at()
    with pytest.raises(InputRefused) as caught:
        a.judge(a.ours[:-1])
    assert caught.value.code == "tokens-differ"


def test_the_largest_alone(at: Any) -> None:
    a = at()
    values, columns = a.ours.topk(5)
    r = a.judge(None, top=(values, columns))
    assert r.verdict == "same"
    wrong = a.judge(None, top=(a.wrong(Change("activation=gelu")).topk(5)))
    assert (wrong.verdict, wrong.explanations) == ("different", ())
    swapped = values.clone()
    swapped[4, :2] = values[4, :2].flip(0)
    assert a.judge(None, top=(swapped, columns)).verdict == "different"
    swapped[4, 0] = float("nan")
    assert a.judge(None, top=(swapped, columns)).verdict == "different"


def test_log_probabilities(at: Any) -> None:
    a = at()
    note = (("log-probs", "a constant in a row is not compared"),)
    r = a.judge(a.ours.log_softmax(-1), log_probs=True, notes=note)
    assert r.verdict == "same"
    assert any("constant" in x for x in r.limits)
    wrong = a.wrong(Change("activation=gelu")).log_softmax(-1)
    assert not a.judge(wrong, replace(SETTING, explain=False), log_probs=True).passed


# ---- what flows through


def test_saved_hidden_states_give_the_layer(at: Any) -> None:
    a = at()
    made = a.net.opened([Change("residual=none:mlp", 2)], N)
    x = made.embedded()
    hidden = {0: x[0]}
    for i in range(3):
        x = made.layer(i, x)
        hidden[i + 1] = x[0]
    logits = made.head(x)[0]
    saved = Saved(path="x", logits=logits, vocab=97, dtype="fp32", computed_in="fp32", hidden=hidden)
    r = a.against(of_saved(saved, a.model, "logits", "x"))
    assert r.verdict == "explained"
    assert [(e.edit, e.scope) for e in r.explanations] == [("residual=none:mlp", "layer 2")]
    assert (r.first_difference.where, r.first_difference.others) == ("layer 2", ())
    assert [x.layer for x in r.layers] == [0, 1, 2]
    assert r.layers[1].relative < 1e-4 < r.layers[2].relative
    some = Saved(path="x", logits=logits, vocab=97, dtype="fp32", computed_in="fp32", hidden={2: hidden[2]})
    assert of_saved(some, a.model, "logits", "x").flow() is None


def test_a_layer_that_is_not_there(at: Any, networks: ModuleType) -> None:
    """A module of one layer less."""
    a = at()
    config = networks.config("llama")
    port = networks.theirs(config)
    del port.model.layers[1]
    port.config.num_hidden_layers = 2
    layouts = [("hf", arch.names(a.model, "hf"), arch.ignored(a.model, "hf"))]
    r = a.against(ran(port, a.ids, a.model, a.source, ref="x", label="the candidate", layouts=layouts))
    assert r.verdict == "explained"
    assert [e.edit for e in r.explanations] == ["layer_order=missing:1"]
    assert r.first_difference.where == "layer 1"


def test_another_checkpoint(at: Any, networks: ModuleType) -> None:
    a = at()
    model = apply(a.model, "norm_eps=1e-2")
    r = a.against(of_checkpoint(model, a.source, a.ids, "other"))
    assert [(e.edit, e.scope) for e in r.explanations] == [("norm_eps=1e-2", "all layers")]
    assert a.against(of_checkpoint(a.model, a.source, a.ids, "other")).verdict == "equal"
