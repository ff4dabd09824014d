"""Phi-3.5-MoE and Phi-mini-MoE: Mixtral's experts, two a token, under LayerNorms with biases (arXiv:2404.14219)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch import _routing
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, PRE_NORMS, blocks, modules
from llamactl.arch.mixtral import EXPERTS
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.rope import Rope
from llamactl.spec.ropeconfig import read_context, read_rope, rope_block

MODEL_TYPES = ("phimoe",)
HF = (*modules(LLAMA_OUTER), *blocks(ATTENTION, PRE_NORMS, EXPERTS))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = rotation(cfg, hidden)
    bias = cfg.flag("attention_bias", default=False)
    attn = b.attention(cfg, hidden, kv_default="refuse", rope=rope, window=b.window(cfg, None), qkv_bias=bias,
                       o_bias=bias)
    cfg.expect("num_experts_per_tok", allowed=(2,))  # its router always takes two
    ff = b.moe(cfg, b.mlp(cfg, hidden), "num_local_experts", "num_experts", routing=_routing.sparsemixer(cfg))
    norm = b.layer_norm(cfg, hidden, "rms_norm_eps")
    return b.decoder(cfg, "phimoe", (b.pre_norm(attn, ff, norm),) * n, norm=norm, context=read_context(cfg, rope),
                     head_bias=cfg.flag("lm_head_bias", default=False), window_engines=("arch", "hf", "vllm"))


def rotation(cfg: Config, hidden: int) -> Rope:
    """longrope, whose factor on cos and sin the file names: short_mscale and long_mscale."""
    rope, block = read_rope(cfg, b.rope_dim(cfg, hidden), theta=1e6), rope_block(cfg)
    if rope.scaling is None or block is None:
        return rope
    short, long = block.number("short_mscale"), block.number("long_mscale")
    if short != long:
        raise block.refuse("config-rope", f"{block.prefix}short_mscale and long_mscale differ, {short:g} and {long:g}")
    return replace(rope, scaling=replace(rope.scaling, attention_factor=short))
