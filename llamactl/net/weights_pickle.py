"""PyTorch pickles (.bin, .pt, .pth), read with torch's restricted unpickler only, mapped, and checked before use.

A file must be a zip whose entries are stored as they are; every storage lies in the file, and every tensor in its
storage. There is no way around the restriction, and no switch for one.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llamactl.checkpoint.held import Held
from llamactl.checkpoint.pickles import SAFETENSORS, check_pickle, unsafe
from llamactl.checkpoint.safetensors import quote
from llamactl.errors import InputRefused

MAX_DEPTH = 8  # dicts in dicts, down to the tensors
_WORDS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8",
          torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.int16: "I16", torch.bool: "BOOL",
          torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}


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
        raise InputRefused("pickle-format", what, path=path, help=SAFETENSORS)
    found = {k: v.detach() for k, v in data.items() if isinstance(k, str) and isinstance(v, Tensor)}
    return found, [str(k) for k in data if k not in found]


def load_pickle(path: str, *, inside: str | None = None) -> Any:
    """What torch.save wrote to `path`: numbers, strings, containers and tensors that are views of the mapped file.

    Errors (InputRefused): pickle-unsafe (an object that is no weight, named), pickle-format (not torch's zip format, or
    compressed, too large, damaged), pickle-storage (a tensor reaches out of its storage, storages out of the file), and
    those of disk.open_regular.
    """
    size = check_pickle(path, inside=inside)
    try:
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as e:
        raise unsafe(str(e), path) from None
    except Exception as e:  # whatever a damaged file makes of torch's reader
        said = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise InputRefused("pickle-format", f"cannot be read as PyTorch weights: {said[:300]}", path=path,
                           help="download the file again, or " + SAFETENSORS) from None
    _check_storages(data, size, path)
    return data


def _check_storages(data: Any, size: int, path: str) -> None:
    """Every tensor inside its storage, all storages together inside the file."""
    held_bytes: dict[int, int] = {}
    for name, t in _tensors(data, "", MAX_DEPTH):
        if t.layout is not torch.strided or t.is_quantized or t.device.type != "cpu":
            raise InputRefused("pickle-format", f"{quote(name)} is a {t.layout} tensor on {t.device.type}, not plain "
                               "numbers", path=path, help=SAFETENSORS)
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
