"""What was found on disk, as plain data that analysis compares with a description; the command composes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llamactl.analysis.matching import StoredWeight


class StoredTensor(Protocol):
    """One tensor by header, as it is stored."""

    @property
    def dtype(self) -> str: ...
    @property
    def elements(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One weights file: its name in the folder, its size with the header, and how many tensors stand in it."""

    name: str
    file_bytes: int
    tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFacts:
    """What model.safetensors.index.json says beside the headers, both ways.

    not_listed: tensors of the shards that it leaves out; not_stored: tensors that it names and no read file holds (only
    of an index of another build, else that is refused); not_read: shards that it names no tensor of.
    """

    tensors: int
    total_size: int | None
    total_size_agrees: bool | None
    not_listed: tuple[str, ...]
    not_stored: tuple[str, ...]
    not_read: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Everything that the headers of one model say.

    tensors: as stored, by name. weights: what they stand for. bookkeeping: name -> container. unread: name -> why.
    quantization: the method that the config names. copies: files of the same weights that were passed over.
    """

    files: tuple[File, ...]
    tensors: Mapping[str, StoredTensor]
    weights: Sequence[StoredWeight]
    bookkeeping: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    quantization: str | None = None
    index: IndexFacts | None = None
    copies: tuple[str, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
