"""A text gives the same logits however it is cut, padded or batched."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llamactl import arch
from llamactl.errors import InputRefused
from llamactl.net.cache import Cache
from llamactl.net.decoder import Decoder

# plain, learned table, ALiBi, soft caps and windows, chunked windows and a growing q, sinks, window, sinusoids
NAMES = ["llama", "gpt2", "bloom", "falcon-rw", "gemma2", "llama4_text", "gpt_oss", "mistral", "opt", "ministral3",
         "hunyuan_v1_dense", "glm", "deepseek_v2"]
MIXTURES = {"llama4_text", "gpt_oss", "deepseek_v2"}  # an expert multiplies as many rows as chose it, in another order
POST_NORM = {"model_type": "transformer", "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2,
             "num_attention_heads": 6, "vocab_size": 97}


def net_of(name: str, networks: ModuleType, **changes: Any) -> Decoder:
    """A golden's network, or one of its config with some words changed and drawn weights."""
    if not changes and name != "transformer":
        net: Decoder = networks.golden(name).net
        return net
    said = POST_NORM if name == "transformer" else networks.config(name, **changes)
    model = arch.describe(said, name)
    made: Decoder = networks.network(model, networks.drawn(model))
    return made


def text(batch: int, length: int, seed: int = 3) -> Tensor:
    return torch.randint(1, 90, (batch, length), generator=torch.Generator().manual_seed(seed))


# --- cuts


@pytest.mark.parametrize("name", [*NAMES, "transformer"])
@settings(deadline=None, max_examples=12, derandomize=True)
@given(cuts=st.lists(st.integers(1, 29), max_size=29), rows=st.integers(1, 2))
def test_any_cut_gives_the_same(name: str, networks: ModuleType, cuts: list[int], rows: int) -> None:
    net, ids = net_of(name, networks), text(rows, 30)
    assert networks.off(networks.pieces(net, ids, cuts), net(ids)) < 1e-4


@pytest.mark.parametrize("name", [*NAMES, "transformer"])
def test_token_by_token(name: str, networks: ModuleType) -> None:
    net, ids = net_of(name, networks), text(1, 24)
    assert networks.off(networks.pieces(net, ids, range(1, 24)), net(ids)) < 1e-4


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "bloom", "llama4_text"])
@pytest.mark.parametrize("cuts", [[1], [64], [100], [128, 192], [63, 64, 191]])
def test_long_prompts(name: str, cuts: list[int], networks: ModuleType) -> None:
    """Past the length where a prompt goes another way through attention; against one token at a time at the end."""
    net, ids = net_of(name, networks, max_position_embeddings=512), text(1, 200)
    whole = net(ids)
    assert networks.off(networks.pieces(net, ids, cuts), whole) < 1e-4
    assert networks.off(networks.pieces(net, ids, [190, *range(191, 200)])[:, 190:], whole[:, 190:]) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_later_changes_nothing(name: str, networks: ModuleType) -> None:
    net, ids = net_of(name, networks), text(1, 24)
    other = torch.cat((ids[:, :15], text(1, 9, seed=8)), 1)
    a, b = net(ids), net(other)
    assert networks.off(a[:, :15], b[:, :15]) < 1e-5
    assert networks.off(a[:, 15:], b[:, 15:]) > 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_order_matters(name: str, networks: ModuleType) -> None:
    """Positions are seen: the last row changes when two earlier tokens, both in every window, change places."""
    net, ids = net_of(name, networks), text(1, 12)
    swapped = ids[:, [*range(8), 10, 9, 8, 11]]
    assert networks.off(net(ids, last=True), net(swapped, last=True)) > 1e-3


def test_rewinding_forgets(networks: ModuleType) -> None:
    net, ids = net_of("llama", networks), text(1, 20)
    cache = Cache(net.model, 1, 20, dtype=torch.float32)
    net(text(1, 20, seed=9), cache)
    cache.rewind(0)
    net(ids[:, :12], cache)
    net(text(1, 3, seed=9), cache)
    cache.rewind(12)
    assert cache.filled == 12
    assert networks.off(net(ids[:, 12:], cache), net(ids)[:, 12:]) < 1e-4
    cache.rewind(99)
    assert cache.filled == 20


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3", "gpt2"])
def test_the_last_row(name: str, networks: ModuleType) -> None:
    net, ids = net_of(name, networks), text(2, 11)
    last = net(ids, last=True)
    assert last.shape == (2, 1, net.model.embed.vocab)
    assert networks.off(last, net(ids)[:, -1:]) < 1e-5


# --- windows


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("cached", [False, True])
def test_a_window_sees_so_many_tokens(layer: int, cached: bool, networks: ModuleType) -> None:
    """One layer with a window of 8: the last row depends on the last 8 tokens and on no other."""
    model = networks.golden("mistral").model
    one = replace(model, layers=(model.layers[layer],))
    assert one.layers[0].attn is not None
    assert one.layers[0].attn.window == 8  # type: ignore[union-attr]
    net, ids = networks.network(one, networks.drawn(one)), text(1, 24)
    cuts = range(9, 24) if cached else []
    want = networks.pieces(net, ids, cuts)[0, -1]
    for at in range(24):
        other = ids.clone()
        other[0, at] = (other[0, at] + 1) % 90
        moved = networks.off(networks.pieces(net, other, cuts)[0, -1], want)
        assert (moved > 1e-4) == (at >= 16), at


@pytest.mark.parametrize("cached", [False, True])
def test_a_chunk_sees_its_own_tokens(cached: bool, networks: ModuleType) -> None:
    model = networks.golden("llama4_text").model
    part = next(x for x in model.layers if x.attn is not None and x.attn.window is not None)
    size = part.attn.window
    one = replace(model, layers=(part,))
    net, ids = networks.network(one, networks.drawn(one)), text(1, 21)
    cuts = range(3, 21) if cached else []
    want = networks.pieces(net, ids, cuts)[0]
    for at in range(21):
        other = ids.clone()
        other[0, at] = (other[0, at] + 1) % 90
        got = networks.pieces(net, other, cuts)[0]
        moved = {i for i in range(21) if networks.off(got[i], want[i]) > 1e-5}
        assert moved == {i for i in range(at, 21) if i // size == at // size}, at


# --- rows


@pytest.mark.parametrize("name", [*NAMES, "transformer"])
def test_rows_do_not_know_each_other(name: str, networks: ModuleType) -> None:
    net, ids = net_of(name, networks), text(3, 18)
    other = torch.cat((text(1, 18, seed=5), ids[1:2], text(1, 18, seed=6)))
    for cuts in ([], [10, *range(11, 18)]):
        a, b = (networks.pieces(net, x, cuts)[1] for x in (ids, other))
        assert networks.off(a, b) < (1e-5 if name in MIXTURES else 1e-6)
        assert networks.off(a, networks.pieces(net, ids[1:2], cuts)[0]) < 1e-4


@pytest.mark.parametrize("name", [*NAMES, "transformer"])
@pytest.mark.parametrize("cuts", [[], [9, 14], [*range(14, 26)], [16, 17]])
def test_left_padding(name: str, cuts: list[int], networks: ModuleType) -> None:
    """Rows of 26, 19, 15 and 13 tokens, padded left to one length, each give the logits of the row alone."""
    net, ids = net_of(name, networks), text(4, 26)
    pad = [0, 7, 11, 13]
    for row, n in enumerate(pad):
        ids[row, :n] = 0
    got = networks.pieces(net, ids, cuts, pad=torch.tensor(pad))
    for row, n in enumerate(pad):
        assert networks.off(got[row, n:], net(ids[row : row + 1, n:])[0]) < 1e-4, f"row {row}"


def test_what_stands_in_the_padding_changes_nothing(networks: ModuleType) -> None:
    for name in NAMES:
        net, ids = net_of(name, networks), text(2, 20)
        other = ids.clone()
        other[1, :6] = 77
        a, b = (networks.pieces(net, x, [12, 13], pad=torch.tensor([0, 6])) for x in (ids, other))
        assert networks.off(a[1, 6:], b[1, 6:]) < (1e-5 if name in MIXTURES else 1e-6), name
        assert torch.isfinite(a).all(), name


def test_no_padding_is_none(networks: ModuleType) -> None:
    net, ids = net_of("llama", networks), text(2, 9)
    assert torch.equal(net(ids, pad=torch.tensor([0, 0])), net(ids))


# --- too long


@pytest.mark.parametrize(("name", "changes", "rows"), [
    ("gpt2", {"n_positions": 16}, 16), ("opt", {"max_position_embeddings": 16}, 16),
    ("gpt_bigcode", {"n_positions": 16}, 16),
])
def test_a_table_of_positions_ends(name: str, changes: dict[str, int], rows: int, networks: ModuleType) -> None:
    net = net_of(name, networks, **changes)
    assert net(text(1, rows)).shape[1] == rows
    seen: list[object] = []
    net.embed.register_forward_hook(lambda *_: seen.append(1))
    cache = Cache(net.model, 1, 99, dtype=torch.float32)
    for given_ in (text(1, rows + 1), text(1, 40)):
        with pytest.raises(InputRefused, match=f"{given_.shape[1]} tokens, but the position table ends at {rows}"
                           ) as caught:
            net(given_, cache)
        assert caught.value.code == "too-long"
        assert caught.value.help
    assert (seen, cache.filled) == ([], 0)
    net(text(1, rows), cache)
    with pytest.raises(InputRefused, match="position table"):
        net(text(1, 1), cache)
    assert cache.filled == rows


def test_a_cache_has_an_end(networks: ModuleType) -> None:
    net = net_of("llama", networks)
    cache = Cache(net.model, 1, 10, dtype=torch.float32)
    net(text(1, 8), cache)
    with pytest.raises(InputRefused, match="11 tokens, but the cache has room for 10") as caught:
        net(text(1, 3), cache)
    assert caught.value.code == "too-long"
    assert cache.filled == 8
    assert torch.isfinite(net(text(1, 2), cache)).all()


# --- rotations that depend on the length

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}


@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
@settings(deadline=None, max_examples=8, derandomize=True)
@given(cuts=st.lists(st.integers(1, 29), max_size=9))
def test_one_length_for_the_whole_text(rope: dict[str, Any], networks: ModuleType, cuts: list[int]) -> None:
    """Cut anywhere, a text has the rotations of its whole length, and those of a longer cache where one is made."""
    limit = 16 if rope is DYNAMIC else 64
    net = net_of("llama", networks, max_position_embeddings=limit, head_dim=8, rope_parameters=rope)
    ids = text(1, 30)
    assert networks.off(networks.pieces(net, ids, cuts), net(ids)) < 1e-4
    assert networks.off(networks.pieces(net, ids, cuts, length=40), net(ids, length=40)) < 1e-4
    assert networks.off(net(ids[:, :10], length=30), net(ids)[:, :10]) < 1e-4
    assert networks.off(net(ids[:, :10]), net(ids)[:, :10]) > 1e-3


@pytest.mark.parametrize("length", [16, 17, 30])
@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_those_rotations_are_transformers(rope: dict[str, Any], length: int, networks: ModuleType) -> None:
    limit = 16 if rope is DYNAMIC else 64
    said = networks.config("llama", max_position_embeddings=limit, head_dim=8, rope_parameters=rope)
    hf = networks.theirs(said)
    model = arch.describe(said, "x")
    net = networks.network(model, networks.canonical(model, networks.stored(hf)))
    ids = text(1, length)
    assert networks.off(net(ids), networks.logits(hf, ids)) < networks.CLOSE


def test_a_scheme_without_lengths_has_one_table(networks: ModuleType) -> None:
    net = net_of("llama", networks)
    for n in (4, 9, 30):
        net(text(1, n))
    assert len(net._tables) == 1
