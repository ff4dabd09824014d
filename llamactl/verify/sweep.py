"""One change in one layer: all ideas for a layer run side by side, and the rest of the network once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llamactl.spec.mistakes import Change, Hypothesis
from llamactl.verify.matching import Target
from llamactl.verify.network import Network
from llamactl.verify.together import Alone, looked_at

ROWS = 1024  # tokens of all ideas together that go through the rest of the network at once


@torch.no_grad()
def swept(net: Network, target: Target, ideas: Sequence[Hypothesis], stages: Sequence[int], *, seen: bool,
          late: Callable[[], bool], few: int, alone: Alone | None = None) -> list[Change]:
    """Changes in one layer that leave nothing but arithmetic at every stage, by layer.

    seen: the first token differs already, so that one token is enough to drop most ideas. few: tokens that show the
    others. alone: where what each change does at its tokens, 1 or `few`, is kept.
    """
    few = min(few, net.tokens)
    columns = looked_at(target)
    out: list[Change] = []
    whole = [h for h in ideas if h.whole]
    ideas = [h for h in ideas if not h.whole]
    for i in range(net.model.n_layers):
        if late():
            return out
        alive = _alive(net, target, ideas, i, 1, columns, alone if seen else None)
        if not seen and few > 1:
            alive = _alive(net, target, alive, i, few, columns, alone)
        out += [Change(h.text, i) for h in alive if _holds(net, target, Change(h.text, i), stages)]
    for h in whole if not out else ():
        for i in range(net.model.n_layers):
            if late():
                return out
            if _holds(net, target, Change(h.text, i), stages[-1:]):
                out.append(Change(h.text, i))
    return out


def _holds(net: Network, target: Target, change: Change, stages: Sequence[int]) -> bool:
    return all(target.reached(net, [change], n) for n in stages)


def _alive(net: Network, target: Target, ideas: Sequence[Hypothesis], i: int, n: int, columns: Tensor,
           alone: Alone | None) -> list[Hypothesis]:
    """The ideas that hold in layer i on the first n tokens and some columns."""
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
        for (h, _), one in zip(part, got if alone is not None else (), strict=alone is not None):
            alone.add(Change(h.text, i), one)  # type: ignore[union-attr]
        got = got.log_softmax(-1) if target.log_probs else got
        net.runs += len(part)
        off = (got - want).abs().amax((-1, -2))
        out += [h for (h, _), o in zip(part, off, strict=True) if float(o) <= target.limit]
    return out
