"""Writing GGUF: read back by our own reader and by the gguf package, byte for byte what that package writes."""

from __future__ import annotations

import hashlib
import io
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamactl.checkpoint import ggufwrite
from llamactl.checkpoint.gguf import GGML_TYPES, read_header
from llamactl.checkpoint.ggufarrays import read_numbers, read_strings
from llamactl.checkpoint.ggufwrite import Field, GgufOut, file_bytes, nbytes, write

FIELDS = (
    Field("general.architecture", "STRING", "llama"), Field("general.name", "STRING", "naïve ✓\n"),
    Field("a.u32", "UINT32", 2**32 - 1), Field("a.i32", "INT32", -(2**31)), Field("a.u64", "UINT64", 2**64 - 1),
    Field("a.f32", "FLOAT32", 1e-5), Field("a.whole", "FLOAT32", 10000), Field("a.yes", "BOOL", True),
    Field("a.no", "BOOL", False), Field("a.empty", "STRING", ""),
    Field("t.tokens", "ARRAY:STRING", ["▁a", "", "b c"]), Field("t.types", "ARRAY:INT32", [1, -3, 6]),
    Field("t.scores", "ARRAY:FLOAT32", [0.0, -1.5, 2]), Field("t.flags", "ARRAY:BOOL", [True, False, True]),
    Field("t.none", "ARRAY:UINT32", []),
)
TENSORS = (
    GgufOut("token_embd.weight", "F16", (7, 5)), GgufOut("blk.0.ffn_up_exps.weight", "Q8_0", (2, 3, 64)),
    GgufOut("output_norm.weight", "F32", (5,)), GgufOut("half", "BF16", (3,)), GgufOut("one", "F32", ()),
    GgufOut("nothing", "F32", (0, 4)), GgufOut("whole", "F32", (8, 4)),
)


def content(t: GgufOut) -> bytes:
    """Bytes of a tensor that are like no other's."""
    n = nbytes(t.type, t.shape)
    return (hashlib.sha256(t.name.encode()).digest() * (n // 32 + 1))[:n]


def padded(t: GgufOut) -> int:
    """What a tensor takes in the file."""
    return -(-nbytes(t.type, t.shape) // 32) * 32


def pieces(t: GgufOut) -> Iterator[bytes | memoryview]:
    """`content` in pieces of odd sizes, one of them empty."""
    whole = content(t)
    yield whole[:3]
    yield b""
    yield memoryview(whole)[3:]


def made(fields: Any = FIELDS, tensors: Any = TENSORS, blocks: Callable[[GgufOut], Any] = pieces) -> bytes:
    out = io.BytesIO()
    write(out, fields, tensors, blocks)
    return out.getvalue()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "m.gguf"
    file.write_bytes(made())
    return file


class TestReadBack:
    def test_fields(self, path: Path) -> None:
        header = read_header(path)
        assert (header.version, header.alignment, header.notes) == (3, 32, ())
        said = {f.key: tuple(f.value) if f.kind.startswith("ARRAY") else f.value for f in FIELDS}
        said["a.f32"] = struct.unpack("<f", struct.pack("<f", 1e-5))[0]
        assert header.metadata == said
        assert list(header.metadata) == [f.key for f in FIELDS]
        assert [type(header.metadata[k]) for k in ("a.yes", "a.u32", "a.whole")] == [bool, int, float]

    def test_tensors(self, path: Path) -> None:
        header, raw = read_header(path), path.read_bytes()
        assert [(t.name, t.type, t.shape) for t in header.tensors] == [tuple(t) for t in TENSORS]
        for t, out in zip(header.tensors, TENSORS, strict=True):
            begin = header.data_offset + t.offset
            assert raw[begin : begin + t.nbytes] == content(out)
            assert t.nbytes == nbytes(out.type, out.shape)

    def test_all_between_the_tensors_is_zero(self, path: Path) -> None:
        header, raw = read_header(path), bytearray(path.read_bytes())
        for t in header.tensors:
            begin = header.data_offset + t.offset
            assert begin % 32 == 0
            raw[begin : begin + t.nbytes] = bytes(t.nbytes)
        assert not any(raw[header.data_offset :])
        assert len(raw) % 32 == 0

    def test_long_arrays(self, tmp_path: Path) -> None:
        tokens, scores = [f"t{i}" for i in range(5000)], [i / 7 for i in range(5000)]
        file = tmp_path / "m.gguf"
        file.write_bytes(made((Field("tokens", "ARRAY:STRING", tokens), Field("scores", "ARRAY:FLOAT32", scores)), ()))
        header = read_header(file)
        assert read_strings(header, "tokens") == tokens
        assert read_numbers(header, "scores", floats=True) == pytest.approx(scores, rel=1e-6)

    def test_the_gguf_package_reads_the_same(self, path: Path) -> None:
        gguf = pytest.importorskip("gguf")
        # Its reader shapes what it maps, which neither a scalar nor an empty tensor survives; nor an empty array.
        tensors = [t for t in TENSORS if t.shape and all(t.shape)]
        path.write_bytes(made([f for f in FIELDS if f.value != []], tensors))
        reader = gguf.GGUFReader(path)
        for f in FIELDS:
            if f.value != []:
                value = reader.fields[f.key].contents()
                assert value == (pytest.approx(f.value) if "FLOAT" in f.kind else f.value), f.key
                assert [t.name for t in reader.fields[f.key].types] == f.kind.split(":")
        assert [(t.name, t.tensor_type.name) for t in reader.tensors] == [(t.name, t.type) for t in tensors]
        for found, t in zip(reader.tensors, tensors, strict=True):
            assert tuple(int(n) for n in found.shape)[::-1] == t.shape
            assert found.data.tobytes() == content(t)

    def test_the_same_bytes_as_the_gguf_package(self, tmp_path: Path) -> None:
        gguf, np = pytest.importorskip("gguf"), pytest.importorskip("numpy")
        fields = [f for f in FIELDS if f.value != []]
        tensors = [t for t in TENSORS if t.shape and all(t.shape)]
        w = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
        types = gguf.GGUFValueType
        for f in fields[1:]:
            array, _, element = f.kind.partition(":")
            w.add_key_value(f.key, f.value, types[array], types[element] if element else None)
        for t in tensors:
            kind = gguf.GGMLQuantizationType[t.type]
            rows = (*t.shape[:-1], nbytes(t.type, t.shape[-1:]))
            w.add_tensor(t.name, np.frombuffer(content(t), np.uint8).reshape(rows), raw_dtype=kind)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        assert made(fields, tensors) == (tmp_path / "theirs.gguf").read_bytes()


class TestSizes:
    def test_known_before_it_is_written(self) -> None:
        assert file_bytes(FIELDS, TENSORS) == len(made())
        for n in range(70):  # headers of every length modulo 32
            fields = (Field("k", "STRING", "x" * n),)
            assert file_bytes(fields, TENSORS[:1]) == len(made(fields, TENSORS[:1]))
        assert file_bytes((), ()) == len(made((), ())) == 32

    def test_every_type(self) -> None:
        for t in GGML_TYPES.values():
            assert nbytes(t.name, (3, 2 * t.block)) == 6 * t.block_bytes
        assert (nbytes("F32", ()), nbytes("F16", (0, 3)), nbytes("BF16", (2, 3, 5))) == (4, 0, 60)

    @pytest.mark.parametrize(("type", "shape", "word"), [
        ("Q8_0", (64, 33), "no multiple of a Q8_0 block"), ("Q8_0", (), "no multiple"), ("Q4_K", (128,), "Q4_K"),
        ("F8", (2,), "no GGML type"), ("f32", (2,), "no GGML type")])
    def test_no_size(self, type: str, shape: tuple[int, ...], word: str) -> None:
        with pytest.raises(ValueError, match=word):
            nbytes(type, shape)

    def test_memory_is_one_piece(self) -> None:
        class Nowhere(io.RawIOBase):
            def write(self, b: Any) -> int:
                return len(b)

        big = GgufOut("big", "F32", (1 << 14, 1 << 10))  # 64 MB
        piece = bytes(1 << 20)
        tracemalloc.start()
        write(Nowhere(), FIELDS, (big,), lambda t: (piece for _ in range(64)))  # type: ignore[arg-type]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 18


class TestOrder:
    def test_deterministic(self) -> None:
        assert made() == made() == made(list(FIELDS), list(TENSORS), lambda t: [bytearray(content(t))])

    def test_tensors_are_asked_for_one_after_the_other(self) -> None:
        """Each once, when all before it stands in the file, padding too."""
        out = io.BytesIO()
        asked: list[str] = []
        header = file_bytes(FIELDS, TENSORS) - sum(map(padded, TENSORS))

        def blocks(t: GgufOut) -> Iterator[bytes]:
            assert len(out.getvalue()) == header + sum(map(padded, TENSORS[: len(asked)]))
            asked.append(t.name)
            yield content(t)

        write(out, FIELDS, TENSORS, blocks)
        assert asked == [t.name for t in TENSORS]


class TestRefused:
    @pytest.mark.parametrize("wrong", [b"", bytes(69), bytes(71), bytes(96)])
    def test_blocks_that_do_not_add_up(self, wrong: bytes) -> None:
        with pytest.raises(ValueError, match=r"token_embd.weight: .*bytes for a tensor of 70"):
            made((), TENSORS[:1], lambda t: [wrong])

    def test_a_piece_too_many_is_not_written(self) -> None:
        out = io.BytesIO()
        with pytest.raises(ValueError, match="more than 70 bytes"):
            write(out, (), TENSORS[:1], lambda t: [bytes(70), b"x"])
        assert len(out.getvalue()) == file_bytes((), TENSORS[:1]) - 96 + 70

    def test_pieces_are_counted_in_bytes(self) -> None:
        wide = memoryview(bytes(70)).cast("H")
        assert len(wide) == 35
        assert len(made((), TENSORS[:1], lambda t: [wide])) == file_bytes((), TENSORS[:1])

    @pytest.mark.parametrize(("kind", "value"), [
        ("UINT32", -1), ("UINT32", 2**32), ("UINT32", 1.0), ("UINT32", True), ("UINT32", "1"), ("UINT32", None),
        ("INT32", 2**31), ("UINT64", 2**64), ("FLOAT32", 1e39), ("FLOAT32", float("nan")), ("FLOAT32", float("inf")),
        ("FLOAT32", False), ("FLOAT32", "1"), ("BOOL", 1), ("BOOL", "true"), ("STRING", 1), ("STRING", b"x"),
        ("STRING", "\ud800"), ("uint32", 1), ("ARRAY", [1]), ("ARRAY:", [1]), ("ARRAY:ARRAY", [[1]]),
        ("LIST:INT32", 1), ("ARRAY:INT32", [1, 2**31]), ("ARRAY:INT32", [1, True]), ("ARRAY:STRING", ["a", 1]),
        ("ARRAY:BOOL", [1]), ("ARRAY:FLOAT32", [0.0, float("-inf")]),
    ])
    def test_values_that_are_not_of_their_type(self, kind: str, value: Any) -> None:
        for call in (lambda f: made(f, ()), lambda f: file_bytes(f, ())):
            with pytest.raises(ValueError, match=r"k: |surrogates"):
                call((Field("k", kind, value),))

    @pytest.mark.parametrize("fields", [
        (Field("", "BOOL", True),), (Field("k" * 65536, "BOOL", True),),
        (Field("k", "BOOL", True), Field("k", "BOOL", True)), (Field("general.alignment", "UINT32", 64),)])
    def test_keys(self, fields: Any) -> None:
        with pytest.raises(ValueError, match=r"key|alignment"):
            made(fields, ())

    @pytest.mark.parametrize("tensors", [
        (GgufOut("", "F32", (2,)),), (GgufOut("n" * 64, "F32", (2,)),), (GgufOut("é" * 32, "F32", (2,)),),
        (GgufOut("a", "F32", (2,)), GgufOut("a", "F16", (2,))), (GgufOut("a", "F32", (1, 1, 1, 1, 1)),),
        (GgufOut("a", "F32", (-2, -2)),), (GgufOut("a", "F8", (2,)),)])
    def test_tensors(self, tensors: Any) -> None:
        with pytest.raises(ValueError, match=r"name|axes|type"):
            made((), tensors, lambda t: [bytes(16)])

    def test_nothing_is_written_of_what_is_refused(self) -> None:
        out = io.BytesIO()
        with pytest.raises(ValueError, match="twice"):
            write(out, FIELDS, (*TENSORS, TENSORS[0]), pieces)
        assert out.getvalue() == b""

    def test_the_alignment_may_be_said(self) -> None:
        said = made((Field("general.alignment", "UINT32", 32),), TENSORS[:1])
        assert len(said) % 32 == 0

    def test_names_of_every_length_llama_cpp_takes(self, tmp_path: Path) -> None:
        tensors = (GgufOut("n" * ggufwrite.MAX_NAME, "F32", (2,)),)
        (tmp_path / "m.gguf").write_bytes(made((Field("k" * 65535, "BOOL", True),), tensors))
        assert read_header(tmp_path / "m.gguf").tensors[0].name == "n" * 63
