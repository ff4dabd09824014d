"""RoPE read as an engineer does: every pair's frequency, wavelength and turns, before and after stretching."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from llamactl.analysis.layers import Ranges, ranges
from llamactl.errors import InputRefused, UsageError
from llamactl.spec.frequencies import frequencies, ntk_theta, plain
from llamactl.spec.latent import LatentAttention
from llamactl.spec.model import Model
from llamactl.spec.rope import Rope, RopeScaling

METHODS = ("linear", "ntk", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Pair j of rotated dimensions. frequency: radians per position; wavelength: positions per turn.

    turns: inside the trained context, unstretched. slowed: unstretched over stretched frequency. kind: untouched |
    blended | slowed. unseen: at the target length its angle leaves what training covered: it had not made a whole turn
    there, and now goes further than it did.
    """

    j: int
    frequency: float
    wavelength: float
    stretched_frequency: float
    stretched_wavelength: float
    turns: float
    slowed: float
    kind: str
    unseen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """One rotation and the layers that use it. parameters: the scaling's own numbers, resolved whatever their spelling.

    attention_factor: multiplies cos and sin. rotated of head_dim dimensions turn.
    """

    layers: int
    layer_ranges: Ranges
    theta: float
    rotated: int
    head_dim: int
    pairing: str
    scheme: str
    parameters: dict[str, Any]
    attention_factor: float
    trained_context: int | None
    usable_context: int | None
    target_context: int | None
    untouched: int
    blended: int
    slowed: int
    unseen: int
    pairs: tuple[Pair, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeReport:
    """What `llamactl rope` says of one model; rotations is empty where nothing rotates."""

    id: str
    family: str
    model_type: str
    positions: str
    layers: int
    rotations: tuple[Rotation, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the names that schema 1 fixes."""
        return asdict(self)

    def _repr_html_(self) -> str:
        from llamactl.render import html

        return html("rope", [self])


def rope(model: Model, *, id: str | None = None, target: int | None = None, method: str | None = None) -> RopeReport:
    """Read the rotations of `model`. target: positions to judge them at; method: stretch to it by this scheme instead.

    Raises UsageError for an unknown method, or one without a target beyond the trained length.
    """
    from llamactl.spec.features import positions

    if any(x.what.startswith("RoPE factor") for x in model.not_counted):
        raise InputRefused("rope-factors", "the file keeps its RoPE factors as a tensor, which is not read",
                           path=id, help="give the Hugging Face config.json")
    by_rope: dict[tuple[Rope, int], list[int]] = {}
    for i, layer in enumerate(model.layers):
        if layer.attn is not None and layer.attn.rope is not None:
            whole = layer.attn.qk_rope if isinstance(layer.attn, LatentAttention) else layer.attn.head_dim
            by_rope.setdefault((layer.attn.rope, whole), []).append(i)
    return RopeReport(
        id=id or model.model_type, family=model.family, model_type=model.model_type, positions=positions(model),
        layers=model.n_layers,
        rotations=tuple(_rotation(model, r, whole, where, target, method) for (r, whole), where in by_rope.items()))


def _rotation(model: Model, r: Rope, whole: int, where: Sequence[int], target: int | None,
              method: str | None) -> Rotation:
    trained, limit = model.context.trained, model.context.usable
    base = plain(r)
    if method is not None:
        r = restretch(r, method, trained, target)
        limit = target
    length = target or limit
    now, factor = frequencies(r, length=length, limit=_measured(r, model, method, trained))
    most = max(a / b for a, b in zip(base, now, strict=True))
    pairs = tuple(_pair(j, a, b, most, trained, length) for j, (a, b) in enumerate(zip(base, now, strict=True)))
    kinds = [p.kind for p in pairs]
    s = r.scaling
    return Rotation(
        layers=len(where), layer_ranges=ranges(where), theta=r.theta, rotated=r.dim, head_dim=whole, pairing=r.pairs,
        scheme=method or (s.kind if s else "default"),
        parameters={k: v for k, v in asdict(s).items() if v is not None and k != "kind"} if s else {},
        attention_factor=factor, trained_context=trained, usable_context=model.context.usable, target_context=target,
        untouched=kinds.count("untouched"), blended=kinds.count("blended"), slowed=kinds.count("slowed"),
        unseen=sum(p.unseen for p in pairs), pairs=pairs)


def _measured(r: Rope, model: Model, method: str | None, trained: int | None) -> int | None:
    """The length that dynamic and longrope measure against: the config's maximum; for dynamic, the trained one."""
    if r.scaling and r.scaling.kind == "dynamic":
        return trained
    return model.context.usable if method is None else None


def restretch(r: Rope, method: str, trained: int | None, target: int | None) -> Rope:
    """`r` without its own scaling, stretched from `trained` to `target` positions by `method`."""
    if method not in METHODS:
        from difflib import get_close_matches

        near = get_close_matches(method, METHODS, 1)
        raise UsageError("method", f"{method!r} is not a known method",
                         help=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(METHODS)}")
    if target is None or trained is None or target <= trained:
        known = f"the trained {trained:,}" if trained else "a trained length, and this config names none"
        raise UsageError("target", f"--method needs a --target-ctx beyond {known}")
    factor = target / trained
    if method == "ntk":
        return replace(r, theta=ntk_theta(r.theta, r.dim, factor), scaling=None)
    if method == "longrope":
        if r.scaling is None or r.scaling.kind != "longrope":
            raise UsageError("method", "longrope's divisors are searched for each model; this config has none")
        return r
    extra: dict[str, Any] = {}
    if method == "llama3":
        extra = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if method == "yarn":
        extra = {"beta_fast": 32.0, "beta_slow": 1.0}
    return replace(r, scaling=RopeScaling(kind=method, factor=factor, original=trained, **extra))


def _pair(j: int, before: float, after: float, most: float, trained: int | None, length: int | None) -> Pair:
    """most: how far the most slowed pair is slowed; one at 1 is untouched, at `most` slowed, between them blended."""
    turns = (trained or 0) * before / (2 * math.pi)
    slowed = before / after
    kind = "untouched" if abs(slowed - 1) < 1e-9 else "slowed" if slowed > most * (1 - 1e-9) else "blended"
    full = trained is not None and length is not None
    unseen = bool(full and turns < 1 and (length or 0) * after > (trained or 0) * before * (1 + 1e-9))
    return Pair(j=j, frequency=before, wavelength=2 * math.pi / before, stretched_frequency=after,
                stretched_wavelength=2 * math.pi / after, turns=turns, slowed=slowed, kind=kind, unseen=unseen)
