"""Whether logits are the ones that are looked for: within arithmetic, on a growing part of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llamactl.net.kernels import plain
from llamactl.spec.mistakes import Change
from llamactl.verify.floor import TIMES
from llamactl.verify.network import Network

NOISIER = 8.0  # times the limit: the noisiest network that is looked at, where little was wrong
NOISIEST = 64.0, 1 / 500  # the same where much was: times the limit, and of all that was to be explained


@dataclass(frozen=True, slots=True)
class Target:
    """The logits (T, V) to be explained. limit: the largest |dlogit| that is arithmetic. base: that of the model's own.

    log_probs: they are log-probabilities. A network's own logits may have more columns, which are not looked at.
    """

    logits: Tensor
    limit: float
    log_probs: bool = False
    base: float = 0.0

    def off(self, got: Tensor) -> float:
        """The largest |dlogit| over the first len(got) tokens; infinite where either side is not finite."""
        d = self.differences(got).abs().max()
        return float(d) if bool(torch.isfinite(d)) else float("inf")

    def differences(self, got: Tensor) -> Tensor:
        """got - wanted, over the first len(got) tokens and the columns that both have."""
        want = self.logits[: len(got)].float()
        got = got[:, : want.shape[1]]
        return (got.log_softmax(-1) if self.log_probs else got) - want

    def reached(self, net: Network, changes: Sequence[Change], n: int) -> bool:
        """Whether the edited network gives these logits on the first n tokens.

        An edited network may be noisier than the model: where it just fails, its own floor is measured.
        """
        got = net.logits(changes, n)
        return got is not None and self.held(net, changes, got)

    def held(self, net: Network, changes: Sequence[Change], got: Tensor) -> bool:
        """The same, of its first len(got) logits."""
        off = self.off(got)
        times, part = NOISIEST
        if off <= self.limit or off > max(NOISIER * self.limit, min(times * self.limit, part * self.base)):
            return off <= self.limit
        return off <= self.own_limit(net, changes, got)

    def own_limit(self, net: Network, changes: Sequence[Change], got: Tensor) -> float:
        """What counts as arithmetic in an edited network, whose first len(got) logits are `got`."""
        with plain():
            second = net.logits(changes, len(got))
        return self.limit if second is None else max(self.limit, TIMES * float((got - second).abs().max()))

    def score(self, got: Tensor) -> float:
        """How far two sets of logits are apart for ranking: the mean over tokens of KL(want || got), in nats."""
        want = self.logits[: len(got)].float()
        got = got[:, : want.shape[1]]
        if not bool(torch.isfinite(got).all()) or not bool(torch.isfinite(want).all()):
            return float("inf")
        p, q = want.log_softmax(-1), got.log_softmax(-1)
        return float((p.exp() * (p - q)).sum(-1).clamp_min(0).mean())
