"""Command R, R+ and Aya 23: parallel block, one LayerNorm without bias, per-head q/k norms in R+, scaled logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, MLP, blocks, modules
from llamactl.spec.config import Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.naming import rule
from llamactl.spec.parts import Attention, Norm
from llamactl.spec.rope import Rope
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("cohere",)
BLOCK = (*modules(LLAMA_OUTER), *blocks(ATTENTION, MLP, {"attn_norm": "input_layernorm"}))
HF = (*BLOCK, *(rule(f"model.layers.{{i}}.self_attn.{x}_norm.weight", f"layers.{{i}}.attn.{x}_norm.{{e}}.weight",
                     stacked=True) for x in "qk"))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden), theta=500000.0, pairs="adjacent")
    attn = attention(cfg, hidden, rope)
    if cfg.flag("use_qk_norm", default=False):
        one = replace(norm(cfg, attn.head_dim), heads=attn.n_heads)
        attn = replace(attn, q_norm=one, k_norm=replace(one, heads=attn.n_kv_heads))
    return decoder(cfg, "cohere", (block(cfg, attn),) * n, rope)


def attention(cfg: Config, hidden: int, rope: Rope) -> Attention:
    """Full attention, biased by one switch."""
    bias = cfg.flag("attention_bias", default=False)
    return b.attention(cfg, hidden, rope=rope, qkv_bias=bias, o_bias=bias)


def norm(cfg: Config, dim: int) -> Norm:
    """LayerNorm with a weight and no bias."""
    return b.layer_norm(cfg, dim, "layer_norm_eps", bias=False)


def block(cfg: Config, attn: Attention) -> Layer:
    """One norm feeds `attn` and a SwiGLU."""
    return b.pre_norm(attn, b.mlp(cfg, attn.hidden), norm(cfg, attn.hidden), parallel=True)


def decoder(cfg: Config, family: str, layers: Sequence[Layer], rope: Rope) -> Model:
    """The Model around `layers`; its logits are multiplied by logit_scale."""
    hidden, _ = b.shape(cfg)
    model = b.decoder(cfg, family, layers, norm=norm(cfg, hidden), tied_default=True, context=read_context(cfg, rope))
    return replace(model, head=replace(model.head, scale=cfg.number("logit_scale", default=0.0625)))
