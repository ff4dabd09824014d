"""`diff`: what is equal is said to be, in any two layouts; what is not is found, named and measured."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file
from torch import Tensor

from llamactl import arch
from llamactl.checkpoint.gguf import read_header
from llamactl.checkpoint.identical import same_bytes, stored_form
from llamactl.checkpoint.moves import Rect
from llamactl.checkpoint.plan import Output, Piece
from llamactl.cli.diffing import _precise
from llamactl.net.differing import Difference
from llamactl.spec.naming import stored_tensors

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 96, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64,
    "activation_function": "gelu_new", "torch_dtype": "float32",
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "gelu_pytorch_tanh", "torch_dtype": "float32",
}
Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"
# layout -> (the option, where what it writes is read); the second of each pair is what the name of a test says
LAYOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": {"lesson": ("--to", "lesson"), "meta": ("--to", "meta"), "meta2": ("--to", "meta", "--ranks", "2"),
              "gguf": ("--to", "gguf")},
    "gpt2": {"lesson": ("--to", "lesson"), "nanogpt": ("--to", "nanogpt"), "gguf": ("--to", "gguf")},
}
Tensors = dict[str, Tensor]


def drawn(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Random weights of a config under their hf names."""
    model = arch.describe(dict(config), "config.json")
    g = torch.Generator().manual_seed(seed)
    return {s.name: torch.randn(s.shape, generator=g) for s in stored_tensors(model, arch.names(model))}


def write(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(dict(config)))
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def convert() -> Iterator[Callable[..., Path]]:
    """convert(source, target, *options): by the command itself, without its proof."""
    from llamactl.cli.app import run

    before = signal.getsignal(signal.SIGTERM)

    def call(source: Path, target: Path, *options: str) -> Path:
        assert run(["convert", str(source), str(target), *options, "--no-proof", "-q"]) == 0
        return target / "model.gguf" if "gguf" in options and target.is_dir() else target

    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, convert: Any) -> dict[tuple[str, str], Path]:
    """(family, layout) -> one model in every layout that its family has."""
    out: dict[tuple[str, str], Path] = {}
    for config in (LLAMA, GPT2):
        family = config["model_type"]
        place = tmp_path_factory.mktemp(family)
        out[family, "hf"] = write(place / "hf", config, drawn(config, len(out)))
        for layout, options in LAYOUTS[family].items():
            out[family, layout] = convert(out[family, "hf"], place / layout, *options)
    return out


@pytest.fixture
def diff(cli: Any) -> Callable[..., tuple[int, dict[str, Any]]]:
    """diff(a, b, *options): (exit code, result of the JSON), with the tensors that are not equal as `found` by name."""

    def call(a: Path, b: Path, *options: str) -> tuple[int, dict[str, Any]]:
        got = cli("diff", a, b, *options, "--json")
        assert got.code in (0, 1), got.err
        body = got.json()
        result = body["result"] | {"warnings": body["warnings"]}
        result["found"] = {t["name"]: t for t in result["tensors"] if t["status"] != "equal"}
        assert sum(result["counts"].values()) == len(result["tensors"])
        assert got.code == (0 if result["same"] else 1)
        return got.code, result

    return call


@pytest.fixture
def two(tmp_path: Path, diff: Any) -> Callable[..., tuple[int, dict[str, Any]]]:
    """two(tensors of B, options, a=, config=): hf folders; A is drawn(LLAMA)."""

    def call(b: Tensors, *options: str, a: Tensors | None = None, config: Mapping[str, Any] = LLAMA,
             other: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        one = write(tmp_path / "a", config, drawn(config) if a is None else a)
        return diff(one, write(tmp_path / "b", other or config, b), *options)  # type: ignore[no-any-return]

    return call


# ---- equal


@pytest.mark.parametrize(("family", "a", "b"), [(f, a, b) for f, other in LAYOUTS.items()
                                                for a, b in permutations(["hf", *other], 2)])
def test_a_model_is_equal_to_itself_in_every_layout(made: Any, diff: Any, family: str, a: str, b: str) -> None:
    code, result = diff(made[family, a], made[family, b])
    assert (code, result["found"], result["descriptions"], result["differing"]) == (0, {}, [], 0)
    model = arch.describe({"llama": LLAMA, "gpt2": GPT2}[family], "config.json")
    names = {t.name for t in model.tensors()}
    assert names <= {t["name"] for t in result["tensors"]} <= {*names, "head.weight"}
    assert result["warnings"] == [] or "nanogpt" in (a, b)


def test_metas_rows_are_put_in_order_and_not_taken_as_they_come(tmp_path: Path, diff: Any) -> None:
    """Written by hand as Meta's own script has it: view(heads, 2, half, in).transpose(1, 2)."""
    def turned(w: Tensor, heads: int) -> Tensor:
        return w.view(heads, 2, w.shape[0] // heads // 2, -1).transpose(1, 2).reshape(w.shape)

    own = drawn(LLAMA)
    hf = write(tmp_path / "hf", LLAMA, own)
    words = {"self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
             "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
             "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "model.layers": "layers",
             "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "tok_embeddings", "model.norm": "norm",
             "lm_head": "output"}
    for name, right in (("right", True), ("wrong", False)):
        state = {}
        for key, w in own.items():
            if right and ("q_proj" in key or "k_proj" in key):
                w = turned(w, 8 if "q_proj" in key else 2)
            for old, new in words.items():
                key = key.replace(old, new)
            state[key] = w
        (tmp_path / name).mkdir()
        torch.save(state, tmp_path / name / "consolidated.00.pth")
        (tmp_path / name / "params.json").write_text(json.dumps(
            {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 2, "vocab_size": 96, "norm_eps": 1e-5,
             "hidden_dim": 96, "rope_theta": 10000.0}))
    assert diff(hf, tmp_path / "right")[0] == 0
    code, result = diff(hf, tmp_path / "wrong")
    assert (code, set(result["found"])) == (1, {f"layers.{i}.attn.{x}.weight" for i in (0, 1) for x in "qk"})


# ---- one bit


def flip(path: Path, name: str, element: int = 5) -> None:
    """Flip the lowest bit of one float32 of a stored tensor, wherever it lies."""
    if path.suffix == ".gguf":
        header = read_header(str(path))
        at = header.data_offset + next(t.offset for t in header.tensors if t.name == name)
    elif (file := path / "model.safetensors").exists():
        whole = file.read_bytes()
        n = struct.unpack("<Q", whole[:8])[0]
        at, path = 8 + n + json.loads(whole[8 : 8 + n])[name]["data_offsets"][0], file
    else:
        file = next(f for f in (path / "ckpt.pt", path / "consolidated.01.pth", path / "consolidated.00.pth")
                    if f.exists())
        state = torch.load(file, weights_only=True)
        state.get("model", state)[name].view(-1).view(torch.int32)[element] ^= 1
        torch.save(state, file)
        return
    data = bytearray(path.read_bytes())
    data[at + 4 * element] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("family", "layout", "stored", "name"), [
    ("llama", "hf", Q, "layers.1.attn.q.weight"),
    ("llama", "lesson", "blocks.0.gqa.wk.weight", "layers.0.attn.k.weight"),
    ("llama", "meta", "layers.1.attention.wo.weight", "layers.1.attn.o.weight"),
    ("llama", "meta2", "layers.1.feed_forward.w2.weight", "layers.1.mlp.down.weight"),
    ("llama", "gguf", "blk.0.ffn_gate.weight", "layers.0.mlp.gate.weight"),
    ("gpt2", "hf", "transformer.h.1.attn.c_attn.weight", "layers.1.attn.q.weight"),
    ("gpt2", "hf", "transformer.h.1.attn.c_attn.weight", "layers.1.attn.k.weight"),
    ("gpt2", "hf", "transformer.h.1.attn.c_attn.weight", "layers.1.attn.v.weight"),
    ("gpt2", "lesson", "blocks.0.mlp.w1.bias", "layers.0.mlp.up.bias"),
    ("gpt2", "nanogpt", "transformer.h.0.attn.c_attn.bias", "layers.0.attn.q.bias"),
    ("gpt2", "gguf", "position_embd.weight", "pos_embed.weight"),
])
def test_one_bit_is_found_and_named(made: Any, diff: Any, convert: Any, tmp_path: Path, family: str, layout: str,
                                    stored: str, name: str) -> None:
    options = LAYOUTS[family].get(layout, ("--to", "hf"))
    spoilt = convert(made[family, "hf"], tmp_path / "copy", *options)
    flip(spoilt, stored, 64 * "qkv".find(name.split(".")[-2]) + 5 if "c_attn" in stored else 5)  # q, k, v side by side
    other = "lesson" if layout in ("hf", "nanogpt") else "hf"
    code, result = diff(made[family, other], spoilt)
    (found,) = result["found"].values()
    assert (code, result["differing"], found["name"], found["status"]) == (1, 1, name, "different")
    assert found["stored"][1] == [stored]
    assert len(found["stored"][0]) == 1
    assert found["stored"][0] != [stored]
    assert (found["numbers"]["differing"], found["dtypes"]) == (1, ["F32", "F32"])
    assert 0 < found["numbers"]["max_abs"] < 1e-6
    assert diff(made[family, layout], spoilt)[1]["found"].keys() == {name}  # bytes against bytes finds the same


def test_gate_and_up_exchanged_are_found(made: Any, diff: Any, convert: Any, tmp_path: Path) -> None:
    path = convert(made["llama", "hf"], tmp_path / "x", "--to", "lesson")
    state = load_file(path / "model.safetensors")
    state["blocks.0.ff.w1.weight"], state["blocks.0.ff.w2.weight"] = (
        state["blocks.0.ff.w2.weight"], state["blocks.0.ff.w1.weight"])
    save_file(state, path / "model.safetensors")
    for other in ("hf", "meta2", "gguf"):
        code, result = diff(made["llama", other], path)
        assert (code, set(result["found"])) == (1, {"layers.0.mlp.gate.weight", "layers.0.mlp.up.weight"})


# ---- types


def test_another_dtype_is_told_and_is_no_difference_unless_strict(made: Any, diff: Any, cli: Any, convert: Any,
                                                                  tmp_path: Path) -> None:
    half = convert(made["llama", "hf"], tmp_path / "half", "--dtype", "bf16")
    for a, b, said in ((made["llama", "meta"], half, "A F32, B BF16"), (half, made["llama", "hf"], "A BF16, B F32")):
        code, result = diff(a, b)
        assert (code, result["differing"], result["counts"]["dtype"]) == (0, 0, len(result["tensors"]))
        got = cli("diff", a, b)
        assert f"dtypes   {said}: 21 equal in the other's type" in got.out
        assert "verdict  equal up to dtype\n" in got.out
        assert "embed.weight" not in got.out
        assert "embed.weight" in cli("diff", a, b, "--all").out
        code, strict = diff(a, b, "--strict")
        assert (code, strict["same"], strict["differing"]) == (1, False, 21)
        assert "embed.weight" in cli("diff", a, b, "--strict").out
        assert cli("diff", a, b, "--strict").err == "error[diff]: 21 of 21 tensors differ\n"


def value(b: Tensor, status: str, numbers: dict[str, Any] | None = None, a: Tensor | None = None) -> Any:
    return pytest.param(torch.tensor([1.0, 2.0, -3.0, 0.5]) if a is None else a, b, status, numbers or {})


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(("a", "b", "status", "numbers"), [
    value(torch.tensor([1.0, 2.0, -3.25, 0.5]), "different", {"max_abs": 0.25, "relative": 0.25 / 3, "differing": 1}),
    value(torch.tensor([1.0, 2.0, -3.0, 0.5]).double(), "dtype", {"max_abs": 0.0, "differing": 0}),
    value(torch.tensor([1.0, 2.0, -3.0, 0.5 + 1e-12], dtype=torch.float64), "dtype", {"differing": 1}),
    value(torch.tensor([1.0, 2.0, -3.0, 0.5 + 1e-3]).double(), "different", {"differing": 1}),
    value(torch.tensor([1.0, 2.0, -3.0, 0.51]).half(), "different"),
    value(torch.tensor([0.1, 2.0]).bfloat16(), "dtype", a=torch.tensor([0.1, 2.0])),
    value(torch.tensor([0.1, 2.0]).half(), "dtype", {"differing": 1}, a=torch.tensor([0.1, 2.0])),
    # 0.1 in bf16 is exact in fp16; 0.1 in fp16 has more digits than bf16
    value(torch.tensor([0.1]).bfloat16().half(), "dtype", {"differing": 0}, a=torch.tensor([0.1]).bfloat16()),
    value(torch.tensor([0.1]).half(), "dtype", {"differing": 1}, a=torch.tensor([0.1]).bfloat16()),
    value(torch.tensor([0.2]).half(), "different", a=torch.tensor([0.1]).bfloat16()),
    value(torch.tensor([1.5]).half().view(torch.bfloat16), "different", {"differing": 1}, a=torch.tensor([1.5]).half()),
    # a value that the type does not hold is not the same
    value(torch.tensor([1e6, 1.0]).half(), "different", {"not_finite": 1, "max_abs": 0.0}, a=torch.tensor([1e6, 1.0])),
    value(torch.tensor([INF, 1.0]).half(), "dtype", {"differing": 0}, a=torch.tensor([INF, 1.0])),
    value(torch.tensor([NAN, INF]).half(), "different", {"nans": [1, 1], "not_finite": 1}, a=torch.tensor([NAN, 1e6])),
    value(torch.tensor([INF, -INF]), "equal", a=torch.tensor([INF, -INF])),
    value(torch.tensor([INF, INF, 1.5, 2.0]), "different", {"not_finite": 1, "max_abs": 0.5, "differing": 2},
          a=torch.tensor([INF, -INF, 1.0, 2.0])),
    value(torch.tensor([NAN, 1.0]), "equal", a=torch.tensor([NAN, 1.0])),
    value(torch.tensor([NAN, 1.0]).bfloat16(), "dtype", {"nans": [1, 1], "differing": 0}, a=torch.tensor([NAN, 1.0])),
    value(torch.tensor([0.0, 1.0]), "different", {"nans": [1, 0], "not_finite": 1, "max_abs": 0.0},
          a=torch.tensor([NAN, 1.0])),
    value(torch.tensor([0.0, 1.0]).half(), "different", {"nans": [1, 0]}, a=torch.tensor([NAN, 1.0])),
    value(torch.tensor([NAN, NAN]), "different", {"nans": [0, 2], "max_abs": None, "relative": None},
          a=torch.tensor([0.0, 1.0])),
    value(torch.tensor([-0.0, 1.0]), "different", {"differing": 0, "max_abs": 0.0}, a=torch.tensor([0.0, 1.0])),
    value(torch.tensor([1.0, 1.0]), "different", {"max_abs": 1.0, "relative": None}, a=torch.tensor([0.0, 0.0])),
    value(torch.tensor([-3e38, 1.0]), "different", {"max_abs": 6e38, "relative": 2.0, "not_finite": 0},
          a=torch.tensor([3e38, 1.0])),
    value(torch.tensor([-1.7e308], dtype=torch.float64), "different", {"max_abs": None, "not_finite": 0},
          a=torch.tensor([1.7e308], dtype=torch.float64)),
])
def test_values_against_values(two: Any, a: Tensor, b: Tensor, status: str, numbers: dict[str, Any]) -> None:
    config = LLAMA | {"num_hidden_layers": 1}
    own = drawn(config)
    times = 64 // len(a)
    code, result = two({**own, NORM: b.repeat(times)}, a={**own, NORM: a.repeat(times)}, config=config)
    (found,) = (t for t in result["tensors"] if t["name"] == "norm.weight")
    assert found["status"] == status
    assert code == (status == "different")
    assert len(result["found"]) == (status != "equal")
    for key, want in numbers.items():
        got = found["numbers"][key]
        if key in ("differing", "not_finite"):
            want *= times
        elif key == "nans":
            want = [times * n for n in want]
        assert got == (want if want is None or key == "nans" else pytest.approx(want, rel=1e-6)), key
    if numbers.get("differing") == 0 and status == "different":
        assert "signs of zeros" in found["note"]


def test_quantised_blocks_are_compared_by_value(made: Any, diff: Any, convert: Any, tmp_path: Path) -> None:
    hf = made["llama", "hf"]
    gguf = convert(hf, tmp_path / "q8", "--to", "gguf", "--dtype", "q8_0")
    code, result = diff(hf, gguf)
    assert (code, result["counts"]["different"], result["counts"]["equal"]) == (1, 16, 5)  # norms stay in fp32
    found = result["found"]["layers.1.attn.q.weight"]
    own = load_file(hf / "model.safetensors")[Q]
    step = float(own.abs().max()) / 127
    assert found["dtypes"] == ["F32", "Q8_0"]
    assert step / 4 < found["numbers"]["max_abs"] < step * 0.51
    assert found["numbers"]["relative"] == pytest.approx(found["numbers"]["max_abs"] / float(own.abs().max()))
    plain = convert(gguf, tmp_path / "plain")
    code, result = diff(gguf, plain)
    assert (code, result["counts"]["dtype"], result["counts"]["equal"]) == (0, 16, 5)
    assert diff(gguf, convert(gguf, tmp_path / "half", "--dtype", "bf16"))[0] == 0
    assert diff(gguf, gguf)[1]["counts"]["equal"] == 21  # blocks, not values


@pytest.mark.parametrize(("module", "word", "value", "why"), [
    ("llamactl.net.weights_gguf", "QUANTISED", ("Q4_0",), "Q8_0 is not unpacked here"),
    ("llamactl.cli.diffing", "_SCALES", ("_norm.weight",), "quantised weights with scales beside them are not"),
])
def test_blocks_that_cannot_be_unpacked_are_told_apart_by_their_bytes_alone(
        made: Any, diff: Any, cli: Any, convert: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str,
        word: str, value: Any, why: str) -> None:
    gguf = convert(made["llama", "hf"], tmp_path / "q8", "--to", "gguf", "--dtype", "q8_0")
    other = convert(made["llama", "hf"], tmp_path / "more", "--to", "gguf", "--dtype", "q8_0")
    flip(other, "blk.0.attn_k.weight")
    monkeypatch.setattr(f"{module}.{word}", value)
    assert diff(gguf, gguf)[0] == 0
    code, result = diff(gguf, other)
    (found,) = result["found"].values()
    assert (code, found["status"], found["numbers"]) == (1, "different", None)
    assert found["note"].startswith(f"A: {why}")
    for pair in ((made["llama", "hf"], gguf), (gguf, made["llama", "meta"])):
        got = cli("diff", *pair)
        assert (got.code, got.out) == (3, "")
        assert got.err.startswith(f"error[weights-quantized]: {gguf}: embed.weight: {why}")


def test_a_half_that_holds_one_plus_w_is_subtracted_from_in_float32() -> None:
    """0.3 in bf16 is 1 + w of a w that bf16 has no digits for."""
    def norm(add: float) -> Output:
        return Output(name="x", dtype="BF16", shape=(4,), nbytes=8, rows=4, cols=1, how="values",
                      sources=(Piece("x", "x", "BF16", 4, 1),), terms=(((0, 1, (Rect(0, 0, 4, 1, 0, add=add),)),),))

    assert (_precise(norm(-1.0)).dtype, _precise(norm(0.0)).dtype) == ("F32", "BF16")


def test_a_norm_kept_as_one_plus_w_is_equal_up_to_rounding(diff: Any, convert: Any, tmp_path: Path) -> None:
    own = drawn(GEMMA)
    own["model.norm.weight"][:8] = torch.tensor([1e-3, -1e-6, 3e-8, 0.1, 0.0, -0.7, 1e-20, 5.0])
    hf = write(tmp_path / "hf", GEMMA, own)
    gguf = convert(hf, tmp_path / "gguf", "--to", "gguf")
    for a, b in ((hf, gguf), (gguf, hf)):
        code, result = diff(a, b)
        assert (code, set(result["found"])) == (0, {"norm.weight", "layers.0.attn_norm.weight",
                                                    "layers.0.mlp_norm.weight"})
        assert result["counts"]["rounding"] == 3
        assert diff(a, b, "--strict")[0] == 1
    assert diff(gguf, gguf)[1]["found"] == {}
    half = convert(hf, tmp_path / "half", "--dtype", "bf16")
    assert diff(half, gguf)[0] == 0
    own["model.norm.weight"][3] += 1e-6
    code, result = diff(write(tmp_path / "off", GEMMA, own), gguf)
    assert (code, result["found"]["norm.weight"]["status"]) == (1, "different")


# ---- what only one side has


def test_a_tensor_that_is_gone_is_named(two: Any, cli: Any, tmp_path: Path) -> None:
    own = drawn(LLAMA)
    code, result = two({k: v for k, v in own.items() if k != Q})
    (found,) = result["found"].values()
    assert (code, found["name"], found["status"]) == (1, "layers.1.attn.q.weight", "missing")
    assert (found["stored"], found["dtypes"], found["shapes"]) == ([[Q], []], ["F32", None], [[64, 64], None])
    assert "in A alone" in found["note"]
    assert "B's config has it, its files do not" in found["note"]
    both = cli("diff", tmp_path / "b", tmp_path / "b")
    assert both.code == 0
    assert "warning[weights-missing]: 1 tensors of the model are in neither's files: layers.1.attn.q.weight" in both.err


def test_zeros_and_the_embedding_stand_in_for_nothing_that_is_gone(two: Any, diff: Any, tmp_path: Path) -> None:
    name = "transformer.h.0.mlp.c_fc.bias"
    own = {**drawn(GPT2), name: torch.zeros(256)}
    code, result = two({k: v for k, v in own.items() if k != name}, a=own, config=GPT2)
    assert (code, {n: t["status"] for n, t in result["found"].items()}) == (1, {"layers.0.mlp.up.bias": "missing"})
    own = drawn(LLAMA)
    own["lm_head.weight"] = own["model.embed_tokens.weight"].clone()
    a = write(tmp_path / "whole", LLAMA, own)
    del own["lm_head.weight"]
    code, result = diff(a, write(tmp_path / "headless", LLAMA, own))
    assert (code, {n: t["status"] for n, t in result["found"].items()}) == (1, {"head.weight": "missing"})


def test_a_shape_that_only_one_config_says(diff: Any, tmp_path: Path) -> None:
    own = drawn(LLAMA | {"vocab_size": 90})
    a = write(tmp_path / "a", LLAMA | {"vocab_size": 90}, own)
    b = write(tmp_path / "b", LLAMA, own)
    for one, other, label in ((a, b, "B"), (b, a, "A")):
        code, result = diff(one, other)
        assert (code, {n: t["status"] for n, t in result["found"].items()}) == (1, {"embed.weight": "shape",
                                                                                   "head.weight": "shape"})
        assert result["found"]["head.weight"]["note"] == f"{label}: the config says 96x64"


def test_a_tensor_of_a_shape_that_the_config_does_not_say(two: Any) -> None:
    own = drawn(LLAMA)
    code, result = two({**own, "model.embed_tokens.weight": own["model.embed_tokens.weight"][:90].contiguous()})
    (found,) = result["found"].values()
    assert (code, found["name"], found["status"]) == (1, "embed.weight", "shape")
    assert found["shapes"] == [[96, 64], [90, 64]]
    assert "B: the config says 96x64" in found["note"]


def test_weights_of_which_the_config_names_none_are_refused(tmp_path: Path, cli: Any) -> None:
    a = write(tmp_path / "a", LLAMA, drawn(LLAMA))
    b = write(tmp_path / "b", GPT2, drawn(LLAMA))
    got = cli("diff", a, b)
    assert (got.code, got.out) == (3, "")
    assert got.err.startswith("error[weights-missing]: ")


def test_a_tied_model_against_an_untied_one(diff: Any, tmp_path: Path) -> None:
    tied = LLAMA | {"tie_word_embeddings": True}
    own = drawn(LLAMA)
    copied = {**own, "lm_head.weight": own["model.embed_tokens.weight"].clone()}
    alone = {k: v for k, v in own.items() if k != "lm_head.weight"}
    a = write(tmp_path / "a", tied, alone)
    for name, config, tensors, code in (("same", LLAMA, copied, 0), ("other", LLAMA, own, 1),
                                        ("twin", tied, copied, 0), ("odd", tied, own, 1)):
        b = write(tmp_path / name, config, tensors)
        for one, other, label in ((a, b, "A"), (b, a, "B")):
            found, result = diff(one, other)
            head = next(t for t in result["tensors"] if t["name"] == "head.weight")
            assert (found, head["status"]) == (code, "different" if code else "equal")
            assert head["note"] == f"{label} is tied: its token embedding is the head"
            assert head["stored"]["AB".index(label)] == ["model.embed_tokens.weight"]
            assert result["descriptions"] == []
    assert diff(tmp_path / "odd", tmp_path / "other")[0] == 0
    assert "head.weight" not in {t["name"] for t in diff(a, a)[1]["tensors"]}


def test_biases_of_zeros_are_no_biases(tmp_path: Path, diff: Any, convert: Any) -> None:
    hf = drawn(GPT2)
    state = {k: v.t().contiguous() if v.dim() == 2 and "h." in k else v for k, v in hf.items()
             if not k.endswith(".bias")}
    args = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 64, "bias": False, "vocab_size": 96, "dropout": 0.0}
    (tmp_path / "nano").mkdir()
    nano = tmp_path / "nano" / "ckpt.pt"
    torch.save({"model": {**state, "lm_head.weight": state["transformer.wte.weight"]}, "model_args": args}, nano)
    other = convert(nano, tmp_path / "hf", "--to", "hf")
    code, result = diff(nano, other)
    assert (code, result["found"], result["descriptions"]) == (0, {}, [])
    zeros = [t for t in result["tensors"] if t["note"] and "zeros" in t["note"]]
    assert len(zeros) == 2 * 8 + 1
    assert all(t["stored"][0] == [] for t in zeros)
    stored = load_file(other / "model.safetensors")
    stored["transformer.h.1.mlp.c_fc.bias"][7] = 1e-30
    save_file(stored, other / "model.safetensors")
    code, result = diff(other, nano)
    assert (code, {n: t["status"] for n, t in result["found"].items()}) == (1, {"layers.1.mlp.up.bias": "missing"})


def test_tensors_that_no_model_has_a_part_for(two: Any) -> None:
    own = drawn(LLAMA)
    a = {**own, "same": torch.arange(3), "steps": torch.tensor([1, 2]), "scale": torch.ones(4), "gone": torch.ones(2)}
    b = {**own, "same": torch.arange(3), "steps": torch.tensor([1, 3]), "scale": torch.ones(4) * 1.5,
         "new": torch.ones(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    code, result = two(b, a=a)
    assert code == 1
    assert {n: t["status"] for n, t in result["found"].items()} == {
        "steps": "different", "scale": "different", "gone": "missing", "new": "missing"}
    assert result["found"]["scale"]["numbers"]["max_abs"] == 0.5
    assert result["found"]["steps"]["numbers"] is None
    assert all("no part of the described model" in t["note"] for t in result["found"].values())
    assert "same" in {t["name"] for t in result["tensors"]}


def test_what_a_description_leaves_out_is_compared_where_both_could_have_it(diff: Any, convert: Any, tmp_path: Path
                                                                            ) -> None:
    config = LLAMA | {"model_type": "mimo", "num_nextn_predict_layers": 1}
    own = drawn(config)
    beyond = "model.layers.2.input_layernorm.weight"
    a = write(tmp_path / "a", config, {**own, "mtp.weight": torch.zeros(2), beyond: torch.ones(64)})
    b = write(tmp_path / "b", config, {**own, "mtp.weight": torch.ones(2)})
    code, result = diff(a, b)
    assert (code, {n: t["status"] for n, t in result["found"].items()}) == (1, {"mtp.weight": "different",
                                                                               beyond: "missing"})
    assert "multi-token" in result["found"][beyond]["note"]
    plain = {k: v for k, v in config.items() if k != "num_nextn_predict_layers"} | {"model_type": "qwen2"}
    gguf = convert(write(tmp_path / "plain", plain, own), tmp_path / "gguf", "--to", "gguf")
    for one, other, label in ((a, gguf, "A"), (gguf, a, "B")):
        code, result = diff(one, other)
        assert (code, result["found"], result["descriptions"]) == (0, {}, [])
        (said,) = (w["message"] for w in result["warnings"] if w["code"] == "diff-left-out")
        assert said.startswith(f"2 tensors are in {label} alone and have no place in the other layout (multi-token")
        assert "mtp.weight" in said


# ---- descriptions


@pytest.mark.parametrize(("change", "told"), [
    ({"rope_theta": 500000.0}, [("attn.rope.theta", [[0, 1]], ["10000", "500000"])]),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
     [("attn.rope.scaling", [[0, 1]], ["none", "RopeScaling (kind linear, factor 2)"])]),
    ({"rms_norm_eps": 1e-6}, [("norm.eps", [], ["1e-05", "1e-06"]), ("attn_norm.eps", [[0, 1]], ["1e-05", "1e-06"]),
                              ("mlp_norm.eps", [[0, 1]], ["1e-05", "1e-06"])]),
    ({"hidden_act": "gelu"}, [("mlp.activation", [[0, 1]], ["silu", "gelu"])]),
    ({"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16},
     [("attn.n_heads", [[0, 1]], ["8", "4"]), ("attn.n_kv_heads", [[0, 1]], ["2", "1"]),
      ("attn.head_dim", [[0, 1]], ["8", "16"]), ("attn.rope.dim", [[0, 1]], ["8", "16"])]),
    ({"max_position_embeddings": 256, "torch_dtype": "bfloat16"}, []),
])
def test_the_same_tensors_under_another_description(two: Any, change: dict[str, Any],
                                                    told: list[tuple[Any, ...]]) -> None:
    code, result = two(drawn(LLAMA), other=LLAMA | change)
    assert (code, result["found"], result["differing"]) == (1 if told else 0, {}, 0)
    assert [(c["part"], c["layers"], c["values"]) for c in result["descriptions"]] == told


def test_layers_that_differ_are_named(diff: Any, tmp_path: Path) -> None:
    config = LLAMA | {"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 16}
    a = write(tmp_path / "a", config | {"max_window_layers": 2}, drawn(config))
    b = write(tmp_path / "b", config | {"max_window_layers": 3}, drawn(config))
    (change,) = diff(a, b)[1]["descriptions"]
    assert (change["part"], change["layers"], change["values"]) == ("attn.window", [[2, 2]], ["16", "none"])


def test_a_model_of_more_layers(two: Any, cli: Any, tmp_path: Path) -> None:
    more = LLAMA | {"num_hidden_layers": 3}
    code, result = two({**drawn(more), **drawn(LLAMA), "model.layers.2.input_layernorm.weight": torch.zeros(64)},
                       other=more)
    assert (code, len(result["found"]), result["counts"]["missing"]) == (1, 9, 9)
    assert all(n.startswith("layers.2.") and t["stored"][0] == [] for n, t in result["found"].items())
    assert result["descriptions"] == [{"part": "layers", "layers": [], "values": ["2", "3"]}]
    err = cli("diff", tmp_path / "a", tmp_path / "b").err
    assert err == "error[diff]: 9 of 30 tensors differ; the descriptions differ in 1\n"


def test_another_family(made: Any, diff: Any) -> None:
    code, result = diff(made["gpt2", "hf"], made["llama", "gguf"])
    assert code == 1
    assert [m["family"] for m in result["models"]] == ["gpt2", "llama"]
    status = {n: t["status"] for n, t in result["found"].items()}
    assert status["embed.weight"] == status["layers.0.attn.q.weight"] == "different"
    assert status["layers.0.attn.k.weight"] == "shape"
    assert status["layers.0.mlp.gate.weight"] == status["pos_embed.weight"] == "missing"
    assert {"norm.kind", "positions", "attn.rope", "mlp.gated"} <= {c["part"] for c in result["descriptions"]}


# ---- without torch, in bounds


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamactl.cli import diffing, located

    for module in (diffing, located):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "llamactl.net.differing", None)
    monkeypatch.setitem(sys.modules, "llamactl.net.values", None)


@pytest.mark.usefixtures("no_torch")
def test_without_torch_bytes_tell_what_differs(made: Any, two: Any, diff: Any) -> None:
    for family in ("llama", "gpt2"):  # gpt2's matrices lie turned on both sides
        assert diff(made[family, "hf"], made[family, "hf"])[0] == 0
    assert diff(made["llama", "lesson"], made["llama", "gguf"])[0] == 0
    own = drawn(LLAMA)
    code, result = two({**own, Q: own[Q] + 1})
    assert (code, set(result["found"])) == (1, {"layers.1.attn.q.weight"})
    assert result["found"]["layers.1.attn.q.weight"]["numbers"] is None
    assert [w["code"] for w in result["warnings"]] == ["diff-numbers"]


@pytest.mark.usefixtures("no_torch")
def test_without_torch_types_and_orientations_are_not_guessed_at(made: Any, cli: Any, tmp_path: Path) -> None:
    own = drawn(LLAMA)
    a = write(tmp_path / "a", LLAMA, own)
    b = write(tmp_path / "b", LLAMA, {k: v.half() for k, v in own.items()})
    for pair in ((a, b), (made["gpt2", "hf"], made["gpt2", "lesson"])):
        got = cli("diff", *pair)
        assert (got.code, got.out) == (4, "")
        assert got.err.startswith("error[extra-missing]: comparing tensors of different types, or turned against")


def test_equal_bytes_are_compared_without_importing_torch(made: Any, environment: Any, tmp_path: Path) -> None:
    code = ("import sys\nfrom llamactl.cli.app import run\ncode = run(['diff', *sys.argv[1:], '-q'])\n"
            "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\nsys.exit(code)")
    done = subprocess.run([sys.executable, "-c", code, made["llama", "hf"], made["llama", "gguf"]], check=False,
                          env=environment(tmp_path), capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def peak() -> int:
    """Bytes of memory at the highest since the last call."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says the peak of memory anew")
def test_values_are_compared_block_by_block() -> None:
    """Two tensors of 128 MiB each, in blocks of unlike sizes."""
    blocks = [bytes(24 << 20), bytes(40 << 20), bytes(64 << 20)]
    Difference(iter([bytes(8)]), iter([bytes(8)]), ("F32", "F32"))
    peak()
    before = peak()
    d = Difference(iter(blocks), iter(blocks[::-1]), ("F32", "F32"))
    assert (d.elements, d.differing, d.bits) == (1 << 25, 0, True)
    assert peak() - before < 32 << 20


def test_blocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal blocks, different ones and such with a NaN, of four elements each."""
    monkeypatch.setattr("llamactl.net.differing.AT_ONCE", 4)
    a = torch.tensor([NAN, 1, -9, INF, 1, 2, 3, 4, NAN, 7, 1, 1, 5])
    b = torch.tensor([NAN, 1, -9, INF, 1, 2, 3, 6, NAN, 8, 1, NAN, 5])
    one, other = (iter([x.view(torch.uint8).numpy().tobytes()]) for x in (a, b))
    found = Difference(one, other, ("F32", "F32"))
    assert (found.elements, found.differing, found.not_finite, found.nans) == (13, 3, 1, (2, 3))
    assert (found.max_abs, found.largest, found.bits) == (2.0, 9.0, False)


def test_blocks_of_a_quantised_type_are_not_cut() -> None:
    def output(kind: str, from_col: int, turned: bool = False) -> Output:
        rect = Rect(0, 0, 2, 64, 0, 0, from_col, turned)
        return Output(name="x", dtype="F32", shape=(2, 64), nbytes=512, rows=2, cols=64, how="values",
                      sources=(Piece("x", "x", kind, 64 if turned else 2, 2 if turned else 64 + from_col),),
                      terms=(((0, 64, (rect,)),),))

    whole = stored_form(output("Q8_0", 0))
    assert whole is not None
    assert (whole.output.dtype, whole.output.nbytes) == ("Q8_0", 2 * 2 * 34)
    assert stored_form(output("F16", 64)) is not None
    assert stored_form(output("Q8_0", 64)) is None
    turned = stored_form(output("F16", 0, turned=True))
    assert turned is not None
    assert (turned.turned, turned.output.rows, turned.output.cols) == (True, 64, 2)
    assert stored_form(output("Q8_0", 0, turned=True)) is None


@pytest.mark.parametrize("cut", [1, 3, 7, 64 << 10, 100_000])
def test_how_bytes_are_cut_does_not_matter(cut: int) -> None:
    data = bytes(range(251)) * 900

    def cuts(text: bytes, n: int) -> Iterator[memoryview | bytes]:
        yield b""
        for at in range(0, len(text), n * 4096 if n < 10 else n):
            yield memoryview(text)[at : at + (n * 4096 if n < 10 else n)]

    assert same_bytes(cuts(data, cut), cuts(data, 5))
    for at in (0, 65_535, 65_536, len(data) - 1):
        wrong = bytearray(data)
        wrong[at] ^= 1
        assert not same_bytes(cuts(data, cut), cuts(bytes(wrong), 5))
    assert not same_bytes(cuts(data, cut), cuts(data[:-1], 5))
    assert not same_bytes(cuts(data[:-1], cut), cuts(data, 5))


def test_tensors_of_unlike_lengths_are_no_pair() -> None:
    with pytest.raises(ValueError, match="ends before"):
        Difference(iter([bytes(8)]), iter([bytes(4)]), ("F32", "F32"))


def test_progress_ends_where_it_said(made: Any, diff: Any, two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamactl.cli import diffing

    told: list[list[int]] = []

    class Recorder:
        def __init__(self, out: object, what: str, total: int) -> None:
            told.append([total])

        def __enter__(self) -> Callable[[int], None]:
            return told[-1].append

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(diffing, "Progress", Recorder)
    diff(made["gpt2", "hf"], made["gpt2", "nanogpt"])
    config = LLAMA | {"vocab_size": 8192}
    own = drawn(config)
    late = own["model.embed_tokens.weight"].clone()
    late[-1] += 1
    two({**{k: v for k, v in own.items() if k != Q}, "model.embed_tokens.weight": late}, a=own, config=config)
    for total, *steps in told:
        assert total == sum(steps) > 100_000
    assert len(told) == 2


# ---- the answer


def test_answers_follow_the_schema_in_every_state(made: Any, cli: Any, convert: Any, tmp_path: Path) -> None:
    validator = Draft202012Validator(cli("schema", "diff").json())
    half = convert(made["llama", "hf"], tmp_path / "half", "--dtype", "bf16")
    for a, b in ((made["llama", "hf"], made["llama", "meta"]), (made["llama", "hf"], half),
                 (made["gpt2", "gguf"], made["llama", "hf"])):
        body = cli("diff", a, b, "--json").json()
        validator.validate(body)
        assert (body["command"], body["model"]) == ("diff", None)
        assert body["inputs"] == {"strict": False, "all": False}
        assert [m["source"]["id"] for m in body["result"]["models"]] == [m["id"] for m in body["result"]["models"]]


def test_no_object_of_an_answer_takes_a_key_more_or_a_key_less(made: Any, cli: Any) -> None:
    validator = Draft202012Validator(cli("schema", "diff").json())
    text = cli("diff", made["gpt2", "hf"], made["llama", "hf"], "--json").out
    result = json.loads(text)["result"]
    measured = next(n for n, t in enumerate(result["tensors"]) if t["numbers"])
    places: list[tuple[Any, ...]] = [(), ("models", 1), ("models", 0, "source"), ("counts",), ("descriptions", 0),
                                     ("tensors", 0), ("tensors", measured, "numbers")]
    for place in places:
        for change in ("more", "less"):
            body = json.loads(text)
            at = body["result"]
            for key in place:
                at = at[key]
            if change == "more":
                at["surprise"] = 1
            else:
                del at[next(iter(at))]
            assert not validator.is_valid(body), (place, change)


def test_people_read_what_differs_and_csv_holds_all(made: Any, cli: Any, two: Any, tmp_path: Path) -> None:
    own = drawn(LLAMA)
    two({**own, Q: own[Q] * 2})
    pair = (tmp_path / "a", tmp_path / "b")
    got = cli("diff", *pair)
    assert got.code == 1
    assert "tensors  21: 20 equal bit for bit, 1 different\n" in got.out
    (line,) = (x for x in got.out.splitlines() if x.startswith("layers."))
    assert line.startswith("layers.1.attn.q.weight  different  F32 ")
    assert line.count(Q) == 2
    assert "4,096 of 4,096" in line
    assert len([x for x in cli("diff", *pair, "--all").out.splitlines() if " F32 " in x]) == 21
    assert cli("diff", *pair, "-q").out == "1\n"
    rows = list(csv.DictReader(io.StringIO(cli("diff", *pair, "--format", "csv").out)))
    assert len(rows) == 21
    (row,) = (r for r in rows if r["status"] == "different")
    assert (row["tensor"], row["relative"], row["differing"], row["stored_b"]) == (
        "layers.1.attn.q.weight", "1.0", "4096", Q)
    for format in ("md", "table"):
        assert "layers.1.attn.q.weight" in cli("diff", *pair, "--format", format, env={"COLUMNS": "250"}).out
    same = cli("diff", pair[0], pair[0])
    assert (same.code, same.err, same.out.endswith("verdict  equal\n")) == (0, "", True)
    assert cli("diff", pair[0], pair[0], "-q").out == "0\n"


def test_names_from_files_cannot_steer_a_terminal(two: Any, cli: Any, tmp_path: Path) -> None:
    two({**drawn(LLAMA), "\x1b[31mred\u202e": torch.ones(2)})
    for format in ("plain", "table", "csv", "md"):
        got = cli("diff", tmp_path / "a", tmp_path / "b", "--format", format, env={"COLUMNS": "250"})
        assert "\x1b" not in got.out
        assert "\u202e" not in got.out
        assert "[31mred" in got.out


@pytest.mark.parametrize(("args", "code", "word"), [
    ((), 2, "usage"), (("./model",), 2, "usage"), (("./none", "./none"), 4, "not-found"),
    (("gpt2", "gpt2"), 4, "weights-not-found"),
])
def test_what_cannot_be_compared(cli: Any, folder: Any, args: tuple[str, ...], code: int, word: str) -> None:
    folder()
    got = cli("diff", *args)
    assert (got.code, got.out) == (code, "")
    assert got.err.startswith(f"error[{word}]: ")
