"""What wrong ports compute and no family does (spec.slips): slow and plain, for verification and ablation alone.

shapes: B batch, T tokens, H query heads, K KV heads, D head_dim. Without a cache: a text is run from its start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llamactl.net.attention import SelfAttention, Step
from llamactl.net.blocks import FeedForward, not_runnable
from llamactl.net.cache import LayerCache
from llamactl.net.decoder import Block
from llamactl.net.positions import alibi_slopes, rotate
from llamactl.spec.model import Layer
from llamactl.spec.parts import MLP, Attention, Norm
from llamactl.spec.slips import Slips


class SlippedAttention(SelfAttention):
    """SelfAttention by plain matrices: another rotation of each side, another mask, another order of KV heads."""

    def __init__(self, part: Attention, slips: Slips, *, dtype: torch.dtype, device: Any) -> None:
        super().__init__(part, dtype=dtype, device=device)
        self.slips = slips

    def forward(self, x: Tensor, step: Step, cache: LayerCache | None = None) -> Tensor:
        if cache is not None or step.pad is not None:
            raise not_runnable("a wrong port with a cache or with padding")
        return self._out(x, self.attend(*self.ready(x, step), step))

    def _turned(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Each side by its own rotation, v too where a port does so."""
        turned = [t if rope is None else rotate(t, step.turns[rope], rope.pairs)
                  for t, rope in zip((q, k, v), self.slips.ropes(self.part.rope), strict=True)]
        return turned[0], turned[1], turned[2]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """softmax(q k^T scale) v with each query head's own KV head: -> (B, T, H x D)."""
        part = self.part
        at = kv_heads(self.slips.kv_order, part.n_heads, part.n_kv_heads)
        scores = q @ k[:, at].transpose(-1, -2) * self.scale
        if part.softcap is not None:
            scores = torch.tanh(scores / part.softcap) * part.softcap
        if part.alibi:
            places = step.places()
            away = torch.tensor(alibi_slopes(part.n_heads))[:, None, None] * (places[None] - places[:, None])
            scores = scores + (away * self.scale if part.alibi_scaled else away)
        scores = scores.masked_fill(~self._seen(step), torch.finfo(scores.dtype).min)
        if self.sinks is not None:
            sink = self.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(len(q), -1, step.length, 1)
            share = torch.cat((scores, sink), -1).float().softmax(-1)[..., :-1]
        else:
            share = scores.float().softmax(-1)
        return (share.to(v.dtype) @ v[:, at]).transpose(1, 2).flatten(2)

    def _seen(self, step: Step) -> Tensor:
        """(T, T): True where a token sees a key."""
        part, kind = self.part, self.slips.mask
        q, k = step.places()[:, None], step.places()[None]
        reach = {"ahead": 1, "strict": -1, "strict-uniform": -1}.get(kind, 0)
        seen = torch.ones_like(k <= q) if kind == "none" else k <= q + reach
        if part.window is not None and part.window_kind == "chunked":
            seen = seen & (k // part.window == q // part.window)
        elif part.window is not None:
            seen = seen & (k > q - part.window)
        return seen | ((q == 0) & (k == 0)) if kind == "strict" else seen


class SlippedBlock(Block):
    """A block whose attention slips, or whose branches are added to something else."""

    def __init__(self, layer: Layer, *, dtype: torch.dtype, device: Any) -> None:
        super().__init__(layer, dtype=dtype, device=device)
        assert layer.slips is not None
        self.slips = layer.slips
        if isinstance(layer.attn, Attention):
            self.attn = SlippedAttention(layer.attn, layer.slips, dtype=dtype, device=device)

    def forward(self, x: Tensor, step: Step, cache: LayerCache | None = None) -> Tensor:
        if self.layer.parallel:
            if (self.slips.attn_in, self.slips.mlp_in, self.slips.mlp) != ("stream", "stream", ""):
                raise not_runnable("other branches of a parallel block")
            return super().forward(x, step, cache)
        if self.attn is not None:
            read = x if self.attn_norm is None else self.attn_norm(x)
            x = self._onto(self.slips.attn_in, x, read, self.attn(read, step, cache), self.attn_post_norm)
        if self.mlp is not None:
            read = x if self.mlp_norm is None else self.mlp_norm(x)
            x = self._onto(self.slips.mlp_in, x, read, self._fed(read), self.mlp_post_norm)
        return x

    def _onto(self, kind: str, x: Tensor, read: Tensor, y: Tensor, norm: Any) -> Tensor:
        return self._add({"stream": x, "normed": read, "none": torch.zeros_like(x)}[kind], y, norm)

    def _fed(self, x: Tensor) -> Tensor:
        ff = self.mlp
        if not self.slips.mlp or not isinstance(ff, FeedForward) or not isinstance(ff.part, MLP) or ff.act is None:
            return ff(x)  # type: ignore[misc,no-any-return]
        if ff.gate is None:
            return ff.down(ff.up(x))  # type: ignore[no-any-return]
        gate, up, act = ff.gate(x), ff.up(x), ff.act
        made: dict[str, Callable[[], Tensor]] = {
            "gate-only": lambda: act(gate), "up-only": lambda: up, "product": lambda: act(gate * up),
            "both": lambda: act(gate) * act(up), "linear": lambda: gate * up}
        return ff.down(made[self.slips.mlp]())  # type: ignore[no-any-return]


def kv_heads(order: str, n_heads: int, n_kv: int) -> list[int]:
    """The KV head that each query head reads."""
    groups = n_heads // n_kv
    return [{"repeat": h // groups, "tile": h % n_kv, "reversed": n_kv - 1 - h // groups, "first": 0,
             "rolled": (h // groups + 1) % n_kv}[order] for h in range(n_heads)]


def slipped_norm(part: Norm, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """Wrong forms of RMSNorm and LayerNorm over the last dimension.

    outside: epsilon added to the root. sum: the root of the sum, not of the mean. l2: the same without an epsilon in
    reach. bias: RMSNorm with LayerNorm's bias. half: rounded to bf16 before the weight. unbiased: over n - 1.
    centred: the mean taken away and no more.
    twice: applied to its own result.
    """
    kind, _, how = part.kind.partition("-")
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True) if kind == "layer" else wide

    def scaled(y: Tensor) -> Tensor:
        return (y if gain is None else y * gain.float()) + (0 if bias is None else bias.float())

    if how == "twice":
        from dataclasses import replace

        from llamactl.net.blocks import RowNorm

        once = RowNorm(replace(part, kind=kind, weight=False, bias=False), dtype=x.dtype, device="cpu")
        return scaled(once._norm(scaled(once._norm(wide, None, None)), None, None)).to(x.dtype)
    if how == "centred":
        return scaled(centred).to(x.dtype)
    total = centred.square().sum(-1, keepdim=True)
    n = part.dim
    roots: dict[str, Callable[[], Tensor]] = {
        "outside": lambda: (total / n).sqrt() + part.eps, "sum": lambda: (total + part.eps).sqrt(),
        "l2": lambda: total.sqrt().clamp_min(1e-12), "unbiased": lambda: (total / (n - 1) + part.eps).sqrt(),
        "half": lambda: (total / n + part.eps).sqrt(), "bias": lambda: (total / n + part.eps).sqrt()}
    y = centred / roots[how]()
    return scaled(y.bfloat16().float() if how == "half" else y).to(x.dtype)
