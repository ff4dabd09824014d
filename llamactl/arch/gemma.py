"""Gemma 1: (1 + w) RMSNorm, GeGLU, wide heads, embedding scaled by sqrt(hidden), tied head (arXiv:2403.08295)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("gemma",)
GGUF = ("gemma",)
GGUF_NAMES = "norm_plus_one"
HF = LLAMA


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden, head_dim=256))
    bias = cfg.flag("attention_bias", default=False)
    attn = b.attention(cfg, hidden, head_dim=256, kv_default="refuse", rope=rope, qkv_bias=bias, o_bias=bias)
    norm = b.rms(cfg, hidden, offset=True)
    layer = b.pre_norm(attn, b.mlp(cfg, hidden, activation=gelu(cfg)), norm)
    return b.decoder(cfg, "gemma", (layer,) * n, norm=norm, tied_default=True, embed_scale=hidden**0.5,
                     context=read_context(cfg, rope))


def gelu(cfg: Config) -> str:
    """hidden_activation; the first files' hidden_act "gelu" was a slip for the tanh form."""
    if cfg.get("hidden_activation", default=None) is not None:
        return cfg.activation("hidden_activation")
    act = cfg.activation("hidden_act", default="gelu_pytorch_tanh")
    return "gelu_tanh" if act == "gelu" else act
