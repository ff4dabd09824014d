"""Two and three processes (gloo) against one: the same logits, the same texts, and no weights but their slices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import llamactl
from llamactl.cli.options import Access
from llamactl.cli.runnable import Opened, open_model
from llamactl.errors import NotAvailable
from llamactl.net.cache import Cache
from llamactl.net.decoder import Decoder, build
from llamactl.net.generate import Generated, cache_length, generate
from llamactl.net.group import own_device
from llamactl.net.parallel import SlicedWeights
from llamactl.net.sample import Sampler, Sampling
from llamactl.net.shards import Cut, Slice, shard

# name -> (golden, changes). 9 heads in 3 groups are SmolLM2's, a vocabulary of 2,003 has more candidates than are told
# at once, one KV head is fewer than any number of ranks.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("llama", {}),
    "uneven": ("llama", {"hidden_size": 54, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 2003}),
    "mqa": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 29}),
    "tied-bias": ("gpt2", {}),
    "latent-moe": ("deepseek_v3", {}),
    "latent-plain-q": ("deepseek_v2", {"q_lora_rank": None}),
    "spread-norms": ("olmo2", {}),
    "spread-norms-shared-kv": ("olmo2", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "norm-a-head": ("cohere-qk-norm", {}),
    "softcap-window": ("gemma2", {}),
    "parallel": ("gpt_neox", {}),
    "sinks": ("gpt_oss", {}),
    "alibi": ("bloom", {}),
    "shared-gate": ("qwen2_moe", {}),
    "chunks": ("llama4_text", {}),
}
WORLDS = (2, 3)
ON = {2: ["gqa", "uneven", "tied-bias", "latent-moe", "spread-norms", "norm-a-head", "sinks", "alibi"], 3: list(MODELS)}
DRAWS = 6
IDS = [3, 61, 7, 11, 30, 2, 45, 9, 10, 11, 12]
MAX_NEW = 10
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0.0, "repetition_penalty": 1.3}, {"temperature": 1.0, "seed": 5}]
# Of the sampler alone, on rows that need no network.
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.5}, {"temperature": 1.0}, {"temperature": 0.2},
    {"top_k": 1}, {"top_k": 7}, {"top_k": 5000}, {"top_k": 10_006}, {"top_k": 10_007}, {"top_p": 0.3}, {"top_p": 0.9},
    {"top_p": 0.9, "temperature": 3.0}, {"top_p": 0.075, "temperature": 9.0},
    {"top_p": 0.99999, "temperature": 9.0}, {"min_p": 0.01}, {"min_p": 0.9},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.1},
    {"temperature": 1.5, "top_p": 0.7, "min_p": 0.1, "repetition_penalty": 0.8},
]


def opened(folder: Path) -> Opened:
    return open_model(str(folder), Access(offline=True, hub=False))


class Several:
    """What one process says of each model, and what every rank of each world says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks: dict[int, list[dict[str, Any]]] = {}
        self.networks: dict[str, Decoder] = {}

    def one(self, name: str) -> Decoder:
        if name not in self.networks:
            found = opened(self.folder / name)
            self.networks[name] = build(found.model)
            self.networks[name].assign(found.weights)
        return self.networks[name]

    def text(self, name: str, words: Mapping[str, Any]) -> Generated:
        network = self.one(name)
        cache = Cache(network.model, 1, cache_length(network.model, len(IDS), MAX_NEW), dtype=torch.float32)
        return generate(network, IDS, max_new=MAX_NEW, sampling=Sampling(**words), cache=cache, logprobs=True)


@pytest.fixture(scope="module")
def several(written: Any, tmp_path_factory: pytest.TempPathFactory) -> Several:
    folder = tmp_path_factory.mktemp("several")
    for name, (golden, changes) in MODELS.items():
        written.saved(folder / name, written.config_of(golden) | changes)
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 10_007, generator=g) * 3
    rows = torch.cat((rows, rows[:1].sort(descending=True).values))  # all that is likely is on rank 0
    torch.save({"rows": rows, "ids": torch.randint(0, 10_007, (4, 99), generator=g)}, folder / "rows.pt")
    (folder / "asked.json").write_text(json.dumps({
        "ids": IDS, "max_new": MAX_NEW, "samplings": SAMPLINGS, "settings": SETTINGS, "draws": DRAWS,
        "models": {str(world): names for world, names in ON.items()}}))
    out = Several(folder)
    for world in WORLDS:
        line = [sys.executable, str(Path(__file__).with_name("rank.py"))]
        env = {**os.environ, "PYTHONPATH": str(Path(llamactl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([*line, str(rank), str(world), str(folder)], stderr=subprocess.PIPE, env=env)
                 for rank in range(world)]
        try:
            said = [p.communicate(timeout=300)[1].decode() for p in ranks]
        finally:
            for p in ranks:
                p.kill()
        assert [p.returncode for p in ranks] == [0] * world, "".join(said)
        assert said == [""] * world
        out.ranks[world] = [torch.load(folder / f"{world}-{rank}.pt") for rank in range(world)]
    return out


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in WORLDS for name in ON[world]])
def test_logits_and_texts_are_those_of_one_process(several: Several, name: str, world: int) -> None:
    found = [r[name] for r in several.ranks[world]]
    with torch.inference_mode():
        want = several.one(name)(torch.tensor([IDS]))
    parts: list[Tensor] = [f["logits"] for f in found]
    assert max(p.shape[-1] for p in parts) - min(p.shape[-1] for p in parts) <= 1  # nobody holds all of them
    torch.testing.assert_close(torch.cat(parts, -1), want, rtol=0, atol=1e-5)
    alone = [several.text(name, words) for words in SAMPLINGS]
    assert len({token for one in alone for token in one.tokens}) > 3  # not one token over and over
    for n, one in enumerate(alone):
        assert one.logprobs is not None
        for f in found:  # every rank knows them
            assert f["tokens"][n] == one.tokens
            assert f["logprobs"][n] == pytest.approx(one.logprobs, abs=1e-4)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("words", SETTINGS, ids=str)
def test_a_draw_is_that_of_one_process(several: Several, words: dict[str, Any], world: int) -> None:
    data = torch.load(several.folder / "rows.pt")
    sampler = Sampler(Sampling(**words), torch.device("cpu"))
    sampler.meet(data["ids"], 10_007)
    at = SETTINGS.index(words)
    for step in range(DRAWS):
        token, top = sampler.choose(data["rows"])
        for rank in several.ranks[world]:
            there = rank["sampler"][at][step]
            assert torch.equal(there[0], token)
            assert torch.equal(there[1], top)
            torch.testing.assert_close(there[2], sampler.logprob(data["rows"], token), rtol=0, atol=1e-5)
        sampler.meet(token[:, None], 10_007)


def test_what_rank_0_says_is_known_to_all(several: Several) -> None:
    for ranks in several.ranks.values():
        assert all(r["share"] == {"text": "é", "numbers": [1, 2.5, None]} for r in ranks)
        assert all(r["agree"] == [True, False] for r in ranks)


# ---- slices


@pytest.mark.parametrize("world", WORLDS)
def test_each_rank_holds_its_slices_and_the_whole_norms(several: Several, world: int) -> None:
    """gqa: hidden 48, ffn 56, 6 heads and 2 KV heads of 12, 3 layers, vocabulary 97."""
    held = [r["gqa"]["nbytes"] for r in several.ranks[world]]
    total = sum(p.nbytes for p in several.one("gqa").parameters())
    norms = 4 * 48 * (2 * 3 + 1)
    shared_kv = 0 if world == 2 else 3 * 2 * 12 * 48 * 4  # one of the two KV heads stands on two ranks
    assert sum(held) == total + (world - 1) * norms + shared_kv
    assert max(held) < total / world * 1.25


class Given:
    """Weights that were asked for, by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


def test_rows_are_views_of_the_file_and_columns_stand_together() -> None:
    file = torch.arange(200.0)
    w = file[100:148].view(6, 8)
    cuts = {"rows": Slice("w", Cut("rows", 2, 5)), "columns": Slice("w", Cut("columns", 2, 5)),
            "turned": Slice("t", Cut("columns", 1, 3)), "none": Slice("w", Cut("zeros")), "whole": Slice("w")}
    weights = SlicedWeights(Given({"w": w, "t": w.T}), cuts)
    assert torch.equal(weights.tensor("rows"), w[2:5])
    assert torch.equal(weights.tensor("columns"), w[:, 2:5])
    assert torch.equal(weights.tensor("turned"), w.T[:, 1:3])
    assert weights.tensor("rows").data_ptr() == w[2:5].data_ptr()
    assert weights.tensor("whole").data_ptr() == w.data_ptr()
    assert weights.tensor("turned").data_ptr() == w[1:3].data_ptr()
    assert weights.tensor("columns").is_contiguous()
    assert not weights.tensor("none").any()
    assert weights.tensor("none").shape == w.shape


def test_a_slice_of_what_was_computed_does_not_keep_the_whole() -> None:
    weights = SlicedWeights(Given({"w": torch.ones(6, 8)}), {"w": Slice("w", Cut("rows", 2, 4))})
    assert weights.tensor("w").untyped_storage().nbytes() == 2 * 8 * 4


def test_slices_of_a_checkpoint_are_views_of_its_map(several: Several) -> None:
    found = opened(several.folder / "gqa")
    mine = SlicedWeights(found.weights, shard(found.model, 1, 2).slices)
    for name in ("layers.1.attn.q.weight", "layers.1.mlp.up.weight", "embed.weight", "layers.1.attn_norm.weight"):
        file = found.weights.tensor(name).untyped_storage()
        assert mine.tensor(name).untyped_storage().data_ptr() == file.data_ptr()


# ---- devices


def test_each_process_needs_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert own_device("auto", 1, 2) == torch.device("cuda", 1)
    assert chosen == [1]
    assert own_device("cpu", 1, 2) == torch.device("cpu")
    for word, said in (("cuda", "3 processes need a cuda device each, and there are 2"), ("mps", "mps is one device")):
        with pytest.raises(NotAvailable, match=said) as e:
            own_device(word, 0, 3)
        assert e.value.help
