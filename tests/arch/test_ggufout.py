"""GGUF metadata out: it reads as the Model it was made from and holds what llama.cpp's converter writes, or nothing."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamactl import arch
from llamactl.arch import _ggufout
from llamactl.arch._gguf import describe_gguf
from llamactl.arch._ggufout import gguf_fields, rope_factors
from llamactl.arch._ggufrope import stretched
from llamactl.checkpoint.gguf import read_header
from llamactl.checkpoint.ggufwrite import Field, GgufOut, nbytes, write
from llamactl.errors import InputRefused
from llamactl.source import presets
from llamactl.spec.model import Model
from llamactl.spec.naming import stored_tensors
from llamactl.spec.parts import Norm, SinusoidalPositions

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

# golden -> what no GGUF file of its family says, and what must change for one to say it all
CANNOT: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("layers.0.attn.scale is 0.223607; it would be read as 0.288675", {"query_pre_attn_scalar": 12}),
    "gemma3": ("text decoder alone; beside it here: vision (12,552 parameters)", {}),
    "gemma3_text": ("layers.0.attn.scale is 0.223607; it would be read as 0.288675", {"query_pre_attn_scalar": 12}),
    "gpt_oss": ("layers.0.attn.rope.scaling.truncate is False", {"rope_scaling": YARN}),
    "llama-bias-tied-llama3": ("rope_freqs.weight holds 6 factors up to 8 of an unknown scheme",
                               {"rope_scaling": LLAMA3, "max_position_embeddings": 32768}),
    "phi3": ("layers.0.attn.rope.scaling is longrope; it would be read as None", {"rope_scaling": None}),
    "qwen2": ("layers.1.attn.window is 8; it would be read as None", {"use_sliding_window": False}),
    "qwen3_moe": ("block 1: 23,976 against 17,400", {"mlp_only_layers": []}),
}
# presets for which a whole family is refused in one respect
CANNOT_PRESETS = {"phi-3-mini-128k": "longrope", "phi-4-mini": "longrope", "gpt-oss-20b": "truncate",
                  "gpt-oss-120b": "truncate", **dict.fromkeys(("gemma-3-4b", "gemma-3-12b", "gemma-3-27b"), "vision")}


def golden(name: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    return config | changes


def named(family: str) -> bool:
    """Whether the family's tensors have names in GGUF."""
    return hasattr(arch.family(family), "GGUF_NAMES")


NAMES = sorted(d.name for d in GOLDEN.iterdir() if named(arch.describe(golden(d.name), d.name).family))
SAYABLE = [(n, CANNOT[n][1] if n in CANNOT else {}) for n in NAMES if n not in CANNOT or CANNOT[n][1]]


def said(config: dict[str, Any], file_type: int = 0) -> dict[str, Any]:
    """{key without the architecture: value} of a config's metadata."""
    found = gguf_fields(arch.describe(config, "m"), config, name="n", file_type=file_type)
    prefix = found[0][2] + "."
    return {key.removeprefix(prefix): value for key, _, value in found}


def refused(config: dict[str, Any]) -> InputRefused:
    with pytest.raises(InputRefused) as e:
        gguf_fields(arch.describe(config, "m"), config, name="n", file_type=0)
    assert e.value.code == "layout-cannot-say"
    assert e.value.exit_code == 3
    assert e.value.help
    return e.value


def save(path: Path, model: Model, config: dict[str, Any], *, file_type: int = 0, extra: tuple[Field, ...] = (),
         data: Callable[[str], bytes] | None = None) -> Path:
    """A whole GGUF file of float32 tensors. data: the bytes of a tensor by its name; zeros without."""
    fields = [Field(*f) for f in gguf_fields(model, config, name="n", file_type=file_type)]
    tensors = [GgufOut(s.name, "F32", s.shape) for s in stored_tensors(model, arch.names(model, "gguf"))]
    factors = rope_factors(model)
    tensors += [GgufOut("rope_freqs.weight", "F32", (len(factors),))] if factors else []

    def blocks(t: GgufOut) -> list[bytes]:
        if factors and t.name == "rope_freqs.weight":
            return [struct.pack(f"<{len(factors)}f", *factors)]
        return [data(t.name) if data else bytes(nbytes(t.type, t.shape))]

    with path.open("wb") as f:
        write(f, [*fields, *extra], tensors, blocks)
    return path


class TestReadBack:
    @pytest.mark.parametrize(("name", "changes"), SAYABLE)
    def test_the_file_is_the_model(self, name: str, changes: dict[str, Any], tmp_path: Path) -> None:
        """A file on disk, read by the reader of any GGUF file; only words about it and its dtype are others."""
        config = golden(name, **changes)
        model = arch.describe(config, name)
        found = describe_gguf(read_header(save(tmp_path / "m.gguf", model, config)), "m.gguf")
        factors = rope_factors(model)
        found = stretched(found, factors, "m.gguf") if factors else found
        kept = {f.name: getattr(found, f.name) for f in dataclasses.fields(Model) if f.name in (
            "dtype", "stored_bytes", "stored_as", "notes", "reads", "tied_why", "not_counted")}
        context = dataclasses.replace(model.context, why=found.context.why)
        assert found == dataclasses.replace(model, **kept, context=context)
        assert [what.what for what in found.not_counted] == (["rope_freqs.weight"] if factors else [])

    def test_every_family_is_there(self) -> None:
        described = {arch.describe(golden(n), n).family for n, _ in SAYABLE}
        assert described == {f for f in set(arch.families().values()) if named(f)}
        assert set(CANNOT) <= set(NAMES)

    @pytest.mark.parametrize("name", CANNOT)
    def test_what_no_file_says_is_refused(self, name: str) -> None:
        assert CANNOT[name][0] in refused(golden(name)).message

    @pytest.mark.parametrize("name", [n for n in presets.names()
                                      if named(arch.describe(presets.load(n).config, n).family)])
    def test_released_models(self, name: str) -> None:
        config = presets.load(name).config
        if name in CANNOT_PRESETS:
            assert CANNOT_PRESETS[name] in refused(config).message
        else:
            assert said(config)["block_count"] == config.get("num_hidden_layers", config.get("n_layer"))


class TestConverter:
    """llama.cpp's own converter, by the gguf package's writer: what it writes stands in ours, types and values."""

    gguf: Any
    ggufs: Any

    @pytest.fixture(autouse=True)
    def converter(self) -> None:
        self.gguf = pytest.importorskip("gguf")
        if "llamactl_tests_ggufs" not in sys.modules:
            spec = importlib.util.spec_from_file_location("llamactl_tests_ggufs", Path(__file__).with_name("ggufs.py"))
            assert spec is not None
            assert spec.loader is not None
            sys.modules["llamactl_tests_ggufs"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules["llamactl_tests_ggufs"])
        self.ggufs = sys.modules["llamactl_tests_ggufs"]

    # golden -> the converter, and what it writes that is no part of a model or is read by no loader
    KEYS: dict[str, tuple[str, tuple[str, ...]]] = {
        "gemma": ("gemma", ()), "gemma2": ("gemma", ()), "gemma3_text": ("gemma3", ()), "gpt2": ("gpt2", ()),
        "gpt_neox": ("gpt_neox", ()), "gpt_neox-sequential": ("gpt_neox", ()),
        "gpt_oss": ("gpt_oss", ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")),
        "llama": ("llama", ()), "llama-bias-tied-llama3": ("llama", ()), "mistral": ("llama_window", ()),
        "mixtral": ("llama", ()), "olmo2": ("olmo2", ()), "olmo3": ("olmo2", ()), "olmoe": ("base", ()),
        # the length before stretching, of a model that is not stretched
        "phi3": ("phi3", ("rope.scaling.original_context_length",)),
        "qwen2": ("base", ()), "qwen3": ("base", ()), "qwen3_moe": ("moe", ()), "smollm3": ("llama", ()),
        "starcoder2": ("base", ()),
    }

    @pytest.mark.parametrize(("name", "changes"), SAYABLE)
    def test_its_keys(self, name: str, changes: dict[str, Any], tmp_path: Path) -> None:
        config = golden(name, **changes)
        keys, beside = self.KEYS[name]
        model = arch.describe(config, name)
        w = self.gguf.GGUFWriter(tmp_path / "theirs.gguf", arch.family(model.family).GGUF[0])
        w.add_type(self.gguf.GGUFType.MODEL)
        w.add_name("n")
        w.add_file_type(self.gguf.LlamaFileType.ALL_F32)
        with_betas = {"rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, **YARN}} if name == "gpt_oss" else {}
        getattr(self.ggufs, keys)(w, config | with_betas)
        theirs = {key: (value.type.name, value.value) for key, value in w.kv_data[0].items()}
        assert theirs
        for key in beside:
            theirs.pop(f"{w.arch}.{key}")
        ours = {key: (kind.partition(":")[0], value) for key, kind, value in gguf_fields(
            model, config, name="n", file_type=0)}
        assert {key: ours.get(key) for key in theirs} == theirs

    @pytest.mark.parametrize(("name", "changes"), SAYABLE)
    def test_no_key_of_its_own(self, name: str, changes: dict[str, Any]) -> None:
        """Every key is one that the gguf package knows, with the type its writer gives it."""
        config = golden(name, **changes)
        known = {value for group in vars(self.gguf.constants.Keys).values() if isinstance(group, type)
                 for value in vars(group).values() if isinstance(value, str)}
        found = gguf_fields(arch.describe(config, name), config, name="n", file_type=7)
        for key, _, _ in found:
            assert key.replace(found[0][2] + ".", "{arch}.", 1) in known | {"general.type"}, key
        assert len({key for key, _, _ in found}) == len(found)
        if not name.startswith("gpt_neox"):  # the one loader that asks for it
            assert not any("parallel" in key for key, _, _ in found)


class TestGeneral:
    @pytest.mark.parametrize(("file_type", "word"), [(0, "ALL_F32"), (1, "MOSTLY_F16"), (7, "MOSTLY_Q8_0"),
                                                     (32, "MOSTLY_BF16")])
    def test_file_types(self, file_type: int, word: str) -> None:
        found = dict((k, (kind, v)) for k, kind, v in gguf_fields(
            arch.describe(golden("llama"), "m"), golden("llama"), name="Tiny ✓", file_type=file_type))
        assert found["general.architecture"] == ("STRING", "llama")
        assert found["general.type"] == ("STRING", "model")
        assert found["general.name"] == ("STRING", "Tiny ✓")
        assert found["general.file_type"] == ("UINT32", file_type)
        quantised = {"general.quantization_version": ("UINT32", 2)} if word == "MOSTLY_Q8_0" else {}
        assert {k: v for k, v in found.items() if "quant" in k} == quantised
        gguf = pytest.importorskip("gguf")
        assert gguf.LlamaFileType[word] == file_type
        assert gguf.GGML_QUANT_VERSION == 2

    def test_the_first_pair_is_the_architecture(self) -> None:
        assert gguf_fields(arch.describe(golden("gpt2"), "m"), golden("gpt2"), name="n", file_type=0)[0] == (
            "general.architecture", "STRING", "gpt2")

    def test_a_family_without_names(self) -> None:
        with pytest.raises(InputRefused) as e:
            gguf_fields(arch.describe(golden("bloom"), "m"), golden("bloom"), name="n", file_type=0)
        assert e.value.code == "layout-unknown"

    def test_numbers_of_more_than_32_bits(self) -> None:
        assert "context_length would be 4,294,967,296" in refused(golden(
            "llama", max_position_embeddings=1 << 32)).message
        assert said(golden("llama", max_position_embeddings=(1 << 32) - 1))["context_length"] == (1 << 32) - 1

    def test_a_model_without_a_length(self) -> None:
        config = golden("llama")
        del config["max_position_embeddings"]
        assert "context length" in refused(config).message

    def test_floats_that_float32_rounds(self) -> None:
        config = golden("llama", rope_theta=12345.678901, rms_norm_eps=1.23456789e-5)
        assert said(config)["rope.freq_base"] == 12345.678901
        assert said(config)["attention.layer_norm_rms_epsilon"] == 1.23456789e-5


class TestCannotSay:
    """What is refused, whatever its family's tests have: each would be computed otherwise by who reads the file."""

    @pytest.mark.parametrize(("name", "changes", "word"), [
        ("llama", {"hidden_act": "gelu"}, "layers.0.mlp.activation is gelu; it would be read as silu"),
        ("gpt2", {"activation_function": "gelu"}, "mlp.activation is gelu; it would be read as gelu_tanh"),
        ("gpt2", {"bias": False}, "the metadata describes"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "scaling is dynamic; it would be read as"),
        ("llama", {"rope_scaling": LLAMA3 | {"high_freq_factor": 5.0}}, "of an unknown scheme"),
        ("llama", {"rope_scaling": YARN | {"attention_factor": 1.5}}, "attention_factor is 1.5; it would be read as"),
        ("llama", {"rope_scaling": YARN | {"beta_fast": 16.0}}, "beta_fast is 16; it would be read as 32"),
        ("llama", {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, "mscale is 1"),
        ("smollm3", {"rope_scaling": LLAMA3, "max_position_embeddings": 32768}, "llama.cpp does not read in smollm3"),
        ("qwen3", {"rope_scaling": LLAMA3, "max_position_embeddings": 32768}, "llama.cpp does not read in qwen3"),
        ("smollm3", {"no_rope_layer_interval": 2}, "layers.1.attn.rope is None"),
        ("mixtral", {"sliding_window": 8}, "no family here is built so"),
        ("olmoe", {"clip_qkv": 8.0}, "layers.0.attn.clip is 8; it would be read as None"),
        ("olmoe", {"norm_topk_prob": True}, "normalise is True; it would be read as False"),
        ("qwen3_moe", {"mlp_only_layers": [], "norm_topk_prob": False}, "normalise is False; it would be read as True"),
        ("gemma3_text", {"query_pre_attn_scalar": 12, "attn_logit_softcapping": 50.0}, "attn.softcap is 50; it would"),
        ("gpt_oss", {"rope_scaling": YARN, "swiglu_limit": 6.0}, "limit is 6; it would be read as 7"),
        ("gemma2", {"query_pre_attn_scalar": 12, "sliding_window": None}, "window is None; it would be read as 4096"),
    ])
    def test_refused(self, name: str, changes: dict[str, Any], word: str) -> None:
        assert word in refused(golden(name, **changes)).message

    def test_a_tensor_without_a_name(self) -> None:
        model = arch.describe(golden("llama"), "m")
        norm = model.norm
        odd = dataclasses.replace(model, embed_norm=norm)
        with pytest.raises(InputRefused, match="has no name for embed_norm.weight"):
            gguf_fields(odd, golden("llama"), name="n", file_type=0)

    def test_layers_that_differ(self) -> None:
        model = arch.describe(golden("llama"), "m")
        one: Any = model.layers[1]
        for attn in (dataclasses.replace(one.attn, scale=0.5), dataclasses.replace(one.attn, n_kv_heads=6)):
            odd = dataclasses.replace(model, layers=(model.layers[0], dataclasses.replace(one, attn=attn)))
            with pytest.raises(InputRefused) as e:
                gguf_fields(odd, golden("llama"), name="n", file_type=0)
            assert e.value.code == "layout-cannot-say"

    @pytest.mark.parametrize(("part", "change", "word"), [
        ("embed", {"scale": 2.0}, "embed.scale is 2; it would be read as None"),
        ("norm", {"offset": True}, "norm.offset is True; it would be read as False"),
        ("head", {"scale": 0.5}, "head.scale is 0.5; it would be read as None"),
        ("embed_norm", Norm(dim=48, eps=1e-5, weight=False), "embed_norm is rms; it would be read as None"),
        ("positions", SinusoidalPositions(dim=48), "positions is SinusoidalPositions; it would be read as None"),
    ])
    def test_parts_outside_the_blocks(self, part: str, change: Any, word: str) -> None:
        """None of these has a tensor of its own, so that only the comparison tells."""
        model = arch.describe(golden("llama"), "m")
        new = dataclasses.replace(getattr(model, part), **change) if isinstance(change, dict) else change
        with pytest.raises(InputRefused) as e:
            gguf_fields(dataclasses.replace(model, **{part: new}), golden("llama"), name="n", file_type=0)
        assert word in e.value.message

    def test_layers_without_attention(self) -> None:
        model = arch.describe(golden("llama"), "m")
        odd = dataclasses.replace(model, layers=(model.layers[0], dataclasses.replace(
            model.layers[1], attn=None, attn_norm=None)))
        with pytest.raises(InputRefused, match="1 of 2 have none"):
            gguf_fields(odd, golden("llama"), name="n", file_type=0)

    def test_a_difference_is_found_however_deep(self) -> None:
        """What compares is what proves: a change in any field of any part is one."""
        model = arch.describe(golden("gemma2"), "m")
        assert _ggufout._difference(model.layers, model.layers, "layers") is None
        assert _ggufout._difference(1e-5, struct.unpack("<f", struct.pack("<f", 1e-5))[0], "x") is None
        layer: Any = model.layers[1]
        for field in dataclasses.fields(layer.attn):
            odd = dataclasses.replace(layer.attn, **{field.name: "other"})
            changed = (model.layers[0], dataclasses.replace(layer, attn=odd), model.layers[2])
            found = _ggufout._difference(model.layers, changed, "layers")
            assert found is not None
            assert found[0] == f"layers.1.attn.{field.name}"
        assert _ggufout._difference(model.layers, model.layers[:2], "layers") is not None
        assert _ggufout._difference(1, True, "x") is not None


class TestLengths:
    @pytest.mark.parametrize(("scaling", "limit", "written"), [
        (None, 128, 128), (YARN, 32, 32), (YARN, 128, 128), (YARN, 64, 64),
        ({"rope_type": "linear", "factor": 4.0}, 128, 128), (LLAMA3, 32768, 32768),
    ])
    def test_as_the_config_has_it(self, scaling: Any, limit: int, written: int) -> None:
        found = said(golden("llama", rope_scaling=scaling, max_position_embeddings=limit))
        assert found["context_length"] == written

    @pytest.mark.parametrize("config", [{}, {"max_position_embeddings": 7}, {"max_position_embeddings": 10**9},
                                        {"max_position_embeddings": True}, {"max_position_embeddings": "128"}])
    def test_a_config_that_does_not_fit_the_model(self, config: dict[str, Any]) -> None:
        """An edited Model, or none of this shape: the Model decides."""
        model = arch.describe(golden("llama", rope_scaling=YARN), "m")
        found = {key: value for key, _, value in gguf_fields(model, config, name="n", file_type=0)}
        assert found["llama.context_length"] == model.context.usable == 128

    def test_the_text_part_of_a_nested_config(self) -> None:
        config = golden("qwen3", rope_scaling=YARN, max_position_embeddings=32)
        model = arch.describe(config, "m")
        found = gguf_fields(model, {"text_config": config, "max_position_embeddings": 64}, name="n", file_type=0)
        assert dict((k, v) for k, _, v in found)["qwen3.context_length"] == 32

    def test_gpt2_ends_where_its_table_does(self) -> None:
        assert said(golden("gpt2", n_positions=50))["context_length"] == 50

    def test_widths_of_experts(self) -> None:
        found = said(golden("qwen3_moe", mlp_only_layers=[]))
        assert (found["feed_forward_length"], found["expert_feed_forward_length"]) == (56, 20)
        assert (found["expert_count"], found["expert_used_count"]) == (5, 2)
        found = said(golden("mixtral"))
        assert (found["feed_forward_length"], found["expert_feed_forward_length"]) == (56, 56)

    def test_experts_of_another_width_than_the_config_says(self) -> None:
        """An edited Model: what it has goes into the file."""
        model = arch.describe(golden("mixtral", intermediate_size=60), "m")
        found = {key: value for key, _, value in gguf_fields(model, golden("mixtral"), name="n", file_type=0)}
        assert found["llama.feed_forward_length"] == 60

    @pytest.mark.parametrize("width", [None, 0, -1, True, "56", 56.0])
    def test_a_dense_width_that_is_none(self, width: Any) -> None:
        found = said(golden("qwen3_moe", mlp_only_layers=[], intermediate_size=width))
        assert found["feed_forward_length"] == 20

    def test_a_length_that_would_be_read_otherwise(self) -> None:
        config = golden("llama", rope_scaling={"rope_type": "linear", "factor": 4.0})
        model = arch.describe(config, "m")
        assert (model.context.trained, model.context.usable) == (128, 512)
        found = {key: value for key, _, value in gguf_fields(model, {}, name="n", file_type=0)}
        assert found["llama.context_length"] == 128
        odd = dataclasses.replace(model, context=dataclasses.replace(model.context, usable=1000))
        with pytest.raises(InputRefused) as e:
            gguf_fields(odd, {}, name="n", file_type=0)
        assert "read as 512 positions long, not 1,000" in e.value.message


class TestWindows:
    def test_one_for_all_layers(self) -> None:
        found = said(golden("mistral"))
        assert found["attention.sliding_window"] == 8
        assert "attention.sliding_window_pattern" not in found
        assert "rope.freq_base_swa" not in found

    def test_none(self) -> None:
        found = said(golden("mistral", sliding_window=None))
        assert "attention.sliding_window" not in found

    def test_which_layers_have_it(self) -> None:
        changes = {"query_pre_attn_scalar": 12, "rope_local_base_freq": 1e6}
        found = said(golden("gemma3_text", **changes))
        assert found["attention.sliding_window_pattern"] == [True] * 5 + [False, True]
        assert (found["rope.freq_base"], found["rope.freq_base_swa"]) == (1e6, 1e6)
        found = said(golden("gemma3_text", **changes, layer_types=["full_attention", "sliding_attention"] * 3
                            + ["full_attention"]))
        assert found["attention.sliding_window_pattern"] == [False, True] * 3 + [False]

    def test_phi3_says_that_it_has_none(self) -> None:
        """Loaders of 2024 ask for the key."""
        found = said(golden("phi3", rope_scaling=None, sliding_window=None))
        assert found["attention.sliding_window"] == 0
        assert said(golden("phi3", rope_scaling=None))["attention.sliding_window"] == 8


class TestFactors:
    def test_as_llama_cpp_computes_them(self) -> None:
        """generate_extra_tensors of its LlamaModel, by wavelength."""
        base, dim, factor, low, high, old = 500000.0, 128, 32.0, 1.0, 4.0, 8192
        theirs = []
        for j in range(0, dim, 2):
            wave = 2 * math.pi * base ** (j / dim)
            smooth = (old / wave - low) / (high - low)
            theirs.append(1.0 if wave < old / high else factor if wave > old / low
                          else 1 / ((1 - smooth) / factor + smooth))
        model = arch.describe(golden("llama", head_dim=dim, rope_scaling=LLAMA3 | {"factor": factor}), "m")
        ours = rope_factors(model)
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert ours is not None
        assert len(ours) == 64
        assert (ours[0], ours[-1]) == (1.0, 32.0)
        assert any(1.0 < f < 32.0 for f in ours)
        assert all(struct.unpack("<f", struct.pack("<f", f))[0] == f for f in ours)

    @pytest.mark.parametrize("scaling", [None, YARN, {"rope_type": "linear", "factor": 2.0}])
    def test_none_for_other_schemes(self, scaling: Any) -> None:
        assert rope_factors(arch.describe(golden("llama", rope_scaling=scaling), "m")) is None
        assert rope_factors(arch.describe(golden("gpt2"), "m")) is None

    def test_the_scheme_is_no_key(self) -> None:
        found = said(golden("llama", rope_scaling=LLAMA3, max_position_embeddings=131072))
        assert {k: v for k, v in found.items() if "scaling" in k} == {"rope.scaling.original_context_length": 8192}

    def test_linear_and_yarn_are_keys(self) -> None:
        found = said(golden("llama", rope_scaling={"rope_type": "linear", "factor": 2.5}))
        assert {k: v for k, v in found.items() if "scaling" in k} == {"rope.scaling.type": "linear",
                                                                     "rope.scaling.factor": 2.5}
        found = said(golden("llama", rope_scaling=YARN))
        assert {k: v for k, v in found.items() if "scaling" in k} == {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}


# golden -> what else llama.cpp wants of it, whether its converter turns q and k, and whether it adds 1 to the norms
RUNS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "gemma": ({}, False, True), "gemma2": ({"query_pre_attn_scalar": 12}, False, True),
    "gemma3_text": ({"query_pre_attn_scalar": 12}, False, True),
    "gpt2": ({}, False, False), "gpt_neox": ({}, False, False),
    "gpt_neox-sequential": ({"attention_bias": True}, False, False),  # its loader wants biases
    "llama": ({}, True, False), "llama-bias-tied-llama3": ({"rope_scaling": LLAMA3, "max_position_embeddings": 32768},
                                                           True, False),
    "mistral": ({"sliding_window": 4096}, True, False), "mixtral": ({}, True, False),
    "olmo2": ({}, False, False), "olmo3": ({}, False, False),
    "olmoe": ({"num_key_value_heads": 6}, False, False),  # its loader has a norm as wide as q on k too
    "phi3": ({"rope_scaling": None, "sliding_window": 4096}, False, False),
    "qwen2": ({"use_sliding_window": False}, False, False), "qwen3": ({}, False, False),
    "qwen3_moe": ({"mlp_only_layers": []}, False, False), "smollm3": ({}, True, False),
    "starcoder2": ({"sliding_window": 4096}, False, False),
    "gpt_oss": ({"rope_scaling": YARN, "sliding_window": 8}, False, False),
}


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama_cpp is not installed")
class TestLlamaCpp:
    """It opens what is written, and computes what transformers computes."""

    IDS = tuple(7 * i % 90 + 3 for i in range(40))

    @pytest.mark.parametrize("name", RUNS)
    def test_logits(self, name: str, written: Any, make_golden: Any, tmp_path: Path) -> None:
        import gguf
        import numpy as np
        import torch

        changes, turned, plus_one = RUNS[name]
        config = written.config_of(name, **changes)
        state = written.saved(tmp_path / "hf", config)
        model = arch.describe(config, name)
        which = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch.family(model.family).GGUF[0])
        arrays = written.gguf_arrays(state, config, which, permuted=turned, plus_one=plus_one)
        file = save(tmp_path / "m.gguf", model, config, extra=TOKENIZER,
                    data=lambda t: np.ascontiguousarray(arrays[t], np.float32).tobytes())
        hf = make_golden.build(tmp_path / "hf")
        for module in hf.modules():
            if "GELU" in type(module).__name__:
                module.register_forward_hook(lambda module, args, out: ggml_gelu(args[0]))
        theirs = torch.tensor(make_golden.logits(hf, torch.tensor([self.IDS])))
        ours = torch.from_numpy(run(file, self.IDS)).double()
        assert ours.shape == theirs.shape
        assert float((ours - theirs).abs().max()) < 1e-3
        assert float(theirs.std()) > 0.1


TOKENIZER = (
    Field("tokenizer.ggml.model", "STRING", "gpt2"), Field("tokenizer.ggml.pre", "STRING", "gpt-2"),
    Field("tokenizer.ggml.tokens", "ARRAY:STRING", [f"t{i}" for i in range(97)]),
    Field("tokenizer.ggml.token_type", "ARRAY:INT32", [1] * 97),
    Field("tokenizer.ggml.merges", "ARRAY:STRING", ["t 0"]),
    Field("tokenizer.ggml.bos_token_id", "UINT32", 1), Field("tokenizer.ggml.eos_token_id", "UINT32", 2),
)


def ggml_gelu(x: Any) -> Any:
    """The tanh form from a table of halves, whichever form the model was trained with."""
    import torch

    return torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()


def run(file: Path, ids: tuple[int, ...]) -> Any:
    """float32 logits of every position, with a float32 cache."""
    import llama_cpp
    import numpy as np

    llm = llama_cpp.Llama(str(file), n_ctx=64, n_batch=64, n_threads=1, logits_all=True, verbose=False, type_k=0,
                          type_v=0, flash_attn=False)
    try:
        llm.eval(ids)
        return np.array(llm.scores[: len(ids)])
    finally:
        llm.close()
