"""Two mistakes at once, guessed from what each does alone.

What two changes do to the logits of the first tokens is near the sum of what each does, with factors: of 1e5 to 1e7
pairs the right one mostly stands among the first hundreds, though neither may bring the logits nearer alone. Only a
guess: each pair is then made, and held against the logits like any other idea.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from llamactl.spec.mistakes import Change, Hypothesis
from llamactl.spec.model import Model
from llamactl.verify.matching import Target
from llamactl.verify.network import Network

COLUMNS = 2048  # of the vocabulary
TRIED, SOME = 2000, 64  # pairs that are made; before single layers are looked at
SHARE = 0.25  # of the time that is left, for making them
FIRST = 8  # pairs that explain the first tokens, on which a third change is built
NEARER = 0.9  # of the square of the distance: a change that leaves more brings the logits no nearer
CHUNK = 256  # changes that are paired with all others at once
LEAST, MOST = 0.05, 20.0  # factors: a change that would have to be turned round or made huge is not there


def looked_at(target: Target) -> Tensor:
    """The columns of the vocabulary that are looked at first: all for log-probabilities, which are those of all."""
    width = target.logits.shape[-1]
    return torch.arange(0, width, 1 if target.log_probs else max(1, width // COLUMNS))


def nearest(rows: Sequence[Tensor], wanted: Tensor, most: int) -> list[tuple[int, int]]:
    """The pairs of rows (N of D numbers) whose sum, each with its best factor, is nearest to `wanted` (D,)."""
    made = torch.stack(tuple(rows))
    square, along = made.square().sum(-1), made @ wanted
    best: list[tuple[float, int, int]] = []
    for start in range(0, len(made), CHUNK):
        some = slice(start, start + CHUNK)
        cross, mine, own = made[some] @ made.T, along[some, None], square[some, None]
        det = own * square - cross.square()
        a, b = (mine * square - along * cross) / det, (along * own - mine * cross) / det
        won = a * mine + b * along  # by how much the pair brings the square of the distance down
        fair = (det > 1e-6 * own * square) & (a > LEAST) & (a < MOST) & (b > LEAST) & (b < MOST)
        fair &= torch.arange(start, start + len(cross))[:, None] < torch.arange(len(made))
        top = won.masked_fill(~fair, float("-inf")).flatten().topk(min(most, won.numel()))
        best += [(float(v), start + int(at) // len(made), int(at) % len(made))
                 for v, at in zip(top.values, top.indices, strict=True) if float(v) > float("-inf")]
    best.sort(reverse=True)
    return [(i, j) for _, i, j in best[:most]]


class Alone:
    """What changes do to the logits of the first n tokens, each by itself: rows of differences from the model's own.

    Those that do nothing there are left out. shown: the changes; rows: each (n x columns).
    """

    def __init__(self, net: Network, target: Target, n: int) -> None:
        self.net, self.target, self.n = net, target, n
        self.columns = looked_at(target)
        self.stride = max(1, len(self.columns) // COLUMNS)
        own = net.logits((), n, self.columns)
        assert own is not None
        self.own = self._row(own)
        self.wanted = target.logits[:n, self.columns[:: self.stride]].float().flatten() - self.own
        self.shown: list[Change] = []
        self.rows: list[Tensor] = []

    def add(self, change: Change, logits: Tensor) -> None:
        """A change of which the logits (n, columns) were computed."""
        row = self._row(logits) - self.own
        if bool(torch.isfinite(row).all()) and float(row.abs().max()) > self.target.limit:
            self.shown.append(change)
            self.rows.append(row)

    def run(self, h: Hypothesis, layer: int | None = None) -> Tensor | None:
        """The logits (n, V) of the first tokens with an idea made; kept here."""
        change = Change(h.text, layer)
        got = self.net.logits([change], self.net.tokens if h.whole else self.n)
        if got is not None:
            got = got[: self.n]
            self.add(change, got[:, self.columns])
        return got

    def ranked(self) -> list[Change]:
        """Those that bring the logits nearer, nearest first; those that explain these tokens wholly before all."""
        before = float(self.wanted.square().sum())
        scored = [(0.0 if self._explains(row) else float((row - self.wanted).square().sum()), n)
                  for n, row in enumerate(self.rows)]
        return [self.shown[n] for score, n in sorted(scored) if score < NEARER * before]

    def enough(self) -> bool:
        """Whether one change explains these tokens wholly."""
        return any(self._explains(row) for row in self.rows)

    def _explains(self, row: Tensor) -> bool:
        return float((row - self.wanted).abs().max()) <= self.target.limit

    def pairs(self, most: int) -> list[tuple[Change, Change]]:
        """The pairs whose sum is nearest to what is wanted; nearest first."""
        found = nearest(self.rows, self.wanted, most) if self.rows else []
        return [(self.shown[i], self.shown[j]) for i, j in found]

    def _row(self, logits: Tensor) -> Tensor:
        made = logits.float().log_softmax(-1) if self.target.log_probs else logits.float()
        return made[:, :: self.stride].flatten()


Chains = list[tuple[list[Change], list[Change]]]


class Search(Protocol):
    """What pairs need of search.Search."""

    deadline: float

    def late(self) -> bool: ...

    def say(self, text: str) -> None: ...

    def solve(self, model: Model, depth: int = 3, layers: bool | None = None, whole: bool = False) -> Chains: ...


class Pairs:
    """The pairs of what `alone` holds, as it grows; none is made twice. whole: edits that take the whole text."""

    def __init__(self, search: Search, net: Network, alone: Alone, ideas: Sequence[Hypothesis]) -> None:
        self.search, self.net, self.alone = search, net, alone
        self.order = {h.text: n for n, h in enumerate(ideas)}
        self.whole = {h.text for h in ideas if h.whole}
        self.made: set[tuple[Change, Change]] = set()

    def tried(self, depth: int, most: int = TRIED) -> Chains:
        """Two changes after which only arithmetic is left, out of the `most` likeliest.

        With depth > 2 also three, where two explain the first tokens. Nothing where one change explains them wholly: it
        is better built upon.
        """
        if self.alone.enough():
            return []
        self.search.say("trying pairs of changes")
        found, part = self._both(most)
        if found:
            return [(found[0], [pair[1] for pair in found[1:]])]
        for one, two in part[:FIRST] if depth > 2 else ():
            made = one.on(self.net.model)
            made = two.on(made) if made is not None else None
            for chain, same in self.search.solve(made, 1, False) if made is not None else ():
                return [([one, two, *chain], same)]
        return []

    def _both(self, most: int) -> tuple[list[list[Change]], list[list[Change]]]:
        """(pairs that leave nothing but arithmetic, those that do so on the first tokens alone).

        Of the pairs that are enough, all begin with one change.
        """
        found: list[list[Change]] = []
        part: list[list[Change]] = []
        net, target, n = self.net, self.alone.target, self.alone.n
        now = time.monotonic()
        until = now + SHARE * (self.search.deadline - now)
        for pair in self.alone.pairs(most):
            if self.search.late() or time.monotonic() > until:
                break
            if pair in self.made or (found and not set(pair) & set(found[0])):
                continue
            self.made.add(pair)
            changes = list(pair)
            if any(c.text in self.whole for c in pair):
                if target.reached(net, changes, net.tokens):
                    found.append(changes)
            elif target.reached(net, changes, n):
                enough = all(target.reached(net, changes, m) for m in (32, net.tokens) if n < m <= net.tokens)
                (found if enough else part).append(changes)
        shared = [[c for c in pair if c in found[0]] for pair in found[1:]]
        first = shared[0][0] if shared else found[0][0] if found else None
        alike = [[first, *(c for c in pair if c != first)] for pair in found if first in pair]
        return sorted(alike, key=lambda p: (self.order.get(p[1].text, len(self.order)), p[1].layer or 0)), part
