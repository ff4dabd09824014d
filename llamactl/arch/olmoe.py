"""OLMoE: pre-norm, RMSNorm over all of q and k, every layer a mixture of experts (arXiv:2409.02060)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch import _routing
from llamactl.arch._names import EXPERTS, LLAMA, QK_NORM, blocks
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("olmoe",)
GGUF = ("olmoe",)
GGUF_NAMES = "plain"
HF = (*LLAMA, *blocks(QK_NORM, EXPERTS))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden))
    bias = cfg.flag("attention_bias", default=False)
    attn = b.attention(cfg, hidden, rope=rope, qkv_bias=bias, o_bias=bias)
    attn = replace(attn, q_norm=b.rms(cfg, attn.n_heads * attn.head_dim, default=1e-5),
                   k_norm=b.rms(cfg, attn.n_kv_heads * attn.head_dim, default=1e-5),
                   clip=cfg.number("clip_qkv", default=None))
    norm = b.rms(cfg, hidden, default=1e-5)
    ff = b.moe(cfg, b.mlp(cfg, hidden), "num_experts", routing=_routing.softmax(cfg, False))
    layer = b.pre_norm(attn, ff, norm)
    return b.decoder(cfg, "olmoe", (layer,) * n, norm=norm, context=read_context(cfg, rope))
