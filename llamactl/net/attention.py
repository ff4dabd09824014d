"""Softmax attention over grouped KV heads, by PyTorch's fused kernels where they fit and by plain matrices elsewhere.

shapes: B batch, T new tokens, S tokens seen, H query heads, K KV heads, G = H / K, D head_dim
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from llamactl.net import kernels
from llamactl.net.blocks import Linear, RowNorm, empty, not_runnable
from llamactl.net.cache import LayerCache
from llamactl.net.positions import Turn, alibi_slopes, rotate
from llamactl.spec.parts import Attention
from llamactl.spec.rope import Rope


class Step:
    """What all layers of one forward pass share: where its T tokens stand, their rotations, and which keys they see.

    start: tokens cached before. pad: (B,), left padding of each row, whose keys nobody sees. Masks are made once for
    each window and kept. apart: the new token's k and v are kept out of the cache (net/aot.py).
    """

    apart = False

    def __init__(self, start: int, length: int, *, device: Any, dtype: torch.dtype, pad: Tensor | None = None,
                 turns: Mapping[Rope, Turn] | None = None) -> None:
        self.start, self.length, self.end = start, length, start + length
        self.device, self.dtype, self.pad = device, dtype, pad
        self.turns = dict(turns or {})
        self._masks: dict[Any, Tensor | None] = {}

    def first_key(self, part: Attention) -> int:
        """The first key that any of the new tokens sees."""
        if part.window is None:
            return 0
        if part.window_kind == "chunked" and self.pad is None:
            return self.start // part.window * part.window
        return max(0, self.start - part.window + 1)

    def keep(self, cache: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' k and v; all up to their end."""
        return cache.put(k, v, self.start)

    def places(self) -> Tensor:
        """Where the new tokens stand in the cache, (T,)."""
        return torch.arange(self.start, self.end, device=self.device)

    def plain(self, part: Attention) -> bool:
        """Whether a causal mask from the first token on says it all."""
        return self.start == 0 and self.pad is None and (part.window is None or part.window >= self.length)

    def causal(self, part: Attention) -> bool:
        """Whether each new token sees every key up to its own."""
        return self.pad is None and (part.window is None or part.window >= self.end)

    def mask(self, part: Attention) -> Tensor | None:
        """(T, S') or (B, 1, T, S'): True where a token sees a key, keys from first_key on; None where it sees all."""
        key = (part.window, part.window_kind)
        if key not in self._masks:
            self._masks[key] = self._mask(part)
        return self._masks[key]

    def growth(self, beta: float, positions: int, first: int) -> Tensor:
        """1 + beta ln(1 + floor((m + first) / positions)) for each new position m: (T, 1) or (B, 1, T, 1)."""
        at = self.places().float()
        if self.pad is not None:
            at = (at - self.pad[:, None, None]).clamp_min(0)
        return 1 + beta * torch.log1p(torch.floor((at + first) / positions))[..., None]

    def _mask(self, part: Attention) -> Tensor | None:
        return None if self.length == 1 and self.pad is None else self.seen(part)

    def seen(self, part: Attention) -> Tensor:
        """(T, S') or (B, 1, T, S'): which keys, from first_key on, each new token sees."""
        q = self.places()[:, None]
        k = torch.arange(self.first_key(part), self.end, device=self.device)[None]
        seen = k <= q
        if part.window is not None and part.window_kind == "chunked":  # chunks are counted from a row's first token
            first = 0 if self.pad is None else self.pad[:, None, None, None]
            seen = seen & ((k - first) // part.window == (q - first) // part.window)
        elif part.window is not None:
            seen &= k > q - part.window
        if self.pad is None:
            return seen
        kept = seen & (k >= self.pad[:, None, None, None])
        return kept | (q == k)  # a padding token sees itself, for a row that sees nothing is NaN


class SelfAttention(nn.Module):
    """q, k, v, o around the scores; optional norms on q, k and v, rotation, ALiBi, soft cap, window, sinks, gate."""

    def __init__(self, part: Attention, *, dtype: torch.dtype, device: Any = "meta") -> None:
        super().__init__()
        for what, there in (("cross-attention", part.cross), ("attention that reads another layer's K and V",
                            part.shares_kv), ("block-sparse attention", part.sparse is not None),
                            ("a rotation of pairs of another width", part.rope is not None and part.rope.span)):
            if there:
                raise not_runnable(what)
        self.part = part
        q, kv = part.n_heads * part.head_dim, part.n_kv_heads * part.head_dim
        self.q = Linear(part.hidden, q, part.qkv_bias, dtype=dtype, device=device)
        self.k = Linear(part.hidden, kv, part.qkv_bias, dtype=dtype, device=device)
        self.v = None if part.v_from_k else Linear(part.hidden, kv, part.qkv_bias, dtype=dtype, device=device)
        self.o = Linear(q, part.hidden, part.o_bias, dtype=dtype, device=device)
        self.gate = Linear(part.hidden, q, part.qkv_bias, dtype=dtype, device=device) if part.gated else None
        self.q_norm = RowNorm(part.q_norm, dtype=dtype, device=device) if part.q_norm else None
        self.k_norm = RowNorm(part.k_norm, dtype=dtype, device=device) if part.k_norm else None
        self.v_norm = RowNorm(part.v_norm, dtype=dtype, device=device) if part.v_norm else None
        self.sinks = empty(part.n_heads, dtype=dtype, device=device) if part.sinks else None
        self.scale = part.usual_scale if part.scale is None else part.scale
        self.groups = part.n_heads // part.n_kv_heads
        self.slopes: Tensor | None = None
        self.joint: tuple[Tensor, Tensor | None] | None = None
        self.widths = [q, kv, kv]

    def forward(self, x: Tensor, step: Step, cache: LayerCache | None = None) -> Tensor:
        q, k, v = self.ready(x, step)
        if cache is not None:
            past, (k, v) = cache, step.keep(cache, k, v)
            if step.apart:
                y = self.attend_apart(q, k, v, past, step)
                return self._out(x, y)
        return self._out(x, self.attend(q, k, v, step))

    def ready(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, T, D), k and v (B, K, T, D), normed and rotated, as they meet in the scores."""
        part = self.part
        q, k, v = self._projected(x)
        if part.clip is not None:
            q, k, v = (t.clamp(-part.clip, part.clip) for t in (q, k, v))
        if not part.norm_after_rope:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        q, k, v = self._heads(q), self._heads(k), self._heads(v)
        if self.v_norm is not None:
            v = self.v_norm(v)
        q, k, v = self._turned(q, k, v, step)
        if part.q_growth is not None:
            q = q * step.growth(*part.q_growth).to(q.dtype)
        if part.norm_after_rope:
            q = q if self.q_norm is None else self.q_norm(q)
            k = k if self.k_norm is None else self.k_norm(k)
        return q, k, v

    def _turned(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """The heads with q and k rotated to their positions."""
        rope = self.part.rope
        if rope is None:
            return q, k, v
        turn = step.turns[rope]
        return rotate(q, turn, rope.pairs), rotate(k, turn, rope.pairs), v

    def _out(self, x: Tensor, y: Tensor) -> Tensor:
        if self.gate is not None:
            y = y * torch.sigmoid(self.gate(x))
        return self.o(y)  # type: ignore[no-any-return]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """softmax(q k^T scale) v over the keys each token sees: (B, H, T, D), (B, K, S, D) -> (B, T, H x D)."""
        part = self.part
        first = step.first_key(part)
        if first:
            k, v = k[:, :, first:], v[:, :, first:]
        if part.softcap is not None or part.sinks or kernels.plainly():
            y = self._by_matrices(q, k, v, step)
        elif part.alibi:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self._alibi(step, q), scale=self.scale,
                                               enable_gqa=self.groups > 1)
        elif step.length == 1:
            # One query: the G heads of a group stand as G rows over one K, so that nothing is repeated.
            rows = q.view(q.shape[0], part.n_kv_heads, self.groups, part.head_dim)
            y = F.scaled_dot_product_attention(rows, k, v, attn_mask=step.mask(part), scale=self.scale)
            return y.reshape(q.shape[0], 1, -1)
        elif step.causal(part) and kernels.onednn() and q.device.type == "cpu" and step.length >= 64:
            return kernels.causal_attention(q, k, v, self.scale)
        elif step.plain(part):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=self.groups > 1)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=step.mask(part), scale=self.scale,
                                               enable_gqa=self.groups > 1)
        return y.transpose(1, 2).flatten(2)

    def attend_apart(self, q: Tensor, k: Tensor, v: Tensor, past: LayerCache, step: Step) -> Tensor:
        """One token's attention over `past`, every key of which it sees, and its own k and v: (B, 1, H x D).

        By the fused kernel over both as one where it can; else two softmaxes that share their sum, in fp32. Nothing is
        written into the past.
        """
        part = self.part
        rows = q.view(q.shape[0], part.n_kv_heads, self.groups, part.head_dim)
        if part.softcap is None and not part.alibi and self.sinks is None:
            every = (torch.cat((past.k, k), 2), torch.cat((past.v, v), 2))
            return F.scaled_dot_product_attention(rows, *every, scale=self.scale).reshape(q.shape[0], 1, -1)
        before = (rows @ past.k.transpose(-1, -2)).float() * self.scale
        own = (rows * k).float().sum(-1, keepdim=True) * self.scale
        if part.softcap is not None:
            before, own = (torch.tanh(s / part.softcap) * part.softcap for s in (before, own))
        if part.alibi:
            slopes = torch.tensor(alibi_slopes(part.n_heads)).view(part.n_kv_heads, self.groups, 1)
            away = torch.arange(-past.k.shape[2], 0, device=q.device) * slopes
            before = before + (away * self.scale if part.alibi_scaled else away)
        top = torch.maximum(before.amax(-1, keepdim=True), own)
        if self.sinks is not None:
            sink = self.sinks.float().view(part.n_kv_heads, self.groups, 1)
            top = torch.maximum(top, sink)
        before, own = torch.exp(before - top), torch.exp(own - top)
        whole = before.sum(-1, keepdim=True) + own
        if self.sinks is not None:
            whole = whole + torch.exp(sink - top)
        y = (before / whole).to(v.dtype) @ past.v + (own / whole).to(v.dtype) * v
        return y.reshape(q.shape[0], 1, -1)

    def _by_matrices(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """The same in plain steps, for scores that no fused kernel knows (soft caps, sinks) or beside one that does.

        Softmax in fp32.
        """
        part = self.part
        b, _, t, d = q.shape
        rows = q.reshape(b, part.n_kv_heads, self.groups * t, d)
        scores = (rows @ k.transpose(-1, -2) * self.scale).view(b, part.n_heads, t, -1)
        if part.softcap is not None:
            scores = torch.tanh(scores / part.softcap) * part.softcap
        if part.alibi:
            scores = scores + self._alibi(step, q)
        mask = step.mask(part)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        if self.sinks is not None:
            sink = self.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(b, -1, t, 1)
            share = torch.cat((scores, sink), -1).float().softmax(-1)[..., :-1]
        else:
            share = scores.float().softmax(-1)
        share = share.to(v.dtype).view(b, part.n_kv_heads, self.groups * t, -1)
        return (share @ v).view(b, part.n_heads, t, d)

    def _alibi(self, step: Step, q: Tensor) -> Tensor:
        """slope x (key - query) added to the scores, -inf where the key is not seen."""
        if self.slopes is None:
            self.slopes = torch.tensor(alibi_slopes(self.part.n_heads))
        if self.slopes.device != q.device:
            self.slopes = self.slopes.to(q.device)
        at = step.places()[:, None]
        key = torch.arange(step.first_key(self.part), step.end, device=q.device)[None]
        bias = self.slopes[:, None, None] * (key - at)
        if self.part.alibi_scaled:
            bias = bias * self.scale
        mask = step.mask(self.part)
        if mask is not None:
            bias = bias.masked_fill(~mask, float("-inf"))
        return bias.to(q.dtype)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.joint is not None:
            q, k, v = torch.split(F.linear(x, *self.joint), self.widths, -1)
            return q, k, v
        k = self.k(x)
        return self.q(x), k, k if self.v is None else self.v(x)

    def join(self) -> None:
        """Let q, k and v be one product, of a copy of their matrices; for a compiled step (aot.py)."""
        three = [x for x in (self.q, self.k, self.v) if type(x) is Linear]
        if len(three) == 3:  # and none is missing or in 8 bits
            biases = [x.bias for x in three if x.bias is not None]
            self.joint = (torch.cat([x.weight for x in three]), torch.cat(biases) if biases else None)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, H x D) or (B, T, H, D) -> (B, H, T, D), as a view."""
        return x.view(*x.shape[:2], -1, self.part.head_dim).transpose(1, 2)

    def _normed(self, x: Tensor, norm: RowNorm | None) -> Tensor:
        """A norm over the whole projection, or over each head's row."""
        if norm is None:
            return x
        if norm.part.dim == x.shape[-1] and not norm.part.heads:
            return norm(x)  # type: ignore[no-any-return]
        return norm(x.view(*x.shape[:2], -1, self.part.head_dim))  # type: ignore[no-any-return]
