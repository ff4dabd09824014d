"""ERNIE 4.5 MoE (21B-A3B, 300B-A47B): its dense block first, then routed experts, beside shared ones in the 21B."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch import _routing
from llamactl.arch._moe import SHARED
from llamactl.arch._names import EXPERTS, LLAMA, blocks
from llamactl.spec.config import COUNT, LAYERS, Config
from llamactl.spec.model import Layer, Model, NotCounted
from llamactl.spec.naming import rule
from llamactl.spec.parts import MLP, MoE
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("ernie4_5_moe",)
HF = (
    *LLAMA, *blocks(EXPERTS, SHARED),
    rule("model.layers.{i}.mlp.moe_statics.e_score_correction_bias", "layers.{i}.mlp.router.correction_bias",
         stacked=True),  # one row, since the package has groups of experts
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.expect("moe_use_aux_free", allowed=(True,), default=True)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden), theta=500000.0, pairs="adjacent")
    cfg.expect("use_bias", allowed=(False,), default=False)
    attn = b.attention(cfg, hidden, kv_default="refuse", rope=rope)
    norm, sparse = b.rms(cfg, hidden, default=1e-5), moe_layers(cfg, n)
    dense = b.pre_norm(attn, b.mlp(cfg, hidden), norm)
    routed = b.pre_norm(attn, experts(cfg, hidden), norm) if any(sparse) else dense
    return b.decoder(cfg, "ernie4_5_moe", [routed if moe else dense for moe in sparse], norm=norm, tied_default=True,
                     context=read_context(cfg, rope), not_counted=mtp(cfg, dense, hidden))


def moe_layers(cfg: Config, n: int) -> tuple[bool, ...]:
    """Every moe_layer_interval-th layer from moe_layer_start_index to moe_layer_end_index, -1 for the last."""
    step = cfg.integer("moe_layer_interval", hi=LAYERS, default=1)
    first = cfg.integer("moe_layer_start_index", lo=0, hi=LAYERS, default=1)
    last = cfg.integer("moe_layer_end_index", lo=-1, hi=LAYERS, default=-1)
    return tuple((i + 1) % step == 0 and first <= i <= (n - 1 if last == -1 else last) for i in range(n))


def experts(cfg: Config, hidden: int) -> MoE:
    """moe_num_shared_experts of moe_intermediate_size are one wide MLP; its bias on the choice is no parameter."""
    expert = b.mlp(cfg, hidden, key="moe_intermediate_size")
    count, top_k = cfg.integer("moe_num_experts", "num_experts", hi=COUNT), cfg.integer("moe_k", hi=COUNT)
    if top_k > count:
        raise cfg.refuse("config-range", f"{top_k} experts per token of {count}")
    n_shared = cfg.integer("moe_num_shared_experts", lo=0, hi=COUNT)
    wide = MLP(hidden=hidden, ffn=expert.ffn * n_shared, activation=expert.activation) if n_shared else None
    return MoE(hidden=hidden, n_experts=count, top_k=top_k, expert=expert, shared=wide, correction_bias=True,
               routing=_routing.ernie(cfg))


def mtp(cfg: Config, dense: Layer, hidden: int) -> list[NotCounted]:
    """Stored as mtp_block, mtp_emb_norm, mtp_hidden_norm, mtp_linear_proj: a dense block, norms, (hidden, 2 hidden)."""
    layers = cfg.integer("num_nextn_predict_layers", lo=0, hi=LAYERS, default=0)
    if not layers:
        return []
    one = sum(x.elements for x in dense.leaves()) + 2 * hidden * hidden + 2 * hidden
    return [NotCounted(what="multi-token-prediction layers", params=layers * one,
                       why=f"{layers} stored beside the decoder, used for drafting only")]
