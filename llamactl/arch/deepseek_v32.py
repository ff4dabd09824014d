"""DeepSeek-V3.2: V3 with sparse attention, whose indexer picks the tokens each query reads (DSA, arXiv:2512.02556)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch import _routing
from llamactl.arch._latent import DEEPSEEK, INDEXER, sparse
from llamactl.spec.config import Config
from llamactl.spec.model import Model

MODEL_TYPES = ("deepseek_v32",)
HF = (*DEEPSEEK, *INDEXER)


def describe(cfg: Config) -> Model:
    cfg.expect("topk_method", allowed=("noaux_tc",), default="noaux_tc")
    return sparse(cfg, "deepseek_v32", (True,) * b.shape(cfg)[1], pairs="half",
                  routing=_routing.noaux(cfg, groups=(8, 4), scale=2.5))
