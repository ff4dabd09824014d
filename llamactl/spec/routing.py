"""How a mixture of experts chooses and weighs its experts, as values; the matrices stand in parts.MoE."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """From the router's logits to the top_k experts of a token and their weights.

    score: softmax | sigmoid | sparsemixer (arXiv:2409.12136: the best expert twice, each time a softmax over the logits
    within 2 x jitter of it). over: all experts are scored and the best scores chosen, or "chosen": the best logits are,
    and scored among themselves (gpt-oss, Granite, Llama 4).
    A correction bias of the MoE is added to the scores for the choice alone, never to the weights.
    groups: the experts stand in equal groups; only the best groups_kept may be chosen from (arXiv:2405.04434).
    A group is as good as its best expert (group_score "max") or its best two together ("top2", DeepSeek-V3).
    normalise: the chosen weights are divided by their sum + eps, which is at least `floor`; then times scale.
    scales_input: the weight multiplies what goes into an expert, not what comes out (Llama 4).
    fp32: what a bf16 model computes in fp32: "logits" (the router's matrix too), "score", or "none" of it.
    weights_fp32: whether its weights stay in fp32 until they meet the experts' outputs.
    """

    score: str = "softmax"
    over: str = "all"
    normalise: bool = False
    eps: float = 0.0
    floor: float = 0.0
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    group_score: str = "max"
    scales_input: bool = False
    jitter: float = 0.0
    fp32: str = "score"
    weights_fp32: bool = False
