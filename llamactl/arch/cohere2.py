"""Command R7B and Command A: Cohere's block, three of four layers slide and rotate, the fourth has no positions."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch.cohere import BLOCK, attention, block, decoder
from llamactl.spec.config import LAYERS, Config
from llamactl.spec.model import Model
from llamactl.spec.ropeconfig import read_rope

MODEL_TYPES = ("cohere2",)
HF = BLOCK


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.expect("use_qk_norm", allowed=(False,), default=False)
    cfg.expect("use_parallel_block", allowed=(True,), default=True)
    cfg.expect("use_gated_activation", allowed=(True,), default=True)
    cfg.expect("rotary_pct", allowed=(1.0,), default=1.0)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden), pairs="adjacent")
    types = b.pattern(cfg, n, cfg.integer("sliding_window_pattern", hi=LAYERS, default=4))
    window = b.window(cfg, 4096)
    if window is None and "sliding_attention" in types:
        raise cfg.refuse("config-type", f"{cfg.prefix}sliding_window is null, but layers slide",
                         "name the window, or layer_types without sliding_attention")
    slides = attention(cfg, hidden, rope)
    of = {
        "sliding_attention": block(cfg, replace(slides, window=window)),
        "full_attention": block(cfg, replace(slides, rope=None)),
    }
    return decoder(cfg, "cohere2", b.by_type(types, of), rope)
