"""PyTorch pickles (.bin, .pt, .pth), read with torch's restricted unpickler only, mapped, and checked before use.

A file must be a zip whose entries are stored as they are; every storage lies in the file, and every tensor in its
storage. There is no way around the restriction, and no switch for one.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import torch
from torch import Tensor

from llamactl.checkpoint.disk import looks_like, open_regular
from llamactl.checkpoint.held import Held
from llamactl.checkpoint.safetensors import quote
from llamactl.errors import InputRefused

MAX_ENTRIES = 1 << 17
MAX_DIRECTORY_BYTES = 32_000_000  # of the zip; an entry takes some 100
MAX_PICKLE_BYTES = 32_000_000  # of the names and shapes; 100,000 tensors take some 20 MB
MAX_DEPTH = 8  # dicts in dicts, down to the tensors
_END, _END64, _LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_WORDS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8",
          torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.int16: "I16", torch.bool: "BOOL",
          torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_PICKLE = "/data.pkl"
_SAFETENSORS = "save the weights as safetensors"


class PickleReader:
    """The tensors of one or many state dicts. under: the key that holds the state dict, None for the file itself."""

    def __init__(self, paths: Sequence[str], *, under: str | None = None, inside: str | None = None) -> None:
        self.warnings: tuple[tuple[str, str], ...] = ()
        self._tensors: dict[str, Tensor] = {}
        for path in paths:
            found, other = state_dict(load_pickle(path, inside=inside), path, under)
            twice = [quote(n) for n in found if n in self._tensors]
            if twice:
                raise InputRefused("index-duplicate", "tensors that stand in another file too: "
                                   f"{', '.join(twice[:20])}", path=path, help="keep the files of one build only")
            self._tensors |= found
            if other:
                what = f"{len(other):,} of its entries not tensors: {', '.join(map(quote, other[:5]))}"
                self.warnings += (("weights-other", f"{os.path.basename(path)}: {what}; not read"),)
        self.tensors = {n: held(n, t) for n, t in self._tensors.items()}

    def get(self, name: str) -> Tensor:
        return self._tensors[name]

    def part(self, name: str, index: int) -> Tensor:
        return self._tensors[name][index]


def held(name: str, t: Tensor) -> Held:
    """`t` as an entry of a reader."""
    return Held(name=name, dtype=_WORDS.get(t.dtype, str(t.dtype).removeprefix("torch.")), shape=tuple(t.shape),
                nbytes=t.numel() * t.element_size())


def state_dict(data: Any, path: str, under: str | None = None) -> tuple[dict[str, Tensor], list[str]]:
    """({name: tensor}, names of what is none) of a loaded file; a lone "state_dict" or "model" inside it is opened."""
    if under is not None:
        data = data.get(under) if isinstance(data, Mapping) else None
    for key in ("state_dict", "model", "module"):
        inner = data.get(key) if isinstance(data, Mapping) else None
        if isinstance(inner, Mapping) and any(isinstance(v, Tensor) for v in inner.values()):
            data = inner
            break
    if not isinstance(data, Mapping) or not any(isinstance(v, Tensor) for v in data.values()):
        what = f"no state dict under {under!r}" if under else "no state dict: not a mapping of names to tensors"
        raise InputRefused("pickle-format", what, path=path, help=_SAFETENSORS)
    found = {k: v.detach() for k, v in data.items() if isinstance(k, str) and isinstance(v, Tensor)}
    return found, [str(k) for k in data if k not in found]


def load_pickle(path: str, *, inside: str | None = None) -> Any:
    """What torch.save wrote to `path`: numbers, strings, containers and tensors that are views of the mapped file.

    Errors (InputRefused): pickle-unsafe (an object that is no weight, named), pickle-format (not torch's zip format, or
    compressed, too large, damaged), pickle-storage (a tensor reaches out of its storage, storages out of the file), and
    those of disk.open_regular.
    """
    file, size = open_regular(path, inside=inside)
    with file:
        _check_zip(file, size, path)
    try:
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as e:
        raise _unsafe(str(e), path) from None
    except Exception as e:  # whatever a damaged file makes of torch's reader
        said = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise InputRefused("pickle-format", f"cannot be read as PyTorch weights: {said[:300]}", path=path,
                           help="download the file again, or " + _SAFETENSORS) from None
    _check_storages(data, size, path)
    return data


def _unsafe(said: str, path: str) -> InputRefused:
    named = re.search(r"GLOBAL ([\w.]+)", said) or re.search(r"(?:class|type) ([\w.]+\.[\w.]+)", said)
    if named is None:
        line = next((x for x in said.splitlines() if "nsupported" in x or "error:" in x), said[:200])
        return InputRefused("pickle-unsafe", f"the restricted unpickler refuses it: {line.strip()[:200]}", path=path,
                            help=_SAFETENSORS)
    return InputRefused("pickle-unsafe", f"it asks for {named[1]}, which no weights need; such a file could run any "
                        "program, so it is not read", path=path, help=f"{_SAFETENSORS} where you trust the file")


def _check_zip(file: BinaryIO, size: int, path: str) -> None:
    """torch's zip format, every entry stored as it is, and nothing so large that reading it is the attack."""
    head = file.read(512)
    if not head.startswith(b"PK\x03\x04"):
        if re.match(rb"\x80[\x02-\x05]", head):
            raise InputRefused("pickle-format", "a pickle in the format before torch 1.6; it cannot be mapped, and its "
                               "sizes cannot be checked first", path=path,
                               help=f"load and torch.save it again where you trust it, or {_SAFETENSORS}")
        code, what, help = looks_like(head) or (None, "not a file that torch.save writes (a zip)", _SAFETENSORS)
        raise InputRefused(code or "pickle-format", what, path=path, help=help)
    directory = _directory_bytes(file, size)
    if directory is None or directory > MAX_DIRECTORY_BYTES:
        what = "a zip without its end: cut short" if directory is None else f"a zip directory of {directory:,} bytes"
        raise InputRefused("pickle-format", what, path=path, help="download the file again")
    try:
        with zipfile.ZipFile(file) as z:
            wrong = _wrong(z.infolist(), size)
            pickled = b"" if wrong else z.read(next(e for e in z.infolist() if e.filename.endswith(_PICKLE)))
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError, UnicodeError) as e:
        raise InputRefused("pickle-format", f"a damaged zip: {e}", path=path, help="download the file again") from None
    if wrong:
        raise InputRefused("pickle-format", wrong, path=path, help=_SAFETENSORS)
    if b"\nbytearray\n" in pickled:  # torch allows it, and it takes as much memory as a number in the file says
        raise _unsafe("GLOBAL bytearray", path)


def _wrong(entries: Sequence[zipfile.ZipInfo], size: int) -> str | None:
    """What keeps a zip of these entries, in a file of `size` bytes, from being read; None if nothing does."""
    if len(entries) > MAX_ENTRIES:
        return f"{len(entries):,} entries; at most {MAX_ENTRIES:,} are read"
    for e in entries:
        if e.compress_type != zipfile.ZIP_STORED or e.compress_size != e.file_size or e.flag_bits & 1:
            return f"{quote(e.filename)} is compressed or encrypted; torch.save stores entries as they are"
        if e.filename.endswith(".pkl") and e.file_size > MAX_PICKLE_BYTES:
            return f"{quote(e.filename)} has {e.file_size:,} bytes; at most {MAX_PICKLE_BYTES:,} are read"
    if sum(e.file_size for e in entries) > size:
        return f"its entries take {sum(e.file_size for e in entries):,} bytes, the file has {size:,}"
    pickles = sum(e.filename.endswith(_PICKLE) for e in entries)
    return None if pickles == 1 else f"a zip with {pickles:,} data.pkl; torch.save writes one"


def _directory_bytes(file: BinaryIO, size: int) -> int | None:
    """Bytes of the zip's directory as its end record says them, None without one."""
    tail_bytes = min(size, 65_535 + 22 + 20)
    file.seek(size - tail_bytes)
    tail = file.read(tail_bytes)
    at = tail.rfind(_END)
    if at < 0 or at + 16 > len(tail):
        return None
    found = int.from_bytes(tail[at + 12 : at + 16], "little")
    if tail[max(at - 20, 0) : at].startswith(_LOCATOR64):
        file.seek(min(int.from_bytes(tail[at - 12 : at - 4], "little"), size))
        record = file.read(56)
        if not record.startswith(_END64):
            return None
        found = int.from_bytes(record[40:48], "little")
    file.seek(0)
    return found


def _check_storages(data: Any, size: int, path: str) -> None:
    """Every tensor inside its storage, all storages together inside the file."""
    held_bytes: dict[int, int] = {}
    for name, t in _tensors(data, "", MAX_DEPTH):
        if t.layout is not torch.strided or t.is_quantized or t.device.type != "cpu":
            raise InputRefused("pickle-format", f"{quote(name)} is a {t.layout} tensor on {t.device.type}, not plain "
                               "numbers", path=path, help=_SAFETENSORS)
        storage = t.untyped_storage()
        last = t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        need = (last + 1) * t.element_size() if t.numel() else 0
        if need > storage.nbytes() or any(s < 0 for s in t.stride()):
            raise InputRefused("pickle-storage", f"{quote(name)} reaches byte {need:,} of a storage of "
                               f"{storage.nbytes():,}", path=path, help="download the file again")
        held_bytes[storage.data_ptr()] = max(held_bytes.get(storage.data_ptr(), 0), storage.nbytes())
    if sum(held_bytes.values()) > size:
        raise InputRefused("pickle-storage", f"its tensors claim {sum(held_bytes.values()):,} bytes, the file has "
                           f"{size:,}", path=path, help="download the file again")


def _tensors(data: Any, name: str, depth: int) -> list[tuple[str, Tensor]]:
    """Every tensor in nested containers, with where it stands."""
    if isinstance(data, Tensor):
        return [(name, data)]
    if depth and isinstance(data, Mapping):
        return [x for k, v in data.items() for x in _tensors(v, f"{name}.{k}".lstrip("."), depth - 1)]
    if depth and isinstance(data, list | tuple):
        return [x for i, v in enumerate(data) for x in _tensors(v, f"{name}.{i}", depth - 1)]
    return []
