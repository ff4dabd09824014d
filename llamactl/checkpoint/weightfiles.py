"""The weight files of an output: safetensors, PyTorch's zip or GGUF, each written tensor by tensor from a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from llamactl.checkpoint import ggufwrite, stwrite, torchzip
from llamactl.checkpoint.emit import Emitter
from llamactl.checkpoint.plan import Output
from llamactl.checkpoint.torchzip import TorchTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One file. kind: safetensors, torch or gguf. fields: GGUF's metadata.

    under, beside, again: for torch, the key that holds the state dict (None: the file is one), what stands beside it,
    and other names of the same tensors, which share their storage.
    """

    name: str
    kind: str
    outputs: tuple[Output, ...]
    fields: Sequence[ggufwrite.Field] = ()
    under: str | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)
    again: Mapping[str, str] = field(default_factory=dict)

    def nbytes(self) -> int:
        """The size of the file to the byte."""
        if self.kind == "safetensors":
            return stwrite.file_bytes(self.outputs)
        if self.kind == "gguf":
            return ggufwrite.file_bytes(self.fields, self._gguf())
        return torchzip.file_bytes(self._tree(self._torch()), self._archive())

    def write(self, file: BinaryIO, emitter: Emitter) -> None:
        """The whole file; digests go under "FILE/TENSOR". Raises OSError, and what the emitter's sources raise."""
        if self.kind == "safetensors":
            stwrite.write(file, self.outputs, emitter, self.key)
        elif self.kind == "gguf":
            of = {o.name: o for o in self.outputs}
            ggufwrite.write(file, self.fields, self._gguf(), lambda t: emitter.blocks(of[t.name], self.key(of[t.name])),
                            lambda t: emitter.copy(of[t.name], file, self.key(of[t.name])))
        else:
            leaves = self._torch()
            made = {id(leaf): o for leaf, o in zip(leaves, self.outputs, strict=True)}
            torchzip.write(file, self._tree(leaves), lambda t: emitter.blocks(made[id(t)], self.key(made[id(t)])),
                           archive=self._archive())

    def key(self, o: Output) -> str:
        """What an output's digest is found under: a name alone may stand in several files."""
        return f"{self.name}/{o.name}"

    def _gguf(self) -> list[ggufwrite.GgufOut]:
        return [ggufwrite.GgufOut(o.name, o.dtype, o.shape) for o in self.outputs]

    def _torch(self) -> list[TorchTensor]:
        return [TorchTensor(o.name, o.dtype, o.shape) for o in self.outputs]

    def _tree(self, leaves: list[TorchTensor]) -> dict[str, Any]:
        state: dict[str, Any] = {t.name: t for t in leaves}
        state |= {name: state[of] for name, of in self.again.items()}
        return state if self.under is None else {self.under: state, **self.beside}

    def _archive(self) -> str:
        return self.name.rpartition(".")[0]


