"""What DeepSeek's mixtures share with the families built like them: routed beside shared experts, drafting layers."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.spec.config import COUNT, LAYERS, Config
from llamactl.spec.model import Layer, NotCounted
from llamactl.spec.parts import MoE
from llamactl.spec.routing import Routing

SHARED = {f"mlp.shared.{x}": f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")}


def moe_layers(cfg: Config, n: int) -> tuple[bool, ...]:
    """mlp_layer_types lists them, else all from first_k_dense_replace on are."""
    words = cfg.get("mlp_layer_types", default=None)
    if words is None:
        first = cfg.integer("first_k_dense_replace", lo=0, hi=LAYERS)
        return tuple(i >= first for i in range(n))
    if not isinstance(words, list) or len(words) != n or not all(w in ("dense", "sparse") for w in words):
        raise cfg.refuse("config-layers", f"mlp_layer_types is not a list of {n} words, each dense or sparse")
    return tuple(w == "sparse" for w in words)


def experts(cfg: Config, hidden: int, routing: Routing | None, *, correction: bool = True) -> MoE:
    """Routed experts and one shared MLP as wide as n_shared_experts of them."""
    expert = b.mlp(cfg, hidden, key="moe_intermediate_size")
    if "n_shared_experts" not in cfg.data:
        raise cfg.refuse("config-missing", "n_shared_experts is missing (null stands for none)")
    n_shared = cfg.integer("n_shared_experts", lo=0, hi=COUNT, default=None)
    shared = None
    if n_shared:
        shared = type(expert)(hidden=hidden, ffn=expert.ffn * n_shared, activation=expert.activation)
    return b.moe(cfg, expert, "n_routed_experts", "num_experts", shared=shared, correction_bias=correction,
                 routing=routing)


def mtp(cfg: Config, block: Layer, hidden: int) -> list[NotCounted]:
    """Multi-token-prediction layers: a block, its two input norms, the (hidden, 2 hidden) projection, a head norm.

    The router's correction bias is counted with them. The files store the embedding and head again beside them; those
    are copies (arXiv:2412.19437, section 2.2).
    """
    layers = cfg.integer("num_nextn_predict_layers", lo=0, hi=LAYERS, default=0)
    if not layers:
        return []
    one = sum(x.elements for x in block.leaves()) + 2 * hidden * hidden + 3 * hidden
    return [NotCounted(what="multi-token-prediction layers", params=layers * one,
                       why=f"{layers} stored after the decoder, used for drafting only")]
