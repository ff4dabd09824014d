"""PyTorch pickles: the same tensors as safetensors gives, and nothing but tensors; hostile files end in one line."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llamactl import arch
from llamactl.checkpoint import pickles
from llamactl.errors import InputRefused, LlamactlError
from llamactl.net.weights import Weights, open_weights
from llamactl.net.weights_pickle import load_pickle

State = dict[str, Tensor]
CONFIG = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "tie_word_embeddings": False,
          "max_position_embeddings": 64}
SHAPES = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}


@pytest.fixture(scope="module")
def state() -> State:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (50, 32), "model.norm": (32,), "lm_head": (50, 32)}
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{k}": s for k, s in SHAPES.items()}
        shapes |= {f"{at}mlp.{k}_proj": (24, 32) for k in ("gate", "up")} | {f"{at}mlp.down_proj": (32, 24)}
        shapes |= {f"{at}input_layernorm": (32,), f"{at}post_attention_layernorm": (32,)}
    return {f"{k}.weight": torch.randn(s, generator=generator) for k, s in shapes.items()}


def opened(folder: Path, layout: str = "hf") -> Weights:
    model = arch.describe(CONFIG, "config.json")
    return open_weights(str(folder), model, arch.names(model, layout), layout=layout)


def refused(call: Callable[..., Any], *args: Any) -> LlamactlError:
    with pytest.raises(LlamactlError) as e:
        call(*args)
    assert e.value.path
    assert e.value.help
    assert "\n" not in e.value.message
    return e.value


def same(weights: Weights, state: State) -> bool:
    return torch.equal(weights.tensor("embed.weight"), state["model.embed_tokens.weight"]) and torch.equal(
        weights.tensor("layers.1.attn.k.weight"), state["model.layers.1.self_attn.k_proj.weight"])


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "model.pth"])
@pytest.mark.parametrize("kind", [dict, torch.nn.Parameter, "state_dict", "model"])
def test_one_file(state: State, tmp_path: Path, name: str, kind: Any) -> None:
    data: Any = {k: torch.nn.Parameter(v) for k, v in state.items()} if kind is torch.nn.Parameter else dict(state)
    torch.save({kind: data, "epoch": 3} if isinstance(kind, str) else data, tmp_path / name)
    weights = opened(tmp_path)
    assert same(weights, state)
    assert not weights.tensor("norm.weight").requires_grad
    assert weights.warnings == ()


def test_what_is_no_tensor_is_named(state: State, tmp_path: Path) -> None:
    torch.save({**state, "step": 7}, tmp_path / "pytorch_model.bin")
    assert opened(tmp_path).warnings == (
        ("weights-other", "pytorch_model.bin: 1 of its entries not tensors: 'step'; not read"),)


def sharded(folder: Path, state: State, **changed: Any) -> dict[str, str]:
    names = sorted(state)
    files = {n: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, n in enumerate(names)}
    for file in set(files.values()):
        torch.save({n: state[n] for n in names if files[n] == file}, folder / file)
    index = {"weight_map": files, **changed}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return files


def test_shards_by_index(state: State, tmp_path: Path) -> None:
    sharded(tmp_path, state)
    assert same(opened(tmp_path), state)


def test_a_missing_shard(state: State, tmp_path: Path) -> None:
    sharded(tmp_path, state)
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    e = refused(opened, tmp_path)
    assert e.code == "shard-missing"
    assert "pytorch_model-00002-of-00002.bin" in e.message


@pytest.mark.parametrize("name", ["../a.bin", "/etc/passwd", "a\\b.bin", "x.py", "sub/a.bin"])
def test_an_index_that_leads_elsewhere(state: State, tmp_path: Path, name: str) -> None:
    sharded(tmp_path, state, weight_map={"a": name})
    assert refused(opened, tmp_path).code == "index-path"


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": {"a": 1}}, []])
def test_an_index_without_a_map(state: State, tmp_path: Path, index: Any) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert refused(opened, tmp_path).code == "index-schema"


def test_one_tensor_in_two_files(state: State, tmp_path: Path) -> None:
    sharded(tmp_path, state)
    torch.save(state, tmp_path / "pytorch_model-00002-of-00002.bin")
    assert refused(opened, tmp_path).code == "index-duplicate"


def test_two_pickles_and_no_index(state: State, tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save(state, tmp_path / name)
    assert refused(opened, tmp_path).code == "weights-ambiguous"


def test_training_state_is_not_the_model(state: State, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "pytorch_model.bin")
    torch.save({"x": torch.ones(1)}, tmp_path / "optimizer.pt")
    assert same(opened(tmp_path), state)


def test_a_link_out_of_the_folder(state: State, tmp_path: Path) -> None:
    inside = tmp_path / "m"
    inside.mkdir()
    torch.save(state, tmp_path / "x.bin")
    (inside / "pytorch_model.bin").symlink_to(tmp_path / "x.bin")
    assert refused(opened, inside).code == "link-outside"


def test_tensors_are_views_of_the_file(state: State, tmp_path: Path) -> None:
    """Shared storages stay shared: a tied head takes no room of its own."""
    torch.save({"a": state["lm_head.weight"], "b": state["lm_head.weight"]}, tmp_path / "x.pt")
    data = load_pickle(str(tmp_path / "x.pt"))
    assert data["a"].data_ptr() == data["b"].data_ptr()
    at = data["a"].data_ptr()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("x.pt")]
    spans = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in mapped]
    assert any(a <= at < b for a, b in spans)


# --- hostile


class Runs:
    """Asks the unpickler to call `function`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.of = (function, args)

    def __reduce__(self) -> Any:
        return self.of


def test_an_object_of_any_size_is_not_made(tmp_path: Path) -> None:
    """torch's restricted unpickler allows bytearray(n), which takes n bytes."""
    torch.save({"x": Runs(bytearray, 1 << 33)}, tmp_path / "x.pt")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    e = refused(load_pickle, str(tmp_path / "x.pt"))
    assert e.code == "pickle-unsafe"
    assert "bytearray" in e.message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


@pytest.mark.parametrize(("function", "named"), [
    (os.system, "system"), (eval, "eval"), (open, "open"), (getattr, "getattr"), (os.unlink, "unlink")])
def test_a_program_is_refused_by_name_and_not_run(tmp_path: Path, function: Any, named: str) -> None:
    mark = tmp_path / "ran"
    torch.save({"x": Runs(function, f"touch {mark}")}, tmp_path / "x.pt")
    e = refused(load_pickle, str(tmp_path / "x.pt"))
    assert e.code == "pickle-unsafe"
    assert named in e.message
    assert not mark.exists()


def test_no_switch_of_torch_lets_it_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"x": Runs(os.system, f"touch {tmp_path / 'ran'}")}, tmp_path / "x.pt")
    assert refused(load_pickle, str(tmp_path / "x.pt")).code == "pickle-unsafe"
    assert not (tmp_path / "ran").exists()


def test_the_format_before_the_zip(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    e = refused(load_pickle, str(tmp_path / "x.pt"))
    assert e.code == "pickle-format"
    assert "torch.save it again" in str(e.help)


def test_a_bare_pickle(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"x": Runs(os.system, "true")}))
    assert refused(load_pickle, str(tmp_path / "x.pt")).code == "pickle-format"


def rezipped(path: Path, change: Callable[[str, bytes], bytes], method: int = zipfile.ZIP_STORED) -> Path:
    """The zip at `path` written again with its entries changed."""
    with zipfile.ZipFile(path) as z:
        entries = {e.filename: z.read(e) for e in z.infolist()}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as z:
        for name, raw in entries.items():
            z.writestr(name, change(name, raw))
    path.write_bytes(out.getvalue())
    return path


def test_compressed_entries(state: State, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "x.pt")
    rezipped(tmp_path / "x.pt", lambda _, raw: raw, zipfile.ZIP_DEFLATED)
    e = refused(load_pickle, str(tmp_path / "x.pt"))
    assert e.code == "pickle-format"
    assert "compressed" in e.message


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A (2, 3) tensor alone: its sizes are easy to find in the pickle."""
    torch.save({"a": torch.arange(6.0).reshape(2, 3)}, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def swap(path: Path, old: bytes, new: bytes) -> Path:
    def change(name: str, raw: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return raw
        assert old in raw
        return raw.replace(old, new)

    return rezipped(path, change)


def test_the_pickle_that_is_changed_below_is_read(small: Path) -> None:
    assert torch.equal(load_pickle(str(rezipped(small, lambda _, raw: raw)))["a"], torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("rows", [b"K\x64", b"J\x00\x00\x00\x40"])
def test_a_view_out_of_its_storage(small: Path, rows: bytes) -> None:
    e = refused(load_pickle, str(swap(small, b"K\x02K\x03\x86", rows + b"K\x03\x86")))
    assert e.code in ("pickle-storage", "pickle-format")


def test_a_stride_out_of_its_storage(small: Path) -> None:
    e = refused(load_pickle, str(swap(small, b"K\x03K\x01\x86", b"K\x7fK\x01\x86")))
    assert e.code in ("pickle-storage", "pickle-format")


def test_a_storage_that_claims_more_than_the_file_ends_with_it(small: Path) -> None:
    """The number of elements in the storage's own record, 6, made 2^30."""
    a = load_pickle(str(swap(small, b"K\x06", b"J\x00\x00\x00\x40")))["a"]
    assert a.untyped_storage().nbytes() <= small.stat().st_size
    assert torch.equal(a, torch.arange(6.0).reshape(2, 3))


def view(size: tuple[int, ...], stride: tuple[int, ...], elements: int) -> Tensor:
    """A tensor that reaches past its storage: torch lets the storage shrink after the view was made."""
    t = torch.zeros(1000).as_strided(size, stride)
    t.untyped_storage().resize_(4 * elements)
    return t


def test_the_bounds_are_checked_whatever_torch_checks(monkeypatch: pytest.MonkeyPatch, small: Path) -> None:
    """Should a torch hand out such tensors, they are refused before use."""
    for data, good in ((view((2, 3), (3, 1), 6), True), (view((2, 3), (3, 1), 5), False),
                       (view((2, 3), (4, 1), 6), False)):
        monkeypatch.setattr(torch, "load", lambda *_, data=data, **__: {"deep": [{"a": data}]})
        if good:
            load_pickle(str(small))
            continue
        e = refused(load_pickle, str(small))
        assert e.code == "pickle-storage"
        assert "deep.0.a" in e.message


def test_storages_larger_than_the_file(monkeypatch: pytest.MonkeyPatch, small: Path) -> None:
    monkeypatch.setattr(torch, "load", lambda *_, **__: {"a": torch.zeros(5000), "b": torch.zeros(5000)})
    e = refused(load_pickle, str(small))
    assert e.code == "pickle-storage"
    assert "40,000 bytes" in e.message


def test_a_sparse_tensor(tmp_path: Path) -> None:
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "x.pt")
    assert refused(load_pickle, str(tmp_path / "x.pt")).code == "pickle-format"


@pytest.mark.parametrize("cut", [10, 200, -1, -30])
def test_a_cut_file(state: State, tmp_path: Path, cut: int) -> None:
    torch.save(state, tmp_path / "x.pt")
    raw = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(raw[:cut])
    assert refused(load_pickle, str(tmp_path / "x.pt")).code == "pickle-format"


@pytest.mark.parametrize(("raw", "code"), [
    (b"", "pickle-format"), (b"version https://git-lfs.github.com/spec/v1\n", "lfs-pointer"),
    (b"<!doctype html>", "pickle-format"), (b"PK\x03\x04" + bytes(100), "pickle-format"), (b"hello", "pickle-format")])
def test_what_is_no_pickle(tmp_path: Path, raw: bytes, code: str) -> None:
    (tmp_path / "x.pt").write_bytes(raw)
    assert refused(load_pickle, str(tmp_path / "x.pt")).code == code


def test_two_pickles_in_one_zip(small: Path) -> None:
    with zipfile.ZipFile(small, "a") as z:
        z.writestr("y/data.pkl", b"")
    assert "2 data.pkl" in refused(load_pickle, str(small)).message


def test_a_huge_directory_is_not_walked(small: Path) -> None:
    raw = bytearray(small.read_bytes())
    at = raw.rfind(b"PK\x06\x06")
    raw[at + 40 : at + 48] = struct.pack("<Q", 0x7FFFFFFF)
    small.write_bytes(raw)
    e = refused(load_pickle, str(small))
    assert "zip directory of 2,147,483,647 bytes" in e.message


@pytest.mark.parametrize(("limit", "value", "said"), [("MAX_ENTRIES", 1, "entries"), ("MAX_PICKLE_BYTES", 10, "bytes")])
def test_the_bounds_of_a_zip(small: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, said: str) -> None:
    monkeypatch.setattr(pickles, limit, value)
    e = refused(load_pickle, str(small))
    assert e.code == "pickle-format"
    assert said in e.message


@pytest.mark.parametrize("data", [[torch.ones(2)], {"a": 1}, {"a": {"b": {"c": torch.ones(1)}}}, torch.ones(3), 5])
def test_no_state_dict(tmp_path: Path, data: Any) -> None:
    torch.save(data, tmp_path / "pytorch_model.bin")
    e = refused(opened, tmp_path)
    assert isinstance(e, InputRefused)
    assert e.code == "pickle-format"


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.pt")
    assert refused(load_pickle, str(tmp_path / "x.pt")).code == "not-a-file"


def test_what_is_missing_in_a_pickle(state: State, tmp_path: Path) -> None:
    torch.save({k: v for k, v in state.items() if k != "model.norm.weight"}, tmp_path / "pytorch_model.bin")
    e = refused(opened, tmp_path)
    assert e.code == "weights-missing"
    assert "model.norm.weight" in e.message


def test_quantised_tensors_in_a_pickle(state: State, tmp_path: Path) -> None:
    up = "model.layers.0.mlp.up_proj"
    packed = {f"{up}.weight": torch.zeros(24, 32, dtype=torch.int8), f"{up}.SCB": torch.ones(24)}
    torch.save({**state, **packed}, tmp_path / "pytorch_model.bin")
    assert refused(opened, tmp_path).code == "weights-quantized"
