"""The functions behind edits of rotations and positions that wrong ports make; pure, Model -> Model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llamactl.spec.changes import each_layer, impossible
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import Attention, LearnedPositions
from llamactl.spec.rope import SCHEMES, Rope, RopeScaling
from llamactl.spec.slips import OTHER, Rotation, Sides, Slips
from llamactl.spec.taken import Taken, take


def each_rope(model: Model, change: Callable[[Rope, Attention], Rope | None]) -> Model:
    """Every rotation changed. UsageError where nothing rotates, and where heads share one latent."""
    if not any(isinstance(x.attn, Attention) and x.attn.rope for x in model.layers):
        raise impossible("this model has no RoPE over whole heads")

    def one(x: Layer) -> Layer:
        if not isinstance(x.attn, Attention) or x.attn.rope is None:
            return x
        return replace(x, attn=replace(x.attn, rope=change(x.attn.rope, x.attn)))

    return each_layer(model, one)


def _sides(model: Model, change: Callable[[Sides], Sides]) -> Model:
    """q, k and v rotated each in its own way, on top of what was changed before."""
    if not any(isinstance(x.attn, Attention) and x.attn.rope for x in model.layers):
        raise impossible("this model has no RoPE over whole heads")

    def one(x: Layer) -> Layer:
        if not isinstance(x.attn, Attention) or x.attn.rope is None:
            return x
        slips = x.slips or Slips()
        return replace(x, slips=replace(slips, rotates=change(slips.rotates)))

    return each_layer(model, one)


def _each(which: str, change: Callable[[Rotation], Rotation]) -> Callable[[Sides], Sides]:
    """The rotations of the sides named in `which` changed."""
    def sides(now: Sides) -> Sides:
        q, k, v = (change(r) if r is not None and name in which else r for r, name in zip(now, "qkv", strict=True))
        return q, k, v

    return sides


def pairs(model: Model, which: str) -> Model:
    """The other lane order on q, on k, or on both: lanes that belong to one pair."""
    if which in OTHER:
        return each_rope(model, lambda r, a: replace(r, pairs=which))
    return _sides(model, _each(which, lambda r: replace(r, other_pairs=not r.other_pairs)))


def backwards(model: Model, which: str) -> Model:
    """Rotation against its direction, of both or of one."""
    if which == "both":
        return each_rope(model, lambda r, a: replace(r, backwards=not r.backwards))
    return _sides(model, _each(which, lambda r: replace(r, backwards=not r.backwards)))


def on(model: Model, which: str) -> Model:
    """Which of q, k and v are rotated."""
    def sides(now: Sides) -> Sides:
        q, k, v = ((r or Rotation()) if name in which else None for r, name in zip(now, "qkv", strict=True))
        return q, k, v

    return _sides(model, sides)


def shift(model: Model, by: int) -> Model:
    """q's positions moved against k's."""
    return _sides(model, _each("q" if by > 0 else "k", lambda r: replace(r, start=r.start + abs(by))))


def table(model: Model, dtype: str) -> Model:
    """Angles or their cosines rounded to a dtype."""
    return each_rope(model, lambda r, a: replace(r, table=dtype))


def width(model: Model, text: str) -> Model:
    """Rotate the first N dimensions: "32", or "32/64" with exponents that count to 64."""
    dim, _, over = text.partition("/")
    n, m = int(dim), int(over or dim)

    def one(r: Rope, a: Attention) -> Rope:
        if n % 2 or not 2 <= n <= a.head_dim:
            raise impossible(f"{n} of {a.head_dim} dimensions cannot rotate in pairs")
        return replace(r, dim=n, theta=r.theta ** (n / m))

    return each_rope(model, one)


def scaling(model: Model, text: str) -> Model:
    """none, or KIND:FACTOR[:ORIGINAL]: linear, dynamic, yarn, llama3 with their usual other values."""
    if text == "none":
        return each_rope(model, lambda r, a: replace(r, scaling=None))
    kind, factor, *rest = text.split(":")
    if kind not in SCHEMES:
        raise impossible(f"{kind!r} is none of {', '.join(SCHEMES)}")
    original = int(rest[0]) if rest else None

    def one(r: Rope, a: Attention) -> Rope:
        old = r.scaling if r.scaling is not None and r.scaling.kind == kind else None
        first = original or (old and old.original) or (r.scaling and r.scaling.original) or model.context.trained
        made = replace(old, factor=float(factor), original=first) if old else RopeScaling(
            kind=kind, factor=float(factor), original=first if kind in ("yarn", "llama3") else None,
            low_freq_factor=1.0 if kind == "llama3" else None, high_freq_factor=4.0 if kind == "llama3" else None,
            beta_fast=32.0 if kind == "yarn" else None, beta_slow=1.0 if kind == "yarn" else None)
        return replace(r, scaling=made)

    return each_rope(model, one)


def bands(model: Model, text: str) -> Model:
    """LOW:HIGH frequency factors of llama3, FAST:SLOW betas of yarn; "FAST:SLOW:no-attention" leaves out yarn's factor
    on the scores."""
    a, b, *rest = text.split(":")

    def one(r: Rope, part: Attention) -> Rope:
        s = r.scaling
        if s is None or s.kind not in ("llama3", "yarn"):
            raise impossible("this RoPE has no bands")
        if s.kind == "llama3":
            return replace(r, scaling=replace(s, low_freq_factor=float(a), high_freq_factor=float(b)))
        return replace(r, scaling=replace(s, beta_fast=float(a), beta_slow=float(b),
                                          attention_factor=1.0 if rest else s.attention_factor))

    return each_rope(model, one)


def rows(model: Model, text: str) -> Model:
    """SIDE:FROM>TO[:HEADS]: rows of q, k or both reordered once more, with so many heads (the side's own if absent)."""
    side, order, *heads = text.split(":")
    if side not in ("q", "k", "both") or order not in ("adjacent>half", "half>adjacent"):
        raise impossible(f"{text!r} is not SIDE:FROM>TO of q, k or both, adjacent and half")
    new = []
    for name in ("q", "k") if side == "both" else (side,):
        for at in (f"attn.{name}.weight", f"attn.{name}.bias"):
            new.append(Taken(at, "rows", order, int(heads[0]) if heads else 0))
    return take(model, *new)


def rows_of(model: Model, by: str) -> Model:
    """Positions taken from another row of the learned table: so many further on, or "first" for all."""
    if not isinstance(model.positions, LearnedPositions):
        raise impossible("this model has no table of positions")
    if by != "first" and not by.removeprefix("-").isdigit():
        raise impossible(f"{by!r} is neither a number of rows nor first")
    return take(model, Taken("pos_embed.weight", "first") if by == "first" else
                Taken("pos_embed.weight", "shift", int(by)))
