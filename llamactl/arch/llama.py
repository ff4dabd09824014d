"""LLaMA 1-3.x, TinyLlama, SmolLM and others of the type: RMSNorm, RoPE, GQA, SwiGLU, no biases (arXiv:2302.13971)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("llama",)
GGUF = ("llama",)
HF = LLAMA
IGNORED = (("model.layers.{i}.self_attn.rotary_emb.inv_freq", "inverse frequencies of the RoPE, from its base"),)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.layer_types(n, ("full_attention",))
    rope = read_rope(cfg, b.rope_dim(cfg, hidden))
    bias = cfg.flag("attention_bias", default=False)
    attn = b.attention(cfg, hidden, rope=rope, qkv_bias=bias, o_bias=bias)
    ff = b.mlp(cfg, hidden, bias=cfg.flag("mlp_bias", default=False))
    layer = b.pre_norm(attn, ff, b.rms(cfg, hidden))
    context = read_context(cfg, rope)
    return b.decoder(cfg, "llama", (layer,) * n, norm=b.rms(cfg, hidden), context=context)
