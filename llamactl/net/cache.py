"""Keys and values of the tokens seen, allocated once for the whole text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llamactl.spec.latent import LatentAttention
from llamactl.spec.model import Layer, Model


class LayerCache:
    """One layer's k (B, n_kv, S, D) and v. A latent cache has one head; its v is empty."""

    __slots__ = ("k", "v")

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k = k
        self.v = v

    def put(self, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write new tokens from `start` on; all k and v up to their end, as views."""
        end = start + k.shape[2]
        self.k[:, :, start:end] = k
        self.v[:, :, start:end] = v
        return self.k[:, :, :end], self.v[:, :, :end]


class Cache:
    """Room for `length` tokens of `batch` sequences in every layer. `filled` tokens are held so far.

    length also decides the frequencies of rotations that depend on it: they are those of the whole text from the first
    token on, so that a text gives the same logits however it is cut.
    """

    def __init__(self, model: Model, batch: int, length: int, *, dtype: torch.dtype, device: Any = "cpu") -> None:
        self.batch, self.length = batch, length
        self.dtype, self.device = dtype, device
        self.filled = 0
        self.pad: Tensor | None = None
        self.layers = [_layer(layer, batch, length, dtype, device) for layer in model.layers]

    @property
    def nbytes(self) -> int:
        return sum(x.k.nbytes + x.v.nbytes for x in self.layers if x is not None)

    def rewind(self, filled: int = 0) -> None:
        """Forget all but the first `filled` tokens."""
        self.filled = min(filled, self.filled)


def _layer(layer: Layer, batch: int, length: int, dtype: torch.dtype, device: Any) -> LayerCache | None:
    if layer.attn is None:
        return None
    c = layer.attn.cache()
    k_dim, v_dim = (c.k_dim, c.v_dim)
    if isinstance(layer.attn, LatentAttention):
        v_dim = 0
    # A token's heads lie side by side, so that any stretch of tokens is one piece of memory (net/aot.py).
    k, v = (torch.zeros(batch, length, c.heads, dim, dtype=dtype, device=device) for dim in (k_dim, v_dim))
    return LayerCache(k.transpose(1, 2), v.transpose(1, 2))
