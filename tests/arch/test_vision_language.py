"""Vision-language files and Gemma 3n against published totals, and what is refused rather than guessed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamactl import arch
from llamactl.errors import InputRefused
from llamactl.spec.model import Model

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
E4B = {
    "model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": 35, "intermediate_size": 16384,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "altup_num_inputs": 4, "laurel_rank": 64,
    "num_kv_shared_layers": 15, "sliding_window": 512, "max_position_embeddings": 32768,
}
E2B = E4B | {"num_hidden_layers": 30, "intermediate_size": 8192, "num_kv_shared_layers": 10}


def golden(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text())
    return data


def idle(model: Model) -> int:
    return sum(x.params or 0 for x in model.not_counted)


def test_gemma3n_by_the_published_files() -> None:
    """The files hold 7,849,978,192 (E4B) and 5,439,438,272 (E2B) numbers; their towers are the same in both.

    So the decoders differ by what the files differ by, once the matrices are added that no layer reads.
    """
    e4b, e2b = arch.describe(E4B, "E4B"), arch.describe(E2B, "E2B")
    assert e4b.total() == 6_835_235_568
    assert e2b.total() == 4_435_182_688
    assert (idle(e4b), idle(e2b)) == (15 * (2 * 512 * 2048 + 256), 10 * (2 * 512 * 2048 + 256))
    assert e4b.total() + idle(e4b) - e2b.total() - idle(e2b) == 7_849_978_192 - 5_439_438_272


def test_gemma3n_keeps_nothing_in_shared_layers() -> None:
    model = arch.describe(E4B, "E4B")
    kept = [layer.caches() for layer in model.layers]
    assert kept[20:] == [()] * 15
    assert [c.kind for (c,) in kept[:5]] == ["sliding"] * 4 + ["full"]


def test_llava_7b_rests_on_llamas_class() -> None:
    """The published text_config names neither width nor depth; what fills in is marked."""
    config = {
        "model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064, "rms_norm_eps": 1e-5},
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336,
                          "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
                          "patch_size": 14},
        "tie_word_embeddings": False,
    }
    model = arch.describe(config, "llava")
    assert model.total() == 7_063_427_072
    how = {key: h for key, _, h in model.reads}
    assert how["text_config.hidden_size"] == how["text_config.num_hidden_layers"] == "family default"
    assert how["text_config.vocab_size"] == "config"


def test_mistral3_is_untied_where_the_file_is_silent() -> None:
    """Mistral Small 3.1 publishes 24,011,361,280 with a head of its own; transformers' class would tie."""
    config = golden("mistral3")
    del config["tie_word_embeddings"]
    assert not arch.describe(config, "mistral3").tied


def test_pictures_take_no_text_cache() -> None:
    model = arch.describe(golden("mllama"), "mllama")
    assert [len(layer.caches()) for layer in model.layers] == [1, 0, 0, 1]
    assert model.embed.vocab == model.head.vocab + 8
    assert [code for code, _ in model.notes] == ["picture-cache"]


def test_dsa_keeps_a_key_for_the_indexer_beside_the_latent() -> None:
    model = arch.describe(golden("glm_moe_dsa"), "glm")
    assert [[c.kind for c in layer.caches()] for layer in model.layers] == [
        ["latent", "indexer"], ["latent", "indexer"], ["latent"], ["latent", "indexer"], ["latent"]]


def changed(name: str, path: str, value: object) -> dict[str, Any]:
    data = golden(name)
    *outer, key = path.split(".")
    node = data
    for step in outer:
        node = node[step]
    if value is None:
        node.pop(key, None)
    else:
        node[key] = value
    return data


def refusals() -> Iterator[tuple[str, str, object, str]]:
    yield "llava", "text_config", None, "config-missing"
    yield "llava", "text_config.model_type", "qwen2", "config-unsupported"
    yield "llava", "vision_config.model_type", "siglip_vision_model", "config-unsupported"
    yield "llava", "text_config.tie_word_embeddings", True, "config-conflict"
    yield "mistral3", "vision_feature_layer", [-1, -2], "config-unsupported"
    yield "mistral3", "text_config.model_type", "llama", "config-unsupported"
    yield "ministral3", "rope_parameters", None, "config-missing"
    yield "qwen2_vl", "vision_config.hidden_size", 40, "config-unsupported"
    yield "qwen3_vl", "vision_config.out_hidden_size", 40, "config-unsupported"
    yield "qwen3_vl", "text_config.use_sliding_window", True, "config-unsupported"
    yield "kimi_k25", "tie_word_embeddings", None, "config-missing"
    yield "kimi_k25", "vision_config.merge_type", "none", "config-unsupported"
    yield "mllama", "tie_word_embeddings", True, "config-unsupported"
    yield "mllama", "text_config.cross_attention_layers", None, "config-missing"
    yield "mllama", "text_config.cross_attention_layers", [4], "config-range"
    yield "mllama", "vision_config.vision_output_dim", 48, "config-unsupported"
    yield "gemma4", "text_config.use_bidirectional_attention", "all", "config-unsupported"
    yield "gemma4", "text_config.top_k_experts", 9, "config-range"
    yield "gemma4", "text_config.num_kv_shared_layers", 7, "config-layers"
    yield "gemma4", "text_config.rope_parameters.full_attention.rope_type", "yarn", "config-unsupported"
    yield "gemma3n", "text_config.intermediate_size", [56, 56], "config-layers"
    yield "gemma3n", "text_config.num_kv_shared_layers", 6, "config-layers"
    yield "glm_moe_dsa", "indexer_types", ["shared"] + ["full"] * 4, "config-layers"
    yield "glm_moe_dsa", "index_topk_pattern", "FS", "config-layers"
    yield "glm_moe_dsa", "index_head_dim", 4, "config-range"
    yield "glm_moe_dsa", "mlp_layer_types", ["dense"], "config-layers"
    yield "deepseek_v32", "rope_interleave", False, "config-unsupported"
    yield "deepseek_v32", "q_lora_rank", None, "config-missing"


@pytest.mark.parametrize(("name", "path", "value", "code"), list(refusals()))
def test_refused(name: str, path: str, value: object, code: str) -> None:
    with pytest.raises(InputRefused) as caught:
        arch.describe(changed(name, path, value), name)
    assert caught.value.code == code


@pytest.mark.parametrize("name", ["llava", "mistral3", "qwen2_vl", "qwen3_vl", "mllama", "gemma4", "kimi_k25"])
def test_a_tower_without_its_shapes_is_listed_not_guessed(name: str) -> None:
    whole = arch.describe(golden(name), name)
    data = golden(name)
    data["vision_config"] = {"model_type": data["vision_config"].get("model_type", "")} if name == "gemma4" else {}
    less = arch.describe(data, name)
    assert not {s.name for s in less.sections} & {"vision", "projector"}
    assert [x.params for x in less.not_counted if "vision" in x.what] == [None]
    assert less.layers == whole.layers
