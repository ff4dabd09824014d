"""OLMo 1: a Llama block under LayerNorms without weights, optionally clipped q, k, v (arXiv:2402.00838)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch import hf_olmo
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, MLP, blocks, modules
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.parts import Norm
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("olmo",)
OUTER = {"embed": LLAMA_OUTER["embed"], "head": LLAMA_OUTER["head"]}
HF = (*modules(OUTER), *blocks(ATTENTION, MLP))


def describe(cfg: Config) -> Model:
    """The type has two kinds of file: the first releases carry the keys of the model's own package."""
    if "d_model" in cfg.data:
        return hf_olmo.describe(cfg)
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden))
    bias = cfg.flag("attention_bias", default=False)
    attn = b.attention(cfg, hidden, rope=rope, qkv_bias=bias, o_bias=bias)
    attn = replace(attn, clip=cfg.number("clip_qkv", default=None))
    norm = Norm(dim=hidden, eps=1e-5, kind="layer", weight=False)
    return b.decoder(cfg, "olmo", (b.pre_norm(attn, b.mlp(cfg, hidden), norm),) * n, norm=norm,
                     context=read_context(cfg, rope))
