"""How far two networks are apart, told by their logits on the same tokens; and tokens that tell networks apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llamactl.errors import InputRefused
from llamactl.net.generate import positions
from llamactl.spec.model import Model

BLOCK_BYTES = 8 << 20  # of logits in fp64 at once; a comparison holds some six of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """What differs between logits a and b over `tokens` positions; KL(softmax a || softmax b) in nats.

    kl_position_0: at the first position, where nothing is attended to but the token itself; the mean over the batch.
    top1_agreement: the share of positions at which both rank the same token first.
    """

    tokens: int
    max_abs_dlogit: float
    max_kl: float
    mean_kl: float
    kl_position_0: float
    top1_agreement: float


@torch.no_grad()
def compare_logits(a: Tensor, b: Tensor) -> Divergence:
    """The divergence of b from a, both (B, T, V) or (T, V), in fp64.

    ValueError for other or different shapes: which tokens of two vocabularies belong together is not known here.
    InputRefused not-finite where a logit of either is infinite or no number.
    """
    if a.shape != b.shape or a.dim() not in (2, 3) or not a.numel():
        raise ValueError(f"logits are {tuple(a.shape)} and {tuple(b.shape)}, not both (batch, tokens, vocabulary)")
    tokens, first = a.shape[-2], []
    largest, divergences, same = 0.0, [], 0
    for at, (x, y) in _blocks((a, "the first"), (b, "the second")):
        largest = max(largest, float((x - y).abs().max()))
        same += int((x.argmax(-1) == y.argmax(-1)).sum())
        nats = kl(x.log_softmax(-1), y.log_softmax(-1)).tolist()
        divergences += nats
        first += [value for n, value in enumerate(nats, at) if n % tokens == 0]
    count = len(divergences)
    return Divergence(tokens=count, max_abs_dlogit=largest, max_kl=max(divergences),
                      mean_kl=math.fsum(divergences) / count, kl_position_0=math.fsum(first) / len(first),
                      top1_agreement=same / count)


@torch.no_grad()
def loss(logits: Tensor, ids: Tensor) -> float:
    """Mean cross-entropy in nats of each token of `ids` (B, T) after those before it; logits (B, T, V) of the same ids.

    ValueError for other shapes and for fewer than two tokens; InputRefused not-finite.
    """
    if logits.dim() != 3 or logits.shape[:2] != ids.shape or ids.shape[1] < 2 or not logits.numel():
        raise ValueError(f"logits {tuple(logits.shape)} and ids {tuple(ids.shape)}: a loss takes (B, T, V) and (B, T), "
                         "T > 1")
    nats: list[float] = []
    for row, said in zip(logits[:, :-1], ids[:, 1:], strict=True):
        for at, (x,) in _blocks((row, "this network")):
            chance = x.log_softmax(-1).gather(-1, said[at : at + len(x), None].to(x.device))
            nats += (-chance[:, 0]).tolist()
    return math.fsum(nats) / len(nats)


def probe_ids(model: Model, n: int = 64) -> Tensor:
    """(1, n) ids, the same for the same vocabulary: no two alike, neighbours far apart, spread over all of it.

    Fewer than n where the vocabulary, the positions or the context have less room.
    """
    vocab, ends = model.embed.vocab, (positions(model), model.context.trained, model.context.usable)
    count = max(1, min(n, vocab, *(end for end in ends if end is not None)))
    step = stride(vocab)
    return torch.tensor([[(i + 1) * step % vocab for i in range(count)]])


def stride(vocab: int) -> int:
    """A step through 0 .. vocab - 1 that comes to all of them, by the golden ratio: any number of steps lies evenly."""
    step = max(1, round(vocab * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, vocab) != 1:
        step += 1
    return step


def blocks(*tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """(first row, fp64 rows of each) of tensors (rows, V), some rows at a time; whatever they hold."""
    height = max(1, BLOCK_BYTES // (8 * tensors[0].shape[-1]))
    for start in range(0, len(tensors[0]), height):
        yield start, tuple(t[start : start + height].double() for t in tensors)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """(rows,) KL(p || q) in nats of rows of log-probabilities; NaN where one is not finite."""
    out: Tensor = (p.exp() * (p - q)).sum(-1).clamp_min(0)  # below zero by rounding alone
    return out


def _blocks(*named: tuple[Tensor, str]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """(first position, fp64 rows of each) in blocks of positions; refused where one is not finite."""
    for start, rows in blocks(*(t.reshape(-1, t.shape[-1]) for t, _ in named)):
        for wide, (_, whose) in zip(rows, named, strict=True):
            if not bool(torch.isfinite(wide).all()):
                bad = (~torch.isfinite(wide)).any(-1).nonzero()[0, 0]
                raise InputRefused("not-finite", f"the logits of {whose} for token {start + int(bad):,} are not all "
                                   "finite numbers", help="weights or arithmetic overflow: compute in fp32, and look "
                                   "for the weights with llamactl inspect")
        yield start, rows
