"""GGUF tensors: floats as views of the mapped file, quantised ones unpacked to float32 when they are asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llamactl.checkpoint.account import listed
from llamactl.checkpoint.files import complete
from llamactl.checkpoint.gguf import GgufHeader, GgufTensor
from llamactl.checkpoint.ggufparts import all_parts, joined
from llamactl.checkpoint.held import Held
from llamactl.errors import InputRefused, NotAvailable
from llamactl.net.weights_mapped import DTYPES, MappedFile

# Unpacked by the gguf package, the reference implementation in Python.
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_SCALES = (".scale", ".input_scale")
_ANOTHER = "take another quantisation of the model, e.g. Q8_0"


class GgufReader:
    """The tensors of a GGUF file, or of all parts of a split one; headers are read and checked first.

    Errors: those of gguf.read_header; InputRefused gguf-split (parts missing), weights-quantized (a type that is not
    unpacked here), NotAvailable extra-missing where the gguf package is needed and absent.
    """

    def __init__(self, path: str) -> None:
        parts = all_parts(path)
        header = joined(parts)
        complete(header.metadata, len(header.tensors), path)
        self.warnings = header.notes
        self.tensors = {t.name: Held(name=t.name, dtype=t.type, shape=t.shape, nbytes=t.nbytes) for t in header.tensors}
        self._at: dict[str, tuple[GgufHeader, GgufTensor]] = {t.name: (p, t) for p in parts for t in p.tensors}
        self._files: dict[str, MappedFile] = {}
        _refuse_types(self.tensors, path)

    def get(self, name: str) -> Tensor:
        header, t = self._at[name]
        return self._read(header, t, 0, t.nbytes, t.shape)

    def part(self, name: str, index: int) -> Tensor:
        header, t = self._at[name]
        nbytes = t.nbytes // t.shape[0]
        return self._read(header, t, index * nbytes, nbytes, t.shape[1:])

    def _read(self, header: GgufHeader, t: GgufTensor, begin: int, nbytes: int, shape: tuple[int, ...]) -> Tensor:
        if header.path not in self._files:
            self._files[header.path] = MappedFile(header.path, header.file_bytes)
        begin += header.data_offset + t.offset
        file = self._files[header.path]
        if t.type in DTYPES:
            return file.tensor(begin, nbytes, DTYPES[t.type], shape)
        return unpacked(file.bytes[begin : begin + nbytes], t.type, shape)


def unpacked(raw: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
    """Blocks of GGML type `kind` as float32 of `shape`. raw: (bytes,) uint8, rows one after another."""
    quants, types = _package()
    rows = raw.numel() // max(shape[-1], 1) if len(shape) < 2 else torch.Size(shape[:-1]).numel()
    values = quants.dequantize(raw.view(max(rows, 1), -1).numpy(), types[kind])
    return torch.from_numpy(values).view(shape)


def packed(x: Tensor, kind: str) -> Tensor:
    """(rows, cols) float32 in blocks of GGML type `kind`: (bytes,) uint8, rows one after another."""
    quants, types = _package()
    return torch.from_numpy(quants.quantize(x.contiguous().numpy(), types[kind])).view(torch.uint8).reshape(-1)


def _package() -> tuple[Any, Any]:
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        raise NotAvailable("extra-missing", "quantised GGUF weights need the gguf package, which is not installed",
                           help="pip install 'llamactl[gguf]'") from None
    return quants, GGMLQuantizationType


def _refuse_types(tensors: dict[str, Held], path: str) -> None:
    unknown = {t.dtype: t.name for t in tensors.values() if t.dtype not in DTYPES and t.dtype not in QUANTISED}
    if unknown:
        what = listed((f"{kind} ({name})" for kind, name in unknown.items()), 5)
        raise InputRefused("weights-quantized", f"tensors of types that are not unpacked here: {what}; F64, F32, F16, "
                           f"BF16 and {', '.join(QUANTISED)} are read", path=path, help=_ANOTHER)
    scaled = [n for n in tensors if n.endswith(_SCALES)]
    if scaled:
        raise InputRefused("weights-quantized", "weights with scales beside them are not unpacked here: "
                           f"{listed(scaled, 3)}", path=path, help=_ANOTHER)
    if any(t.dtype in QUANTISED for t in tensors.values()):
        _package()

