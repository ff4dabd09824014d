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
GGUF_NAMES = "paired"
HF = LLAMA


def describe(cfg: Config) -> Model:
    return dense(cfg, "mistral", b.window(cfg, 4096))


def dense(cfg: Config, family: str, window: int | None, *, head_dim: int | None = None, eps: float = 1e-6) -> Model:
    """Llama's block with KV heads stated by the file and one window for all layers. head_dim, eps: by default."""
    hidden, n = b.shape(cfg)
    cfg.layer_types(n, ("sliding_attention" if window else "full_attention",))
    rope = read_rope(cfg, b.rope_dim(cfg, hidden, head_dim=head_dim))
    attn = b.attention(cfg, hidden, head_dim=head_dim, kv_default="refuse", rope=rope, window=window)
    norm = b.rms(cfg, hidden, default=eps)
    layer = b.pre_norm(attn, b.mlp(cfg, hidden), norm)
    context = read_context(cfg, rope)
    return b.decoder(cfg, family, (layer,) * n, norm=norm, context=context,
                     window_engines=("arch", "hf", "vllm"))
