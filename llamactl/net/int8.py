"""Matrices in 8 bits with a scale for each row: half of bf16's memory, and on a CPU a multiple of its decoding speed.

Measured on one thread of an AVX-512 CPU, 14 M weights, one row: bf16 3.4 ms, int8 0.8 ms; 64 rows: 10 ms, 22 ms. So
only a few rows go through PyTorch's int8 kernel; more of them multiply the matrix widened again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llamactl.errors import UsageError
from llamactl.net.blocks import Linear
from llamactl.net.decoder import Decoder, Source, build
from llamactl.net.kernels import linear
from llamactl.spec.int8 import in_int8

FEW = 16  # rows


class Int8Linear(nn.Module):
    """y = x (scale W)^T + b; weight (out, in) in int8, scale (out,)."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        rows, scale = rounded(weight)
        self.weight = nn.Parameter(rows, requires_grad=False)
        self.scale = nn.Parameter(scale.to(dtype), requires_grad=False)
        self.bias = bias
        # PyTorch's kernel reads in whole strides and checks no shape: past their end it reads what is not its own.
        self.strides = rows.shape[0] % 4 == 0 and rows.shape[1] % 32 == 0 and rows.is_contiguous()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.strides and rows.shape[0] <= FEW and x.dtype == torch.bfloat16 and x.device.type == "cpu":
            y = torch._weight_int8pack_mm(rows.contiguous(), self.weight, self.scale)
        else:
            y = linear(rows, self.weight.to(x.dtype), None) * self.scale
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], -1)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(out, in) in int8 and the scales (out,) in fp32: the largest of each row becomes 127."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1) / 127
    rows = (wide / torch.where(scale == 0, 1, scale)[:, None]).round().to(torch.int8)
    return rows, scale


def assign_int8(network: Decoder, source: Source, *, dtype: torch.dtype, device: torch.device) -> None:
    """As Decoder.assign, with the matrices in int8; one of them at a time stands in memory as it was.

    Raises UsageError (dtype) for a CPU and anything but bf16: its int8 kernel is fast in no other.
    """
    if device.type == "cpu" and dtype != torch.bfloat16:
        raise UsageError("dtype", "--quant int8 computes in bf16 on a CPU", help="leave --dtype out, or give bf16")
    for t in network.model.tensors():
        if t.role in ("vision", "projector"):
            continue
        value = source.tensor(t.name)
        path = t.name.removesuffix(".weight")
        if t.i >= 0 and in_int8(t.name, t.shape, t.role):
            above, _, name = path.rpartition(".")
            old: Any = network.get_submodule(path)
            assert isinstance(old, Linear)
            setattr(network.get_submodule(above), name, Int8Linear(value.to(device), old.bias, dtype))
        else:
            network.put(t.name, value.to(device=device, dtype=dtype if t.kind == "param" else torch.float32))
    network.dtype = dtype
    network.forget()


class Divergence(NamedTuple):
    """KL(before || int8) in nats over `positions` next-token distributions, and how often both rank the same first."""

    positions: int
    mean_kl: float
    max_kl: float
    top1_agreement: float


@torch.inference_mode()
def divergence(network: Decoder, source: Source, ids: Sequence[int], *, most: int = 256) -> Divergence:
    """What int8 changes on the first `most` tokens of `ids`, against the same weights in the network's dtype.

    The other network's weights are mapped, not copied, where the dtype is that of the file.
    """
    seen = torch.tensor([list(ids[:most])], device=network.device)
    after = network(seen)[0].log_softmax(-1)
    plain = build(network.model, dtype=network.dtype)
    plain.assign(source, dtype=network.dtype, device=network.device)
    before = plain(seen)[0].log_softmax(-1)
    kl = (before.exp() * (before - after)).sum(-1).clamp_min(0)
    same = (before.argmax(-1) == after.argmax(-1)).float().mean()
    return Divergence(len(kl), float(kl.mean()), float(kl.max()), float(same))
