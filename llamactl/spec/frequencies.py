"""RoPE's frequencies: theta^(-2j/dim) radians per position for pair j, and what each stretching makes of them.

Sources: RoFormer (arXiv:2104.09864), linear interpolation (arXiv:2306.15595), NTK-aware and dynamic NTK as published
with YaRN (arXiv:2309.00071), LongRoPE (arXiv:2402.13753), and Meta's Llama 3.1 reference code.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from llamactl.spec.rope import Rope, RopeScaling

Frequencies = tuple[float, ...]


def plain(rope: Rope) -> Frequencies:
    """theta^(-2j/dim), j = 0 .. dim/2 - 1 (-2j/span where pairs stand still): what the model was first trained with."""
    return tuple(rope.theta ** (-2 * j / (rope.span or rope.dim)) for j in range(rope.dim // 2))


def ntk_theta(theta: float, dim: int, factor: float) -> float:
    """The NTK-aware base: theta x factor^(dim/(dim-2)); the slowest pair is slowed by exactly `factor`."""
    return float(theta * factor ** (dim / (dim - 2)))


def frequencies(rope: Rope, *, length: int | None = None, limit: int | None = None) -> tuple[Frequencies, float]:
    """(radians per position of each pair, factor on cos and sin) as the model applies them.

    length: positions in use, which dynamic and longrope depend on; None for the trained ones. limit: the config's
    max_position_embeddings, which both measure against.
    """
    if rope.scaling is None:
        return plain(rope), 1.0
    return _SCHEMES[rope.scaling.kind](rope, rope.scaling, length, limit)


def _linear(rope: Rope, s: RopeScaling, length: int | None, limit: int | None) -> tuple[Frequencies, float]:
    return tuple(f / (s.factor or 1.0) for f in plain(rope)), s.attention_factor or 1.0


def _dynamic(rope: Rope, s: RopeScaling, length: int | None, limit: int | None) -> tuple[Frequencies, float]:
    """Past the limit the base grows with the length: theta x (factor x length/limit - (factor - 1))^(dim/(dim-2))."""
    reach = limit or s.original or 1
    ratio = max(length or reach, reach) / reach
    factor = s.factor or 1.0
    theta = ntk_theta(rope.theta, rope.dim, factor * ratio - (factor - 1))
    return plain(Rope(dim=rope.dim, theta=theta)), s.attention_factor or 1.0


def yarn_ramp(rope: Rope, s: RopeScaling) -> Frequencies:
    """How far each pair is interpolated: 0 for pairs that turn often in the trained length, 1 for the slow ones."""
    trained = s.original or 1

    def pair_that_turns(times: float) -> float:
        return rope.dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(s.beta_fast or 32.0), pair_that_turns(s.beta_slow or 1.0)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # as the reference does, so that the ramp is a step and no division by zero
    return tuple(min(1.0, max(0.0, (j - low) / (high - low))) for j in range(rope.dim // 2))


def _yarn(rope: Rope, s: RopeScaling, length: int | None, limit: int | None) -> tuple[Frequencies, float]:
    factor = s.factor or 1.0
    blended = tuple(f * (1 - r) + f / factor * r for f, r in zip(plain(rope), yarn_ramp(rope, s), strict=True))
    return blended, yarn_attention(s)


def yarn_attention(s: RopeScaling) -> float:
    """0.1 ln(factor) + 1 unless the config says otherwise; mscale / mscale_all_dim as DeepSeek writes it."""
    if s.attention_factor is not None:
        return s.attention_factor
    factor = s.factor or 1.0

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if s.mscale and s.mscale_all_dim:
        return scale(s.mscale) / scale(s.mscale_all_dim)
    return scale(1.0)


def _longrope(rope: Rope, s: RopeScaling, length: int | None, limit: int | None) -> tuple[Frequencies, float]:
    """A divisor for each pair; the short list up to the trained length, the long one past it."""
    trained = s.original or limit or 1
    divisors = s.long if length is not None and length > trained else s.short
    assert divisors is not None
    factor = (limit / trained) if limit and s.original else (s.factor or 1.0)
    attention = s.attention_factor
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return tuple(f / d for f, d in zip(plain(rope), divisors, strict=True)), attention


def llama3_share(frequency: float, s: RopeScaling) -> float:
    """1 for a pair that is left alone, 0 for one slowed by the whole factor, between them for the blended ones."""
    trained, low, high = s.original or 1, s.low_freq_factor or 1.0, s.high_freq_factor or 4.0
    turns = trained * frequency / (2 * math.pi)
    if high == low:  # nothing is blended (Llama 4)
        return float(turns >= low)
    return min(1.0, max(0.0, (turns - low) / (high - low)))


def _llama3(rope: Rope, s: RopeScaling, length: int | None, limit: int | None) -> tuple[Frequencies, float]:
    factor = s.factor or 1.0
    shares = [llama3_share(f, s) for f in plain(rope)]
    return tuple(f * (m + (1 - m) / factor) for f, m in zip(plain(rope), shares, strict=True)), 1.0


_SCHEMES: dict[str, Callable[[Rope, RopeScaling, int | None, int | None], tuple[Frequencies, float]]] = {
    "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "longrope": _longrope, "llama3": _llama3,
}
