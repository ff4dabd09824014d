"""One change in one layer: all ideas for a layer run side by side, and the rest of the network once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from llamactl.spec.mistakes import Change, Hypothesis
from llamactl.verify.matching import Target
from llamactl.verify.network import Network

COLUMNS = 2048  # of the vocabulary that are looked at first
ROWS = 1024  # tokens of all ideas together that go through the rest of the network at once


@torch.no_grad()
def swept(net: Network, target: Target, ideas: Sequence[Hypothesis], stages: Sequence[int], *, seen: bool,
          late: Callable[[], bool], few: int, rank: bool = False) -> list[Any]:
    """Changes in one layer that leave nothing but arithmetic at every stage, by layer.

    seen: the first token differs already, so that one token is enough to drop most ideas. few: tokens that show the
    others. rank: instead [(score, change)] of the best few at one token.
    """
    few = min(few, net.tokens)
    width = target.logits.shape[-1]  # log-probabilities are those of all columns
    columns = torch.arange(0, width, 1 if target.log_probs else max(1, width // COLUMNS))
    out: list[Any] = []
    whole = [h for h in ideas if h.whole]
    ideas = [h for h in ideas if not h.whole]
    for i in range(net.model.n_layers):
        if late():
            return _best(out) if rank else out
        alive = _alive(net, target, ideas, i, 1, columns, rank)
        if rank:
            out += [(score, Change(h.text, i)) for h, score in alive]
            continue
        if not seen and few > 1:
            alive = _alive(net, target, [h for h, _ in alive], i, few, columns, False)
        out += [Change(h.text, i) for h, _ in alive if _holds(net, target, Change(h.text, i), stages)]
    if rank:
        return _best(out)
    for h in whole if not out else ():
        for i in range(net.model.n_layers):
            if late():
                return out
            if _holds(net, target, Change(h.text, i), stages[-1:]):
                out.append(Change(h.text, i))
    return out


def _best(found: list[Any]) -> list[Any]:
    return sorted(found, key=lambda r: r[0])[:8]


def _holds(net: Network, target: Target, change: Change, stages: Sequence[int]) -> bool:
    return all(target.reached(net, [change], n) for n in stages)


def _alive(net: Network, target: Target, ideas: Sequence[Hypothesis], i: int, n: int, columns: Tensor, rank: bool
           ) -> list[tuple[Hypothesis, float]]:
    """The ideas that hold in layer i on the first n tokens and some columns; with rank, all with their distance."""
    x = net.streams(n)[i]
    made: list[tuple[Hypothesis, Tensor]] = []
    for h in ideas:
        y = net.block([Change(h.text, i)], i, x)
        if y is not None:
            made.append((h, y))
    out = []
    want = target.logits[:n, columns].float()
    rest = net.opened((), n)
    assert rest is not None
    at_once = max(1, ROWS // n)
    for start in range(0, len(made), at_once):
        part = made[start : start + at_once]
        y = torch.cat([y for _, y in part])
        for j in range(i + 1, net.model.n_layers):
            y = rest.layer(j, y)
        got = rest.head(y, columns)
        got = got.log_softmax(-1) if target.log_probs else got
        net.runs += len(part)
        off = (got - want).abs().amax((-1, -2))
        far = (got - want).square().mean((-1, -2))
        out += [(h, float(d)) for (h, _), o, d in zip(part, off, far, strict=True) if rank or float(o) <= target.limit]
    return out
