"""What the families with latent attention share: DeepSeek-V2, V3, V3.2 and the ones built like them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log

from llamactl.arch import _build as b
from llamactl.arch._moe import SHARED, experts, moe_layers, mtp
from llamactl.arch._names import EXPERTS, LLAMA_OUTER, MLP, PRE_NORMS, blocks, modules
from llamactl.spec.config import COUNT, Config
from llamactl.spec.latent import Indexer, LatentAttention
from llamactl.spec.model import Layer, Model
from llamactl.spec.naming import Fused, rule
from llamactl.spec.rope import Rope
from llamactl.spec.ropeconfig import read_context, read_rope
from llamactl.spec.routing import Routing

H, L = "model.layers.{i}.", "layers.{i}."
LATENT = {
    "attn.q": "self_attn.q_proj", "attn.q_a": "self_attn.q_a_proj", "attn.q_a_norm": "self_attn.q_a_layernorm",
    "attn.q_b": "self_attn.q_b_proj", "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_a_norm": "self_attn.kv_a_layernorm", "attn.o": "self_attn.o_proj",
}
KV_B = rule(f"{H}self_attn.kv_b_proj.weight", f"{L}attn.k_b.weight", f"{L}attn.v_b.weight",
            ops=(Fused(order="per_group"),))
DEEPSEEK = (
    *modules(LLAMA_OUTER),
    *blocks(LATENT, PRE_NORMS, MLP, EXPERTS, SHARED),
    KV_B,
    rule(f"{H}mlp.gate.e_score_correction_bias", f"{L}mlp.router.correction_bias"),
)
INDEXER = blocks({"attn.indexer.q": "self_attn.indexer.wq_b", "attn.indexer.k": "self_attn.indexer.wk",
                  "attn.indexer.k_norm": "self_attn.indexer.k_norm",
                  "attn.indexer.weights": "self_attn.indexer.weights_proj"})


def attention(cfg: Config, hidden: int, rope: Rope, *, v_dim: int | None = None) -> LatentAttention:
    """Latent attention of the config's ranks and widths; rope.dim of each head turn. v_dim: by default."""
    n_heads = cfg.integer("num_attention_heads", hi=COUNT)
    if "q_lora_rank" not in cfg.data:
        raise cfg.refuse("config-missing", "q_lora_rank is missing (null stands for an unfactored q)")
    nope = cfg.integer("qk_nope_head_dim")
    return LatentAttention(
        hidden=hidden, n_heads=n_heads, q_rank=cfg.integer("q_lora_rank", default=None),
        kv_rank=cfg.integer("kv_lora_rank"), qk_nope=nope, qk_rope=rope.dim, scale=score_scale(nope + rope.dim, rope),
        v_dim=cfg.integer("v_head_dim") if v_dim is None else cfg.integer("v_head_dim", default=v_dim), eps=1e-6,
        rope=rope, bias=cfg.flag("attention_bias", default=False),
    )


def score_scale(dim: int, rope: Rope) -> float | None:
    """dim^-0.5 x (0.1 mscale_all_dim ln(factor) + 1)^2 where YaRN names mscale_all_dim; None for dim^-0.5."""
    s = rope.scaling
    if s is None or not s.mscale_all_dim or not s.factor or s.factor <= 1:
        return None
    return float(dim**-0.5 * (0.1 * s.mscale_all_dim * log(s.factor) + 1.0) ** 2)


def deepseek(cfg: Config, family: str, routing: Routing | None, *, correction: bool) -> Model:
    """The stack of V2 and V3: first_k_dense_replace dense layers, then MoE.

    correction: V3's load-balancing bias, a stored buffer beside each router.
    """
    hidden, n = b.shape(cfg)
    pairs = "adjacent" if cfg.flag("rope_interleave", default=True) else "half"
    attn = attention(cfg, hidden, read_rope(cfg, cfg.integer("qk_rope_head_dim"), pairs=pairs))
    return stack(cfg, family, (attn,) * n, routing, correction=correction)


def sparse(cfg: Config, family: str, full: Sequence[bool], *, pairs: str, routing: Routing | None,
           eps: float = 1e-6) -> Model:
    """V3's stack whose attention reads the tokens an indexer chose (DSA). full: layers with an indexer of their own.

    pairs: how the indexer rotates; attention itself turns neighbouring dimensions. eps: of the norms, by default.
    """
    hidden, n = b.shape(cfg)
    cfg.layer_types(n, ("indexed_attention", "deepseek_sparse_attention"))
    cfg.expect("rope_interleave", allowed=(True,), default=True)
    rope = read_rope(cfg, cfg.integer("qk_rope_head_dim"), pairs="adjacent")
    alone = attention(cfg, hidden, rope)
    if alone.q_rank is None:
        raise cfg.refuse("config-type", "q_lora_rank is null, but the indexer reads the query latent")
    dim = cfg.integer("index_head_dim")
    if dim < rope.dim:
        raise cfg.refuse("config-range", f"index_head_dim is {dim}, less than the {rope.dim} dimensions it rotates")
    indexer = Indexer(hidden=hidden, q_rank=alone.q_rank, heads=cfg.integer("index_n_heads", hi=COUNT), head_dim=dim,
                      top_k=cfg.integer("index_topk"), rope=replace(rope, pairs=pairs))
    choosing = replace(alone, indexer=indexer)
    return stack(cfg, family, [choosing if own else alone for own in full], routing, correction=True, eps=eps)


def stack(cfg: Config, family: str, attention: Sequence[LatentAttention], routing: Routing | None, *,
          correction: bool, eps: float = 1e-6) -> Model:
    """A pre-norm block around each of `attention`, dense or MoE as the config says, and the model around them."""
    hidden, n = b.shape(cfg)
    cfg.expect("moe_layer_freq", allowed=(1,), default=1)
    norm, moe = b.rms(cfg, hidden, default=eps), moe_layers(cfg, n)
    dense = None if all(moe) else b.mlp(cfg, hidden)
    routed = experts(cfg, hidden, routing, correction=correction) if any(moe) else None
    made: dict[tuple[LatentAttention, bool], Layer] = {}
    for key in dict.fromkeys(zip(attention, moe, strict=True)):
        made[key] = Layer(attn=key[0], mlp=routed if key[1] else dense, attn_norm=norm, mlp_norm=norm)
    layers = [made[key] for key in zip(attention, moe, strict=True)]
    drafts = mtp(cfg, replace(layers[-1], attn=attention[0]), hidden) if moe[-1] else ()
    return b.decoder(cfg, family, layers, norm=norm, context=read_context(cfg, attention[0].rope), not_counted=drafts)
