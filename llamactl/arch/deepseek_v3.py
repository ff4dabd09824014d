"""DeepSeek-V3, R1, V3.1, Moonlight, Kimi K2: V2's block, sigmoid routing, router buffers, MTP (arXiv:2412.19437)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamactl.arch import _routing
from llamactl.arch._latent import DEEPSEEK, deepseek
from llamactl.spec.config import Config
from llamactl.spec.model import Model

if TYPE_CHECKING:
    from llamactl.arch._ggufwords import Metadata

MODEL_TYPES = ("deepseek_v3", "kimi_k2")
GGUF = ("deepseek2",)
GGUF_WITH = "exp_probs_b.bias"
HF = DEEPSEEK


def describe(cfg: Config) -> Model:
    correction = cfg.expect("topk_method", allowed=("noaux_tc",), default="noaux_tc") == "noaux_tc"
    return deepseek(cfg, "deepseek_v3", _routing.noaux(cfg, groups=(8, 4), scale=2.5), correction=correction)


def from_gguf(meta: Metadata) -> dict[str, object]:
    """The routing has metadata of its own."""
    from llamactl.arch._ggufwords import routing

    return routing(meta)
