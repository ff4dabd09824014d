"""What each rank gets: every tensor once, whole groups of heads, and nobody without work."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamactl import arch
from llamactl.errors import UsageError
from llamactl.net.shards import Shard, heads, largest, shard, span
from llamactl.spec.model import Model

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NAMES = ["llama", "gpt2", "deepseek_v3", "deepseek_v2", "mixtral", "olmo2", "olmoe", "cohere-qk-norm", "gemma2",
         "gpt_neox", "gpt_oss", "falcon", "bloom", "qwen2_moe", "llama4_text", "minicpm3", "phi", "opt", "gemma3",
         "llava"]


@cache
def model(name: str) -> Model:
    return arch.describe(json.loads((GOLDEN / name / "config.json").read_text()), "config.json")


@cache
def shards(name: str, world: int) -> list[Shard]:
    return [shard(model(name), rank, world) for rank in range(world)]


@given(st.integers(1, 40), st.integers(1, 12), st.data())
@settings(deadline=None, max_examples=300)
def test_heads_go_in_whole_groups_and_every_rank_has_one(kv: int, group: int, data: st.DataObject) -> None:
    world = data.draw(st.integers(1, kv * group))
    found = [heads(kv * group, kv, rank, world) for rank in range(world)]
    assert [x for h in found for x in range(h.first, h.stop)] == list(range(kv * group))
    assert all(h.first < h.stop for h in found)
    for h in found:
        assert {x // group for x in range(h.first, h.stop)} == set(range(h.kv_first, h.kv_stop))
        assert (h.stop - h.first) % (h.kv_stop - h.kv_first) == 0  # the share is grouped attention too
    assert sorted(x for h in found if h.owns for x in range(h.kv_first, h.kv_stop)) == list(range(kv))
    if world <= kv:
        sizes = [h.kv_stop - h.kv_first for h in found]
        assert max(sizes) - min(sizes) <= 1
        assert all(h.stop - h.first == group * n for h, n in zip(found, sizes, strict=True))


@given(st.integers(1, 1000), st.integers(1, 50))
def test_spans_join_and_differ_by_one(n: int, world: int) -> None:
    found = [span(n, rank, world) for rank in range(world)]
    assert found[0][0] == 0
    assert found[-1][1] == n
    assert all(a[1] == b[0] for a, b in zip(found, found[1:], strict=False))
    assert max(b - a for a, b in found) - min(b - a for a, b in found) <= 1


@given(st.sampled_from(NAMES), st.data())
@settings(deadline=None, max_examples=120)
def test_every_tensor_is_there_once(name: str, data: st.DataObject) -> None:
    """Each element of each tensor on one rank, or, for what is whole on some, equally often; biases of sums once."""
    whole = model(name)
    world = data.draw(st.integers(1, min(6, largest(whole)[0])))
    shapes = {t.name: t.shape for t in whole.tensors() if t.role not in ("vision", "projector")}
    held = {n: torch.zeros(shape or (1,), dtype=torch.int64) for n, shape in shapes.items()}
    for part in shards(name, world):
        own = {t.name: t.shape for t in part.model.tensors()}
        assert set(own) == set(part.slices)
        for n, (source, cut) in part.slices.items():
            at = held[source]
            if cut is not None and cut.kind == "zeros":
                assert own[n] == shapes[source]
                continue
            at = at if cut is None else at[cut.start : cut.stop] if cut.kind == "rows" else at[:, cut.start : cut.stop]
            assert tuple(at.shape) == own[n], n
            at += 1
    for n, count in held.items():
        if n.endswith((".o.bias", ".down.bias")):
            assert bool((count == 1).all()), n
        elif ".attn.k" in n or ".attn.v." in n:  # KV heads stand on as many ranks as share them
            assert bool((count >= 1).all()), n
        else:
            assert len(count.unique()) == 1, n
            assert int(count.flatten()[0]) in (1, world), n
        if n.endswith((".q.weight", ".q_b.weight", ".o.weight", ".up.weight", ".gate.weight", ".down.weight")):
            assert bool((count == 1).all()), n


@pytest.mark.parametrize(("name", "world", "what"), [
    ("llama", 7, "there are 6 attention heads"), ("llama", 0, "0 processes"), ("deepseek_v3", 99, "to share among"),
])
def test_more_ranks_than_work_are_refused(name: str, world: int, what: str) -> None:
    with pytest.raises(UsageError, match=what) as e:
        shard(model(name), 0, world)
    assert e.value.code == "tp-range"
    most = largest(model(name))[0]
    assert e.value.help == f"at most --tp {most}"
    assert [s.rank for s in shards(name, most)] == list(range(most))


def test_smollm2s_heads_by_hand() -> None:
    """9 heads, 3 KV heads: on 2 ranks 3 and 6, on 3 ranks 3 each, on 4 one group on two ranks, on 9 one each."""
    def sizes(world: int) -> list[tuple[int, int]]:
        found = [heads(9, 3, rank, world) for rank in range(world)]
        return [(h.stop - h.first, h.kv_stop - h.kv_first) for h in found]

    assert sizes(2) == [(3, 1), (6, 2)]
    assert sizes(3) == [(3, 1)] * 3
    assert sizes(4) == [(3, 1), (3, 1), (1, 1), (2, 1)]
    assert sizes(9) == [(1, 1)] * 9
