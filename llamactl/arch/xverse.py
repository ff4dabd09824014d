"""XVERSE 7B, 13B, 65B: a Llama block without grouped heads, under Llama's names."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("xverse",)
HF = LLAMA


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    for key in ("num_experts", "num_shared_experts", "moe_top_k"):
        cfg.expect(key, allowed=(None,), default=None)  # XVERSE-MoE has the same type
    rope = read_rope(cfg, b.rope_dim(cfg, hidden))
    attn, norm = b.attention(cfg, hidden, rope=rope), b.rms(cfg, hidden)
    return b.decoder(cfg, "xverse", (b.pre_norm(attn, b.mlp(cfg, hidden), norm),) * n, norm=norm,
                     context=read_context(cfg, rope))
