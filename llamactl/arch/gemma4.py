"""Gemma 4: wider full layers whose V may be K, experts beside the MLP, embeddings for each layer (E2B, E4B)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch import _vision_gemma4 as v
from llamactl.arch import _vl
from llamactl.arch._gemma import PER_LAYER, idle, per_layer_leaves, per_layer_section, shared
from llamactl.arch._gemma4 import TEXT, experts, heads, rotations
from llamactl.arch._names import nested
from llamactl.arch.gemma import gelu
from llamactl.spec.config import Config
from llamactl.spec.model import Layer, Model, NotCounted
from llamactl.spec.naming import Rule
from llamactl.spec.parts import Attention, Leaf, Norm
from llamactl.spec.ropeconfig import read_context

MODEL_TYPES = ("gemma4", "gemma4_text")


def HF(model: Model) -> tuple[Rule, ...]:  # noqa: N802  a table that depends on whether the text stands alone
    text = (*TEXT, *PER_LAYER)
    return text if model.model_type == "gemma4_text" else (*nested(text), *v.NAMES)


def describe(cfg: Config) -> Model:
    text = cfg.section("text_config")
    model = describe_text(text or cfg)
    if text is None:
        return model
    if cfg.section("audio_config"):
        model = replace(model, not_counted=(*model.not_counted, NotCounted(
            what="audio tower and its projector", params=None, why="its conformer is not described here")))
    return _vl.around(model, "gemma4", cfg, v.tower, v.projector)


def describe_text(cfg: Config) -> Model:
    """The decoder. Full layers have heads of their own size; the last layer is always full."""
    hidden, n = b.shape(cfg)
    cfg.expect("use_bidirectional_attention", allowed=(None, "vision"), default=None)
    types = (*b.pattern(cfg, n, 6)[:-1], "full_attention")
    same_kv, rope, eps = shared(cfg, types, 0), rotations(cfg), cfg.number("rms_norm_eps", default=1e-6)
    k_is_v, bias = cfg.flag("attention_k_eq_v", default=False), cfg.flag("attention_bias", default=False)
    width = cfg.integer("hidden_size_per_layer_input", lo=0, default=256)
    extra = (*(per_layer_leaves(hidden, width, eps) if width else ()), Leaf("scalar", (1,), "other", "buffer"))
    norm = Norm(dim=hidden, eps=eps)
    ff, double = b.mlp(cfg, hidden, activation=gelu(cfg)), cfg.flag("use_double_wide_mlp", default=False)
    full = [t == "full_attention" for t in types]
    made: dict[tuple[object, ...], Layer] = {}
    layers = []
    for key in zip(heads(cfg, n, full), full, same_kv, strict=True):
        if key not in made:
            (n_heads, n_kv, dim), whole, reads = key
            attn = Attention(
                hidden=hidden, n_heads=n_heads, n_kv_heads=n_kv, head_dim=dim, rope=rope(dim, whole), qkv_bias=bias,
                o_bias=bias, q_norm=Norm(dim=dim, eps=eps), k_norm=Norm(dim=dim, eps=eps), scale=1.0,
                v_norm=Norm(dim=dim, eps=eps, weight=False), window=None if whole else b.window(cfg, 512),
                v_from_k=k_is_v and whole, shares_kv=reads)
            wide = replace(ff, ffn=2 * ff.ffn) if double and reads else ff
            mixed, more = experts(cfg, wide, eps)
            made[key] = Layer(attn=attn, mlp=mixed, attn_norm=norm, attn_post_norm=norm, mlp_norm=norm,
                              mlp_post_norm=norm, extra=(*more, *extra))
        layers.append(made[key])
    return b.decoder(
        cfg, "gemma4", layers, norm=norm, tied_default=True, embed_scale=hidden**0.5,
        context=read_context(cfg, None), softcap=cfg.number("final_logit_softcapping", default=None),
        sections=(per_layer_section(cfg, hidden, width, n, eps),) if width else (),
        not_counted=idle([x.attn for x in layers if isinstance(x.attn, Attention)]))
