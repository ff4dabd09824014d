"""OPT, Galactica: GPT-2 with ReLU, unfused matrices and a table two rows ahead; 350M norms late (arXiv:2205.01068)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import ATTENTION, blocks, modules
from llamactl.spec.config import COUNT, POSITIONS, Config
from llamactl.spec.model import Context, Layer, Model
from llamactl.spec.parts import MLP, Attention, LearnedPositions, Norm, linear

MODEL_TYPES = ("opt",)
D = "model.decoder."
NORMS = {
    "attn_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm",
    "attn_post_norm": "self_attn_layer_norm", "mlp_post_norm": "final_layer_norm",
}
HF = (
    *modules({"embed": f"{D}embed_tokens", "pos_embed": f"{D}embed_positions", "project_in": f"{D}project_in",
              "norm": f"{D}final_layer_norm", "project_out": f"{D}project_out", "head": "lm_head"}),
    *blocks({**ATTENTION, "attn.o": "self_attn.out_proj"}, NORMS, {"mlp.up": "fc1", "mlp.down": "fc2"},
            prefix=f"{D}layers.{{i}}."),
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    heads = cfg.integer("num_attention_heads", hi=COUNT)
    length = cfg.integer("max_position_embeddings", hi=POSITIONS)
    bias, affine = cfg.flag("enable_bias", default=True), cfg.flag("layer_norm_elementwise_affine", default=True)
    attn = Attention(hidden=hidden, n_heads=heads, n_kv_heads=heads, head_dim=cfg.divided(hidden, heads),
                     qkv_bias=bias, o_bias=bias)
    act = cfg.activation("activation_function", default="relu")
    ff = MLP(hidden=hidden, ffn=cfg.integer("ffn_dim"), activation=act, gated=False, bias=bias)
    norm = Norm(dim=hidden, eps=1e-5, kind="layer", weight=affine, bias=affine)
    before = cfg.flag("do_layer_norm_before", default=True)
    bare = cfg.flag("_remove_final_layer_norm", default=False) or not before
    late = Layer(attn=attn, mlp=ff, attn_post_norm=norm, mlp_post_norm=norm, post_residual=True)
    model = b.decoder(cfg, "opt", (b.pre_norm(attn, ff, norm) if before else late,) * n, norm=None if bare else norm,
                      tied_default=True, dropout=cfg.number("dropout", default=0.1, hi=1.0),
                      positions=LearnedPositions(rows=length + 2, dim=hidden, offset=2),
                      context=Context(trained=length, usable=length, why="the position table ends there"))
    dim = cfg.integer("word_embed_proj_dim", default=hidden)
    if dim == hidden:
        return model
    into = (*linear("project_in", hidden, dim, "other"), *linear("project_out", dim, hidden, "other"))
    return replace(model, embed=replace(model.embed, dim=dim), head=replace(model.head, hidden=dim), extra=into)
