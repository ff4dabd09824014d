"""ERNIE 4.5 dense (0.3B): a Llama block with wide heads, rotated in neighbouring pairs, biases by one switch."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("ernie4_5",)
HF = LLAMA


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    dim = cfg.integer("head_dim")  # in every file; the config class would fill in 128
    rope = read_rope(cfg, b.rope_dim(cfg, hidden, head_dim=dim), theta=500000.0, pairs="adjacent")
    bias = cfg.flag("use_bias", default=False)
    attn = b.attention(cfg, hidden, kv_default="refuse", rope=rope, qkv_bias=bias, o_bias=bias)
    norm = b.rms(cfg, hidden, default=1e-5)
    layer = b.pre_norm(attn, b.mlp(cfg, hidden, bias=bias), norm)
    return b.decoder(cfg, "ernie4_5", (layer,) * n, norm=norm, tied_default=True, context=read_context(cfg, rope))
