"""Hunyuan dense (0.5B-7B, MT-7B): a Llama block that norms q and k of each head after rotation, NTK-scaled base."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA, blocks
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.rope import Rope
from llamactl.spec.ropeconfig import read_context, read_rope, rope_block

MODEL_TYPES = ("hunyuan_v1_dense",)
HF = (*LLAMA, *blocks({"attn.q_norm": "self_attn.query_layernorm", "attn.k_norm": "self_attn.key_layernorm"}))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.expect("use_qk_norm", allowed=(True,), default=True)
    cfg.expect("norm_type", allowed=("rms",), default="rms")
    for key in ("use_cla", "mlp_bias", "add_classification_head"):
        cfg.expect(key, allowed=(False,), default=False)
    rope = rotation(cfg, b.rope_dim(cfg, hidden))
    bias = cfg.flag("attention_bias", default=False)
    _, _, dim = b.heads(cfg, hidden)
    attn = b.attention(cfg, hidden, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm=b.rms(cfg, dim, default=1e-5))
    norm = b.rms(cfg, hidden, default=1e-5)
    layer = b.pre_norm(replace(attn, norm_after_rope=True), b.mlp(cfg, hidden), norm)
    return b.decoder(cfg, "hunyuan_v1_dense", (layer,) * n, norm=norm, context=read_context(cfg, rope))


def rotation(cfg: Config, dim: int) -> Rope:
    """Files that say dynamic and name an alpha stretch nothing by length: the base is theta x alpha^(dim/(dim-2))."""
    rope, block = read_rope(cfg, dim), rope_block(cfg)
    alpha = block.number("alpha", default=None) if block else None
    if rope.scaling is None or rope.scaling.kind != "dynamic" or not alpha:
        return rope
    if dim == 2:
        raise cfg.refuse("config-rope", "an alpha cannot stretch the base of a single pair")
    return replace(rope, theta=rope.theta * alpha ** (dim / (dim - 2)), scaling=None)
