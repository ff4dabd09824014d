"""Multi-head latent attention (arXiv:2405.04434): one latent and one rotated key for each token, shared by all heads.

Two ways to the same sums. Expanded: K and V of every head are rebuilt from the latents seen. Absorbed: q goes through
k's matrix and the output through v's, so that scores and sums are taken on the latents as they are cached.
shapes: B batch, T new tokens, S tokens seen, H heads, R kv_rank; a cached row is R + qk_rope wide
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from llamactl.net import kernels
from llamactl.net.attention import Step
from llamactl.net.blocks import Linear, RowNorm, not_runnable
from llamactl.net.cache import LayerCache
from llamactl.net.positions import rotate
from llamactl.spec.latent import LatentAttention
from llamactl.spec.parts import Attention, Norm

_EVERY_KEY = Attention(hidden=1, n_heads=1, n_kv_heads=1, head_dim=1)  # no window: a mask depends on nothing else


class Latent(nn.Module):
    """q, kv_a, k_b, v_b, o around the scores. Raises InputRefused not-runnable for an indexer (DSA)."""

    def __init__(self, part: LatentAttention, *, dtype: torch.dtype, device: Any = "meta") -> None:
        super().__init__()
        if part.indexer is not None:
            raise not_runnable("sparse attention, whose indexer chooses the tokens that are read (DSA)")
        self.part = part
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        q, heads = part.n_heads * (part.qk_nope + part.qk_rope), part.n_heads
        self.q = self.q_a = self.q_b = self.q_a_norm = None
        if part.q_rank is None:
            self.q = Linear(part.hidden, q, **made)
        else:
            self.q_a = Linear(part.hidden, part.q_rank, part.bias, **made)
            self.q_a_norm = RowNorm(Norm(dim=part.q_rank, eps=part.eps), **made)
            self.q_b = Linear(part.q_rank, q, **made)
        self.kv_a = Linear(part.hidden, part.kv_rank + part.qk_rope, part.bias, **made)
        self.kv_a_norm = RowNorm(Norm(dim=part.kv_rank, eps=part.eps), **made)
        self.k_b = Linear(part.kv_rank, heads * part.qk_nope, **made)
        self.v_b = Linear(part.kv_rank, heads * part.v_dim, **made)
        self.o = Linear(heads * part.v_dim, part.hidden, part.bias, **made)
        self.scale = part.usual_scale if part.scale is None else part.scale

    def forward(self, x: Tensor, step: Step, cache: LayerCache | None = None) -> Tensor:
        part = self.part
        q = self._heads(self._query(x))
        nope, turned = q[..., : part.qk_nope], q[..., part.qk_nope :]
        row = self.kv_a(x)[:, None]
        latent, key = self.kv_a_norm(row[..., : part.kv_rank]), row[..., part.kv_rank :]
        if part.rope is not None:
            turn = step.turns[part.rope]
            turned, key = rotate(turned, turn, part.rope.pairs), rotate(key, turn, part.rope.pairs)
        seen = torch.cat((latent, key), -1)
        if cache is not None:
            seen, _ = step.keep(cache, seen, seen[..., :0])
        other = kernels.plainly()
        attend = self.absorbed if self.absorbs(step.length, seen.shape[2]) != other else self.expanded
        return self.o(attend(nope, turned, seen, step).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def absorbs(self, new: int, seen: int) -> bool:
        """Whether the absorbed form multiplies less for `new` tokens that see `seen`; for one token it always does."""
        part = self.part
        widths = part.qk_nope + part.v_dim
        expanded = seen * part.kv_rank * widths + new * seen * (widths + part.qk_rope)
        absorbed = new * part.kv_rank * widths + new * seen * (2 * part.kv_rank + part.qk_rope)
        return new == 1 or absorbed < expanded

    def absorbed(self, nope: Tensor, turned: Tensor, seen: Tensor, step: Step) -> Tensor:
        """(B, H, T, qk_nope), (B, H, T, qk_rope), (B, 1, S, R + qk_rope) -> (B, H, T, v_dim), on the latents alone."""
        part = self.part
        b, h, t, _ = nope.shape
        q = torch.cat((by_head(nope, self.k_b.weight.view(h, part.qk_nope, part.kv_rank)), turned), -1)
        keys = seen[:, 0]
        scores = (q.reshape(b, h * t, -1) @ keys.transpose(-1, -2) * self.scale).view(b, h, t, -1)
        mask = step.mask(_EVERY_KEY)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        share = scores.float().softmax(-1).to(keys.dtype).view(b, h * t, -1)
        mixed = (share @ keys[..., : part.kv_rank]).view(b, h, t, part.kv_rank)
        return by_head(mixed, self.v_b.weight.view(h, part.v_dim, part.kv_rank).transpose(-1, -2))

    def expanded(self, nope: Tensor, turned: Tensor, seen: Tensor, step: Step) -> Tensor:
        """The same with K and V of every head and PyTorch's fused kernels, which want q, k and v equally wide."""
        part = self.part
        latent, key = seen[:, 0, :, : part.kv_rank], seen[:, 0, :, part.kv_rank :]
        k, v = self._heads(self.k_b(latent)), self._heads(self.v_b(latent))
        k = torch.cat((k, key[:, None].expand(-1, part.n_heads, -1, -1)), -1)
        q = torch.cat((nope, turned), -1)
        wider = k.shape[-1] - part.v_dim
        if wider > 0:
            v = F.pad(v, (0, wider))
        plain = step.plain(_EVERY_KEY)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None if plain else step.mask(_EVERY_KEY),
                                           is_causal=plain and step.length > 1, scale=self.scale)
        return y[..., : part.v_dim]

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, H x D) -> (B, H, T, D)."""
        return x.view(x.shape[0], x.shape[1], self.part.n_heads, -1).transpose(1, 2)

    def _query(self, x: Tensor) -> Tensor:
        if self.q is not None:
            return self.q(x)  # type: ignore[no-any-return]
        assert self.q_a is not None
        assert self.q_a_norm is not None
        assert self.q_b is not None
        return self.q_b(self.q_a_norm(self.q_a(x)))  # type: ignore[no-any-return]


def by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """(B, H, T, D) times a matrix (D, M) of each head: (B, H, T, M); the matrices are read once for the whole batch."""
    b, h, t, d = x.shape
    out = torch.bmm(x.transpose(0, 1).reshape(h, b * t, d), matrices)
    return out.view(h, b, t, -1).transpose(0, 1)
