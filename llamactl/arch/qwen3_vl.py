"""Qwen3-VL dense: Qwen3's decoder; three layers take features from inside the tower (DeepStack, arXiv:2511.21631)."""

from __future__ import annotations

from llamactl.arch import _vision_qwen as v
from llamactl.arch import _vl, qwen3
from llamactl.arch._names import nested
from llamactl.spec.config import Config
from llamactl.spec.model import Model

MODEL_TYPES = ("qwen3_vl",)
HF = (*nested(qwen3.HF), *v.QWEN3_VL)
SILENT = {"rope_theta": 500000.0}


def describe(cfg: Config) -> Model:
    text = _vl.text_config(cfg, SILENT)
    text.expect("use_sliding_window", allowed=(False,), default=False)
    return _vl.around(qwen3.describe(text), "qwen3_vl", cfg, v.qwen3_vl, v.qwen3_vl_merger, silent=SILENT)
