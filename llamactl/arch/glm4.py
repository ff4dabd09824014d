"""GLM-4-0414 (9B, 32B) and Z1: GLM's block with a second norm after each branch."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import blocks
from llamactl.arch.glm import BLOCK, EPS, attention
from llamactl.spec.config import Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.ropeconfig import read_context

MODEL_TYPES = ("glm4",)
NORMS = {
    "attn_norm": "input_layernorm", "attn_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm", "mlp_post_norm": "post_mlp_layernorm",
}
HF = (*BLOCK, *blocks(NORMS))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    attn, norm = attention(cfg, hidden), b.rms(cfg, hidden, default=EPS)
    layer = Layer(attn=attn, mlp=b.mlp(cfg, hidden), attn_norm=norm, attn_post_norm=norm, mlp_norm=norm,
                  mlp_post_norm=norm)
    return b.decoder(cfg, "glm4", (layer,) * n, norm=norm, context=read_context(cfg, attn.rope))
