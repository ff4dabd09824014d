"""Rotations against independent frequencies and against complex numbers; sinusoids as the paper writes them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from llamactl import arch
from llamactl.net.decoder import positions
from llamactl.net.positions import RopeTable, Turn, rotate, sinusoids
from llamactl.spec.config import Config
from llamactl.spec.frequencies import ntk_theta
from llamactl.spec.model import Context, Model
from llamactl.spec.rope import Rope
from llamactl.spec.ropeconfig import read_context, read_rope

TRUTH = Path(__file__).resolve().parents[2].parent / "shared" / "rope_truth.json"
LLAMA = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 9,
         "num_attention_heads": 1, "max_position_embeddings": 8}
PAIRS = ["half", "adjacent"]


def model_of(context: Context | None = None) -> Model:
    model = arch.describe(LLAMA, "config.json")
    return replace(model, context=context) if context else model


def table(rope: Rope, rows: int, *, length: int = 1, dtype: torch.dtype = torch.float32, context: Context | None = None
          ) -> RopeTable:
    return RopeTable(rope, model_of(context), dtype=dtype, device="cpu", length=length).upto(rows)


def turned(rope: Rope, x: Tensor, at: int, length: int = 1) -> Tensor:
    """x (..., D) rotated as the token at position `at`."""
    t = table(rope, at + 1, length=length)
    rows: Tensor = rotate(x.reshape(1, -1, 1, x.shape[-1]), Turn(t.cos[at : at + 1], t.sin[at : at + 1]), rope.pairs)
    return rows.view(x.shape)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.skipif(not TRUTH.exists(), reason="the table of right values is not here")
@pytest.mark.parametrize("pairs", PAIRS)
def test_every_scheme_against_the_table(pairs: str) -> None:
    """cos and sin at some positions, of frequencies that transformers computed."""
    rows = json.loads(TRUTH.read_text(encoding="utf-8"))["configs"]
    places = torch.tensor([0, 1, 2, 17, 500])
    for row in rows:
        said, dim, limit = row["rope_parameters"], row["head_dim"], row.get("max_position_embeddings", 8192)
        if row["name"].startswith("ntk"):
            rope = Rope(dim=dim, theta=ntk_theta(said["rope_theta"], dim, said["factor"]), pairs=pairs)
            context = Context(trained=limit, usable=limit, why="")
        else:
            cfg = Config({"rope_parameters": said, "max_position_embeddings": limit}, "config.json")
            rope = read_rope(cfg, dim, pairs=pairs)
            context = read_context(cfg, rope)
        t = table(rope, 501, length=row.get("seq_len") or 1, context=context)
        angles = places[:, None].double() * torch.tensor(row["inv_freq"], dtype=torch.float64)
        first, second = (slice(0, dim // 2), slice(dim // 2, dim)) if pairs == "half" else (
            slice(0, dim, 2), slice(1, dim, 2))
        for got, want in ((t.cos[:, first], angles.cos()), (t.cos[:, second], angles.cos()),
                          (t.sin[:, first], -angles.sin()), (t.sin[:, second], angles.sin())):
            assert got.shape == (501, dim // 2)
            assert (got[places] - want * row["attention_scaling"]).abs().max() < 2e-4, row["name"]
    assert len(rows) > 150


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("at", [0, 1, 7, 300])
def test_a_pair_turns_like_a_complex_number(pairs: str, at: int) -> None:
    x = noise(3, 16)
    rope = Rope(dim=16, theta=100.0, pairs=pairs)
    first, second = (x[:, :8], x[:, 8:]) if pairs == "half" else (x[:, ::2], x[:, 1::2])
    angle = at * 100.0 ** (-torch.arange(8).double() / 8)
    want = torch.complex(first.double(), second.double()) * torch.polar(torch.ones(8).double(), angle)
    got = turned(rope, x, at)
    parts = (got[:, :8], got[:, 8:]) if pairs == "half" else (got[:, ::2], got[:, 1::2])
    assert (torch.complex(parts[0].double(), parts[1].double()) - want).abs().max() < 1e-4


def test_adjacent_is_half_in_another_order() -> None:
    x = noise(2, 12)
    order = torch.arange(12).view(2, 6).T.flatten()  # 0 6 1 7 ...
    half, adjacent = (Rope(dim=12, theta=1000.0, pairs=p) for p in PAIRS)
    assert (turned(adjacent, x[:, order], 29) - turned(half, x, 29)[:, order]).abs().max() < 1e-6
    assert (turned(adjacent, x, 29) - turned(half, x, 29)).abs().max() > 0.1


@pytest.mark.parametrize("pairs", PAIRS)
def test_only_the_first_dimensions_turn(pairs: str) -> None:
    x = noise(2, 20)
    rope = Rope(dim=8, theta=1000.0, pairs=pairs)
    got = turned(rope, x, 5)
    assert torch.equal(got[:, 8:], x[:, 8:])
    assert torch.equal(got[:, :8], turned(rope, x[:, :8].contiguous(), 5))
    assert (got[:, :8] - x[:, :8]).abs().max() > 0.1


def test_pairs_that_stand_still() -> None:
    """Half of the dimensions turn, with the frequencies of the whole head (Gemma 4)."""
    t = table(Rope(dim=8, theta=1000.0, span=16), 50)
    want = torch.outer(torch.arange(50).double(), 1000.0 ** (-torch.arange(4).double() / 8))
    assert (t.cos[:, :4] - want.cos()).abs().max() < 1e-5


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("dim", [8, 16])
def test_only_distance_is_seen(pairs: str, dim: int) -> None:
    """q at m and k at n score what q at m + s and k at n + s do; other distances score otherwise."""
    q, k = noise(16), noise(16, seed=1)
    rope = Rope(dim=dim, theta=500.0, pairs=pairs)

    def score(m: int, n: int) -> float:
        return float(turned(rope, q, m).double() @ turned(rope, k, n).double())

    for m, n in ((0, 0), (9, 4), (40, 3)):
        for shift in (1, 13, 400):
            assert score(m + shift, n + shift) == pytest.approx(score(m, n), abs=2e-4)
        assert score(m + 3, n) != pytest.approx(score(m, n), abs=1e-2)


def test_a_table_grows_and_stays_what_it_was() -> None:
    t = table(Rope(dim=8, theta=100.0), 5)
    first = t.cos.clone()
    assert t.rows == 5
    t.upto(4)
    assert t.rows == 5
    t.upto(6)
    assert t.rows == 10  # doubled, so that one more token each time is not one more table each time
    assert torch.equal(t.cos[:5], first)
    assert t.upto(100).rows == 100
    assert (t.cos - table(Rope(dim=8, theta=100.0), 100).cos).abs().max() == 0


def test_a_table_in_bf16_is_computed_in_fp32() -> None:
    rope = Rope(dim=8, theta=100.0)
    low, full = table(rope, 3000, dtype=torch.bfloat16), table(rope, 3000)
    assert low.cos.dtype == torch.bfloat16
    assert torch.equal(low.sin, full.sin.bfloat16())


def test_far_positions_are_exact_enough() -> None:
    """fp32 angles: the slow pairs are exact at 100,000 tokens, the fastest is within 0.01."""
    t = table(Rope(dim=8, theta=10000.0), 100_001)
    want = (100_000 * 10000.0 ** (-torch.arange(4).double() / 4)).cos()
    assert (t.cos[100_000, :4] - want).abs().max() < 0.01


@pytest.mark.parametrize("dim", [6, 7])
def test_sinusoids(dim: int) -> None:
    got = sinusoids(torch.tensor([0, 1, 50]), dim)
    for n, at in enumerate((0, 1, 50)):
        for i in range(dim):
            angle = at / 10000 ** (i // 2 * 2 / dim)
            assert float(got[n, i]) == pytest.approx(math.cos(angle) if i % 2 else math.sin(angle), abs=1e-5)


def test_positions_count_from_the_first_real_token() -> None:
    assert positions(3, 6, None).tolist() == [3, 4, 5]
    assert positions(0, 4, torch.tensor([0, 2])).tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    assert positions(4, 6, torch.tensor([1, 3])).tolist() == [[3, 4], [1, 2]]


def test_a_whole_model_with_permuted_rows_turns_neighbours(networks: ModuleType) -> None:
    """Rows of q and k in Meta's order and neighbouring pairs: the same logits, the same weights otherwise."""
    g = networks.golden("llama")

    def turning(x: Any) -> Any:
        return replace(x, attn=replace(x.attn, rope=replace(x.attn.rope, pairs="adjacent")))

    def reordered(name: str, w: Tensor) -> Tensor:
        if ".attn.q." not in name and ".attn.k." not in name:
            return w
        dim = g.model.layers[0].attn.head_dim
        return w.unflatten(0, (-1, 2, dim // 2)).transpose(1, 2).flatten(0, 2)

    model = replace(g.model, layers=tuple(turning(x) for x in g.model.layers))
    net = networks.network(model, {k: reordered(k, w) for k, w in g.tensors.items()})
    assert networks.off(net(g.ids)[0], g.want) < networks.CLOSE
    assert networks.off(networks.network(model, g.tensors)(g.ids)[0], g.want) > 0.1


@pytest.mark.parametrize("pairs", PAIRS)
def test_what_wrong_ports_do_to_angles(pairs: str) -> None:
    """Positions that start elsewhere, the other direction, and tables in 16 bits."""
    rope, x = Rope(dim=8, theta=100.0, pairs=pairs), noise(8)
    assert torch.equal(turned(replace(rope, start=3), x, 2), turned(rope, x, 5))
    back = turned(replace(rope, backwards=True), turned(rope, x, 7), 7)
    assert torch.allclose(back, x, atol=1e-6)
    assert not torch.allclose(turned(replace(rope, backwards=True), x, 7), turned(rope, x, 7), atol=1e-2)
    plain, narrow = table(rope, 300), table(replace(rope, table="bf16"), 300)
    assert torch.equal(narrow.cos, plain.cos.bfloat16().float())
    assert torch.equal(narrow.sin, plain.sin.bfloat16().float())
    rounded = table(replace(rope, table="positions-bf16"), 300)  # bf16 holds 257 as 256 and 259 as 260
    for at, held in ((1, 1), (257, 256), (259, 260)):
        assert torch.allclose(rounded.cos[at, 0], torch.tensor(float(held)).cos(), atol=1e-5)
