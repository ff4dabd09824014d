"""Config reading: every refusal with its code, every leniency with its note; through describe and by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llamactl import arch
from llamactl.errors import InputRefused
from llamactl.spec.config import ACTIVATIONS, LAYERS, WIDTH, Config, kind_of
from llamactl.spec.jsontext import read_json
from llamactl.spec.model import Model

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "badinputs"
GOOD: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
}
GONE = object()


def data(**changes: Any) -> dict[str, Any]:
    return {k: v for k, v in {**GOOD, **changes}.items() if v is not GONE}


def describe(**changes: Any) -> Model:
    return arch.describe(data(**changes), "dir/config.json")


def refusal(**changes: Any) -> InputRefused:
    """The refusal, one line that names the file, with the exit code of refused input."""
    with pytest.raises(InputRefused) as caught:
        describe(**changes)
    error = caught.value
    assert error.exit_code == 3
    assert error.path == "dir/config.json"
    assert error.line().startswith(f"error[{error.code}]: dir/config.json: ")
    assert error.line().isprintable()
    return error


# --- through describe


@pytest.mark.parametrize(("changes", "code", "words"), [
    ({"hidden_size": 10**18}, "config-range", "hidden_size is 1,000,000,000,000,000,000, outside 1..16,777,216"),
    ({"hidden_size": -16}, "config-range", "hidden_size is -16"),
    ({"hidden_size": 0}, "config-range", "hidden_size is 0"),
    ({"hidden_size": "16"}, "config-type", "hidden_size is '16', not an integer"),
    ({"hidden_size": 16.5}, "config-type", "16.5"),
    ({"hidden_size": float("nan")}, "config-type", "nan"),
    ({"hidden_size": float("inf")}, "config-type", "inf"),
    ({"hidden_size": [24]}, "config-type", "a list of 1"),
    ({"hidden_size": {"a": 1}}, "config-type", "an object"),
    ({"hidden_size": GONE}, "config-missing", "hidden_size is missing"),
    ({"hidden_size": None}, "config-type", "hidden_size is null"),
    ({"num_hidden_layers": True}, "config-type", "num_hidden_layers is true"),
    ({"num_hidden_layers": 10**9}, "config-range", "num_hidden_layers is 1,000,000,000"),
    ({"num_hidden_layers": 0}, "config-range", "num_hidden_layers is 0"),
    ({"num_hidden_layers": GONE}, "config-missing", "num_hidden_layers"),
    ({"num_attention_heads": 0}, "config-range", "num_attention_heads is 0"),
    ({"num_attention_heads": GONE}, "config-missing", "num_attention_heads"),
    ({"num_attention_heads": 1 << 20}, "config-range", "num_attention_heads"),
    ({"num_key_value_heads": 3}, "config-heads", "4 heads cannot share 3 KV heads"),
    ({"num_key_value_heads": 8}, "config-heads", "4 heads cannot share 8 KV heads"),
    ({"num_key_value_heads": 0}, "config-range", "num_key_value_heads is 0"),
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, "config-heads", "24 is not divisible by 5 heads"),
    ({"head_dim": -2}, "config-range", "head_dim is -2"),
    ({"intermediate_size": GONE}, "config-missing", "intermediate_size"),
    ({"vocab_size": GONE}, "config-missing", "vocab_size"),
    ({"vocab_size": 1 << 40}, "config-range", "vocab_size"),
    ({"rope_theta": float("inf")}, "config-type", "rope_theta is inf"),
    ({"rope_theta": "10000"}, "config-type", "rope_theta is '10000', not a number"),
    ({"rope_theta": True}, "config-type", "rope_theta is true"),
    ({"rope_theta": 0}, "config-range", "rope_theta is 0"),
    ({"rope_theta": -1.0}, "config-range", "rope_theta is -1"),
    ({"rms_norm_eps": "small"}, "config-type", "rms_norm_eps"),
    ({"rope_scaling": "linear"}, "config-type", "rope_scaling is 'linear', not an object"),
    ({"layer_types": ["full_attention"] * 3}, "config-layers", "layer_types has 3 entries for 2 layers"),
    ({"layer_types": ["full_attention", "sideways"]}, "config-layers", "'sideways'; known here: full_attention"),
    ({"layer_types": "full_attention"}, "config-type", "layer_types is 'full_attention', not a list"),
    ({"layer_types": [[], {}]}, "config-layers", "layer_types holds []"),
    ({"hidden_act": "geluu"}, "config-activation", "'geluu', not a known activation"),
    ({"hidden_act": ["silu"]}, "config-activation", "not a known activation"),
    ({"attention_bias": "false"}, "config-type", "attention_bias is 'false', not true or false"),
    ({"attention_bias": 1}, "config-type", "attention_bias is 1, not true or false"),
    ({"tie_word_embeddings": "no"}, "config-type", "tie_word_embeddings"),
    ({"torch_dtype": "float17"}, "config-dtype", "'float17', not a known dtype"),
    ({"torch_dtype": 16}, "config-dtype", "16, not a known dtype"),
    ({"dtype": "bfloat16"}, "config-conflict", "dtype is 'bfloat16', but torch_dtype is 'float32'"),
    ({"n_embd": 32}, "config-conflict", "hidden_size is 24, but n_embd is 32"),
    ({"quantization_config": "fp8"}, "config-type", "quantization_config is 'fp8', not an object"),
    ({"model_type": GONE}, "config-model-type", "no model_type"),
    ({"model_type": None}, "config-model-type", "no model_type"),
    ({"model_type": 7}, "config-type", "model_type is not a string"),
    ({"model_type": "lama"}, "config-model-type", "nearest known: llama"),
    ({"model_type": "\ud800x"}, "config-model-type", "nearest known"),
    ({"model_type": "llama\x1b]0;pwned\x07\x1b[2J"}, "config-model-type", "nearest known: llama"),
    ({"model_type": "llama\u202e\n\r"}, "config-model-type", "nearest known: llama"),
    ({"model_type": "x" * 5000}, "config-model-type", "xxx..."),
    ({"model_type": "evil", "auto_map": {"AutoConfig": "conf.Evil"}}, "config-remote-code", "never run"),
])
def test_refused(changes: dict[str, Any], code: str, words: str) -> None:
    error = refusal(**changes)
    assert error.code == code
    assert words in error.message


@pytest.mark.parametrize("top", [[1, 2], None, "llama", 3, True])
def test_top_level_must_be_an_object(top: Any) -> None:
    with pytest.raises(InputRefused) as caught:
        arch.describe(top, "config.json")
    assert caught.value.code == "config-type"
    assert "top level" in caught.value.message


def test_terminal_escapes_are_shown_escaped() -> None:
    line = refusal(model_type="llama\x1b]0;pwned\x07\x1b[2J\u202e\ud800").line()
    assert "\\x1b" in line
    assert "\\u202e" in line
    assert not any(c in line for c in "\x1b\x07\u202e\ud800")


def test_remote_code_wins_only_for_unknown_types() -> None:
    """A known type with its own code beside it is read as the known type; nothing of auto_map is looked at."""
    assert describe(auto_map={"AutoModelForCausalLM": "evil.py"}).total() == describe().total()


@pytest.mark.parametrize("changes", [
    {"foo": {"bar": [1]}, "_name_or_path": "[/red][link=file:///etc/passwd]x", "\u6a21\u578b": "\xfcn\xef"},
    {"num_key_value_heads": GONE}, {"num_key_value_heads": None}, {"head_dim": 8}, {"head_dim": None},
    {"torch_dtype": GONE, "dtype": "float32"}, {"torch_dtype": GONE}, {"torch_dtype": "auto"},
    {"dtype": "float32"}, {"n_embd": 24, "n_head": 4}, {"rope_scaling": None}, {"rope_scaling": {}},
    {"rope_parameters": None}, {"layer_types": ["full_attention"] * 2}, {"layer_types": None},
    {"architectures": ["LlamaForCausalLM"]}, {"architectures": None}, {"architectures": []}, {"architectures": "x"},
    {"quantization_config": None}, {"rms_norm_eps": GONE}, {"rope_theta": GONE}, {"rope_theta": 10000},
    {"tie_word_embeddings": GONE}, {"tie_word_embeddings": None}, {"hidden_act": GONE}, {"attention_bias": None},
])
def test_accepted_without_a_word(changes: dict[str, Any]) -> None:
    assert describe(**changes).notes == ()


def test_integral_float_is_taken_with_a_warning() -> None:
    model = describe(hidden_size=24.0, num_attention_heads=4.0)
    assert model.total() == describe().total()
    assert ("config-type", "hidden_size is written 24.0; read as 24") in model.notes
    assert ("config-type", "num_attention_heads is written 4.0; read as 4") in model.notes
    assert refusal(hidden_size=1e300).code == "config-range"


def test_kv_heads_absent_or_null_are_the_heads() -> None:
    for missing in (GONE, None):
        attn = describe(num_key_value_heads=missing).layers[0].attn
        assert (attn.n_heads, attn.n_kv_heads) == (4, 4)
    assert describe().layers[0].attn.n_kv_heads == 2


@pytest.mark.parametrize("family", ["mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gpt_oss", "smollm3",
                                    "starcoder2", "llama4_text"])
def test_kv_heads_that_a_family_always_names_are_not_guessed(family: str) -> None:
    """Its config class would fill in a number of its own, which the file cannot be judged by."""
    extra = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 8}
    with pytest.raises(InputRefused, match="num_key_value_heads is missing") as caught:
        arch.describe(data(model_type=family, num_key_value_heads=GONE, **extra), "config.json")
    assert caught.value.code == "config-missing"
    arch.describe(data(model_type=family, num_key_value_heads=2, **extra), "config.json")


def test_head_dim_absent_is_hidden_over_heads_and_recorded_so() -> None:
    model = describe(head_dim=GONE)
    assert model.layers[0].attn.head_dim == 6
    assert ("head_dim", 6, "= hidden_size / num_attention_heads") in model.reads
    assert describe(head_dim=8).layers[0].attn.head_dim == 8
    assert describe(hidden_size=26, head_dim=8).hidden == 26  # not divisible by 4 heads, and need not be


def test_reads_say_where_a_number_comes_from() -> None:
    reads = describe(rms_norm_eps=GONE, num_key_value_heads=GONE).reads
    assert ("hidden_size", 24, "config") in reads
    assert ("rms_norm_eps", 1e-6, "family default") in reads
    assert ("num_key_value_heads", 4, "= num_attention_heads") in reads


def test_tied_says_why() -> None:
    assert describe(tie_word_embeddings=True).tied_why == "tie_word_embeddings is true"
    absent = describe(tie_word_embeddings=GONE)
    assert (absent.tied, absent.tied_why) == (
        False, "tie_word_embeddings is absent; this family's default is untied")


@pytest.mark.parametrize(("word", "name"), [
    ("bfloat16", "bf16"), ("torch.float16", "fp16"), ("BF16", "bf16"), ("float8_e4m3fn", "fp8"), ("half", "fp16"),
])
def test_dtype_words(word: str, name: str) -> None:
    assert describe(torch_dtype=word).dtype == name
    assert describe(torch_dtype=GONE, dtype=word).dtype == name


def test_dtype_named_nowhere_stays_unknown() -> None:
    assert describe(torch_dtype=GONE).dtype is None
    assert describe(torch_dtype="auto").dtype is None


def test_quantization_changes_no_count() -> None:
    plain, quantised = describe(), describe(quantization_config={"quant_method": "fp8", "bits": 8})
    assert quantised.quantization == "fp8"
    assert quantised.total() == plain.total()
    assert describe(quantization_config={}).quantization == "unnamed"


def test_a_head_of_another_kind_is_warned_about() -> None:
    (note,) = describe(architectures=["LlamaForSequenceClassification"]).notes
    assert note[0] == "architecture-head"
    assert "LlamaForSequenceClassification" in note[1]


def test_nested_text_config() -> None:
    inner = {k: v for k, v in GOOD.items() if k not in ("model_type", "torch_dtype", "tie_word_embeddings")}
    inner |= {"model_type": "llama4_text", "intermediate_size_mlp": 56, "num_local_experts": 4,
              "num_experts_per_tok": 1}
    outer = {"model_type": "llama4", "torch_dtype": "bfloat16", "text_config": inner}
    model = arch.describe(outer, "config.json")
    assert (model.hidden, model.dtype, model.tied) == (24, "bf16", False)
    assert ("text_config.hidden_size", 24, "config") in model.reads
    for broken, code, words in (
        ({**inner, "hidden_size": "24"}, "config-type", "text_config.hidden_size is '24'"),
        ({k: v for k, v in inner.items() if k != "vocab_size"}, "config-missing", "text_config.vocab_size is missing"),
        ("llama", "config-type", "text_config is 'llama', not an object"),
        ([], "config-type", "text_config is a list of 0, not an object"),
    ):
        with pytest.raises(InputRefused) as caught:
            arch.describe({**outer, "text_config": broken}, "config.json")
        assert caught.value.code == code
        assert words in caught.value.message


def test_did_you_mean() -> None:
    assert refusal(hidden_size=GONE, hidden_sizes=24).help == "did you mean 'hidden_sizes', which the file has?"
    assert refusal(hidden_size=GONE).help is None
    assert refusal(hidden_act="sillu").help == "did you mean 'silu'?"
    assert "known: " in str(refusal(hidden_act="\u4e2d").help)


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of bad inputs stands beside the checkout, or not at all")
def test_the_corpus_of_bad_configs(tmp_path: Path) -> None:
    """The verdict of each config case in the manifest, but for the two folders without a config.json."""
    subprocess.run([sys.executable, str(CORPUS / "make_badinputs.py"), str(tmp_path)], check=True, capture_output=True)
    cases = [c for c in json.loads((CORPUS / "manifest.json").read_text(encoding="utf-8")) if c["kind"] == "config"]
    got, want = {}, {}
    for case in cases:
        file = tmp_path / case["id"] / "config.json"
        if not file.exists():
            continue
        want[case["id"]] = (case["expect"], case["code"])
        try:
            notes = arch.describe(read_json(str(file)), str(file)).notes
            got[case["id"]] = ("warn", notes[0][0]) if notes else ("accept", "")
        except InputRefused as e:
            got[case["id"]] = ("reject", e.code)
    assert len(want) > 35
    assert got == want


# --- the reader itself


def config(**values: Any) -> Config:
    return Config(values, "c.json")


def test_aliases_take_the_first_that_is_there() -> None:
    assert config(n_embd=8).integer("hidden_size", "n_embd") == 8
    assert config(hidden_size=None, n_embd=8).integer("hidden_size", "n_embd") == 8
    assert config(hidden_size=8, n_embd=8).integer("hidden_size", "n_embd") == 8
    with pytest.raises(InputRefused, match="hidden_size is 8, but n_embd is 9"):
        config(hidden_size=8, n_embd=9).integer("hidden_size", "n_embd")
    with pytest.raises(InputRefused, match="n_embd is 'x'"):
        config(n_embd="x").integer("hidden_size", "n_embd")


def test_null_and_missing_are_told_apart() -> None:
    with pytest.raises(InputRefused) as missing:
        config().integer("a", "b")
    with pytest.raises(InputRefused) as null:
        config(b=None).integer("a", "b")
    assert (missing.value.code, null.value.code) == ("config-missing", "config-type")
    assert "b is null" in null.value.message


def test_defaults_stand_in_for_null_and_missing() -> None:
    for c in (config(), config(a=None)):
        assert c.integer("a", default=None) is None
        assert c.integer("a", default=7) == 7
        assert c.number("a", default=None) is None
        assert c.number("a", default=0.5) == 0.5
        assert c.integers("a", default=()) == ()
        assert c.integers("a", default=None) is None
        assert c.flag("a", default=True) is True
        assert c.expect("a", allowed=("x",), default="x") == "x"
        assert c.layer_types(3, ("full",)) is None


def test_ranges_are_closed() -> None:
    assert config(a=1).integer("a") == 1
    assert config(a=WIDTH).integer("a") == WIDTH
    assert config(a=LAYERS).integer("a", hi=LAYERS) == LAYERS
    assert config(a=0).integer("a", lo=0) == 0
    for value in (0, WIDTH + 1):
        with pytest.raises(InputRefused) as caught:
            config(a=value).integer("a")
        assert caught.value.code == "config-range"
    assert config(a=1.0).number("a", hi=1.0) == 1.0
    with pytest.raises(InputRefused) as caught:
        config(a=1.1).number("a", hi=1.0)
    assert caught.value.code == "config-range"


def test_numbers_become_floats_and_nan_is_refused() -> None:
    assert isinstance(config(a=3).number("a"), float)
    for value in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(InputRefused) as caught:
            config(a=value).number("a")
        assert caught.value.code == "config-type"


def test_integers() -> None:
    assert config(a=[0, 2.0, 5]).integers("a") == (0, 2, 5)
    assert config(a=[]).integers("a") == ()
    for value, words in (([1, "2"], r"a\[1\] is '2'"), ([True], r"a\[0\] is true"), (5, "a is 5, not a list"),
                         ([-1], r"a\[0\] is -1, outside")):
        with pytest.raises(InputRefused, match=words):
            config(a=value).integers("a")


def test_expect_names_what_it_knows() -> None:
    for value in ("y", [], {}, 1):
        with pytest.raises(InputRefused, match="known here: x, z") as caught:
            config(a=value).expect("a", allowed=("x", "z"))
        assert caught.value.code == "config-unsupported"


@pytest.mark.parametrize(("word", "meaning"), [
    ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu", "gelu"), ("silu", "silu"),
    ("swish", "silu"), ("relu", "relu"),
])
def test_activations_under_one_name(word: str, meaning: str) -> None:
    assert config(a=word).activation("a") == meaning


def test_every_activation_is_its_own_name_or_an_alias() -> None:
    assert set(ACTIVATIONS.values()) <= set(ACTIVATIONS)
    assert all(ACTIVATIONS[name] == name for name in ACTIVATIONS.values())


def test_warnings_and_reads_are_shared_with_sections() -> None:
    outer = config(inner={"a": 3.0})
    inner = outer.section("missing", "inner")
    assert inner is not None
    inner.integer("a")
    assert outer.warnings == [("config-type", "inner.a is written 3.0; read as 3")]
    assert outer.reads == [("inner.a", 3.0, "config")]
    assert outer.section("nothing") is None


@pytest.mark.parametrize(("value", "words"), [
    (None, "null"), (True, "true"), (False, "false"), ({}, "an object"), ([1, 2], "a list of 2"), ("x", "'x'"),
    (3, "3"), ("x" * 100, "'" + "x" * 36 + "..."),
])
def test_kind_of(value: Any, words: str) -> None:
    assert kind_of(value) == words
