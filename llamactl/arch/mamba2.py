"""Mamba-2 (Mamba-Codestral): one decay per head, B and C shared by groups, a gated norm in each (arXiv:2405.21060)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._state import ENDLESS, MAMBA2, MAMBA2_VECTORS, grouped, inner, mixer
from llamactl.arch.mamba import OUTER
from llamactl.spec.config import COUNT, Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import Norm
from llamactl.spec.state import Mamba2

MODEL_TYPES = ("mamba2",)
HF = (*OUTER, *mixer("backbone.layers.{i}.mixer.", MAMBA2, MAMBA2_VECTORS))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.expect("hidden_act", allowed=("silu", "swish"), default="silu")
    cfg.expect("rms_norm", allowed=(True,), default=True)
    eps = cfg.number("layer_norm_epsilon", default=1e-5)
    state = grouped(cfg, Mamba2(
        hidden=hidden, heads=cfg.integer("num_heads", hi=COUNT), head_dim=cfg.integer("head_dim"),
        groups=cfg.integer("n_groups", hi=COUNT), state=cfg.integer("state_size", hi=COUNT),
        kernel=cfg.integer("conv_kernel", hi=COUNT), bias=cfg.flag("use_bias", default=False),
        conv_bias=cfg.flag("use_conv_bias", default=True), norm_eps=eps,
    ))
    channels = inner(cfg, hidden, "expand", "intermediate_size", "d_inner")
    if channels != state.inner:
        raise cfg.refuse("config-conflict", f"{state.heads} heads of {state.head_dim} are not the {channels:,} "
                         "channels of expand x hidden_size")
    norm = Norm(dim=hidden, eps=eps)
    layer = Layer(attn=None, mlp=None, state=state, attn_norm=norm)
    return b.decoder(cfg, "mamba2", (layer,) * n, norm=norm, context=ENDLESS)
