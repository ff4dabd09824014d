"""LFM2: gated short convolutions in most layers, normed grouped-query attention in the others (arXiv:2511.23404)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, blocks, modules
from llamactl.arch._state import mixer
from llamactl.spec.config import COUNT, LAYERS, Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import MLP, Norm
from llamactl.spec.ropeconfig import read_context, read_rope
from llamactl.spec.state import ShortConv

MODEL_TYPES = ("lfm2",)
WEIGHTS = {"gate": "w1", "up": "w3", "down": "w2"}
HF = (
    *modules({**LLAMA_OUTER, "norm": "model.embedding_norm"}),
    *blocks({**ATTENTION, "attn.o": "self_attn.out_proj", "attn.q_norm": "self_attn.q_layernorm",
             "attn.k_norm": "self_attn.k_layernorm", "attn_norm": "operator_norm", "mlp_norm": "ffn_norm"},
            {f"mlp.{x}": f"feed_forward.{w}" for x, w in WEIGHTS.items()}),
    *mixer("model.layers.{i}.conv.", {"in": "in_proj", "conv": "conv", "out": "out_proj"}),
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.expect("block_use_swiglu", allowed=(True,), default=True)
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        cfg.expect(key, allowed=(hidden,), default=hidden)
    words = cfg.layer_types(n, ("full_attention", "conv"))
    if words is None:
        where = cfg.integers("full_attn_idxs", hi=LAYERS)
        words = tuple("full_attention" if i in where else "conv" for i in range(n))
    ff = MLP(hidden=hidden, ffn=adjusted(cfg, cfg.integer("block_ff_dim", "intermediate_size")), activation="silu")
    of = mixers(cfg, hidden)
    return finish(cfg, "lfm2", [replace(of[word], mlp=ff) for word in words], of)


def adjusted(cfg: Config, width: int) -> int:
    """2/3 of the written width, times a multiplier, rounded up: unless block_auto_adjust_ff_dim is off."""
    if not cfg.flag("block_auto_adjust_ff_dim", default=True):
        return width
    width = int(2 * width / 3)
    multiplier = cfg.number("block_ffn_dim_multiplier", default=1.0, lo=1e-3, hi=64)
    if "block_ffn_dim_multiplier" in cfg.data and cfg.data["block_ffn_dim_multiplier"] is None:
        return width  # null also turns the rounding off
    multiple: int = cfg.integer("block_multiple_of", default=256)
    return -(-int(multiplier * width) // multiple) * multiple


def mixers(cfg: Config, hidden: int) -> dict[str, Layer]:
    """The two kinds of block by their word in layer_types, without a feed-forward."""
    rope = read_rope(cfg, b.rope_dim(cfg, hidden), theta=1e6)
    norm = Norm(dim=hidden, eps=cfg.number("norm_eps", default=1e-5))
    _, _, head_dim = b.heads(cfg, hidden, kv_default="refuse")
    attn = b.attention(cfg, hidden, rope=rope, qk_norm=replace(norm, dim=head_dim))
    conv = ShortConv(hidden=hidden, kernel=cfg.integer("conv_L_cache", hi=COUNT),
                     bias=cfg.flag("conv_bias", default=False))
    full = Layer(attn=attn, mlp=None, attn_norm=norm, mlp_norm=norm)
    return {"full_attention": full, "conv": replace(full, attn=None, state=conv)}


def finish(cfg: Config, family: str, layers: list[Layer], of: dict[str, Layer]) -> Model:
    """The decoder; tie_embedding is this maker's own word for the tie."""
    tie = cfg.flag("tie_embedding", "tie_word_embeddings", default=True)
    full = of["full_attention"]
    assert full.attn
    model = b.decoder(cfg, family, layers, norm=full.attn_norm, tied_default=tie,
                      context=read_context(cfg, full.attn.rope))
    if "tie_embedding" not in cfg.data:
        return model
    return replace(model, tied_why=f"tie_embedding is {str(tie).lower()}")
