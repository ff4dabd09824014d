"""Which CPU kernel multiplies: the same sums, at very different speeds.

Measured on an AVX-512 server CPU (EPYC), one thread, PyTorch 2.13, SmolLM2's shapes, GB/s of weights read at one row:

    fp32: F.linear (MKL) 16   oneDNN 22-26         bf16: F.linear (oneDNN) 15   mv 7   oneDNN with packed weights 27-36

and at 512 rows of fp32 oneDNN takes a third of MKL's time. So fp32 goes to oneDNN, whatever the rows; bf16 to F.linear
where the CPU multiplies bf16 itself, else one row to `mv`, which widens as it reads. The choice depends on the machine
alone, never on a timing, so that the same text gives the same bits each time.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

_plain = False


@contextmanager
def plain() -> Iterator[None]:
    """Inside, a network that is built and run here takes another honest way: what differs is arithmetic alone.

    On the CPU products go by F.linear; attention goes by matrices, latent attention by its other form; rotations come
    of angles in fp64, of which fp32 keeps less the further a token stands.
    """
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


def plainly() -> bool:
    """Whether the other kernels are asked for."""
    return _plain


@cache
def onednn() -> bool:
    """Whether oneDNN's linear is there, on a CPU that it is made for."""
    there = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return (there and hasattr(torch.ops.mkldnn, "_linear_pointwise")
            and platform.machine().lower() in ("x86_64", "amd64"))


@cache
def bf16_in_hardware() -> bool:
    """Whether the CPU multiplies bf16 without widening it first."""
    return bool(onednn() and torch.ops.mkldnn._is_mkldnn_bf16_supported() and torch.cpu._is_avx512_bf16_supported())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, x (..., in), W (out, in)."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    if _plain and not weight.is_mkldnn:
        return _plain_linear(x, weight, bias)
    if x.dtype == torch.float32:
        return _onednn(x, weight, bias) if onednn() else F.linear(x, weight, bias)
    if weight.is_mkldnn:
        return _onednn(x, weight, bias)
    if x.numel() == x.shape[-1] and x.dtype == torch.bfloat16 and not bf16_in_hardware():
        row = x.reshape(-1)
        y = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
        return y.view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


def _plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """By F.linear; where that is the way anyhow, in two halves of the sum."""
    if onednn() and x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    half = weight.shape[1] // 2
    return F.linear(x[..., :half], weight[:, :half]) + F.linear(x[..., half:], weight[:, half:], bias)


def packed(weight: Tensor) -> Tensor:
    """The weight in the order that oneDNN reads fastest, a private copy; itself where there is no such order."""
    if not onednn() or weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not bf16_in_hardware():
        return weight
    out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return out


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, block: int = 128) -> Tensor:
    """softmax(q k^T scale) v, each query on the keys up to its own: (B, H, T, D), (B, K, S, D) -> (B, T, H x D).

    In blocks of queries, one matrix product for all heads of a group; nothing right of the diagonal block is computed.
    PyTorch's fused kernel takes 1.7 times as long in fp32 and 2.7 times in bf16 (2,048 tokens, as above).
    """
    b, heads, t, d = q.shape
    groups, start = heads // k.shape[1], k.shape[2] - t
    k, v = k.contiguous(), v.contiguous()  # of rows that lie apart, oneDNN takes fifty times as long
    out = torch.empty(b, t, heads, d, dtype=q.dtype)
    later = torch.ones(block, block, dtype=torch.bool).triu_(1)
    q = (q * scale).view(b, k.shape[1], groups, t, d)
    for begin in range(0, t, block):
        n = min(block, t - begin)
        seen = start + begin + n
        for i in range(b):
            for j in range(k.shape[1]):
                rows = q[i, j, :, begin : begin + n].reshape(groups * n, d)
                scores = linear(rows, k[i, j, :seen], None).view(groups, n, seen)
                scores[:, :, seen - n :].masked_fill_(later[:n, :n], float("-inf"))
                share = torch.softmax(scores, -1).view(groups * n, seen)
                y = linear(share, v[i, j, :seen].t(), None).view(groups, n, d)
                out[i, begin : begin + n, j * groups : (j + 1) * groups] = y.transpose(0, 1)
    return out.flatten(2)
