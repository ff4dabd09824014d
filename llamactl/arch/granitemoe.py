"""Granite 3.x MoE (1B-A400M, 3B-A800M) and PowerMoE: Granite's block, experts stored as two stacked tensors."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch import _routing
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, PRE_NORMS, blocks, modules
from llamactl.arch.granite import stack
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.naming import Fused, rule

MODEL_TYPES = ("granitemoe",)
H, E = "model.layers.{i}.block_sparse_moe.", "layers.{i}.mlp.experts.{e}."
HF = (
    *modules(LLAMA_OUTER),
    *blocks(ATTENTION, PRE_NORMS, {"mlp.router": "block_sparse_moe.router.layer"}),
    rule(f"{H}input_linear.weight", f"{E}gate.weight", f"{E}up.weight", ops=(Fused(),), stacked=True),
    rule(f"{H}output_linear.weight", f"{E}down.weight", stacked=True),
)


def describe(cfg: Config) -> Model:
    hidden, _ = b.shape(cfg)
    ff = b.moe(cfg, b.mlp(cfg, hidden), "num_local_experts", "num_experts", routing=_routing.CHOSEN)
    return stack(cfg, "granitemoe", ff)
