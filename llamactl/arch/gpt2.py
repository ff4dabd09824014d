"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere, fused qkv, (in, out) matrices, tied head."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import modules
from llamactl.spec.config import COUNT, POSITIONS, Config
from llamactl.spec.model import Context, Layer, Model
from llamactl.spec.naming import Fused, Transposed, rule
from llamactl.spec.parts import MLP, Attention, LearnedPositions

MODEL_TYPES = ("gpt2",)
GGUF = ("gpt2",)
H, L = "transformer.h.{i}.", "layers.{i}."
QKV_W = tuple(f"{L}attn.{x}.weight" for x in "qkv")
QKV_B = tuple(f"{L}attn.{x}.bias" for x in "qkv")
HF = (
    *modules({"embed": "transformer.wte", "pos_embed": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head",
              f"{L}attn_norm": f"{H}ln_1", f"{L}mlp_norm": f"{H}ln_2"}),
    rule(f"{H}attn.c_attn.weight", *QKV_W, ops=(Fused(), Transposed())),
    rule(f"{H}attn.c_attn.bias", *QKV_B, ops=(Fused(),)),
    rule(f"{H}attn.c_proj.weight", f"{L}attn.o.weight", ops=(Transposed(),)),
    rule(f"{H}attn.c_proj.bias", f"{L}attn.o.bias"),
    rule(f"{H}mlp.c_fc.weight", f"{L}mlp.up.weight", ops=(Transposed(),)),
    rule(f"{H}mlp.c_fc.bias", f"{L}mlp.up.bias"),
    rule(f"{H}mlp.c_proj.weight", f"{L}mlp.down.weight", ops=(Transposed(),)),
    rule(f"{H}mlp.c_proj.bias", f"{L}mlp.down.bias"),
)
IGNORED = (
    (f"{H}attn.bias", "the causal mask as a buffer, computed from n_positions"),
    (f"{H}attn.masked_bias", "the value of a masked position, a constant"),
)
GGUF_NAMES = "qkv"
HF_CLASS = "GPT2LMHeadModel"
HF_WORDS = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions"}
# nanoGPT's ckpt.pt: the same names, with matrices (out, in).
NANOGPT = tuple(rule(r.stored, *r.of, ops=tuple(op for op in r.ops if not isinstance(op, Transposed))) for r in HF)
NANOGPT_IGNORED = IGNORED
# As it is written when the model is built by hand in plain words.
LESSON = modules({
    "embed": "wte", "pos_embed": "wpe", "norm": "norm", "head": "lm_head", f"{L}attn_norm": "blocks.{i}.ln_1",
    f"{L}mlp_norm": "blocks.{i}.ln_2", f"{L}mlp.up": "blocks.{i}.mlp.w1", f"{L}mlp.down": "blocks.{i}.mlp.w2",
    **{f"{L}attn.{x}": f"blocks.{{i}}.attn.w{x}" for x in "qkvo"}})
LESSON_IGNORED = (("*.mask", "the causal mask as a buffer"),)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.expect("add_cross_attention", allowed=(False,), default=False)
    heads = cfg.integer("n_head", "num_attention_heads", hi=COUNT)
    rows = cfg.integer("n_positions", "max_position_embeddings", hi=POSITIONS, default=None)
    if rows is None:  # the oldest files have n_ctx alone; beside n_positions it plays no part
        rows = cfg.integer("n_ctx", hi=POSITIONS)
    bias = cfg.flag("bias", default=True)  # nanoGPT's word: false takes the biases of its norms too
    attn = Attention(hidden=hidden, n_heads=heads, n_kv_heads=heads, head_dim=cfg.divided(hidden, heads),
                     qkv_bias=bias, o_bias=bias)
    ffn = cfg.integer("n_inner", default=4 * hidden)
    act = cfg.activation("activation_function", default="gelu_new")
    norm = b.layer_norm(cfg, hidden, "layer_norm_epsilon", bias=bias)
    scale = None if cfg.flag("scale_attn_weights", default=True) else 1.0
    attn = replace(attn, scale=scale)
    layer = Layer(attn=attn, mlp=MLP(hidden=hidden, ffn=ffn, activation=act, gated=False, bias=bias),
                  attn_norm=norm, mlp_norm=norm)
    layers = (layer,) * n
    if cfg.flag("scale_attn_by_inverse_layer_idx", default=False):
        own = attn.usual_scale if scale is None else scale
        layers = tuple(replace(layer, attn=replace(attn, scale=own / (i + 1))) for i in range(n))
    return b.decoder(cfg, "gpt2", layers, norm=norm, tied_default=True, dropout=0.1,
                     positions=LearnedPositions(rows=rows, dim=hidden),
                     context=Context(trained=rows, usable=rows, why="the position table ends there"))


def from_gguf(meta: Config) -> dict[str, object]:
    """Always tied; early files store a copy of the embedding as output.weight."""
    return {"tie_word_embeddings": True}
