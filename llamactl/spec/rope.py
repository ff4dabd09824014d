"""Rotary positions (RoFormer, arXiv:2104.09864) and the ways to stretch them, as values."""

from __future__ import annotations

from dataclasses import dataclass

SCHEMES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the frequencies are stretched. kind: linear | dynamic | yarn | longrope | llama3.

    original: positions of the unstretched training. Fields that a scheme does not use stay None; they carry the
    config's words (`low_freq_factor`, `beta_fast`, `mscale`, ...). short/long: longrope's per-pair divisors.
    """

    kind: str
    factor: float | None = None
    original: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    short: tuple[float, ...] | None = None
    long: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotation of the first `dim` of each head's dimensions: theta_j = theta^(-2j/dim), j = 0 .. dim/2 - 1.

    pairs: "half" turns (j, j + dim/2) as HF files do, "adjacent" turns (2j, 2j + 1) as Meta's original files do.
    span: the first pairs of this many dimensions turn, the others stand still: theta^(-2j/span) for (j, j + span/2)
    (Gemma 4's "proportional"); None for dim.
    start: added to every position. backwards: turned the other way. table: dtype to which the angles or the table of
    cosines and sines is rounded ("positions-bf16", "bf16", "fp16"). No family has these three; wrong ports do.
    """

    dim: int
    theta: float
    scaling: RopeScaling | None = None
    pairs: str = "half"
    span: int | None = None
    start: int = 0
    backwards: bool = False
    table: str | None = None
