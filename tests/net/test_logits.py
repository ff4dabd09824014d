"""Every golden: the network gives transformers' logits, or says why it does not run. Its names are the model's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from llamactl import arch, load
from llamactl.errors import InputRefused
from llamactl.net.cache import Cache
from llamactl.net.decoder import build
from llamactl.source import presets
from llamactl.spec.model import Model

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NAMES = sorted(p.name for p in GOLDEN.iterdir() if (p / "config.json").exists())
STATE, INDEXER, OWN = "state-space and linear-attention", "indexer", "the tensor '{}' of its layers"
# What is described and counted, but not computed, and a word of the reason.
REFUSED = {
    **dict.fromkeys(("bamba", "bamba-bias", "jamba", "jamba-dense", "lfm2", "lfm2-adjusted", "lfm2_moe",
                     "lfm2_moe-untied", "mamba", "mamba-bias-untied", "mamba2", "mamba2-bias-tied", "nemotron_h",
                     "nemotron_h-moe", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
                     "qwen3_next-bias"), STATE),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), INDEXER),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), OWN.format("altup.norm.weight")),
    **dict.fromkeys(("gemma4-per-layer", "gemma4_text"), OWN.format("per_layer.gate.weight")),
    "gemma4": OWN.format("mlp.router.scale"), "mllama": OWN.format("attn_gate"),
    "opt-late-norms": "the tensor 'project_in.weight'",
}
LENGTH = {"phimoe": 16}  # past it transformers keeps the short factors, the published code takes the long ones
PRESETS = sorted(p.stem for p in (GOLDEN.parents[1] / "presets" / "models").glob("*.yaml"))


def described(name: str, networks: ModuleType) -> Model:
    model: Model = arch.describe(networks.config(name), name)
    return model


def same_names(model: Model) -> None:
    """The network's parameters and buffers are the model's tensors, by name and shape."""
    net = build(model)
    held = {n: tuple(p.shape) for n, p in (*net.named_parameters(), *net.named_buffers())}
    assert held == {t.name: t.shape for t in model.tensors() if t.role not in ("vision", "projector")}
    kinds = {t.name: t.kind for t in model.tensors()}
    assert all(kinds[n] == "param" for n, _ in net.named_parameters())
    assert {p.device.type for p in (*net.parameters(), *net.buffers())} == {"meta"}


def test_the_list_of_what_does_not_run_is_of_goldens() -> None:
    assert set(REFUSED) <= set(NAMES)
    assert len(NAMES) - len(REFUSED) >= 69


@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, networks: ModuleType) -> None:
    """All at once; in pieces, then token by token, over the cache; and the last row alone."""
    if name in REFUSED:
        with pytest.raises(InputRefused) as caught:
            build(described(name, networks))
        assert caught.value.code == "not-runnable"
        assert REFUSED[name] in caught.value.message
        assert caught.value.help
        return
    g = networks.golden(name)
    n = LENGTH.get(name, g.ids.shape[1])
    ids, want = g.ids[:, :n], g.want[:n]
    whole = g.net(ids)
    assert whole.dtype == torch.float32
    assert networks.off(whole[0], want) < networks.CLOSE
    assert networks.off(networks.pieces(g.net, ids, [7, 12, *range(13, n)])[0], want) < networks.CLOSE
    assert networks.off(g.net(ids, last=True)[0], want[-1:]) < networks.CLOSE


@pytest.mark.parametrize("name", [n for n in NAMES if n not in REFUSED])
def test_names_of_goldens(name: str, networks: ModuleType) -> None:
    same_names(described(name, networks))


def test_presets_are_found() -> None:
    assert sorted(presets.names()) == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_names_of_presets(name: str) -> None:
    """Each different layer of a preset once, at its real size; every preset runs."""
    model = load(name).model
    same_names(replace(model, layers=tuple(layer for layer, _ in model.distinct_layers())))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "cohere"])
def test_bf16_is_near(name: str, networks: ModuleType) -> None:
    """The same weights rounded to bf16: logits near those in fp32, still given in fp32, at once and cached."""
    g = networks.golden(name)
    net = networks.network(g.model, g.tensors, torch.bfloat16)
    whole = net(g.ids)
    assert whole.dtype == torch.float32
    scale = g.want.abs().max()
    for got in (whole, networks.pieces(net, g.ids, [5, *range(9, 24)], dtype=torch.bfloat16)):
        assert (got[0] - g.want).abs().mean() < 0.02 * scale


def test_a_tensor_of_another_shape_is_refused(networks: ModuleType) -> None:
    g = networks.golden("llama")
    wrong: dict[str, Any] = {**g.tensors, "layers.1.attn.o.weight": g.tensors["layers.1.attn.o.weight"][:-1]}
    with pytest.raises(InputRefused, match=r"layers\.1\.attn\.o\.weight is .*, not ") as caught:
        networks.network(g.model, wrong)
    assert caught.value.code == "tensor-shape"


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma"])
def test_new_weights_are_used_at_once(name: str, networks: ModuleType) -> None:
    """What was made from old weights is not kept: the norms' gains, the rotations."""
    g = networks.golden(name)
    net = networks.network(g.model, g.tensors)
    cache = Cache(g.model, 1, 4, dtype=torch.float32)
    net(g.ids[:, :1], cache)
    other = networks.drawn(g.model)
    net.assign(networks.Held(other))
    cache.rewind()
    assert networks.off(net(g.ids[:, :1], cache), networks.network(g.model, other)(g.ids[:, :1])) < 1e-5
