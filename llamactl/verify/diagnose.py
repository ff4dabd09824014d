"""The name of the mistake: which edits of a right network give the wrong one, proved by making them.

With the other's activations each block is explained on its own (blockwise.py); from logits alone by search.py. Either
way the whole network has the last word: an explanation leaves nothing but arithmetic in the logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product

import torch

from llamactl.analysis.verification import Explanation, Layer, Place
from llamactl.errors import InputRefused
from llamactl.spec.mistakes import Change, hypotheses, in_layer, worded
from llamactl.spec.model import Model
from llamactl.verify.blockwise import Blockwise, Flow, look
from llamactl.verify.hooks import Parts
from llamactl.verify.matching import Target
from llamactl.verify.network import Network
from llamactl.verify.probe import made_ids
from llamactl.verify.search import Search
from llamactl.verify.within import wrong_part

OTHERS = 12  # equivalent edits that are told
COMBINED = 24  # ways to put block-wise explanations together that are tried


class Diagnosis:
    """What explains a difference, and where it lies.

    explanations: empty where none was found; partial: they hold for their blocks, and something else is left."""

    def __init__(self, place: Place | None = None) -> None:
        self.place = place
        self.explanations: tuple[Explanation, ...] = ()
        self.partial = False
        self.layers: tuple[Layer, ...] = ()
        self.tried = 0
        self.limits: list[str] = []


def diagnose(net: Network, target: Target, flow: Flow | None, *, seconds: float, sweep: bool = True,
             say: Callable[[str], None] = lambda text: None, parts: Callable[[int], Parts] | None = None) -> Diagnosis:
    """Explain `target` by edits of `net`'s model. seconds: after which no new idea is tried; sweep: single layers too.

    parts: as in other.Other.
    """
    deadline = time.monotonic() + seconds

    def late() -> bool:
        return time.monotonic() > deadline

    out = Diagnosis()
    if flow is not None:
        say("comparing block by block")
        found = look(net, flow, target.limit, late=late)
        out.place, out.layers, out.tried = placed(found, net, parts), _layers(found), found.tried
        changes, others = _whole(net, target, found, late)
        if changes:
            out.explanations = _told(net, target, changes, others)
            return out
        known = [Change(t, i) for i in found.faulty for t in (found.because.get(i) or [[]])[0]]
        if known and not all(found.because.get(i) for i in found.faulty):
            out.explanations, out.partial = _told(net, target, known, []), True
            return out
    search = Search(source=net.source, ids=net.ids, target=target, deadline=deadline, layers=sweep, say=say)
    chains = search.solve(net.model)
    out.tried += search.tried
    if search.stopped:
        out.limits.append(f"the search for the mistake was stopped after {seconds:.0f} s (--seconds)")
    net.others |= search.others
    if chains:
        chain, same = chains[0]
        out.explanations = _told(net, target, chain, [[c] for c in same])
    if out.place is None:
        out.place = _place_of(net, target, out.explanations)
    return out


def blocks_alone(net: Network, flow: Flow, limit: float, *, seconds: float) -> Diagnosis:
    """What each block says by itself, where there are no logits that a whole network could be held against."""
    deadline = time.monotonic() + seconds
    found = look(net, flow, limit, late=lambda: time.monotonic() > deadline)
    found.head_off = False  # its logits are nothing to go by
    out = Diagnosis(placed(found, net))
    out.layers, out.tried, out.partial = _layers(found), found.tried, True
    grouped: dict[str, list[int | None]] = {}
    for i in found.faulty:
        for text in (found.because.get(i) or [[]])[0]:
            grouped.setdefault(text, []).append(i)
    for text, layers in grouped.items():
        words, cause, fix = worded(text)
        left = max(found.floors[i] for i in layers if i is not None)
        out.explanations += (Explanation(edit=text, scope=_scope(net.model, text, layers), words=words, cause=cause,
                                         fix=fix, residual=left, residual_kl=None, limit=left),)
    return out


def _whole(net: Network, target: Target, found: Blockwise, late: Callable[[], bool]
           ) -> tuple[list[Change], list[list[Change]]]:
    """Block-wise explanations as few changes of the whole network, and other changes that are equal to the last."""
    ends = _ends(found)
    everywhere: list[list[Change]] = []
    if found.order is not None:
        everywhere = [[Change(text)] for text in _orders(net.model, found.order)]
    elif found.faulty and all(found.because.get(i) for i in found.faulty):
        common = [t for t in found.because[found.faulty[0]] if all(t in found.because[i] for i in found.faulty)]
        everywhere = [[Change(x) for x in t] for t in common if len(found.faulty) > 1 or net.model.n_layers == 1]
        everywhere.append([Change(x, i) for i in found.faulty for x in found.because[i][0]])
        if len(found.faulty) == 1:
            (i,) = found.faulty  # what is as true of all layers (an epsilon that shows in the first alone) is said so
            everywhere = [[Change(x) for x in t] for t in found.because[i]] + [
                [Change(x, i) for x in t] for t in found.because[i]]
    elif found.faulty:
        return [], []
    else:
        everywhere = [[]]
    good: list[list[Change]] = []
    tries = [list(dict.fromkeys([*a, *b])) for b, a in product([[], *ends] if ends else [[]], everywhere)]
    for changes in sorted((t for t in tries if t), key=len)[: COMBINED + 4 * net.model.n_layers]:
        if late() or (good and len(changes) > len(good[0])):
            break
        if target.reached(net, changes, net.tokens):
            good.append(changes)
    if not good:
        return [], []
    order = {h.text: n for n, h in enumerate(hypotheses(net.model))}
    good.sort(key=lambda c: (len(c), [(x.text not in found.tensors, order.get(x.text, len(order))) for x in c]))
    return good[0], good[1:]


def _ends(found: Blockwise) -> list[list[Change]]:
    """Changes for the embedding and the head: one for both where one serves, else each."""
    if found.embedding_off and found.head_off:
        both = [t for t in found.embedding_because if t in found.head_because]
        pairs = [[Change(a), Change(b)] for a in found.embedding_because[:3] for b in found.head_because[:3]]
        return [*([Change(t)] for t in both), *pairs]
    if found.embedding_off:
        return [[Change(t)] for t in found.embedding_because]
    return [[Change(t)] for t in found.head_because] if found.head_off else []


def _orders(model: Model, order: tuple[int, ...]) -> list[str]:
    """The edits that put layers in this order."""
    out = []
    for h in hypotheses(model, only=lambda t: t.name == "layer_order"):
        made = Change(h.text).on(model)
        if made is not None and made.taken[-1][0].arg == order:
            out.append(h.text)
    return out


def _told(net: Network, target: Target, changes: Sequence[Change], others: Sequence[Sequence[Change]]
          ) -> tuple[Explanation, ...]:
    """The changes in words, with what is left when all of them are made, and what else would leave no more."""
    got = net.logits(changes, net.tokens)
    assert got is not None
    residual, kl = min(target.off(got), 1e30), target.score(got)
    limit = target.limit if not target.limit < residual < 1e30 else target.own_limit(net, changes, got)
    grouped: dict[str, list[int | None]] = {}
    for c in changes:
        grouped.setdefault(c.text, []).append(c.layer)
    same = [" + ".join(dict.fromkeys(_named(c) for c in o)) for o in others if list(o) != list(changes)][:OTHERS]
    separate = _separate(net, changes, [o for o in others if list(o) != list(changes)][:4])
    out = []
    for n, (text, layers) in enumerate(grouped.items()):
        about = worded(text)
        last = n == len(grouped) - 1
        out.append(Explanation(edit=text, scope=_scope(net.model, text, layers), words=about[0], cause=about[1],
                               fix=about[2], residual=residual, residual_kl=kl if kl < float("inf") else None,
                               limit=limit, equivalent=tuple(same) if last else (),
                               separate=separate if last else None))
    return tuple(out)


def _named(c: Change) -> str:
    return c.text if c.layer is None else f"{c.text} in layer {c.layer}"


def _scope(model: Model, text: str, layers: Sequence[int | None]) -> str:
    everywhere = all(i in layers or in_layer(model, text, i) is None for i in range(model.n_layers))
    if None not in layers and not (everywhere and len(layers) > 1):
        several = len(layers) > 1
        return f"layer{'s' if several else ''} {', '.join(str(i) for i in layers)}"
    made = Change(text).on(model)
    if made is None or text.startswith("layer_order"):
        return "model"
    new = [t for group in made.taken[len(model.taken) :] for t in group]
    in_layers = made.layers != model.layers or any(
        t.at == "*" or not t.at.startswith(("embed", "pos_embed", "head", "norm.")) for t in new)
    return "all layers" if in_layers else "model"


def _separate(net: Network, changes: Sequence[Change], others: Sequence[Sequence[Change]]) -> str | None:
    """What would tell equal explanations apart: another text, if one that was tried does."""
    if not others:
        return None
    n = min(net.tokens, 128)
    other = Network(net.model, net.source, torch.tensor([made_ids(net.model.embed.vocab, n)]))
    one = other.logits(changes, n)
    for o in others:
        two = other.logits(o, n)
        if one is not None and two is not None and not bool((one - two).abs().max() <= 1e-3 * one.abs().max()):
            return f"{n} tokens of arbitrary ids tell some of them apart"
    return "no text that was tried tells them apart: they compute the same"


def placed(found: Blockwise, net: Network, parts: Callable[[int], Parts] | None = None) -> Place | None:
    """The first place that is wrong on its own, and the others; of a module also the part of the block."""
    wrong: list[tuple[str, float, float]] = []
    if found.embedding_off:
        wrong.append(("embedding", found.embedding, 0.0))
    for i in found.faulty:
        error = found.errors[i]
        wrong.append((f"layer {i}", float("inf") if error is None else error, found.floors[i]))
    if found.order is not None:
        at = next((i for i, j in enumerate(found.order) if i != j), len(found.order))
        wrong = [w for w in wrong if not w[0].startswith("layer ")]
        wrong.append((f"layer {at}", 1.0, 0.0))
    if found.head_off:
        wrong.append(("head", found.head, 0.0))
    if not wrong:
        return None
    where, error, floor = wrong[0]
    if parts is not None and where.startswith("layer ") and found.order is None:
        with suppress(InputRefused):  # code that fails when it is run once more
            part = wrong_part(net, found.faulty[0], parts(found.faulty[0]))
            where += f" {part}" if part else ""
    return Place(where=where, relative=min(error, 1e30), floor=floor, others=tuple(w for w, _, _ in wrong[1:]))


def _layers(found: Blockwise) -> tuple[Layer, ...]:
    return tuple(Layer(layer=i, relative=e) for i, e in enumerate(found.errors))


def _place_of(net: Network, target: Target, explanations: Sequence[Explanation]) -> Place | None:
    """What the logits alone say: the layer of the explanation, else which parts can be at fault."""
    base = net.logits((), net.tokens)
    if base is None:
        return None
    far = target.differences(base).norm(dim=-1) / target.logits.float().norm(dim=-1).clamp_min(1e-30)
    error = float(far.max()) if bool(torch.isfinite(far).all()) else 1e30
    for e in explanations:
        if e.scope.startswith("layer "):
            return Place(where=e.scope, relative=error, floor=0.0)
    if explanations:
        return Place(where=explanations[0].scope, relative=error, floor=0.0)
    if target.off(base[:1]) <= target.limit:
        where = "attention: the first token is right, so it acts through q and k, positions or the mask"
    else:
        where = "the first token is wrong already: embedding, norms, V and O, feed-forward, layers or head"
    return Place(where=where, relative=error, floor=0.0)
