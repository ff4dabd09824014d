"""One model on one text, and what becomes of its logits when it is edited: whole, or from a layer on.

shapes: B variants run side by side, n first tokens of the text, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llamactl.errors import InputRefused, UsageError
from llamactl.net import kernels
from llamactl.net.decoder import Source
from llamactl.net.streamed import Streamed
from llamactl.net.taken import Taking
from llamactl.spec.mistakes import Change
from llamactl.spec.model import Model

EARLY = 3  # layers
STIRRED = 1e-2  # relative: far more than what a later layer could undo
SHELLS = 64  # sets of empty modules that are kept to be used again
KEPT_BYTES = 3 << 30  # of weights in fp32: a smaller model is widened once, a larger one at each reading


class Kept:
    """A Source whose tensors stay in memory in fp32 once they were read."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._held: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        """As the source gives it, in fp32."""
        if name not in self._held:
            self._held[name] = self.source.tensor(name).float().contiguous()
        return self._held[name]


def kept(source: Source, model: Model) -> Source:
    """`source`, kept in memory where all of it in fp32 takes less than KEPT_BYTES."""
    return Kept(source) if 4 * model.total() < KEPT_BYTES and not isinstance(source, Kept) else source


class Network:
    """`model` with `source`'s weights on `ids` (1, T), and its edited relatives on the first n of them.

    others: tensors of the other side by canonical name, where they are known to differ (the edit "another").
    Results of the model itself are kept for each n: the stream after every layer.
    """

    def __init__(self, model: Model, source: Source, ids: Tensor, others: Mapping[str, Tensor] | None = None) -> None:
        self.others = dict(others or {})
        self.model, self.ids, self.source = model, ids, kept(source, model)
        self._streams: dict[int, list[Tensor]] = {}
        self._shells: dict[Any, Streamed] = {}
        self.runs = 0

    @property
    def tokens(self) -> int:
        return int(self.ids.shape[1])

    def opened(self, changes: Sequence[Change], n: int) -> Streamed | None:
        """The edited model on the first n tokens; None where the edits cannot be made on it."""
        model: Model | None = self.model
        try:
            for c in changes:
                model = c.on(model) if model is not None else None
            if model is None:
                return None
            source = Taking(self.source, model, self.others) if model.taken else self.source
            key = (frozenset(model.layers), model.positions, model.embed, model.embed_norm, model.norm, model.head, n,
                   kernels.plainly())
            shell = self._shells.get(key)
            run = Streamed(model, source, self.ids[:, :n], length=self.tokens, shell=shell)
            if shell is None and len(self._shells) < SHELLS:
                self._shells[key] = run
            return run
        except (UsageError, InputRefused):
            return None

    @torch.no_grad()
    def logits(self, changes: Sequence[Change], n: int, columns: Tensor | None = None) -> Tensor | None:
        """(n, V) logits of the edited model, or of some columns; None where it cannot be run."""
        run = self.opened(changes, n)
        if run is None:
            return None
        self.runs += 1
        first = min((c.layer for c in changes if c.layer is not None), default=0)
        if any(c.layer is None for c in changes):
            first = 0
        try:
            x = run.embedded() if not first else self.streams(n)[first]
            for i in range(first, len(run.model.layers)):
                x = run.layer(i, x)
            return run.head(x, columns)[0]
        except InputRefused:
            return None

    @torch.no_grad()
    def stirs(self, changes: Sequence[Change]) -> bool:
        """Whether the first token's stream is another one after a few layers already: then its logits are others too.

        Never so of a small model, whose logits are as soon had.
        """
        if self.model.n_layers <= 2 * EARLY:
            return False
        run = self.opened(changes, 1)
        if run is None or run.model.n_layers != self.model.n_layers:
            return False
        try:
            x = run.embedded()
            for i in range(EARLY):
                x = run.layer(i, x)
        except InputRefused:
            return False
        own = self.streams(1)[EARLY]
        return not float((x - own).norm()) < STIRRED * float(own.norm())

    @torch.no_grad()
    def streams(self, n: int) -> list[Tensor]:
        """(1, n, hidden) after 0 .. L layers of the model itself."""
        if n not in self._streams:
            run = self.opened((), n)
            if run is None:
                raise ValueError("the model itself cannot be run")
            x = run.embedded()
            out = [x]
            for i in range(self.model.n_layers):
                x = run.layer(i, x)
                out.append(x)
            self._streams[n] = out
        return self._streams[n]

    @torch.no_grad()
    def block(self, change: Sequence[Change], i: int, x: Tensor) -> Tensor | None:
        """(1, n, hidden) -> the same after layer i of the edited model alone; None where it cannot be run."""
        run = self.opened(change, x.shape[1])
        if run is None or run.model.n_layers != self.model.n_layers:
            return None
        try:
            return run.layer(i, x)
        except InputRefused:
            return None
