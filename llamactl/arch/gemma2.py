"""Gemma 2: four norms a block, soft-capped logits, every other layer slides (arXiv:2408.00118)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, MLP, blocks, modules
from llamactl.arch.gemma import gelu
from llamactl.spec.config import Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("gemma2",)
GGUF = ("gemma2",)
GGUF_NAMES = "norm_plus_one"
NORMS = {
    "attn_norm": "input_layernorm", "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
}
HF = (*modules(LLAMA_OUTER), *blocks(ATTENTION, NORMS, MLP))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden, head_dim=256))
    bias = cfg.flag("attention_bias", default=False)
    full = b.attention(cfg, hidden, head_dim=256, kv_default="refuse", rope=rope, qkv_bias=bias, o_bias=bias,
                       scale=cfg.number("query_pre_attn_scalar", default=256.0, lo=1e-6) ** -0.5,
                       softcap=b.softcap(cfg, "attn_logit_softcapping", 50.0))
    norm, ff = b.rms(cfg, hidden, offset=True), b.mlp(cfg, hidden, activation=gelu(cfg))
    block = Layer(attn=full, mlp=ff, attn_norm=norm, attn_post_norm=norm, mlp_norm=norm, mlp_post_norm=norm)
    slides = replace(block, attn=replace(full, window=b.window(cfg, 4096)))
    types = b.pattern(cfg, n, 2)
    return b.decoder(cfg, "gemma2", b.by_type(types, {"full_attention": block, "sliding_attention": slides}),
                     norm=norm, tied_default=True, embed_scale=hidden**0.5, context=read_context(cfg, rope),
                     softcap=b.softcap(cfg, "final_logit_softcapping", 30.0))


def from_gguf(meta: Config) -> dict[str, object]:
    """The attention scale is in no key: llama.cpp takes head_dim, and hidden / heads for the 46 layers of the 27B."""
    return {"query_pre_attn_scalar": attention_width(meta, 46)}


def attention_width(meta: Config, layers: int) -> int:
    """What the scale is the inverse root of: head_dim, or hidden / heads in the model of that many layers."""
    hidden, heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    dim: int = meta.integer("attention.key_length", default=hidden // heads)
    return hidden // heads if meta.integer("block_count") == layers else dim
