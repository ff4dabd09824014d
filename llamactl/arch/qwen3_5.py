"""Qwen3.5 dense: Qwen3-Next's mixers in separate matrices, a dense feed-forward, Qwen3-VL's tower without DeepStack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch import _gated, _vl
from llamactl.arch import _vision_qwen as v
from llamactl.arch._names import MLP, blocks, nested
from llamactl.arch._towers import layer_norm
from llamactl.arch._vision import section
from llamactl.spec.config import LAYERS, Config
from llamactl.spec.model import Model, Section
from llamactl.spec.naming import Fused, Rule
from llamactl.spec.parts import FeedForward
from llamactl.spec.ropeconfig import read_context

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
NAMES = (*_gated.NAMES, _gated.rows("in_proj_qkv", "qkv", Fused()), *(_gated.rows(f"in_proj_{x}", x) for x in "zba"))
TEXT = (*NAMES, *blocks(MLP))
TOWER = v.names("model.visual.", {"mlp.up": "mlp.linear_fc1", "mlp.down": "mlp.linear_fc2"},
                {"norm": "merger.norm", "up": "merger.linear_fc1", "down": "merger.linear_fc2"}, positions="pos_embed")


def HF(model: Model) -> tuple[Rule, ...]:  # noqa: N802  a table that depends on whether a vision tower stands beside
    return TEXT if model.model_type in MODEL_TYPES[1:] else (*nested(TEXT), *TOWER)


def describe(cfg: Config) -> Model:
    return stack(cfg, "qwen3_5", dense, alone=cfg.data.get("model_type") in MODEL_TYPES[1:])


def dense(cfg: Config, hidden: int) -> FeedForward:
    """The gated feed-forward of every block."""
    return b.mlp(cfg, hidden)


def stack(cfg: Config, family: str, feed: Callable[[Config, int], FeedForward], *, alone: bool) -> Model:
    """The decoder with one feed-forward in every block, and unless it stands alone, the tower beside it."""
    text = cfg if alone else _vl.text_config(cfg, one_tie=True)
    hidden, n = b.shape(text)
    ff = feed(text, hidden)
    of = {word: replace(layer, mlp=ff) for word, layer in _gated.mixers(text, hidden).items()}
    full = of["full_attention"]
    assert full.attn
    text.expect("mtp_use_dedicated_embeddings", allowed=(False,), default=False)
    drafts = text.integer("mtp_num_hidden_layers", lo=0, hi=LAYERS, default=0)
    model = b.decoder(text, family, b.by_type(_gated.words(text, n), of), norm=full.attn_norm,
                      context=read_context(text, full.attn.rope),
                      not_counted=_gated.drafts(drafts, full, f"{drafts} stored after the decoder, for drafting only"))
    return model if alone else _vl.around(model, family, cfg, v.qwen3_vl, merger)


def merger(cfg: Config, text_hidden: int) -> Section:
    """Qwen3-VL's last merger alone."""
    if cfg.integers("deepstack_visual_indexes", default=()):
        raise cfg.refuse("config-unsupported", f"{cfg.prefix}deepstack_visual_indexes names blocks; none is known")
    hidden, out = cfg.integer("hidden_size"), cfg.expect("out_hidden_size", allowed=(text_hidden,))
    return section("projector", v.merger(cfg, hidden, out, list(layer_norm("norm", hidden))))
