"""flops against torch's own counter on tiny models with eager attention, and against sums written out by hand."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from llamactl import load
from llamactl.analysis.flops import flops, pairs
from llamactl.errors import UsageError


@pytest.mark.parametrize(("window", "chunked"), [(None, False), (1, False), (8, False), (8, True), (64, True)])
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 40])
def test_pairs_are_the_mask_counted(tokens: int, window: int | None, chunked: bool) -> None:
    def sees(i: int, j: int) -> bool:
        if window is None:
            return j <= i
        return j <= i and (i // window == j // window if chunked else i - j < window)

    rows = [sum(sees(i, j) for j in range(tokens)) for i in range(tokens)]
    assert pairs(tokens, window, chunked, "prefill") == sum(rows)
    assert pairs(tokens, window, chunked, "decode") == rows[-1]


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama", "gemma2", "qwen3", "falcon-new", "phi", "mistral"])
def test_equal_to_torch_on_dense_blocks(make_golden: ModuleType, name: str) -> None:
    """FlopCounterMode sees every product of an eager forward, the whole square of attention among them."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    from llamactl import arch

    folder = make_golden.GOLDEN / name
    net = make_golden.build(folder)
    model = arch.describe(json.loads((folder / "config.json").read_text(encoding="utf-8")), name)
    ids = torch.arange(1, 25)[None]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(ids, use_cache=False)
    assert counter.get_total_flops() == flops(model, 24).total_full_attention


def test_the_published_figure_of_smollm2() -> None:
    report = flops(load("smollm2-135m").model, 128)
    assert report.total_full_attention == 35_559_309_312
    square, causal = 128 * 128, 128 * 129 // 2
    assert report.total_full_attention - report.total == 30 * 4 * 9 * 64 * (square - causal)


def test_llama_3_8b_by_hand() -> None:
    d, f, v, n, q, kv, s = 4096, 14336, 128256, 32, 4096, 1024, 1000
    linear = 2 * s * (n * (2 * d * q + 2 * d * kv + 3 * d * f) + d * v)
    report = flops(load("llama-3-8b").model, s)
    assert report.total == linear + n * 4 * q * s * (s + 1) // 2
    one = flops(load("llama-3-8b").model, s, phase="decode")
    assert one.total == linear // s + n * 4 * q * s
    assert one.weights_bytes_read == 2 * (8_030_261_248 - v * d)
    assert one.cache_bytes_read == 131_072 * s
    assert one.intensity == one.total / (one.weights_bytes_read + one.cache_bytes_read)
    assert flops(load("llama-3-8b").model, s, batch=3).total == 3 * report.total


def test_experts_count_as_often_as_they_are_chosen() -> None:
    report = flops(load("mixtral-8x7b").model, 10)
    assert report.parts["routed experts"] == 2 * 10 * 32 * 2 * 3 * 4096 * 14336
    assert report.parts["router"] == 2 * 10 * 32 * 8 * 4096
    assert report.total / 10 > 2 * 12_748_853_248 - 2 * 32 * 65 * 4096 * 2  # twice the active count, roughly


def test_latent_attention_both_ways() -> None:
    report = flops(load("deepseek-v3").model, 4096, phase="decode")
    assert report.mla is not None
    assert report.mla_counted == "absorbed"
    assert report.total == report.mla["absorbed"]
    heads, layers = 128, 61
    assert report.parts["attention scores"] == layers * 2 * heads * (512 + 64) * 4096
    assert report.parts["k"] == layers * 2 * heads * 128 * 512
    rebuilt = layers * 2 * 4096 * heads * 256 * 512 - layers * 2 * heads * 256 * 512
    attention = layers * 2 * heads * 4096 * ((192 + 128) - (576 + 512))
    assert report.mla["expanded"] - report.mla["absorbed"] == rebuilt + attention


def test_embedding_lookups_are_no_products() -> None:
    gpt2 = load("gpt2").model
    assert flops(gpt2, 1).parts["output head"] == 2 * 50257 * 768
    assert not any("embedding" in part for part in flops(gpt2, 1).parts)


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(UsageError):
        flops(load("gpt2").model, 1, phase="training")
