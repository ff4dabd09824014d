"""DBRX: 16 fine-grained experts in flat stacked matrices, clipped q, k and v, LayerNorm without biases, no ties."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch import _routing
from llamactl.arch._names import modules
from llamactl.spec.config import COUNT, POSITIONS, Config
from llamactl.spec.model import Context, Model
from llamactl.spec.naming import Fused, rule
from llamactl.spec.parts import MLP, Attention, Norm
from llamactl.spec.rope import Rope
from llamactl.spec.ropeconfig import read_scaling, read_theta, rope_block

MODEL_TYPES = ("dbrx",)
H, L = "transformer.blocks.{i}.", "layers.{i}."
A, E = f"{H}norm_attn_norm.", f"{L}mlp.experts.{{e}}."
HF = (
    *modules({"embed": "transformer.wte", "norm": "transformer.norm_f", "head": "lm_head",
              f"{L}attn_norm": f"{A}norm_1", f"{L}mlp_norm": f"{A}norm_2", f"{L}attn.o": f"{A}attn.out_proj",
              f"{L}mlp.router": f"{H}ffn.router.layer"}),
    rule(f"{A}attn.Wqkv.weight", *(f"{L}attn.{x}.weight" for x in "qkv"), ops=(Fused(),)),
    rule(f"{H}ffn.experts.mlp.w1", f"{E}gate.weight", ops=(Fused(),)),
    rule(f"{H}ffn.experts.mlp.v1", f"{E}up.weight", ops=(Fused(),)),
    rule(f"{H}ffn.experts.mlp.w2", f"{E}down.weight", ops=(Fused(order="transposed"),)),
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.expect("tie_word_embeddings", allowed=(False,), default=False)
    inner, experts = part(cfg, "attn_config"), part(cfg, "ffn_config")
    experts.expect("moe_normalize_expert_weights", allowed=(1,), default=1)
    heads, kv = cfg.integer("n_heads", "num_attention_heads", hi=COUNT), inner.integer("kv_n_heads", hi=COUNT)
    if heads % kv:
        raise cfg.refuse("config-heads", f"{heads} heads cannot share {kv} KV heads evenly")
    dim = cfg.divided(hidden, heads)
    attn = Attention(hidden=hidden, n_heads=heads, n_kv_heads=kv, head_dim=dim, rope=rotation(cfg, inner, dim),
                     clip=inner.number("clip_qkv", default=None, lo=1e-6))
    act = experts.section("ffn_act_fn") or Config({}, cfg.path, prefix=f"{experts.prefix}ffn_act_fn.", parent=experts)
    wide = experts.integer("ffn_hidden_size")
    expert = MLP(hidden=hidden, ffn=wide, activation=act.activation("name", default="silu"))
    norm = Norm(dim=hidden, eps=1e-5, kind="layer")
    length = cfg.integer("max_seq_len", "max_position_embeddings", hi=POSITIONS)
    ff = b.moe(experts, expert, "moe_num_experts", routing=_routing.dbrx(experts))
    return b.decoder(cfg, "dbrx", (b.pre_norm(attn, ff, norm),) * n, norm=norm,
                     context=Context(trained=length, usable=length, why="max_seq_len"))


def part(cfg: Config, key: str) -> Config:
    """A nested object that must be there: the class would fill in the shapes of a toy model."""
    inner = cfg.section(key)
    if inner is None:
        raise cfg.refuse("config-missing", f"{key} is missing")
    return inner


def rotation(cfg: Config, inner: Config, dim: int) -> Rope:
    """The base stands in attn_config; transformers 5 drops it there and writes its own default at the top."""
    block = rope_block(cfg)
    top = read_theta(cfg, 10000.0, block)
    theta: float = inner.number("rope_theta", default=top, lo=1e-6)
    return Rope(dim=dim, theta=theta, scaling=read_scaling(cfg, block, dim))
