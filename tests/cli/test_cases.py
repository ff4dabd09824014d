"""Inputs on which tools of this kind have been wrong, with the right answers. Each test is named after what it proves.

The configs are written for these tests; where a shared/ folder stands beside the checkout, its cases run too.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_positions": 1024,
        "n_ctx": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "activation_function": "gelu_new"}
LLAMA_2 = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
           "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096, "hidden_act": "silu",
           "tie_word_embeddings": False}
LLAMA_3 = {**LLAMA_2, "vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8,
           "max_position_embeddings": 8192, "rope_theta": 500000.0, "torch_dtype": "bfloat16"}
MIXTRAL = {**LLAMA_2, "model_type": "mixtral", "intermediate_size": 14336, "num_key_value_heads": 8,
           "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768, "rope_theta": 1e6,
           "sliding_window": None}
QWEN_3 = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
          "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
          "max_position_embeddings": 40960, "rope_theta": 1000000, "tie_word_embeddings": True}
GEMMA_3 = {"model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240,
           "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
           "sliding_window": 1024, "sliding_window_pattern": 6, "max_position_embeddings": 131072, "rope_theta": 1e6,
           "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
           "torch_dtype": "bfloat16", "tie_word_embeddings": True}
GPT_OSS = {"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
           "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
           "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4,
           "layer_types": ["sliding_attention", "full_attention"] * 18, "max_position_embeddings": 131072,
           "torch_dtype": "bfloat16", "tie_word_embeddings": False}
DEEPSEEK = {"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
            "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
            "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
            "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "kv_lora_rank": 512, "q_lora_rank": 1536,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 163840,
            "rope_theta": 10000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                             "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}}
FALCON = {"model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32,
          "num_attention_heads": 71, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True,
          "bias": False, "alibi": False, "torch_dtype": "bfloat16"}
INDEX = "model.safetensors.index.json"
MIB = 1 << 20


@pytest.fixture
def params(cli: Any, folder: Any) -> Callable[..., dict[str, Any]]:
    """params(config, *flags): the model object of `llamactl params --json`."""

    def call(config: dict[str, Any], *flags: str) -> dict[str, Any]:
        found: dict[str, Any] = cli("params", folder(config), *flags, "--json").model
        return found

    return call


@pytest.fixture
def cache(cli: Any, folder: Any) -> Callable[..., dict[str, Any]]:
    """cache(config, *flags): the model object of `llamactl kv-cache --json`."""

    def call(config: dict[str, Any], *flags: str) -> dict[str, Any]:
        found: dict[str, Any] = cli("kv-cache", folder(config), *flags, "--json").model
        return found

    return call


def kept(model: dict[str, Any]) -> list[int]:
    return [at["kv_cache_bytes"] for at in model["at"]]


# ---- counting


def test_a_tied_head_is_counted_once_though_no_key_says_so(params: Any) -> None:
    model = params(GPT2)
    assert (model["total"], model["tied"], model["components"]["lm_head"]) == (124_439_808, True, 0)
    assert model["components"]["feed_forward"]["total"] == 56_669_184
    assert model["ffn_share_model"] == pytest.approx(0.4553943, abs=1e-7)
    assert params({**GPT2, "tie_word_embeddings": False})["total"] == 163_037_184


def test_all_experts_are_in_the_total_and_two_in_the_active_count(params: Any) -> None:
    model = params(MIXTRAL)
    assert (model["total"], model["active"]["all"]) == (46_702_792_704, 12_879_925_248)
    assert model["components"]["feed_forward"]["routed_experts"] == 45_097_156_608
    assert model["components"]["feed_forward"]["router"] == 1_048_576
    assert model["ffn_share_model"] == pytest.approx(0.9656425788, abs=1e-9)


def test_biases_come_from_flags_or_from_the_family(params: Any, tiny: Any) -> None:
    small = {**tiny.config, "vocab_size": 512, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3,
             "num_attention_heads": 6, "tie_word_embeddings": True}
    assert params(small)["total"] == 344_736
    both = params({**small, "attention_bias": True, "mlp_bias": True})
    assert (both["total"], both["biases"]) == (347_328, 2_592)
    qwen = params({**small, "model_type": "qwen2"})
    assert (qwen["total"], qwen["biases"]) == (345_216, 480)


def test_a_stated_head_dim_is_not_divided_out(params: Any) -> None:
    model = params(QWEN_3)
    assert model["total"] == 4_022_468_096
    assert model["components"]["attention"]["total"] == 943_718_400
    assert model["components"]["norms"] == 9_216 + (2 * 36 + 1) * 2560
    assert model["ffn_share_model"] == pytest.approx(0.6686435730, abs=1e-9)


def test_a_gated_feed_forward_has_three_matrices(params: Any) -> None:
    model = params({**LLAMA_2, "num_key_value_heads": 32})
    assert model["total"] == 6_738_415_616
    assert model["components"]["feed_forward"]["total"] == 32 * 3 * 4096 * 11008 == 4_328_521_728


def test_two_weights_in_a_byte_are_two_parameters(cli: Any, folder: Any, tiny: Any) -> None:
    """bitsandbytes: a packed column and its book-keeping for each linear layer; stored elements are no parameters."""
    config = {**tiny.config, "vocab_size": 200, "intermediate_size": 128, "num_hidden_layers": 1,
              "num_attention_heads": 4, "num_key_value_heads": 4, "torch_dtype": "bfloat16",
              "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True,
                                      "bnb_4bit_quant_type": "nf4"}}
    tensors: dict[str, Any] = {}
    for name, (_, shape) in tiny.tensors(config).items():
        if len(shape) == 1 or "proj" not in name:
            tensors[name] = ("BF16", shape)
            continue
        n = shape[0] * shape[1]
        tensors |= {name: ("U8", (n // 2, 1)), f"{name}.absmax": ("F32", (n // 64,)),
                    f"{name}.quant_map": ("F32", (16,)), f"{name}.quant_state.bitsandbytes__nf4": ("U8", (80,))}
    got = cli("params", folder(config, tensors=tensors), "--weights", "--json")
    assert got.model["total"] == 66_752
    assert got.model["quantization"] == "bitsandbytes"
    assert got.model["files"]["agrees"] is None
    assert got.model["files"]["missing"] == got.model["files"]["unexpected"] == []
    assert sum(t[1][0] * (t[1][1] if len(t[1]) > 1 else 1) for n, t in tensors.items()
               if n.endswith(".weight")) == 46_272


def test_eight_weights_in_an_int32_are_eight_parameters(cli: Any, folder: Any, tiny: Any) -> None:
    config = {**tiny.config, "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
              "num_attention_heads": 4, "torch_dtype": "float16",
              "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}}
    tensors: dict[str, Any] = {}
    for name, (_, shape) in tiny.tensors(config).items():
        if "proj" not in name:
            tensors[name] = ("F16", shape)
            continue
        out, in_ = shape
        stem = name.removesuffix(".weight")
        tensors |= {f"{stem}.qweight": ("I32", (in_ // 8, out)), f"{stem}.qzeros": ("I32", (in_ // 64, out // 8)),
                    f"{stem}.scales": ("F16", (in_ // 64, out)), f"{stem}.g_idx": ("I32", (in_,))}
    got = cli("params", folder(config, tensors=tensors), "--weights", "--json")
    assert got.model["total"] == 172_416
    assert got.model["files"]["elements"] == 47_008
    assert got.model["files"]["agrees"] is True


@pytest.fixture
def sharded(folder: Any, tiny: Any) -> Callable[..., Path]:
    """sharded(n, **metadata): the small Llama in bf16, in n shards under an index."""

    def make(n: int = 2, *, index: dict[str, str] | None = None, **metadata: Any) -> Path:
        path: Path = folder({**tiny.config, "torch_dtype": "bfloat16"})
        tensors = tiny.tensors(tiny.config, "BF16")
        names = sorted(tensors)
        at = {name: f"model-{i * n // len(names) + 1:05}-of-{n:05}.safetensors" for i, name in enumerate(names)}
        for shard in set(at.values()):
            tiny.write(path / shard, {k: tensors[k] for k in names if at[k] == shard}, {"format": "pt"})
        (path / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": index or at}))
        return path

    return make


def test_headers_are_believed_before_the_index(cli: Any, sharded: Any, tiny: Any) -> None:
    got = cli("params", sharded(total_size=1234, total_parameters=617), "--weights", "--json")
    assert (got.model["total"], got.model["files"]["elements"]) == (tiny.total, tiny.total)
    assert got.model["files"]["weights_bytes"] == 2 * tiny.total == 141_184
    assert "index-total" in {w["code"] for w in got.json()["warnings"]}


def test_one_copy_of_the_weights_is_counted(cli: Any, sharded: Any, tiny: Any) -> None:
    path = sharded(total_size=2 * tiny.total)
    tensors = tiny.tensors(tiny.config, "BF16")
    tiny.write(path / "consolidated.safetensors", {k.removeprefix("model."): t for k, t in tensors.items()})
    for copy in ("pytorch_model.bin", "original/consolidated.00.pth"):
        (path / copy).parent.mkdir(exist_ok=True)
        (path / copy).write_bytes(b"PK\x03\x04" + bytes(2 * tiny.total))
    files = cli("params", path, "--weights", "--json").model["files"]
    assert (files["weights_bytes"], files["files"]) == (2 * tiny.total, 2)
    assert files["agrees"] is True


# ---- memory


def test_kv_heads_are_counted_not_query_heads(cache: Any) -> None:
    model = cache(LLAMA_3, "--ctx", "8192", "--batch", "4")
    assert model["bytes_per_token"] == 131_072
    assert kept(model) == [4_294_967_296]


def test_layers_with_a_window_cache_too(cache: Any) -> None:
    assert kept(cache(GPT_OSS, "--ctx", "1,100,131072")) == [73_728, 7_372_800, 4_836_556_800]
    assert kept(cache(GPT_OSS, "--ctx", "131072", "--set", "window=none")) == [9_663_676_416]


def test_five_window_layers_to_one_full_without_a_list(cache: Any) -> None:
    model = cache(GEMMA_3, "--ctx", "512,8192,131072")
    assert kept(model) == [71_303_168, 289_406_976, 2_805_989_376]
    layers = {g["kind"]: g for g in model["groups"]}
    assert (layers["full"]["layers"], layers["sliding"]["layers"]) == (5, 29)
    assert [a for a, _ in layers["full"]["layer_ranges"]] == [5, 11, 17, 23, 29]


@pytest.mark.parametrize(("config", "heads", "per_token", "total"), [
    (FALCON, 1, 8_192, 6_921_720_704),
    ({**FALCON, "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
      "new_decoder_architecture": True}, 8, 122_880, 41_303_293_952),
], ids=["one-head", "eight-heads"])
def test_falcons_kv_heads_follow_its_flags(cache: Any, params: Any, config: dict[str, Any], heads: int, per_token: int,
                                           total: int) -> None:
    model = cache(config, "--ctx", "2048")
    assert [g["heads"] for g in model["groups"]] == [heads]
    assert model["bytes_per_token"] == per_token
    assert params(config)["total"] == total


@pytest.mark.parametrize(("config", "per_token", "total"), [
    ({"model_type": "phi", "vocab_size": 51200, "hidden_size": 2560, "intermediate_size": 10240,
      "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None, "partial_rotary_factor": 0.4,
      "max_position_embeddings": 2048, "tie_word_embeddings": False}, 327_680, 2_779_683_840),
    (LLAMA_2, 524_288, 6_738_415_616),
], ids=["null", "absent"])
def test_no_kv_heads_means_one_for_each_query_head(cache: Any, params: Any, config: dict[str, Any], per_token: int,
                                                   total: int) -> None:
    model = cache(config, "--ctx", "2048", "--dtype", "fp16")
    assert [g["heads"] for g in model["groups"]] == [32]
    assert model["bytes_per_token"] == per_token
    assert params(config)["total"] == total


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 282_214_825_984), ("fp16", 141_107_412_992), (
    "bf16", 141_107_412_992), ("int8", 70_553_706_496), ("int4", 35_276_853_248)])
def test_the_dtype_asked_for_is_applied_to_the_count_once(cli: Any, folder: Any, dtype: str, size: int) -> None:
    path = folder({**LLAMA_3, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                   "num_attention_heads": 64})
    model = cli("params", path, "--dtype", dtype, "--json").model
    assert (model["total"], model["weights_bytes"]) == (70_553_706_496, size)
    if dtype == "fp16":
        assert "(141.11 GB, 131.42 GiB)" in cli("params", path, "--dtype", dtype).out


def test_gb_and_gib_are_labelled_rightly(cli: Any, folder: Any) -> None:
    for format in ("plain", "table", "md"):
        got = cli("params", folder(LLAMA_3), "--format", format, env={"COLUMNS": "200"}).out
        assert "16,060,522,496 B (16.06 GB, 14.96 GiB)" in got


def test_more_devices_than_kv_heads_copy_heads(cache: Any) -> None:
    assert [cache(LLAMA_3, "--tp", tp)["bytes_per_token"] for tp in ("1", "4", "8", "16")] == [
        131_072, 32_768, 16_384, 16_384]


# ---- context


YARN = {**QWEN_3, "model_type": "qwen2", "head_dim": None, "max_position_embeddings": 32768,
        "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 64,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
LONG = {"type": "su", "short_factor": [1 + i / 20 for i in range(16)], "long_factor": [1 + i / 2 for i in range(16)]}
LLAMA_3_BANDS = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 8192}
CONTEXTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "yarn-length-that-holds-its-factor": (DEEPSEEK, 4096, 163_840),
    "yarn-length-without-its-factor": (YARN, 32_768, 131_072),
    "llama3-bands-change-no-length": ({**LLAMA_3, "max_position_embeddings": 131072, "rope_scaling": LLAMA_3_BANDS},
                                      8192, 131_072),
    "type-is-rope-type": ({**LLAMA_2, "rope_scaling": {"type": "linear", "factor": 4.0}}, 4096, 16_384),
    "rope-parameters-block": ({**{k: v for k, v in LLAMA_3.items() if k not in ("rope_theta", "torch_dtype")},
                               "max_position_embeddings": 131072, "dtype": "bfloat16",
                               "rope_parameters": {**LLAMA_3_BANDS, "factor": 8.0, "rope_theta": 500000.0}},
                              8192, 131_072),
    "two-ropes-by-layer-type": (GEMMA_3, 131_072, 131_072),
    "longrope-under-its-old-name": ({**LLAMA_2, "model_type": "phi3", "vocab_size": 64, "hidden_size": 64,
                                     "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
                                     "pad_token_id": 0, "max_position_embeddings": 131072,
                                     "original_max_position_embeddings": 4096, "rope_scaling": LONG}, 4096, 131_072),
    "a-window-that-is-off": ({**QWEN_3, "max_position_embeddings": 262144, "use_sliding_window": False,
                              "sliding_window": 4096, "max_window_layers": 36}, 262_144, 262_144),
    "a-window-is-not-the-context": ({**QWEN_3, "max_position_embeddings": 262144, "use_sliding_window": True,
                                     "sliding_window": 4096, "max_window_layers": 28}, 262_144, 262_144),
    "a-default-block-scales-nothing": ({**LLAMA_2, "max_position_embeddings": 202752,
                                        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
                                       202_752, 202_752),
}


@pytest.mark.parametrize("case", CONTEXTS)
def test_context(cache: Any, case: str) -> None:
    config, trained, usable = CONTEXTS[case]
    model = cache(config)
    assert (model["trained_context"], model["usable_context"]) == (trained, usable)
    assert [at["ctx"] for at in model["at"]] == [usable]


def test_the_window_is_at_the_right_end_of_the_stack(cache: Any) -> None:
    off = cache(CONTEXTS["a-window-that-is-off"][0], "--ctx", "131072", "--dtype", "bf16")
    assert [g["kind"] for g in off["groups"]] == ["full"]
    assert kept(off) == [19_327_352_832]
    on = cache(CONTEXTS["a-window-is-not-the-context"][0], "--ctx", "131072", "--dtype", "bf16")
    assert [(g["kind"], g["layer_ranges"]) for g in on["groups"]] == [("full", [[0, 27]]), ("sliding", [[28, 35]])]
    assert kept(on) == [15_166_603_264]


def test_a_config_in_the_new_words_costs_the_same(params: Any) -> None:
    model = params(CONTEXTS["rope-parameters-block"][0])
    assert (model["dtype"], model["weights_bytes"]) == ("bfloat16", 16_060_522_496)


# ---- files and surroundings


def test_a_byte_order_mark_is_read_over(cli: Any, folder: Any, sharded: Any, tiny: Any) -> None:
    path = folder(b"\xef\xbb\xbf" + json.dumps(tiny.config).encode())
    assert cli("params", path, "-q").out == f"{tiny.total}\n"
    path = sharded(total_size=2 * tiny.total)
    (path / INDEX).write_bytes(b"\xef\xbb\xbf" + (path / INDEX).read_bytes())
    assert cli("params", path, "--weights", "--json").model["files"]["agrees"] is True


def test_a_narrow_locale_reads_utf_8(run: Any, folder: Any, tiny: Any) -> None:
    text = json.dumps({**tiny.config, "comment": "\u00fcn\u00efc\u00f6d\u00e9 \u201cx\u201d"}, ensure_ascii=False)
    env = {"LC_ALL": "C", "LANG": None, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert run("params", folder(text.encode()), "-q", env=env).out == f"{tiny.total}\n"


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_a_table_into_a_narrow_code_page(run: Any, folder: Any, tmp_path: Path, encoding: str) -> None:
    path = folder(GPT2)
    for args, number in ((("params", path, "--dtype", "fp32"), b"124,439,808"),
                         (("kv-cache", path, "--dtype", "fp32"), b"75,497,472")):
        with (tmp_path / "out").open("wb") as f:
            got = run(*args, "--format", "table", env={"PYTHONIOENCODING": encoding, "LANG": "C"}, stdout=f)
        assert (got.code, got.err) == (0, "")
        assert number in (tmp_path / "out").read_bytes()


def refused(got: Any, code: str, *parts: str) -> None:
    assert (got.code, got.out) == (3, "")
    assert got.err.startswith(f"error[{code}]: ")
    assert "Traceback" not in got.err
    for part in parts:
        assert part in got.err


def test_a_pointer_to_weights_is_named_as_one(cli: Any, sharded: Any) -> None:
    path = sharded()
    (path / "model-00002-of-00002.safetensors").write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0123456789abcdef' * 4}\nsize 4976698672\n")
    refused(cli("params", path, "--weights"), "lfs-pointer", "model-00002-of-00002.safetensors", "git lfs pull")


def test_dot_underscore_twins_are_no_weights(cli: Any, folder: Any, tiny: Any) -> None:
    path = folder(tensors=tiny.tensors(tiny.config))
    for name in ("._model.safetensors", "._config.json", "._pytorch_model.bin", ".DS_Store"):
        (path / name).write_bytes(bytes.fromhex("0005160700020000") + bytes(4088))
    files = cli("params", path, "--weights", "--json").model["files"]
    assert (files["elements"], files["agrees"]) == (tiny.total, True)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}], ids=["absent", "empty", "format"])
def test_safetensors_need_no_metadata(cli: Any, folder: Any, tiny: Any, metadata: Any) -> None:
    path = folder()
    tiny.write(path / "model.safetensors", tiny.tensors(tiny.config), metadata)
    assert cli("params", path, "--weights", "--json").model["files"]["elements"] == tiny.total


def test_a_link_to_nothing_says_where_it_points(cli: Any, folder: Any, tiny: Any) -> None:
    path = folder()
    (path / "model.safetensors").symlink_to("../../blobs/gone")
    assert cli("params", path, "-q").out == f"{tiny.total}\n"
    refused(cli("params", path, "--weights"), "dangling-link", "../../blobs/gone")


def test_a_stale_index_beside_complete_shards(cli: Any, sharded: Any, tiny: Any) -> None:
    names = sorted(tiny.tensors(tiny.config))
    path = sharded(index={k: f"model-0000{1 + i % 4}-of-00004.safetensors" for i, k in enumerate(names)})
    got = cli("params", path, "--weights", "--json")
    assert (got.model["files"]["elements"], got.model["files"]["agrees"]) == (tiny.total, True)
    (said,) = [w["message"] for w in got.json()["warnings"] if w["code"] == "index-stale"]
    assert "model-00001-of-00004.safetensors" in said
    assert "model-00001-of-00002.safetensors" in said


def test_a_missing_shard_is_named(cli: Any, sharded: Any, tiny: Any) -> None:
    path = sharded(3)
    (path / "model-00002-of-00003.safetensors").unlink()
    assert cli("params", path, "-q").out == f"{tiny.total}\n"
    refused(cli("params", path, "--weights"), "shard-missing", "model-00002-of-00003.safetensors")


def test_sixteen_gigabytes_are_counted_by_their_header(folder: Any, tiny: Any, tmp_path: Path,
                                                       environment: Any) -> None:
    path = folder(LLAMA_3, tensors=tiny.tensors(LLAMA_3, "BF16"))
    assert (path / "model.safetensors").stat().st_size > 16_060_522_496
    # VmHWM begins anew with the program; ru_maxrss would still hold what pytest had in memory when it forked
    code = ("import re, runpy, sys; sys.argv = ['llamactl', *sys.argv[1:]]\n"
            "try: runpy.run_module('llamactl', run_name='__main__')\n"
            "finally: print(int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) >> 10,"
            " file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", code, "params", str(path), "--weights", "--json"], text=True,
                          env=environment(tmp_path), capture_output=True, check=True, timeout=180)
    files = json.loads(done.stdout)["result"]["models"][0]["files"]
    assert (files["elements"], files["weights_bytes"], files["agrees"]) == (8_030_261_248, 16_060_522_496, True)
    assert int(done.stderr) < 200  # MiB; its CPU time is held as a ratio, in tests/cli/test_inspect.py


def test_what_is_a_path_and_what_is_a_hub_id(cli: Any, run: Any, folder: Any) -> None:
    for ref in ("C:\\models\\Llama-3", "./does-not-exist", "/abs/none"):
        got = cli("params", ref)
        assert got.code == 4
        assert got.err.startswith(f"error[not-found]: {ref}: no such file or folder\n")
    got = run("params", "acme/tiny-llama")
    assert got.err.startswith("error[hub-offline]: acme/tiny-llama: ")
    odd = folder(GPT2, "dir with spaces & \u00fcml\u00e4ut")
    assert cli("params", odd, "-q").out == "124439808\n"
    assert cli("params", odd, "--json").json()["model"]["id"] == odd.name


def test_an_id_without_a_network_is_one_short_message(run: Any) -> None:
    got = run("params", "meta-llama/Llama-3.1-8B", "-q", env={"HF_TOKEN": "hf_secretsecret"})
    assert (got.code, got.out, got.err) == (0, "8030261248\n", "")
    for ref in ("meta-llama/Llama-3.1-8B@main", "acme/none"):
        got = run("params", ref, env={"HF_TOKEN": "hf_secretsecret"})
        assert (got.code, got.out) == (4, "")
        assert len(got.err.splitlines()) == 2
        assert "offline" in got.err
        assert "local folder" in got.err
        assert "secret" not in got.err


# ---- the real inputs, where they are


def claims(right: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(config file, what is right of it): a case has one config, or says it for each."""
    per_file = {re.sub(r"\s.*", "", k): v for k, v in right.items() if k.startswith("config") and isinstance(v, dict)}
    if per_file:
        yield from per_file.items()
    else:
        yield "config.json", right


def said_of(cli: Any, path: Path, right: dict[str, Any]) -> dict[str, Any]:
    """What llamactl says of each claim that it has a word for."""
    model = cli("params", path, "--json").model
    feed_forward = model["components"]["feed_forward"]
    found = {"total": model["total"], "ffn": feed_forward["total"], "ffn_share": model["ffn_share_model"],
             "tied": model["tied"], "router": feed_forward["router"], "weight_bytes": model["weights_bytes"],
             "routed_expert_params": feed_forward["routed_experts"],
             "active_per_token": (model["active"] or {}).get("all"), "bias_params": model["biases"],
             "attention": model["components"]["attention"]["total"]}
    for key in right:
        if key in ("fp32", "fp16", "bf16", "int8", "int4"):
            found[key] = cli("params", path, "--dtype", key, "--json").model["weights_bytes"]
        match = re.fullmatch(r"(?:tokens|kv)_(\d+)|batch(\d+)_ctx(\d+)|tp(\d+)", key)
        dtype = () if "torch_dtype" in path.read_text() or '"dtype"' in path.read_text() else ("--dtype", "fp16")
        if match or key in ("bytes_per_token", "kv_heads", "context", "trained", "original"):
            ctx = (match and (match[1] or match[3])) or "128"
            flags = ("--batch", (match and match[2]) or "1", "--tp", (match and match[4]) or "1")
            one = cli("kv-cache", path, "--ctx", ctx, *flags, *dtype, "--json").model
            found[key] = {"bytes_per_token": one["bytes_per_token"], "kv_heads": one["groups"][0]["heads"],
                          "context": one["usable_context"], "trained": one["trained_context"],
                          "original": one["trained_context"]}.get(
                key, one["bytes_per_token"] if match and match[4] else kept(one)[0])
    return found


def test_the_shared_cases(cli: Any, shared: Path) -> None:
    """Totals, caches and contexts of every case that has a config file of its own."""
    checked = 0
    for case in sorted((shared / "cases").iterdir()):
        truth = json.loads((case / "expected.json").read_text(encoding="utf-8"))
        if truth["kind"] not in "abc" or not isinstance(truth["right"], dict):
            continue
        for file, right in claims(truth["right"]):
            if not (case / file).is_file():
                continue
            if cli("params", case / file).err.startswith("error[config-model-type]"):
                continue  # a family that is not described is refused, never guessed
            said = said_of(cli, case / file, right)
            for key in right.keys() & said.keys():
                assert said[key] == pytest.approx(right[key], rel=1e-9), f"{case.name}/{file}: {key}"
                checked += 1
    assert checked > 50


@pytest.mark.slow
def test_the_shared_cases_that_make_their_files(cli: Any, shared: Path, tmp_path: Path, environment: Any) -> None:
    pytest.importorskip("torch")
    for name in ("05", "06", "11", "22", "66", "67", "70", "71", "74", "77"):
        (case,) = (shared / "cases").glob(f"{name}-*")
        right = json.loads((case / "expected.json").read_text(encoding="utf-8"))["right"]
        out = tmp_path / name
        subprocess.run([sys.executable, case / "make.py", out], env=environment(tmp_path, {"HF_HUB_OFFLINE": "1"}),
                       check=True, timeout=300, capture_output=True)
        for sub in ("absent", "empty") if name == "71" else ("",):
            want = right[f"{sub}/"] if sub else right
            model = cli("params", out / sub, "--weights", "--json").model
            assert model["total"] == want["total"]
            size = want.get("weight_bytes", model["files"]["weights_bytes"])
            assert model["files"]["weights_bytes"] == size
        shutil.rmtree(out)
