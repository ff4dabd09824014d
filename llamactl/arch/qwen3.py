"""Qwen3 dense: RMSNorm on each head's q and k, no biases, head_dim stated by the file (arXiv:2505.09388)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA, QK_NORM, blocks
from llamactl.arch.qwen2 import dense
from llamactl.spec.config import Config
from llamactl.spec.model import Model

MODEL_TYPES = ("qwen3",)
GGUF = ("qwen3",)
GGUF_NAMES = "plain"
HF = (*LLAMA, *blocks(QK_NORM))


def describe(cfg: Config) -> Model:
    bias = cfg.flag("attention_bias", default=False)
    norm = b.rms(cfg, cfg.integer("head_dim", default=128))
    return dense(cfg, "qwen3", qkv_bias=bias, o_bias=bias, qk_norm=norm, head_dim=128)
