"""Llama 3.2 Vision 11B, 90B: Llama 3.1 and, between, gated layers that attend to pictures (arXiv:2407.21783)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch import _vision_mllama, _vl, llama
from llamactl.arch._names import ATTENTION, LLAMA, blocks, under
from llamactl.spec.config import Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.naming import rule
from llamactl.spec.parts import Attention, Leaf

MODEL_TYPES = ("mllama",)
H, L = "model.layers.{i}.", "layers.{i}."
CROSS = {c.replace("attn.", "cross."): s.replace("self_attn.", "cross_attn.") for c, s in ATTENTION.items()} | {
    f"cross.{x}_norm": f"cross_attn.{x}_norm" for x in "qk"}
TEXT = (*LLAMA, *blocks(CROSS), *(rule(f"{H}cross_attn_{x}_gate", f"{L}{x}_gate") for x in ("attn", "mlp")))
HF = (*under("language_model.", TEXT), *_vision_mllama.NAMES)
SILENT = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5}
SPARE_ROWS = 8  # of the embedding, past the vocabulary: the picture token and room beside it


def describe(cfg: Config) -> Model:
    text = _vl.text_config(cfg, SILENT)
    text.expect("model_type", allowed=("mllama_text_model",), default="mllama_text_model")
    for flag in ("attention_bias", "mlp_bias"):
        text.expect(flag, allowed=(False,), default=False)
    hidden, n = b.shape(text)
    b.heads(text, hidden, kv_default="refuse")
    model = llama.describe(text)
    if model.tied:
        raise cfg.refuse("config-unsupported", "tie_word_embeddings is true, but embedding and head differ in size")
    crossing = frozenset(text.integers("cross_attention_layers", hi=n - 1))
    other = cross(model.layers[0], text)
    layers = tuple(other if i in crossing else layer for i, layer in enumerate(model.layers))
    embed = replace(model.embed, vocab=model.embed.vocab + SPARE_ROWS)
    if crossing:
        kept = 2 * other.attn.n_kv_heads * other.attn.head_dim if isinstance(other.attn, Attention) else 0
        cfg.warnings.append(("picture-cache", f"{len(crossing)} layers attend to pictures alone: they keep {kept:,} "
                             "elements for each position of a picture, none for a token of text, and are not in the "
                             "cache"))
    return _vl.around(replace(model, layers=layers, embed=embed), "mllama", cfg, _vision_mllama.tower,
                      _vision_mllama.projector, silent=SILENT)


def cross(layer: Layer, cfg: Config) -> Layer:
    """The same block attending to pictures: no rotation, a norm on each head's q and k, a gate on each branch."""
    assert isinstance(layer.attn, Attention)
    norm = b.rms(cfg, layer.attn.head_dim)
    return replace(layer, attn=replace(layer.attn, rope=None, q_norm=norm, k_norm=norm, cross=True),
                   extra=(Leaf("attn_gate", (1,), "other"), Leaf("mlp_gate", (1,), "other")))
