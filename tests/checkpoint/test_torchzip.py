"""Files written without torch: torch reads them back bit for bit, whichever way, and any zip tool finds them whole."""

from __future__ import annotations

import io
import math
import os
import pickletools
import random
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llamactl.checkpoint import torchzip
from llamactl.checkpoint.torchzip import TorchTensor, file_bytes, write
from llamactl.net.weights_pickle import PickleReader, load_pickle

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
WORDS = {v: k for k, v in DTYPES.items()}
HOW = [{"weights_only": True}, {"weights_only": True, "mmap": True}, {"weights_only": False}]


def some(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of random bits; of booleans, 0 and 1."""
    raw = random.Random(f"{dtype}{shape}{seed}").randbytes(math.prod(shape) * DTYPES[dtype].itemsize)
    if dtype == "BOOL":
        raw = bytes(b & 1 for b in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=DTYPES[dtype]) if raw else torch.empty(0, dtype=DTYPES[dtype])
    return flat.reshape(shape)


def raw(t: torch.Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def described(tree: Any, path: str, held: dict[int, bytes], seen: dict[int, TorchTensor] | None = None) -> Any:
    """`tree` with a TorchTensor for each tensor object; their bytes go into `held`, by the id of the TorchTensor."""
    seen = {} if seen is None else seen
    if isinstance(tree, torch.Tensor):
        if id(tree) not in seen:
            seen[id(tree)] = t = TorchTensor(path, WORDS[tree.dtype], tuple(tree.shape))
            held[id(t)] = raw(tree)
        return seen[id(tree)]
    if isinstance(tree, dict):
        return {k: described(v, f"{path}.{k}", held, seen) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(described(v, f"{path}.{i}", held, seen) for i, v in enumerate(tree))
    return tree


def made(path: Path, tree: Any, *, archive: str = "w", piece: int = 7) -> Path:
    """`tree`, with torch's tensors in it, written to `path` in pieces of `piece` bytes; its size was foretold."""
    held: dict[int, bytes] = {}
    plain = described(tree, "", held)

    def blocks(t: TorchTensor) -> Iterator[bytes]:
        data = held[id(t)]
        return (data[i : i + piece] for i in range(0, len(data), piece))

    with path.open("wb") as file:
        write(file, plain, blocks, archive=archive)
    assert file_bytes(plain, archive) == path.stat().st_size
    return path


def zeros(t: TorchTensor) -> Iterable[bytes]:
    return [bytes(math.prod(t.shape) * DTYPES[t.dtype].itemsize)]


def local_headers(path: Path) -> list[tuple[zipfile.ZipInfo, tuple[Any, ...], int]]:
    """(directory entry, fields of the local header, where the data starts) of each entry, in the directory's order."""
    data, found = path.read_bytes(), []
    with zipfile.ZipFile(path) as z:
        for e in z.infolist():
            fields = struct.unpack_from("<4s5H3I2H", data, e.header_offset)
            found.append((e, fields, e.header_offset + 30 + fields[-2] + fields[-1]))
    return found


def extra_fields(path: Path, e: zipfile.ZipInfo, fields: tuple[Any, ...], at: int) -> list[tuple[int, int]]:
    """(id, bytes) of each field in the extra of a local header; they fill it exactly."""
    here, found = e.header_offset + 30 + fields[-2], []
    with path.open("rb") as file:
        while here < at:
            file.seek(here)
            found.append(struct.unpack("<2H", file.read(4)))
            here += 4 + found[-1][1]
    assert here == at, e.filename
    return found


def end_of(path: Path, entries: int, limit: int = 0xFFFFFFFF, count_limit: int = 0xFFFF) -> None:
    """Every field of the three records at the end, and that the directory lies where they say."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(size - 98)
        end = file.read()
        _, _, _, _, _, _, _, _, directory, at = long = struct.unpack_from("<4sQ2H2I4Q", end)
        file.seek(at)
        assert file.read(4) == b"PK\1\2"
    assert long == (b"PK\6\6", 44, 45, 45, 0, 0, entries, entries, directory, at)
    assert at + directory == size - 98
    assert struct.unpack_from("<4sIQI", end, 56) == (b"PK\6\7", 0, size - 98, 1)
    count = entries if entries < count_limit else 0xFFFF
    short = [n if n < limit else 0xFFFFFFFF for n in (directory, at)]
    assert struct.unpack_from("<4s4H2IH", end, 76) == (b"PK\5\6", 0, 0, count, count, *short, 0)


NANOGPT = {
    "model": {"transformer.wte.weight": some("BF16", (7, 4)), "transformer.h.0.attn.bias": some("BOOL", (1, 1, 3, 3))},
    "model_args": {"n_layer": 2, "bias": False, "block_size": 1024, "dropout": 0.0, "vocab_size": None},
    "iter_num": 0, "best_val_loss": 1e9, "config": {}, "betas": [0.9, 0.95], "shape": (1, 2, 3, 4),
}


@pytest.mark.parametrize("how", HOW, ids=str)
def test_torch_reads_every_dtype_bit_for_bit(tmp_path: Path, how: dict[str, bool]) -> None:
    shapes = [(), (1,), (5,), (3, 0), (0, 3), (2, 3), (2, 1, 3, 4)]
    want = {f"{d}.{shape}": some(d, shape) for d in reversed(DTYPES) for shape in shapes}
    found = torch.load(made(tmp_path / "w.pth", want), **how)
    assert list(found) == list(want)
    for name, t in want.items():
        assert (found[name].dtype, found[name].shape) == (t.dtype, t.shape), name
        assert found[name].stride() == torch.empty(t.shape, dtype=t.dtype).stride(), name
        assert found[name].storage_offset() == 0
        assert found[name].untyped_storage().nbytes() == t.numel() * t.element_size(), name
        assert not found[name].requires_grad
        assert found[name].device.type == "cpu"
        assert raw(found[name]) == raw(t), name


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_tree_comes_back(tmp_path: Path, how: dict[str, bool]) -> None:
    found = torch.load(made(tmp_path / "ckpt.pt", NANOGPT), **how)
    assert list(found) == list(NANOGPT)
    for name, t in NANOGPT["model"].items():
        assert torch.equal(found["model"].pop(name), t)
    assert found == NANOGPT | {"model": {}}


@pytest.mark.parametrize("how", HOW, ids=str)
def test_plain_values_come_back(tmp_path: Path, how: dict[str, bool]) -> None:
    ints = [s * n + d for n in (0, 1 << 7, 1 << 8, 1 << 15, 1 << 16, 1 << 31, 1 << 32, 1 << 63, 1 << 2000)
            for s in (1, -1) for d in (-1, 0, 1)] + [(1 << 2039) - 1, 1 - (1 << 2039)]
    floats = [0.0, -0.0, 0.1, -1.5e300, 5e-324, math.inf, -math.inf]
    texts = ["", "a", "tok€n é\n\0", "x" * 1000, "half \ud800 pair"]
    nested = [[], {}, (), [1], (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [[[]]], {"": {"": None}}, True, False, None]
    want = {"ints": ints, "floats": floats, "texts": texts, "nested": nested} | {t: 1 for t in texts}
    found = torch.load(made(tmp_path / "w.pt", want), **how)
    assert repr(found) == repr(want)  # unlike ==, it tells 0.0 from -0.0 and True from 1
    assert math.isnan(torch.load(made(tmp_path / "nan.pt", {"x": math.nan}), **how)["x"])


@pytest.mark.parametrize("tree", [{}, [], 5, "text", None, {"a": {}}], ids=repr)
def test_a_tree_without_tensors(tmp_path: Path, tree: Any) -> None:
    path = made(tmp_path / "w.pt", tree)
    assert torch.load(path, weights_only=True) == tree
    assert [e.filename for e in zipfile.ZipFile(path).infolist()] == ["w/data.pkl", "w/byteorder", "w/version"]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_one_object_is_one_storage(tmp_path: Path, how: dict[str, bool]) -> None:
    tied, alone, other = some("F16", (4, 3)), some("F8_E5M2", (6,)), some("F16", (4, 3))
    assert torch.equal(tied.view(torch.int16), other.view(torch.int16))
    path = made(tmp_path / "w.pt", {"wte": tied, "a": alone, "x": {"head": tied, "b": alone}, "other": other})
    assert sum("/data/" in e.filename for e in zipfile.ZipFile(path).infolist()) == 3
    found = torch.load(path, **how)
    assert found["wte"].data_ptr() == found["x"]["head"].data_ptr() != found["other"].data_ptr()
    assert found["a"].data_ptr() == found["x"]["b"].data_ptr()
    for t in (found["wte"], found["x"]["head"], found["other"]):
        assert raw(t) == raw(tied)


def test_blocks_are_asked_once_an_object_in_the_order_of_the_tree() -> None:
    a, b, c = (TorchTensor(n, "F32", (2,)) for n in "abc")
    asked = []

    def blocks(t: TorchTensor) -> Iterable[bytes]:
        asked.append(t.name)
        return zeros(t)

    write(io.BytesIO(), {"x": [b, a], "y": {"z": (a, c, b)}}, blocks, archive="w")
    assert asked == ["b", "a", "c"]


def test_blocks_of_any_kind(tmp_path: Path) -> None:
    want = some("BF16", (4, 5))
    data = raw(want)
    pieces = [b"", data[:3], bytearray(data[3:8]), bytearray(), memoryview(data[8:16]).cast("H"), memoryview(b""),
              memoryview(data[16:32]).cast("B", (4, 4)), memoryview(torch.empty(0, 3).numpy()), memoryview(data)[32:]]
    for file in ((tmp_path / "w.pt").open("wb"), Slow(tmp_path / "w.pt", "w")):
        with file:
            write(file, TorchTensor("t", "BF16", (4, 5)), lambda _: iter(pieces), archive="w")
        assert raw(torch.load(tmp_path / "w.pt")) == data


class Slow(io.FileIO):
    """Takes 5 bytes at a time."""

    def write(self, data: Any) -> int:
        return super().write(memoryview(data).cast("B")[:5])


def test_a_file_that_takes_less_at_a_time(tmp_path: Path) -> None:
    tree = {"a": TorchTensor("a", "F32", (40,)), "b": [1, 2]}
    with (tmp_path / "slow").open("wb", buffering=0) as fast, Slow(tmp_path / "fast", "w") as slow:
        for file in (fast, slow):
            write(file, tree, zeros, archive="w")
    assert (tmp_path / "slow").read_bytes() == (tmp_path / "fast").read_bytes()
    assert len(torch.load(tmp_path / "slow")["a"]) == 40


@pytest.mark.parametrize("name", ["é", "層.0.重み", "x" * 300, "層" * 5000, "a/b\\c\n\0"], ids=range(5))
def test_names_of_any_kind(tmp_path: Path, name: str) -> None:
    path = made(tmp_path / "w.pt", {name: some("I8", (3,)), "b": some("I8", (4,))})
    for how in HOW:
        assert list(torch.load(path, **how)) == [name, "b"]
    assert list(PickleReader([str(path)]).tensors) == [name, "b"]


@pytest.mark.parametrize("archive", ["w", "consolidated.00", "ключ é", "x" * 255, "data", "a b"], ids=range(6))
def test_archives_of_any_kind(tmp_path: Path, archive: str) -> None:
    path = made(tmp_path / "w.pt", NANOGPT, archive=archive)
    for how in HOW:
        assert torch.equal(torch.load(path, **how)["model"]["transformer.h.0.attn.bias"],
                           NANOGPT["model"]["transformer.h.0.attn.bias"])
    with zipfile.ZipFile(path) as z:
        assert {e.filename.partition("/")[0] for e in z.infolist()} == {archive}
    assert {at % 64 for _, _, at in local_headers(path)} == {0}
    assert load_pickle(str(path))["iter_num"] == 0


def test_our_own_reader_takes_it(tmp_path: Path) -> None:
    path = made(tmp_path / "ckpt.pt", NANOGPT | {"model": {d: some(d, (3, 2)) for d in DTYPES}})
    reader = PickleReader([str(path)], under="model")
    assert {n: t.dtype for n, t in reader.tensors.items()} == {d: d for d in DTYPES}
    assert all(raw(reader.get(d)) == raw(some(d, (3, 2))) for d in DTYPES)
    assert load_pickle(str(path))["model_args"] == NANOGPT["model_args"]


def test_the_zip_is_whole(tmp_path: Path) -> None:
    tree = NANOGPT | {f"n{i}": some("U8", (i,)) for i in range(70)}
    path = made(tmp_path / "w.pt", tree)
    with zipfile.ZipFile(path) as z:
        assert z.testzip() is None
        assert z.read("w/version") == b"3\n"
        assert z.read("w/byteorder") == b"little"
        assert [e.filename for e in z.infolist()] == \
            ["w/data.pkl", "w/byteorder", *(f"w/data/{i}" for i in range(72)), "w/version"]
    end = 0
    for e, fields, data in local_headers(path):
        magic, needs, flags, method, clock, day, crc, packed, size, _, _ = fields
        assert (magic, needs, flags, method, clock, day) == (b"PK\3\4", 20, 0x800, 0, 0, 0x21), e.filename
        assert (crc, packed, size) == (e.CRC, e.file_size, e.file_size), e.filename
        assert e.header_offset == end, e.filename  # no holes
        assert data % 64 == 0, e.filename
        assert [i for i, _ in extra_fields(path, e, fields, data)] == [0x4246], e.filename
        assert data - end < 30 + len(e.filename) + 4 + 64, e.filename
        end = data + e.file_size
    end_of(path, 75)


@pytest.mark.skipif(sys.byteorder != "little", reason="torch saves in the machine's own order")
def test_as_torch_saves_it(tmp_path: Path) -> None:
    """The same opcodes in the same order, but for which of them are remembered; the same entries, but for three."""
    tied = some("F32", (2, 2))
    tree = {"a": tied, "b": some("F8_E4M3", (3, 2, 2)), "c": some("I64", ()), "d": some("BF16", (1, 2, 3, 4)),
            "e": some("F8_E5M2", (0, 300)), "f": {"x": 1.5, "y": [True, -70000, 300]}, "g": tied.clone()}
    with zipfile.ZipFile(made(tmp_path / "ours.pt", tree, archive="w")) as ours:
        our_names, our_ops = ours.namelist(), resolved(ours.read("w/data.pkl"))
    torch.save(tree, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "w.pt") as theirs:
        their_names, their_ops = theirs.namelist(), resolved(theirs.read("w/data.pkl"))
    assert our_ops == their_ops
    more = {"w/.format_version", "w/.storage_alignment", "w/.data/serialization_id"}
    assert our_names == [n for n in their_names if n not in more]


def resolved(pickle: bytes) -> list[tuple[str, Any]]:
    """The opcodes of a pickle, with what is remembered in place of its number."""
    ops: list[tuple[str, Any]] = []
    memo: dict[int, tuple[str, Any]] = {}
    for op, arg, _ in pickletools.genops(pickle):
        if op.name in ("BINPUT", "LONG_BINPUT"):
            memo[arg] = ops[-1]
        else:
            ops.append(memo[arg] if op.name in ("BINGET", "LONG_BINGET") else (op.name, arg))
    return ops


def test_nothing_but_weights_in_the_pickle(tmp_path: Path) -> None:
    tree = NANOGPT | {"model": {d: some(d, (3, 2)) for d in DTYPES}, "long": 1 << 70}
    with zipfile.ZipFile(made(tmp_path / "w.pt", tree)) as z:
        ops = list(pickletools.genops(z.read("w/data.pkl")))
    assert {op.name for op, _, _ in ops} == {
        "PROTO", "STOP", "MARK", "EMPTY_DICT", "SETITEMS", "EMPTY_LIST", "APPENDS", "EMPTY_TUPLE", "TUPLE2", "TUPLE",
        "BINUNICODE", "BININT1", "BININT2", "LONG1", "BINFLOAT", "NEWFALSE", "NONE", "GLOBAL", "REDUCE", "BINPERSID",
        "BINPUT", "BINGET"}
    words = [arg for op, arg, _ in ops if op.name == "GLOBAL"]
    assert sorted(words) == sorted([
        "collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3",
        "torch.storage UntypedStorage", "torch float8_e4m3fn", "torch float8_e5m2",
        *(f"torch {x}Storage" for x in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte",
                                        "Bool"))])  # each once: the second time is a BINGET
    assert max(op.proto for op, _, _ in ops) == 2
    assert ops[0][1] == 2


def test_same_input_same_bytes(tmp_path: Path) -> None:
    first = made(tmp_path / "a.pt", NANOGPT, piece=3)
    time.sleep(0.01)
    again = made(tmp_path / "b.pt", NANOGPT, piece=1000)
    assert first.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(("shape", "blocks", "said"), [
    ((4,), [b"x" * 7], "'w.1': the blocks have 7 bytes, the tensor 8"),
    ((4,), [b"xxx", b"xxxx"], "have 7 bytes, the tensor 8"),
    ((4,), [], "have 0 bytes, the tensor 8"),
    ((4,), [b"x" * 9], "'w.1': the blocks have at least 9 bytes, the tensor 8"),
    ((4,), [b"x" * 8, b"", b"x"], "at least 9 bytes"),
    ((0, 4), [b"x"], "at least 1 bytes, the tensor 0"),
    ((), [b"xxxx"], "at least 4 bytes, the tensor 2"),
])
def test_blocks_of_another_length_are_a_bug(shape: tuple[int, ...], blocks: list[bytes], said: str) -> None:
    file = io.BytesIO()
    with pytest.raises(ValueError, match=said):
        write(file, {"a": TorchTensor("w.1", "BF16", shape)}, lambda _: blocks, archive="w")
    assert file.getvalue().count(b"x") <= 2 * math.prod(shape)


def test_what_blocks_raises_comes_through() -> None:
    def blocks(t: TorchTensor) -> Iterator[bytes]:
        yield b"12"
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write(io.BytesIO(), [TorchTensor("a", "F32", (2,))], blocks, archive="w")


@pytest.mark.parametrize(("tree", "said"), [
    ({1: 2}, "a key must be a string, 1 is a int"),
    ({"a": {None: 2}}, "None is a NoneType"),
    ({"a": {1, 2}}, "cannot hold a set"),
    ([b"x"], "cannot hold a bytes"),
    ([1j], "cannot hold a complex"),
    (OrderedDict(a=1), "cannot hold a OrderedDict"),
    (1 << 2039, "an integer of 256 bytes"),
    (TorchTensor("a", "F4", (2,)), "'a': no torch storage for dtype 'F4'"),
    (TorchTensor("a", "U16", (2,)), "dtype 'U16'"),
    (TorchTensor("a", "F32", (-1,)), "is no shape"),
    (TorchTensor("a", "F32", (True,)), "is no shape"),
    (TorchTensor("a", "F32", (2.0,)), "is no shape"),
])
def test_other_trees_are_a_bug(tree: Any, said: str) -> None:
    file = io.BytesIO()
    with pytest.raises(ValueError, match=said):
        write(file, tree, zeros, archive="w")
    assert file.getvalue() == b""
    with pytest.raises(ValueError, match=said):
        file_bytes(tree, "w")


@pytest.mark.parametrize("archive", ["", "a/b", "a\\b", "a\0b", "x" * 256, "é" * 128])
def test_other_archives_are_a_bug(archive: str) -> None:
    with pytest.raises(ValueError, match="folder inside a torch file"):
        write(io.BytesIO(), {}, zeros, archive=archive)


def test_a_file_begins_at_its_beginning() -> None:
    file = io.BytesIO()
    file.write(b"x")
    with pytest.raises(ValueError, match="this one is at 1"):
        write(file, {}, zeros, archive="w")


@pytest.mark.parametrize("limit", [6, 7, 40, 41, 500, 1200, 1300, 1400])
def test_zip64_fields_where_a_limit_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """A limit of some bytes instead of 4 GiB: entries of that size, and those that lie there, take the long fields."""
    tree = {"a": some("U8", (39,)), "b": some("U8", (40,)), "c": some("U8", (41,)), "d": some("U8", (0,)),
            "e": some("F32", (200,)), "f": some("F32", ())}
    monkeypatch.setattr(torchzip, "_LIMIT32", limit)
    path = made(tmp_path / "w.pt", tree)
    for how in HOW:
        found = torch.load(path, **how)
        assert {n: raw(t) for n, t in found.items()} == {n: raw(t) for n, t in tree.items()}
    assert {n: t.nbytes for n, t in PickleReader([str(path)]).tensors.items()} == \
        {n: len(raw(t)) for n, t in tree.items()}
    with zipfile.ZipFile(path) as z:
        assert z.testzip() is None
    data = path.read_bytes()
    directory = data.index(b"PK\1\2")
    seen = set()
    for e, fields, at in local_headers(path):
        long = e.file_size >= limit
        seen.add(long)
        assert at % 64 == 0
        assert fields[7:9] == ((0xFFFFFFFF,) * 2 if long else (e.file_size,) * 2), e.filename
        assert fields[1] == (45 if long or e.header_offset >= limit else 20), e.filename
        extra = data[e.header_offset + 30 + fields[-2] : at]
        assert extra.startswith(struct.pack("<2H2Q", 1, 16, e.file_size, e.file_size) if long else b"FB"), e.filename
        assert [i for i, _ in extra_fields(path, e, fields, at)] == ([1] if long else []) + [0x4246], e.filename
        here = struct.unpack_from("<4s6H3I5H2I", data, directory)
        assert here[8:10] == fields[7:9]
        assert here[-1] == (e.header_offset if e.header_offset < limit else 0xFFFFFFFF), e.filename
        assert here[11] == (4 + 16 * long + 8 * (e.header_offset >= limit) if here[2] == 45 else 0), e.filename
        directory += 46 + here[10] + here[11]
    assert seen == {True, False} if limit < 900 else seen == {False}
    assert directory == len(data) - 98
    end_of(path, 9, limit)


def test_an_entry_that_lies_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path / "w.pt", NANOGPT)
    places = [e.header_offset for e, _, _ in local_headers(path)]
    monkeypatch.setattr(torchzip, "_LIMIT32", places[-1])  # more than any entry's size, so nothing moves
    path = made(tmp_path / "w.pt", NANOGPT)
    assert [(e.header_offset, e.extract_version) for e, _, _ in local_headers(path)] == \
        [(at, 20 if at < places[-1] else 45) for at in places]
    assert path.read_bytes().count(struct.pack("<2HQ", 1, 8, places[-1])) == 1
    assert torch.load(path)["iter_num"] == 0


def test_padding_of_every_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchzip, "_LIMIT32", 40)
    for n in range(1, 65):
        path = made(tmp_path / "w.pt", [some("U8", (40,)), some("U8", (39,))], archive="x" * n)
        fields = [extra_fields(path, *header) for header in local_headers(path)]
        assert [[i for i, _ in f] for f in fields[2:4]] == [[1, 0x4246], [0x4246]]
        assert {at % 64 for _, _, at in local_headers(path)} == {0}
        assert zipfile.ZipFile(path).testzip() is None


@pytest.mark.parametrize("limit", [4, 5, 6])
def test_the_count_where_its_limit_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(torchzip, "_LIMIT16", limit)
    path = made(tmp_path / "w.pt", [some("U8", (3,)), some("U8", (4,))])
    end_of(path, 5, count_limit=limit)
    assert [len(t) for t in torch.load(path, mmap=True)] == [3, 4]
    with zipfile.ZipFile(path) as z:
        assert len(z.infolist()) == 5


def test_more_entries_than_a_zip_counts(tmp_path: Path) -> None:
    path, tree = tmp_path / "w.pt", [TorchTensor("t", "U8", (0,)) for _ in range(0x10010)]
    file = io.BytesIO()
    write(file, tree, zeros, archive="w")
    path.write_bytes(file.getvalue())
    end_of(path, 0x10013)
    assert torch._C.PyTorchFileReader(str(path)).get_all_records()[-2:] == ["data/65551", "version"]


class Sparse(io.FileIO):
    """A file that leaves a hole for a large write, so that 4 GiB cost nothing."""

    def write(self, data: Any) -> int:
        if len(data) < 1 << 24:
            return super().write(data)
        return self.seek(len(data), os.SEEK_CUR) and len(data)


def test_more_than_4_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of more than 4 GiB, one of just less, and one behind them: sizes and places in long fields."""
    block = memoryview(bytes(1 << 26))
    crc32 = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda data, crc=0: crc32(data, crc) if len(data) < 1 << 24 else 0)  # for speed
    tree = {"most": TorchTensor("most", "U8", ((1 << 32) - 2,)), "big": TorchTensor("big", "BF16", (1 << 16, 1 << 15)),
            "last": TorchTensor("last", "I32", (3,))}

    def blocks(t: TorchTensor) -> Iterator[bytes | memoryview]:
        if t.name == "last":
            return iter([struct.pack("<3i", 5, 6, 7)])
        return (block[: math.prod(t.shape) * DTYPES[t.dtype].itemsize - at]
                for at in range(0, math.prod(t.shape) * DTYPES[t.dtype].itemsize, len(block)))

    path = tmp_path / "w.pth"
    with Sparse(path, "w") as file:
        write(file, tree, blocks, archive="w")
    if path.stat().st_blocks * 512 > 1 << 28:
        pytest.skip("no sparse files here")
    assert path.stat().st_size == file_bytes(tree, "w") > 2 << 32
    end_of(path, 6)
    assert [e.extract_version for e in zipfile.ZipFile(path).infolist()] == [20, 20, 20, 45, 45, 45]
    found = torch.load(path, weights_only=True, mmap=True)
    assert [tuple(t.shape) for t in found.values()] == [t.shape for t in tree.values()]
    assert found["last"].tolist() == [5, 6, 7]
    assert found["big"].data_ptr() % 64 == found["last"].data_ptr() % 64 == 0
    assert list(PickleReader([str(path)]).tensors) == list(tree)


def test_memory_is_a_block(tmp_path: Path) -> None:
    block = bytes(1 << 16)
    tree = {f"t{i}": TorchTensor(f"t{i}", "F32", (1 << 14, 16)) for i in range(32)}  # 32 MiB
    tracemalloc.start()
    with (tmp_path / "w.pt").open("wb") as file:
        write(file, tree, lambda t: (bytearray(block) for _ in range(16)), archive="w")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "w.pt").stat().st_size > 32 << 20
    assert peak < 1 << 20


def test_ten_thousand_tensors_are_fast(tmp_path: Path) -> None:
    tree = {f"layers.{i}.weight": TorchTensor(f"layers.{i}.weight", "BF16", (4, 8)) for i in range(10_000)}
    best = math.inf
    for _ in range(2):
        started = time.process_time()
        with (tmp_path / "w.pt").open("wb") as file:
            write(file, tree, zeros, archive="w")
        best = min(best, time.process_time() - started)
    assert best < 1
    assert list(torch.load(tmp_path / "w.pt")) == list(tree)


def test_torch_stays_out() -> None:
    code = ("import io, sys; from llamactl.checkpoint.torchzip import *; "
            "write(io.BytesIO(), {'a': TorchTensor('a', 'F32', (2,))}, lambda t: [bytes(8)], archive='w'); "
            "print([m for m in ('torch', 'numpy', 'zipfile', 'pickle') if m in sys.modules])")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
