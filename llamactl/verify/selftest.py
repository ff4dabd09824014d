"""`verify` tried on mistakes that are known: which it sees, which it can name, and whether it does.

A mistake has a name of its own where no other known mistake gives the same logits, for the search accepts whatever
leaves nothing but arithmetic. Some are given to the search itself, as logits alone.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from llamactl.analysis.selftest import BlindSpot, Missed, Planted, SelftestReport, totals
from llamactl.errors import InputRefused
from llamactl.net.decoder import Source
from llamactl.spec.mistakes import Hypothesis
from llamactl.spec.model import Model
from llamactl.spec.parts import Attention
from llamactl.verify.floor import floor
from llamactl.verify.matching import Target
from llamactl.verify.network import Network
from llamactl.verify.planted import Plant, Say, planted, seeds, shows
from llamactl.verify.probe import short
from llamactl.verify.search import Search

HELD_BYTES = 512 << 20  # of logits that are kept while mistakes are compared
SEED = 20_170_612


@torch.no_grad()
def selftest(model: Model, source: Source, ids: Sequence[int], *, id: str, text: str, seconds: float,
             ideas: Sequence[Hypothesis] | None = None, say: Say = lambda text: None) -> SelftestReport:
    """Plant `ideas`, or all mistakes that fit `model`, on `ids`, two or more; then search for some, up to `seconds`.

    text: the ids, in words. Errors: those of streamed.logits; InputRefused not-finite where the model itself is.
    """
    net = Network(model, source, torch.tensor([list(ids)]))
    base = net.logits((), net.tokens)
    if base is None or not bool(base.isfinite().all()):
        raise InputRefused("not-finite", "the model's own logits are not all finite: nothing can be held against them",
                           help="look for the weights with llamactl inspect")
    say("measuring the floor of arithmetic")
    bar, _ = floor(model, net.source, net.ids, base)
    some, orders = seeds(model, ideas)
    plants = planted(net, base, bar.limit, some, say)
    same = alike(net, plants, bar.limit, say)
    rows = [_row(model, p, bar.limit, [plants[j].seed.name for j in same.get(n, ())]) for n, p in enumerate(plants)]
    checked, missed = _checked(net, plants, rows, same, bar.limit, seconds, say)
    blind = [BlindSpot(edit=r.edit, scope=r.scope, words=r.words, shows=shows(model, p, net.tokens, bar))
             for p, r in zip(plants, rows, strict=True) if r.named == "no-op"]
    return SelftestReport(
        id=id, family=model.family, text=text, tokens=net.tokens, floor=bar, totals=totals(rows), planted=tuple(rows),
        blind_spots=tuple(blind), check_seconds=seconds, checked=checked, checked_named=checked - len(missed),
        missed=tuple(missed), limits=tuple(_limits(model, plants, net.tokens, orders)))


def _row(model: Model, p: Plant, limit: float, same: Sequence[str]) -> Planted:
    """What became of one mistake."""
    if p.far is None:
        return Planted(edit=p.seed.change.text, scope=p.seed.scope, words=p.seed.idea.words, named="cannot-run")
    finite = math.isfinite(p.far)
    if p.far <= limit:
        named = "no-op"
    elif not finite:
        named = "not-finite"
    elif p.tokens == 1 and p.seed.idea.about.blind and not _sinks(model):
        named = "no"  # taken for one that the first token cannot show
    else:
        named = "equivalent" if same else "yes"
    return Planted(edit=p.seed.change.text, scope=p.seed.scope, words=p.seed.idea.words, named=named,
                   seen=p.far > limit, max_abs_dlogit=p.far if finite else None, max_kl=p.max_kl, tokens=p.tokens,
                   equivalent=tuple(same))


def alike(net: Network, plants: Sequence[Plant], limit: float, say: Say) -> dict[int, list[int]]:
    """{plant: others whose logits are the same within the limit}, of those that are seen.

    One in a layer has equals in layers and in the whole model; one in the whole model has the latter alone, for single
    layers are only searched where no change of the whole model fits.
    """
    keep = max(2, HELD_BYTES // (4 * net.tokens * net.model.head.vocab))

    @lru_cache(maxsize=keep)
    def logits(n: int) -> Tensor | None:
        return net.logits([plants[n].seed.change], net.tokens)

    out: dict[int, list[int]] = {}
    for a, b in _near(plants, limit):
        say(f"comparing {plants[a].seed.name} with {plants[b].seed.name}")
        one, two = logits(a), logits(b)
        if one is None or two is None or Target(one, limit).off(two) > limit:
            continue
        for x, y in ((a, b), (b, a)):
            if plants[x].seed.change.layer is not None or plants[y].seed.change.layer is None:
                out.setdefault(x, []).append(y)
    return {n: sorted(found) for n, found in out.items()}


def _near(plants: Sequence[Plant], limit: float) -> Iterator[tuple[int, int]]:
    """Pairs of plants that may have the same logits: no mark of theirs is further apart than the limit."""
    order = sorted((p.far, n, p.mark) for n, p in enumerate(plants)
                   if p.far is not None and p.mark is not None and limit < p.far < math.inf)
    for at, (far, a, mark) in enumerate(order):
        for other, b, its in order[at + 1 :]:
            if other - far > limit:
                break
            if float((mark - its).abs().max()) <= limit:
                yield a, b


def _checked(net: Network, plants: Sequence[Plant], rows: Sequence[Planted], same: dict[int, list[int]], limit: float,
             seconds: float, say: Say) -> tuple[int, list[Missed]]:
    """How many mistakes were given to the search, and those that it did not name. One it had no time for is not one."""
    deadline, checked, missed = time.monotonic() + seconds, 0, []
    for n in _drawn(rows):
        p = plants[n]
        got = net.logits([p.seed.change], net.tokens) if time.monotonic() < deadline else None
        if got is None:
            break
        search = Search(source=net.source, ids=net.ids, target=Target(got, limit), deadline=deadline,
                        layers=p.seed.change.layer is not None, say=_of(p.seed.name, say))
        found = [c for chain, others in search.solve(net.model, depth=1) for c in (*chain, *others)]
        if search.stopped:
            break
        checked += 1
        right = {p.seed.change, *(plants[j].seed.change for j in same.get(n, ()))}
        if not right & set(found):
            said = found[0] if found else None
            where = "" if said is None or said.layer is None else f" in layer {said.layer}"
            missed.append(Missed(edit=p.seed.change.text, scope=p.seed.scope, said=said and f"{said.text}{where}"))
    return checked, missed


def _of(name: str, say: Say) -> Say:
    return lambda what: say(f"looking for {name}: {what}")


def _drawn(rows: Sequence[Planted]) -> Iterator[int]:
    """Those that have a name in an order drawn once and for all, three of the whole model for one of a layer."""
    draw = random.Random(SEED)
    known = [n for n, r in enumerate(rows) if r.named in ("yes", "equivalent")]
    single = [n for n in known if rows[n].scope.startswith("layer ")]
    whole = [n for n in known if not rows[n].scope.startswith("layer ")]
    for some in (whole, single):
        draw.shuffle(some)
    for k in range(max(len(whole), len(single))):
        yield from (*whole[3 * k : 3 * k + 3], *single[k : k + 1])


def _sinks(model: Model) -> bool:
    return any(isinstance(x.attn, Attention) and x.attn.sinks for x in model.layers)


def _limits(model: Model, plants: Sequence[Plant], tokens: int, orders: int) -> Iterator[str]:
    made = sum(p.seed.idea.about.name == "layer_order" for p in plants)
    if made < orders:
        yield f"{made} of {orders:,} orders of layers were planted"
    layers = sorted({p.seed.change.layer for p in plants if p.seed.change.layer is not None})
    if layers:
        which = f"layer {layers[0]}" if len(layers) == 1 else f"layers {', '.join(map(str, layers))}"
        yield f"mistakes in a single layer were planted in {which} of {model.n_layers} alone"
    yield "two mistakes at once were not planted"
    yield from short(model, tokens)
