"""What arithmetic alone does: every honest port is under the limit, and small faults are not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from llamactl import arch
from llamactl.cli.options import Access
from llamactl.cli.runnable import open_model
from llamactl.net import attention, kernels, latent, streamed
from llamactl.spec.edits import apply
from llamactl.spec.model import Model
from llamactl.verify import floor as floors
from llamactl.verify.floor import bf16_floor, floor, spread
from llamactl.verify.measure import gap, measure
from llamactl.verify.probe import probe

GPT2 = Path(__file__).resolve().parents[2].parent / "shared" / "fixtures" / "gpt2-bytes-trained"
# Every kind of attention, position, norm and feed-forward that runs.
SPREAD = ("bloom", "cohere", "deepseek_v3", "exaone", "falcon-rw", "gemma", "gemma2", "gemma3", "glm4_moe", "gpt2",
          "gpt_neox", "gpt_oss", "gptj", "granite", "kimi_k2", "llama", "llama-bias-tied-llama3", "llama4_text",
          "minicpm3", "mixtral", "mpt", "nemotron", "olmo2", "opt", "phi3", "qwen2", "qwen3_moe", "stablelm")


def first(g: Any) -> Tensor:
    """(T, V) of a golden's weights, the usual way."""
    return streamed.logits(g.model, g_source(g), g.ids)[0]


def g_source(g: Any) -> Any:
    class Held:
        def tensor(self, name: str) -> Tensor:
            out: Tensor = g.tensors[name]
            return out

    return Held()


def eps(model: Model, to: float) -> Model:
    """The model with another eps in every norm of its stream."""
    layers = tuple(replace(x, attn_norm=x.attn_norm and replace(x.attn_norm, eps=to),
                           mlp_norm=x.mlp_norm and replace(x.mlp_norm, eps=to)) for x in model.layers)
    return replace(model, layers=layers, norm=model.norm and replace(model.norm, eps=to))


@pytest.mark.parametrize("name", SPREAD)
def test_honest_ports_are_under_the_limit(name: str, networks: ModuleType) -> None:
    """transformers' logits are the same as ours; so far as the floor says, with room."""
    g = networks.golden(name)
    a = first(g)
    found, second = floor(g.model, g_source(g), g.ids, a)
    assert second.shape == a.shape
    assert found.max_abs_dlogit == gap(a, second) > 0
    assert found.max_kl == measure(a, second, None, 0.0).max_kl
    assert found.limit == max(floors.TIMES * found.max_abs_dlogit, found.backstop)
    assert gap(a, g.want) < found.limit / 4
    assert found.limit < 3e-4 * spread(a)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "mpt"])
def test_a_small_fault_is_not(name: str, networks: ModuleType) -> None:
    """The eps of another default, in each network."""
    g = networks.golden(name)
    a = first(g)
    found, _ = floor(g.model, g_source(g), g.ids, a)
    assert g.model.norm is not None
    wrong = streamed.logits(eps(g.model, 1e-4 if g.model.norm.eps < 1e-4 else 1e-6), g_source(g), g.ids)[0]
    assert gap(a, wrong) > 1.5 * found.limit


@pytest.mark.parametrize("name", ["llama", "bloom", "deepseek_v3"])
def test_the_second_path_is_another_one(name: str, networks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other attention, other products and exact angles, until it is done; then, and after an error, the usual ones."""
    g = networks.golden(name)
    a = first(g)
    went: list[str] = []

    def watched(owner: Any, what: str) -> None:
        was = getattr(owner, what)
        monkeypatch.setattr(owner, what, lambda *x, **k: went.append(what) or was(*x, **k))

    watched(attention.SelfAttention, "_by_matrices")
    watched(latent.Latent, "absorbed")
    watched(latent.Latent, "expanded")
    watched(kernels, "_plain_linear")
    assert torch.equal(first(g), a)
    usual = set(went)
    assert "_plain_linear" not in usual
    went.clear()
    floor(g.model, g_source(g), g.ids, a)
    other = set(went)
    assert "_plain_linear" in other
    assert (other - {"_plain_linear"}).isdisjoint(usual)
    assert len(other) == 2
    assert torch.equal(first(g), a)
    with pytest.raises(KeyError):
        floor(g.model, networks.Held({}), g.ids, a)
    assert torch.equal(first(g), a)


def test_where_there_is_no_onednn(networks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then products are cut in halves, so that the second path is one there too."""
    monkeypatch.setattr(kernels, "onednn", lambda: False)
    x, w = torch.randn(5, 33), torch.randn(7, 33)
    with kernels.plain():
        got = kernels.linear(x, w, w[:, 0])
        narrow = kernels.linear(x[:, :1], w[:, :1], None)
    assert not torch.equal(got, kernels.linear(x, w, w[:, 0]))
    assert torch.allclose(got, kernels.linear(x, w, w[:, 0]), atol=1e-4)
    assert torch.equal(narrow, kernels.linear(x[:, :1], w[:, :1], None))
    g = networks.golden("llama")
    assert 0 < floor(g.model, g_source(g), g.ids, first(g))[0].max_abs_dlogit < 1e-4


def test_far_tokens_have_a_higher_floor(networks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 keeps less of an angle the further a token stands; a text beyond WHOLE is taken to its end."""
    monkeypatch.setattr(floors, "TOKENS", 32)
    monkeypatch.setattr(floors, "WHOLE", 1000)
    g = networks.golden("llama")
    model = arch.describe(networks.config("llama", max_position_embeddings=1 << 14), "far")
    ids = torch.arange(2048)[None] % 97
    long = streamed.logits(model, g_source(g), ids)[0]
    far, second = floor(model, g_source(g), ids, long)
    assert second.shape == long.shape
    near, cut = floor(model, g_source(g), ids[:, :1000], long[:1000])
    assert cut.shape == (32, 97)
    assert far.max_abs_dlogit > 4 * near.max_abs_dlogit
    assert near.max_abs_dlogit == pytest.approx(gap(long[:32], cut))


def test_a_rotation_that_depends_on_the_length(networks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of the text that is taken turns as the whole text does."""
    monkeypatch.setattr(floors, "TOKENS", 8)
    scaled = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = arch.describe(networks.config("llama", rope_parameters=scaled, max_position_embeddings=16), "dynamic")
    g = networks.golden("llama")
    a = streamed.logits(model, g_source(g), g.ids)[0]
    assert g.ids.shape[1] > 16
    assert floor(model, g_source(g), g.ids, a)[0].max_abs_dlogit < 1e-4


def test_the_backstop_follows_the_logits(networks: ModuleType) -> None:
    """Small logits have a small one; a text of one token has one at all."""
    g = networks.golden("gpt2")
    a = first(g)
    small = replace(g.model, head=replace(g.model.head, scale=1e-3))
    low = streamed.logits(small, g_source(g), g.ids)[0]
    want, got = floor(g.model, g_source(g), g.ids, a)[0], floor(small, g_source(g), g.ids, low)[0]
    assert got.backstop == pytest.approx(want.backstop / 1000, rel=1e-5)
    assert want.backstop == pytest.approx(floors.BACKSTOP * float(
        (a.double() - a.double().mean(-1, keepdim=True)).square().mean().sqrt()))
    one = floor(g.model, g_source(g), g.ids[:, :1], a[:1])[0]
    assert one.limit >= one.backstop > 0


def test_logits_that_are_not_finite(networks: ModuleType) -> None:
    """Rows with NaN have no floor; without any other row it is 0, and nothing is under it."""
    g = networks.golden("gpt2")
    spoilt = {**g.tensors, "head.bias": None, "norm.weight": g.tensors["norm.weight"] * math.nan}
    a = streamed.logits(g.model, networks.Held(spoilt), g.ids)[0]
    assert bool(a.isnan().all())
    found, _ = floor(g.model, networks.Held(spoilt), g.ids, a)
    assert (found.max_abs_dlogit, found.max_kl, found.backstop, found.limit) == (0, 0, 0, 0)
    some = first(g)
    want = floor(g.model, g_source(g), g.ids, some)[0]
    some[3, 5] = math.inf
    found, _ = floor(g.model, g_source(g), g.ids, some)
    assert 0 < found.max_abs_dlogit <= want.max_abs_dlogit
    assert math.isfinite(found.backstop)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_what_bf16_does(name: str, networks: ModuleType) -> None:
    g = networks.golden(name)
    a = first(g)
    got = bf16_floor(g.model, g_source(g), g.ids, a, 1e-3)
    assert got == measure(a, networks.network(g.model, g.tensors, torch.bfloat16)(g.ids)[0], g.ids[0], 1e-3)
    assert got.max_abs_dlogit is not None
    assert got.max_kl is not None
    assert got.max_abs_dlogit > 100 * floor(g.model, g_source(g), g.ids, a)[0].max_abs_dlogit
    assert 1e-6 < got.max_kl < 1


@pytest.mark.slow
@pytest.mark.skipif(not (GPT2 / "model.safetensors").exists(), reason="the trained GPT-2 is not here")
@pytest.mark.parametrize("way", ["eager", "sdpa"])
def test_trained_weights(way: str) -> None:
    """transformers on trained weights is under the limit by far; the other GELU in a single layer is over it."""
    from transformers import AutoModelForCausalLM

    opened = open_model(str(GPT2), Access(offline=True, hub=False))
    ids = torch.tensor([probe(opened.model, None).ids])
    a = streamed.logits(opened.model, opened.weights, ids)[0]
    found, _ = floor(opened.model, opened.weights, ids, a)
    other = AutoModelForCausalLM.from_pretrained(str(GPT2), dtype=torch.float32, attn_implementation=way).eval()
    with torch.no_grad():
        want = other(ids, use_cache=False).logits[0]
    assert gap(a, want) < found.limit / 10
    layers, other_gelu = opened.model.layers, apply(opened.model, "activation=gelu").layers
    for i in range(len(layers)):
        one = replace(opened.model, layers=(*layers[:i], other_gelu[i], *layers[i + 1 :]))
        assert gap(a, streamed.logits(one, opened.weights, ids)[0]) > 2 * found.limit
