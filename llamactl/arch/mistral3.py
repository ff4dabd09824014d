"""Mistral Small 3.1 and 3.2, Ministral 3, Devstral Small 2: a Mistral decoder that also reads Pixtral's pictures."""

from __future__ import annotations

from llamactl.arch import _towers, _vl, ministral3, mistral
from llamactl.arch._names import LLAMA, under
from llamactl.spec.config import Config
from llamactl.spec.model import Model

MODEL_TYPES = ("mistral3",)
HF = (*under("language_model.", LLAMA), *_towers.PIXTRAL, *_towers.MISTRAL3)
TEXTS = {t: module.describe for module in (mistral, ministral3) for t in module.MODEL_TYPES}


def describe(cfg: Config) -> Model:
    text = _vl.text_config(cfg)
    word = text.expect("model_type", allowed=tuple(TEXTS), default="mistral")
    return _vl.around(TEXTS[word](text), "mistral3", cfg, _towers.pixtral, _towers.mistral3_projector)
