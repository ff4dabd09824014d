"""A Model as a torch module: built from its parts alone, so that whatever is described that way runs.

Its parameters are `model.tensors()`, name by name. Logits come back in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from llamactl.errors import InputRefused
from llamactl.net.attention import SelfAttention, Step
from llamactl.net.blocks import FeedForward, RowNorm, empty, not_runnable
from llamactl.net.cache import Cache, LayerCache
from llamactl.net.kernels import linear
from llamactl.net.positions import RopeTable, Turn, sinusoids
from llamactl.spec.latent import LatentAttention
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import MLP, Attention, Embedding, Head, LearnedPositions, SinusoidalPositions
from llamactl.spec.rope import Rope


class Source(Protocol):
    """Where weights come from: canonical name -> tensor in canonical orientation."""

    def tensor(self, name: str) -> Tensor: ...


class Table(nn.Module):
    """Rows looked up by number. (nn.Embedding would initialise itself, and import half of torch to do so on meta.)"""

    def __init__(self, rows: int, dim: int, *, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.weight = empty(rows, dim, dtype=dtype, device=device)

    def forward(self, at: Tensor) -> Tensor:
        return nn.functional.embedding(at, self.weight)


class Projection(nn.Module):
    """The head: logits of hidden rows. Tied, it is handed the embedding's rows."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, part: Head, *, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.part = part
        self.weight = None if part.tied else empty(part.vocab, part.hidden, dtype=dtype, device=device)
        self.bias = empty(part.vocab, dtype=dtype, device=device) if part.bias else None

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        weight = table if self.weight is None else self.weight
        if self.part.unit_rows:
            weight = nn.functional.normalize(weight, dim=-1)
        out = linear(x, weight, self.bias)
        if self.part.scale is not None:
            out = out * self.part.scale
        out = out.float()
        if self.part.softcap is not None:
            out = torch.tanh(out / self.part.softcap) * self.part.softcap
        return out


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind its norms, added to the stream one after the other or both.

    reduce: sums a branch over devices where each holds a slice of it.
    """

    def __init__(self, layer: Layer, *, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        if layer.state is not None:
            raise not_runnable("state-space and linear-attention layers")
        if layer.extra:
            raise not_runnable(f"the tensor {layer.extra[0].path!r} of its layers")
        self.layer = layer
        self.reduce: Callable[[Tensor], Tensor] | None = None
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        self.attn_norm = RowNorm(layer.attn_norm, **made) if layer.attn_norm else None
        self.attn = _attention(layer, made)
        self.attn_post_norm = RowNorm(layer.attn_post_norm, **made) if layer.attn_post_norm else None
        self.mlp_norm = RowNorm(layer.mlp_norm, **made) if layer.mlp_norm else None
        self.mlp = _feed_forward(layer, made)
        self.mlp_post_norm = RowNorm(layer.mlp_post_norm, **made) if layer.mlp_post_norm else None

    def forward(self, x: Tensor, step: Step, cache: LayerCache | None = None) -> Tensor:
        read = x if self.attn_norm is None else self.attn_norm(x)
        if self.layer.parallel and self.attn is not None and self.mlp is not None:
            before = read if self.mlp_norm is None else self.mlp_norm(x)
            a = self._branch(self.attn(read, step, cache), self.attn_post_norm)
            return x + a + self._branch(self.mlp(before), self.mlp_post_norm)
        if self.attn is not None:
            x = self._add(x, self.attn(read, step, cache), self.attn_post_norm)
        if self.mlp is not None:
            read = x if self.mlp_norm is None else self.mlp_norm(x)
            x = self._add(x, self.mlp(read), self.mlp_post_norm)
        return x

    def _add(self, x: Tensor, y: Tensor, norm: RowNorm | None) -> Tensor:
        if self.layer.post_residual:
            total = x + self._branch(y, None)
            return total if norm is None else norm(total)
        return x + self._branch(y, norm)

    def _branch(self, y: Tensor, norm: RowNorm | None) -> Tensor:
        if self.reduce is not None:
            y = self.reduce(y)
        if norm is not None:
            y = norm(y)
        return y if self.layer.residual_scale is None else y * self.layer.residual_scale


class Decoder(nn.Module):
    """Token ids -> logits. `model` is what it was built from; dtype is that of its weights and of the stream."""

    def __init__(self, model: Model, *, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        if beside := [x.path for x in model.extra if x.kind == "param"]:
            raise not_runnable(f"the tensor {beside[0]!r}")
        self.model, self.dtype = model, dtype
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        self.embed = Table(model.embed.vocab, model.embed.dim, **made)
        self.pos_embed = Table(model.positions.rows, model.positions.dim, **made) if isinstance(
            model.positions, LearnedPositions) else None
        self.embed_norm = RowNorm(model.embed_norm, **made) if model.embed_norm else None
        self.layers = nn.ModuleList(block(layer, **made) for layer in model.layers)
        self.norm = RowNorm(model.norm, **made) if model.norm else None
        self.head = Projection(model.head, **made)
        self.ropes = dict.fromkeys(rope for x in model.layers for rope in _ropes(x) if rope is not None)
        self.exact_to = exact_to(model)
        self._tables: dict[tuple[Rope, int | None], RopeTable] = {}

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def assign(self, source: Source, *, dtype: torch.dtype | None = None, device: Any = None) -> None:
        """Take every tensor from `source`: as it lies there (memory-mapped, no copy) unless dtype or device differ."""
        want = dtype or self.dtype
        unused = {x.path for x in self.model.extra}  # buffers that are stored and not read
        for t in self.model.tensors():
            if t.role in ("vision", "projector") or t.name in unused:
                continue
            own = want if t.kind == "param" else torch.float32  # a router's correction decides between close experts
            self.put(t.name, source.tensor(t.name).to(device=device, dtype=own))
        self.dtype = want
        self.forget()

    def put(self, name: str, value: Tensor) -> None:
        """One parameter (or buffer) replaced by `value`, which is not copied. Raises InputRefused for another shape."""
        path, _, leaf = name.rpartition(".")
        module = self.get_submodule(path)
        old = getattr(module, leaf)
        if old.shape != value.shape:
            raise InputRefused("tensor-shape", f"{name} is {tuple(value.shape)}, not {tuple(old.shape)}")
        if leaf in module._buffers:
            module._buffers[leaf] = value
        else:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)

    def forget(self) -> None:
        """Drop what was computed from weights or for a device, after either changed."""
        self._tables.clear()
        for module in self.modules():
            if isinstance(module, RowNorm):
                module.forget()

    def forward(self, ids: Tensor, cache: Cache | None = None, *, pad: Tensor | None = None, last: bool = False,
                length: int | None = None) -> Tensor:
        """(B, T) ids -> (B, T, vocab) logits in fp32; with last, of the last position alone.

        cache: continue after what it holds, and keep these tokens too. pad: (B,), how many of each row's first tokens
        are left padding (given with the first tokens; the cache remembers). length: of the whole text where it is
        longer than this call's, for rotations that depend on it.
        """
        start = cache.filled if cache is not None else 0
        step = self.step(ids.shape[1], start, cache, pad, length)
        x = self.stream(ids, step, cache)
        if cache is not None:
            cache.filled = step.end
        return self.logits(x[:, -1:] if last else x)

    def stream(self, ids: Tensor, step: Step, cache: Cache | None = None) -> Tensor:
        """(B, T, hidden) after the last block."""
        x = self.embedded(ids, step)
        for i, block in enumerate(self.layers):
            x = block(x, step, None if cache is None else cache.layers[i])
        return x

    def step(self, tokens: int, start: int, cache: Cache | None = None, pad: Tensor | None = None,
             length: int | None = None) -> Step:
        """Where the next `tokens` stand. Raises InputRefused past the end of the positions or the cache."""
        end = start + tokens
        if self.exact_to is not None and end > self.exact_to:
            raise InputRefused("too-long", f"{end:,} tokens; past {self.exact_to:,} this model's attention computes "
                               "what is not described here", help="give a shorter text")
        table = self.model.positions
        if isinstance(table, LearnedPositions) and end > table.rows - table.offset:
            raise InputRefused("too-long", f"{end:,} tokens, but the position table ends at "
                               f"{table.rows - table.offset:,}", help="give a shorter text")
        if cache is not None:
            if end > cache.length:
                raise InputRefused("too-long", f"{end:,} tokens, but the cache has room for {cache.length:,}")
            if pad is not None:
                cache.pad = pad
            pad = cache.pad
            length = cache.length
        if pad is not None and not bool(pad.any()):
            pad = None
        turns = {rope: self.turn(rope, start, end, pad, length or end) for rope in self.ropes}
        return Step(start, tokens, device=self.device, dtype=self.dtype, pad=pad, turns=turns)

    def turn(self, rope: Rope, start: int, end: int, pad: Tensor | None, length: int) -> Turn:
        """cos and sin of positions start .. end - 1; length: of the whole text."""
        changes = rope.scaling is not None and rope.scaling.kind in ("dynamic", "longrope")
        key = (rope, length if changes else None)
        if key not in self._tables:
            self._tables[key] = RopeTable(rope, self.model, dtype=self.dtype, device=self.device, length=length)
        table = self._tables[key].upto(end)
        if pad is None:
            return Turn(table.cos[start:end], table.sin[start:end])
        at = positions(start, end, pad)
        return Turn(table.cos[at][:, None], table.sin[at][:, None])

    def embedded(self, ids: Tensor, step: Step) -> Tensor:
        """The stream before the first block."""
        part: Embedding = self.model.embed
        x = self.embed(ids)
        if part.scale is not None:
            x = x * torch.tensor(part.scale, dtype=x.dtype)  # rounded to the stream's dtype, as it was in training
        if self.model.positions is not None:
            at = step.places() if step.pad is None else positions(step.start, step.end, step.pad)
            if isinstance(self.model.positions, SinusoidalPositions):
                x = x + sinusoids(at, self.model.positions.dim).to(x.dtype)
            elif self.pos_embed is not None:
                x = x + self.pos_embed(at + self.model.positions.offset)
        return x if self.embed_norm is None else self.embed_norm(x)  # type: ignore[no-any-return]

    def logits(self, x: Tensor) -> Tensor:
        """The stream after the last block -> fp32 logits."""
        if self.norm is not None:
            x = self.norm(x)
        return self.head(x, self.embed.weight)  # type: ignore[no-any-return]


def positions(start: int, end: int, pad: Tensor | None, device: Any = None) -> Tensor:
    """(T,) or with padding (B, T): a row's first real token is at 0, and so is what stands before it."""
    at = torch.arange(start, end, device=device if pad is None else pad.device)
    return at if pad is None else (at[None] - pad[:, None]).clamp_min(0)


def exact_to(model: Model) -> int | None:
    """Tokens up to which every layer's attention is described; None where that has no end."""
    ends = [x.attn.exact_to for x in model.layers if isinstance(x.attn, Attention) and x.attn.exact_to is not None]
    return min(ends, default=None)


def build(model: Model, *, dtype: torch.dtype = torch.float32, device: Any = "meta") -> Decoder:
    """The network of `model` with empty weights, on `meta` by default. Raises InputRefused not-runnable."""
    return Decoder(model, dtype=dtype, device=device).eval()


def block(layer: Layer, *, dtype: torch.dtype, device: Any) -> Block:
    """The module of one layer."""
    if layer.slips is None:
        return Block(layer, dtype=dtype, device=device)
    from llamactl.net.slips import SlippedBlock

    return SlippedBlock(layer, dtype=dtype, device=device)


def _ropes(layer: Layer) -> tuple[Rope | None, ...]:
    own = layer.attn.rope if layer.attn is not None else None
    return (own, *layer.slips.ropes(own)) if layer.slips is not None else (own,)


def _attention(layer: Layer, made: dict[str, Any]) -> nn.Module | None:
    if layer.attn is None:
        return None
    if isinstance(layer.attn, LatentAttention):
        from llamactl.net.latent import Latent

        return Latent(layer.attn, **made)
    assert isinstance(layer.attn, Attention)
    return SelfAttention(layer.attn, **made)


def _feed_forward(layer: Layer, made: dict[str, Any]) -> nn.Module | None:
    if layer.mlp is None:
        return None
    if isinstance(layer.mlp, MLP):
        return FeedForward(layer.mlp, **made)
    from llamactl.net.moe import MoEBlock

    return MoEBlock(layer.mlp, **made)
