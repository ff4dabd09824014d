"""Qwen3-VL with experts (30B-A3B, 235B-A22B): Qwen3 MoE's decoder beside Qwen3-VL's tower (arXiv:2511.21631)."""

from __future__ import annotations

from llamactl.arch import _routing, _vl, qwen3_moe
from llamactl.arch import _vision_qwen as v
from llamactl.arch._names import LLAMA, QK_NORM, blocks, nested
from llamactl.arch.qwen3_vl import SILENT
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.naming import Fused, Transposed, rule

MODEL_TYPES = ("qwen3_vl_moe",)
E, M = "layers.{i}.mlp.experts.{e}.", "model.language_model.layers.{i}.mlp."
HF = (
    *nested((*LLAMA, *blocks(QK_NORM, {"mlp.router": "mlp.gate"}))), *v.QWEN3_VL,
    rule(f"{M}experts.gate_up_proj", f"{E}gate.weight", f"{E}up.weight", ops=(Fused(), Transposed()), stacked=True),
    rule(f"{M}experts.down_proj", f"{E}down.weight", ops=(Transposed(),), stacked=True),
)


def describe(cfg: Config) -> Model:
    text = _vl.text_config(cfg, SILENT)
    text.expect("use_sliding_window", allowed=(False,), default=False)
    model = qwen3_moe.routed(text, "qwen3_moe", _routing.always_normalised(text))
    return _vl.around(model, "qwen3_vl_moe", cfg, v.qwen3_vl, v.qwen3_vl_merger, silent=SILENT)
