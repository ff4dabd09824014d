"""Mistral 7B and Nemo: a Llama block with a sliding window on every layer if the file has one (arXiv:2310.06825)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("mistral",)
GGUF = ("llama",)
GGUF_WITH = "attention.sliding_window"
HF = LLAMA


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    window = b.window(cfg, 4096)
    cfg.layer_types(n, ("sliding_attention" if window else "full_attention",))
    rope = read_rope(cfg, b.rope_dim(cfg, hidden))
    attn = b.attention(cfg, hidden, kv_default="refuse", rope=rope, window=window)
    layer = b.pre_norm(attn, b.mlp(cfg, hidden), b.rms(cfg, hidden))
    context = read_context(cfg, rope)
    return b.decoder(cfg, "mistral", (layer,) * n, norm=b.rms(cfg, hidden), context=context,
                     window_engines=("arch", "hf", "vllm"))
