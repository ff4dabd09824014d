"""Granite 3.x dense: a Llama block with four fixed multipliers: embedding, attention, residual branches, logits."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.parts import MLP, MoE
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("granite",)
HF = LLAMA


def describe(cfg: Config) -> Model:
    hidden, _ = b.shape(cfg)
    return stack(cfg, "granite", b.mlp(cfg, hidden, bias=cfg.flag("mlp_bias", default=False)))


def stack(cfg: Config, family: str, ff: MLP | MoE) -> Model:
    """Equal blocks around `ff`. attention_multiplier stands for head_dim^-0.5; logits are divided by logits_scaling.

    Each multiplier is 1 where the file is silent.
    """
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden))
    bias = cfg.flag("attention_bias", default=False)
    attn = b.attention(cfg, hidden, rope=rope, qkv_bias=bias, o_bias=bias,
                       scale=cfg.number("attention_multiplier", default=1.0))
    norm = b.rms(cfg, hidden)
    layer = replace(b.pre_norm(attn, ff, norm), residual_scale=cfg.number("residual_multiplier", default=1.0))
    model = b.decoder(cfg, family, (layer,) * n, norm=norm, context=read_context(cfg, rope),
                      embed_scale=cfg.number("embedding_multiplier", default=1.0))
    return replace(model, head=replace(model.head, scale=1 / cfg.number("logits_scaling", default=1.0, lo=1e-6)))
