"""Somebody's saved logits: what is read, in which form, what is told of the values, and what is refused unread."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from llamactl.errors import InputRefused, LlamactlError, NotAvailable
from llamactl.verify import npz
from llamactl.verify.saved import are_log_probs, computed_in, read_ids, read_saved

T, V, D = 7, 50, 12


@pytest.fixture
def x() -> Tensor:
    return torch.randn(T, V, generator=torch.Generator().manual_seed(0)) * 3


def save(path: Path, arrays: dict[str, Tensor]) -> Path:
    """`arrays` in the format that the name of `path` says; an .npy holds the first."""
    if path.suffix == ".safetensors":
        save_file({k: v.contiguous() for k, v in arrays.items()}, path)
    elif path.suffix == ".npy":
        np.save(path, next(iter(arrays.values())).numpy())
    elif "packed" in path.name:
        np.savez_compressed(path, **{k: v.numpy() for k, v in arrays.items()})
    else:
        np.savez(path, **{k: v.numpy() for k, v in arrays.items()})
    return path


def refused(path: Path, code: str, *parts: str, read: Callable[..., Any] = read_saved, **how: Any) -> None:
    """One line with its numbers and the file's name."""
    with pytest.raises(LlamactlError) as caught:
        read(str(path), **how)
    assert (caught.value.code, caught.value.path) == (code, str(path)), caught.value
    for part in parts:
        assert part in caught.value.message


FILES = ("x.safetensors", "x.npy", "x.npz", "packed.npz")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [False, True])
def test_every_format_gives_the_same_logits(tmp_path: Path, x: Tensor, name: str, dtype: torch.dtype, batch: bool
                                            ) -> None:
    x = x.to(dtype)
    found = read_saved(str(save(tmp_path / name, {"logits": x[None] if batch else x})))
    assert found.logits is not None
    assert found.logits.dtype == dtype
    assert torch.equal(found.logits, x)
    assert (found.vocab, found.dtype) == (V, {2: "fp16", 4: "fp32", 8: "fp64"}[dtype.itemsize])
    assert (found.ids, found.hidden, found.log_probs, found.notes) == (None, {}, False, ())


def test_bf16_is_read_from_safetensors(tmp_path: Path, x: Tensor) -> None:
    found = read_saved(str(save(tmp_path / "x.safetensors", {"logits": x.bfloat16()})))
    assert found.logits is not None
    assert torch.equal(found.logits, x.bfloat16())
    assert (found.dtype, found.computed_in) == ("bf16", "bf16")


@pytest.mark.parametrize("name", ["x.safetensors", "x.npz", "packed.npz"])
@pytest.mark.parametrize("logits", ["logits", "output", "lm_logits", "whatever"])
@pytest.mark.parametrize("tokens", ["tokens", "input_ids", "ids", "token_ids"])
def test_names(tmp_path: Path, x: Tensor, name: str, logits: str, tokens: str) -> None:
    ids = torch.arange(T, dtype=torch.int32)[None]
    found = read_saved(str(save(tmp_path / name, {"a": torch.ones(3), tokens: ids, logits: x})))
    assert found.logits is not None
    assert torch.equal(found.logits, x)
    assert found.ids is not None
    assert found.ids.dtype == torch.int64
    assert found.ids.tolist() == list(range(T))


@pytest.mark.parametrize("arrays", [{"a": (T, V), "b": (T, V)}, {"a": (V,)}, {}], ids=["two", "flat", "none"])
def test_what_cannot_be_told_by_name_is_refused_with_the_names(tmp_path: Path, arrays: dict[str, tuple[int, ...]]
                                                               ) -> None:
    for name in ("x.npz", "x.safetensors"):
        path = save(tmp_path / name, {k: torch.randn(s) for k, s in arrays.items()})
        refused(path, "saved-names", *(f"'{k}' " for k in arrays), *(["nothing"] if not arrays else []))


def test_a_name_decides_where_several_arrays_fit(tmp_path: Path, x: Tensor) -> None:
    found = read_saved(str(save(tmp_path / "x.npz", {"before": x * 2, "logits": x, "after": x * 3})))
    assert found.logits is not None
    assert torch.equal(found.logits, x)


@pytest.mark.parametrize("name", ["x.safetensors", "x.npz"])
@pytest.mark.parametrize("form", ["stack", "batched stack", "hidden", "hidden_states", "layers", "batched layers"])
def test_hidden_states(tmp_path: Path, x: Tensor, name: str, form: str) -> None:
    states = torch.randn(4, T, D)
    arrays = {"logits": x}
    if form.endswith("stack"):
        arrays["hidden_states"] = states[:, None] if "batched" in form else states
    else:
        word = form.split()[-1]
        arrays |= {f"{word}.{n}": s[None] if "batched" in form else s for n, s in enumerate(states)}
    found = read_saved(str(save(tmp_path / name, arrays)))
    first = 1 if "layers" in form else 0  # the output of layer 0 is what stands after one layer
    assert list(found.hidden) == list(range(first, first + 4))
    assert all(torch.equal(found.hidden[first + n], states[n]) for n in range(4))


def test_hidden_states_of_another_text_are_refused(tmp_path: Path, x: Tensor) -> None:
    for name, shape in (("hidden_states", (4, T + 1, D)), ("hidden.3", (T, D, 2)), ("layers.0", (T - 1, D)),
                        ("hidden_states", (4, 2, T, D))):
        path = save(tmp_path / "x.safetensors", {"logits": x, name: torch.ones(shape)})
        refused(path, "saved-shape", name, str(list(shape)))


# ---- a large file is not copied


@pytest.mark.parametrize("name", ["x.safetensors", "x.npy"])
def test_large_logits_are_views_of_the_file(tmp_path: Path, name: str) -> None:
    """256 MB in the file take a few MB more of this process's own memory."""
    rows, columns = 512, 1 << 17
    path = tmp_path / name
    head = {"logits": {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, 4 * rows * columns]}}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    npy = io.BytesIO()
    np.lib.format.write_array_header_1_0(npy, {"descr": "<f4", "fortran_order": False, "shape": (rows, columns)})
    start = npy.getvalue() if name == "x.npy" else len(text).to_bytes(8, "little") + text
    with path.open("wb") as f:
        f.write(start)
        f.truncate(len(start) + 4 * rows * columns)  # a hole: all zeros, and no disk
    before = own_memory()
    found = read_saved(str(path))
    assert found.logits is not None
    assert found.logits.shape == (rows, columns)
    assert own_memory() - before < 150 << 20  # the rows that are looked at, in fp64


def own_memory() -> int:
    """Bytes of anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith("RssAnon"))


# ---- other forms of an .npy


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", ["<f4", ">f4", "<f8", ">f2"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_npy_that_numpy_writes(tmp_path: Path, x: Tensor, order: Any, kind: str, version: tuple[int, int]
                                     ) -> None:
    array = np.asarray(x.numpy().astype(kind), order=order)
    with (tmp_path / "x.npy").open("wb") as f:
        np.lib.format.write_array(f, array, version=version)
    found = read_saved(str(tmp_path / "x.npy"))
    assert found.logits is not None
    assert np.array_equal(found.logits.numpy(), array)


# ---- what the values tell


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.float64])
def test_values_of_a_coarser_type_are_known(tmp_path: Path, kind: torch.dtype, stored: torch.dtype) -> None:
    x = (torch.randn(300, 2000) * 3).to(kind).to(stored)  # more than are looked at
    found = read_saved(str(save(tmp_path / "x.npy", {"logits": x})))
    word = {torch.bfloat16: "bf16", torch.float16: "fp16"}[kind]
    assert found.computed_in == word
    ((code, text),) = found.notes
    assert code == "saved-rounded"
    assert word in text


@pytest.mark.parametrize(("values", "word"), [
    ([0.0, 0.0], "fp32"), ([float("nan"), float("inf")], "fp32"), ([0.1, 0.2], "fp32"), ([1.0, 0.5], "bf16"),
    ([1 + 2**-10, float("nan")], "fp16"), ([1 + 2**-10, 1e6], "fp32"), ([1e-30, 1.0], "fp32"), ([1e30, 0.1], "fp32"),
])
def test_the_coarsest_type_that_holds_every_value(values: list[float], word: str) -> None:
    assert computed_in(torch.tensor([values])) == word


def test_fp64_is_told_from_fp32_in_it(x: Tensor) -> None:
    assert (computed_in(x.double() / 3), computed_in(x.double()), computed_in(x)) == ("fp64", "fp32", "fp32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_log_probabilities_are_noted(tmp_path: Path, x: Tensor, dtype: torch.dtype) -> None:
    path = save(tmp_path / "x.safetensors", {"logits": x.log_softmax(-1).to(dtype)})
    found = read_saved(str(path))
    assert found.log_probs
    assert [code for code, _ in found.notes] == ["saved-log-probs"]
    assert not are_log_probs(x)
    assert not are_log_probs(torch.cat([x.log_softmax(-1), x]))  # all rows, or none


def test_probabilities_are_refused(tmp_path: Path, x: Tensor) -> None:
    refused(save(tmp_path / "x.npy", {"logits": x.softmax(-1)}), "saved-values", "probabilities")


def test_values_that_are_no_numbers_are_read(tmp_path: Path, x: Tensor) -> None:
    """Whether a port is right is not said here."""
    x[3, 4], x[5] = float("nan"), float("inf")
    found = read_saved(str(save(tmp_path / "x.npy", {"logits": x})))
    assert found.logits is not None
    assert (int(found.logits.isnan().sum()), int(found.logits.isinf().sum())) == (1, V)


# ---- shapes


@pytest.mark.parametrize(("shape", "part"), [
    ((2, T, V), "2 sequences"), ((V,), "[50]"), ((1, 1, T, V), "[1, 1, 7, 50]"), ((0, V), "nothing"),
    ((T, 0), "nothing"), ((1, 0, V), "nothing"), ((), "[]"),
])
@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.safetensors"])
def test_a_shape_that_is_none_of_logits_is_refused(tmp_path: Path, shape: tuple[int, ...], part: str, name: str
                                                   ) -> None:
    path = save(tmp_path / name, {"logits": torch.ones(shape)})
    refused(path, "saved-shape", part)


def test_exchanged_axes_are_known_by_the_vocabulary(tmp_path: Path, x: Tensor) -> None:
    path = save(tmp_path / "x.npy", {"logits": x.T.contiguous()})
    refused(path, "saved-shape", "[50, 7]", "exchanged", vocab=V)
    assert read_saved(str(path), vocab=V + 1).vocab == T  # another vocabulary is the comparison's matter
    square = save(tmp_path / "y.npy", {"logits": torch.randn(V, V)})
    assert read_saved(str(square), vocab=V).vocab == V


@pytest.mark.parametrize(("ids", "code", "part"), [
    (torch.arange(T + 1), "saved-shape", "8 token ids"), (torch.arange(2 * T).view(2, T), "saved-shape", "[2, 7]"),
    (torch.arange(T) - 1, "saved-values", "-1"), (torch.arange(T) + 2**31, "saved-values", "2147483648"),
    (torch.ones(T), "saved-format", "f4"), (torch.ones(T, dtype=torch.bool), "saved-format", "b1"),
])
def test_ids_that_are_none_are_refused(tmp_path: Path, x: Tensor, ids: Tensor, code: str, part: str) -> None:
    refused(save(tmp_path / "x.npz", {"logits": x, "ids": ids}), code, part)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_a_file_of_ids(tmp_path: Path, dtype: Any, name: str) -> None:
    ids = np.arange(9, dtype=dtype)
    (np.save if name == "x.npy" else np.savez)(tmp_path / name, ids)
    assert read_ids(str(tmp_path / name)).tolist() == list(range(9))


def test_a_file_without_ids_is_refused(tmp_path: Path, x: Tensor) -> None:
    refused(save(tmp_path / "x.npz", {"logits": x}), "saved-names", "no token ids", read=read_ids)
    refused(save(tmp_path / "x.npy", {"logits": x}), "saved-names", "no token ids", read=read_ids)


# ---- hostile files


def npy(header: str | bytes, data: bytes = b"", version: int = 1, length: int | None = None) -> bytes:
    """An .npy file with a header of one's own."""
    text = header.encode() if isinstance(header, str) else header
    form = "<H" if version == 1 else "<I"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack(form, len(text) if length is None else length) + text + data


def shaped(shape: str, kind: str = "<f4", order: str = "False") -> str:
    return f"{{'descr': '{kind}', 'fortran_order': {order}, 'shape': {shape}, }}\n"


BAD = {
    "empty": b"", "short": b"\x93NUM", "no length": b"\x93NUMPY\x01\x00", "version": npy(shaped("(1, 1)"), b"1234", 4),
    "header too long": npy(shaped("(1, 1)"), b"1234", 2, 1 << 31), "header past the end": npy("{}", b"", 1, 60_000),
    "cut short": npy(shaped("(2, 3)"), b"0" * 23), "trailing": npy(shaped("(2, 3)"), b"0" * 25),
    "huge shape": npy(shaped("(999999999999999999, 999999999999999999)")), "negative": npy(shaped("(-1, 3)")),
    "float shape": npy(shaped("(1.5, 3)")), "nested": npy("(" * 5000), "spaces": npy(shaped("(" + "1 ," * 40 + ")")),
    "many spaces": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (" + " " * 9000 + "x"),
    "digits": npy(shaped("(" + "1" * 199 + ")")), "NaN": npy(shaped("(NaN, 3)")),
    "call": npy("__import__('os').system('true')"), "unicode": npy(b"\xff\xfe{}"), "axes": npy(shaped("(1," * 9 + ")")),
    "objects": npy(shaped("(1,)", "|O"), pickle.dumps([1])), "records": npy("{'descr': [('a', '<f4')], "
                                                                              "'fortran_order': False, 'shape': (1,)}"),
    "text": npy(shaped("(2, 1)", "<U1"), b"0" * 8), "complex": npy(shaped("(2, 1)", "<c8"), b"0" * 16),
    "bf16 of ml_dtypes": npy(shaped("(2, 1)", "|V2"), b"0" * 4), "no order": npy(shaped("(2, 1)", "f4"), b"0" * 8),
    "pickle": pickle.dumps([1.0]), "old pickle": pickle.dumps({"logits": 1}, 2),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_npy_is_refused_in_a_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(BAD[name])
    with pytest.raises(InputRefused) as caught:
        read_saved(str(path))
    assert caught.value.code in ("saved-format", "st-header-short")
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_bad_member_is_refused_in_a_line(tmp_path: Path, name: str, how: int) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w", how) as z:
        z.writestr("logits.npy", BAD[name])
    with pytest.raises(InputRefused) as caught:
        read_saved(str(path))
    assert caught.value.code == "saved-format"


class Bomb:
    """What runs a program when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch was-here",)


def test_no_pickle_is_ever_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    monkeypatch.chdir(tmp_path)
    objects = np.array([Bomb()], dtype=object)
    np.save("a.npy", objects, allow_pickle=True)
    np.savez("b.npz", logits=x.numpy(), meta=objects)
    torch.save({"logits": x, "more": 1}, "c.npz")
    (tmp_path / "d.npy").write_bytes(pickle.dumps(Bomb()))
    for name in ("a.npy", "b.npz", "c.npz", "d.npy"):
        refused(Path(name), "saved-format", "pickle")
    assert not (tmp_path / "was-here").exists()


def test_text_beside_the_logits_is_left_alone(tmp_path: Path, x: Tensor) -> None:
    np.savez(tmp_path / "x.npz", logits=x.numpy(), prompt=np.array("Hello"))
    assert read_saved(str(tmp_path / "x.npz")).vocab == V


def test_a_zip_bomb_is_refused_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what its directory says, and where that lies, by what its own header says."""
    monkeypatch.setattr(npz, "MAX_UNPACKED", 1 << 20)
    path = tmp_path / "x.npz"
    np.savez_compressed(path, logits=np.zeros((600, 600), np.float32))
    assert path.stat().st_size < 4000
    refused(path, "saved-format", "unpacks to 1,440,128 bytes", "1,048,576")
    whole = npy(shaped("(600, 600)"), b"\0" * 600 * 600 * 4)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("logits.npy", whole)
    data = path.read_bytes()
    size, less = struct.pack("<I", len(whole)), struct.pack("<I", 1000)
    assert data.count(size) == 2
    path.write_bytes(data.replace(size, less))
    refused(path, "saved-format", "damaged")


def test_a_bomb_of_many_members_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npz, "MAX_ARRAYS", 5)
    np.savez(tmp_path / "x.npz", **{f"a{n}": np.zeros(1) for n in range(6)})
    refused(tmp_path / "x.npz", "saved-format", "6 arrays")
    monkeypatch.setattr(npz, "MAX_DIRECTORY_BYTES", 100)
    refused(tmp_path / "x.npz", "saved-format", "directory")


@pytest.mark.parametrize("packed", [False, True])
def test_a_damaged_member_is_refused(tmp_path: Path, x: Tensor, packed: bool) -> None:
    path = save(tmp_path / ("packed.npz" if packed else "x.npz"), {"logits": x})
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    refused(path, "saved-format", "damaged")


def test_a_checksum_that_differs_is_refused(tmp_path: Path, x: Tensor) -> None:
    """Of an array that is mapped, too: what lies there is as long as it should be, and is not what was saved."""
    path = save(tmp_path / "x.npz", {"logits": torch.cat([x] * 40)})
    data = bytearray(path.read_bytes())
    data[-1000] ^= 0x10
    path.write_bytes(data)
    refused(path, "saved-format", "checksum")


def test_an_encrypted_member_is_refused(tmp_path: Path, x: Tensor) -> None:
    path = save(tmp_path / "x.npz", {"logits": x})
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    refused(path, "saved-format", "is encrypted, or packed")


def test_a_header_longer_than_numpys_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(npy(shaped("(1, 1)") + " " * 20_000, b"1234", 2))
    refused(tmp_path / "x.npy", "saved-format", "20,06", "at most 10,000")


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_refused(tmp_path: Path, x: Tensor, name: str) -> None:
    path = save(tmp_path / name, {"logits": x})
    data = path.read_bytes()
    for end in (0, 1, 8, 30, 64, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(InputRefused):
            read_saved(str(path))


def test_a_member_that_lies_outside_the_file_is_refused(tmp_path: Path, x: Tensor) -> None:
    path = save(tmp_path / "x.npz", {"logits": x})
    data = path.read_bytes()
    at = data.index(b"PK\x01\x02")
    more = struct.pack("<I", len(data) - 40)
    for field in (20, 24):  # its sizes, both alike
        data = data[: at + field] + more + data[at + field + 4 :]
    path.write_bytes(data)
    with pytest.raises(InputRefused) as caught:
        read_saved(str(path))
    assert caught.value.code == "saved-format"


@pytest.mark.parametrize("members", [("logits.npy", "logits.npy"), ("logits.txt",), ("model/data.pkl",), ("a/",)])
def test_a_zip_that_is_no_npz_is_refused(tmp_path: Path, members: tuple[str, ...]) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as z, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a name twice
        for m in members:
            z.writestr(m, npy(shaped("(1, 2)"), b"0" * 8))
    refused(path, "saved-format")


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "link.npy").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder.npy").mkdir()
    refused(tmp_path / "pipe.npy", "not-a-file", "named pipe")
    refused(tmp_path / "link.npy", "dangling-link", "nothing")
    refused(tmp_path / "folder.npy", "not-a-file", "folder")
    refused(Path("/dev/zero"), "not-a-file", "device")
    with pytest.raises(NotAvailable):
        read_saved(str(tmp_path / "absent.npy"))


@pytest.mark.parametrize(("head", "code"), [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "lfs-pointer"),
    (b"<!DOCTYPE html><html>", "saved-format"), (b"GGUF\x03\0\0\0" + b"\0" * 64, "saved-format"),
    (b"\0" * 64, "saved-format"), (b'{"logits": [NaN]}' + b" " * 64, "st-header-too-large"),
])
def test_other_files_are_named(tmp_path: Path, head: bytes, code: str) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(head)
    refused(path, code)


def test_a_header_with_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    text = b'{"logits": {"dtype": "F32", "shape": [NaN, 2], "data_offsets": [0, 8]}}'
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"0" * 8)
    refused(tmp_path / "x.safetensors", "st-header-json")


def test_types_without_numbers_are_refused_where_they_are_asked_for(tmp_path: Path, x: Tensor) -> None:
    small = torch.zeros(T, V, dtype=torch.float8_e4m3fn)
    refused(save(tmp_path / "x.safetensors", {"logits": small}), "saved-format", "F8_E4M3")
    refused(save(tmp_path / "y.safetensors", {"logits": torch.ones(T, V, dtype=torch.int32)}), "saved-format", "I32")
    assert read_saved(str(save(tmp_path / "z.safetensors", {"logits": x, "scale": small}))).vocab == V
