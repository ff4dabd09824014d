"""Logits of a model that may be far larger than memory: a layer at a time, and of a layer a matrix at a time.

The network is net.decoder's own, one block for each different layer. Its parameters are read from the source each time
they are looked up, widened to the dtype that computes, and kept by nobody. Widening is exact, so that the logits are
those of the whole network bit for bit; the head alone is multiplied in blocks of rows, where the CPU's kernel sums a
row in the same order whatever the block (oneDNN's does for blocks of this size).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from llamactl.errors import InputRefused
from llamactl.net.attention import Step
from llamactl.net.blocks import RowNorm
from llamactl.net.decoder import Decoder, Projection, Source, build
from llamactl.spec.model import Model

HEAD_ROWS = 8192  # of the vocabulary, multiplied at once


class Lookup(dict[str, Any]):
    """What a module holds, by name: each entry is read when it is looked up, and None stays None."""

    def __init__(self, reading: Reading, path: str, held: Mapping[str, Tensor | None], dtype: torch.dtype) -> None:
        super().__init__(held)
        self.reading, self.path, self.dtype = reading, path, dtype

    def __getitem__(self, leaf: str) -> Tensor | None:
        empty = super().__getitem__(leaf)
        if empty is None:
            return None
        path = f"{self.path}.{leaf}" if self.path else leaf
        return stored(self.reading.source, self.reading.prefix + path, empty.shape).to(self.dtype)


class Reading:
    """Makes `module` read its weights from `source` under `prefix` + their path in it; the prefix may change."""

    def __init__(self, source: Source, module: nn.Module, dtype: torch.dtype, prefix: str = "") -> None:
        self.source, self.prefix = source, prefix
        for path, part in module.named_modules():
            made: Any = part  # nn.Module finds both by name in these mappings, whatever they are
            made._parameters = Lookup(self, path, part._parameters, dtype)
            made._buffers = Lookup(self, path, part._buffers, torch.float32)  # as in Decoder.assign


@torch.no_grad()
def logits(model: Model, source: Source, ids: Tensor, *, dtype: torch.dtype = torch.float32, length: int | None = None,
           progress: Callable[[int, int], None] | None = None,
           hidden: Callable[[int, Tensor], None] | None = None) -> Tensor:
    """(B, T) ids -> (B, T, vocab) logits in fp32, as Decoder.forward gives them with weights and stream in `dtype`.

    Beside the result and what T tokens take, one matrix in `dtype` stands in memory, or HEAD_ROWS rows of the head; of
    the embedding the rows of `ids` alone, and of experts those that a token chose. A source that gives no views adds
    its own copy. length: as in Decoder.forward. progress: told (steps done, steps) after each layer and the head.
    hidden: told (n, (B, T, hidden) after n layers), n from 0 (the embedded tokens) on; not to be written to.
    Errors (InputRefused): not-runnable, token-range, too-long, tensor-shape; ValueError where ids are not (B, T > 0).
    """
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(f"ids are {tuple(ids.shape)}, not (batch, tokens)")
    outside = ids[(ids < 0) | (ids >= model.embed.vocab)]
    if len(outside):
        raise InputRefused("token-range", f"token {int(outside[0])} is outside this model's vocabulary, "
                           f"0..{model.embed.vocab - 1:,}", help="the tokenizer may belong to another model")
    net = build(replace(model, layers=tuple(layer for layer, _ in model.distinct_layers())), dtype=dtype)
    readings = [Reading(source, block, dtype) for block in net.layers]
    of = {layer: n for n, layer in enumerate(net.model.layers)}
    step, x = _embedded(net, source, ids, length)
    if hidden is not None:
        hidden(0, x)
    for i, layer in enumerate(model.layers):
        block = net.layers[of[layer]]
        readings[of[layer]].prefix = f"layers.{i}."
        for part in block.modules():
            if isinstance(part, RowNorm):
                part.forget()
        x = block(x, step)
        if hidden is not None:
            hidden(i + 1, x)
        if progress is not None:
            progress(i + 1, len(model.layers) + 1)
    if net.norm is not None:
        Reading(source, net.norm, dtype, "norm.")
        x = net.norm(x)
    out = _head(model, source, x, dtype)
    if progress is not None:
        progress(len(model.layers) + 1, len(model.layers) + 1)
    return out


def stored(source: Source, name: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor `name` as the source gives it. Raises InputRefused tensor-shape for another shape."""
    value = source.tensor(name)
    if value.shape != shape:
        raise InputRefused("tensor-shape", f"{name} is {tuple(value.shape)}, not {tuple(shape)}")
    return value


def _embedded(net: Decoder, source: Source, ids: Tensor, length: int | None) -> tuple[Step, Tensor]:
    """The step of all layers, and the stream before the first one, from a table that holds the rows of `ids` alone."""
    model, dtype = net.model, net.dtype
    rows, at = ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    table = stored(source, "embed.weight", (model.embed.vocab, model.embed.dim))
    net.embed.weight = nn.Parameter(table[rows].to(dtype), requires_grad=False)
    step = net.step(ids.shape[1], 0, length=length)
    for name, part in (("pos_embed.", net.pos_embed), ("embed_norm.", net.embed_norm)):
        if part is not None:
            Reading(source, part, dtype, name)
    return step, net.embedded(at, step)


def _head(model: Model, source: Source, x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T, vocab) fp32 logits of the normed stream, HEAD_ROWS columns of them at a time."""
    part = model.head
    weight = stored(source, "embed.weight" if part.tied else "head.weight", (part.vocab, part.hidden))
    bias = stored(source, "head.bias", (part.vocab,)) if part.bias else None
    head = Projection(replace(part, tied=True), dtype=dtype, device="meta")  # handed its rows, as a tied one is
    out = torch.empty(*x.shape[:-1], part.vocab)
    for start in range(0, part.vocab, HEAD_ROWS):
        rows = slice(start, start + HEAD_ROWS)
        if bias is not None:
            head.bias = nn.Parameter(bias[rows].to(dtype), requires_grad=False)
        out[..., rows] = head(x, weight[rows].to(dtype))
    return out
