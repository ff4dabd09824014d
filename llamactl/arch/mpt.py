"""MPT: ALiBi, LayerNorm without biases, exact GELU, no bias anywhere, plain concatenated qkv, tied head."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import modules
from llamactl.spec.config import COUNT, POSITIONS, Config
from llamactl.spec.model import Context, Model
from llamactl.spec.naming import Fused, rule
from llamactl.spec.parts import MLP, Attention

MODEL_TYPES = ("mpt",)
H, L = "transformer.blocks.{i}.", "layers.{i}."
HF = (
    *modules({"embed": "transformer.wte", "norm": "transformer.norm_f", "head": "lm_head",
              f"{L}attn_norm": f"{H}norm_1", f"{L}mlp_norm": f"{H}norm_2", f"{L}attn.o": f"{H}attn.out_proj",
              f"{L}mlp.up": f"{H}ffn.up_proj", f"{L}mlp.down": f"{H}ffn.down_proj"}),
    rule(f"{H}attn.Wqkv.weight", *(f"{L}attn.{x}.weight" for x in "qkv"), ops=(Fused(),)),
)
# What the older, public code can vary and no published model does: each changes tensors or arithmetic.
FIXED = {"no_bias": (True,), "expansion_ratio": (4,), "norm_type": ("low_precision_layernorm", "layernorm")}
FIXED_ATTENTION = {"attn_type": ("multihead_attention",), "qk_ln": (False,), "prefix_lm": (False,),
                   "alibi_bias_max": (8,)}


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    for key, known in FIXED.items():
        cfg.expect(key, allowed=known, default=known[0])
    cfg.expect("logit_scale", allowed=(None,), default=None)
    inner = cfg.section("attn_config")
    if inner is None:
        raise cfg.refuse("config-missing", "attn_config is missing")
    for key, allowed in FIXED_ATTENTION.items():
        inner.expect(key, allowed=allowed, default=allowed[0])
    inner.expect("alibi", allowed=(True,))
    length = cfg.integer("max_seq_len", "max_position_embeddings", hi=POSITIONS)
    heads = cfg.integer("n_heads", "num_attention_heads", hi=COUNT)
    attn = Attention(hidden=hidden, n_heads=heads, n_kv_heads=heads, head_dim=cfg.divided(hidden, heads), alibi=True,
                     clip=inner.number("clip_qkv", default=None) or None,
                     scale=inner.number("softmax_scale", default=None))
    ff = MLP(hidden=hidden, ffn=4 * hidden, activation="gelu", gated=False)
    norm = b.layer_norm(cfg, hidden, "layer_norm_epsilon", bias=False)
    return b.decoder(cfg, "mpt", (b.pre_norm(attn, ff, norm),) * n, norm=norm, tied_default=True,
                     context=Context(trained=length, usable=length, why="max_seq_len"))
