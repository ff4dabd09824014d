"""BLOOM: ALiBi instead of positions, a norm right after the embedding, qkv fused by head (arXiv:2211.05100)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import modules
from llamactl.spec.config import COUNT, Config
from llamactl.spec.model import Model
from llamactl.spec.naming import Fused, rule
from llamactl.spec.parts import MLP, Attention
from llamactl.spec.ropeconfig import read_context

MODEL_TYPES = ("bloom",)
H, L = "transformer.h.{i}.", "layers.{i}."
HF = (
    *modules({"embed": "transformer.word_embeddings", "embed_norm": "transformer.word_embeddings_layernorm",
              "norm": "transformer.ln_f", "head": "lm_head", f"{L}attn_norm": f"{H}input_layernorm",
              f"{L}mlp_norm": f"{H}post_attention_layernorm", f"{L}attn.o": f"{H}self_attention.dense",
              f"{L}mlp.up": f"{H}mlp.dense_h_to_4h", f"{L}mlp.down": f"{H}mlp.dense_4h_to_h"}),
    *(rule(f"{H}self_attention.query_key_value.{p}", *(f"{L}attn.{x}.{p}" for x in "qkv"),
           ops=(Fused(order="per_group"),), groups="heads") for p in ("weight", "bias")),
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.expect("apply_residual_connection_post_layernorm", allowed=(False,), default=False)
    heads = cfg.integer("n_head", "num_attention_heads", hi=COUNT)
    attn = Attention(hidden=hidden, n_heads=heads, n_kv_heads=heads, head_dim=cfg.divided(hidden, heads), alibi=True,
                     qkv_bias=True, o_bias=True)
    ff = MLP(hidden=hidden, ffn=4 * hidden, activation="gelu_tanh", gated=False, bias=True)
    norm = b.layer_norm(cfg, hidden, "layer_norm_epsilon")
    model = b.decoder(cfg, "bloom", (b.pre_norm(attn, ff, norm),) * n, norm=norm, tied_default=True,
                      context=read_context(cfg, None))
    return replace(model, embed_norm=norm)
