"""Qwen3.5 with experts (35B-A3B, 397B-A17B): Qwen3.5's mixers, routed experts beside a gated shared one."""

from __future__ import annotations

from llamactl.arch import _gated, _routing
from llamactl.arch._names import EXPERTS, blocks, nested
from llamactl.arch.qwen2_moe import SHARED
from llamactl.arch.qwen3_5 import NAMES, TOWER, stack
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.naming import Fused, Rule, rule
from llamactl.spec.parts import MoE

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
H, E = "model.layers.{i}.mlp.experts.", "layers.{i}.mlp.experts.{e}."
COMMON = (*NAMES, *blocks(SHARED))
ALONE = (*COMMON, *blocks(EXPERTS))
WHOLE = nested((
    *COMMON, *blocks({"mlp.router": "mlp.gate"}), rule(f"{H}down_proj", f"{E}down.weight", stacked=True),
    rule(f"{H}gate_up_proj", f"{E}gate.weight", f"{E}up.weight", ops=(Fused(),), stacked=True),
))


def HF(model: Model) -> tuple[Rule, ...]:  # noqa: N802  a table that depends on whether a vision tower stands beside
    return ALONE if model.model_type in MODEL_TYPES[1:] else (*WHOLE, *TOWER)


def describe(cfg: Config) -> Model:
    return stack(cfg, "qwen3_5_moe", experts, alone=cfg.data.get("model_type") in MODEL_TYPES[1:])


def experts(cfg: Config, hidden: int) -> MoE:
    """In every block: this type has no dense ones."""
    if cfg.integers("mlp_only_layers", default=()):
        raise cfg.refuse("config-unsupported", f"{cfg.prefix}mlp_only_layers names layers, but every block has experts")
    cfg.expect("decoder_sparse_step", allowed=(1,), default=1)
    return _gated.experts(cfg, hidden, _routing.always_normalised(cfg))
