"""Gemma 3 (arXiv:2503.19786): Gemma 2's block with q/k norms, five sliding layers to one full, two RoPE bases.

The published vision-language files leave out what the family's own config class fills in (vocabulary, heads, head_dim);
those values are the family's and are marked as such in the notes.
"""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import QK_NORM, blocks, under
from llamactl.arch._vision import PROJECTOR_GEMMA3, SIGLIP, beside, gemma3_projector, siglip
from llamactl.arch.gemma import gelu
from llamactl.arch.gemma2 import HF as GEMMA2
from llamactl.arch.gemma2 import attention_width
from llamactl.spec.config import COUNT, LAYERS, Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.naming import Rule
from llamactl.spec.parts import Attention
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("gemma3", "gemma3_text")
GGUF = ("gemma3",)
GGUF_NAMES = "norm_plus_one"
TEXT = (*GEMMA2, *blocks(QK_NORM))


def HF(model: Model) -> tuple[Rule, ...]:  # noqa: N802  a table that depends on whether a vision tower stands beside
    if model.model_type == "gemma3_text":
        return TEXT
    return (*under("language_model.", TEXT), *SIGLIP, *PROJECTOR_GEMMA3)


def describe(cfg: Config) -> Model:
    text = cfg.section("text_config")
    cfg, vision = text or cfg, cfg.section("vision_config") if text else None
    hidden, n = b.shape(cfg)
    n_heads = cfg.integer("num_attention_heads", hi=COUNT, default=8)
    n_kv = cfg.integer("num_key_value_heads", hi=COUNT, default=4)
    if n_heads % n_kv:
        raise cfg.refuse("config-heads", f"{n_heads} heads cannot share {n_kv} KV heads evenly")
    dim = b.rope_dim(cfg, hidden, head_dim=256)
    rope = read_rope(cfg, dim, theta=1e6, layer_type="full_attention")
    local = replace(read_rope(cfg, dim, layer_type="sliding_attention"), scaling=None)
    if "rope_parameters" not in cfg.data:
        local = replace(local, theta=cfg.number("rope_local_base_freq", default=10000.0, lo=1e-6))
    qk, bias = b.rms(cfg, dim, offset=True), cfg.flag("attention_bias", default=False)
    full = Attention(hidden=hidden, n_heads=n_heads, n_kv_heads=n_kv, head_dim=dim, rope=rope, qkv_bias=bias,
                     o_bias=bias, q_norm=qk, k_norm=qk, softcap=cfg.number("attn_logit_softcapping", default=None),
                     scale=cfg.number("query_pre_attn_scalar", default=256.0, lo=1e-6) ** -0.5)
    norm, ff = b.rms(cfg, hidden, offset=True), b.mlp(cfg, hidden, activation=gelu(cfg))
    block = Layer(attn=full, mlp=ff, attn_norm=norm, attn_post_norm=norm, mlp_norm=norm, mlp_post_norm=norm)
    slides = replace(block, attn=replace(full, rope=local, window=b.window(cfg, 4096)))
    every = cfg.integer("sliding_window_pattern", "_sliding_window_pattern", hi=LAYERS, default=6)
    types = b.pattern(cfg, n, every)
    sections, left_out = beside(vision, hidden, siglip, gemma3_projector) if text else ((), ())
    return b.decoder(cfg, "gemma3", b.by_type(types, {"full_attention": block, "sliding_attention": slides}),
                     norm=norm, tied_default=True, embed_scale=hidden**0.5, vocab_default=262208,
                     context=read_context(cfg, rope, final=True, default=131072),
                     softcap=cfg.number("final_logit_softcapping", default=None),
                     sections=sections, not_counted=left_out)


def from_gguf(meta: Config) -> dict[str, object]:
    """Text alone; without a window key all layers are full; the 27B has 62 layers (see gemma2 for the scale)."""
    words = {"model_type": "gemma3_text", "query_pre_attn_scalar": attention_width(meta, 62)}
    return words if "attention.sliding_window" in meta.data else {**words, "sliding_window": None}
