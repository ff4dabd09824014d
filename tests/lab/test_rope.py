"""Rotations: scores that depend on distances alone, and which angles a longer context meets for the first time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llamactl.analysis.experiment import Experiment
from llamactl.lab import rope_identity, rope_stretch
from llamactl.net import attention, positions
from llamactl.render.lab import number


def test_a_pair_keeps_its_score_to_rounding(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("rope-identity")
    pair = pick(e, "one pair of 1 rad a position, fp32: spread to 100,000, of 99 in 100")
    assert 1e-7 < pair.value < 2e-6
    assert 5e-7 < pair.highest < 4e-6  # about 1e-6
    assert (pair.verdict, pair.samples) == ("holds", 5 * 200)
    assert pair.note == "limit of ours; its angles are whole numbers, which fp32 holds exactly"
    assert pick(e, "one pair of 1 rad a position, fp64").value < 1e-14


def test_a_pair_of_rounded_angles_keeps_it_to_what_their_rounding_allows(done: Callable[..., Experiment], pick: Any
                                                                          ) -> None:
    e = done("rope-identity")
    far = pick(e, "one pair of 0.56 rad a position, fp32: spread to 100,000")
    assert 1e-3 < far.value < 0.1  # not the 1e-6 of whole numbers
    assert (far.verdict, far.samples) == ("measured", 5 * 200)
    share = pick(e, "one pair of 0.56 rad a position, fp32: that spread / what rounding of the angles allows")
    assert 0.1 < share.value <= 1
    assert (share.verdict, share.expected) == ("holds", 1.0)
    head = pick(e, "a head of 32, fp32: spread to 100,000")
    assert far.value < 2 * head.value  # one of its pairs


def test_one_pair_alone_is_that_pair(setting: Any) -> None:
    from llamactl.spec.rope import Rope

    whole = rope_identity._rotated(setting(), Rope(dim=32, theta=10_000.0), torch.float32)
    parts = [whole.alone(j).score(1_000, 993) for j in range(16)]
    assert torch.allclose(sum(parts), whole.score(1_000, 993), atol=1e-4)
    q, k = whole.q[..., [1, 17]].flatten(1).double(), whole.k[..., [1, 17]].flatten(1).double()
    turn = 7 * 10_000.0 ** (-2 / 32)
    cos, sin = torch.tensor(turn).cos(), torch.tensor(turn).sin()
    want = (q * k).sum(-1) * cos + (q[:, 0] * k[:, 1] - q[:, 1] * k[:, 0]) * sin
    assert torch.allclose(parts[1].double(), want, atol=1e-3)


def test_a_head_keeps_its_score_to_rounding_of_its_angles(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("rope-identity")
    near = pick(e, "a head of 32, fp32: spread to 1,000, of 99 in 100")
    assert 1e-5 < near.value < 3e-4
    assert near.verdict == "holds"
    far = pick(e, "a head of 32, fp32: spread to 100,000")
    assert 3e-4 < far.value < 0.1
    assert far.verdict == "measured"
    assert "angles near 56,234 rad stand 3.9e-03 apart" in far.note
    share = pick(e, "a head of 32, fp32: that spread / what rounding of the angles allows")
    assert 0.1 < share.value <= 1
    assert pick(e, "a head of 32, fp64: spread to 100,000").value < 1e-10
    assert e.verdict == "holds"


def test_the_distance_counts_and_the_place_does_not(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("rope-identity")
    same, step = pick(e, "(10, 3) less (1010, 1003)"), pick(e, "(10, 3) less (10, 4)")
    assert 1e-5 < same.value < 1e-4
    assert step.value > 1
    assert same.verdict == step.verdict == "holds"
    assert step.of == "4,000 drawn q and k, head 64, base 100,000"


def test_a_learned_table_changes_the_score(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("rope-identity")
    table, rope = pick(e, "spread with a learned table"), pick(e, "spread with RoPE")
    assert table.value > 1
    assert rope.value < 3e-4
    assert pick(e, "table / RoPE").value == pytest.approx(table.value / rope.value)
    for kind in ("RoPE", "learned positions"):
        f = pick(e, "spread in trained weights", f"a checkpoint with {kind}")
        assert (f.verdict, f.value, f.note) == ("skipped", None, "needs trained weights: --model CKPT")


def test_another_seed_holds_too(done: Callable[..., Experiment]) -> None:
    assert [done("rope-identity", seed=s).verdict for s in range(1, 9)] == ["holds"] * 8


def test_the_numbers_beside_each_other(done: Callable[..., Experiment]) -> None:
    (grid,) = done("rope-identity").grids
    assert len(grid.rows) == 2 * 2 * 5
    assert {r[2] for r in grid.rows} == {0, 1, 7, 63, 200}
    for row in grid.rows:
        near, most, further, mostly = row[3:]
        assert 0 < near < most <= mostly  # numbers, which the text rounds
        assert near <= further <= mostly
    assert rope_identity.SHIFTS[-1] == 100_000


def test_a_rotation_by_the_wrong_angle_is_seen(done: Callable[..., Experiment], pick: Any,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys turned a little too far the further they stand: the score then depends on the place."""
    right = positions.rotate

    def wrong(x: torch.Tensor, turn: positions.Turn, pairs: str) -> torch.Tensor:
        return right(x, positions.Turn(turn.cos * (1 + 1e-2 * turn.cos[..., :1]), turn.sin), pairs)

    monkeypatch.setattr(rope_identity, "rotate", wrong)
    e = done("rope-identity", seed=4)
    assert e.verdict == "differs"
    for what in ("one pair of 1 rad a position, fp32", "one pair of 1 rad a position, fp64",
                 "one pair of 0.56 rad a position, fp32: that spread", "a head of 32, fp32: that spread",
                 "a head of 32, fp64"):
        assert pick(e, what).verdict == "differs"


# --- stretching


def test_unseen_pairs_under_every_scheme(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("rope-stretch")
    found = {(w, of): pick(e, f"{w}: pairs with unseen angles at 32,768", of).value for w, of in (
        *((w, "llama-3-8b") for w in ("none", "linear", "ntk", "yarn", "llama3")), ("llama3", "llama-3.1-8b"),
        ("longrope", "phi-3-mini-128k"))}
    assert list(found.values()) == [29, 0, 28, 0, 0, 0, 0]
    assert pick(e, "pairs judged otherwise").value == 0
    grid = next(g for g in e.grids if g.title == "pairs under each scheme")
    assert {r[0]: r[-1] for r in grid.rows if r[3] == 32_768} == {"none": "35-63", "ntk": "35-62", **dict.fromkeys(
        ("linear", "yarn", "llama3", "longrope"), "none")}
    assert e.verdict == "holds"
    assert "`llamactl rope`" in e.claims[0].formula  # who claims it


def test_llama_31_meets_unseen_angles_at_its_own_length(done: Callable[..., Experiment], pick: Any) -> None:
    """It slows by 8 what its context has grown by 16."""
    e = done("rope-stretch")
    own = pick(e, "llama3: pairs with unseen angles at 131,072")
    assert (own.value, own.unit, own.of, own.verdict) == (29, "pairs", "llama-3.1-8b, 64 pairs", "holds")
    assert pick(e, "longrope: pairs with unseen angles at 131,072").of == "phi-3-mini-128k, 48 pairs"
    grid = next(g for g in e.grids if g.title == "pairs under each scheme")
    assert [r[-1] for r in grid.rows if r[0] == "llama3" and r[3] == 131_072] == ["35-63"]
    assert grid.columns[4:7] == ("untouched", "slowed less", "slowed most")  # as is true of all schemes
    by = {(r[0], r[1], r[3]): r[4:7] for r in grid.rows}
    assert by["ntk", "llama-3-8b", 32_768] == (1, 62, 1)  # it blends nothing
    assert by["linear", "llama-3-8b", 32_768] == (0, 0, 64)
    assert by["llama3", "llama-3.1-8b", 131_072] == (29, 6, 29)


def test_llama_31_slows_29_of_64_pairs(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("rope-stretch")
    three = [pick(e, w) for w in ("slowed by 8", "left alone", "blended")]
    assert [f.value for f in three] == [29, 29, 6]
    assert {(f.unit, f.of) for f in three} == {("pairs", "llama-3.1-8b, 64 pairs")}


def test_alibi_slopes_and_penalties(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("rope-stretch")
    assert pick(e, "slope of head 1 of 8").value == pytest.approx(0.5, abs=1e-6)
    last = pick(e, "slope of head 8 of 8")
    assert last.value == pytest.approx(2**-8, abs=1e-12)
    assert number(last.value) == number(last.expected)  # both round to one side
    all_ = pick(e, "slopes of all 8 heads")
    assert all_.value < 1e-9
    assert (all_.verdict, all_.samples) == ("holds", 8)
    grid = next(g for g in e.grids if g.title.startswith("ALiBi"))
    assert grid.rows[0] == (1, 0.5, -512.0, -16_384.0)
    assert grid.rows[-1] == (8, 2**-8, -4.0, -128.0)


def test_one_slope_that_is_wrong_is_seen(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.alibi_slopes
    monkeypatch.setattr(attention, "alibi_slopes", lambda n: [s * (1.01 if i == 2 else 1)
                                                                for i, s in enumerate(right(n))])
    assert [f.verdict for f in rope_stretch._alibi(setting())] == ["holds", "holds", "differs"]


def test_a_table_that_turns_otherwise_is_seen(done: Callable[..., Experiment], pick: Any,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """The network's table is what is read: one of another base disagrees with the arithmetic."""
    right = rope_stretch.RopeTable

    def other(rope: Any, *args: Any, **kwargs: Any) -> Any:
        from dataclasses import replace

        return right(replace(rope, theta=rope.theta / 10), *args, **kwargs)

    monkeypatch.setattr(rope_stretch, "RopeTable", other)
    e = done("rope-stretch", seed=5)
    assert pick(e, "none: pairs with unseen angles").verdict == "differs"
    assert pick(e, "pairs judged otherwise").verdict == "differs"


@pytest.mark.parametrize(("pairs", "text"), [([], "none"), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8")])
def test_pairs_are_listed_as_runs(pairs: list[int], text: str) -> None:
    assert rope_stretch._listed(pairs) == text
