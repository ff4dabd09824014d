"""DeepSeek-V2 and V2-Lite: multi-head latent attention and fine-grained experts with shared ones (arXiv:2405.04434)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamactl.arch import _routing
from llamactl.arch._latent import DEEPSEEK, deepseek
from llamactl.arch._moe import SHARED, experts, mtp
from llamactl.spec.config import Config
from llamactl.spec.model import Model

if TYPE_CHECKING:
    from llamactl.arch._ggufwords import Metadata

MODEL_TYPES = ("deepseek_v2",)
GGUF = ("deepseek2",)
HF = DEEPSEEK
__all__ = ["GGUF", "HF", "MODEL_TYPES", "SHARED", "describe", "experts", "from_gguf", "mtp"]


def describe(cfg: Config) -> Model:
    return deepseek(cfg, "deepseek_v2", _routing.greedy(cfg), correction=False)


def from_gguf(meta: Metadata) -> dict[str, object]:
    """The method shows in the number of groups; older files do not give it."""
    from llamactl.arch._ggufwords import routing

    said = routing(meta)
    method = {None: None, 1: "greedy"}.get(said["n_group"], "group_limited_greedy")
    return {**said, "topk_method": method}
