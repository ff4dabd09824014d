"""Qwen2.5-VL: Qwen2-VL's decoder; a tower with RMSNorm, gated MLPs and windows (arXiv:2502.13923)."""

from __future__ import annotations

from llamactl.arch import _vision_qwen as v
from llamactl.arch import _vl
from llamactl.arch._names import LLAMA
from llamactl.arch.qwen2 import dense
from llamactl.arch.qwen2_vl import SILENT
from llamactl.spec.config import Config
from llamactl.spec.model import Model

MODEL_TYPES = ("qwen2_5_vl",)
HF = (*LLAMA, *v.QWEN2_5_VL)


def describe(cfg: Config) -> Model:
    text = _vl.text_config(cfg, SILENT, flat=True, one_tie=True)
    model = dense(text, "qwen2_5_vl", qkv_bias=True)
    return _vl.around(model, "qwen2_5_vl", cfg, v.qwen2_5_vl, v.qwen2_5_vl_merger, silent=SILENT)
