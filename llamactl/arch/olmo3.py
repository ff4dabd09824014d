"""OLMo 3: OLMo 2's block, three sliding layers to one full; stretching applies to the full layers only."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch.olmo2 import HF, block
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.parts import Attention
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("olmo3",)
GGUF = ("olmo2",)
GGUF_WITH = "attention.sliding_window"
GGUF_NAMES = "plain"
__all__ = ["HF", "MODEL_TYPES", "describe"]


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    full = block(cfg, hidden, theta=500000.0, layer_type="full_attention")
    assert isinstance(full.attn, Attention)
    assert full.attn.rope is not None
    local = read_rope(cfg, full.attn.rope.dim, theta=500000.0, layer_type="sliding_attention")
    if "rope_parameters" not in cfg.data:
        local = replace(local, scaling=None)
    slides = replace(full, attn=replace(full.attn, rope=local, window=b.window(cfg, 4096)))
    types = b.pattern(cfg, n, 4)
    return b.decoder(cfg, "olmo3", b.by_type(types, {"full_attention": full, "sliding_attention": slides}),
                     norm=b.rms(cfg, hidden, default=1e-5), context=read_context(cfg, full.attn.rope))
