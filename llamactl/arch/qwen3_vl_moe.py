"""Qwen3-VL with experts (30B-A3B, 235B-A22B): Qwen3 MoE's decoder beside Qwen3-VL's tower (arXiv:2511.21631)."""

from __future__ import annotations

from llamactl.arch import _vision_qwen as v
from llamactl.arch import _vl, qwen3_moe
from llamactl.arch._names import nested
from llamactl.arch.qwen3_vl import SILENT
from llamactl.spec.config import Config
from llamactl.spec.model import Model

MODEL_TYPES = ("qwen3_vl_moe",)
HF = (*nested(qwen3_moe.HF), *v.QWEN3_VL)


def describe(cfg: Config) -> Model:
    text = _vl.text_config(cfg, **SILENT)
    text.expect("use_sliding_window", allowed=(False,), default=False)
    return _vl.around(qwen3_moe.describe(text), "qwen3_vl_moe", cfg, v.qwen3_vl, v.qwen3_vl_merger, **SILENT)
