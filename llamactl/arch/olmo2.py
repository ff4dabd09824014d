"""OLMo 2: norms after each branch instead of before, RMSNorm over all of q and k (arXiv:2501.00656)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, MLP, QK_NORM, blocks, modules
from llamactl.spec.config import Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("olmo2",)
GGUF = ("olmo2",)
GGUF_NAMES = "plain"
NORMS = {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
HF = (*modules(LLAMA_OUTER), *blocks(ATTENTION, QK_NORM, NORMS, MLP))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    layer = block(cfg, hidden, theta=10000.0)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden))
    return b.decoder(cfg, "olmo2", (layer,) * n, norm=b.rms(cfg, hidden, default=1e-5),
                     context=read_context(cfg, rope))


def block(cfg: Config, hidden: int, *, theta: float, layer_type: str | None = None) -> Layer:
    """The post-norm block; q_norm spans heads x head_dim."""
    rope = read_rope(cfg, b.rope_dim(cfg, hidden), theta=theta, layer_type=layer_type)
    bias = cfg.flag("attention_bias", default=False)
    attn = b.attention(cfg, hidden, rope=rope, qkv_bias=bias, o_bias=bias)
    attn = replace(attn, q_norm=b.rms(cfg, attn.n_heads * attn.head_dim, default=1e-5),
                   k_norm=b.rms(cfg, attn.n_kv_heads * attn.head_dim, default=1e-5))
    norm = b.rms(cfg, hidden, default=1e-5)
    return Layer(attn=attn, mlp=b.mlp(cfg, hidden), attn_post_norm=norm, mlp_post_norm=norm)
