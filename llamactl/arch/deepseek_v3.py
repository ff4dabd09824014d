"""DeepSeek-V3, R1, V3.1, Moonlight, Kimi K2: V2's block, sigmoid routing, router buffers, MTP (arXiv:2412.19437)."""

from __future__ import annotations

from llamactl.arch._latent import DEEPSEEK, deepseek
from llamactl.spec.config import Config
from llamactl.spec.model import Model

MODEL_TYPES = ("deepseek_v3", "kimi_k2")
GGUF = ("deepseek2",)
GGUF_WITH = "exp_probs_b.bias"
HF = DEEPSEEK


def describe(cfg: Config) -> Model:
    correction = cfg.expect("topk_method", allowed=("noaux_tc",), default="noaux_tc") == "noaux_tc"
    return deepseek(cfg, "deepseek_v3", correction=correction)
