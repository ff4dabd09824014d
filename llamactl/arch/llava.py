"""LLaVA 1.5: a Llama decoder that also reads CLIP's pictures through two matrices (arXiv:2310.03744)."""

from __future__ import annotations

from llamactl.arch import _towers, _vl, llama
from llamactl.arch._names import LLAMA, under
from llamactl.spec.config import Config
from llamactl.spec.model import Model

MODEL_TYPES = ("llava",)
HF = (*under("language_model.", LLAMA), *_towers.CLIP, *_towers.LLAVA)
# The published files name no shape of the 7B decoder: they rely on Llama's own class.
SILENT = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
          "vocab_size": 32000}


def describe(cfg: Config) -> Model:
    text = _vl.text_config(cfg, SILENT, one_tie=True)
    text.expect("model_type", allowed=llama.MODEL_TYPES, default="llama")
    return _vl.around(llama.describe(text), "llava", cfg, _towers.clip, _towers.llava_projector, silent=SILENT)
