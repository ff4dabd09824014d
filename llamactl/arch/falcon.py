"""Falcon 7B, 40B, 180B, RW: KV heads by three flags, LayerNorm, GELU, qkv fused by KV group (arXiv:2311.16867)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamactl.arch import _build as b
from llamactl.arch._names import modules
from llamactl.spec.config import COUNT, Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.naming import Fused, Rule, rule
from llamactl.spec.parts import MLP, Attention
from llamactl.spec.ropeconfig import read_context, read_rope

if TYPE_CHECKING:
    from llamactl.arch._ggufwords import Metadata

MODEL_TYPES = ("falcon",)
GGUF = ("falcon",)
H, L = "transformer.h.{i}.", "layers.{i}."
COMMON = (
    *modules({"embed": "transformer.word_embeddings", "norm": "transformer.ln_f", "head": "lm_head",
              f"{L}attn.o": f"{H}self_attention.dense", f"{L}mlp.up": f"{H}mlp.dense_h_to_4h",
              f"{L}mlp.down": f"{H}mlp.dense_4h_to_h"}),
    *(rule(f"{H}self_attention.query_key_value.{p}", *(f"{L}attn.{x}.{p}" for x in "qkv"),
           ops=(Fused(order="per_group"),)) for p in ("weight", "bias")),
)
TWO_NORMS = modules({f"{L}attn_norm": f"{H}ln_attn", f"{L}mlp_norm": f"{H}ln_mlp"})
SEQUENTIAL = modules({f"{L}attn_norm": f"{H}input_layernorm", f"{L}mlp_norm": f"{H}post_attention_layernorm"})


def HF(model: Model) -> tuple[Rule, ...]:  # noqa: N802  the norms have other names where two stand side by side
    layer = model.layers[0]
    return (*COMMON, *(TWO_NORMS if layer.parallel and layer.mlp_norm else SEQUENTIAL))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    heads = cfg.integer("num_attention_heads", "n_head", hi=COUNT)
    new = cfg.flag("new_decoder_architecture", default=False)
    alibi, bias = cfg.flag("alibi", default=False), cfg.flag("bias", default=False)
    if new:
        kv = cfg.integer("num_kv_heads", "n_head_kv", hi=COUNT)
    else:
        kv = 1 if cfg.flag("multi_query", default=True) else heads
    if heads % kv:
        raise cfg.refuse("config-heads", f"{heads} heads cannot share {kv} KV heads evenly")
    dim = cfg.divided(hidden, heads)
    rope = None if alibi else read_rope(cfg, dim)
    attn = Attention(hidden=hidden, n_heads=heads, n_kv_heads=kv, head_dim=dim, rope=rope, alibi=alibi, qkv_bias=bias,
                     o_bias=bias, alibi_scaled=alibi, hf_cache_heads=heads if new else None)
    ffn = cfg.integer("ffn_hidden_size", default=4 * hidden)
    ff = MLP(hidden=hidden, ffn=ffn, activation=cfg.activation("activation", default="gelu"), gated=False, bias=bias)
    norm = b.layer_norm(cfg, hidden, "layer_norm_epsilon")
    parallel = cfg.flag("parallel_attn", default=True)
    side_by_side = cfg.integer("num_ln_in_parallel_attn", hi=2, default=2 if new else 1)
    two = not parallel or side_by_side == 2
    layer = Layer(attn=attn, mlp=ff, attn_norm=norm, mlp_norm=norm if two else None, parallel=parallel)
    return b.decoder(cfg, "falcon", (layer,) * n, norm=norm, tied_default=True, context=read_context(cfg, rope))


def from_gguf(meta: Metadata) -> dict[str, object]:
    """KV heads and norms by what is there; only parallel blocks with RoPE exist in GGUF."""
    kv = meta.integer("attention.head_count_kv")
    if meta.holds("output.weight"):
        meta.warnings.append(("gguf-head", "output.weight is counted as a matrix of its own; the published Falcon "
                              "files store a copy of the tied embedding there, and GGUF does not say which it is"))
    return {"new_decoder_architecture": kv > 1, "multi_query": True, "num_kv_heads": kv, "bias": False,
            "num_ln_in_parallel_attn": 2 if meta.holds("attn_norm_2.weight") else 1}
