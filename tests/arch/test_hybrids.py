"""State-space models and hybrids: published totals of real shapes, and what their families refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llamactl import arch
from llamactl.errors import InputRefused

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "configs"


def mamba(hidden: int, layers: int) -> dict[str, Any]:
    return {"model_type": "mamba", "hidden_size": hidden, "d_model": hidden, "num_hidden_layers": layers,
            "n_layer": layers, "intermediate_size": 2 * hidden, "d_inner": 2 * hidden, "expand": 2, "state_size": 16,
            "conv_kernel": 4, "time_step_rank": hidden // 16, "vocab_size": 50280, "rms_norm": True}


CODESTRAL = {
    "model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 64, "expand": 2, "num_heads": 128, "head_dim": 64,
    "n_groups": 8, "state_size": 128, "conv_kernel": 4, "vocab_size": 32768, "tie_word_embeddings": False,
}
JAMBA = {
    "model_type": "jamba", "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_period": 8,
    "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 16,
    "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256,
    "tie_word_embeddings": False,
}
LFM2 = {
    "model_type": "lfm2", "hidden_size": 2048, "block_ff_dim": 12288, "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "vocab_size": 65536,
}
LFM2_MOE = {
    "model_type": "lfm2_moe", "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
    "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3, "vocab_size": 65536,
    "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
}


@pytest.mark.parametrize(("config", "total", "state"), [
    (mamba(768, 24), 129_135_360, 24 * 1536 * (4 + 16)), (mamba(1024, 48), 371_516_416, 48 * 2048 * 20),
    (mamba(2560, 64), 2_768_345_600, 64 * 5120 * 20),
    (CODESTRAL, 7_285_403_648, 64 * ((8192 + 2 * 8 * 128) * 4 + 8192 * 128)),
    (JAMBA, 51_570_323_328, 28 * 8192 * (4 + 16)), (LFM2, 1_170_340_608, 10 * 2048 * 3),
    (LFM2_MOE, 8_339_929_856, 18 * 2048 * 3),
])
def test_published_totals(config: dict[str, Any], total: int, state: int) -> None:
    """state: the convolution's last inputs and the recurrent state, per sequence."""
    model = arch.describe(config, "published")
    assert model.total() == total
    assert sum(layer.state_elements() for layer in model.layers) == state


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the real configs are not here")
@pytest.mark.parametrize(("name", "stored"), [
    ("Qwen__Qwen3-Next-80B-A3B-Instruct", 81_324_862_720), ("Qwen__Qwen3.5-27B", 27_781_427_952),
    ("Qwen__Qwen3.5-35B-A3B", 35_951_822_704), ("Qwen__Qwen3.5-397B-A17B", 403_397_928_944),
])
def test_the_draft_layer_is_what_the_files_hold_beside_the_model(name: str, stored: int) -> None:
    """stored: the size that the Hub shows, which counts it."""
    model = arch.describe(json.loads((CONFIGS / name / "config.json").read_text(encoding="utf-8")), name)
    (left_out,) = model.not_counted
    assert left_out.params is not None
    assert model.total() + left_out.params == stored


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the real configs are not here")
def test_nemotron_3_nano() -> None:
    """31.6B in all, 3.2B a token without the input embedding, 3.6B with it; its routers' buffers are beside that."""
    name = "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    model = arch.describe(json.loads((CONFIGS / name / "config.json").read_text(encoding="utf-8")), name)
    buffers = sum(t.shape[0] for t in model.tensors() if t.kind == "buffer")
    assert (model.total(), buffers) == (31_577_937_344, 23 * 128)


def golden(name: str, **changes: Any) -> dict[str, Any]:
    """A golden's config with keys changed, or left out where the change is ...; `text` changes its text_config."""
    config: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    for key, value in {**changes.pop("text", {})}.items():
        config["text_config"][key] = value
    return {k: v for k, v in {**config, **changes}.items() if v is not ...}


@pytest.mark.parametrize(("config", "code"), [
    (golden("mamba", intermediate_size=81), "config-conflict"), (golden("mamba", rms_norm=False), "config-unsupported"),
    (golden("mamba", state_size=...), "config-missing"), (golden("mamba2", n_groups=4), "config-heads"),
    (golden("mamba2", head_dim=13), "config-conflict"), (golden("jamba", attn_layer_offset=3), "config-range"),
    (golden("jamba", sliding_window=8), "config-unsupported"), (golden("jamba", num_experts=...), "config-missing"),
    (golden("bamba", partial_rotary_factor=1.0), "config-rope"), (golden("bamba", mamba_d_head=9), "config-conflict"),
    (golden("bamba", layers_block_type=["mamba"] * 4), "config-conflict"),
    (golden("bamba", attn_layer_indices=...), "config-missing"),
    (golden("nemotron_h", hybrid_override_pattern="M-M*x"), "config-layers"),
    (golden("nemotron_h", num_hidden_layers=6), "config-layers"),
    (golden("nemotron_h", hybrid_override_pattern=...), "config-missing"),
    (golden("nemotron_h", attention_bias=True), "config-unsupported"),
    (golden("nemotron_h-moe", moe_latent_size=8), "config-unsupported"),
    (golden("nemotron_h-moe", n_shared_experts=2), "config-unsupported"),
    (golden("lfm2", conv_dim=40), "config-unsupported"), (golden("lfm2", intermediate_size=57), "config-conflict"),
    (golden("lfm2", full_attn_idxs=...), "config-missing"), (golden("lfm2_moe", layer_types=...), "config-missing"),
    (golden("lfm2_moe", tie_word_embeddings=False), "config-conflict"),
    (golden("qwen3_next", linear_num_value_heads=5), "config-heads"),
    (golden("qwen3_next", use_sliding_window=True), "config-unsupported"),
    (golden("qwen3_next", head_dim=...), "config-missing"),
    (golden("qwen3_5", text_config=...), "config-missing"),
    (golden("qwen3_5", text={"attn_output_gate": False}), "config-unsupported"),
    (golden("qwen3_5", text={"mtp_use_dedicated_embeddings": True}), "config-unsupported"),
    (golden("qwen3_5", text={"tie_word_embeddings": True}), "config-conflict"),
    (golden("qwen3_5_moe", text={"mlp_only_layers": [1]}), "config-unsupported"),
])
def test_what_is_not_described_is_refused(config: dict[str, Any], code: str) -> None:
    with pytest.raises(InputRefused) as caught:
        arch.describe(config, "changed")
    assert caught.value.code == code


def test_both_spellings_of_a_hybrid_are_one() -> None:
    """Letters, the words of earlier releases, and those of transformers 5."""
    letters = golden("nemotron_h-moe", layers_block_type=..., hybrid_override_pattern="ME*E")
    words = golden("nemotron_h-moe", layers_block_type=["linear_attention", "moe", "full_attention", "moe"])
    layers = arch.describe(golden("nemotron_h-moe"), "x").layers
    assert arch.describe(letters, "x").layers == arch.describe(words, "x").layers == layers


def test_drafting_layers_of_nemotron_are_named() -> None:
    (left_out,) = arch.describe(golden("nemotron_h", num_nextn_predict_layers=2), "x").not_counted
    assert left_out.params is None
