"""Networks by hand, one for each layout, that load its own names strictly: whether what was written computes the model.

Meta's rotates neighbouring pairs as complex numbers, the lesson's pair by pair, nanoGPT's has one c_attn. No code of
llamactl is used.

shapes: T tokens, H heads, D head_dim
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(T, H, D) each, K and V with fewer heads -> (T, H * D)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).flatten(1)


def frequencies(dim: int, theta: float, factor: float | None) -> Tensor:
    """(D / 2,) radians a position; factor: of Llama 3.1's stretching, with its 1, 4 and 8192."""
    w = theta ** (-torch.arange(0, dim, 2).double() / dim)
    if factor:
        blend = ((8192 * w / (2 * math.pi) - 1) / (4 - 1)).clamp(0, 1)
        w = blend * w + (1 - blend) * w / factor
    return w


class RMS(nn.Module):
    """x / rms(x), times the parameter `name`."""

    def __init__(self, width: int, eps: float, name: str = "weight") -> None:
        super().__init__()
        self.eps, self.name = eps, name
        self.register_parameter(name, nn.Parameter(torch.ones(width)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * getattr(self, self.name)
        return out


class MetaAttention(nn.Module):
    def __init__(self, p: Mapping[str, Any], dim: int) -> None:
        super().__init__()
        biased = p.get("attention_bias", False)
        self.dim = dim
        self.wq = nn.Linear(p["dim"], p["n_heads"] * dim, biased)
        self.wk = nn.Linear(p["dim"], p["n_kv_heads"] * dim, biased)
        self.wv = nn.Linear(p["dim"], p["n_kv_heads"] * dim, biased)
        self.wo = nn.Linear(p["n_heads"] * dim, p["dim"], biased)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        def rotated(y: Tensor) -> Tensor:
            pairs = torch.view_as_complex(y.view(len(x), -1, self.dim // 2, 2))
            return torch.view_as_real(pairs * turns[:, None]).flatten(2)

        v = self.wv(x).view(len(x), -1, self.dim)
        out: Tensor = self.wo(causal(rotated(self.wq(x)), rotated(self.wk(x)), v))
        return out


class MetaFeedForward(nn.Module):
    def __init__(self, p: Mapping[str, Any]) -> None:
        super().__init__()
        width = int(p.get("ffn_dim_multiplier", 1) * int(2 * 4 * p["dim"] / 3))
        width = p["multiple_of"] * math.ceil(width / p["multiple_of"])
        biased = p.get("mlp_bias", False)
        self.w1, self.w3 = nn.Linear(p["dim"], width, biased), nn.Linear(p["dim"], width, biased)
        self.w2 = nn.Linear(width, p["dim"], biased)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class MetaBlock(nn.Module):
    def __init__(self, p: Mapping[str, Any], dim: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = MetaAttention(p, dim), MetaFeedForward(p)
        self.attention_norm, self.ffn_norm = RMS(p["dim"], p["norm_eps"]), RMS(p["dim"], p["norm_eps"])

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class MetaLlama(nn.Module):
    """params.json -> Llama in Meta's names."""

    def __init__(self, p: Mapping[str, Any]) -> None:
        super().__init__()
        dim = p.get("head_dim", p["dim"] // p["n_heads"])
        factor = p.get("rope_scaling_factor", 8.0) if p.get("use_scaled_rope") else None
        self.turning = frequencies(dim, p["rope_theta"], factor)
        self.tok_embeddings = nn.Embedding(p["vocab_size"], p["dim"])
        self.layers = nn.ModuleList(MetaBlock(p, dim) for _ in range(p["n_layers"]))
        self.norm = RMS(p["dim"], p["norm_eps"])
        self.output = nn.Linear(p["dim"], p["vocab_size"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(len(ids)).double(), self.turning)
        turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, turns)
        out: Tensor = self.output(self.norm(x))
        return out


class Grouped(nn.Module):
    """The lesson's attention: every pair of neighbours turned by its angle."""

    def __init__(self, c: Mapping[str, Any], dim: int) -> None:
        super().__init__()
        biased = c.get("attention_bias", False)
        width, self.heads, self.kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
        self.wq = nn.Linear(width, self.heads * dim, biased)
        self.wk, self.wv = nn.Linear(width, self.kv * dim, biased), nn.Linear(width, self.kv * dim, biased)
        self.wo = nn.Linear(self.heads * dim, width, biased)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def turned(y: Tensor, n: int) -> Tensor:
            y = y.view(len(x), n, -1)
            even, odd, out = y[..., 0::2], y[..., 1::2], torch.empty_like(y)
            out[..., 0::2] = even * cos[:, None] - odd * sin[:, None]
            out[..., 1::2] = even * sin[:, None] + odd * cos[:, None]
            return out

        q, k, v = turned(self.wq(x), self.heads), turned(self.wk(x), self.kv), self.wv(x).view(len(x), self.kv, -1)
        out: Tensor = self.wo(causal(q, k, v))
        return out


class SwiGLU(nn.Module):
    """w1 gates, w2 is what it gates, w3 projects back."""

    def __init__(self, width: int, ffn: int, biased: bool) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, ffn, biased), nn.Linear(width, ffn, biased)
        self.w3 = nn.Linear(ffn, width, biased)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w3(F.silu(self.w1(x)) * self.w2(x))
        return out


class LessonLlama(nn.Module):
    """config.json -> Llama as a lesson names it."""

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = c["hidden_size"], c["rms_norm_eps"]
        dim = c.get("head_dim") or width // c["num_attention_heads"]
        self.turning = frequencies(dim, c["rope_theta"], (c.get("rope_scaling") or {}).get("factor"))
        self.wte = nn.Embedding(c["vocab_size"], width)
        self.blocks = nn.ModuleList(nn.ModuleDict({
            "gqa": Grouped(c, dim), "ff": SwiGLU(width, c["intermediate_size"], c.get("mlp_bias", False)),
            "rms_1": RMS(width, eps, "gamma"), "rms_2": RMS(width, eps, "gamma")})
            for _ in range(c["num_hidden_layers"]))
        self.norm = RMS(width, eps, "gamma")
        self.lm_head = nn.Linear(width, c["vocab_size"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(len(ids)).double(), self.turning)
        cos, sin = angles.cos().float(), angles.sin().float()
        x = self.wte(ids)
        blocks: Any = self.blocks
        for block in blocks:
            x = x + block["gqa"](block["rms_1"](x), cos, sin)
            x = x + block["ff"](block["rms_2"](x))
        out: Tensor = self.lm_head(self.norm(x))
        return out


class NanoGPT(nn.Module):
    """model_args -> GPT-2 as nanoGPT names it, with the GELU that is said beside them."""

    def __init__(self, a: Mapping[str, Any], gelu: str) -> None:
        super().__init__()
        width, self.heads = a["n_embd"], a["n_head"]
        self.gelu = {"gelu": nn.GELU(), "gelu_new": nn.GELU("tanh")}[gelu]
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(a["vocab_size"], width), "wpe": nn.Embedding(a["block_size"], width),
            "h": nn.ModuleList(nn.ModuleDict({
                "ln_1": nn.LayerNorm(width), "ln_2": nn.LayerNorm(width),
                "attn": nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)}),
                "mlp": nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)}),
            }) for _ in range(a["n_layer"])), "ln_f": nn.LayerNorm(width)})
        self.lm_head = nn.Linear(width, a["vocab_size"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        t: Any = self.transformer
        x = t["wte"](ids) + t["wpe"].weight[: len(ids)]
        for h in t["h"]:
            q, k, v = (y.view(len(ids), self.heads, -1) for y in h["attn"]["c_attn"](h["ln_1"](x)).split(
                x.shape[1], dim=1))
            x = x + h["attn"]["c_proj"](causal(q, k, v))
            x = x + h["mlp"]["c_proj"](self.gelu(h["mlp"]["c_fc"](h["ln_2"](x))))
        out: Tensor = self.lm_head(t["ln_f"](x))
        return out


class LessonGPT2(nn.Module):
    """config.json -> GPT-2 as a lesson names it: separate wq, wk and wv."""

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        width, self.heads = c["n_embd"], c["n_head"]
        self.gelu = {"gelu": nn.GELU(), "gelu_new": nn.GELU("tanh")}[c["activation_function"]]
        self.wte, self.wpe = nn.Embedding(c["vocab_size"], width), nn.Embedding(c["n_positions"], width)
        self.blocks = nn.ModuleList(nn.ModuleDict({
            "ln_1": nn.LayerNorm(width), "ln_2": nn.LayerNorm(width),
            "attn": nn.ModuleDict({f"w{x}": nn.Linear(width, width) for x in "qkvo"}),
            "mlp": nn.ModuleDict({"w1": nn.Linear(width, 4 * width), "w2": nn.Linear(4 * width, width)}),
        }) for _ in range(c["n_layer"]))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, c["vocab_size"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: len(ids)]
        blocks: Any = self.blocks
        for b in blocks:
            a, y = b["attn"], b["ln_1"](x)
            q, k, v = (a[f"w{n}"](y).view(len(ids), self.heads, -1) for n in "qkv")
            x = x + a["wo"](causal(q, k, v))
            x = x + b["mlp"]["w2"](self.gelu(b["mlp"]["w1"](b["ln_2"](x))))
        out: Tensor = self.lm_head(self.norm(x))
        return out
