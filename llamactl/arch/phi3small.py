"""Phi-3-small: LayerNorm, biases, GEGELU, muP scales, every other layer block-sparse (arXiv:2404.14219)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA_OUTER, PRE_NORMS, blocks, modules
from llamactl.spec.config import COUNT, LAYERS, Config
from llamactl.spec.model import Model
from llamactl.spec.naming import Fused, rule
from llamactl.spec.parts import MLP, BlockSparse
from llamactl.spec.rope import Rope
from llamactl.spec.ropeconfig import read_context

MODEL_TYPES = ("phi3small",)
H, L = "model.layers.{i}.", "layers.{i}."
HF = (
    *modules({**LLAMA_OUTER, "norm": "model.final_layernorm"}),
    *blocks(PRE_NORMS, {"attn.o": "self_attn.dense", "mlp.down": "mlp.down_proj"}),
    *(r for p in ("weight", "bias") for r in (
        rule(f"{H}self_attn.query_key_value.{p}", *(f"{L}attn.{x}.{p}" for x in "qkv"),
             ops=(Fused(order="per_group"),)),
        rule(f"{H}mlp.up_proj.{p}", f"{L}mlp.gate.{p}", f"{L}mlp.up.{p}", ops=(Fused(order="interleaved"),)),
    )),
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.expect("hidden_act", allowed=("gegelu",), default="gegelu")
    cfg.expect("gegelu_limit", allowed=(20,), default=20.0)
    cfg.expect("rope_position_scale", allowed=(1,), default=1.0)
    cfg.expect("rope_scaling", allowed=(None,), default=None)  # the 128k file scales cos and sin by length
    cfg.expect("head_dim", allowed=(None,), default=None)
    rope = Rope(dim=b.rope_dim(cfg, hidden), theta=cfg.number("rope_embedding_base", default=1e6, lo=1e-6))
    dense = b.attention(cfg, hidden, kv_default="refuse", rope=rope, qkv_bias=True, o_bias=True)
    if cfg.flag("mup_use_scaling", default=True):
        dense = replace(dense, scale=cfg.number("mup_attn_multiplier", default=1.0) / dense.head_dim)
    ff = MLP(hidden=hidden, ffn=width(cfg, hidden), activation="gegelu", bias=True)
    norm = b.layer_norm(cfg, hidden, "layer_norm_epsilon")
    full = b.pre_norm(dense, ff, norm)
    sparse = replace(full, attn=replace(dense, sparse=pattern(cfg)))
    every = None if "dense_attention_every_n_layers" in cfg.data else 2
    every = cfg.integer("dense_attention_every_n_layers", hi=LAYERS, default=every)
    layers = tuple(full if every and (i + 1) % every == 0 else sparse for i in range(n))
    rates = [cfg.number(f"{x}_dropout_prob", default=p, hi=1.0) for x, p in (("embedding", 0.1), ("ffn", 0.1))]
    model = b.decoder(cfg, "phi3small", layers, norm=norm, tied_default=True, context=read_context(cfg, rope),
                      embed_scale=cfg.number("mup_embedding_multiplier", default=10.0) or None, dropout=max(rates))
    return replace(model, head=replace(model.head, scale=1 / (cfg.number("mup_width_multiplier", default=8.0) or 1.0)))


def width(cfg: Config, hidden: int) -> int:
    """ff_intermediate_size, or ff_dim_multiplier x 2/3 of the hidden size, rounded up to 256."""
    given = cfg.integer("ff_intermediate_size", default=None)
    times = cfg.integer("ff_dim_multiplier", hi=COUNT, default=None)
    if (given is None) == (times is None):
        raise cfg.refuse("config-missing", "the width is ff_intermediate_size or ff_dim_multiplier, one of the two")
    if given is not None:
        return int(given)
    wide: int = times * (hidden // 3) * 2
    return -(-wide // 256) * 256 if cfg.flag("gegelu_pad_to_256", default=True) else wide


def pattern(cfg: Config) -> BlockSparse:
    """The blocksparse_* keys, with the class's own values where the file is silent."""
    block, local, stride = (cfg.integer(f"blocksparse_{key}", default=d)
                            for key, d in (("block_size", 64), ("num_local_blocks", 16), ("vert_stride", 8)))
    return BlockSparse(block=block, local=local, stride=stride,
                       per_head=not cfg.flag("blocksparse_homo_head_pattern", default=False))
