"""rope: frequencies of every scheme against independent values, and what the report makes of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from llamactl import load
from llamactl.analysis.rope import rope
from llamactl.errors import UsageError
from llamactl.spec.config import Config
from llamactl.spec.frequencies import frequencies, ntk_theta, plain, yarn_attention
from llamactl.spec.rope import Rope, RopeScaling
from llamactl.spec.ropeconfig import read_rope

TRUTH = Path(__file__).resolve().parents[2].parent / "shared" / "rope_truth.json"


@pytest.mark.skipif(not TRUTH.exists(), reason="the table of right values is not here")
def test_every_scheme_against_the_table() -> None:
    rows = json.loads(TRUTH.read_text(encoding="utf-8"))["configs"]
    for row in rows:
        said = row["rope_parameters"]
        if row["name"].startswith("ntk"):
            theta = ntk_theta(said["rope_theta"], row["head_dim"], said["factor"])
            got, factor = plain(Rope(dim=row["head_dim"], theta=theta)), 1.0
        else:
            cfg = Config({"rope_parameters": said}, "config.json")
            got, factor = frequencies(read_rope(cfg, row["head_dim"]), length=row["seq_len"],
                                      limit=row["max_position_embeddings"])
        assert got == pytest.approx(row["inv_freq"], rel=1e-5), row["name"]
        assert factor == pytest.approx(row["attention_scaling"], rel=1e-9), row["name"]
    assert len(rows) > 150


def test_plain_frequencies() -> None:
    got = plain(Rope(dim=64, theta=100_000.0))
    assert got[0] == 1.0
    assert [2 * math.pi / got[0], 2 * math.pi / got[-1]] == pytest.approx([6.283185, 438_460], rel=1e-4)


def test_llama3_slows_the_slow_pairs() -> None:
    (r,) = rope(load("llama-3.1-8b").model).rotations
    assert (r.untouched, r.blended, r.slowed, len(r.pairs)) == (29, 6, 29, 64)
    assert r.pairs[-1].slowed == pytest.approx(8.0)
    assert r.pairs[0].slowed == 1.0
    assert (r.trained_context, r.usable_context) == (8192, 131072)


def test_llama3_without_a_band_between_blends_nothing() -> None:
    """Llama 4's low and high frequency factors are both 1: a pair that turns once in 8,192 positions is left alone."""
    (r,) = rope(load("llama-4-scout").model).rotations
    assert (r.untouched, r.blended, r.slowed) == (35, 0, 29)
    assert all((p.turns >= 1) == (p.slowed == 1.0) for p in r.pairs)
    assert sorted(p.slowed for p in r.pairs) == pytest.approx([1.0] * 35 + [16.0] * 29)


def test_ntk_slows_the_slowest_pair_by_the_factor() -> None:
    (r,) = rope(load("llama-3-8b").model, target=32768, method="ntk").rotations
    assert r.pairs[-1].slowed == pytest.approx(4.0)
    assert r.pairs[0].slowed == 1.0
    assert r.unseen == 0 or r.pairs[-1].unseen is False


def test_linear_slows_every_pair_alike() -> None:
    (r,) = rope(load("llama-3-8b").model, target=16384, method="linear").rotations
    assert {round(p.slowed, 12) for p in r.pairs} == {2.0}
    assert r.unseen == 0


def test_unstretched_pairs_meet_unseen_angles_past_the_trained_length() -> None:
    (here,) = rope(load("llama-3-8b").model).rotations
    (there,) = rope(load("llama-3-8b").model, target=16384).rotations
    assert here.unseen == 0
    slow = [p.j for p in there.pairs if p.turns < 1]
    assert [p.j for p in there.pairs if p.unseen] == slow
    assert slow[0] == 35


def test_two_rotations_by_layer_type() -> None:
    local, full = rope(load("gemma-3-4b").model).rotations
    assert (local.theta, local.layers, local.scheme) == (10_000.0, 29, "default")
    assert (full.theta, full.layers, full.scheme) == (1_000_000.0, 5, "linear")
    assert {round(p.slowed, 9) for p in full.pairs} == {8.0}


def test_partial_rotation_and_none() -> None:
    (r,) = rope(load("phi-2").model).rotations
    assert (r.rotated, r.head_dim, len(r.pairs)) == (32, 80, 16)
    assert rope(load("gpt2").model).rotations == ()
    (mla,) = rope(load("deepseek-v3").model).rotations
    assert (mla.rotated, mla.pairing, mla.attention_factor) == (64, "adjacent", 1.0)


def test_yarn_attention_factor() -> None:
    assert yarn_attention(RopeScaling(kind="yarn", factor=4.0, original=1)) == pytest.approx(0.1 * math.log(4) + 1)
    (r,) = rope(load("llama-3-8b").model, target=32768, method="yarn").rotations
    assert r.attention_factor == pytest.approx(1.138629436)


@pytest.mark.parametrize(("method", "target"), [("yarm", 32768), ("yarn", None), ("yarn", 8192), ("longrope", 32768)])
def test_a_method_needs_a_name_and_room(method: str, target: int | None) -> None:
    with pytest.raises(UsageError):
        rope(load("llama-3-8b").model, target=target, method=method)
