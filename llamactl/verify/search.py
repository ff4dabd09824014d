"""Which edits of a network give the logits in front of us, told from those logits alone.

A change is accepted only when what is left is arithmetic, on a part of the text that grows: most wrong ideas die at the
first token or at the eighth. Where no single change does it, the one that explains the first token (which attends to
itself alone) or brings the logits nearest is made, and the search goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from llamactl.net.decoder import Source
from llamactl.spec.mistakes import Change, Hypothesis, hypotheses
from llamactl.spec.model import Model
from llamactl.spec.parts import Attention
from llamactl.verify.fits import fitted, other_head
from llamactl.verify.matching import Target
from llamactl.verify.network import Network
from llamactl.verify.sweep import swept
from llamactl.verify.together import SOME, Alone, Chains, Pairs

_BLIND = ("attn.q.weight", "attn.k.weight")  # of no effect on the first token
NEAREST, FIRST = 24, 8  # changes that are built upon where no two are enough; with single layers
SHALLOW = 8  # layers of a model in each of which what shows in the whole text only is tried for pairs
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

    def solve(self, model: Model, depth: int = 3, layers: bool | None = None, whole: bool = False) -> Chains:
        """Chains of changes after which only arithmetic is left: [(the chain, others equal to its last)]; best first.

        layers: whether single layers are looked at, self.layers by default. whole: the model was changed so that its
        first logits depend on the rest of the text: nothing can be told from the first tokens alone.
        """
        net = Network(model, self.source, self.ids)
        try:
            return self._solved(net, depth, not whole and (self.layers if layers is None else layers), whole)
        finally:
            self.tried += net.runs

    def _solved(self, net: Network, depth: int, layers: bool, whole: bool) -> Chains:
        model, base = net.model, net.logits((), net.tokens)
        if base is None:
            return []
        first = self._first_off(base)
        seen = self.target.off(base[:1]) > self.target.limit  # at the first token
        ideas = hypotheses(model)
        if not whole and not any(isinstance(x.attn, Attention) and x.attn.sinks for x in model.layers):
            ideas = [h for h in ideas if not (seen and h.about.blind)]
        few = min(max(FEW, first + 2), net.tokens)
        parts = () if whole else (1, few, 32, max(64, first + 8))
        stages = sorted({n for n in parts if n < net.tokens} | {net.tokens})
        alone = Alone(net, self.target, 1 if seen else few) if depth > 1 and not whole else None
        self.say("trying changes of the whole model")
        quick = [h for h in ideas if h.about.name not in ("layer_order", "weights")]
        rounded = [h for h in ideas if h.about.name == "weights" and (seen or h.value.endswith(_BLIND))]
        told = self._told(model, first)
        found = self._singles(net, [*told, *quick], stages, seen=seen, alone=alone)
        if not found:  # slow to make, and like nothing else
            found = self._singles(net, rounded, stages, seen=seen)
        if not found and layers and told:
            found = swept(net, self.target, told, stages, seen=seen, late=self.late, few=few)
        if not found:
            self.say("fitting numbers")
            found = [c for c in fitted(net, self.target, seen=seen, stages=stages, late=self.late)]
        if not found and seen:
            self.say("trying other orders of layers")
            found = self._singles(net, [h for h in ideas if h.about.name == "layer_order"], stages, seen=seen)
        if not found and (head := other_head(net, self.target)) is not None:
            self.others, found = {"head.weight": head}, [Change("another=head.weight")]
        pairs = Pairs(self, net, alone, quick) if alone is not None and not found else None
        if pairs is not None and (chains := pairs.tried(depth, SOME)):
            return chains
        if not found and layers:
            self.say("trying each layer")
            for some in (quick, rounded):
                layered = [h for h in some if h.layered]
                found = found or swept(net, self.target, layered, stages, seen=seen, late=self.late, few=few,
                                       alone=alone if some is quick else None)
        if found:
            return [([found[0]], found[1:])]
        if pairs is None or alone is None or self.late():
            return []
        for h in quick if layers and model.n_layers <= SHALLOW else ():
            for i in range(model.n_layers) if h.layered and h.whole else ():
                alone.run(h, i)
        return (pairs.tried(depth) if layers else []) or self._stacked(model, alone, pairs.whole, depth)

    def _stacked(self, model: Model, alone: Alone, whole: Collection[str], depth: int) -> Chains:
        """Two or more changes: what explains the first tokens wholly, else what brings the logits nearest, comes first.
        """
        self.say("trying several changes together")
        ranked = alone.ranked()
        firsts = {(c.text.partition("=")[0], c.layer): c for c in reversed(ranked)}  # the best value of each edit
        nearest = [c for c in ranked if c in firsts.values()][:NEAREST]
        rounds = [(1, False, nearest[:4]), (1, True, nearest[:2]), (1, False, nearest[4:]), (1, True, nearest[2:FIRST])]
        for deeper, layers, some in [*rounds, *((n, True, nearest[:FIRST]) for n in range(2, depth))]:
            for change in some if self.layers or not layers else ():
                made = change.on(model)
                if made is None or self.late():
                    continue
                for chain, same in self.solve(made, deeper, layers, change.text in whole):
                    return [([change, *chain], same)]
        return []

    def _singles(self, net: Network, ideas: Iterable[Hypothesis], stages: Sequence[int], *, seen: bool,
                 alone: Alone | None = None) -> list[Change]:
        """The ideas, made in all layers, that leave nothing but arithmetic at every stage.

        seen: the first token differs. Where it does not, ideas that would change it are dropped after a few layers.
        alone: where what each does is kept.
        """
        out: list[Change] = []
        for h in ideas:
            if self.late():
                break
            if sum(c.text.startswith(f"{h.about.name}=") for c in out) >= ALIKE:
                continue
            if not seen and not h.about.blind and not h.whole and net.stirs([Change(h.text)]):
                continue
            change = Change(h.text)
            for n in stages if not h.whole else stages[-1:]:
                got = net.logits([change], n)
                if got is not None and alone is not None and (n == alone.n or h.whole):
                    alone.add(change, got[: alone.n, alone.columns])
                if got is None or not self.target.held(net, [change], got):
                    break
            else:
                out.append(change)
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

    def late(self) -> bool:
        """Whether no new idea is to be tried."""
        self.stopped = self.stopped or time.monotonic() > self.deadline
        return self.stopped
