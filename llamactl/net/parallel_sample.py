"""The next token where each rank holds the logits of a part of the vocabulary; they are never all brought together.

The steps are those of net.sample, with the same random numbers, so that a seed is the same text on any number of ranks:

    greedy          each rank's largest logit
    top-k, top-p    each rank's likeliest tokens, as many as can matter, merged in order
    all tokens      each rank's sum of chances; the one in whose part the number falls looks further

shapes: B sequences, V tokens here, n candidates
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llamactl.net.group import Group
from llamactl.net.sample import Sampler, Sampling, draw, heated, largest, likely, penalised, reaching

_SOME = (256, 4096)  # candidates of each rank for top-p, before all of them


class SplitSampler(Sampler):
    """Draws for all ranks from the logits of tokens first..stop of `whole`, which are here; all get the same answer."""

    def __init__(self, sampling: Sampling, group: Group, first: int, stop: int, whole: int) -> None:
        super().__init__(sampling, group.device)
        self.group, self.first, self.size, self.whole = group, first, stop - first, whole
        self._met: Tensor | None = None

    def meet(self, ids: Tensor, vocab: int) -> None:
        """Note which tokens of this part the sequences hold."""
        if self.sampling.repetition_penalty == 1:
            return
        if self._met is None:  # one column more, for tokens of other parts
            self._met = torch.zeros(ids.shape[0], self.size + 1, dtype=torch.bool, device=ids.device)
            self.seen = self._met[:, :-1]
        self._met.scatter_(1, self._local(ids), True)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The next token (B,) for the logits (B, V) of each rank, and the largest logit of all (B,)."""
        scores = penalised(logits, self.seen, self.sampling.repetition_penalty)
        value, at = scores.max(dim=-1)
        found = self.group.gather(torch.stack((value.double(), (at + self.first).double())))
        best, owner = found[:, 0].max(dim=0)  # of equals the first, as in one process
        top = best.to(logits.dtype)
        if self.sampling.greedy:
            return found[:, 1].gather(0, owner[None])[0].long(), top
        scores = heated(scores, top[:, None], self.sampling)
        if 0 < self.sampling.top_k < self.whole:
            scores, ids = self._top_k(scores, self.sampling.top_k)
            if self.sampling.top_p < 1:
                scores = reaching(scores, scores.logsumexp(dim=-1, keepdim=True), self.sampling.top_p)
        elif self.sampling.top_p < 1:
            scores, ids = self._top_p(scores, self.sampling.top_p)
        else:
            return self._of_all(likely(scores, self.sampling)), top
        column = draw(likely(scores, self.sampling), self.generator)
        return ids.gather(1, column[:, None])[:, 0], top

    def logprob(self, logits: Tensor, token: Tensor) -> Tensor:
        """See sample.logprob."""
        at = self._local(token[:, None])
        padded = torch.nn.functional.pad(logits, (0, 1), value=-math.inf)
        found = self.group.gather(torch.stack((padded.gather(1, at)[:, 0], logits.logsumexp(dim=-1))))
        return found[:, 0].amax(dim=0) - found[:, 1].logsumexp(dim=0)

    def _local(self, ids: Tensor) -> Tensor:
        """Columns of ids here; the one after the last for those elsewhere."""
        at = ids - self.first
        return at.masked_fill((at < 0) | (at >= self.size), self.size)

    def _top_k(self, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """sample.largest over all ranks."""
        values, ids = self._merged(*largest(scores, min(k, self.size)))
        if k < values.shape[-1]:
            values = values.masked_fill(values < values[:, k - 1 : k], -math.inf)
        return values, ids

    def _top_p(self, scores: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of all ranks that reach `share` of the probability."""
        whole = self.group.gather(scores.logsumexp(dim=-1, keepdim=True)).logsumexp(dim=0)
        for n in (*_SOME, None):
            cut = n is not None and n < self.size
            values, ids = scores.topk(n) if cut and n is not None else scores.sort(dim=-1, descending=True)
            # Below the last candidate of a rank it may have more that are not told.
            least = values[:, -1] if cut else torch.full_like(values[:, -1], -math.inf)
            untold = self.group.gather(least).amax(dim=0)[:, None]
            values, ids = self._merged(values, ids)
            told = (values - whole).exp().masked_fill(values < untold, 0).sum(dim=-1)
            if n is None or bool((told > share).all()) or not bool((untold > -math.inf).any()):
                break
        return reaching(values, whole, share), ids

    def _merged(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates of all ranks (B, n), the largest first, equal ones in the vocabulary's order; tokens, not columns.

        Ranks may have different numbers of them; what fills up is -inf.
        """
        width = max(n for n, *_ in self.group.numbers(values.shape[-1]))
        both = torch.stack((values.double(), (ids + self.first).double()))
        both = torch.nn.functional.pad(both, (0, width - values.shape[-1]), value=-math.inf)
        found = self.group.gather(both).permute(1, 2, 0, 3).flatten(2)
        tokens, order = found[1].sort(dim=-1)
        values, by_value = found[0].gather(-1, order).sort(dim=-1, descending=True, stable=True)
        return values.to(torch.float32), tokens.gather(-1, by_value).clamp_min(0).long()

    def _of_all(self, scores: Tensor) -> Tensor:
        """sample.draw over the vocabulary in its order, part after part."""
        sums = scores.exp().double().cumsum(dim=-1)
        ends = self.group.gather(sums[:, -1:]).cumsum(dim=0)
        at = torch.rand(len(sums), 1, dtype=sums.dtype, device=sums.device, generator=self.generator) * ends[-1]
        owner = (ends <= at).sum(dim=0).clamp_max(self.group.world - 1)
        begin = ends[self.group.rank] - sums[:, -1:]
        column = torch.searchsorted(sums, at - begin, right=True).clamp_max(self.size - 1)
        mine = owner == self.group.rank
        return self.group.sum((column + self.first).masked_fill(~mine, 0))[:, 0]
