"""The safetensors header reader: every rule of the format, every odd file, and agreement with the library."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as some

from llamactl.checkpoint.safetensors import BITS, MAX_COMMAS, read_header
from llamactl.errors import InputRefused, LlamactlError

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0f" * 32 + b"\nsize 4976698672\n"


def pack(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file; `header` is its JSON value or its raw bytes, `length` what the file claims it to be."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(**changed: Any) -> dict[str, Any]:
    return {"a": {k: v for k, v in {**A, **changed}.items() if v is not ...}}


def write(folder: Path, content: bytes) -> str:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return str(path)


def refusal(path: str) -> InputRefused:
    with pytest.raises(InputRefused) as caught:
        read_header(path)
    assert path in caught.value.line()
    return caught.value


REFUSED = [
    ("st-header-short", b""),
    ("st-header-short", b"\x10" + bytes(6)),
    ("st-header-short", pack(b"{}", length=1000)),
    ("st-header-too-large", pack(b"{}", length=1 << 63)),
    ("st-header-too-large", pack(b"{}", length=(1 << 64) - 1)),
    ("st-header-too-large", pack(b"{}", length=100_000_001)),
    ("st-header-too-large", pack(b'{"a":[' + b"0," * MAX_COMMAS + b"0,0]}")),
    ("st-header", bytes(64)),
    ("st-header-json", pack(b"", b"data")[:4] + bytes(4) + b"data"),
    ("st-header-json", pack(b"    ")),
    ("st-header-json", pack(b'{"a": nope}')),
    ("st-header-json", pack(b"{}\0\0")),
    ("st-header-json", pack(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")),
    ("st-header-json", pack(b'{"a":' + b"[" * 100_000)),
    ("st-header-json", pack(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1e999}}', bytes(8))),
    ("st-header-json", pack(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":NaN}}', bytes(8))),
    ("st-header-json", pack(b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}')),
    ("st-header-json", pack({"a\ud800": A}, bytes(8))),
    ("st-header-json", pack({"a": ["F32", [2], [0, 8]]}, bytes(8))),
    ("st-header-json", pack({"a": None})),
    ("st-header-json", pack(entry(data_offsets=...), bytes(8))),
    ("st-header-json", pack(entry(shape=...), bytes(8))),
    ("st-header-json", pack(entry(dtype=...), bytes(8))),
    ("st-header-json", pack(entry(dtype={"F32": None}), bytes(8))),
    ("st-header-json", pack(entry(data_offsets=[0, 8, 8]), bytes(8))),
    ("st-header-json", pack(entry(data_offsets=[-8, 0]), bytes(8))),
    ("st-header-json", pack(entry(data_offsets=[0, 8.0]), bytes(8))),
    ("st-header-json", pack(entry(shape=[True], data_offsets=[0, 4]), bytes(4))),
    ("st-header-json", pack(entry(shape=[2.0]), bytes(8))),
    ("st-header-json", pack(entry(shape=["2"]), bytes(8))),
    ("st-header-json", pack(entry(shape=[1 << 64], data_offsets=[0, 0]))),
    ("st-header-json", pack(entry(shape=2), bytes(8))),
    ("st-header-utf8", pack(b'{"\xff\xfe": 1}')),
    ("st-header-start", pack(b"\xef\xbb\xbf{}")),
    ("st-header-start", pack(b"[]")),
    ("st-header-start", pack(b" " * 5000 + b"{}")),
    ("st-duplicate", pack(b'{"a":%b,"a":%b}' % ((json.dumps(A).encode(),) * 2), bytes(8))),
    ("st-duplicate", pack(b'{"a":%b,"\\u0061":%b}' % (json.dumps(A).encode(), json.dumps(B).encode()), bytes(16))),
    ("st-duplicate", pack(b'{"__metadata__":{"k":"1","k":"2"}}')),
    ("st-duplicate", pack(b'{"a":{"dtype":"F16","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8))),
    ("st-metadata", pack({"__metadata__": {"n": 1}})),
    ("st-metadata", pack({"__metadata__": {"n": None}})),
    ("st-metadata", pack({"__metadata__": "pt"})),
    ("st-metadata", pack({"__metadata__": None})),
    ("st-dtype", pack(entry(dtype="F33"), bytes(8))),
    ("st-dtype", pack(entry(dtype="f32"), bytes(8))),
    ("st-shape", pack(entry(shape=[3]), bytes(8))),
    ("st-shape", pack(entry(shape=[1 << 40, 1 << 40], data_offsets=[0, 0]))),
    ("st-shape", pack(entry(shape=[1 << 63, 0], data_offsets=[0, 0]))),
    ("st-shape", pack(entry(dtype="F4", shape=[3], data_offsets=[0, 1]), bytes(1))),
    ("st-shape", pack(entry(dtype="F6_E3M2", shape=[2], data_offsets=[0, 1]), bytes(1))),
    ("st-offsets", pack(entry(data_offsets=[8, 0]), bytes(8))),
    ("st-offsets", pack(entry(data_offsets=[8, 16]), bytes(16))),
    ("st-offsets", pack({"a": A, "b": {**B, "data_offsets": [4, 12]}}, bytes(12))),
    ("st-offsets", pack({"a": A, "b": {**B, "data_offsets": [16, 24]}}, bytes(24))),
    ("st-offsets", pack({"a": A, "z": {**A, "shape": [0], "data_offsets": [4, 4]}}, bytes(8))),
    ("st-truncated", pack({"a": A, "b": B}, bytes(15))),
    ("st-truncated", pack({"a": A})),
    ("st-trailing", pack({"a": A}, bytes(9))),
    ("st-trailing", pack({}, b"PK")),
    ("lfs-pointer", LFS),
    ("st-header", b"<!DOCTYPE html><title>401 Unauthorized</title>"),
    ("st-header", b"\n  <html><body>Not found</body></html>"),
    ("st-header", b"PK\x03\x04" + bytes(60)),
    ("st-header", b"\x80\x02}q\x00X\x01\x00\x00\x00a."),
    ("st-header", b"GGUF\x03\0\0\0" + bytes(16)),
    ("st-header", bytes.fromhex("0005160700020000") + b"Mac OS X        " + bytes(4000)),
]


@pytest.mark.parametrize(("code", "content"), REFUSED, ids=[f"{i}-{code}" for i, (code, _) in enumerate(REFUSED)])
def test_refused(code: str, content: bytes, tmp_path: Path) -> None:
    error = refusal(write(tmp_path, content))
    assert error.code == code
    assert error.help
    assert error.line().isprintable()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pack(b"{}", length=1000), ["1,000 bytes", "2 bytes"]),
        (pack({"a": A, "b": B}, bytes(13)), ["'b'", "16", "13", "3 bytes are missing"]),
        (pack({"a": A}, bytes(9)), ["1 bytes follow"]),
        (pack({"a": A, "\x1b[0m": {**B, "data_offsets": [12, 20]}}, bytes(20)), ["'\\x1b[0m'", "12", "hole of 4"]),
        (pack({"a": A, "b": {**B, "data_offsets": [6, 14]}}, bytes(14)), ["'b'", "'a' ends at 8", "overlap of 2"]),
        (pack(entry(shape=[3]), bytes(8)), ["'a'", "F32 [3] takes 12 bytes", "span 8"]),
        (pack(entry(dtype="F4", shape=[3], data_offsets=[0, 1]), bytes(1)), ["1 bytes and 4 bits"]),
        (LFS, ["Git LFS pointer"]),
        (b"<html>", ["web page"]),
        (b"PK\x03\x04" + bytes(60), ["zip"]),
    ],
)
def test_message_has_the_numbers(content: bytes, words: list[str], tmp_path: Path) -> None:
    line = refusal(write(tmp_path, content)).line()
    assert [w for w in words if w not in line] == [], line


def test_what_a_header_holds(tmp_path: Path) -> None:
    late = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]}
    header = {"late": late, "__metadata__": {"format": "pt", "note": "été"}, "empty": {**A, "shape": [0, 4],
              "data_offsets": [4, 4]}, "scalar": {**A, "shape": [], "data_offsets": [0, 4], "comment": "x"}}
    raw = json.dumps(header).encode() + b" " * 64
    h = read_header(Path(write(tmp_path, pack(raw, bytes(16)))))
    assert [t.name for t in h.tensors] == ["scalar", "empty", "late"]
    assert [(t.elements, t.nbytes) for t in h.tensors] == [(1, 4), (0, 0), (6, 12)]
    assert (h.tensors[2].dtype, h.tensors[2].shape, h.tensors[2].begin, h.tensors[2].end) == ("BF16", (2, 3), 4, 16)
    assert h.metadata == {"format": "pt", "note": "été"}
    assert (h.header_bytes, h.data_offset, h.file_bytes) == (len(raw), 8 + len(raw), 8 + len(raw) + 16)
    assert h.notes == ()


@pytest.mark.parametrize("metadata", [{}, {"__metadata__": {}}])
def test_metadata_absent_or_empty(metadata: dict[str, Any], tmp_path: Path) -> None:
    h = read_header(write(tmp_path, pack({**metadata, "a": A}, bytes(8))))
    assert (h.metadata, len(h.tensors)) == ({}, 1)


def test_blanks_before_the_brace_are_read_and_noted(tmp_path: Path) -> None:
    assert [code for code, _ in read_header(write(tmp_path, pack(b"  {}"))).notes] == ["st-header-start"]
    assert read_header(write(tmp_path, pack(b"{}  "))).notes == ()


def test_every_dtype(tmp_path: Path) -> None:
    """The 20 dtypes of the format and the two fnuz ones that safetensors 0.8 added."""
    assert len(BITS) == 22
    header, at = {}, 0
    for name, bits in BITS.items():
        header[name] = {"dtype": name, "shape": [8], "data_offsets": [at, at + bits]}
        at += bits
    path = write(tmp_path, pack(header, bytes(at)))
    assert {t.dtype: t.nbytes for t in read_header(path).tensors} == BITS
    library = pytest.importorskip("safetensors")
    with library.safe_open(path, "np") as f:
        assert set(f.keys()) == BITS.keys()
    with pytest.raises(library.SafetensorError, match="unknown variant") as caught:
        library.safe_open(write(tmp_path, pack(entry(dtype="?"), bytes(8))), "np")
    assert all(f"`{name}`" in str(caught.value) for name in BITS)


def test_a_terabyte_is_not_read(tmp_path: Path, within: Any) -> None:
    path = write(tmp_path, pack({"a": {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}))
    with open(path, "r+b") as f:
        f.truncate(os.path.getsize(path) + (1 << 40))
    with within(5):
        read_header(path)
    tracemalloc.start()
    assert read_header(path).tensors[0].elements == 1 << 38
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_a_claimed_length_is_never_allocated(tmp_path: Path) -> None:
    path = write(tmp_path, pack(b"{}", length=99_999_999))
    tracemalloc.start()
    refusal(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_a_header_above_the_cap_that_is_there(tmp_path: Path) -> None:
    path = write(tmp_path, pack(b"{}", length=100_000_001))
    with open(path, "r+b") as f:
        f.truncate(1 << 30)
    assert refusal(path).code == "st-header-too-large"


def test_20_000_tensors_are_fast(tmp_path: Path, within: Any) -> None:
    header = {f"model.layers.{i}.mlp.experts.0.up_proj.weight":
              {"dtype": "BF16", "shape": [1, 2], "data_offsets": [4 * i, 4 * i + 4]} for i in range(20_000)}
    path = write(tmp_path, pack(header, bytes(80_000)))
    with within(25):
        assert len(read_header(path).tensors) == 20_000


def test_only_the_standard_library_is_imported() -> None:
    code = ("import sys, llamactl.checkpoint.folder, llamactl.checkpoint.gguf;"
            "print([m for m in ('torch', 'numpy', 'safetensors', 'gguf') if m in sys.modules])")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                         cwd=Path(__file__).parents[2])
    assert run.stdout == "[]\n"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
VALID = pack({"__metadata__": {"format": "pt"}, "a": A, "b": B}, bytes(16))


def accepted(path: str) -> bool:
    """Whether the file is accepted. Anything but LlamactlError goes through and fails the test."""
    try:
        read_header(path)
    except LlamactlError:
        return False
    return True


@relaxed
@given(some.binary(max_size=200))
@example(struct.pack("<Q", 2) + b"{}")
def test_random_bytes(scratch: Path, content: bytes) -> None:
    accepted(write(scratch, content))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    assert not any(accepted(write(tmp_path, VALID[:end])) for end in range(len(VALID)))


@relaxed
@given(some.integers(0, len(VALID)), some.integers(0, len(VALID)), some.binary(max_size=12))
def test_mutated_bytes(scratch: Path, start: int, end: int, put: bytes) -> None:
    content = VALID[: min(start, end)] + put + VALID[max(start, end) :]
    accepted(write(scratch, content))


JSON = some.recursive(
    some.none() | some.booleans() | some.integers(-(2**70), 2**70) | some.floats() | some.text(max_size=5),
    lambda inner: some.lists(inner, max_size=4)
    | some.dictionaries(some.sampled_from(["dtype", "shape", "data_offsets", "a"]) | some.text(max_size=3), inner),
)


@relaxed
@given(some.dictionaries(some.just("__metadata__") | some.text(max_size=3), JSON), some.binary(max_size=9))
def test_random_json(scratch: Path, header: dict[str, Any], data: bytes) -> None:
    accepted(write(scratch, pack(header, data)))


@some.composite
def near_valid(draw: some.DrawFn) -> bytes:
    """A file that is valid but for at most two changes, all of a kind where we are not stricter than the library."""
    header: dict[str, Any] = {}
    at = 0
    for name in draw(some.lists(some.text("abc/é\n", max_size=3), max_size=4, unique=True)):
        dtype = draw(some.sampled_from([*BITS]))
        shape = draw(some.lists(some.integers(0, 4), max_size=3))
        elements = 1
        for n in shape:
            elements *= n
        size = elements * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    tail = draw(some.sampled_from([0] * 8 + [-1, 1, 4]))
    for _ in range(draw(some.sampled_from([0, 0, 1, 2]))):
        if not header:
            break
        changed = header[draw(some.sampled_from(sorted(header)))]
        odd: some.SearchStrategy[Any] = some.integers(-1, 9)
        odd |= some.sampled_from([2**40, 2**64, 2.0, True, None, "2", [], {}])
        match draw(some.sampled_from(["shape", "axis", "offset", "dtype", "drop", "extra"])):
            case "shape":
                changed["shape"] = draw(some.lists(odd, max_size=2) | some.none())
            case "axis":
                changed["shape"] = [*(changed.get("shape") or []), draw(odd)]
            case "offset" if isinstance(changed.get("data_offsets"), list):
                changed["data_offsets"][draw(some.integers(0, 1))] = draw(odd)
            case "dtype":
                changed["dtype"] = draw(some.sampled_from([*BITS, "F33", "", None, 1]))
            case "drop":
                changed.pop(draw(some.sampled_from(["dtype", "shape", "data_offsets"])), None)
            case _:
                changed["extra"] = draw(odd)
    metadata = draw(some.none() | some.dictionaries(some.text("ab", max_size=2), some.text(max_size=3) | some.just(1)))
    if metadata is not None:
        header["__metadata__"] = metadata
    order = draw(some.permutations(sorted(header)))
    raw = json.dumps({k: header[k] for k in order}).encode()
    before = draw(some.sampled_from([b"", b"", b" ", b"\n\t"]))
    after = draw(some.sampled_from([b"", b"  ", b"\n", b"\0"]))
    return pack(before + raw + after, bytes(max(at + tail, 0)))


@settings(relaxed, max_examples=400)
@given(near_valid())
def test_agrees_with_the_library(scratch: Path, content: bytes) -> None:
    library = pytest.importorskip("safetensors")
    path = write(scratch, content)
    try:
        with library.safe_open(path, "np") as f:
            names = f.keys()
            theirs = {k: (f.get_slice(k).get_dtype(), tuple(f.get_slice(k).get_shape())) for k in names}
            metadata = f.metadata() or {}
    except Exception:
        assert not accepted(path)
    else:
        h = read_header(path)
        assert {t.name: (t.dtype, t.shape) for t in h.tensors} == theirs
        assert h.metadata == metadata
