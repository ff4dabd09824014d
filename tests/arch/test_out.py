"""Configs that are written: read back they are the model that was asked for, here and in transformers."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llamactl import arch
from llamactl.arch import _out
from llamactl.arch._gguf import config_of_gguf, describe_gguf
from llamactl.arch._ggufrope import stretched
from llamactl.arch._meta import from_params
from llamactl.arch._nanogpt import from_model_args
from llamactl.arch._out import changed_config, hf_class, hf_config, hf_model
from llamactl.arch._outmeta import meta_params, nanogpt_args
from llamactl.checkpoint.gguf import read_header
from llamactl.errors import InputRefused, LlamactlError, UsageError
from llamactl.spec import changes
from llamactl.spec.frequencies import frequencies, plain
from llamactl.spec.model import Model
from llamactl.spec.parts import Attention, ffn_width

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
GOLDENS = sorted(p.name for p in GOLDEN.iterdir() if (p / "config.json").exists())
Config = dict[str, Any]


def golden(name: str, **changes: Any) -> Config:
    return {**json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8")), **changes}


def model_of(config: Config) -> Model:
    return arch.describe(config, "c")


def flat(config: Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def altered(before: Config, after: Config) -> set[str]:
    a, b = dict(flat(before)), dict(flat(after))
    return {k for k in a.keys() | b.keys() if (k in a, a.get(k)) != (k in b, b.get(k))}


def refused(call: Any, *args: Any, **how: Any) -> LlamactlError:
    with pytest.raises(LlamactlError) as e:
        call(*args, **how)
    assert "\n" not in e.value.message
    return e.value


def cannot(call: Any, *args: Any, **how: Any) -> str:
    error = refused(call, *args, **how)
    assert (type(error), error.code) == (InputRefused, "layout-cannot-say")
    assert error.path
    assert error.help
    return error.message


def words(model: Model) -> Model:
    """Without the words that explain."""
    return dataclasses.replace(model, notes=(), tied_why="", context=dataclasses.replace(model.context, why=""))


# --- changed_config

NO_KV_WORD = {"bloom", "gpt2", "gpt_neox", "gpt_neox-sequential", "gptj", "mpt", "opt", "opt-late-norms"}
# Layers beside the decoder that are not counted would change with it, and nothing converts those.
BESIDE = {"glm4_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_next-bias", "gemma3n", "gemma3n_text",
          "gemma4-per-layer", "gemma4_text"}


@pytest.mark.parametrize("name", GOLDENS)
def test_one_fact_changes_and_nothing_else(name: str) -> None:
    config = golden(name)
    model, before = model_of(config), json.dumps(config)
    facts: dict[str, tuple[Any, Model, set[str]]] = {
        "dtype": ("float16", dataclasses.replace(model, dtype="fp16"), {"dtype"}),
        "vocab": (101, changes.set_vocab(model, 101), {"vocab_size"}),
        "tied": (not model.tied, changes.set_tie(model, not model.tied), {"tie_word_embeddings", "tie_embedding"}),
    }
    attn = next((x.attn for x in model.layers if isinstance(x.attn, Attention)), None)
    if attn and name not in NO_KV_WORD | {"gemma4"}:  # Gemma 4's layers have two such words
        n = 1 if attn.n_kv_heads > 1 else attn.n_heads
        facts["n_kv_heads"] = n, changes.set_kv_heads(model, n), {
            "num_key_value_heads", "num_kv_heads", "multi_query", "kv_n_heads"}
    if name in BESIDE:
        assert "not_counted[0].params" in cannot(changed_config, config, model, n_kv_heads=facts.pop("n_kv_heads")[0])
    if name in ("dbrx", "mllama"):
        for key in ("tied", *(("vocab",) if name == "mllama" else ())):
            cannot(changed_config, config, model, **{key: facts.pop(key)[0]})
    for fact, (value, want, keys) in facts.items():
        out = changed_config(config, model, **{fact: value})
        assert words(model_of(out)) == words(want)
        found = altered(config, out)
        assert found
        assert {key.rpartition(".")[2] for key in found} <= keys
        assert [k for k in out if k in config] == list(config)
    assert json.dumps(config) == before


@pytest.mark.parametrize("name", sorted(NO_KV_WORD))
def test_a_config_without_a_word_for_kv_heads(name: str) -> None:
    config = golden(name)
    message = cannot(changed_config, config, model_of(config), n_kv_heads=1)
    assert f"of {model_of(config).family} cannot say this model: layers[0].attn.n_kv_heads is 1" in message
    heads = model_of(config).layers[0].attn
    assert isinstance(heads, Attention)
    assert changed_config(config, model_of(config), n_kv_heads=heads.n_heads) == config


@pytest.mark.parametrize(("name", "n"), [("llama", 4), ("deepseek_v2", 1)])
def test_kv_heads_that_mean_nothing(name: str, n: int) -> None:
    config = golden(name)
    assert isinstance(refused(changed_config, config, model_of(config), n_kv_heads=n), UsageError)


def test_all_facts_at_once_and_unknown_keys_kept() -> None:
    config = golden("llama", strange={"a": [1]}, torch_dtype="float32", tie_word_embeddings=False, _comment=None)
    out = changed_config(config, model_of(config), n_kv_heads=3, vocab=128, tied=True, dtype="bfloat16")
    assert out == {**config, "num_key_value_heads": 3, "vocab_size": 128, "tie_word_embeddings": True,
                   "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert list(out) == list(config)
    assert out["strange"] is not config["strange"]


def test_what_is_so_already_is_left_alone() -> None:
    config = golden("gpt2")
    assert changed_config(config, model_of(config)) == config
    assert changed_config(config, model_of(config), vocab=97, tied=True, dtype="float32") == config


def test_dtypes_by_their_config_words() -> None:
    config = golden("gpt2")
    assert changed_config(config, model_of(config), dtype="bf16")["dtype"] == "bfloat16"
    assert hf_config(config, model_of(config), dtype="fp16")["torch_dtype"] == "float16"
    for word in ("q8_0", "half-ish"):
        for write in (changed_config, hf_config):
            assert isinstance(refused(write, config, model_of(config), dtype=word), UsageError)


def test_a_silent_config_gets_the_word() -> None:
    config = golden("llama", num_key_value_heads=None)
    config.pop("dtype")
    config.pop("tie_word_embeddings", None)
    out = changed_config(config, model_of(config), n_kv_heads=2, tied=True, dtype="float16")
    assert out == {**config, "num_key_value_heads": 2, "tie_word_embeddings": True, "torch_dtype": "float16"}


def test_nested_configs_are_changed_where_they_are_read() -> None:
    config = golden("llava")
    config |= {"vocab_size": 97, "torch_dtype": "float32"}
    config["text_config"]["torch_dtype"] = config["vision_config"]["torch_dtype"] = "float32"
    config["vision_config"]["vocab_size"] = 97
    out = changed_config(config, model_of(config), vocab=128, dtype="bfloat16")
    assert altered(config, out) == {"vocab_size", "text_config.vocab_size", "torch_dtype", "dtype",
                                    "text_config.torch_dtype", "vision_config.torch_dtype"}
    config["vocab_size"] = 50
    assert changed_config(config, model_of(config), vocab=128)["vocab_size"] == 50
    silent = golden("gemma3")  # its published files leave the vocabulary to the family's class
    del silent["text_config"]["vocab_size"]
    out = changed_config(silent, model_of(silent), vocab=262272)
    assert altered(silent, out) == {"text_config.vocab_size"}


def test_a_model_that_the_config_does_not_describe() -> None:
    config = golden("llama")
    message = cannot(changed_config, config, changes.set_theta(model_of(config), 1e6), vocab=128)
    assert message.endswith("layers[0].attn.rope.theta is 1000000.0 and would be read as 500000.0")
    told = dataclasses.replace(model_of(config), dtype="bf16", stored_bytes=1, stored_as="F16", notes=(("a", "b"),))
    assert changed_config(config, told, dtype="float32") == config  # what a GGUF file adds is not the config's to say


# --- hf_config, from GGUF


@pytest.fixture(scope="module")
def gguf_files() -> Any:
    """The GGUF files of test_gguf_models.py: made by the gguf package, one of each golden that llama.cpp can build."""
    pytest.importorskip("gguf")
    path = Path(__file__).with_name("test_gguf_models.py")
    spec = importlib.util.spec_from_file_location("gguf_files_of_goldens", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# transformers' own default for these is past the vocabulary of 97, and its networks then refuse to be built
NO_PAD = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
IN_GGUF = ["deepseek_v2", "deepseek_v3", "falcon", "falcon-new", "falcon-one-norm", "gemma", "gemma2", "gemma3",
           "gemma3_text", "gpt2", "gpt_neox", "gpt_neox-sequential", "gpt_oss", "llama", "llama-bias-tied-llama3",
           "llama4_text", "mistral", "mixtral", "olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3",
           "qwen3_moe", "smollm3", "stablelm", "stablelm-parallel", "starcoder2"]
# Numbers that no family has for a default, so that a word which transformers does not read is seen. Not where GPT-2's
# position table ends; not OLMo 3's base, which transformers 5.24 takes for the full layers only.
ODD = {"rope.freq_base": 12345.0, "attention.layer_norm_rms_epsilon": 3e-5, "attention.layer_norm_epsilon": 3e-5,
       "context_length": 640}
AS_IT_IS = {"gpt2": "context_length", "olmo3": "rope.freq_base"}


@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf_words_as_transformers_reads_them(gguf_files: Any, make_golden: ModuleType, tmp_path: Path, name: str
                                               ) -> None:
    header = read_header(gguf_files.make(name, tmp_path / "m.gguf"))
    key = str(header.metadata["general.architecture"])
    odd = {f"{key}.{k}": v for k, v in ODD.items() if k != AS_IT_IS.get(name)}
    said = {k: odd.pop(k, v) for k, v in header.metadata.items()}
    said |= {k: v for k, v in odd.items() if "freq_base" in k}  # converters leave it out where it is the default
    header = dataclasses.replace(header, metadata=said)
    model, config = describe_gguf(header, "m.gguf"), config_of_gguf(header, "m.gguf")
    out = hf_config(config, model, dtype="bfloat16", extra=NO_PAD)
    assert _out.difference(_out._plain(model), _out._plain(model_of(out))) is None
    assert model_of(out).dtype == "bf16"
    assert out["architectures"] == [hf_class(model)]
    (tmp_path / "config.json").write_text(json.dumps(out), encoding="utf-8")
    read = make_golden.AutoConfig.from_pretrained(tmp_path)
    assert _out.difference(_out._plain(model), _out._plain(model_of(read.to_dict()))) is None
    with make_golden.torch.device("meta"):
        network = make_golden.AutoModelForCausalLM.from_config(read)
    assert type(network).__name__ == hf_class(model)
    assert sum(p.numel() for p in network.parameters()) == model.total()


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(("name", "built"), [
    ("llama", {}), ("gpt2", {}), ("qwen2", {"use_sliding_window": False}), ("gemma", {}), ("gemma3_text", {}),
    ("llama-bias-tied-llama3", {"rope_scaling": LLAMA3, "max_position_embeddings": 131072}), ("gpt_neox", {})])
def test_transformers_loads_it_and_computes_the_same(gguf_files: Any, make_golden: ModuleType, tmp_path: Path,
                                                     name: str, built: Config) -> None:
    """The weights of a golden under the config that its GGUF file comes out with."""
    source, _ = gguf_files.source(name)
    (tmp_path / "config.json").write_text(json.dumps(source | built), encoding="utf-8")
    torch = make_golden.torch
    want = make_golden.build(tmp_path)
    want.save_pretrained(tmp_path)
    header = read_header(gguf_files.make(name, tmp_path / "m.gguf"))
    if "rope_scaling" in built:
        header = dataclasses.replace(header, metadata=header.metadata | {"llama.context_length": 131072})
    model = describe_gguf(header, "m.gguf")
    if "rope_scaling" in built:
        rope = model_of(source | built).layers[0].attn.rope  # type: ignore[union-attr]
        assert rope is not None
        model = stretched(model, [a / b for a, b in zip(plain(rope), frequencies(rope)[0], strict=True)], "m.gguf")
    out = hf_config(config_of_gguf(header, "m.gguf"), model, dtype="float32", extra=NO_PAD)
    assert out.get("rope_scaling") == built.get("rope_scaling")
    (tmp_path / "config.json").write_text(json.dumps(out), encoding="utf-8")
    got, info = make_golden.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True,
                                                                 attn_implementation="eager")
    assert not any(info.values())
    ids = torch.randint(1, 96, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(got(ids).logits, want(ids).logits)


def test_gguf_in_a_familys_own_words(gguf_files: Any, tmp_path: Path) -> None:
    """transformers also reads GPT-2's sizes under the common words, but others who read config.json do not."""
    header = read_header(gguf_files.make("gpt2", tmp_path / "m.gguf"))
    out = hf_config(config_of_gguf(header, "m.gguf"), describe_gguf(header, "m.gguf"), dtype="float16")
    assert out == {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 3, "n_head": 6, "n_embd": 48,
        "n_positions": 64, "n_inner": 192, "vocab_size": 97, "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "torch_dtype": "float16"}


def test_a_null_that_means_something_stays(gguf_files: Any, tmp_path: Path) -> None:
    """Gemma 3 without a window has full layers only; without the key it would have its family's 4096."""
    header = read_header(gguf_files.make("gemma3_text", tmp_path / "m.gguf"))
    header = dataclasses.replace(header, metadata={k: v for k, v in header.metadata.items() if "sliding" not in k})
    model = describe_gguf(header, "m.gguf")
    out = hf_config(config_of_gguf(header, "m.gguf"), model)
    assert [k for k, v in out.items() if v is None] == ["sliding_window"]
    assert all(isinstance(x.attn, Attention) and x.attn.window is None for x in model_of(out).layers)


def test_the_config_of_a_file_is_what_its_description_was_made_from(gguf_files: Any, tmp_path: Path) -> None:
    header = read_header(gguf_files.make("llama", tmp_path / "m.gguf"))
    config = config_of_gguf(header, "m.gguf")
    assert config["model_type"] == "llama"
    assert model_of(config).layers == describe_gguf(header, "m.gguf").layers
    nameless = {k: v for k, v in header.metadata.items() if k != "general.architecture"}
    error = refused(config_of_gguf, dataclasses.replace(header, metadata=nameless), "m.gguf")
    assert error.code == "gguf-architecture"


# --- hf_config, from params.json and nanoGPT

LLAMA3_8B = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "multiple_of": 1024,
             "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 500000.0}
ARGS = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 48, "bias": True, "vocab_size": 104, "dropout": 0.0}


def test_params_json_in_transformers_words() -> None:
    config = from_params({**LLAMA3_8B, "use_scaled_rope": True, "rope_scaling_factor": 32}, "params.json")
    out = hf_config(config, model_of(config), dtype="float16", extra={"bos_token_id": 128000, "eos_token_id": [1, 2]})
    assert out == {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "intermediate_size": 14336,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": LLAMA3, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "torch_dtype": "float16",
        "bos_token_id": 128000, "eos_token_id": [1, 2]}
    with_length = hf_config(config, model_of(config), extra={"max_position_embeddings": 131072})
    assert model_of(with_length).context.usable == 131072  # a model that names no length takes one
    assert with_length["torch_dtype"] == "bfloat16"


def test_nanogpt_in_transformers_words() -> None:
    config = from_model_args(ARGS, "ckpt.pt")
    assert hf_config(config, model_of(config), extra={"bos_token_id": None}) == {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 32,
        "n_positions": 48, "vocab_size": 104, "activation_function": "gelu", "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True, "bos_token_id": None}


def test_the_tie_is_written_where_the_config_is_silent() -> None:
    config = golden("gpt2")
    assert "tie_word_embeddings" not in config
    assert hf_config(config, model_of(config))["tie_word_embeddings"] is True


def test_transformers_gpt2_always_has_biases() -> None:
    config = from_model_args(ARGS | {"bias": False}, "ckpt.pt")
    assert "qkv_bias is False and would be read as True" in cannot(hf_config, config, model_of(config))
    with_biases = hf_model(model_of(config))
    out = hf_config(config, with_biases)
    assert "bias" not in out
    assert model_of(out).layers == with_biases.layers == model_of(from_model_args(ARGS, "ckpt.pt")).layers
    assert model_of(out).norm == with_biases.norm
    llama = model_of(golden("llama"))
    assert hf_model(llama) is llama


def test_a_model_that_the_words_do_not_describe() -> None:
    config = from_params(LLAMA3_8B, "params.json")
    message = cannot(hf_config, config, changes.set_window(model_of(config), 4096))
    assert message.endswith("layers[0].attn.window is 4096 and would be read as None")
    assert "embed.vocab" in cannot(hf_config, config, model_of(config), extra={"vocab_size": 7})
    longer = changes.set_context(model_of(config), 4096)
    assert "context.usable is 4096 and would be read as None" in cannot(hf_config, config, longer)
    assert "context.usable is 4096" in cannot(hf_config, config | {"max_position_embeddings": 2048}, longer)
    assert "hidden_size is null" in cannot(hf_config, config, model_of(config), extra={"hidden_size": None})


# --- params.json


@pytest.mark.parametrize(("params", "ffn"), [
    ({"dim": 4096, "n_heads": 32, "multiple_of": 256}, 11008),
    ({"dim": 5120, "n_heads": 40, "multiple_of": 256}, 13824),
    ({"dim": 8192, "n_heads": 64, "n_kv_heads": 8, "multiple_of": 4096, "ffn_dim_multiplier": 1.3}, 28672),
    ({"dim": 4096, "n_heads": 32, "n_kv_heads": 8, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}, 14336),
    ({"dim": 2048, "n_heads": 32, "n_kv_heads": 8, "multiple_of": 256, "ffn_dim_multiplier": 1.5}, 8192),
    ({"dim": 16384, "n_heads": 128, "n_kv_heads": 8, "multiple_of": 4096, "ffn_dim_multiplier": 1.2}, 53248),
])
def test_the_published_models_there_and_back(params: Config, ffn: int) -> None:
    """params.json of Llama 1 to 3.2, whose vocabulary of -1 is the tokenizer's."""
    params |= {"n_layers": 3, "norm_eps": 1e-5, "vocab_size": -1}
    assert refused(from_params, params, "p").code == "config-missing"
    config = from_params(params, "p", 32000)
    assert (config["intermediate_size"], config["vocab_size"]) == (ffn, 32000)
    assert params["vocab_size"] == -1
    out, notes = meta_params(model_of(config))
    assert notes == ()
    assert from_params(out, "p") == config
    assert out.keys() <= {"dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier",
                          "norm_eps", "rope_theta"}  # what Meta's own ModelArgs know
    assert len(str(out.get("ffn_dim_multiplier", 1.5))) == 3


def test_rows_stand_in_for_a_missing_vocabulary_only() -> None:
    assert from_params(LLAMA3_8B, "p", 5)["vocab_size"] == 128256
    silent = {k: v for k, v in LLAMA3_8B.items() if k != "vocab_size"}
    assert from_params(silent, "p", 5)["vocab_size"] == 5
    assert refused(from_params, silent, "p").code == "config-missing"
    assert refused(from_params, {**LLAMA3_8B, "vocab_size": -1}, "p", 0).code == "config-range"


def test_every_width_of_a_feed_forward_can_be_said() -> None:
    """Widths that no rule of thumb makes: odd, below the width itself, and huge. At 1,000 times the width it ends."""
    def sized(hidden: int, ffn: int) -> Model:
        return model_of(golden("llama", hidden_size=hidden, intermediate_size=ffn, head_dim=2))

    usual = product((48, 576, 4096, 16384), (1, 56, 57, 1536, 11007, 14336, 1 << 17))
    for hidden, ffn in (*usual, (32, 119), (34, 207)):  # in these two the least multiplier falls short by a rounding
        out, _ = meta_params(sized(hidden, ffn))
        assert ffn_width(hidden, out["multiple_of"], out.get("ffn_dim_multiplier")) == ffn
        assert from_params(out, "p")["intermediate_size"] == ffn
    assert "no multiplier makes a feed-forward of 11,007" in cannot(meta_params, sized(2, 11007))


def test_keys_that_only_llamactl_knows() -> None:
    config = golden("llama", attention_bias=True, mlp_bias=True)
    out, notes = meta_params(model_of(config))
    strange = {"max_position_embeddings": 128, "head_dim": 12, "attention_bias": True, "mlp_bias": True}
    assert {k: v for k, v in out.items() if k in strange} == strange
    assert [code for code, _ in notes] == ["meta-keys"]
    assert all(f"{key}: " in notes[0][1] for key in strange)
    less, _ = meta_params(model_of(config), context=False)
    assert less == {k: v for k, v in out.items() if k != "max_position_embeddings"}
    assert from_params({**out, "max_seq_len": 128}, "p")["max_position_embeddings"] == 128
    assert refused(from_params, {**out, "max_seq_len": 64}, "p").code == "config-conflict"
    assert from_params({**less, "max_seq_len": 64}, "p")["max_position_embeddings"] == 64
    assert refused(from_params, {**out, "mlp_bias": 1}, "p").code == "config-type"


@pytest.mark.parametrize(("factor", "written"), [(8.0, {}), (32.0, {"rope_scaling_factor": 32.0})])
def test_scaled_rope(factor: float, written: Config) -> None:
    config = golden("llama", rope_scaling=LLAMA3 | {"factor": factor}, max_position_embeddings=131072)
    out, notes = meta_params(model_of(config))
    assert {k: v for k, v in out.items() if "scal" in k} == {"use_scaled_rope": True} | written
    assert model_of(from_params(out, "p")).context.usable == 131072
    assert ("rope_scaling_factor" in dict(notes)["meta-keys"]) == bool(written)


def test_a_tied_head_is_written_as_a_copy() -> None:
    out, notes = meta_params(model_of(golden("llama", tie_word_embeddings=True)))
    assert out == meta_params(model_of(golden("llama")))[0]
    assert "output.weight" in dict(notes)["meta-head"]


@pytest.mark.parametrize(("change", "said"), [
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}}, "its RoPE has rope_type llama3, low_freq_factor 2.0"),
    ({"rope_scaling": LLAMA3 | {"high_freq_factor": 2.0}}, "high_freq_factor 2.0"),
    ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 4096}}, "original_max_position_embeddings 4096"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type linear"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type yarn"),
    ({"rope_scaling": LLAMA3 | {"attention_factor": 2.0}}, "attention_factor is 2.0 and would be read as None"),
    ({"hidden_act": "gelu"}, "layers[0].mlp.activation is 'gelu' and would be read as 'silu'"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization is 'fp8' and would be read as None"),
])
def test_what_params_json_cannot_say(change: Config, said: str) -> None:
    assert said in cannot(meta_params, model_of(golden("llama", **change)))


def test_layers_that_differ() -> None:
    model = model_of(golden("llama"))
    odd = dataclasses.replace(model, layers=(*model.layers[:-1], dataclasses.replace(model.layers[-1], parallel=True)))
    assert "layers[2].parallel is True" in cannot(meta_params, odd)


@pytest.mark.parametrize(("write", "name"), [(meta_params, "mistral"), (nanogpt_args, "llama"), (meta_params, "gpt2")])
def test_a_family_without_the_layout(write: Any, name: str) -> None:
    assert refused(write, model_of(golden(name))).code == "layout-unknown"


# --- nanoGPT


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", ["gelu", "gelu_new"])
def test_nanogpt_there_and_back(form: str, bias: bool) -> None:
    config = golden("gpt2", activation_function=form, bias=bias, bos_token_id=96, eos_token_id=[95, 96], n_ctx=1,
                    n_positions=40)
    args, said, notes = nanogpt_args(model_of(config), config)
    assert args == {"n_layer": 3, "n_head": 6, "n_embd": 48, "block_size": 40, "bias": bias, "vocab_size": 97,
                    "dropout": 0.0}
    assert [code for code, _ in notes] == (["nanogpt-gelu"] if form == "gelu_new" else [])
    back = from_model_args(args, "ckpt.pt", said)
    assert _out.difference(_out._plain(model_of(config)), _out._plain(model_of(back))) is None
    assert (back["bos_token_id"], back["eos_token_id"], back["activation_function"]) == (96, [95, 96], form)
    assert from_model_args(args, "ckpt.pt")["activation_function"] == "gelu"
    if bias:
        written = hf_config(back, model_of(back))
        assert (written["eos_token_id"], written["activation_function"]) == ([95, 96], form)


@pytest.mark.parametrize(("change", "said"), [
    ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
    ({"tie_word_embeddings": False}, "a head of its own"),
    ({"activation_function": "relu"}, "activation is relu"),
    ({"n_inner": 100}, "layers[0].mlp.ffn is 100 and would be read as 192"),
])
def test_what_nanogpt_cannot_be(change: Config, said: str) -> None:
    assert said in cannot(nanogpt_args, model_of(golden("gpt2", **change)))


@pytest.mark.parametrize(("said", "code"), [
    ([], "config-type"), ({"activation_function": "gelv"}, "config-activation"),
    ({"activation_function": "relu"}, "config-unsupported"), ({"activation_function": 3}, "config-activation"),
    ({"layer_norm_epsilon": "x"}, "config-type"), ({"layer_norm_epsilon": -1.0}, "config-range"),
    ({"bos_token_id": "x"}, "config-type"), ({"bos_token_id": -1}, "config-range"),
    ({"bos_token_id": True}, "config-type"), ({"eos_token_id": [1, "x"]}, "config-type"),
    ({"eos_token_id": {}}, "config-type"),
])
def test_a_kept_config_is_checked(said: Any, code: str) -> None:
    error = refused(from_model_args, ARGS, "ckpt.pt", said)
    assert (error.code, error.path) == (code, "ckpt.pt")
    assert "hf_config" in error.message


def test_little_is_taken_from_a_kept_config() -> None:
    kept = {"n_layer": 9, "vocab_size": 9, "tie_word_embeddings": False, "architectures": ["X"], "bos_token_id": 50256,
            "eos_token_id": [103, 104], "layer_norm_epsilon": 1e-6}
    plain_one = from_model_args(ARGS, "ckpt.pt")
    out = from_model_args(ARGS, "ckpt.pt", deepcopy(kept))
    assert out == {**plain_one, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-6, "eos_token_id": [103]}
    assert from_model_args(ARGS, "ckpt.pt", {"activation_function": "gelu"}) == plain_one
