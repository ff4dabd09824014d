"""What a config's words mean where no golden can show it: published sizes, rules of single families, refusals.

The sizes are those of the published files. Where these hold more than parameters (a load-balancing bias for each
expert, a drafting layer with copies of embedding and head, fp8 scales), the sum says so.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from llamactl import arch
from llamactl.errors import InputRefused
from llamactl.spec.model import Model
from llamactl.spec.parts import Attention, MoE

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def shaped(model_type: str, hidden: int, layers: int, heads: int, kv: int, ffn: int, vocab: int,
           **rest: Any) -> dict[str, Any]:
    return {"model_type": model_type, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv, "intermediate_size": ffn, "vocab_size": vocab, **rest}


GLM_45 = shaped("glm4_moe", 5120, 92, 96, 8, 12288, 151552, head_dim=128, attention_bias=True, use_qk_norm=True,
                moe_intermediate_size=1536, n_routed_experts=160, n_shared_experts=1, num_experts_per_tok=8,
                first_k_dense_replace=3, num_nextn_predict_layers=1)
AIR = {**GLM_45, "hidden_size": 4096, "num_hidden_layers": 46, "intermediate_size": 10944, "use_qk_norm": False,
       "moe_intermediate_size": 1408, "n_routed_experts": 128, "first_k_dense_replace": 1}
DOTS = shaped("dots1", 4096, 62, 32, 32, 10944, 152064, moe_intermediate_size=1408, n_routed_experts=128,
              n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, sliding_window=None,
              use_sliding_window=False, max_window_layers=62)
ERNIE_21B = shaped("ernie4_5_moe", 2560, 28, 20, 4, 12288, 103424, moe_num_experts=64, moe_k=6,
                   moe_num_shared_experts=2, moe_intermediate_size=1536, moe_layer_start_index=1,
                   tie_word_embeddings=True)
MINIMAX = shaped("minimax_m2", 3072, 62, 48, 8, 1536, 200064, head_dim=128, rotary_dim=64, num_local_experts=256,
                 num_experts_per_tok=8, use_mtp=True, num_mtp_modules=3, tie_word_embeddings=False)


def buffers(model: Model) -> int:
    return sum(leaf.elements for layer in model.layers for leaf in layer.leaves() if leaf.kind == "buffer")


def total(model: Model, *, drafts: bool = False) -> int:
    return model.total() + buffers(model) + sum((x.params or 0) for x in model.not_counted if drafts)


@pytest.mark.parametrize(("config", "published"), [
    (shaped("cohere", 12288, 64, 96, 8, 33792, 256000, use_qk_norm=True), 103_810_674_688),  # Command R+
    (shaped("cohere2", 4096, 32, 32, 8, 14336, 256000), 8_028_033_024),  # Command R7B
    (shaped("cohere2", 12288, 64, 96, 8, 36864, 256000), 111_057_580_032),  # Command A
    (shaped("exaone4", 5120, 64, 40, 8, 27392, 102400, head_dim=128, sliding_window_pattern="LLLG"), 32_003_216_384),
    (shaped("granite", 4096, 40, 32, 8, 12800, 49159, tie_word_embeddings=True), 8_170_864_640),
    (shaped("glm", 4096, 40, 32, 2, 13696, 151552, head_dim=128), 9_399_951_360),
    (shaped("glm4", 6144, 61, 48, 2, 23040, 151552, head_dim=128, attention_bias=False), 32_566_081_536),
    (shaped("ernie4_5", 1024, 18, 16, 2, 3072, 103424, head_dim=128, tie_word_embeddings=True), 360_748_032),
    (shaped("phimoe", 4096, 32, 32, 8, 6400, 32064, num_local_experts=16, num_experts_per_tok=2, attention_bias=True,
            lm_head_bias=True), 41_873_153_344),  # Phi-3.5-MoE
])
def test_published_sizes(config: dict[str, Any], published: int) -> None:
    assert arch.describe(config, "published").total() == published


def test_published_sizes_with_what_is_stored_beside() -> None:
    glm, air, dots, ernie, minimax = (arch.describe(c, "published") for c in (GLM_45, AIR, DOTS, ERNIE_21B, MINIMAX))
    assert total(glm, drafts=True) + 2 * 151552 * 5120 == 358_337_791_296
    assert total(air, drafts=True) + 2 * 151552 * 4096 == 110_468_824_832
    assert total(dots) == 142_774_381_696
    assert total(ernie) == 21_825_437_888
    square = 3 * 256 * 1536 * 3072 + 2 * (48 + 8) * 128 * 3072  # one scale for each 128 x 128 of experts, q, k, v, o
    assert total(minimax) + 62 * square // 128**2 == 228_703_644_928
    (modules,) = minimax.not_counted
    assert modules.params is None


@lru_cache
def golden(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    return data


def described(name: str, **changes: Any) -> Model:
    return arch.describe({**golden(name), **changes}, name)


def reach(model: Model) -> str:
    """One letter a layer: L where attention has a window, G where it sees everything."""
    return "".join("L" if cache.window else "G" for layer in model.layers for cache in layer.caches())


def turned(model: Model) -> str:
    return "".join("r" if layer.attn and layer.attn.rope else "-" for layer in model.layers)


@pytest.mark.parametrize(("changes", "letters", "rotated"), [
    ({}, "LLLGL", "rrr-r"), ({"sliding_window_pattern": "LLLG"}, "LLLGG", "rrr--"),
    ({"sliding_window_pattern": "LG"}, "LGLGG", "r-r--"), ({"sliding_window_pattern": 2}, "LGLGL", "r-r-r"),
    ({"sliding_window": None, "sliding_window_pattern": None}, "GGGGG", "rrrrr"),
    ({"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]}, "GLGLG", "-r-r-"),
])
def test_exaone4_layers(changes: dict[str, Any], letters: str, rotated: str) -> None:
    """A word repeats, and its last layer is always full; only sliding layers rotate, unless none slides."""
    model = described("exaone4", **changes)
    assert (reach(model), turned(model)) == (letters, rotated)


def test_cohere2_layers() -> None:
    model = described("cohere2", sliding_window_pattern=3)
    assert (reach(model), turned(model)) == ("LLGLL", "rr-rr")


@pytest.mark.parametrize(("changes", "moe"), [
    ({}, "-MM-"), ({"moe_layer_end_index": -1}, "-MMM"), ({"moe_layer_interval": 2}, "-M--"),
    ({"moe_layer_start_index": 9}, "----"), ({"moe_layer_start_index": 0, "moe_layer_end_index": 3}, "MMMM"),
])
def test_ernie_moe_layers(changes: dict[str, Any], moe: str) -> None:
    model = described("ernie4_5_moe", **changes)
    assert "".join("M" if isinstance(layer.mlp, MoE) else "-" for layer in model.layers) == moe


def test_ernie_drafting_layer() -> None:
    """mtp_block is a dense block: q, k, v, o, three matrices, two norms; then two norms and (hidden, 2 hidden)."""
    block = 2 * 72 * 48 + 2 * 24 * 48 + 3 * 48 * 56 + 2 * 48
    (left,) = described("ernie4_5_moe", num_nextn_predict_layers=1).not_counted
    assert left.params == block + 2 * 48 + 2 * 48 * 48


def test_dots1_window_needs_its_switch() -> None:
    assert reach(described("dots1")) == reach(described("dots1", use_sliding_window=True)) == "GGL"
    assert reach(described("dots1", use_sliding_window=False, max_window_layers=3)) == "GGG"


def test_granite_multipliers() -> None:
    model = described("granite")
    assert model.embed.scale == 12.0
    assert model.head.scale == pytest.approx(1 / 8)
    (layer,) = set(model.layers)
    assert isinstance(layer.attn, Attention)
    assert (layer.attn.scale, layer.residual_scale) == (0.15625, 0.22)


def test_cohere_scales_its_logits() -> None:
    assert described("cohere").head.scale == 0.25
    silent = {k: v for k, v in golden("cohere").items() if k != "logit_scale"}
    assert arch.describe(silent, "cohere").head.scale == 0.0625


def test_hunyuan_base() -> None:
    """An alpha stretches the base once; without it the word dynamic means what it means elsewhere."""
    alpha = golden("hunyuan_v1_dense")["rope_scaling"]
    layer = described("hunyuan_v1_dense").layers[0]
    assert isinstance(layer.attn, Attention)
    assert layer.attn.norm_after_rope
    assert layer.attn.rope is not None
    assert layer.attn.rope.scaling is None
    assert layer.attn.rope.theta == pytest.approx(10000 * 1000 ** (12 / 10))
    plain = described("hunyuan_v1_dense", rope_scaling={**alpha, "alpha": None, "factor": 2.0}).layers[0].attn
    assert isinstance(plain, Attention)
    assert plain.rope is not None
    assert plain.rope.scaling is not None
    assert (plain.rope.theta, plain.rope.scaling.kind, plain.rope.scaling.factor) == (10000, "dynamic", 2.0)


def test_phimoe_names_the_factor_on_its_rotation() -> None:
    attn = described("phimoe").layers[0].attn
    assert isinstance(attn, Attention)
    assert attn.rope is not None
    assert attn.rope.scaling is not None
    assert attn.rope.scaling.attention_factor == 1.25


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "short_mscale": 1.0}


@pytest.mark.parametrize(("name", "changes", "code"), [
    ("cohere2", {"sliding_window": None}, "config-type"), ("cohere2", {"use_qk_norm": True}, "config-unsupported"),
    ("cohere2", {"use_parallel_block": False}, "config-unsupported"),
    ("cohere2", {"use_gated_activation": False}, "config-unsupported"),
    ("cohere2", {"rotary_pct": 0.5}, "config-unsupported"),
    ("dots1", {"use_sliding_window": False}, "config-conflict"),
    ("dots1", {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "config-layers"),
    ("dots1", {"n_shared_experts": None}, "config-type"),
    ("ernie4_5_moe", {"use_bias": True}, "config-unsupported"),
    ("ernie4_5_moe", {"moe_use_aux_free": False}, "config-unsupported"),
    ("ernie4_5_moe", {"moe_num_experts": [64, 64]}, "config-type"), ("ernie4_5_moe", {"moe_k": 6}, "config-range"),
    ("ernie4_5", {"head_dim": None}, "config-type"),
    ("exaone4", {"sliding_window": None, "layer_types": ["sliding_attention"] * 5}, "config-layers"),
    ("exaone4", {"sliding_window_pattern": "LLLX"}, "config-type"),
    ("glm4_moe", {"n_shared_experts": None}, "config-type"), ("glm", {"head_dim": None}, "config-type"),
    ("hunyuan_v1_dense", {"use_cla": True}, "config-unsupported"),
    ("hunyuan_v1_dense", {"use_qk_norm": False}, "config-unsupported"),
    ("hunyuan_v1_dense", {"head_dim": 2}, "config-rope"),
    ("minimax_m2", {"use_qk_norm": False}, "config-unsupported"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, "config-unsupported"),
    ("minimax_m2", {"use_routing_bias": False}, "config-unsupported"),
    ("minimax_m2", {"shared_intermediate_size": 64}, "config-unsupported"),
    ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "config-layers"),
    ("nemotron", {"rope_percent": 0.25}, "config-conflict"),
    ("phimoe", {"num_experts_per_tok": 1}, "config-unsupported"),
    ("phimoe", {"rope_scaling": {**LONGROPE, "long_mscale": 2.0}}, "config-rope"),
    ("phimoe", {"rope_scaling": LONGROPE}, "config-missing"),
])
def test_what_is_not_described_is_refused(name: str, changes: dict[str, Any], code: str) -> None:
    with pytest.raises(InputRefused) as caught:
        described(name, **changes)
    assert caught.value.code == code
