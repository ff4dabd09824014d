"""Two networks on the same tokens: whether what was written computes what the source does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from llamactl.errors import InputRefused
from llamactl.net.decoder import Source
from llamactl.net.divergence import Divergence, compare_logits, loss, probe_ids
from llamactl.net.streamed import logits
from llamactl.spec.model import Model


class Compared(NamedTuple):
    """How far the logits are apart, the largest of the first's, and both losses on a text (nats a token)."""

    divergence: Divergence
    largest: float
    losses: tuple[float, float] | None


@torch.no_grad()
def compare(first: tuple[Model, Source], second: tuple[Model, Source], tokens: int, text: Sequence[int] | None = None
            ) -> Compared:
    """Both on `tokens` probe tokens, in fp32, a layer at a time; over the vocabulary that both have.

    Errors (InputRefused): not-runnable, tensor-shape; not-finite for the second alone, source-not-finite.
    """
    rows = min(first[0].embed.vocab, second[0].embed.vocab)
    ids = probe_ids(first[0], tokens)
    a, b = (logits(model, source, ids)[..., :rows] for model, source in (first, second))
    if not bool(torch.isfinite(a).all()):
        raise InputRefused("source-not-finite", "the logits of the source are not all finite numbers")
    found, largest = compare_logits(a, b), float(a.abs().max())
    del a, b
    if text is None:
        return Compared(found, largest, None)
    long = torch.tensor([list(text)])
    one, other = (loss(logits(model, source, long)[..., :rows], long) for model, source in (first, second))
    return Compared(found, largest, (one, other))
