"""Command R, R+ and Aya 23: parallel block under one LayerNorm without bias, per-head q/k norms in R+, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, MLP, blocks, modules
from llamactl.spec.config import Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.naming import rule
from llamactl.spec.parts import Norm
from llamactl.spec.rope import Rope
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("cohere",)
BLOCK = (*modules(LLAMA_OUTER), *blocks(ATTENTION, MLP, {"attn_norm": "input_layernorm"}))
HF = (*BLOCK, *(rule(f"model.layers.{{i}}.self_attn.{x}_norm.weight", f"layers.{{i}}.attn.{x}_norm.{{e}}.weight",
                     stacked=True) for x in "qk"))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden), theta=500000.0, pairs="adjacent")
    layer = block(cfg, hidden, rope)
    if cfg.flag("use_qk_norm", default=False):
        attn = layer.attn
        one = Norm(dim=attn.head_dim, eps=layer.attn_norm.eps, kind="layer")
        layer = replace(layer, attn=replace(attn, q_norm=replace(one, heads=attn.n_heads),
                                            k_norm=replace(one, heads=attn.n_kv_heads)))
    return scaled(cfg, "cohere", (layer,) * n, rope)
