"""Qwen 1 (1.8B to 72B): biases on q, k, v alone, intermediate_size is both halves of the MLP (arXiv:2309.16609)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import modules
from llamactl.spec.config import COUNT, POSITIONS, Config
from llamactl.spec.model import Context, Model, NotCounted
from llamactl.spec.naming import Fused, rule
from llamactl.spec.parts import MLP, Attention, Norm
from llamactl.spec.ropeconfig import partial_factor, read_rope

MODEL_TYPES = ("qwen",)
H, L = "transformer.h.{i}.", "layers.{i}."
HF = (
    *modules({"embed": "transformer.wte", "norm": "transformer.ln_f", "head": "lm_head", f"{L}attn_norm": f"{H}ln_1",
              f"{L}mlp_norm": f"{H}ln_2", f"{L}attn.o": f"{H}attn.c_proj", f"{L}mlp.up": f"{H}mlp.w1",
              f"{L}mlp.gate": f"{H}mlp.w2", f"{L}mlp.down": f"{H}mlp.c_proj"}),
    *(rule(f"{H}attn.c_attn.{p}", *(f"{L}attn.{x}.{p}" for x in "qkv"), ops=(Fused(),)) for p in ("weight", "bias")),
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    heads, dim = cfg.integer("num_attention_heads", hi=COUNT), cfg.integer("kv_channels")
    if heads * dim != hidden:
        raise cfg.refuse("config-heads", f"{heads} heads of {dim} are not the hidden size {hidden:,}, by which q, k "
                         "and v are cut apart")
    both = cfg.integer("intermediate_size")
    if both % 2:
        raise cfg.refuse("config-range", f"intermediate_size is {both:,}, which gate and up cannot share evenly")
    rotated = int(dim * partial_factor(cfg, 1.0, "rotary_pct"))
    if rotated % 2 or rotated < 2:
        raise cfg.refuse("config-rope", f"{rotated} rotated dimensions of {dim}: rotation needs an even number")
    bias = not cfg.flag("no_bias", default=True)
    attn = Attention(hidden=hidden, n_heads=heads, n_kv_heads=heads, head_dim=dim, rope=read_rope(cfg, rotated),
                     qkv_bias=True, o_bias=bias)
    if any(cfg.flag(key, default=True) for key in ("use_dynamic_ntk", "use_logn_attn")):
        attn = replace(attn, exact_to=cfg.integer("seq_length", hi=POSITIONS, default=None) or 0)
    norm = Norm(dim=hidden, eps=cfg.number("layer_norm_epsilon", default=1e-6))
    layer = b.pre_norm(attn, MLP(hidden=hidden, ffn=both // 2, activation="silu", bias=bias), norm)
    towers = [NotCounted(what=f"{key} tower", params=None, why=f"{key} is an encoder that is not described here")
              for key in ("visual", "audio") if cfg.section(key) is not None]
    return b.decoder(cfg, "qwen", (layer,) * n, norm=norm, not_counted=towers, context=reach(cfg))


def reach(cfg: Config) -> Context:
    """seq_length is trained; past it the code lets the base grow and scales q by the length's logarithm."""
    trained = cfg.integer("seq_length", hi=POSITIONS, default=None)
    usable = cfg.integer("max_position_embeddings", hi=POSITIONS, default=None)
    if trained is None:
        return Context(trained=None, usable=usable, why="the config names no seq_length")
    if not cfg.flag("use_dynamic_ntk", default=True) or usable is None or usable <= trained:
        return Context(trained=trained, usable=trained, why="seq_length")
    return Context(trained=trained, usable=usable, why="seq_length, stretched by a growing base (use_dynamic_ntk)")
