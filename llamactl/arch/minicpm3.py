"""MiniCPM3: dense blocks over latent attention; scaled embedding, branches and logits (arXiv:2404.06395)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._latent import KV_B, LATENT, attention
from llamactl.arch._names import LLAMA_OUTER, MLP, PRE_NORMS, blocks, modules
from llamactl.spec.config import COUNT, Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("minicpm3",)
HF = (*modules(LLAMA_OUTER), *blocks(LATENT, PRE_NORMS, MLP), KV_B)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, cfg.integer("qk_rope_head_dim"))
    attn = attention(cfg, hidden, rope, v_dim=hidden // cfg.integer("num_attention_heads", hi=COUNT))
    depth = cfg.number("scale_depth", default=n**0.5 if "scale_depth" in cfg.data else 1.4) / n**0.5
    scale = cfg.integer("dim_model_base", default=hidden if "dim_model_base" in cfg.data else 256) / hidden
    norm, ff = b.rms(cfg, hidden, default=1e-5), b.mlp(cfg, hidden, bias=cfg.flag("mlp_bias", default=False))
    layer = Layer(attn=attn, mlp=ff, attn_norm=norm, mlp_norm=norm,
                  residual_scale=None if depth == 1.0 else depth)
    model = b.decoder(cfg, "minicpm3", (layer,) * n, norm=norm, tied_default=True,
                      embed_scale=cfg.number("scale_emb", default=12), context=read_context(cfg, rope))
    return replace(model, head=replace(model.head, scale=None if scale == 1.0 else scale))
