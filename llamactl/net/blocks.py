"""The pieces every layer is made of: linear maps, norms, feed-forwards. Their parameters carry the canonical names.

shapes: B batch, T new tokens, S tokens seen, D head_dim, H heads; x is (B, T, hidden). Weights are (out, in).
Nothing is initialised: parameters are made empty, on `meta` unless said otherwise, and assigned from a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  its usual name

from llamactl.errors import InputRefused
from llamactl.net.kernels import linear
from llamactl.spec.parts import MLP, Norm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def not_runnable(what: str) -> InputRefused:
    """The refusal of a part that is described and counted, but not computed."""
    return InputRefused("not-runnable", f"the network does not compute {what}",
                        help="params, kv-cache and inspect read this model; generate does not run it")


def empty(*shape: int, dtype: torch.dtype, device: Any) -> nn.Parameter:
    """A parameter without content and without gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b; weight (out, in)."""

    bias: Tensor | None

    def __init__(self, in_: int, out: int, bias: bool = False, *, dtype: torch.dtype, device: Any = "meta") -> None:
        super().__init__()
        self.weight = empty(out, in_, dtype=dtype, device=device)
        self.bias = empty(out, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RowNorm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, or over each head's part of it.

    gain: g in fp32, made on first use where the weight is stored as g - 1 or a single row is normed; `forget` drops it
    after new weights.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, part: Norm, *, dtype: torch.dtype, device: Any = "meta") -> None:
        super().__init__()
        self.part = part
        self.gain: Tensor | None = None
        self.weight = self.bias = None
        if part.heads:
            for e in range(part.heads):  # the names are q_norm.0.weight and on
                one = RowNorm(Norm(dim=part.dim, eps=part.eps, kind=part.kind, weight=part.weight, bias=part.bias,
                                   offset=part.offset), dtype=dtype, device=device)
                self.add_module(str(e), one)
            return
        self.weight = empty(part.dim, dtype=dtype, device=device) if part.weight else None
        self.bias = empty(part.dim, dtype=dtype, device=device) if part.bias else None

    def forget(self) -> None:
        self.gain = None

    def forward(self, x: Tensor) -> Tensor:
        part = self.part
        if part.heads:
            split = [self.get_submodule(str(e))(x[..., e, :]) for e in range(part.heads)]  # (..., heads, dim)
            return torch.stack(split, dim=-2)
        one_row = x.numel() == part.dim and x.device.type == "cpu" and not torch.compiler.is_compiling()
        if part.kind == "rms" and one_row:
            return self._one_row(x)
        if part.offset and self.weight is not None:
            return self._norm(x.float(), self._gain(), None if self.bias is None else self.bias.float()).to(x.dtype)
        return self._norm(x, self.weight, self.bias)

    def _norm(self, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        if self.part.kind == "rms":
            return F.rms_norm(x, (self.part.dim,), gain, self.part.eps)
        if self.part.kind != "layer":
            from llamactl.net.slips import slipped_norm

            return slipped_norm(self.part, x, gain, bias)
        return F.layer_norm(x, (self.part.dim,), gain, bias, self.part.eps)

    def _one_row(self, x: Tensor) -> Tensor:
        """RMSNorm of one token in five small steps; PyTorch's takes twelve, a tenth of a small model's time."""
        wide = x.float()
        row = wide.view(-1)
        mean = float(torch.dot(row, row)) / self.part.dim + self.part.eps
        scale = mean**-0.5 if mean else math.inf  # of zeros, without an epsilon: no number, as elsewhere
        gain = self._gain()
        return (wide * scale if gain is None else torch.mul(wide, gain).mul_(scale)).to(x.dtype)

    def _gain(self) -> Tensor | None:
        """g in fp32."""
        if self.gain is None and self.weight is not None:
            self.gain = self.weight.float() + 1 if self.part.offset else self.weight.float()
        return self.gain


class FeedForward(nn.Module):
    """down(act(up(x))), or with a gate down(act(gate(x)) * up(x))."""

    def __init__(self, part: MLP, *, dtype: torch.dtype, device: Any = "meta") -> None:
        super().__init__()
        self.part = part
        self.gate = Linear(part.hidden, part.ffn, part.bias, dtype=dtype, device=device) if part.gated else None
        self.up = Linear(part.hidden, part.ffn, part.bias, dtype=dtype, device=device)
        self.down = Linear(part.ffn, part.hidden, part.bias, dtype=dtype, device=device)
        self.act = ACTIVATIONS.get(part.activation)
        self.clamp: tuple[float, float] | None = None
        if part.activation == "swigluoai" and part.limit is not None and part.alpha is not None:
            self.clamp = (part.limit, part.alpha)
        if self.act is None and (self.clamp is None or self.gate is None):
            raise not_runnable(f"the activation {part.activation!r}")

        self.joint: tuple[Tensor, Tensor | None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            assert self.act is not None
            return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]
        gate, up = (self.gate(x), self.up(x)) if self.joint is None else F.linear(x, *self.joint).chunk(2, -1)
        if self.clamp is not None:
            limit, alpha = self.clamp
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return self.down(gate * torch.sigmoid(alpha * gate) * (up + 1))  # type: ignore[no-any-return]
        assert self.act is not None
        return self.down(self.act(gate) * up)  # type: ignore[no-any-return]

    def join(self) -> None:
        """Let gate and up be one product, of a copy of their matrices; for a compiled step (aot.py)."""
        if type(self.gate) is Linear and type(self.up) is Linear:  # not in 8 bits
            bias = None if self.gate.bias is None or self.up.bias is None else torch.cat((self.gate.bias, self.up.bias))
            self.joint = (torch.cat((self.gate.weight, self.up.weight)), bias)
