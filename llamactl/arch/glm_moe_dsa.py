"""GLM-5: DeepSeek-V3.2's block; a layer may reuse the tokens an earlier layer's indexer chose (arXiv:2602.15763)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch import _routing
from llamactl.arch._latent import DEEPSEEK, INDEXER, sparse
from llamactl.spec.config import LAYERS, Config
from llamactl.spec.model import Model

MODEL_TYPES = ("glm_moe_dsa",)
HF = (*DEEPSEEK, *INDEXER)


def describe(cfg: Config) -> Model:
    _, n = b.shape(cfg)
    cfg.expect("topk_method", allowed=("noaux_tc",), default="noaux_tc")
    cfg.expect("mlp_bias", allowed=(False,), default=False)
    cfg.expect("indexer_rope_interleave", allowed=(True,), default=True)
    own = indexers(cfg, n)
    if not own[0]:
        raise cfg.refuse("config-layers", "the first layer shares an indexer, but none stands before it")
    return sparse(cfg, "glm_moe_dsa", own, pairs="adjacent", eps=1e-5, routing=_routing.noaux(cfg, scale=2.5))


def indexers(cfg: Config, n: int) -> tuple[bool, ...]:
    """Which layers have an indexer: indexer_types, else index_topk_pattern, else every index_topk_freq-th one."""
    words = cfg.get("indexer_types", default=None) or cfg.get("index_topk_pattern", default=None)
    if words is None:
        every = max(cfg.integer("index_topk_freq", lo=0, hi=LAYERS, default=1), 1)
        offset = cfg.integer("index_skip_topk_offset", lo=0, hi=LAYERS, default=2)
        return tuple(max(i - offset + 1, 0) % every == 0 for i in range(n))
    if isinstance(words, str):
        words = [{"F": "full", "S": "shared"}.get(c, c) for c in words]
    if not isinstance(words, list) or len(words) != n or not all(w in ("full", "shared") for w in words):
        raise cfg.refuse("config-layers", f"indexer_types is not a list of {n} words, each full or shared")
    return tuple(w == "full" for w in words)
