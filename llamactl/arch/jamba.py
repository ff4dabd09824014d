"""Jamba: Mamba with normed dt, B and C, an unrotated attention layer in eight, experts in two (arXiv:2403.19887)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, blocks, modules
from llamactl.arch._state import MAMBA, MAMBA_VECTORS, dt_rank, inner, mixer
from llamactl.spec.config import COUNT, LAYERS, Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import MLP, MoE
from llamactl.spec.ropeconfig import read_context
from llamactl.spec.routing import Routing
from llamactl.spec.state import Mamba

MODEL_TYPES = ("jamba",)
FEED_FORWARD = {f"mlp.{x}": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")}
EXPERTS = {"mlp.router": "feed_forward.router",
           **{f"mlp.experts.{{e}}.{x}": f"feed_forward.experts.{{e}}.{x}_proj" for x in ("gate", "up", "down")}}
INNER_NORMS = {f"{x}_norm": f"{x}_layernorm" for x in ("dt", "b", "c")}
HF = (
    *modules({**LLAMA_OUTER, "norm": "model.final_layernorm"}),
    *blocks(ATTENTION, FEED_FORWARD, EXPERTS, {"attn_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}),
    *mixer("model.layers.{i}.mamba.", {**MAMBA, **INNER_NORMS}, MAMBA_VECTORS),
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.expect("hidden_act", allowed=("silu", "swish"), default="silu")
    cfg.expect("sliding_window", allowed=(None,), default=None)
    norm = b.rms(cfg, hidden)
    attn = b.attention(cfg, hidden, kv_default="refuse")
    state = Mamba(
        hidden=hidden, inner=inner(cfg, hidden, "mamba_expand"), state=cfg.integer("mamba_d_state", hi=COUNT),
        dt_rank=dt_rank(cfg, hidden, "mamba_dt_rank"), kernel=cfg.integer("mamba_d_conv", hi=COUNT),
        bias=cfg.flag("mamba_proj_bias", default=False), conv_bias=cfg.flag("mamba_conv_bias", default=True),
        inner_norms=norm.eps,
    )
    dense = b.mlp(cfg, hidden)
    sparse: MLP | MoE = dense
    if cfg.integer("num_experts", "num_local_experts", hi=COUNT) > 1:
        sparse = b.moe(cfg, dense, "num_experts", "num_local_experts", routing=Routing())
    attends, mixes = every(cfg, n, "attn_layer"), every(cfg, n, "expert_layer")
    kinds = {
        (a, m): Layer(attn=attn if a else None, state=None if a else state, mlp=sparse if m else dense,
                      attn_norm=norm, mlp_norm=norm)
        for a in (True, False) for m in (True, False)
    }
    layers = [kinds[key] for key in zip(attends, mixes, strict=True)]
    return b.decoder(cfg, "jamba", layers, norm=norm, context=read_context(cfg, None))


def every(cfg: Config, n: int, key: str) -> tuple[bool, ...]:
    """Which layers are of a kind: layer i where i mod {key}_period is {key}_offset."""
    period = cfg.integer(f"{key}_period", hi=LAYERS)
    offset = cfg.integer(f"{key}_offset", lo=0, hi=LAYERS)
    if offset >= period:
        raise cfg.refuse("config-range", f"{key}_offset is {offset}, not below {key}_period, {period}")
    return tuple(i % period == offset for i in range(n))
