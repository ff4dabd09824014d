"""What Qwen3-Next and Qwen3.5 share: gated delta nets, gated attention in every fourth layer, the draft layer."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, PRE_NORMS, QK_NORM, blocks, modules
from llamactl.arch._state import mixer
from llamactl.spec.config import COUNT, LAYERS, Config
from llamactl.spec.model import Layer, NotCounted
from llamactl.spec.naming import Fused, Rule, rule
from llamactl.spec.parts import MoE
from llamactl.spec.ropeconfig import partial_factor, read_rope
from llamactl.spec.routing import Routing
from llamactl.spec.state import GatedDeltaNet

H, L = "model.layers.{i}.", "layers.{i}."
PER_GROUP = Fused(order="per_group")
NAMES = (
    *modules(LLAMA_OUTER), *blocks({k: v for k, v in ATTENTION.items() if k != "attn.q"}, QK_NORM, PRE_NORMS),
    *(rule(f"{H}self_attn.q_proj.{p}", f"{L}attn.q.{p}", f"{L}attn.gate.{p}", ops=(PER_GROUP,), groups="heads")
      for p in ("weight", "bias")),
    *mixer(f"{H}linear_attn.", {"conv": "conv1d", "norm": "norm", "out": "out_proj"}, ("A_log", "dt_bias")),
)


def rows(stored: str, letters: str, *ops: Fused) -> Rule:
    """One matrix of a delta net: the rows of `letters` as `ops` lay them out."""
    return rule(f"{H}linear_attn.{stored}.weight", *(f"{L}state.{x}.weight" for x in letters), ops=ops)


def mixers(cfg: Config, hidden: int) -> dict[str, Layer]:
    """The two kinds of block by their word in layer_types, without a feed-forward."""
    head_dim = cfg.integer("head_dim")
    rope = read_rope(cfg, b.rope_dim(cfg, hidden, factor=partial_factor(cfg, 0.25)))
    bias = cfg.flag("attention_bias", default=False)
    cfg.expect("hidden_act", allowed=("silu", "swish"), default="silu")
    cfg.expect("attn_output_gate", allowed=(True,), default=True)
    cfg.expect("use_sliding_window", allowed=(False,), default=False)
    norm = b.rms(cfg, hidden, offset=True)
    attn = replace(b.attention(cfg, hidden, kv_default="refuse", rope=rope, qkv_bias=bias, o_bias=bias,
                               qk_norm=b.rms(cfg, head_dim, offset=True)), gated=True)
    state = GatedDeltaNet(
        hidden=hidden, k_heads=cfg.integer("linear_num_key_heads", hi=COUNT),
        v_heads=cfg.integer("linear_num_value_heads", hi=COUNT), k_dim=cfg.integer("linear_key_head_dim"),
        v_dim=cfg.integer("linear_value_head_dim"), kernel=cfg.integer("linear_conv_kernel_dim", hi=COUNT),
        eps=norm.eps,
    )
    if state.v_heads % state.k_heads:
        raise cfg.refuse("config-heads", f"{state.v_heads} value heads cannot share {state.k_heads} key heads evenly")
    return {"full_attention": Layer(attn=attn, mlp=None, attn_norm=norm, mlp_norm=norm),
            "linear_attention": Layer(attn=None, mlp=None, state=state, attn_norm=norm, mlp_norm=norm)}


def words(cfg: Config, n: int) -> tuple[str, ...]:
    """layer_types, else every full_attention_interval-th layer attends."""
    return b.pattern(cfg, n, cfg.integer("full_attention_interval", hi=LAYERS, default=4), other="linear_attention")


def experts(cfg: Config, hidden: int, routing: Routing | None) -> MoE:
    """Routed experts beside one with a gate of its own."""
    return b.moe(cfg, b.mlp(cfg, hidden, key="moe_intermediate_size"), "num_experts", "num_local_experts",
                 shared=b.mlp(cfg, hidden, key="shared_expert_intermediate_size"), shared_gate=True, routing=routing)


def drafts(layers: int, block: Layer, why: str) -> list[NotCounted]:
    """`layers` full-attention blocks behind one (hidden, 2 hidden) projection, its two input norms and a last norm."""
    if not layers:
        return []
    assert block.attn_norm
    hidden = block.attn_norm.dim
    params = layers * sum(x.elements for x in block.leaves()) + 2 * hidden * hidden + 3 * hidden
    return [NotCounted(what="multi-token-prediction layers", params=params, why=why)]
