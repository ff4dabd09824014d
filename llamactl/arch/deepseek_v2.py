"""DeepSeek-V2 and V2-Lite: multi-head latent attention and fine-grained experts with shared ones (arXiv:2405.04434)."""

from __future__ import annotations

from llamactl.arch._latent import DEEPSEEK, deepseek
from llamactl.arch._moe import SHARED, experts, mtp
from llamactl.spec.config import Config
from llamactl.spec.model import Model

MODEL_TYPES = ("deepseek_v2",)
GGUF = ("deepseek2",)
HF = DEEPSEEK
__all__ = ["GGUF", "HF", "MODEL_TYPES", "SHARED", "describe", "experts", "mtp"]


def describe(cfg: Config) -> Model:
    return deepseek(cfg, "deepseek_v2", correction=False)
