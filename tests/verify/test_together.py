"""Two and three mistakes at once: guessed from what each does alone, and named from logits."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from llamactl.spec.mistakes import Change, hypotheses
from llamactl.verify.matching import Target
from llamactl.verify.search import Search
from llamactl.verify.together import Alone, Pairs, nearest

sides: Any = sys.modules["llamactl_tests_sides"]  # loaded by conftest.py
N = sides.N


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_nearest_pair_stands_first() -> None:
    rows = list(noise(700, 60))  # more than are paired at once
    for i, j, a, b in ((3, 17, 1.0, 1.0), (600, 2, 0.5, 3.0), (698, 699, 2.0, 0.1)):
        assert nearest(rows, a * rows[i] + b * rows[j], 5)[0] == tuple(sorted((i, j)))


def test_what_would_have_to_be_turned_round_is_no_part() -> None:
    rows = list(noise(40, 60))
    assert (3, 17) not in nearest(rows, rows[3] - rows[17], 200)
    assert (3, 17) not in nearest(rows, rows[17] - rows[3], 200)
    assert (3, 17) not in nearest(rows, rows[3] + 40 * rows[17], 200)
    assert (3, 3) not in nearest(rows, 2 * rows[3], 2000)
    twice = [*rows, 2 * rows[3]]
    assert (3, 40) not in nearest(twice, rows[3], 2000)  # the same direction again is no second change


def test_one_row_is_no_pair() -> None:
    assert nearest([torch.ones(3)], torch.ones(3), 9) == []


def test_what_does_nothing_is_not_kept(at: Any) -> None:
    a = at()
    alone = Alone(a.net, Target(a.wrong(Change("activation=gelu")), a.limit), 1)
    for text in ("activation=gelu", "rope_theta=100", "activation=relu"):
        alone.add(Change(text), a.wrong(Change(text))[:1, alone.columns])
    alone.add(Change("norm_eps=0"), torch.full((1, len(alone.columns)), torch.nan))
    assert [c.text for c in alone.shown] == ["activation=gelu", "activation=relu"]
    assert alone.enough()
    assert alone.ranked()[0] == Change("activation=gelu")


def test_what_takes_the_whole_text_is_run_on_it(at: Any) -> None:
    a = at()
    alone = Alone(a.net, Target(a.wrong(Change("activation=gelu")), a.limit), 2)
    (idea,) = (h for h in hypotheses(a.model) if h.text == "mask=none")
    for layer in (None, 1):
        got = alone.run(idea, layer)
        assert torch.equal(got, a.wrong(Change("mask=none", layer))[:2])
        assert alone.shown[-1] == Change("mask=none", layer)


def test_log_probabilities_are_held_against_log_probabilities(at: Any) -> None:
    a = at()
    wrong = a.wrong(Change("activation=gelu"), Change("norm_kind=layer"))
    alone = Alone(a.net, Target(wrong.log_softmax(-1), a.limit, True), 1)
    for h in hypotheses(a.model):
        if not h.about.blind:
            alone.run(h)
    assert not alone.enough()
    assert (Change("activation=gelu"), Change("norm_kind=layer")) in [
        tuple(sorted(p)) for p in alone.pairs(9)]


def chains(a: Any, *changes: Change, seconds: float = 100.0, layers: bool = True) -> tuple[set[Change], Search]:
    """What a search finds for logits of these changes, of which everything it says is made again."""
    wrong = a.wrong(*changes)
    search = Search(source=a.source, ids=a.ids, target=Target(wrong, a.limit), layers=layers,
                    deadline=time.monotonic() + seconds)
    found = search.solve(a.model)
    assert not search.stopped
    if not found:
        return set(), search
    chain, same = found[0]
    for last in (chain[-1], *same):
        made = a.wrong(*chain[:-1], last)
        assert float((made - wrong).abs().max()) <= a.limit
    return set(chain), search


@pytest.mark.parametrize("changes", [
    (Change("activation=gelu"), Change("norm_kind=layer")),  # both show at the first token
    (Change("rope_pairs=adjacent"), Change("attn_scale=1.0")),  # neither does
    (Change("mask=none"), Change("activation=quick_gelu")),  # the first shows only in the whole text
    (Change("mask=none"), Change("rope_theta=100000")),  # and through it the second in the first token
    (Change("swapped=mlp.gate,mlp.up", 1), Change("norm_weight=all")),  # one of them in one layer
    (Change("swapped=mlp.gate,mlp.up", 0), Change("norms_swapped=attn,mlp", 1)),  # both
    pytest.param((Change("heads=attn.q:reversed", 0), Change("rope_direction=both", 1)), marks=pytest.mark.slow),
])
def test_pairs(at: Any, changes: tuple[Change, Change]) -> None:
    assert chains(at(), *changes)[0] == set(changes)


@pytest.mark.parametrize("changes", [
    (Change("activation=gelu"), Change("norm_kind=layer"), Change("rope_pairs=adjacent")),
    (Change("logits_scale=2.0"), Change("kv_order=tile"), Change("attn_scale=1.0")),
])
def test_three(at: Any, changes: tuple[Change, ...]) -> None:
    assert chains(at(), *changes, layers=False)[0] == set(changes)


def test_a_pair_is_made_once(at: Any) -> None:
    """What was tried before single layers were looked at is not tried again after them."""
    a = at()
    wrong = a.wrong(Change("activation=gelu")) + 0.1 * noise(N, a.model.head.vocab)
    search = Search(source=a.source, ids=a.ids, target=Target(wrong, a.limit), deadline=time.monotonic() + 100)
    ideas = [h for h in hypotheses(a.model) if not h.about.blind and not h.whole]
    alone = Alone(a.net, search.target, 1)
    for h in ideas:
        alone.run(h)
    pairs = Pairs(search, a.net, alone, ideas)
    for most in (20, 50, 50):
        before, runs = len(pairs.made), a.net.runs
        assert pairs.tried(2, most) == []
        assert len(pairs.made) == max(before, most)
        assert (a.net.runs > runs) is (most > before)
    alone.add(Change("activation=quick_gelu"), search.target.logits[:1, alone.columns])  # enough for the first token
    assert pairs.tried(2, 100) == []
    assert len(pairs.made) == 50


def test_a_window_of_any_width_in_one_layer(at: Any) -> None:
    """Its width is told by the first token that differs."""
    assert chains(at(), Change("window=37", 1))[0] == {Change("window=37", 1)}
