"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 whose query heads share one KV head, plain matrices (arXiv:2305.06161)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import modules
from llamactl.spec.config import COUNT, POSITIONS, Config
from llamactl.spec.model import Context, Model
from llamactl.spec.naming import Fused, rule
from llamactl.spec.parts import MLP, Attention, LearnedPositions

MODEL_TYPES = ("gpt_bigcode",)
H, L = "transformer.h.{i}.", "layers.{i}."
HF = (
    *modules({"embed": "transformer.wte", "pos_embed": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head",
              f"{L}attn_norm": f"{H}ln_1", f"{L}mlp_norm": f"{H}ln_2", f"{L}attn.o": f"{H}attn.c_proj",
              f"{L}mlp.up": f"{H}mlp.c_fc", f"{L}mlp.down": f"{H}mlp.c_proj"}),
    *(rule(f"{H}attn.c_attn.{p}", *(f"{L}attn.{x}.{p}" for x in "qkv"), ops=(Fused(order="per_group"),))
      for p in ("weight", "bias")),
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.expect("add_cross_attention", allowed=(False,), default=False)
    heads = cfg.integer("n_head", "num_attention_heads", hi=COUNT)
    rows = cfg.integer("n_positions", "max_position_embeddings", hi=POSITIONS)
    kv = 1 if cfg.flag("multi_query", default=True) else heads
    attn = Attention(hidden=hidden, n_heads=heads, n_kv_heads=kv, head_dim=cfg.divided(hidden, heads), qkv_bias=True,
                     o_bias=True, scale=None if cfg.flag("scale_attn_weights", default=True) else 1.0)
    ffn = cfg.integer("n_inner", default=4 * hidden)
    act = cfg.activation("activation_function", default="gelu_pytorch_tanh")
    norm = b.layer_norm(cfg, hidden, "layer_norm_epsilon")
    layer = b.pre_norm(attn, MLP(hidden=hidden, ffn=ffn, activation=act, gated=False, bias=True), norm)
    return b.decoder(cfg, "gpt_bigcode", (layer,) * n, norm=norm, tied_default=True, dropout=0.1,
                     positions=LearnedPositions(rows=rows, dim=hidden),
                     context=Context(trained=rows, usable=rows, why="the position table ends there"))
