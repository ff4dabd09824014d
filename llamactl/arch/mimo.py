"""MiMo-7B: Qwen2's block, and a drafting layer beside the stack (arXiv:2505.07608)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch._moe import mtp
from llamactl.arch._names import LLAMA
from llamactl.arch.qwen2 import dense
from llamactl.spec.config import Config
from llamactl.spec.model import Model

MODEL_TYPES = ("mimo",)
HF = LLAMA


def describe(cfg: Config) -> Model:
    cfg.expect("attention_bias", allowed=(True,), default=True)
    cfg.expect("use_mrope", allowed=(False,), default=False)
    model = dense(cfg, "mimo", qkv_bias=True)
    return replace(model, not_counted=tuple(mtp(cfg, model.layers[-1], model.hidden)), reads=tuple(cfg.reads))
