"""ChatGLM2, ChatGLM3, GLM-4-9B: half of each head rotates in neighbouring pairs, few KV heads (arXiv:2406.12793)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import blocks, modules
from llamactl.spec.config import COUNT, POSITIONS, Config
from llamactl.spec.model import Context, Model, NotCounted
from llamactl.spec.naming import Fused, rule
from llamactl.spec.parts import MLP, Attention, Leaf, Norm
from llamactl.spec.rope import Rope

MODEL_TYPES = ("chatglm",)
H, L = "transformer.encoder.layers.{i}.", "layers.{i}."
BLOCK = {"attn_norm": "input_layernorm", "attn.o": "self_attention.dense", "mlp_norm": "post_attention_layernorm",
         "mlp.down": "mlp.dense_4h_to_h"}
HF = (
    *modules({"embed": "transformer.embedding.word_embeddings", "norm": "transformer.encoder.final_layernorm",
              "head": "transformer.output_layer"}),
    *blocks(BLOCK, prefix=H),
    *(rule(f"{H}self_attention.query_key_value.{p}", *(f"{L}attn.{x}.{p}" for x in "qkv"), ops=(Fused(),))
      for p in ("weight", "bias")),
    *(rule(f"{H}mlp.dense_h_to_4h.{p}", f"{L}mlp.gate.{p}", f"{L}mlp.up.{p}", ops=(Fused(),))
      for p in ("weight", "bias")),
    rule("transformer.rotary_pos_emb.inv_freq", "rotary.inv_freq"),
)
FIXED = {"rmsnorm": True, "post_layer_norm": True, "apply_residual_connection_post_layernorm": False,
         "tie_word_embeddings": False}


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    if "position_encoding_2d" in cfg.data or "inner_hidden_size" in cfg.data:
        raise cfg.refuse("config-unsupported", "this is the first ChatGLM-6B (two-dimensional positions, GELU), which "
                         "is another architecture under the same type")
    for key, known in FIXED.items():
        cfg.expect(key, allowed=(known,), default=known)
    cfg.expect("multi_query_attention", allowed=(True,))
    cfg.expect("pre_seq_len", allowed=(None,), default=None)
    heads, kv = cfg.integer("num_attention_heads", hi=COUNT), cfg.integer("multi_query_group_num", hi=COUNT)
    if heads % kv:
        raise cfg.refuse("config-heads", f"{heads} heads cannot share {kv} KV heads evenly")
    dim, bias = cfg.integer("kv_channels"), cfg.flag("add_bias_linear", default=False)
    length = cfg.integer("seq_length", hi=POSITIONS)
    rope = rotation(cfg, dim, length)
    attn = Attention(hidden=hidden, n_heads=heads, n_kv_heads=kv, head_dim=dim, rope=rope, o_bias=bias,
                     qkv_bias=cfg.flag("add_qkv_bias", default=False) or bias)
    ff = MLP(hidden=hidden, ffn=cfg.integer("ffn_hidden_size"), activation="silu", bias=bias)
    norm = Norm(dim=hidden, eps=cfg.number("layernorm_epsilon", default=1e-5))
    towers = [NotCounted(what="vision tower", params=None, why="vision_config is an encoder not described here")
              ] if cfg.section("vision_config") is not None else ()
    model = b.decoder(cfg, "chatglm", (b.pre_norm(attn, ff, norm),) * n, norm=norm, not_counted=towers,
                      context=Context(trained=length, usable=length, why="seq_length"))
    if cfg.data.get("architectures") == ["ChatGLMModel"]:  # which holds the head itself in this family
        model = replace(model, notes=tuple(x for x in model.notes if x[0] != "architecture-head"))
    return replace(model, extra=(Leaf("rotary.inv_freq", (rope.dim // 2,), "other", "buffer"),))


def rotation(cfg: Config, dim: int, length: int) -> Rope:
    """Base 10,000 x rope_ratio (ChatGLM3, GLM-4). ChatGLM2-32k divides positions by it, and no key says so."""
    if dim % 4:
        raise cfg.refuse("config-rope", f"half of {dim} dimensions rotate: that must be an even number")
    ratio: float = cfg.number("rope_ratio", default=1.0, lo=1e-6)
    if ratio != 1 and length in (2048 * ratio, 8192 * ratio):
        raise cfg.refuse("config-rope", f"rope_ratio {ratio:g} of {length:,} positions may divide the positions or "
                         "multiply the base")
    return Rope(dim=dim // 2, theta=10000.0 * ratio, pairs="adjacent")
