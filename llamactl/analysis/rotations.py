"""Every rotation of a model under every way to stretch it, as plain numbers for a picture."""

from __future__ import annotations

from dataclasses import dataclass

from llamactl.analysis.layers import Ranges
from llamactl.analysis.rope import METHODS, Rotation, rope
from llamactl.errors import LlamactlError
from llamactl.spec.model import Model

FACTORS = (2, 4, 8, 16, 32)  # contexts to stretch to, in trained lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretched:
    """One scheme at one target. frequencies: radians per position, one a pair. kinds: a letter a pair, u untouched,
    b blended, s slowed. unseen: 1 for each pair that meets angles it was not trained on. method: "" for the config's.
    """

    method: str
    target: int | None
    frequencies: tuple[float, ...]
    kinds: str
    unseen: str
    attention_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turning:
    """One rotation. plain: unstretched frequencies. ways: the config's own scheme first, at its own length."""

    layers: int
    layer_ranges: Ranges
    theta: float
    rotated: int
    head_dim: int
    scheme: str
    trained: int | None
    usable: int | None
    plain: tuple[float, ...]
    ways: tuple[Stretched, ...]


def turnings(model: Model) -> tuple[Turning, ...]:
    """All rotations of `model`, as configured and by each method that can be told of it."""
    own = rope(model).rotations
    trained = model.context.trained
    targets = [trained * f for f in FACTORS] if trained else []
    asked = [(m, t) for t in targets for m in ("", *METHODS)]
    found = [(m, t, _read(model, t, m or None)) for m, t in asked]
    return tuple(
        Turning(layers=r.layers, layer_ranges=r.layer_ranges, theta=r.theta, rotated=r.rotated, head_dim=r.head_dim,
                scheme=r.scheme, trained=r.trained_context, usable=r.usable_context,
                plain=tuple(p.frequency for p in r.pairs),
                ways=(_way("", None, r), *(_way(m, t, x[n]) for m, t, x in found if n < len(x))))
        for n, r in enumerate(own))


def _read(model: Model, target: int, method: str | None) -> tuple[Rotation, ...]:
    """The rotations stretched so; none where the method has no meaning for them."""
    try:
        return rope(model, target=target, method=method).rotations
    except LlamactlError:
        return ()


def _way(method: str, target: int | None, r: Rotation) -> Stretched:
    return Stretched(method=method, target=target, frequencies=tuple(p.stretched_frequency for p in r.pairs),
                     kinds="".join(p.kind[0] for p in r.pairs), unseen="".join(str(int(p.unseen)) for p in r.pairs),
                     attention_factor=r.attention_factor)


