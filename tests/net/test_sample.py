"""Sampling against transformers' own logits processors, and what it promises by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llamactl.net import sample
from llamactl.net.sample import Sampler, Sampling, candidates, draw, logprob, penalised

CPU = torch.device("cpu")
ROWS, VOCAB = 3, 257
SETTINGS: list[dict[str, Any]] = [
    {}, {"temperature": 1.0}, {"temperature": 0.3}, {"temperature": 5.0}, {"top_k": 1}, {"top_k": 7}, {"top_k": 256},
    {"top_k": 257}, {"top_k": 100_000}, {"top_p": 0.9}, {"top_p": 0.5}, {"top_p": 1e-6}, {"top_p": 0.999999},
    {"min_p": 0.05}, {"min_p": 0.5}, {"min_p": 0.999}, {"repetition_penalty": 1.3}, {"repetition_penalty": 0.7},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.1},
    {"temperature": 1.9, "top_k": 11, "top_p": 0.6}, {"temperature": 0.5, "top_p": 0.7, "min_p": 0.1},
]


def drawn(seed: int, scale: float = 4.0) -> tuple[Tensor, Tensor]:
    """Logits (ROWS, VOCAB) and ids already met (ROWS, 20)."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, VOCAB, generator=g) * scale, torch.randint(0, VOCAB, (ROWS, 20), generator=g)


def transformers_scores(s: Sampling, logits: Tensor, ids: Tensor) -> Tensor:
    """The same settings through transformers, in the order that its generate puts them."""
    steps = LogitsProcessorList()
    if s.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    steps.append(TemperatureLogitsWarper(s.temperature))
    if s.top_k:
        steps.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        steps.append(TopPLogitsWarper(s.top_p))
    if s.min_p:
        steps.append(MinPLogitsWarper(s.min_p))
    return steps(ids, logits.clone())


def ours(s: Sampling, logits: Tensor, ids: Tensor) -> Tensor:
    """Scores of all tokens, -inf for what cannot be drawn."""
    sampler = Sampler(s, CPU)
    sampler.meet(ids, logits.shape[-1])
    scores, which = candidates(penalised(logits, sampler.seen, s.repetition_penalty), s)
    return scores if which is None else torch.full_like(logits, -math.inf).scatter(1, which, scores)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()) or "default")
@pytest.mark.parametrize("seed", range(4))
def test_the_chances_are_those_of_transformers(settings: dict[str, Any], seed: int) -> None:
    s = Sampling(**settings)
    logits, ids = drawn(seed)
    logits = logits.double()  # in fp32 the sums of small chances differ by how they are added
    theirs, found = transformers_scores(s, logits, ids), ours(s, logits, ids)
    assert torch.equal(found > -math.inf, theirs > -math.inf)
    torch.testing.assert_close(found.softmax(-1), theirs.softmax(-1), rtol=1e-5, atol=1e-7)


def test_equal_logits_at_the_border_of_top_k_all_stay() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    for s in (Sampling(top_k=2), Sampling(top_k=3)):
        found = ours(s, logits, torch.zeros(1, 1, dtype=torch.long)) > -math.inf
        assert found.tolist() == [[True, False, True, True, True, False]]
        assert torch.equal(found, transformers_scores(s, logits, torch.zeros(1, 1, dtype=torch.long)) > -math.inf)


def test_no_setting_leaves_no_token() -> None:
    logits, ids = drawn(9, 50.0)
    s = Sampling(temperature=1e-30, top_k=1, top_p=1e-9, min_p=0.999999)
    found = ours(s, logits, ids)
    assert torch.equal(found > -math.inf, torch.nn.functional.one_hot(logits.argmax(-1), VOCAB).bool())
    assert Sampler(s, CPU).choose(logits)[0].tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e9, 1e300])
def test_no_temperature_overflows(temperature: float) -> None:
    logits, ids = drawn(3)
    chances = ours(Sampling(temperature=temperature), logits, ids).softmax(-1)
    wanted = torch.nn.functional.one_hot(logits.argmax(-1), VOCAB).float() if temperature < 1 else torch.full(
        (ROWS, VOCAB), 1 / VOCAB)
    torch.testing.assert_close(chances, wanted, rtol=1e-4, atol=1e-6)


# ---- greedy


def test_temperature_0_takes_the_largest_and_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("greedy needs no chances")

    for name in ("softmax", "log_softmax", "exp", "logsumexp"):
        monkeypatch.setattr(Tensor, name, never)
    for name in ("candidates", "draw"):
        monkeypatch.setattr(sample, name, never)
    logits, _ = drawn(1)
    sampler = Sampler(Sampling(temperature=0.0, top_k=3, top_p=0.1), CPU)
    assert sampler.choose(logits)[0].tolist() == logits.argmax(-1).tolist()
    assert sampler.choose(logits)[1].tolist() == logits.amax(-1).tolist()


def test_greedy_heeds_the_repetition_penalty() -> None:
    sampler = Sampler(Sampling(temperature=0.0, repetition_penalty=2.0), CPU)
    logits = torch.tensor([[4.0, 3.0, -1.0]])
    assert sampler.choose(logits)[0].tolist() == [0]
    sampler.meet(torch.tensor([[0]]), 3)
    assert sampler.choose(logits)[0].tolist() == [1]
    sampler.meet(torch.tensor([[1]]), 3)
    assert sampler.choose(logits)[0].tolist() == [0]
    negative = Sampler(Sampling(temperature=0.0, repetition_penalty=2.0), CPU)
    negative.meet(torch.tensor([[0]]), 2)
    assert negative.choose(torch.tensor([[-1.0, -1.5]]))[0].tolist() == [1]


# ---- drawing


def test_a_seed_gives_the_same_draws_and_another_seed_others() -> None:
    logits, _ = drawn(5, 1.0)

    def several(seed: int) -> list[list[int]]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), CPU)
        return [sampler.choose(logits)[0].tolist() for _ in range(8)]

    torch.manual_seed(1)
    first = several(3)
    torch.manual_seed(2)  # not torch's own state
    assert several(3) == first
    assert several(4) != first


def test_draws_follow_the_chances() -> None:
    """20,000 draws of 5 tokens: chi-squared with 4 degrees of freedom stays below 23.5 in 9,999 of 10,000 cases."""
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0, 0.5]]).expand(20_000, 5)
    for settings in ({}, {"top_k": 4}, {"top_p": 0.95}):
        s = Sampling(temperature=0.8, seed=7, **settings)
        found = torch.bincount(Sampler(s, CPU).choose(logits)[0], minlength=5).double()
        wanted = transformers_scores(s, logits[:1], torch.zeros(1, 1, dtype=torch.long))[0].double().softmax(-1)
        there = wanted > 0
        assert float(found[~there].sum()) == 0
        assert float(((found - 20_000 * wanted)[there] ** 2 / (20_000 * wanted)[there]).sum()) < 23.5


def test_a_column_without_a_chance_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.tensor([[-math.inf, 0.0, -math.inf, -1.0, -math.inf]])
    for u, wanted in ((0.0, 1), (0.7, 1), (0.74, 3), (1 - 2**-53, 3)):
        monkeypatch.setattr(torch, "rand", lambda *s, u=u, **k: torch.full(s, u, dtype=k["dtype"]))
        assert draw(scores, torch.Generator()).tolist() == [wanted]


@pytest.mark.parametrize("scale", [8.0, 1.0, 0.01])
def test_a_large_vocabulary_is_cut_alike(scale: float) -> None:
    """Peaked, flat and flatter: 256 tokens are enough for the share, 4,096, or only a sort of all."""
    logits = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0)) * scale
    none = torch.zeros(2, 1, dtype=torch.long)
    for share in (0.3, 0.6, 0.95):
        s = Sampling(temperature=1.0, top_p=share)
        found, theirs = (f(s, logits.double(), none) > -math.inf for f in (ours, transformers_scores))
        assert torch.equal(found, theirs)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_broken_network_is_told_and_not_drawn_from(bad: float, temperature: float) -> None:
    logits, _ = drawn(2)
    logits[0, 5] = bad
    _, top = Sampler(Sampling(temperature=temperature, top_p=0.9, top_k=50, min_p=0.1), CPU).choose(logits)
    assert top.isfinite().tolist() == [False, True, True]


def test_logprob_is_the_networks_own() -> None:
    logits, _ = drawn(4)
    token = torch.tensor([3, 200, 0])
    wanted = logits.double().log_softmax(-1)[torch.arange(ROWS), token]
    torch.testing.assert_close(logprob(logits, token).double(), wanted, rtol=0, atol=1e-5)
