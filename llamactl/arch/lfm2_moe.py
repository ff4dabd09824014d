"""LFM2-MoE (8B-A1B, 24B-A2B): LFM2's mixers; after num_dense_layers every feed-forward is a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch import _routing, lfm2
from llamactl.arch._names import blocks
from llamactl.spec.config import LAYERS, Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.naming import rule
from llamactl.spec.parts import MLP

MODEL_TYPES = ("lfm2_moe",)
HF = (
    *lfm2.HF,
    *blocks({"mlp.router": "feed_forward.gate",
             **{f"mlp.experts.{{e}}.{x}": f"feed_forward.experts.{{e}}.{w}" for x, w in lfm2.WEIGHTS.items()}}),
    rule("model.layers.{i}.feed_forward.expert_bias", "layers.{i}.mlp.router.correction_bias"),
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    words = cfg.layer_types(n, ("full_attention", "conv"))
    if words is None:
        raise cfg.refuse("config-missing", "layer_types is missing")
    first = cfg.integer("num_dense_layers", lo=0, hi=LAYERS)
    of = lfm2.mixers(cfg, hidden)
    layers: list[Layer] = []
    if first:
        dense = MLP(hidden=hidden, ffn=cfg.integer("intermediate_size"), activation="silu")
        layers += [replace(of[word], mlp=dense) for word in words[:first]]
    if first < n:
        expert = MLP(hidden=hidden, ffn=cfg.integer("moe_intermediate_size"), activation="silu")
        sparse = b.moe(cfg, expert, "num_experts", correction_bias=cfg.flag("use_expert_bias", default=True),
                       routing=_routing.lfm2(cfg))
        layers += [replace(of[word], mlp=sparse) for word in words[first:]]
    return lfm2.finish(cfg, "lfm2_moe", layers, of)
