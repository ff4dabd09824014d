"""`llamactl inspect`: folders, single files, GGUF, the Hub by Range; exit codes, lists, and how fast."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest

from llamactl.render.schema import schema_of

TOKEN = "hf_SECRETsecretSECRET"
COMMIT = "b" * 40
INDEX = "model.safetensors.index.json"
SIZE = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "I32": 4, "I64": 8, "U32": 4, "F8_E4M3": 1}


def safetensors(tensors: Mapping[str, tuple[Any, ...]]) -> bytes:
    """A whole file; a tensor is (dtype, shape) of zeros, or (dtype, shape, data)."""
    header: dict[str, Any] = {}
    body = b""
    for name, (dtype, shape, *data) in tensors.items():
        bytes_ = data[0] if data else bytes(prod(shape) * SIZE[dtype])
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + len(bytes_)]}
        body += bytes_
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@pytest.fixture
def checkpoint(folder: Any, tiny: Any) -> Callable[..., Path]:
    """checkpoint(tensors, config, name): a folder with those weights, the small Llama's by default."""

    def make(tensors: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None, name: str = "model"
             ) -> Path:
        path: Path = folder({**tiny.config, **(config or {})}, name)
        (path / "model.safetensors").write_bytes(safetensors(tiny.tensors(tiny.config) if tensors is None else tensors))
        return path

    return make


# ---- a folder


def test_a_folder_that_agrees(cli: Any, checkpoint: Any, tiny: Any) -> None:
    got = cli("inspect", checkpoint(), "--strict")
    assert (got.code, got.err) == (0, "")
    assert f"config says {tiny.total:,}; files hold {tiny.total:,}" in got.out
    assert "all as the config has them" in got.out
    model = cli("inspect", checkpoint(), "--json").model
    assert (model["agrees"], model["clean"], model["compared"]) == (True, True, "name")
    assert model["parameters"] == {"config": tiny.total, "files": tiny.total, "agree": True}
    assert model["dtypes"] == [{"dtype": "F32", "tensors": 21, "elements": tiny.total, "weights_bytes": 4 * tiny.total}]
    assert [f["name"] for f in model["files"]] == ["model.safetensors"]
    assert cli("inspect", checkpoint(), "-q").out == f"{tiny.total}\n"
    assert cli("inspect", cwd=checkpoint()).out.startswith("model (")


@pytest.mark.parametrize("format", ["plain", "table", "csv", "md", "json"])
def test_every_format_and_verbose(cli: Any, checkpoint: Any, tiny: Any, format: str) -> None:
    path = checkpoint({**tiny.tensors(tiny.config), "x\x1b[31m": ("F32", (1,))})
    for flags in ((), ("-v",)):
        got = cli("inspect", path, "--format", format, *flags, env={"COLUMNS": "300"})
        assert got.code == 0
        assert got.out
        assert "\x1b[31m" not in got.out + got.err


def test_what_does_not_fit_is_named_in_json_whole_in_text_in_part(cli: Any, checkpoint: Any, tiny: Any) -> None:
    tensors = tiny.tensors(tiny.config)
    gone = [n for n in tensors if "mlp" in n or "norm" in n]
    assert len(gone) == 11
    for n in gone:
        del tensors[n]
    tensors |= {"lm_head.weight": ("F32", (102, 64)), **{f"odd.{i}": ("F32", (1,)) for i in range(20)}}
    path = checkpoint(tensors)
    got = cli("inspect", path, "--json")
    assert (sorted(got.model["missing"]), len(got.model["unexpected"])) == (sorted(gone), 20)
    assert got.model["reshaped"] == [{"name": "lm_head.weight", "stored": [102, 64], "config": [101, 64]}]
    assert {w["code"] for w in got.json()["warnings"]} == {"weights-missing", "weights-unexpected", "weights-shape"}
    text = cli("inspect", path)
    assert text.code == 0
    assert "missing (11)" in text.out
    assert "... and 12 more" in text.out
    assert "odd.19" not in text.out
    assert "odd.19" in cli("inspect", path, "-v").out
    strict = cli("inspect", path, "--strict")
    assert strict.code == 1
    assert strict.out == text.out
    assert "error[inspect]" in strict.err


def sharded(path: Path, tensors: Mapping[str, Any], *, leave_out: tuple[str, ...] = (), total: int | None = None
            ) -> None:
    """Two shards and an index that may lie."""
    names = sorted(tensors)
    at = {n: f"model-{i * 2 // len(names) + 1:05}-of-00002.safetensors" for i, n in enumerate(names)}
    for shard in sorted(set(at.values())):
        (path / shard).write_bytes(safetensors({n: tensors[n] for n in names if at[n] == shard}))
    said = {} if total is None else {"total_size": total}
    (path / INDEX).write_text(json.dumps({"metadata": said, "weight_map": {
        n: s for n, s in at.items() if n not in leave_out}}))


def test_the_index_is_held_against_the_shards_both_ways(cli: Any, folder: Any, tiny: Any) -> None:
    path, tensors = folder(), tiny.tensors(tiny.config)
    sharded(path, tensors, total=4 * tiny.total)
    model = cli("inspect", path, "--json").model
    assert model["index"] == {"tensors": 21, "total_size": 4 * tiny.total, "total_size_agrees": True, "not_listed": [],
                              "not_stored": [], "not_read": []}
    assert (len(model["files"]), model["clean"]) == (2, True)
    sharded(path, tensors, leave_out=("model.norm.weight",), total=7)
    (path / "orphan.safetensors").write_bytes(safetensors({"a": ("F32", (1,))}))
    got = cli("inspect", path, "--json")
    assert got.model["index"]["not_listed"] == ["model.norm.weight"]
    assert got.model["index"]["not_read"] == ["orphan.safetensors"]
    assert got.model["index"]["total_size_agrees"] is False
    assert {w["code"] for w in got.json()["warnings"]} == {"index-unmapped", "index-orphan", "index-total"}
    assert cli("inspect", path, "--strict").code == 1
    assert cli("inspect", path).code == 0


def test_copies_are_named_and_counted_once(cli: Any, folder: Any, tiny: Any) -> None:
    path, tensors = folder(), tiny.tensors(tiny.config)
    sharded(path, tensors, total=4 * tiny.total)
    (path / "consolidated.safetensors").write_bytes(safetensors(tensors))
    (path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    (path / "original").mkdir()
    (path / "original" / "consolidated.00.pth").write_bytes(b"PK\x03\x04")
    model = cli("inspect", path, "--json").model
    assert model["copies"] == ["consolidated.safetensors", "pytorch_model.bin", "original/"]
    assert (model["parameters"]["files"], model["clean"]) == (tiny.total, True)
    assert "copies" in cli("inspect", path).out


def test_a_stored_tied_head(cli: Any, checkpoint: Any, tiny: Any) -> None:
    got = cli("inspect", checkpoint(config={"tie_word_embeddings": True}), "--json")
    assert got.model["head"]["stored"]
    assert got.model["parameters"]["agree"]
    assert [w["code"] for w in got.json()["warnings"]] == ["weights-tied-head"]
    assert got.model["parameters"]["files"] == tiny.total - 101 * 64


@pytest.mark.parametrize(("config", "code"), [
    (b'{"model_type": "lama"}', "config-model-type"), (b'{"model_type": "x", "auto_map": {}}', "config-remote-code")])
def test_an_unknown_architecture_is_refused_and_its_headers_told_on_request(
        cli: Any, folder: Any, tiny: Any, config: bytes, code: str) -> None:
    path = folder(config, tensors=tiny.tensors(tiny.config))
    refused = cli("inspect", path)
    assert (refused.code, refused.out) == (3, "")
    assert f"error[{code}]" in refused.err
    assert "--headers-only" in refused.err
    got = cli("inspect", path, "--headers-only", "--json")
    assert (got.model["family"], got.model["parameters"]["files"]) == (None, tiny.total)
    assert [w["code"] for w in got.json()["warnings"]] == [code]
    assert cli("inspect", path, "--headers-only", "--strict").code == 1
    assert cli("inspect", path, "--headers-only", "-v").code == 0


def test_a_config_without_weights(cli: Any, folder: Any, tiny: Any) -> None:
    got = cli("inspect", folder(json.dumps(tiny.config).encode()), "--json")
    assert got.code == 0
    assert (got.model["parameters"]["config"], got.model["parameters"]["files"]) == (tiny.total, 0)
    assert "no-weights" in [w["code"] for w in got.json()["warnings"]]
    assert cli("inspect", folder(json.dumps(tiny.config).encode(), "again"), "--strict").code == 1


@pytest.mark.parametrize(("config", "code"), [(b"null", "config-type"), (b"{", "json-syntax"), (b"", "json-empty"),
                                              (b'{"model_type": "llama"}', "config-missing")])
def test_a_broken_config_is_refused(cli: Any, folder: Any, tiny: Any, config: bytes, code: str) -> None:
    got = cli("inspect", folder(config, tensors=tiny.tensors(tiny.config)), "--json")
    assert (got.code, got.json()["error"]["code"]) == (3, code)


def test_weights_without_a_config(cli: Any, checkpoint: Any, tiny: Any) -> None:
    path = checkpoint()
    (path / "config.json").unlink()
    refused = cli("inspect", path)
    assert (refused.code, refused.out) == (3, "")
    assert "--headers-only" in refused.err
    got = cli("inspect", path, "--headers-only")
    assert got.code == 0
    assert f"files hold {tiny.total:,}" in got.out
    assert "config-missing-file" in got.err
    single = cli("inspect", path / "model.safetensors", "--strict")
    assert (single.code, single.err) == (0, "")
    assert f"files hold {tiny.total:,}" in single.out
    assert cli("inspect", path / "model.safetensors", "-q").out == f"{tiny.total}\n"


@pytest.mark.parametrize(("args", "code", "word"), [
    (("llama-3-8b",), 2, "no-folder"), (("./none",), 4, "not-found"), (("none.safetensors",), 4, "not-found"),
    (("--remote",), 2, "hub-id"), (("--remote", "./x"), 2, "hub-id"), ((".",), 3, "no-model"),
    (("--remote", "org/m", "--offline"), 4, "hub-offline")])
def test_what_has_no_weights(cli: Any, args: tuple[str, ...], code: int, word: str) -> None:
    got = cli("inspect", *args)
    assert (got.code, got.out) == (code, "")
    assert f"error[{word}]" in got.err


# ---- quantised containers, in real files


def bnb(shape: tuple[int, int]) -> dict[str, tuple[Any, ...]]:
    n = prod(shape)
    text = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}).encode()
    return {"": ("U8", (n // 2, 1)), ".absmax": ("F32", (n // 64,)), ".quant_map": ("F32", (16,)),
            ".quant_state.bitsandbytes__nf4": ("U8", (len(text),), text)}


BNB = {"vocab_size": 200, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
       "num_key_value_heads": 4, "torch_dtype": "bfloat16",
       "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
GPTQ = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
        "num_attention_heads": 4, "torch_dtype": "float16",
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}}


def bnb_tensors(tiny: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, (_, shape) in tiny.tensors({**tiny.config, **BNB}).items():
        out |= {name + s: t for s, t in bnb(shape).items()} if "proj" in name else {name: ("BF16", shape)}
    return out


def gptq_tensors(tiny: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, (_, shape) in tiny.tensors({**tiny.config, **GPTQ}).items():
        if "proj" not in name:
            out[name] = ("F16", shape)
            continue
        rows, cols = shape
        stem = name.removesuffix("weight")
        out |= {f"{stem}qweight": ("I32", (cols // 8, rows)), f"{stem}qzeros": ("I32", (cols // 64, rows // 8)),
                f"{stem}scales": ("F16", (cols // 64, rows)), f"{stem}g_idx": ("I32", (cols,))}
    return out


def test_two_weights_in_a_byte(cli: Any, checkpoint: Any, tiny: Any) -> None:
    path = checkpoint(bnb_tensors(tiny), BNB)
    assert cli("inspect", path, "-q", "--strict").out == "66752\n"
    model = cli("inspect", path, "--json").model
    states = sum(len(t[2]) for n, t in bnb_tensors(tiny).items() if "quant_state" in n)
    assert model["quantization"] == {"config": "bitsandbytes", "unread": [], "agree": True, "found": [
        {"kind": "bitsandbytes-4bit", "bits": 4, "weights": 7, "elements": 40_960,
         "weights_bytes": 40_960 // 2 + 4 * 40_960 // 64 + 7 * 64 + states}]}
    assert (model["agrees"], model["bookkeeping"][0]["tensors"]) == (True, 21)
    assert model["elements"] - model["bookkeeping"][0]["elements"] == 46_272
    files = cli("params", path, "--weights", "--json").model["files"]
    assert (files["agrees"], files["missing"], files["unexpected"]) == (True, [], [])


def test_eight_weights_in_an_int32(cli: Any, checkpoint: Any, tiny: Any) -> None:
    path = checkpoint(gptq_tensors(tiny), GPTQ)
    model = cli("inspect", path, "--json").model
    assert model["parameters"] == {"config": 172_416, "files": 172_416, "agree": True}
    assert (model["elements"], model["clean"]) == (47_008, True)
    (found,) = model["quantization"]["found"]
    assert (found["kind"], found["bits"], found["elements"]) == ("gptq", 4, 147_456)
    assert "gptq unpacked" in cli("params", path, "--weights").out


def awq(rows: int, cols: int) -> dict[str, tuple[Any, ...]]:
    return {"qweight": ("I32", (cols, rows // 8)), "qzeros": ("I32", (cols // 16, rows // 8)),
            "scales": ("F16", (cols // 16, rows))}


def packed(rows: int, cols: int) -> dict[str, tuple[Any, ...]]:
    return {"weight_packed": ("I32", (rows, cols // 8)), "weight_scale": ("BF16", (rows, 1)),
            "weight_shape": ("I64", (2,), struct.pack("<qq", rows, cols))}


def mlx(rows: int, cols: int) -> dict[str, tuple[Any, ...]]:
    return {"weight": ("U32", (rows, cols // 8)), "scales": ("F16", (rows, cols // 32)),
            "biases": ("F16", (rows, cols // 32))}


def nvfp4(rows: int, cols: int) -> dict[str, tuple[Any, ...]]:
    return {"weight": ("U8", (rows, cols // 2)), "weight_scale": ("F8_E4M3", (rows, cols // 16)),
            "weight_scale_2": ("F32", ()), "input_scale": ("F32", ())}


def fp8(rows: int, cols: int) -> dict[str, tuple[Any, ...]]:
    return {"weight": ("F8_E4M3", (rows, cols)), "weight_scale_inv": ("F32", (1, 1))}


@pytest.mark.parametrize(("make", "words", "kind"), [
    (awq, {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 16}}, "awq"),
    (packed, {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
     "pack-quantized"),
    (mlx, {"quantization": {"bits": 4, "group_size": 32}}, "mlx"),
    (mlx, {"quantization_config": {"bits": 4, "group_size": 32, "mode": "affine"}}, "mlx"),
    (nvfp4, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "nvfp4"),
    (fp8, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8"),
], ids=["awq", "compressed-tensors", "mlx", "mlx-config", "nvfp4", "fp8"])
def test_every_container_in_a_folder(cli: Any, checkpoint: Any, tiny: Any, make: Any, words: Any, kind: str) -> None:
    tensors: dict[str, Any] = {}
    for name, (_, shape) in tiny.tensors(tiny.config).items():
        stem = name.removesuffix("weight")
        tensors |= {stem + s: t for s, t in make(*shape).items()} if "proj" in name else {name: ("F32", shape)}
    got = cli("inspect", checkpoint(tensors, words), "--json", "--strict")
    assert (got.code, got.model["agrees"], got.model["parameters"]["files"]) == (0, True, tiny.total)
    assert [c["kind"] for c in got.model["quantization"]["found"]] == [kind]
    assert got.json()["warnings"] == []


def test_a_container_that_is_not_read_is_not_judged(cli: Any, checkpoint: Any, tiny: Any) -> None:
    tensors = {n.replace("up_proj.weight", "up_proj.codebooks"): t for n, t in tiny.tensors(tiny.config).items()}
    path = checkpoint(tensors, {"quantization_config": {"quant_method": "aqlm"}})
    model = cli("inspect", path, "--json").model
    assert (model["agrees"], model["parameters"]["files"], model["missing"]) == (None, None, [])
    assert "AQLM" in model["not_judged"]
    assert cli("inspect", path).code == 0
    assert cli("inspect", path, "--strict").code == 1
    quiet = cli("inspect", path, "-q")
    assert (quiet.code, quiet.out) == (3, "")
    assert "container-unread" in quiet.err
    assert cli("params", path, "--weights", "--json").model["files"]["agrees"] is None


def test_a_damaged_quant_state_is_not_believed(cli: Any, checkpoint: Any, tiny: Any) -> None:
    tensors = bnb_tensors(tiny)
    name = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"
    tensors[name] = ("U8", (80,))
    got = cli("inspect", checkpoint(tensors, BNB), "--json")
    assert (got.model["agrees"], got.model["missing"]) == (None, [])
    assert "container-unread" in {w["code"] for w in got.json()["warnings"]}


# ---- GGUF


def gguf_file(path: Path, *, architecture: str = "llama", drop: str = "", more: Mapping[str, Any] | None = None
              ) -> Path:
    gguf = pytest.importorskip("gguf")
    np = pytest.importorskip("numpy")
    h, f, v, kv = 64, 96, 101, 16
    w = gguf.GGUFWriter(str(path), architecture)
    w.add_block_count(1)
    w.add_context_length(128)
    w.add_embedding_length(h)
    w.add_feed_forward_length(f)
    w.add_head_count(8)
    w.add_head_count_kv(2)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(v)
    shapes = {"token_embd": (v, h), "output_norm": (h,), "output": (v, h), "blk.0.attn_norm": (h,),
              "blk.0.ffn_norm": (h,), "blk.0.attn_q": (h, h), "blk.0.attn_k": (kv, h), "blk.0.attn_v": (kv, h),
              "blk.0.attn_output": (h, h), "blk.0.ffn_gate": (f, h), "blk.0.ffn_up": (f, h), "blk.0.ffn_down": (h, f)}
    for name, shape in {**shapes, **(more or {})}.items():
        if name == drop:
            continue
        if len(shape) == 2 and name.startswith("blk"):
            rows = np.zeros((shape[0], shape[1] // 32 * 18), dtype=np.uint8)
            w.add_tensor(f"{name}.weight", rows, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
        else:
            w.add_tensor(f"{name}.weight", np.zeros(shape, dtype=np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


GGUF_TOTAL = 2 * 101 * 64 + 2 * 64 * 64 + 2 * 16 * 64 + 3 * 96 * 64 + 3 * 64


def test_a_gguf_file(cli: Any, tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", more={"rope_freqs": (4,)})
    model = cli("inspect", path, "--json").model
    assert model["parameters"] == {"config": GGUF_TOTAL, "files": GGUF_TOTAL, "agree": True}
    assert (model["compared"], model["agrees"], model["clean"], model["family"]) == ("block", True, True, "llama")
    assert {d["dtype"] for d in model["dtypes"]} == {"Q4_0", "F32"}
    assert model["ignored"][0]["names"] == ["rope_freqs.weight"]
    assert cli("inspect", path, "-q", "--strict").out == f"{GGUF_TOTAL}\n"
    assert "block by block" in cli("inspect", path, "-v").out


@pytest.mark.parametrize(("change", "code"), [({"drop": "blk.0.ffn_up"}, "gguf-mismatch"),
                                              ({"architecture": "lama"}, "gguf-architecture")])
def test_a_gguf_file_that_no_description_fits(cli: Any, tmp_path: Path, change: dict[str, str], code: str) -> None:
    path = gguf_file(tmp_path / "m.gguf", **change)  # type: ignore[arg-type]
    got = cli("inspect", path, "--json")
    assert got.code == 0
    assert [w["code"] for w in got.json()["warnings"]] == [code]
    assert (got.model["parameters"]["config"], got.model["family"]) == (None, None)
    assert cli("inspect", path, "--strict").code == 1


# ---- the Hub, by Range


@pytest.fixture
def hub() -> Iterator[Any]:
    name = "llamactl_tests_fakehub"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "source" / "fakehub.py")
        assert spec
        assert spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    with sys.modules[name].FakeHub() as server:
        yield server


@pytest.fixture
def remote(run: Any, hub: Any) -> Callable[..., Any]:
    def call(*args: str, **env: str | None) -> Any:
        return run("inspect", "--remote", *args, env={"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": None, "HF_TOKEN": TOKEN,
                                                      "NO_PROXY": "*", **env})

    return call


def published(tmp_path: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a repository: config, index and two shards whose data are large beside their headers."""
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    sharded(folder, tensors, total=sum(prod(t[1]) * SIZE[t[0]] for t in tensors.values()))
    return {f.name: f.read_bytes() for f in folder.iterdir()}


def header_bytes(files: Mapping[str, bytes]) -> int:
    return sum(8 + int.from_bytes(b[:8], "little") for n, b in files.items() if n.endswith(".safetensors"))


def test_only_header_bytes_come_from_the_hub(remote: Any, hub: Any, tiny: Any, tmp_path: Path) -> None:
    files = published(tmp_path, tiny.config, tiny.tensors(tiny.config))
    with type(hub)() as storage:
        large = tuple(n for n in files if n.endswith(".safetensors"))
        hub.add("org/m", commit=COMMIT, files=files, stored_at=storage.url, large=large)
        storage.add("org/m", commit=COMMIT, files=files)
        got = remote("org/m", "--json")
    assert got.code == 0, got.err
    assert got.err == ""
    assert got.json()["model"]["source"] == "hub"
    assert got.json()["model"]["revision"] == COMMIT
    assert got.model["parameters"] == {"config": tiny.total, "files": tiny.total, "agree": True}
    assert (got.model["clean"], [f["name"] for f in got.model["files"]]) == (True, sorted(large))
    assert sum(f["file_bytes"] for f in got.model["files"]) == sum(len(files[n]) for n in large)
    sent = [n for p, n in storage.sent if p.endswith(".safetensors")]
    assert sum(sent) == header_bytes(files) < sum(len(files[n]) for n in large) / 10
    assert {r.path for r in storage.log} == {f"/org/m/resolve/{COMMIT}/{n}" for n in large}
    assert all("range" in r.headers and "authorization" not in r.headers for r in storage.log)
    assert any(TOKEN in r.headers.get("authorization", "") for r in hub.log)
    assert TOKEN not in got.out + got.err


def test_one_file_at_a_revision(remote: Any, hub: Any, tiny: Any) -> None:
    tensors = gptq_tensors(tiny)
    hub.add("org/m", commit=COMMIT, refs=("main", "v1"), files={
        "config.json": json.dumps({**tiny.config, **GPTQ}).encode(), "model.safetensors": safetensors(tensors)})
    got = remote("org/m@v1", "-q")
    assert (got.code, got.out, got.err) == (0, "172416\n", "")


def test_bitsandbytes_by_header_alone(remote: Any, hub: Any, tiny: Any) -> None:
    hub.add("org/m", commit=COMMIT, files={"config.json": json.dumps({**tiny.config, **BNB}).encode(),
                                           "model.safetensors": safetensors(bnb_tensors(tiny))})
    got = remote("org/m", "--json", "--strict")
    assert (got.code, got.model["parameters"]["files"], got.model["agrees"]) == (0, 66_752, True)


@pytest.mark.parametrize(("data", "code"), [
    (b"version https://git-lfs.github.com/spec/v1\n" + b"x" * 90, "st-header-too-large"),
    (b"\x07\x00", "st-header-short"), (struct.pack("<Q", 9) + b"{" * 9, "st-header-json"),
    (struct.pack("<Q", 90) + b"{}", "st-header-short"), (safetensors({"a": ("F32", (2,))})[:-1], "st-truncated")])
def test_a_broken_file_on_the_hub_is_refused(remote: Any, hub: Any, tiny: Any, data: bytes, code: str) -> None:
    hub.add("org/m", commit=COMMIT, files={"config.json": json.dumps(tiny.config).encode(), "model.safetensors": data})
    got = remote("org/m", "--json")
    assert (got.code, got.json()["error"]["code"]) == (3, code)
    assert "org/m/model.safetensors" in got.err


def test_a_server_that_sends_whole_files_only_is_left_alone(remote: Any, hub: Any, tiny: Any) -> None:
    hub.add("org/m", commit=COMMIT, no_range=True, files={
        "config.json": json.dumps(tiny.config).encode(), "model.safetensors": safetensors({"a": ("F32", (1 << 20,))})})
    got = remote("org/m")
    assert (got.code, got.out) == (4, "")
    assert "error[hub-no-range]" in got.err


def test_refusals_of_the_hub_in_its_own_words(remote: Any, hub: Any, tiny: Any) -> None:
    assert "error[hub-not-found]" in remote("org/nothing").err
    hub.add("org/none", commit=COMMIT, files={"config.json": json.dumps(tiny.config).encode()})
    got = remote("org/none")
    assert (got.code, got.out) == (4, "")
    assert "error[hub-file-not-found]: org/none" in got.err
    hub.add("org/gated", commit=COMMIT)
    hub.refuse("org/gated", 403, "GatedRepo", "Access to model is restricted.")
    got = remote("org/gated")
    assert (got.code, TOKEN in got.err) == (4, False)
    assert "error[hub-gated-not-approved]" in got.err
    assert "error[hub-offline]" in remote("org/none", "--offline").err
    assert "error[hub-unreachable]" in remote("org/m", HF_ENDPOINT="http://127.0.0.1:9").err


def test_a_shard_that_is_refused_is_named(remote: Any, hub: Any, tiny: Any, tmp_path: Path) -> None:
    files = published(tmp_path, tiny.config, tiny.tensors(tiny.config))
    gone = next(n for n in files if n.startswith("model-00002"))
    del files[gone]
    hub.add("org/m", commit=COMMIT, files=files)
    got = remote("org/m")
    assert got.code == 4
    assert f"no {gone}" in got.err


# ---- promises


def test_the_answer_follows_its_schema(cli: Any, checkpoint: Any, tiny: Any, tmp_path: Path) -> None:
    from jsonschema import Draft202012Validator

    check = Draft202012Validator(schema_of("inspect"))
    paths = [checkpoint({**gptq_tensors(tiny), "x": ("F32", (1,))}, GPTQ, "a"), checkpoint(name="b"),
             checkpoint(bnb_tensors(tiny), BNB, "c"), gguf_file(tmp_path / "m.gguf")]
    for path in (*paths, paths[1] / "model.safetensors"):
        check.validate(cli("inspect", path, "--json").json())
    check.validate(cli("inspect", *paths, "--json").json())


@pytest.fixture(scope="module")
def corpus(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (shared / "badinputs").is_dir():
        pytest.skip("no badinputs beside this checkout")
    path = tmp_path_factory.mktemp("corpus")
    subprocess.run([sys.executable, shared / "badinputs" / "make_badinputs.py", path, "--special"], check=True,
                   capture_output=True, timeout=300)
    return path


@pytest.mark.parametrize("kind", ["config", "safetensors", "index", "gguf"])
def test_every_verdict_of_the_corpus(cli: Any, corpus: Path, kind: str) -> None:
    said = {"verify-shape": "weights-shape", "verify-missing": "weights-missing", "verify-extra": "weights-unexpected"}
    wrong = []
    for m in json.loads((corpus / "manifest.json").read_text(encoding="utf-8")):
        if m["kind"] != kind or (m["id"] == "sp-05-unreadable" and os.geteuid() == 0):
            continue
        path = corpus / m["id"]
        if kind == "gguf":
            (path,) = path.glob("*.gguf")
        got = cli("inspect", path, "--json")
        body = got.json()
        if m["expect"] == "reject":
            code = body.get("error", {}).get("code", "none")
            if got.code != 3 or not f"{code}-".startswith(f"{m['code']}-"):
                wrong.append(f"{m['id']}: exit {got.code}, {code} for {m['code']}")
            continue
        found = {w["code"] for w in body.get("warnings", ())}
        want = said.get(m["code"], m["code"])
        if got.code or (m["expect"] == "warn" and not want.startswith("verify") and want not in found):
            wrong.append(f"{m['id']}: exit {got.code}, {found} for {want}")
    assert wrong == []


def cpu(args: list[str], env: Mapping[str, str]) -> float:
    before = os.times()
    subprocess.run([sys.executable, *args], env=env, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_size_costs_nothing(folder: Any, tiny: Any, tmp_path: Path, environment: Any) -> None:
    """16 GB in a sparse file, and 20,000 tensors: CPU time against `import typer` in the same run."""
    big = {**tiny.config, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
           "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}
    sparse = folder(big, "sparse", tensors=tiny.tensors(big, "BF16"))
    many = folder(name="many", tensors={f"t.{i}.weight": ("F32", (1,)) for i in range(20_000)})
    assert (sparse / "model.safetensors").stat().st_size > 16_000_000_000
    env = environment(tmp_path)
    peer = min(cpu(["-c", "import typer"], env) for _ in range(3))
    for path, most in ((sparse, 12), (many, 25)):
        assert min(cpu(["-m", "llamactl", "inspect", str(path), "--json"], env) for _ in range(3)) < most * peer


def test_nothing_heavy_is_imported(checkpoint: Any, tiny: Any, tmp_path: Path, environment: Any) -> None:
    code = ("import sys; sys.argv = ['llamactl', *sys.argv[1:]]; from llamactl.__main__ import main; main(); "
            "print(*{m.partition('.')[0] for m in sys.modules}, file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", code, "inspect", str(checkpoint(gptq_tensors(tiny), GPTQ))],
                          env=environment(tmp_path), capture_output=True, text=True, check=True)
    heavy = {"torch", "numpy", "transformers", "huggingface_hub", "safetensors", "pydantic", "rich", "yaml"}
    assert set(re.split(r"\s+", done.stderr)) & heavy == set()
