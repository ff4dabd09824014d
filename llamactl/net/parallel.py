"""One rank's network: the decoder of its share of a model, summed over ranks after every branch.

Its logits are those of its own part of the vocabulary; tokens are chosen from all parts by net.parallel_sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llamactl.net.attention import SelfAttention
from llamactl.net.blocks import RowNorm
from llamactl.net.cache import Cache
from llamactl.net.decoder import Block, Decoder, Source, Table, build
from llamactl.net.group import Group
from llamactl.net.parallel_sample import SplitSampler
from llamactl.net.positions import alibi_slopes
from llamactl.net.sample import Sampling
from llamactl.net.shards import Heads, Slice, heads, shard, spread
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import Attention, Norm


class Split:
    """The share of `model` that this process of `group` computes. model: the whole one; share: what is held here.

    Raises UsageError (tp-range) and what build raises.
    """

    def __init__(self, model: Model, group: Group) -> None:
        self.model, self.group = model, group
        self._shard = shard(model, group.rank, group.world)
        self.share = self._shard.model
        self.decoder = build(self.share)
        self.decoder.embed = SplitTable(self.decoder.embed, group, model.embed.vocab)
        for layer, block in zip(model.layers, self.decoder.layers, strict=True):
            assert isinstance(block, Block)
            join_block(layer, block, group)

    def __call__(self, ids: Tensor, cache: Cache | None = None, *, last: bool = False) -> Tensor:
        """Logits of this rank's part of the vocabulary."""
        out: Tensor = self.decoder(ids, cache, last=last)
        return out

    def assign(self, weights: Source, *, dtype: torch.dtype | None = None, device: Any = None) -> None:
        """Take this rank's slices of the whole model's weights, and nothing else."""
        self.decoder.assign(self.sliced(weights), dtype=dtype, device=device)

    def sliced(self, weights: Source) -> SlicedWeights:
        """The whole model's weights as this rank's."""
        return SlicedWeights(weights, self._shard.slices)

    def sampler(self, sampling: Sampling) -> SplitSampler:
        """What chooses tokens from the logits of all ranks."""
        whole = self.model.embed.vocab if self.model.tied else self.model.head.vocab
        return SplitSampler(sampling, self.group, *self._shard.vocab, whole)

    def nbytes(self) -> int:
        """Bytes of the weights held here."""
        held: Decoder = self.decoder
        return sum(t.nbytes for t in (*held.parameters(), *held.buffers()))


class SlicedWeights:
    """Weights cut for one rank: rows are views of the file where that holds the tensor, columns are copied together."""

    def __init__(self, weights: Source, slices: Any) -> None:
        self._weights = weights
        self._slices: dict[str, Slice] = dict(slices)

    def tensor(self, name: str) -> Tensor:
        whole, cut = self._slices[name]
        t = self._weights.tensor(whole)
        if cut is None:
            return t
        if cut.kind == "zeros":
            return torch.zeros_like(t)
        part = t[cut.start : cut.stop] if cut.kind == "rows" else t[:, cut.start : cut.stop]
        # A view keeps its whole: that is nothing for a mapped file, and all of it for what was computed for this call.
        alone = t.untyped_storage().nbytes() == t.nbytes
        scattered = t.is_contiguous() and not part.is_contiguous()
        return part.clone(memory_format=torch.contiguous_format) if alone or scattered else part


class SplitTable(Table):
    """A table of which each rank holds some rows: the others add zeros."""

    def __init__(self, table: Table, group: Group, rows: int) -> None:
        super().__init__(*table.weight.shape, dtype=table.weight.dtype, device=table.weight.device)
        self.group = group
        self.first = rows * group.rank // group.world

    def forward(self, at: Tensor) -> Tensor:
        local = at - self.first
        outside = (local < 0) | (local >= self.weight.shape[0])
        x = nn.functional.embedding(local.masked_fill(outside, 0), self.weight)
        return self.group.sum(x.masked_fill(outside[..., None], 0))


class SplitNorm(RowNorm):
    """A norm over heads that lie on several ranks, which agree on its mean. counts: whether this rank's are told."""

    def __init__(self, part: Norm, group: Group, width: int, counts: bool) -> None:
        super().__init__(part, dtype=torch.float32)
        self.group, self.width, self.counts = group, width, counts

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self.part.kind != "rms":
            wide = wide - self._mean(wide)
        scaled = wide * torch.rsqrt(self._mean(wide.square()) + self.part.eps)
        gain = self._gain()
        scaled = scaled if gain is None else scaled * gain
        return (scaled if self.bias is None else scaled + self.bias.float()).to(x.dtype)

    def _mean(self, x: Tensor) -> Tensor:
        total = x.sum(-1, keepdim=True)
        return self.group.sum(total if self.counts else torch.zeros_like(total)) / self.width


def join_block(layer: Layer, block: Block, group: Group) -> None:
    """Make the block of a rank's share of `layer` one of the group's."""
    block.reduce = group.sum
    part, attn = layer.attn, block.attn
    if not isinstance(part, Attention) or not isinstance(attn, SelfAttention):
        return
    mine = heads(part.n_heads, part.n_kv_heads, group.rank, group.world)
    if part.alibi:
        attn.slopes = torch.tensor(alibi_slopes(part.n_heads)[mine.first : mine.stop])
    attn.q_norm = _joined(attn.q_norm, part.q_norm, part.n_heads, part, mine._replace(owns=True), group)
    attn.k_norm = _joined(attn.k_norm, part.k_norm, part.n_kv_heads, part, mine, group)


def _joined(norm: RowNorm | None, whole: Norm | None, n: int, part: Attention, mine: Heads, group: Group
            ) -> RowNorm | None:
    if norm is None or whole is None or not spread(whole, n, part.head_dim):
        return norm
    return SplitNorm(norm.part, group, whole.dim, mine.owns)
