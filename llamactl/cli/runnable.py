"""MODEL arguments -> a described model and its weights, for the commands that run it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Protocol

from llamactl import arch
from llamactl.cli.located import NANOGPT, Located, absent_here, locate, need_torch
from llamactl.cli.options import Access
from llamactl.errors import UsageError
from llamactl.source import Resolved, resolve
from llamactl.spec.model import Model

Notes = tuple[tuple[str, str], ...]


class Tensors(Protocol):
    """Canonical tensors of a checkpoint (net.weights.Weights)."""

    path: str
    layout: str
    warnings: Notes

    def names(self) -> tuple[str, ...]: ...

    def tensor(self, name: str) -> Any: ...

    def dtype(self, name: str) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A model that can be run. warnings: (code, message) of its source, its description and its files."""

    source: Resolved
    model: Model
    weights: Tensors
    warnings: Notes = ()


def open_model(ref: str | None, reach: Access) -> Opened:
    """The model that `ref` names (see located.locate), with its weights accounted for and not yet read.

    Raises LlamactlError; NotAvailable extra-missing without torch.
    """
    found = locate(ref, reach)
    need_torch()
    return opened(found)


def opened(found: Located) -> Opened:
    """The weights of a located model as torch tensors."""
    from llamactl.net.weights import open_weights

    with absent_here(found.source, found.folder):
        weights = open_weights(found.path, found.model, arch.names(found.model, found.layout), layout=found.layout,
                               ignored=arch.ignored(found.model, found.layout))
    return Opened(source=found.source, model=found.model, weights=weights,
                  warnings=tuple(dict.fromkeys((*found.notes, *weights.warnings))))


def model_here(example: str) -> None:
    """Raise UsageError with a command's own example where the current folder holds no model."""
    try:
        if not os.path.isfile(NANOGPT):
            resolve(None)
    except UsageError as e:
        e.help = f"try: {example}"
        raise
