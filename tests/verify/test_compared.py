"""The verdict: equal, same, explained, different or not to be judged; and what never passes."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from llamactl.analysis.verification import Probe
from llamactl.net import streamed
from llamactl.spec.mistakes import Change
from llamactl.verify.compared import MOVED_TIMES, compared
from llamactl.verify.other import Other

sides: Any = sys.modules["llamactl_tests_sides"]  # loaded by conftest.py
N, SIDE, SETTING = sides.N, sides.SIDE, sides.SETTING


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
    outside[10, 7] += 1.1 * MOVED_TIMES * a.limit
    assert a.judge(inside).verdict == "same"
    r = a.judge(outside, replace(SETTING, explain=False))
    assert (r.verdict, r.explanations) == ("different", ())
    assert r.measures.max_abs_dlogit == pytest.approx(1.1 * MOVED_TIMES * a.limit, rel=0.05)
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


@pytest.mark.slow
def test_the_judged_side_may_be_the_one_that_runs(at: Any) -> None:
    """A reference without a network: the edits lead from the checkpoint to it, and losses change sides."""
    a = at()
    r = a.judge(a.wrong(Change("activation=gelu")), replace(SETTING, subject="the checkpoint", by="the reference",
                                                            reverse=True))
    assert r.why.startswith("the reference is the checkpoint with this change: the activation is gelu")
    usual = a.judge(a.wrong(Change("activation=gelu")))
    assert (r.measures.loss_first, r.measures.loss_second) == (usual.measures.loss_second, usual.measures.loss_first)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
@pytest.mark.parametrize("whose", ["theirs", "ours", "both"])
def test_nan_never_passes(bad: float, whose: str, at: Any) -> None:
    a = at()
    ours, theirs = a.ours.clone(), a.ours.clone()
    if whose != "theirs":
        ours[7, 3] = bad
    if whose != "ours":
        theirs[7, 3] = bad
    r = compared(a.model, a.source, a.ids, ours, Other(kind="logits", ref="x", logits=theirs), (SIDE, SIDE),
                 Probe(tokens=N, source="given"), SETTING)
    assert (r.verdict, r.passed, r.explanations) == ("different", False, ())
    assert r.measures.non_finite == (int(whose != "theirs"), int(whose != "ours"))
    assert "nan" in r.why
    assert f"1 of the {'second' if whose == 'theirs' else 'first'}" in r.why


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
