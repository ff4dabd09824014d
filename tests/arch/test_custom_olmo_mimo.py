"""Types that transformers does not know, by their published code: OLMo 1 as its own package stores it, and MiMo.

"hf_olmo": allenai/OLMo, olmo/model.py and transformers' own converter (convert_olmo_weights_to_hf.py), which says how
the fused rows lie. "mimo": MiMo-7B's modeling_mimo.py, a Qwen2ForCausalLM whose model also holds mtp_layers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llamactl import arch
from llamactl.errors import InputRefused
from llamactl.spec.naming import read, stored_tensors

OLMO: dict[str, Any] = {
    "model_type": "hf_olmo", "d_model": 48, "n_heads": 6, "n_layers": 3, "mlp_hidden_size": 112, "mlp_ratio": 4,
    "vocab_size": 90, "embedding_size": 97, "weight_tying": False, "max_sequence_length": 128, "rope": True,
    "alibi": False, "activation_type": "swiglu", "block_type": "sequential", "layer_norm_type": "default",
    "layer_norm_with_affine": False, "attention_layer_norm": False, "include_bias": False,
    "multi_query_attention": False, "scale_logits": False, "bias_for_layer_norm": False,
}
OLMO_1B = {**OLMO, "d_model": 2048, "n_heads": 16, "n_layers": 16, "mlp_hidden_size": None, "mlp_ratio": 8,
           "vocab_size": 50280, "embedding_size": 50304, "weight_tying": True, "max_sequence_length": 2048}
OLMO_7B = {**OLMO, "d_model": 4096, "n_heads": 32, "n_layers": 32, "mlp_hidden_size": 22016, "vocab_size": 50280,
           "embedding_size": 50304, "weight_tying": False, "max_sequence_length": 2048}
MIMO: dict[str, Any] = {
    "model_type": "mimo", "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 97, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 640000, "hidden_act": "silu", "attention_bias": True, "use_sliding_window": False,
    "sliding_window": 32768, "max_window_layers": 2, "use_mrope": False, "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
MIMO_7B = {**MIMO, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151680, "max_position_embeddings": 32768}


def stored(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    model = arch.describe(config, "by-hand")
    return {s.name: s.shape for s in stored_tensors(model, arch.names(model))}


@pytest.mark.parametrize("model_type", ["hf_olmo", "olmo"])
@pytest.mark.parametrize(("config", "total"), [(OLMO_1B, 1_176_764_416), (OLMO_7B, 6_888_095_744)])
def test_olmo_totals(config: dict[str, Any], total: int, model_type: str) -> None:
    """Published: 1B and 7B. The first files carry the type that transformers later took for its own keys."""
    model = arch.describe({**config, "model_type": model_type}, "olmo")
    assert model.total() == total
    assert (model.family, model.model_type) == ("hf_olmo", model_type)
    assert model.tied is config["weight_tying"]
    assert model.context.usable == 2048


def test_olmo_names_and_shapes() -> None:
    """Norms have no weights; ff_proj is mlp_hidden_size rows, gate and up together, so ff_out takes half of them."""
    block = {"att_proj.weight": (3 * 48, 48), "attn_out.weight": (48, 48), "ff_proj.weight": (112, 48),
             "ff_out.weight": (48, 56)}
    named = {f"model.transformer.blocks.{i}.{k}": shape for i in range(3) for k, shape in block.items()}
    outer = {"model.transformer.wte.weight": (97, 48), "model.transformer.ff_out.weight": (97, 48)}
    assert stored(OLMO) == {**outer, **named}
    assert set(stored(OLMO)) - set(stored({**OLMO, "weight_tying": True})) == {"model.transformer.ff_out.weight"}


@pytest.mark.parametrize(("changes", "rows"), [
    ({"n_kv_heads": 2}, 48 + 2 * 16), ({"multi_query_attention": True}, 48 + 2 * 8),
    ({"n_kv_heads": None}, 3 * 48), ({"n_kv_heads": 3, "multi_query_attention": True}, 48 + 2 * 24),
])
def test_olmo_kv_heads(changes: dict[str, Any], rows: int) -> None:
    config = {**OLMO, **changes}
    assert stored(config)["model.transformer.blocks.2.att_proj.weight"] == (rows, 48)
    assert arch.describe(config, "olmo").layers[0].attn.caches()[0].elements == rows - 48  # type: ignore[union-attr]


def test_olmo_fused_rows_are_the_converters(make_golden: ModuleType) -> None:
    """Its own layout and transformers' hold the same canonical tensors once rows are cut as the converter cuts them."""
    import torch

    folder = Path(__file__).resolve().parents[1] / "golden" / "olmo"
    hf = make_golden.build(folder).state_dict()
    theirs = arch.describe(json.loads((folder / "config.json").read_text(encoding="utf-8")), "olmo")
    ours = arch.describe({**OLMO, "n_kv_heads": 2}, "olmo")
    files = {"model.transformer.wte.weight": hf["model.embed_tokens.weight"],
             "model.transformer.ff_out.weight": hf["lm_head.weight"]}
    for i in range(3):
        a, m, out = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp", f"model.transformer.blocks.{i}"
        files[f"{out}.att_proj.weight"] = torch.cat([hf[f"{a}.{x}_proj.weight"] for x in "qkv"])
        files[f"{out}.ff_proj.weight"] = torch.cat([hf[f"{m}.up_proj.weight"], hf[f"{m}.gate_proj.weight"]])
        files[f"{out}.attn_out.weight"], files[f"{out}.ff_out.weight"] = hf[f"{a}.o_proj.weight"], hf[
            f"{m}.down_proj.weight"]
    canonical, expected = (
        {k: v for s in stored_tensors(m, arch.names(m)) for k, v in read(s, held[s.name], m).items()}
        for m, held in ((ours, files), (theirs, hf))
    )
    assert canonical.keys() == expected.keys()
    assert all(torch.equal(canonical[k], expected[k]) for k in expected)
    assert ours.layers == theirs.layers


@pytest.mark.parametrize(("key", "value", "code"), [
    ("block_type", "llama", "config-unsupported"), ("activation_type", "gelu", "config-unsupported"),
    ("alibi", True, "config-unsupported"), ("rope", False, "config-unsupported"),
    ("layer_norm_type", "rms", "config-unsupported"), ("layer_norm_with_affine", True, "config-unsupported"),
    ("attention_layer_norm", True, "config-unsupported"), ("include_bias", True, "config-unsupported"),
    ("scale_logits", True, "config-unsupported"), ("mlp_hidden_size", 113, "config-range"),
    ("n_kv_heads", 4, "config-heads"), ("n_heads", 5, "config-heads"), ("hidden_size", 64, "config-conflict"),
])
def test_olmo_refuses_what_no_release_has(key: str, value: Any, code: str) -> None:
    with pytest.raises(InputRefused) as caught:
        arch.describe({**OLMO, key: value}, "olmo")
    assert caught.value.code == code


@pytest.mark.parametrize("key", ["rope", "include_bias", "layer_norm_with_affine"])
def test_olmo_files_say_what_the_package_would_do_otherwise(key: str) -> None:
    silent = {k: v for k, v in OLMO.items() if k != key}
    with pytest.raises(InputRefused, match=key):
        arch.describe(silent, "olmo")


def test_mimo_total() -> None:
    """The published files hold 7,833,409,536 parameters, one drafting layer among them."""
    model = arch.describe(MIMO_7B, "mimo")
    (drafts,) = model.not_counted
    assert model.total() == 7_622_619_136
    assert drafts.params is not None
    assert model.total() + drafts.params == 7_833_409_536
    assert model.family == "mimo"


def test_mimo_drafting_layer_by_its_class() -> None:
    """MiMoMTPLayers: Qwen2's attention and MLP, input_proj (hidden, 2 hidden), and five norms."""
    attention = 72 * 48 + 72 + 2 * (24 * 48 + 24) + 48 * 72
    one = attention + 3 * 48 * 56 + 2 * 48 * 48 + 5 * 48
    for layers in (0, 1, 2):
        left = arch.describe({**MIMO, "num_nextn_predict_layers": layers}, "mimo").not_counted
        assert [x.params for x in left] == [layers * one] * bool(layers)
    silent = {k: v for k, v in MIMO.items() if k != "num_nextn_predict_layers"}
    assert arch.describe(silent, "mimo").not_counted == ()


def test_mimo_is_qwen2_beside_its_drafts(make_golden: ModuleType) -> None:
    """Names, shapes, total and layers of transformers' Qwen2 of the same config."""
    import torch

    config = {**MIMO, "model_type": "qwen2"}
    with torch.device("meta"):
        hf = make_golden.AutoModelForCausalLM.from_config(make_golden.AutoConfig.for_model(**config))
    theirs = {name: tuple(p.shape) for name, p in hf.named_parameters()}
    assert stored(MIMO) == theirs
    model = arch.describe(MIMO, "mimo")
    assert model.total() == sum(math.prod(shape) for shape in theirs.values())
    assert model.layers == arch.describe(config, "qwen2").layers


@pytest.mark.parametrize(("key", "value"), [("attention_bias", False), ("use_mrope", True)])
def test_mimo_refuses(key: str, value: bool) -> None:
    with pytest.raises(InputRefused) as caught:
        arch.describe({**MIMO, key: value}, "mimo")
    assert caught.value.code == "config-unsupported"
