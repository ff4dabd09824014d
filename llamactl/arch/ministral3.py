"""Ministral 3, Devstral 2: Mistral's block without a window, YaRN, queries scaled up past the trained length."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA
from llamactl.arch.mistral import dense
from llamactl.spec.changes import each_attention
from llamactl.spec.config import POSITIONS, Config
from llamactl.spec.model import Model
from llamactl.spec.ropeconfig import rope_block

MODEL_TYPES = ("ministral3",)
HF = LLAMA


def describe(cfg: Config) -> Model:
    block = rope_block(cfg)
    if block is None:
        raise cfg.refuse("config-missing", f"{cfg.prefix}rope_parameters is missing",
                         "this family's class would fill in a YaRN of its own")
    model = dense(cfg, "ministral3", b.window(cfg, None), head_dim=None if "head_dim" in cfg.data else 128, eps=1e-5)
    return each_attention(model, lambda a: replace(a, q_growth=growth(block)), "q_growth")


def growth(block: Config) -> tuple[float, int, int] | None:
    """(llama_4_scaling_beta, original_max_position_embeddings): how far queries grow past the trained length."""
    beta = block.number("llama_4_scaling_beta", default=None)
    return None if beta is None else (beta, block.integer("original_max_position_embeddings", hi=POSITIONS), 0)
