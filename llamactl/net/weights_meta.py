"""Meta's original files: consolidated.NN.pth, one of each tensor-parallel rank, read as one model.

A rank holds a slice of each matrix along one axis, and all of each norm. Along which axis is told by the model's own
shapes: exactly one axis makes the whole of N slices (Llama 1 and 2 cut the embedding along its columns, Llama 3 along
its rows; column-parallel matrices along axis 0, row-parallel ones along axis 1).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from llamactl.checkpoint.folder import read_file
from llamactl.checkpoint.held import Held
from llamactl.checkpoint.safetensors import quote
from llamactl.errors import InputRefused, NotAvailable
from llamactl.net.weights_mapped import Reader, SafetensorsReader
from llamactl.net.weights_pickle import PickleReader

_PART = re.compile(r"consolidated\.(\d{2})\.pth")
SINGLE = "consolidated.safetensors"


def meta_files(folder: str) -> list[str]:
    """The full set of consolidated.NN.pth in `folder`, in order; or consolidated.safetensors, as Mistral writes it.

    Errors: NotAvailable weights-not-found, InputRefused shard-missing.
    """
    try:
        names = sorted(n for n in os.listdir(folder) if _PART.fullmatch(n))
    except OSError as e:
        raise InputRefused("io-error", f"cannot be read: {e.strerror}", path=folder) from None
    if not names and os.path.lexists(os.path.join(folder, SINGLE)):
        return [os.path.join(folder, SINGLE)]
    if not names:
        raise NotAvailable("weights-not-found", "params.json, and no consolidated.NN.pth beside it", path=folder,
                           help="download the weights into this folder")
    gaps = [f"consolidated.{n:02d}.pth" for n in range(int(names[-1][13:15]) + 1)
            if f"consolidated.{n:02d}.pth" not in names]
    if gaps:
        raise InputRefused("shard-missing", f"missing: {', '.join(gaps)}", path=folder,
                           help="download the missing files; a part of a model is never read")
    return [os.path.join(folder, n) for n in names]


def meta_reader(folder: str, shapes: Mapping[str, tuple[int, ...]]) -> Reader:
    """The checkpoint of `folder`. shapes: of whole tensors by stored name, as the model has them."""
    files = meta_files(folder)
    if files[0].endswith(SINGLE):
        return SafetensorsReader(read_file(files[0]))
    ranks = [PickleReader([f], inside=folder) for f in files]
    return ranks[0] if len(ranks) == 1 else MergedReader(ranks, shapes, folder)


def rows_of(folder: str, name: str) -> int | None:
    """The rows of a matrix that ranks cut along its rows, of all of them; None where there is none."""
    files = [PickleReader([f], inside=folder).tensors.get(name) for f in meta_files(folder)]
    return sum(t.shape[0] for t in files if t is not None and t.shape) or None


class MergedReader:
    """Several ranks as one checkpoint; a tensor is joined when it is asked for."""

    def __init__(self, ranks: Sequence[PickleReader], shapes: Mapping[str, tuple[int, ...]], path: str) -> None:
        self.warnings = tuple(dict.fromkeys(w for r in ranks for w in r.warnings))
        self.ranks = ranks
        self._axis: dict[str, int | None] = {}
        self.tensors: dict[str, Held] = {}
        first = ranks[0].tensors
        for n, rank in enumerate(ranks[1:], 1):
            if rank.tensors.keys() != first.keys():
                odd = sorted(rank.tensors.keys() ^ first.keys())
                raise InputRefused("weights-missing", f"consolidated.{n:02d}.pth and consolidated.00.pth do not hold "
                                   f"the same tensors: {', '.join(map(quote, odd[:20]))}", path=path,
                                   help="keep the files of one build only")
        for name, t in first.items():
            parts = [r.tensors[name].shape for r in ranks]
            if len(set(parts)) > 1 or len({r.tensors[name].dtype for r in ranks}) > 1:
                raise InputRefused("weights-shape", f"{quote(name)} has other shapes or types in other files: "
                                   f"{', '.join(str(list(p)) for p in parts[:20])}", path=path,
                                   help="the files are not ranks of one model")
            axis = split_axis(t.shape, shapes.get(name), len(ranks))
            if axis is None and t.shape == shapes.get(name):
                self._same(name, path)
            self._axis[name] = axis
            whole = t.shape if axis is None else joined_shape(t.shape, axis, len(ranks))
            self.tensors[name] = Held(name=name, dtype=t.dtype, shape=whole,
                                      nbytes=t.nbytes * (1 if axis is None else len(ranks)))

    def _same(self, name: str, path: str) -> None:
        """What is not split is the same in every file."""
        one, *others = (r.get(name) for r in self.ranks)
        if not all(torch.equal(one, other) for other in others):
            raise InputRefused("weights-shape", f"{quote(name)} is whole in every file, but not the same in all",
                               path=path, help="the files are not ranks of one model")

    def axis(self, name: str) -> int | None:
        """The axis along which a tensor is split among the ranks, None where each holds all of it."""
        return self._axis[name]

    def get(self, name: str) -> Tensor:
        axis = self._axis[name]
        parts = [r.get(name) for r in self.ranks]
        return parts[0] if axis is None else torch.cat(parts, axis)

    def part(self, name: str, index: int) -> Tensor:
        return self.get(name)[index]


def split_axis(part: tuple[int, ...], whole: tuple[int, ...] | None, ranks: int) -> int | None:
    """The axis along which `ranks` times `part` make `whole`; None where no axis does, or the part is the whole."""
    if whole is None or len(part) != len(whole):
        return None
    return next((a for a in range(len(part)) if joined_shape(part, a, ranks) == whole), None)


def joined_shape(part: tuple[int, ...], axis: int, ranks: int) -> tuple[int, ...]:
    """`part` repeated `ranks` times along `axis`."""
    return (*part[:axis], part[axis] * ranks, *part[axis + 1 :])
