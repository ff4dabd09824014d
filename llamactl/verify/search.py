"""Which edits of a network give the logits in front of us, told from those logits alone.

A change is accepted only when what is left is arithmetic, on a part of the text that grows: most wrong ideas die at the
first token or at the eighth. Where no single change does it, the one that explains the first token (which attends to
itself alone) or brings the logits nearest is made, and the search goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch

from llamactl.net.decoder import Source
from llamactl.spec.mistakes import Change, Hypothesis, hypotheses
from llamactl.spec.model import Model
from llamactl.spec.parts import Attention
from llamactl.verify.fits import fitted, other_head
from llamactl.verify.matching import Target
from llamactl.verify.network import Network
from llamactl.verify.sweep import swept

_BLIND = ("attn.q.weight", "attn.k.weight")  # of no effect on the first token
NEAREST, FIRST = 24, 8  # changes that are built upon where none is enough alone; with single layers
ALIKE = 3  # values of one edit that may all fit (an epsilon below what shows); more are not tried
FEW = 8  # tokens at which almost every wrong idea shows
Progress = Callable[[str], None]


class Search:
    """Looks for the changes of a model that explain a target.

    deadline: time.monotonic() past which no new idea is tried. stopped: that it was reached.

    layers: whether to look for a change in one layer. tried: ideas that were run. others: tensors that were found.
    """

    def __init__(self, *, source: Source, ids: torch.Tensor, target: Target, deadline: float, layers: bool = True,
                 say: Progress = lambda text: None) -> None:
        self.source, self.ids, self.target, self.deadline = source, ids, target, deadline
        self.layers, self.say = layers, say
        self.stopped, self.tried = False, 0
        self.others: dict[str, torch.Tensor] = {}

    def solve(self, model: Model, depth: int = 3, layers: bool | None = None
              ) -> list[tuple[list[Change], list[Change]]]:
        """Chains of changes after which only arithmetic is left: [(the chain, others equal to its last)]; best first.

        layers: whether single layers are looked at, self.layers by default.
        """
        layers = self.layers if layers is None else layers
        net = Network(model, self.source, self.ids)
        base = net.logits((), net.tokens)
        if base is None:
            return []
        first = self._first_off(base)
        seen = self.target.off(base[:1]) > self.target.limit  # at the first token
        ideas = hypotheses(model)
        if not any(isinstance(x.attn, Attention) and x.attn.sinks for x in model.layers):
            ideas = [h for h in ideas if not (seen and h.about.blind)]
        stages = sorted({n for n in (1, FEW, 32, max(64, first + 8)) if n < net.tokens} | {net.tokens})
        self.say("trying changes of the whole model")
        quick = [h for h in ideas if h.about.name not in ("layer_order", "weights")]
        rounded = [h for h in ideas if h.about.name == "weights" and (seen or h.value.endswith(_BLIND))]
        found = self._singles(net, [*self._told(model, first), *quick], stages, seen=seen)
        if not found:  # slow to make, and like nothing else
            found = self._singles(net, rounded, stages, seen=seen)
        if not found:
            self.say("fitting numbers")
            found = [c for c in fitted(net, self.target, seen=seen, stages=stages, late=self._late)]
        if not found and seen:
            self.say("trying other orders of layers")
            found = self._singles(net, [h for h in ideas if h.about.name == "layer_order"], stages, seen=seen)
        if not found and (head := other_head(net, self.target)) is not None:
            self.others, found = {"head.weight": head}, [Change("another=head.weight")]
        if not found and layers:
            self.say("trying each layer")
            for some in (quick, rounded):
                found = found or swept(net, self.target, [h for h in some if h.layered], stages, seen=seen,
                                       late=self._late, few=max(FEW, first + 2))
        self.tried += net.runs
        if found:
            return [([found[0]], found[1:])]
        if depth <= 1 or self._late():
            return []
        return self._stacked(net, model, quick, seen, depth)

    def _stacked(self, net: Network, model: Model, ideas: Sequence[Hypothesis], seen: bool, depth: int
                 ) -> list[tuple[list[Change], list[Change]]]:
        """Two or more changes: what explains the first token wholly, else what brings the logits nearest, comes first.
        """
        self.say("trying several changes together")
        n = 1 if seen else min(16, net.tokens)
        base = net.logits((), n)
        assert base is not None
        before = self.target.score(base)
        ranked: list[tuple[float, Change]] = []
        for h in ideas:
            if self._late():
                return []
            got = None if h.whole else net.logits([Change(h.text)], n)
            if got is not None:
                near = self.target.off(got) <= self.target.limit
                ranked.append((-1.0 if near else self.target.score(got), Change(h.text)))
        if self.layers and seen:
            ranked += swept(net, self.target, [h for h in ideas if h.layered], [1], seen=True, late=self._late, few=1,
                            rank=True)
        ranked = sorted((r for r in ranked if r[0] < 0.8 * before), key=lambda r: r[0])
        firsts = {(c.text.partition("=")[0], c.layer): c for _, c in reversed(ranked)}  # the best value of each edit
        nearest = [c for _, c in ranked if c in firsts.values()][:NEAREST]
        rounds = [(1, False), *((n, True) for n in range(1, depth) if self.layers)]  # what is quick for all, first
        for deeper, layers in rounds:
            for change in nearest if not layers else nearest[:FIRST]:
                made = change.on(model)
                if made is None or self._late():
                    continue
                for chain, same in self.solve(made, deeper, layers):
                    return [([change, *chain], same)]
        return []

    def _singles(self, net: Network, ideas: Iterable[Hypothesis], stages: Sequence[int], *, seen: bool) -> list[Change]:
        """The ideas, made in all layers, that leave nothing but arithmetic at every stage.

        seen: the first token differs. Where it does not, ideas that would change it are dropped after a few layers.
        """
        out: list[Change] = []
        for h in ideas:
            if self._late():
                break
            if sum(c.text.startswith(f"{h.about.name}=") for c in out) >= ALIKE:
                continue
            if not seen and not h.about.blind and not h.whole and net.stirs([Change(h.text)]):
                continue
            for n in stages if not h.whole else stages[-1:]:
                if not self.target.reached(net, [Change(h.text)], n):
                    break
            else:
                out.append(Change(h.text))
        return out

    def _told(self, model: Model, first: int) -> list[Hypothesis]:
        """A window whose width is the first token that differs: it is the first that no longer sees token 0."""
        if first < 2:
            return []
        about = next(h.about for h in hypotheses(model, only=lambda t: t.name == "window"))
        return [Hypothesis(text=f"window={n}", about=about, layered=True) for n in (first, first + 1)]

    def _first_off(self, base: torch.Tensor) -> int:
        """The first token at which the logits are not those of the model."""
        d = self.target.differences(base).abs().amax(-1)
        over = (~(d <= self.target.limit)).nonzero()
        return int(over[0]) if len(over) else 0

    def _late(self) -> bool:
        self.stopped = self.stopped or time.monotonic() > self.deadline
        return self.stopped
