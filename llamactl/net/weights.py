"""Any runnable checkpoint as canonical tensors: mapped where the file allows, one copy in memory at most elsewhere.

    layout    files                                                            read by
    hf        *.safetensors, or pytorch_model.bin and its like                 weights_mapped, weights_pickle
    lesson    the same, names as in a model written by hand                    the same
    meta      consolidated.NN.pth                                              weights_meta
    nanogpt   ckpt.pt                                                          weights_pickle
    gguf      *.gguf                                                           weights_gguf
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llamactl.checkpoint.account import Account, account
from llamactl.checkpoint.folder import read_file, read_folder
from llamactl.checkpoint.pickles import pickle_files
from llamactl.errors import InputRefused
from llamactl.net.weights_gguf import GgufReader
from llamactl.net.weights_mapped import DTYPES, Reader, SafetensorsReader
from llamactl.net.weights_meta import meta_reader
from llamactl.net.weights_pickle import PickleReader
from llamactl.spec.model import Model
from llamactl.spec.naming import Rule, Stored, read, read_expert, stored_tensors


class Weights:
    """What a checkpoint gives to a network. Nothing is read before it is asked for, and nothing is kept."""

    def __init__(self, path: str, layout: str, model: Model, reader: Reader, found: Account) -> None:
        self.path = path
        self.layout = layout
        self.warnings = tuple(dict.fromkeys((*reader.warnings, *found.warnings)))
        self._model = model
        self._reader = reader
        self._at = found.at
        self._given: dict[str, Tensor] = {}  # other canonical tensors of the stored one that was read last

    def names(self) -> tuple[str, ...]:
        """Every canonical name there is a tensor for: all of the model's but those of towers beside the decoder."""
        return tuple(self._at)

    def tensor(self, name: str) -> Tensor:
        """The tensor under its canonical name: (out, in), in the dtype it is stored in, float32 if it was quantised.

        A view of the mapped file where the file holds it as it is, transposed or cut; never to be written to.
        """
        if name not in self._given:
            stored, at = self._at[name]
            self._given = self._read(stored, at, name)
        return self._given.pop(name)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that `tensor` answers, without reading it."""
        return DTYPES.get(self._reader.tensors[self._at[name][1]].dtype, torch.float32)

    def _read(self, stored: Stored, at: str, name: str) -> dict[str, Tensor]:
        if not stored.rule.stacked:
            return read(stored, self._reader.get(at), self._model)
        (tensor,) = (t for t in stored.of if t.name == name)
        position = sorted({t.e for t in stored.of}).index(tensor.e)
        return read_expert(stored, tensor.e, self._reader.part(at, position), self._model)


def open_weights(path: str, model: Model, rules: Sequence[Rule], *, layout: str,
                 ignored: Sequence[tuple[str, str]] = ()) -> Weights:
    """Open the weights of `model` at `path` (a folder or a file) and account for every tensor before one is given.

    rules, ignored: names of `layout` and what in it is no weight (arch.names, arch.ignored). Errors: those of the
    readers and of account.account; all of them before any weight is read.
    """
    reader = open_reader(path, model, rules, layout)
    found = account(path, reader.tensors, model, rules, layout=layout, ignored=ignored, packed=layout != "gguf")
    return Weights(path, layout, model, reader, _compared(reader, found, model, rules))


def stored_names(path: str) -> list[str]:
    """The names of all tensors in the files at `path`, safetensors or pickles."""
    return list(_folder_reader(path).tensors)


def open_reader(path: str, model: Model, rules: Sequence[Rule], layout: str) -> Reader:
    """The files at `path`, as they store their tensors; nothing is accounted for yet."""
    if layout == "gguf":
        return GgufReader(path)
    if layout == "meta":
        folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
        return meta_reader(folder, {s.name: s.shape for s in stored_tensors(model, rules)})
    if layout == "nanogpt":
        return PickleReader([path], under="model")
    return _folder_reader(path)


def _folder_reader(path: str) -> Reader:
    """Safetensors where there are any, else pickles."""
    if path.endswith(".safetensors"):
        return SafetensorsReader(read_file(path))
    if not os.path.isdir(path):
        return PickleReader([path])
    try:
        return SafetensorsReader(read_folder(path))
    except InputRefused as e:
        if e.code != "weights-format":
            raise
        files = pickle_files(path)
        if not files:
            raise
    return PickleReader(files, inside=path)


def _compared(reader: Reader, found: Account, model: Model, rules: Sequence[Rule]) -> Account:
    """`found`, with a warning where a head is stored beside the embedding that it should be, and differs."""
    if found.twin is None:
        return found
    stored = reader.tensors[found.twin]
    embed = reader.tensors[found.at["embed.weight"][1]]
    if stored.dtype not in DTYPES or embed.dtype not in DTYPES:
        return found
    if torch.equal(reader.get(found.twin).to(DTYPES[embed.dtype]), reader.get(embed.name)):
        return found
    said = ("weights-head-differs", f"{model.tied_why}, but {found.twin} is stored too and is not the token embedding: "
            "the embedding is used, as the config says")
    return replace(found, warnings=(*found.warnings, said))
