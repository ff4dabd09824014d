"""How families choose experts, read from the config's words; None where a file says what its family's code does not do.

Source of each: the family's published code as transformers has it, and its config class for what a file leaves out.
"""

from __future__ import annotations

from typing import Any

from llamactl.spec.config import COUNT, Config
from llamactl.spec.routing import Routing

MIXTRAL = Routing(normalise=True, weights_fp32=True)
CHOSEN = Routing(over="chosen")  # gpt-oss, Granite
LLAMA4 = Routing(score="sigmoid", over="chosen", scales_input=True)
MINIMAX = Routing(score="sigmoid", normalise=True, weights_fp32=True)


def agrees(cfg: Config, key: str, *values: Any) -> bool:
    """Whether the file is silent about `key` or says one of `values`, which is what the family's code does anyhow."""
    return cfg.data.get(key) is None or cfg.data[key] in values


def flag(cfg: Config, key: str, default: bool) -> bool:
    """A switch that null turns off."""
    return False if key in cfg.data and cfg.data[key] is None else cfg.flag(key, default=default)


def nulls(cfg: Config, *keys: str) -> bool:
    """Whether the file says null for a number that the family's code cannot do without."""
    return any(key in cfg.data and cfg.data[key] is None for key in keys)


def softmax(cfg: Config, default: bool) -> Routing:
    """The top of a softmax (Qwen, OLMoE); norm_topk_prob lets the chosen weights sum to one. default: the family's."""
    return Routing(normalise=flag(cfg, "norm_topk_prob", default))


def always_normalised(cfg: Config) -> Routing | None:
    """The same in the families whose weights sum to one without a word in the config."""
    return Routing(normalise=True) if agrees(cfg, "norm_topk_prob", True) else None


def greedy(cfg: Config) -> Routing | None:
    """DeepSeek-V2: the top of a softmax, with topk_method group_limited_greedy only of the best groups; scaled."""
    method = cfg.get("topk_method", default="greedy")
    known = agrees(cfg, "scoring_func", "softmax") and agrees(cfg, "norm_topk_prob", False)
    if not known or nulls(cfg, "topk_method", "routed_scaling_factor"):
        return None
    scale = cfg.number("routed_scaling_factor", default=1.0)
    if method == "greedy":
        return Routing(scale=scale, fp32="logits", weights_fp32=True)
    n, kept = (cfg.integer(key, hi=COUNT, default=None) for key in ("n_group", "topk_group"))
    if method != "group_limited_greedy" or n is None or kept is None:
        return None
    return Routing(scale=scale, groups=n, groups_kept=kept, fp32="logits", weights_fp32=True)


def noaux(cfg: Config, *, groups: tuple[int, int] = (1, 1), scale: float = 1.0, normalise: bool = True
          ) -> Routing | None:
    """DeepSeek-V3 and its heirs: sigmoid scores, groups judged by their best two, scaled. Defaults: the family's.

    groups: (n_group, topk_group).
    """
    if not agrees(cfg, "scoring_func", "sigmoid") or nulls(cfg, "n_group", "topk_group", "routed_scaling_factor"):
        return None
    n, kept = (cfg.integer(key, hi=COUNT, default=value)
               for key, value in zip(("n_group", "topk_group"), groups, strict=True))
    return Routing(score="sigmoid", normalise=flag(cfg, "norm_topk_prob", normalise), eps=1e-20,
                   scale=cfg.number("routed_scaling_factor", default=scale), groups=n, groups_kept=kept,
                   group_score="top2", fp32="logits", weights_fp32=True)


def ernie(cfg: Config) -> Routing | None:
    """ERNIE 4.5: a softmax whose chosen weights are divided by their sum, at least moe_norm_min."""
    if nulls(cfg, "moe_norm_min"):
        return None
    return Routing(normalise=True, floor=cfg.number("moe_norm_min", default=1e-12), fp32="logits")


def lfm2(cfg: Config) -> Routing | None:
    """LFM2-MoE: sigmoid scores, scaled."""
    if nulls(cfg, "routed_scaling_factor"):
        return None
    return Routing(score="sigmoid", normalise=flag(cfg, "norm_topk_prob", True), eps=1e-6, fp32="none",
                   scale=cfg.number("routed_scaling_factor", default=1.0))


def minimax(cfg: Config) -> Routing | None:
    """MiniMax-M2: sigmoid scores whose chosen ones sum to one."""
    return MINIMAX if agrees(cfg, "scoring_func", "sigmoid") else None


def dbrx(experts: Config) -> Routing:
    """DBRX: a softmax, divided by the sum of the chosen weights unless moe_normalize_expert_weights is null."""
    return Routing(normalise=not nulls(experts, "moe_normalize_expert_weights"), fp32="none")


def sparsemixer(cfg: Config) -> Routing | None:
    """Phi-3.5-MoE: router_jitter_noise also says which logits count beside the best."""
    if nulls(cfg, "router_jitter_noise"):
        return None
    return Routing(score="sparsemixer", jitter=cfg.number("router_jitter_noise", default=0.01), fp32="none")
