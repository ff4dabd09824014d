"""EXAONE 3.0, 3.5, Deep: a Llama block under GPT-2's names, c_fc_0 the gate and c_fc_1 the up (arXiv:2408.03541)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import modules
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.parts import MLP, Norm
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("exaone",)
H, L = "transformer.h.{i}.", "layers.{i}."
HF = modules({
    "embed": "transformer.wte", "norm": "transformer.ln_f", "head": "lm_head",
    f"{L}attn_norm": f"{H}ln_1", f"{L}mlp_norm": f"{H}ln_2",
    **{f"{L}attn.{x}": f"{H}attn.attention.{x}_proj" for x in "qkv"}, f"{L}attn.o": f"{H}attn.attention.out_proj",
    f"{L}mlp.gate": f"{H}mlp.c_fc_0", f"{L}mlp.up": f"{H}mlp.c_fc_1", f"{L}mlp.down": f"{H}mlp.c_proj",
})


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden), theta=500000.0)
    bias = cfg.flag("attention_bias", default=False)
    attn = b.attention(cfg, hidden, kv_default="refuse", rope=rope, qkv_bias=bias, o_bias=bias)
    act = cfg.activation("activation_function", "hidden_act", default="silu")
    ff = MLP(hidden=hidden, ffn=cfg.integer("intermediate_size"), activation=act,
             bias=cfg.flag("mlp_bias", default=False))
    norm = Norm(dim=hidden, eps=cfg.number("layer_norm_epsilon", "rms_norm_eps", default=1e-5))
    return b.decoder(cfg, "exaone", (b.pre_norm(attn, ff, norm),) * n, norm=norm, context=read_context(cfg, rope))
