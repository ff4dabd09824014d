"""Llama-Nemotron, a type that transformers does not know, by its published code (modeling_decilm.py).

Each block lists what is left of its attention and feed-forward: all of it, one square matrix, or nothing, and with
nothing goes the norm before it. A feed-forward is 2/3 x ffn_mult x hidden wide, rounded up to a multiple of 256.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from llamactl import arch
from llamactl.errors import InputRefused
from llamactl.spec.naming import stored_tensors
from llamactl.spec.parts import Attention

REAL = Path(__file__).resolve().parents[3] / "shared" / "configs" / "nvidia__Llama-3_3-Nemotron-Super-49B-v1"


def attention(**changes: Any) -> dict[str, Any]:
    return {"n_heads_in_group": None, "no_op": False, "num_sink_tokens": None, "replace_with_linear": False,
            "sparsify": None, "unshifted_sink": False, "use_prefill_window_in_sink_attention": False,
            "window_length": None, **changes}


def ffn(**changes: Any) -> dict[str, Any]:
    return {"ffn_mult": None, "no_op": False, "replace_with_linear": False, "sparsify": None, **changes}


TINY: dict[str, Any] = {
    "model_type": "nemotron-nas", "hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": None, "intermediate_size": None, "vocab_size": 97, "hidden_act": "silu",
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attention_bias": False,
    "mlp_bias": False, "tie_word_embeddings": False, "block_configs": [
        {"attention": attention(n_heads_in_group=3), "ffn": ffn(ffn_mult=5.25)},
        {"attention": attention(no_op=True), "ffn": ffn(ffn_mult=8.1)},
        {"attention": attention(n_heads_in_group=1), "ffn": ffn(no_op=True)},
        {"attention": attention(replace_with_linear=True), "ffn": ffn(replace_with_linear=True)},
        {"attention": attention(no_op=True), "ffn": ffn(no_op=True)},
    ],
}


def changed(layer: int, branch: str, **changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(TINY)
    config["block_configs"][layer][branch] |= changes
    return config


def test_names_and_shapes() -> None:
    """2/3 x 5.25 x 48 = 168, so 256; 2/3 x 8.1 x 48 = 259.2, so 512. 6 heads of 8 in groups of 3: 2 KV heads."""
    model = arch.describe(TINY, "tiny")
    stored = {s.name: s.shape for s in stored_tensors(model, arch.names(model))}
    layers: list[dict[str, tuple[int, ...]]] = [
        {"input_layernorm": (48,), "self_attn.q_proj": (48, 48), "self_attn.k_proj": (16, 48),
         "self_attn.v_proj": (16, 48), "self_attn.o_proj": (48, 48), "post_attention_layernorm": (48,),
         "mlp.gate_proj": (256, 48), "mlp.up_proj": (256, 48), "mlp.down_proj": (48, 256)},
        {"post_attention_layernorm": (48,), "mlp.gate_proj": (512, 48), "mlp.up_proj": (512, 48),
         "mlp.down_proj": (48, 512)},
        {"input_layernorm": (48,), "self_attn.q_proj": (48, 48), "self_attn.k_proj": (48, 48),
         "self_attn.v_proj": (48, 48), "self_attn.o_proj": (48, 48)},
        {"input_layernorm": (48,), "self_attn.linear_attn": (48, 48), "post_attention_layernorm": (48,),
         "mlp.linear_mlp": (48, 48)},
        {},
    ]
    named = {f"model.layers.{i}.{k}.weight": shape for i, layer in enumerate(layers) for k, shape in layer.items()}
    assert stored == {"model.embed_tokens.weight": (97, 48), "model.norm.weight": (48,), "lm_head.weight": (97, 48),
                      **named}


def test_roles_and_cache() -> None:
    """A matrix in the place of attention is no q, k, v or o, and it caches nothing."""
    model = arch.describe(TINY, "tiny")
    roles = {leaf.path: leaf.role for leaf in model.layers[3].leaves()}
    assert roles == {"attn_norm.weight": "norms", "attn.linear.weight": "attention.other",
                     "mlp_norm.weight": "norms", "mlp.linear.weight": "feed_forward.up"}
    assert [sum(c.elements for c in layer.caches()) for layer in model.layers] == [2 * 2 * 8, 0, 2 * 6 * 8, 0, 0]
    assert [layer.state_elements() for layer in model.layers] == [0] * 5


def test_biases_and_tie() -> None:
    model = arch.describe({**TINY, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, "tiny")
    biases = {t.name: t.shape for t in model.tensors() if t.name.endswith("bias")}
    assert biases == {
        "layers.0.attn.q.bias": (48,), "layers.0.attn.k.bias": (16,), "layers.0.attn.v.bias": (16,),
        "layers.0.attn.o.bias": (48,), "layers.0.mlp.gate.bias": (256,), "layers.0.mlp.up.bias": (256,),
        "layers.0.mlp.down.bias": (48,), "layers.1.mlp.gate.bias": (512,), "layers.1.mlp.up.bias": (512,),
        "layers.1.mlp.down.bias": (48,), "layers.2.attn.q.bias": (48,), "layers.2.attn.k.bias": (48,),
        "layers.2.attn.v.bias": (48,), "layers.2.attn.o.bias": (48,),
    }
    assert model.tied


@pytest.mark.skipif(not REAL.is_dir(), reason="the real config is not here")
def test_super_49b() -> None:
    """Published: 49,867,145,216. 31 of 80 layers have no attention."""
    model = arch.describe(json.loads((REAL / "config.json").read_text(encoding="utf-8")), REAL.name)
    assert model.total() == 49_867_145_216
    attn = [layer.attn for layer in model.layers if isinstance(layer.attn, Attention)]
    assert len(attn) == 49
    assert {(a.n_heads, a.n_kv_heads, a.head_dim) for a in attn} == {(64, 8, 128)}
    assert sum(c.elements for layer in model.layers for c in layer.caches()) == 49 * 2 * 8 * 128
    assert (model.context.trained, model.context.usable) == (8192, 131072)


@pytest.mark.parametrize(("config", "code"), [
    (changed(0, "attention", num_sink_tokens=4), "config-unsupported"),
    (changed(0, "attention", window_length=64), "config-unsupported"),
    (changed(0, "attention", sparsify=["x"]), "config-unsupported"),
    (changed(0, "attention", mamba={"state_dim": 8}), "config-unsupported"),
    (changed(0, "attention", n_heads_in_group=4), "config-heads"),
    (changed(0, "attention", n_heads_in_group=None), "config-type"),
    (changed(0, "ffn", ffn_mult=None), "config-type"),
    (changed(0, "ffn", moe={"num_local_experts": 8}), "config-unsupported"),
    ({**TINY, "num_hidden_layers": 4}, "config-layers"),
    ({k: v for k, v in TINY.items() if k != "block_configs"}, "config-missing"),
])
def test_what_is_not_described_is_refused(config: dict[str, Any], code: str) -> None:
    with pytest.raises(InputRefused) as caught:
        arch.describe(config, "tiny")
    assert caught.value.code == code
