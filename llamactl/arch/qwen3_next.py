"""Qwen3-Next: gated delta nets, every fourth layer gated attention, sparse experts in each (arXiv:2412.06464)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch import _gated, _routing
from llamactl.arch._names import EXPERTS, MLP, blocks
from llamactl.arch.qwen2_moe import SHARED, sparse_layers
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.ropeconfig import read_context

MODEL_TYPES = ("qwen3_next",)
HF = (
    *_gated.NAMES, *blocks(MLP, EXPERTS, SHARED),
    _gated.rows("in_proj_qkvz", "qkvz", _gated.PER_GROUP), _gated.rows("in_proj_ba", "ba", _gated.PER_GROUP),
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    of, is_moe = _gated.mixers(cfg, hidden), sparse_layers(cfg, n)
    sparse = _gated.experts(cfg, hidden, _routing.softmax(cfg, True))
    dense = None if all(is_moe) else b.mlp(cfg, hidden)
    layers = [replace(of[word], mlp=sparse if moe else dense)
              for word, moe in zip(_gated.words(cfg, n), is_moe, strict=True)]
    full = of["full_attention"]
    assert full.attn
    left_out = _gated.drafts(1, replace(full, mlp=sparse), "stored after the decoder of the published models, though "
                             "no key of the config says so; used for drafting only")
    return b.decoder(cfg, "qwen3_next", layers, norm=full.attn_norm, context=read_context(cfg, full.attn.rope),
                     not_counted=left_out)
