"""What can be switched from one Model to another, each switch by itself: the edits of any choice between the two.

`path` walks from a to b in one order. Here every subset is a model: `Choices.edits` names the edits, and `apply` makes
them. Sizes keep proportions, so that a switch means the same at either size: a feed-forward of 3.5 x hidden, four query
heads to a KV head.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

from llamactl.errors import UsageError
from llamactl.spec import path
from llamactl.spec.edits import apply
from llamactl.spec.features import features
from llamactl.spec.model import Model
from llamactl.spec.parts import MLP, Attention

SIZE, FFN, KV = "size", "ffn", "kv"
MOST_SHARES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One choice. key: short, for an address. title: what it puts in.

    edits: what `edits.apply` takes; empty where they depend on other switches (sizes and proportions).
    """

    key: str
    title: str
    edits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Every model between `a` and `b` that edits reach. switches: in the order they are told; see `between`."""

    a: Model
    b: Model
    switches: tuple[Switch, ...]

    def edits(self, on: Collection[str], share: int | None) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """(switch, its edits) for the switches in `on`, in the order to apply them.

        share: query heads to a KV head; None leaves KV heads as a or b has them (where layers differ).
        """
        out: list[tuple[str, tuple[str, ...]]] = []
        sized = self.b if SIZE in on else self.a
        heads = _heads(sized)
        if SIZE in on:
            out.append((SIZE, tuple(_size(self.a, self.b))))
        ratio = _ratio(self.b if FFN in on else self.a)
        own = _ratio(self.a)
        if ratio is not None and (FFN in on or SIZE in on):
            width = round(ratio * sized.hidden)
            if own is None or width != own * self.a.hidden:
                out.append((FFN, (f"ffn={width}",)))
        out += [(s.key, s.edits) for s in self.switches if s.key in on and s.edits]
        if share is not None and heads is not None and heads % share:
            raise UsageError("edit", f"{share} of {heads} heads cannot share a KV head evenly")
        if share is not None and heads is not None and (SIZE in on or share != _share(self.a)):
            out.append((KV, (f"n_kv_heads={heads // share}",)))
        return tuple(out)

    def shares(self, on: Collection[str]) -> tuple[int, ...]:
        """The query heads that can share a KV head, from 1 (MHA) to all (MQA); empty where that has no meaning."""
        return shares(self.b if SIZE in on else self.a)

    def reached(self) -> bool:
        """Whether all switches on make a model that reads and counts as b does."""
        every, share = {s.key for s in self.switches}, _share(self.b)
        if share not in (None, *self.shares(every)):
            return False
        return _alike(self.model(every, share), self.b)

    def model(self, on: Collection[str], share: int | None) -> Model:
        """The model of these choices. Raises UsageError where an edit has no meaning."""
        made = self.a
        for _, edits in self.edits(on, share):
            for edit in edits:
                made = apply(made, edit)
        return made


def between(a: Model, b: Model) -> Choices:
    """The switches from `a` to `b`: those whose edits can be made, alone and with all others."""
    found = Choices(a=a, b=b, switches=())
    for switch in _wanted(a, b):
        wider = Choices(a=a, b=b, switches=(*found.switches, switch))
        try:
            alone, both = _with(wider, {switch.key}), _with(wider, _keys(wider))
        except UsageError:  # this edit has no meaning for these models
            continue
        if not (_alike(alone, a) and _alike(both, _with(found, _keys(found)))):
            found = wider
    return found


def _with(choices: Choices, on: Collection[str]) -> Model:
    """The model of these switches with KV heads shared as in `a`, or nearly so."""
    return choices.model(on, nearest(choices.shares(on), choices.a))


def _alike(x: Model, y: Model) -> bool:
    """Whether nothing that is told or counted differs."""
    return features(x) == features(y) and x.total() == y.total()


def shares(model: Model) -> tuple[int, ...]:
    """The query heads that can share a KV head in every layer alike; empty without heads of keys and values."""
    heads, own = _heads(model), _share(model)
    if heads is None or own is None:
        return ()
    small = [n for n in range(1, isqrt(heads) + 1) if heads % n == 0]
    found = sorted({*small, *(heads // n for n in small)})
    if len(found) > MOST_SHARES:  # no model has so many, but a config can
        found = [n for n in found if n & (n - 1) == 0 or n in (own, heads)]
    return tuple(found)


def nearest(options: Sequence[int], model: Model) -> int | None:
    """`model`'s sharing where others are possible: one KV head stays one, else the same or the next smaller share."""
    wished = _share(model)
    if wished is None or not options:
        return None
    own = shares(model)
    if len(own) > 1 and wished == own[-1]:
        return options[-1]
    return max((s for s in options if s <= wished), default=options[0])


def with_share(model: Model, share: int) -> tuple[str, ...]:
    """The edit that has `share` query heads share a KV head; none where they do already."""
    heads = _heads(model)
    return () if heads is None or share == _share(model) else (f"n_kv_heads={heads // share}",)


def share_of(model: Model) -> int | None:
    """Query heads to a KV head, where all layers agree on it and on their heads."""
    return _share(model)


def _keys(choices: Choices) -> set[str]:
    return {s.key for s in choices.switches}


def _wanted(a: Model, b: Model) -> Iterator[Switch]:
    """Parts in the order the lineage went, then what they cost by size."""
    small = (("positions", path.positions(a, b)), ("norm", path.norms(a, b)), ("gate", path.gate(a, b)))
    for key, found in small:
        yield from (Switch(key=key, title=title, edits=edits) for title, edits in found)
    ratios = _ratio(a), _ratio(b)
    if None not in ratios and ratios[0] != ratios[1]:
        yield Switch(key=FFN, title="feed-forward width")
    rest = [(title, edits) for title, edits in (*path.biases(b), *path.dropout(b))
            if any(path.changes(a, e) for e in edits)]
    if rest:
        yield Switch(key="biases", title=" and ".join(t for t, _ in rest), edits=tuple(e for _, es in rest for e in es))
    yield from (Switch(key="head", title=title, edits=edits) for title, edits in path.head(b))
    if a.embed.vocab != b.embed.vocab:  # a head may have other rows than the table, which this edit would make alike
        yield Switch(key="vocab", title="vocabulary", edits=(f"vocab={b.embed.vocab}",))
    sizes = [_parts_of_size(m) for m in (a, b)]
    yield Switch(key=SIZE, title="context" if sizes[0] == sizes[1] else "size")


def _size(a: Model, b: Model) -> Iterator[str]:
    """Width, heads, layers and context of b; the KV heads come after, by their share."""
    old, new = _plain(a), _plain(b)
    yield f"hidden={b.hidden}"
    if old is not None and new is not None:
        if old.n_kv_heads != old.n_heads:  # every query head its own, for those follow any number
            yield f"n_kv_heads={old.n_heads}"
        yield from (f"n_heads={new.n_heads}", f"head_dim={new.head_dim}")
    yield f"n_layers={b.n_layers}"
    if b.context.usable and b.context.usable != a.context.usable:
        yield f"context={b.context.usable}"


def _parts_of_size(model: Model) -> tuple[int | None, ...]:
    """What the switch of sizes sets, but for the context."""
    a = _plain(model)
    return (model.hidden, model.n_layers, *((a.n_heads, a.head_dim) if a is not None else ()))


def _plain(model: Model) -> Attention | None:
    """The first attention of the plain kind; a hybrid may begin with another mixer."""
    return next((x.attn for x, _ in model.distinct_layers() if isinstance(x.attn, Attention)), None)


def _heads(model: Model) -> int | None:
    """Query heads, where every attention layer is of the plain kind and has as many."""
    found = {x.attn.n_heads if isinstance(x.attn, Attention) else 0 for x, _ in model.distinct_layers() if x.attn}
    return found.pop() if len(found) == 1 and 0 not in found else None


def _share(model: Model) -> int | None:
    heads = _heads(model)
    kept = {x.attn.n_kv_heads for x, _ in model.distinct_layers() if isinstance(x.attn, Attention)}
    return heads // kept.pop() if heads is not None and len(kept) == 1 else None


def _ratio(model: Model) -> Fraction | None:
    """Width of the feed-forward over the stream's, where all layers have the same dense one."""
    widths = {x.mlp.ffn if isinstance(x.mlp, MLP) else 0 for x, _ in model.distinct_layers() if x.mlp}
    return Fraction(widths.pop(), model.hidden) if len(widths) == 1 and 0 not in widths else None
