"""Qwen2-VL: Qwen2's decoder with rotary positions in three axes, beside a vision tower (arXiv:2409.12191)."""

from __future__ import annotations

from llamactl.arch import _vision_qwen as v
from llamactl.arch import _vl
from llamactl.arch._names import LLAMA
from llamactl.arch.qwen2 import dense
from llamactl.spec.config import Config
from llamactl.spec.model import Model

MODEL_TYPES = ("qwen2_vl",)
HF = (*LLAMA, *v.QWEN2_VL)
SILENT = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": 4096, "max_window_layers": 80}


def describe(cfg: Config) -> Model:
    text = _vl.text_config(cfg, SILENT, flat=True, one_tie=True)
    model = dense(text, "qwen2_vl", qkv_bias=True)
    return _vl.around(model, "qwen2_vl", cfg, v.qwen2_vl, v.qwen2_vl_merger, silent=SILENT)
