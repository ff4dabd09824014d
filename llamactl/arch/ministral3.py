"""Ministral 3, Devstral 2: Mistral's block without a window, YaRN, queries scaled up past the trained length."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA
from llamactl.arch.mistral import dense
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.ropeconfig import rope_block

MODEL_TYPES = ("ministral3",)
HF = LLAMA


def describe(cfg: Config) -> Model:
    if rope_block(cfg) is None:
        raise cfg.refuse("config-missing", f"{cfg.prefix}rope_parameters is missing",
                         "this family's class would fill in a YaRN of its own")
    return dense(cfg, "ministral3", b.window(cfg, None), head_dim=None if "head_dim" in cfg.data else 128, eps=1e-5)
