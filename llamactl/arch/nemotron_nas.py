"""Llama-Nemotron (51B, Super 49B, Ultra 253B): Llama blocks thinned one by one by a search (arXiv:2411.19146)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA, blocks
from llamactl.spec.config import COUNT, Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import MLP, Attention, Leaf, Norm
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("nemotron-nas",)
HF = (*LLAMA, *blocks({"attn.linear": "self_attn.linear_attn", "mlp.linear": "mlp.linear_mlp"}))
KNOWN = {"n_heads_in_group", "ffn_mult", "no_op", "replace_with_linear", "attention", "ffn"}


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden))
    heads, bias = cfg.integer("num_attention_heads", hi=COUNT), cfg.flag("attention_bias", default=False)
    head_dim = cfg.integer("head_dim", default=None) or cfg.divided(hidden, heads)
    attn = Attention(hidden=hidden, n_heads=heads, n_kv_heads=heads, head_dim=head_dim, rope=rope, qkv_bias=bias,
                     o_bias=bias)
    act, mlp_bias = cfg.activation("hidden_act", default="silu"), cfg.flag("mlp_bias", default=False)
    ff, norm = MLP(hidden=hidden, ffn=hidden, activation=act, bias=mlp_bias), b.rms(cfg, hidden)
    given = cfg.get("block_configs")
    if not isinstance(given, list) or len(given) != n or not all(isinstance(x, dict) for x in given):
        raise cfg.refuse("config-layers", f"block_configs is not a list of {n} objects, one for each layer")
    made = [block(Config(x, cfg.path, prefix=f"block_configs[{i}].", parent=cfg), attn, ff, norm)
            for i, x in enumerate(given)]
    return b.decoder(cfg, "nemotron_nas", made, norm=norm, context=read_context(cfg, rope))


def block(one: Config, attn: Attention, ff: MLP, norm: Norm) -> Layer:
    """A Llama block in which each branch may be absent with its norm, or one square matrix."""
    layer = Layer(attn=attn, mlp=ff, attn_norm=norm, mlp_norm=norm)
    shape = (ff.hidden, ff.hidden)
    mixes, feeds = known(one).section("attention"), one.section("ffn")
    if mixes is None or feeds is None:
        raise one.refuse("config-missing", f"{one.prefix}{'ffn' if mixes else 'attention'} is missing")
    if known(mixes).flag("no_op", default=False):
        layer = replace(layer, attn=None, attn_norm=None)
    elif mixes.flag("replace_with_linear", default=False):
        layer = replace(layer, attn=None, extra=(Leaf("attn.linear.weight", shape, "attention.other"),))
    else:
        group = mixes.integer("n_heads_in_group", hi=COUNT)
        if attn.n_heads % group:
            raise one.refuse("config-heads", f"{attn.n_heads} heads are not cut evenly into groups of {group}")
        layer = replace(layer, attn=replace(attn, n_kv_heads=attn.n_heads // group))
    if known(feeds).flag("no_op", default=False):
        return replace(layer, mlp=None, mlp_norm=None)
    if feeds.flag("replace_with_linear", default=False):
        return replace(layer, mlp=None, extra=(*layer.extra, Leaf("mlp.linear.weight", shape, "feed_forward.up")))
    width = int(2 * feeds.number("ffn_mult", lo=1e-6, hi=1e3) * ff.hidden / 3)
    return replace(layer, mlp=replace(ff, ffn=-(-width // 256) * 256))


def known(cfg: Config) -> Config:
    """`cfg`, refused where it holds more than is described here: sinks, windows, sparsity, other kinds of block."""
    for key, value in cfg.data.items():
        if key not in KNOWN and value not in (None, False):
            raise cfg.refuse("config-unsupported", f"{cfg.prefix}{key} is {value!r}, which is not described here")
    return cfg
