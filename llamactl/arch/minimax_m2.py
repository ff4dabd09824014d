"""MiniMax-M2 and M2.5: partial RoPE, RMSNorm over all of q and k, many small experts with a correction buffer."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch import _routing
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, PRE_NORMS, QK_NORM, blocks, modules
from llamactl.arch.mixtral import EXPERTS
from llamactl.spec.config import LAYERS, Config
from llamactl.spec.model import Model, NotCounted
from llamactl.spec.naming import rule
from llamactl.spec.ropeconfig import partial_factor, read_context, read_rope

MODEL_TYPES = ("minimax_m2",)
HF = (
    *modules(LLAMA_OUTER),
    *blocks(ATTENTION, QK_NORM, PRE_NORMS, EXPERTS),
    rule("model.layers.{i}.block_sparse_moe.e_score_correction_bias", "layers.{i}.mlp.router.correction_bias"),
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    only_what_is_known(cfg, n)
    dim = cfg.integer("head_dim")  # in every file; the config class would fill in 128
    share = cfg.integer("rotary_dim", default=dim) / dim
    rope = read_rope(cfg, b.rope_dim(cfg, hidden, factor=partial_factor(cfg, share)), theta=5e6)
    attn = b.attention(cfg, hidden, kv_default="refuse", rope=rope)
    attn = replace(attn, q_norm=b.rms(cfg, attn.n_heads * dim), k_norm=b.rms(cfg, attn.n_kv_heads * dim))
    ff = b.moe(cfg, b.mlp(cfg, hidden), "num_local_experts", "num_experts", correction_bias=True,
               routing=_routing.minimax(cfg))
    norm = b.rms(cfg, hidden)
    return b.decoder(cfg, "minimax_m2", (b.pre_norm(attn, ff, norm),) * n, norm=norm, context=read_context(cfg, rope),
                     not_counted=mtp(cfg))


def only_what_is_known(cfg: Config, n: int) -> None:
    """Switches that the files carry and that the published code of the family has in one position only."""
    cfg.expect("use_qk_norm", allowed=(True,), default=True)
    cfg.expect("qk_norm_type", allowed=("per_layer",), default="per_layer")
    cfg.expect("use_routing_bias", allowed=(True,), default=True)
    cfg.expect("shared_intermediate_size", allowed=(0,), default=0)
    kinds = cfg.integers("attn_type_list", default=(1,) * n)
    if set(kinds) != {1} or len(kinds) != n:
        raise cfg.refuse("config-layers", f"attn_type_list is not {n} times 1, full attention")


def mtp(cfg: Config) -> list[NotCounted]:
    """Drafting modules that the config names; neither the published code nor M2.5's files have them."""
    modules = cfg.integer("num_mtp_modules", lo=0, hi=LAYERS, default=0)
    if not modules or not cfg.flag("use_mtp", default=True):
        return []
    return [NotCounted(what="multi-token-prediction modules", params=None,
                       why=f"the config names {modules}; the published files of M2.5 hold none")]
