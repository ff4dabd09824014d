"""Where two networks part, and why, told from what flows into and out of every block of the other one.

Each block of ours is fed with what went into the other's, so that every faulty block is reported on its own, whatever
the blocks before it did. Ideas are tried on the one block; the whole network judges in the end (diagnose.py).
shapes: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llamactl.net.kernels import plain
from llamactl.spec.mistakes import Change, Hypothesis, hypotheses
from llamactl.verify.fits import fitted_block
from llamactl.verify.matching import NOISIER
from llamactl.verify.network import Network
from llamactl.verify.reread import reread
from llamactl.verify.together import nearest

TOKENS = 64  # of the text on which ideas are tried at first
PAIRS = 64  # of ideas that are made in a block
TIMES = 16  # the floor of a block, the same block by the second path
LEAST = 2e-6  # relative: the rounding of one fp32 operation, which a floor of nothing does not know


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """What was seen of the other network: embedded (T, D) and each block's input and output, None where not known.

    logits: (T, V).
    """

    embedded: Tensor
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor | None]
    logits: Tensor


class Blockwise:
    """What a comparison block by block found.

    errors[i]: the largest per-token relative error of block i, None where it is not finite; floors likewise.

    embedding, head: their errors (head: the largest |dlogit|). faulty: numbers of blocks. because: for each of them the
    changes that leave nothing, by the block alone; [] where none does. tensors: those that make the other's tensors.
    order: which of our layers each of the other's blocks is, where that is not their order.
    """

    def __init__(self) -> None:
        self.errors: list[float | None] = []
        self.floors: list[float] = []
        self.embedding = self.head = 0.0
        self.embedding_off = self.head_off = False
        self.faulty: list[int] = []
        self.because: dict[int, list[list[str]]] = {}
        self.tensors: set[str] = set()
        self.embedding_because: list[str] = []
        self.head_because: list[str] = []
        self.order: tuple[int, ...] | None = None
        self.tried = 0


@torch.no_grad()
def look(net: Network, flow: Flow, limit: float, *, late: Callable[[], bool], explain: bool = True) -> Blockwise:
    """Compare block by block, and name what explains each faulty one. limit: of |dlogit|, for the head."""
    out = Blockwise()
    ideas = hypotheses(net.model) if explain else []
    _ends(net, flow, limit, ideas, out)
    if len(flow.inputs) != net.model.n_layers:
        _aligned(net, flow, out)
        return out
    for i in range(net.model.n_layers):
        x, y = flow.inputs[i][None], flow.outputs[i]
        error, floor = 0.0 if y is None else _error(net, (), i, x, y[None]), _floor(net, i, x)
        out.errors.append(error if error < float("inf") else None)
        out.floors.append(floor)
        if error > floor:
            out.faulty.append(i)
    if not explain:
        return out
    layered = [h for h in ideas if h.layered]
    for i in out.faulty:
        if late():
            break
        out.because[i] = _because(net, flow, i, out, layered)
    if out.faulty and not all(out.because.get(i) for i in out.faulty):
        _aligned(net, flow, out)
        for i in out.faulty if out.order is None else ():
            if not out.because.get(i) and not late():
                out.because[i] = _because(net, flow, i, out, layered, late)
        for i in out.faulty if out.order is None else ():  # what a later block showed may be true of an earlier one
            out.because[i] = out.because.get(i) or _known(net, flow, i, out, layered)
    out.tried += net.runs
    return out


def relative(got: Tensor, want: Tensor) -> float:
    """The largest, over tokens, of |got - want| / |want|; infinite where it is not finite."""
    far = (got - want).float().norm(dim=-1) / want.float().norm(dim=-1).clamp_min(1e-30)
    return float(far.max()) if bool(torch.isfinite(far).all()) else float("inf")


def _error(net: Network, changes: Sequence[Change], i: int, x: Tensor, want: Tensor) -> float:
    got = net.block(changes, i, x)
    return float("inf") if got is None or got.shape != want.shape else relative(got, want)


def _floor(net: Network, i: int, x: Tensor, changes: Sequence[Change] = ()) -> float:
    """The relative error of block i, edited or not, that counts as arithmetic."""
    with plain():
        other = net.block(changes, i, x)
    own = net.block(changes, i, x)
    assert own is not None
    assert other is not None
    found = relative(other, own)
    return max(TIMES * found, LEAST) if found < float("inf") else LEAST


def _because(net: Network, flow: Flow, i: int, out: Blockwise, ideas: Sequence[Hypothesis],
             late: Callable[[], bool] | None = None) -> list[list[str]]:
    """Sets of edits that make block i the other's: those that explained another block first, then each.

    With late also what takes longer: tensors that the other side is known to have, fitted numbers, two together.
    """
    y = flow.outputs[i]
    assert y is not None
    x, want, floor = flow.inputs[i][None], y[None], out.floors[i]
    few = min(TOKENS, x.shape[1])

    def holds(texts: Sequence[str], whole: bool = False) -> bool:
        return _holds(net, flow, i, floor, texts, whole)

    again = _known(net, flow, i, out, ideas)
    if again:
        return again
    unique = dict.fromkeys(tuple(t) for found in out.because.values() for t in found)
    told = reread(net, i, ideas)
    out.tensors |= set(told)
    if late is None:
        singles = [[h.text] for h in ideas if [h.text] != told and holds([h.text], h.whole)]
        sure = told and not told[-1].startswith("another=")  # tensors of nobody may be those of another layer
        return [told, *singles] if sure and holds(told) else singles
    if told and holds(told):
        return [told]
    more = [[*t, h.text] for t in ([told] if told else unique) for h in ideas
            if h.text not in t and not late() and holds([*t, h.text], h.whole)]
    if more or late():
        return more
    fars: list[Callable[[str], float]] = [lambda t: _error(net, [Change(t, i)], i, x[:, :few], want[:, :few]),
                                          lambda t: _error(net, [Change(t, i)], i, x, want)]
    fits = fitted_block(net.model, fars, floor, lambda t: holds([t]), late)
    if fits:
        return [[t] for t in fits]
    return _pairs(net, i, x, want, ideas, holds, late)


def _pairs(net: Network, i: int, x: Tensor, want: Tensor, ideas: Sequence[Hypothesis],
           holds: Callable[[Sequence[str], bool], bool], late: Callable[[], bool]) -> list[list[str]]:
    """Two edits that make block i the other's, and others that do so with the first of them."""
    own, few = net.block((), i, x), min(TOKENS, x.shape[1])
    assert own is not None
    shown: list[Hypothesis] = []
    rows: list[Tensor] = []
    for h in ideas:
        got = net.block([Change(h.text, i)], i, x if h.whole else x[:, :few])
        if got is not None and bool(torch.isfinite(got).all()):
            shown.append(h)
            rows.append((got[:, :few] - own[:, :few]).flatten())
    for a, b in nearest(rows, (want[:, :few] - own[:, :few]).flatten(), PAIRS) if rows else ():
        one, two = shown[a], shown[b]
        if late():
            break
        if holds([one.text, two.text], one.whole or two.whole):
            return [[one.text, h.text] for h in ideas
                    if h is not one and holds([one.text, h.text], one.whole or h.whole)]
    return []


def _holds(net: Network, flow: Flow, i: int, floor: float, texts: Sequence[str], whole: bool) -> bool:
    """Whether block i with these edits is the other's. whole: they may show late in the text."""
    y = flow.outputs[i]
    assert y is not None
    x, want, changes = flow.inputs[i][None], y[None], [Change(t, i) for t in texts]
    if not whole and _error(net, changes, i, x[:, :TOKENS], want[:, :TOKENS]) > floor:
        return False
    error = _error(net, changes, i, x, want)
    return error <= floor or (error <= NOISIER * floor and error <= _floor(net, i, x, changes))


def _known(net: Network, flow: Flow, i: int, out: Blockwise, ideas: Sequence[Hypothesis]) -> list[list[str]]:
    """The sets of edits that explained other blocks and explain this one."""
    unique = dict.fromkeys(tuple(t) for found in out.because.values() for t in found)
    late = {h.text for h in ideas if h.whole}
    return [list(t) for t in unique if _holds(net, flow, i, out.floors[i], t, any(x in late for x in t))]


def _ends(net: Network, flow: Flow, limit: float, ideas: Sequence[Hypothesis], out: Blockwise) -> None:
    """The embedding and the head, each fed with the other's own input."""
    run = net.opened((), net.tokens)
    assert run is not None
    ours = run.embedded()[0]
    out.embedding = relative(ours, flow.embedded) if ours.shape == flow.embedded.shape else float("inf")
    out.embedding_off = out.embedding > LEAST
    end = flow.outputs[-1]
    last = flow.inputs[-1][None] if end is None else end[None]
    out.head = 0.0 if end is None else _off(run.head(last)[0], flow.logits)
    out.head_off = out.head > limit
    texts = [h.text for h in ideas if h.about.name != "layer_order"]
    texts += [f"another={n}" for n in net.others if not n.startswith("layers.")]
    for text in texts if out.embedding_off or out.head_off else ():
        made = net.opened([Change(text)], net.tokens)
        if made is None or made.model.n_layers != net.model.n_layers:
            continue
        same = made.model.norm == net.model.norm and made.model.head == net.model.head and not made.model.taken
        if out.head_off and not same and _off(made.head(last[:, :8])[0], flow.logits[:8]) <= limit and _off(
                made.head(last)[0], flow.logits) <= limit:
            out.head_because.append(text)
        if out.embedding_off:
            got = made.embedded()[0]
            if got.shape == flow.embedded.shape and relative(got, flow.embedded) <= LEAST:
                out.embedding_because.append(text)


def _off(got: Tensor, want: Tensor) -> float:
    d = (got - want.float()).abs().max() if got.shape == want.shape else torch.tensor(float("inf"))
    return float(d) if bool(torch.isfinite(d)) else float("inf")


def _aligned(net: Network, flow: Flow, out: Blockwise) -> None:
    """Which of our layers each of the other's blocks is; None where one is none of them."""
    order = []
    for i, (x, y) in enumerate(zip(flow.inputs, flow.outputs, strict=True)):
        if y is None:
            return
        few = min(TOKENS, len(x))
        near = sorted(range(net.model.n_layers), key=lambda j, i=i: abs(j - i))  # type: ignore[misc]
        found = next((j for j in near if _error(net, (), j, x[None, :few], y[None, :few]) <= max(
            _floor(net, j, x[None, :few]), LEAST)), None)
        if found is None:
            return
        order.append(found)
    if order != list(range(net.model.n_layers)):
        out.order = tuple(order)
