"""The next token from the last logits: penalty, temperature, top-k, top-p, min-p, in that order; or the largest.

shapes: B sequences, V tokens of the vocabulary
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is drawn; values are checked where they are read.

    temperature: 0 takes the largest logit. top_k: 0 for all. top_p: of the probability, 1 for all. min_p: least
    probability, as a share of the largest one; 0 for all. repetition_penalty: logits of tokens that stand in the
    prompt or the text are divided by it where positive and multiplied where negative (CTRL, arXiv:1909.05858).
    seed: of the draws; equal seeds give equal draws on one kind of device.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class Sampler:
    """Draws token after token for B sequences, and remembers which tokens they hold."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.sampling = sampling
        self.generator = torch.Generator(device).manual_seed(sampling.seed)
        self.seen: Tensor | None = None

    def meet(self, ids: Tensor, vocab: int) -> None:
        """Note that the sequences hold `ids` (B, T); only a repetition penalty asks."""
        if self.sampling.repetition_penalty == 1:
            return
        if self.seen is None:
            self.seen = torch.zeros(ids.shape[0], vocab, dtype=torch.bool, device=ids.device)
        self.seen.scatter_(1, ids, True)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The next token (B,) for logits (B, V), and the largest logit (B,): not finite where the network is broken."""
        scores = penalised(logits, self.seen, self.sampling.repetition_penalty)
        top, largest = scores.max(dim=-1)
        if self.sampling.greedy:
            return largest, top
        values, ids = candidates(scores, self.sampling)
        at = draw(values, self.generator)
        return at if ids is None else ids.gather(1, at[:, None])[:, 0], top

    def logprob(self, logits: Tensor, token: Tensor) -> Tensor:
        """See `logprob`."""
        return logprob(logits, token)


def penalised(logits: Tensor, seen: Tensor | None, penalty: float) -> Tensor:
    """Logits with those of `seen` tokens made less likely (more, for a penalty below 1)."""
    if seen is None or penalty == 1:
        return logits
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def candidates(scores: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """What may be drawn: scores after temperature (B, n), -inf for what top-k, top-p or min-p leaves out, and their
    tokens (B, n), the largest first; None where they are all tokens in their own order.

    Scores are differences from the largest, so that one is 0. Sorting a whole vocabulary costs more than all the rest,
    so no more of it is sorted than the settings ask for.
    """
    scores = heated(scores, scores.amax(dim=-1, keepdim=True), sampling)
    ids: Tensor | None = None
    if 0 < sampling.top_k < scores.shape[-1]:
        scores, ids = largest(scores, sampling.top_k)
    if sampling.top_p < 1:
        scores, ids = _top_p(scores, ids, sampling.top_p)
    return likely(scores, sampling), ids


def heated(scores: Tensor, top: Tensor, sampling: Sampling) -> Tensor:
    """Scores after temperature, as differences from `top`, the largest (B, 1)."""
    # Differences are 0 at most, and no temperature makes 0 / 0 or too large a number of them.
    return (scores - top) / max(sampling.temperature, torch.finfo(torch.float32).tiny)


def likely(scores: Tensor, sampling: Sampling) -> Tensor:
    """Heated scores with -inf for what min-p leaves out."""
    if sampling.min_p == 0:
        return scores
    return scores.masked_fill(scores < math.log(sampling.min_p), -math.inf)  # the largest one is log 1


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest, and with them all that equal the last of them."""
    values, ids = scores.topk(k)
    least = values[:, -1:]
    held = int((scores >= least).sum(dim=-1).max())
    if held > k:
        values, ids = scores.topk(held)
    return values.masked_fill(values < least, -math.inf), ids


def _top_p(scores: Tensor, ids: Tensor | None, share: float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens that reach `share`, and no more of them."""
    whole = scores.logsumexp(dim=-1, keepdim=True)
    if ids is None:
        scores, ids = _enough(scores, whole, share)
    return reaching(scores, whole, share), ids


def reaching(scores: Tensor, whole: Tensor, share: float) -> Tensor:
    """Sorted scores with -inf after those that reach `share` of exp(whole) (B, 1)."""
    chances = (scores - whole).exp()
    return scores.masked_fill(chances.cumsum(dim=-1) - chances >= share, -math.inf)


def _enough(scores: Tensor, whole: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """As many of the largest scores, in order, as reach `share` of the probability."""
    for n in (256, 4096):
        if n < scores.shape[-1]:
            values, ids = scores.topk(n)
            if bool(((values - whole).exp().sum(dim=-1) > share).all()):
                return values, ids
    return scores.sort(dim=-1, descending=True)


def draw(scores: Tensor, generator: torch.Generator) -> Tensor:
    """A column of each row (B, n), with the chances that its scores say: where a uniform number falls among their sums.

    (torch.multinomial takes ten times as long over a large vocabulary on a CPU.)
    """
    sums = scores.exp().to(torch.float32 if scores.device.type == "mps" else torch.float64).cumsum(dim=-1)
    at = torch.rand(len(sums), 1, dtype=sums.dtype, device=sums.device, generator=generator) * sums[:, -1:]
    # No number falls behind all sums but where they are no numbers; a broken network is told of elsewhere.
    return torch.searchsorted(sums, at, right=True)[:, 0].clamp_max(scores.shape[-1] - 1)


def logprob(logits: Tensor, token: Tensor) -> Tensor:
    """The natural logarithm of the network's own probability of `token` (B,), before anything above changed it."""
    return logits.gather(1, token[:, None])[:, 0] - logits.logsumexp(dim=-1)
