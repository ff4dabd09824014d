"""Nemotron-4 and Minitron: LayerNorm stored as g - 1, squared ReLU without a gate, partial RoPE (arXiv:2402.16819)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, PRE_NORMS, blocks, modules
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.ropeconfig import partial_factor, read_context, read_rope

MODEL_TYPES = ("nemotron",)
HF = (*modules(LLAMA_OUTER), *blocks(ATTENTION, PRE_NORMS, {"mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    share = partial_factor(cfg, 0.5, "partial_rotary_factor", "rope_percent")
    rope = read_rope(cfg, b.rope_dim(cfg, hidden, factor=share))
    bias = cfg.flag("attention_bias", default=False)
    attn = b.attention(cfg, hidden, rope=rope, qkv_bias=bias, o_bias=bias)
    ff = b.mlp(cfg, hidden, activation=cfg.activation("hidden_act", default="relu2"), gated=False,
               bias=cfg.flag("mlp_bias", default=False))
    norm = replace(b.layer_norm(cfg, hidden, "norm_eps"), offset=True)
    return b.decoder(cfg, "nemotron", (b.pre_norm(attn, ff, norm),) * n, norm=norm, context=read_context(cfg, rope))
