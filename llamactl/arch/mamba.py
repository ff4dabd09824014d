"""Mamba: a selective state space in every layer, no attention and no feed-forward, tied head (arXiv:2312.00752)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import modules
from llamactl.arch._state import ENDLESS, MAMBA, MAMBA_VECTORS, dt_rank, inner, mixer
from llamactl.spec.config import COUNT, Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import Norm
from llamactl.spec.state import Mamba

MODEL_TYPES = ("mamba",)
OUTER = modules({"embed": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head",
                 "layers.{i}.attn_norm": "backbone.layers.{i}.norm"})
HF = (*OUTER, *mixer("backbone.layers.{i}.mixer.", MAMBA, MAMBA_VECTORS))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.expect("hidden_act", allowed=("silu", "swish"), default="silu")
    cfg.expect("rms_norm", allowed=(True,), default=True)
    norm = Norm(dim=hidden, eps=cfg.number("layer_norm_epsilon", default=1e-5))
    state = Mamba(
        hidden=hidden, inner=inner(cfg, hidden, "expand", "intermediate_size", "d_inner"),
        state=cfg.integer("state_size", hi=COUNT), dt_rank=dt_rank(cfg, hidden, "time_step_rank"),
        kernel=cfg.integer("conv_kernel", hi=COUNT), bias=cfg.flag("use_bias", default=False),
        conv_bias=cfg.flag("use_conv_bias", default=True),
    )
    layer = Layer(attn=None, mlp=None, state=state, attn_norm=norm)
    return b.decoder(cfg, "mamba", (layer,) * n, norm=norm, tied_default=True, context=ENDLESS)
