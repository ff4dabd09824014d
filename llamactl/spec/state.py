"""Mixers that keep a fixed state per sequence, not a growing cache: Mamba, Mamba-2, gated delta net, short conv."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from llamactl.spec.parts import Leaf, Leaves, Norm, linear

ROLE = "state_space"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """Selective state space (arXiv:2312.00752). inner: channels; state: numbers kept per channel; kernel: of the conv.

    inner_norms: eps of Jamba's RMSNorms on dt, B and C, None for none.
    State per sequence: inner x kernel (conv) + inner x state.
    """

    hidden: int
    inner: int
    state: int
    dt_rank: int
    kernel: int
    bias: bool = False
    conv_bias: bool = True
    inner_norms: float | None = None

    @lru_cache  # noqa: B019
    def leaves(self) -> Leaves:
        out = [
            *linear("in", 2 * self.inner, self.hidden, ROLE, self.bias),
            *_conv(self.inner, self.kernel, self.conv_bias),
            *linear("x", self.dt_rank + 2 * self.state, self.inner, ROLE),
            *linear("dt", self.inner, self.dt_rank, ROLE, True),
            Leaf("A_log", (self.inner, self.state), ROLE),
            Leaf("D", (self.inner,), ROLE),
        ]
        if self.inner_norms is not None:
            for name, dim in (("dt_norm", self.dt_rank), ("b_norm", self.state), ("c_norm", self.state)):
                out += Norm(dim=dim, eps=self.inner_norms).leaves(name)
        return (*out, *linear("out", self.hidden, self.inner, ROLE, self.bias))

    def state_elements(self) -> int:
        return self.inner * (self.kernel + self.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Mamba-2 (arXiv:2405.21060): heads x head_dim channels, B and C shared by `groups`; z, x, B, C, dt in one matrix.

    norm_eps: of the gated RMSNorm before the output, None for none.
    State per sequence: (channels + 2 x groups x state) x kernel (conv) + channels x state.
    """

    hidden: int
    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    bias: bool = False
    conv_bias: bool = True
    norm_eps: float | None = 1e-5

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        return self.inner + 2 * self.groups * self.state

    @lru_cache  # noqa: B019
    def leaves(self) -> Leaves:
        out = [
            *linear("in", self.inner + self.conv_dim + self.heads, self.hidden, ROLE, self.bias),
            *_conv(self.conv_dim, self.kernel, self.conv_bias),
            *(Leaf(name, (self.heads,), ROLE) for name in ("dt_bias", "A_log", "D")),
        ]
        if self.norm_eps is not None:
            out += Norm(dim=self.inner, eps=self.norm_eps).leaves("norm")
        return (*out, *linear("out", self.hidden, self.inner, ROLE, self.bias))

    def state_elements(self) -> int:
        return self.conv_dim * self.kernel + self.inner * self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet:
    """Gated delta rule (arXiv:2412.06464) as in Qwen3-Next: v_heads share the q and k of k_heads; z gates the output.

    State per sequence: (2 x k_heads x k_dim + v_heads x v_dim) x kernel (conv) + v_heads x k_dim x v_dim.
    """

    hidden: int
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    kernel: int
    eps: float

    @property
    def conv_dim(self) -> int:
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @lru_cache  # noqa: B019
    def leaves(self) -> Leaves:
        keys, values = self.k_heads * self.k_dim, self.v_heads * self.v_dim
        rows = (("q", keys), ("k", keys), ("v", values), ("z", values), ("b", self.v_heads), ("a", self.v_heads))
        return (
            *(leaf for name, n in rows for leaf in linear(name, n, self.hidden, ROLE)),
            *_conv(self.conv_dim, self.kernel, False),
            Leaf("dt_bias", (self.v_heads,), ROLE),
            Leaf("A_log", (self.v_heads,), ROLE),
            *Norm(dim=self.v_dim, eps=self.eps).leaves("norm"),
            *linear("out", self.hidden, values, ROLE),
        )

    def state_elements(self) -> int:
        return self.conv_dim * self.kernel + self.v_heads * self.k_dim * self.v_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """LFM2's gated short convolution: B, C and x from one projection, a depthwise conv of `kernel` taps.

    State per sequence: hidden x kernel.
    """

    hidden: int
    kernel: int
    bias: bool = False

    @lru_cache  # noqa: B019
    def leaves(self) -> Leaves:
        return (
            *linear("in", 3 * self.hidden, self.hidden, ROLE, self.bias),
            *_conv(self.hidden, self.kernel, self.bias),
            *linear("out", self.hidden, self.hidden, ROLE, self.bias),
        )

    def state_elements(self) -> int:
        return self.hidden * self.kernel


def _conv(channels: int, kernel: int, bias: bool) -> list[Leaf]:
    """A depthwise causal convolution, stored as torch's Conv1d keeps it: (channels, 1, kernel)."""
    out = [Leaf("conv.weight", (channels, 1, kernel), ROLE)]
    if bias:
        out.append(Leaf("conv.bias", (channels,), ROLE))
    return out


StateMixer = Mamba | Mamba2 | GatedDeltaNet | ShortConv
