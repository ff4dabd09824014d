"""Gemma 3n E2B, E4B: streams that predict each other (AltUp), low-rank detours (LAuReL), embeddings for each layer.

AltUp: arXiv:2301.13310; LAuReL: arXiv:2411.07501; widths that differ by layer: MatFormer, arXiv:2310.07707.
"""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch import _gemma as g
from llamactl.arch import _vl
from llamactl.arch._names import QK_NORM, blocks, nested
from llamactl.arch.gemma import gelu
from llamactl.arch.gemma2 import HF as GEMMA2
from llamactl.spec.config import Config
from llamactl.spec.model import Layer, Model, NotCounted
from llamactl.spec.naming import Rule
from llamactl.spec.parts import MLP, Attention, Norm
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("gemma3n", "gemma3n_text")
TEXT = (*GEMMA2, *blocks(QK_NORM), *g.PER_LAYER, *g.ALTUP)


def HF(model: Model) -> tuple[Rule, ...]:  # noqa: N802  a table that depends on whether the text stands alone
    return TEXT if model.model_type == "gemma3n_text" else (*nested(TEXT), *g.EMBEDDERS)


def describe(cfg: Config) -> Model:
    text = cfg.section("text_config")
    model = describe_text(text or cfg)
    if text is None:
        return model
    towers = NotCounted(what="vision tower (MobileNet-v5) and audio tower (a conformer)", params=None,
                        why="the config names the first without its shapes; neither is described here")
    made = g.embedder(cfg, model.hidden)
    return replace(model, family="gemma3n", sections=(*model.sections, *made), not_counted=(*model.not_counted, towers))


def describe_text(cfg: Config) -> Model:
    """The decoder: Gemma 3's norms and windows around widths of its own in each layer."""
    hidden, n = b.shape(cfg)
    types = b.pattern(cfg, n, 5)
    same_kv, eps = g.shared(cfg, types, 15), cfg.number("rms_norm_eps", default=1e-6)
    n_heads, n_kv, dim = b.heads(cfg, hidden, head_dim=256, kv_default="refuse")
    local = replace(read_rope(cfg, dim, layer_type="sliding_attention"), scaling=None)
    if "rope_parameters" not in cfg.data:
        local = replace(local, theta=cfg.number("rope_local_base_freq", default=10000.0, lo=1e-6))
    rope = {"full_attention": read_rope(cfg, dim, theta=1e6, layer_type="full_attention"), "sliding_attention": local}
    bias, norm, small = cfg.flag("attention_bias", default=False), Norm(dim=hidden, eps=eps), Norm(dim=dim, eps=eps)
    width = cfg.integer("hidden_size_per_layer_input")
    extra = (*g.altup_leaves(cfg, hidden, eps), *g.laurel_leaves(cfg, hidden, eps),
             *g.per_layer_leaves(hidden, width, eps))
    attn = {
        (kind, reads): Attention(
            hidden=hidden, n_heads=n_heads, n_kv_heads=n_kv, head_dim=dim, rope=rope[kind], qkv_bias=bias, o_bias=bias,
            q_norm=small, k_norm=small, v_norm=replace(small, weight=False), scale=1.0, shares_kv=reads,
            window=b.window(cfg, 512) if kind == "sliding_attention" else None)
        for kind, reads in dict.fromkeys(zip(types, same_kv, strict=True))}
    made: dict[tuple[str, bool, int], Layer] = {}
    for key in dict.fromkeys(keys := list(zip(types, same_kv, g.widths(cfg, n), strict=True))):
        ff = MLP(hidden=hidden, ffn=key[2], activation=gelu(cfg))
        made[key] = Layer(attn=attn[key[:2]], mlp=ff, attn_norm=norm, attn_post_norm=norm, mlp_norm=norm,
                          mlp_post_norm=norm, extra=extra)
    return b.decoder(
        cfg, "gemma3n", [made[key] for key in keys], norm=norm, tied_default=True, embed_scale=hidden**0.5,
        context=read_context(cfg, rope["full_attention"], final=True),
        softcap=_vl.unless_null(cfg, "final_logit_softcapping", 30.0),
        sections=(g.per_layer_section(cfg, hidden, width, n, eps), g.altup_section(cfg, hidden)),
        not_counted=g.idle([attn[key[:2]] for key in keys]))
