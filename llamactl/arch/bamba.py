"""Bamba: Mamba-2 in most layers, half-rotated attention in attn_layer_indices, a dense feed-forward in each."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, blocks, modules
from llamactl.arch._state import MAMBA2, MAMBA2_VECTORS, grouped, inner, mixer
from llamactl.arch.jamba import FEED_FORWARD
from llamactl.spec.config import COUNT, LAYERS, Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.ropeconfig import partial_factor, read_context, read_rope
from llamactl.spec.state import Mamba2

MODEL_TYPES = ("bamba",)
HF = (
    *modules({**LLAMA_OUTER, "norm": "model.final_layernorm"}),
    *blocks(ATTENTION, FEED_FORWARD, {"attn_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}),
    *mixer("model.layers.{i}.mamba.", MAMBA2, MAMBA2_VECTORS),
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.expect("hidden_act", allowed=("silu", "swish"), default="silu")
    if (factor := partial_factor(cfg, 0.5)) != 0.5:  # the family's own code fixes it
        raise cfg.refuse("config-rope", f"partial_rotary_factor is {factor:g}; this family rotates one half of a head")
    rope = read_rope(cfg, b.rope_dim(cfg, hidden, factor=factor))
    bias = cfg.flag("attention_bias", default=False)
    attn = b.attention(cfg, hidden, kv_default="refuse", rope=rope, qkv_bias=bias, o_bias=bias)
    norm, ff = b.rms(cfg, hidden, default=1e-5), b.mlp(cfg, hidden, bias=cfg.flag("mlp_bias", default=False))
    attends = Layer(attn=attn, mlp=ff, attn_norm=norm, mlp_norm=norm)
    mixes = Layer(attn=None, state=mamba2(cfg, hidden, norm.eps), mlp=ff, attn_norm=norm, mlp_norm=norm)
    where = set(cfg.integers("attn_layer_indices", hi=LAYERS))
    layers = [attends if i in where else mixes for i in range(n)]
    words = ["attention" if i in where else "mamba" for i in range(n)]
    new = ["full_attention" if i in where else "linear_attention" for i in range(n)]
    for key in ("layers_block_type", "layer_types"):
        if cfg.data.get(key) not in (None, words, new):
            raise cfg.refuse("config-conflict", f"{key} and attn_layer_indices disagree")
    return b.decoder(cfg, "bamba", layers, norm=norm, context=read_context(cfg, rope))


def mamba2(cfg: Config, hidden: int, eps: float) -> Mamba2:
    """The mixer by keys that start with mamba_: mamba_n_heads heads share mamba_expand x hidden channels."""
    heads, channels = cfg.integer("mamba_n_heads", hi=COUNT), inner(cfg, hidden, "mamba_expand")
    head_dim = channels // heads if cfg.data.get("mamba_d_head") in (None, "auto") else cfg.integer("mamba_d_head")
    if heads * head_dim != channels:
        raise cfg.refuse("config-conflict", f"{heads} heads of {head_dim} are not the {channels:,} channels of "
                         "mamba_expand x hidden_size")
    return grouped(cfg, Mamba2(
        hidden=hidden, heads=heads, head_dim=head_dim, groups=cfg.integer("mamba_n_groups", hi=COUNT),
        state=cfg.integer("mamba_d_state", hi=COUNT), kernel=cfg.integer("mamba_d_conv", hi=COUNT),
        bias=cfg.flag("mamba_proj_bias", default=False), conv_bias=cfg.flag("mamba_conv_bias", default=True),
        norm_eps=eps,
    ))
