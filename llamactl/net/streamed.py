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
from llamactl.net.decoder import Block, Decoder, Projection, Source, build
from llamactl.spec.model import Layer, Model

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
    run = Streamed(model, source, ids, dtype=dtype, length=length)
    x = run.embedded()
    if hidden is not None:
        hidden(0, x)
    for i in range(len(model.layers)):
        x = run.layer(i, x)
        if hidden is not None:
            hidden(i + 1, x)
        if progress is not None:
            progress(i + 1, len(model.layers) + 1)
    out = run.head(x)
    if progress is not None:
        progress(len(model.layers) + 1, len(model.layers) + 1)
    return out


class Streamed:
    """One text through a network, step by step; between steps nothing but the stream is kept.

    ids: (B, T). Errors: as `logits`. The stream that is given to `layer` and `head` may have another B.
    """

    def __init__(self, model: Model, source: Source, ids: Tensor, *, dtype: torch.dtype = torch.float32,
                 length: int | None = None, shell: Streamed | None = None) -> None:
        """shell: of the same parts, dtype and tokens, whose modules serve this one too; they are slow to make."""
        if ids.dim() != 2 or not ids.numel():
            raise ValueError(f"ids are {tuple(ids.shape)}, not (batch, tokens)")
        outside = ids[(ids < 0) | (ids >= model.embed.vocab)]
        if len(outside):
            raise InputRefused("token-range", f"token {int(outside[0])} is outside this model's vocabulary, "
                               f"0..{model.embed.vocab - 1:,}", help="the tokenizer may belong to another model")
        self.model, self.source, self.ids, self.dtype = model, source, ids, dtype
        self.net: Decoder
        self.step: Step
        self._readings: list[Reading]
        self._of: dict[Layer, int]
        if shell is not None:
            self.net, self._readings, self._of, self.step = shell.net, shell._readings, shell._of, shell.step
            return
        self.net = build(replace(model, layers=tuple(layer for layer, _ in model.distinct_layers())), dtype=dtype)
        self._readings = [Reading(self.source, block, dtype) for block in self.net.layers]
        self._of = {layer: n for n, layer in enumerate(self.net.model.layers)}
        self.net.embed.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)  # tells the device
        self.step = self.net.step(self.ids.shape[1], 0, length=length)

    def embedded(self) -> Tensor:
        """(B, T, hidden) before the first layer, from the rows of `ids` alone."""
        embed = self.model.embed
        rows, at = self.ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        table = stored(self.source, "embed.weight", (embed.vocab, embed.dim))
        self.net.embed.weight = nn.Parameter(table[rows].to(self.dtype), requires_grad=False)
        for name, part in (("pos_embed.", self.net.pos_embed), ("embed_norm.", self.net.embed_norm)):
            if part is not None:
                Reading(self.source, part, self.dtype, name)
        return self.net.embedded(at, self.step)

    def layer(self, i: int, x: Tensor) -> Tensor:
        """(B, T, hidden) -> the same after layer i."""
        return self.block(i)(x, self.step)  # type: ignore[no-any-return]

    def block(self, i: int) -> Block:
        """The module of layer i, reading its weights; good until another layer is asked for."""
        n = self._of[self.model.layers[i]]
        self._readings[n].source, self._readings[n].prefix = self.source, f"layers.{i}."
        block: Any = self.net.layers[n]
        for part in block.modules():
            if isinstance(part, RowNorm):
                part.forget()
        return block  # type: ignore[no-any-return]

    def normed(self, x: Tensor) -> Tensor:
        """The stream after the last norm."""
        if self.net.norm is None:
            return x
        Reading(self.source, self.net.norm, self.dtype, "norm.")
        self.net.norm.forget()
        return self.net.norm(x)  # type: ignore[no-any-return]

    def head(self, x: Tensor, columns: Tensor | None = None) -> Tensor:
        """(..., vocab) fp32 logits of the stream after the last layer; of some columns alone, where given."""
        return _head(self.model, self.source, self.normed(x), self.dtype, columns)


def stored(source: Source, name: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor `name` as the source gives it. Raises InputRefused tensor-shape for another shape."""
    value = source.tensor(name)
    if value.shape != shape:
        raise InputRefused("tensor-shape", f"{name} is {tuple(value.shape)}, not {tuple(shape)}")
    return value


def _head(model: Model, source: Source, x: Tensor, dtype: torch.dtype, columns: Tensor | None) -> Tensor:
    """(B, T, vocab) fp32 logits of the normed stream, HEAD_ROWS columns of them at a time; or those of `columns`."""
    part = model.head
    weight = stored(source, "embed.weight" if part.tied else "head.weight", (part.vocab, part.hidden))
    bias = stored(source, "head.bias", (part.vocab,)) if part.bias else None
    head = Projection(replace(part, tied=True), dtype=dtype, device="meta")  # handed its rows, as a tied one is
    if columns is not None:
        weight, bias = weight[columns], None if bias is None else bias[columns]
    out = torch.empty(*x.shape[:-1], len(weight))
    for start in range(0, len(weight), HEAD_ROWS):
        rows = slice(start, start + HEAD_ROWS)
        if bias is not None:
            head.bias = nn.Parameter(bias[rows].to(dtype), requires_grad=False)
        out[..., rows] = head(x, weight[rows].to(dtype))
    return out
