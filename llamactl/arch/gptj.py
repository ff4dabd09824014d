"""GPT-J: parallel block under one LayerNorm, partial RoPE in neighbouring pairs, biases on MLP and head alone."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import modules
from llamactl.spec.config import COUNT, POSITIONS, Config
from llamactl.spec.model import Context, Model
from llamactl.spec.parts import MLP, Attention
from llamactl.spec.rope import Rope

MODEL_TYPES = ("gptj",)
H, L = "transformer.h.{i}.", "layers.{i}."
HF = modules({
    "embed": "transformer.wte", "norm": "transformer.ln_f", "head": "lm_head", f"{L}attn_norm": f"{H}ln_1",
    **{f"{L}attn.{x}": f"{H}attn.{x}_proj" for x in "qkv"}, f"{L}attn.o": f"{H}attn.out_proj",
    f"{L}mlp.up": f"{H}mlp.fc_in", f"{L}mlp.down": f"{H}mlp.fc_out",
})


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.expect("rotary", allowed=(True,), default=True)
    heads = cfg.integer("n_head", "num_attention_heads", hi=COUNT)
    dim = cfg.divided(hidden, heads)
    rows = cfg.integer("n_positions", "max_position_embeddings", hi=POSITIONS)
    rotated = cfg.integer("rotary_dim", lo=2, hi=dim, default=None if "rotary_dim" in cfg.data else 64)
    if rotated is None or rotated % 2 or rotated > dim:
        raise cfg.refuse("config-rope", f"{rotated} rotated dimensions of {dim}: rotation needs an even part of a head")
    rope = Rope(dim=rotated, theta=10000.0, pairs="adjacent")
    attn = Attention(hidden=hidden, n_heads=heads, n_kv_heads=heads, head_dim=dim, rope=rope)
    act = cfg.activation("activation_function", default="gelu_new")
    ffn = cfg.integer("n_inner", default=4 * hidden)
    norm = b.layer_norm(cfg, hidden, "layer_norm_epsilon")
    layer = b.pre_norm(attn, MLP(hidden=hidden, ffn=ffn, activation=act, gated=False, bias=True), norm, parallel=True)
    return b.decoder(cfg, "gptj", (layer,) * n, norm=norm, head_bias=True,
                     context=Context(trained=rows, usable=rows, why="the table of sines ends there"))
