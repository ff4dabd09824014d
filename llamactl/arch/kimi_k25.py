"""Kimi K2.5: Kimi K2's decoder beside MoonViT, whose patches reach it merged two by two (arXiv:2602.02276)."""

from __future__ import annotations

from llamactl.arch import _towers, _vl, deepseek_v3
from llamactl.arch._names import under
from llamactl.spec.config import Config
from llamactl.spec.model import Model

MODEL_TYPES = ("kimi_k25",)
HF = (*under("language_model.", deepseek_v3.HF), *_towers.KIMI)


def describe(cfg: Config) -> Model:
    if cfg.data.get("tie_word_embeddings") is None:
        raise cfg.refuse("config-missing", "tie_word_embeddings is missing, and this type's classes disagree about it")
    text = _vl.text_config(cfg)
    text.expect("model_type", allowed=deepseek_v3.MODEL_TYPES, default="deepseek_v3")
    return _vl.around(deepseek_v3.describe(text), "kimi_k25", cfg, _towers.kimi, _towers.kimi_projector)
