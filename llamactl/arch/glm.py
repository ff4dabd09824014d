"""GLM-4 9B: fused gate and up, biases on q, k, v only, half of each head rotates, side by side (arXiv:2406.12793)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, PRE_NORMS, blocks, modules
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.naming import Fused, rule
from llamactl.spec.parts import Attention
from llamactl.spec.ropeconfig import partial_factor, read_context, read_rope

MODEL_TYPES = ("glm",)
L = "layers.{i}."
BLOCK = (
    *modules(LLAMA_OUTER),
    *blocks(ATTENTION, {"mlp.down": "mlp.down_proj"}),
    rule("model.layers.{i}.mlp.gate_up_proj.weight", f"{L}mlp.gate.weight", f"{L}mlp.up.weight", ops=(Fused(),)),
)
HF = (*BLOCK, *blocks(PRE_NORMS))
EPS = 1.5625e-07


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    attn, norm = attention(cfg, hidden), b.rms(cfg, hidden, default=EPS)
    layer = b.pre_norm(attn, b.mlp(cfg, hidden), norm)
    return b.decoder(cfg, "glm", (layer,) * n, norm=norm, context=read_context(cfg, attn.rope))


def attention(cfg: Config, hidden: int) -> Attention:
    """head_dim stands in every file; the config class would fill in 128."""
    dim = cfg.integer("head_dim")
    rope = read_rope(cfg, b.rope_dim(cfg, hidden, head_dim=dim, factor=partial_factor(cfg, 0.5)), pairs="adjacent")
    return b.attention(cfg, hidden, kv_default="refuse", rope=rope, qkv_bias=cfg.flag("attention_bias", default=True))
