"""Making a reference: one pass over a checkpoint in fp32, layer by layer, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llamactl.errors import InputRefused
from llamactl.net.decoder import Source
from llamactl.net.divergence import loss as mean_loss
from llamactl.net.streamed import logits as streamed
from llamactl.spec.model import Model
from llamactl.verify.recorded import About, Layers, Recorded, encode, top_of


def record(model: Model, source: Source, ids: Sequence[int], about: About, *, layers: bool = False,
           top_k: int | None = None, progress: Callable[[int, int], None] | None = None
           ) -> tuple[Recorded, float | None]:
    """What `source` answers to `ids`, all logits or the top_k largest, with the stream after each layer or without;
    and the loss in nats per token, None for one token. progress: as net.streamed.logits tells it.

    Errors: those of net.streamed.logits; InputRefused not-finite, for no port can be held against that.
    """
    row = torch.tensor([list(ids)])
    kept = Layers(len(model.layers), len(ids), model.hidden) if layers else None
    found = streamed(model, source, row, hidden=kept, progress=progress)[0]
    loss = _loss(found, row)
    top = None if top_k is None else top_of(found, top_k)
    hidden, rms, projection = kept.tensors() if kept else (None, None, None)
    return Recorded(about=about, ids=row[0], logits=found if top is None else None, top=top, hidden=hidden, rms=rms,
                    projection=projection), loss


def file_bytes(ids: Sequence[int], about: About) -> int:
    """Bytes of the file of `record` with all logits and no layers, to the byte, without computing them."""
    nowhere = torch.empty(len(ids), about.vocab, device="meta")
    return encode(Recorded(about=about, ids=torch.tensor(list(ids)), logits=nowhere)).nbytes


def _loss(logits: Tensor, ids: Tensor) -> float | None:
    if logits[-1].isfinite().all():
        return mean_loss(logits[None], ids) if len(logits) > 1 else None
    raise InputRefused("not-finite", "the logits are not all finite numbers", help="look for the weights with llamactl "
                       "inspect")
