"""What tells tokens apart by place: rotations of q and k, sinusoids, ALiBi's slopes. All computed in fp32.

Sources: RoFormer (arXiv:2104.09864), Attention Is All You Need section 3.5, ALiBi (arXiv:2108.12409).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llamactl.errors import InputRefused
from llamactl.net import kernels
from llamactl.spec.frequencies import frequencies
from llamactl.spec.model import Model
from llamactl.spec.rope import Rope

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Turn(NamedTuple):
    """cos and sin of some positions, (T, dim) or (B, 1, T, dim), spread over both members of each pair.

    The sign of the first member is in sin already: x cos + swap(x) sin.
    """

    cos: Tensor
    sin: Tensor


class RopeTable:
    """cos and sin of one Rope for positions 0 .. rows - 1, grown as needed and kept in the dtype that uses them.

    Frequencies of dynamic and longrope depend on the length; a table is made for one.
    """

    def __init__(self, rope: Rope, model: Model, *, dtype: torch.dtype, device: Any, length: int) -> None:
        self.rope = rope
        scaled = rope.scaling is not None and rope.scaling.kind == "dynamic"
        limit = model.context.trained if scaled else model.context.usable
        found, self.factor = frequencies(rope, length=length, limit=limit)
        wide = torch.float64 if kernels.plainly() else torch.float32
        self.frequencies = torch.tensor(found, dtype=wide, device=device)
        self.dtype = dtype
        self.rows = 0
        self.cos = self.sin = torch.empty(0)

    def upto(self, rows: int) -> RopeTable:
        """The table with at least `rows` positions."""
        if rows > self.rows:
            self.rows = max(rows, min(2 * self.rows, 1 << 20))
            at = torch.arange(self.rows, device=self.frequencies.device, dtype=self.frequencies.dtype) + self.rope.start
            angles = torch.outer(*_rounded(self.rope, at, self.frequencies))
            cos, sin = angles.cos() * self.factor, angles.sin() * (-self.factor if self.rope.backwards else self.factor)
            if self.rope.table in NARROW:
                cos, sin = (x.to(NARROW[self.rope.table]).float() for x in (cos, sin))
            if self.rope.pairs == "half":
                cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
            else:
                cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
            self.cos, self.sin = cos.to(self.dtype), sin.to(self.dtype)
        return self


def _rounded(rope: Rope, at: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Positions and frequencies, in fp32 unless a wrong port has them in another type."""
    if rope.table is None or not rope.table.startswith("positions-"):
        return at, frequencies
    kind = NARROW[rope.table.removeprefix("positions-")]
    return at.to(kind).float(), frequencies.to(kind).float()


def rotate(x: Tensor, turn: Turn, pairs: str) -> Tensor:
    """The first `dim` of x's last dimension rotated, the rest as it is; x is (B, H, T, D)."""
    dim = turn.cos.shape[-1]
    if dim > x.shape[-1]:  # only edits can say so: a description is checked where it is made
        raise InputRefused("not-runnable", f"the network cannot rotate {dim} of a head's {x.shape[-1]} dimensions")
    if dim != x.shape[-1]:
        return torch.cat((rotate(x[..., :dim], turn, pairs), x[..., dim:]), -1)
    swapped = x.roll(dim // 2, -1) if pairs == "half" else x.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    return torch.addcmul(x * turn.cos, swapped, turn.sin)


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    """(..., dim): sines at even, cosines at odd dimensions."""
    steps = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * torch.exp(steps * (-math.log(10000.0) / dim))
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[..., :dim]


def alibi_slopes(n_heads: int) -> list[float]:
    """2^(-8i/n), i = 1 .. n; where n is no power of two, those of the next lower one, then every other of the next."""
    power = 1 << (n_heads.bit_length() - 1)
    out = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    return out + [2.0 ** (-4 * i / power) for i in range(1, 2 * (n_heads - power), 2)]
