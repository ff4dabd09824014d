"""Whether logits are the ones that are looked for: within arithmetic, on a growing part of the text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Target:
    """The logits (T, V) to be explained. limit: the largest |dlogit| that is arithmetic."""

    logits: Tensor
    limit: float

    def off(self, got: Tensor, columns: Tensor | None = None) -> float:
        """The largest |dlogit| over the first len(got) tokens; infinite where either side is not finite."""
        want = self.logits[: len(got)]
        d = (got - (want if columns is None else want[:, columns]).float()).abs().max()
        return float(d) if bool(torch.isfinite(d)) else float("inf")

    def score(self, got: Tensor) -> float:
        """How far two sets of logits are apart for ranking: the mean over tokens of KL(want || got), in nats."""
        want = self.logits[: len(got)].float()
        if not bool(torch.isfinite(got).all()) or not bool(torch.isfinite(want).all()):
            return float("inf")
        p, q = want.log_softmax(-1), got.log_softmax(-1)
        return float((p.exp() * (p - q)).sum(-1).clamp_min(0).mean())
