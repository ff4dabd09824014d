"""EXAONE 4.0: OLMo 2's post-norm block, q/k norms by head, every fourth layer full and unrotated (arXiv:2507.11407)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, MLP, QK_NORM, blocks, modules
from llamactl.arch.olmo2 import NORMS
from llamactl.spec.config import LAYERS, Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("exaone4",)
HF = (*modules(LLAMA_OUTER), *blocks(ATTENTION, QK_NORM, NORMS, MLP))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden))
    _, _, dim = b.heads(cfg, hidden, kv_default="refuse")
    attn = b.attention(cfg, hidden, rope=rope, qk_norm=b.rms(cfg, dim, default=1e-5))
    norm, ff, window = b.rms(cfg, hidden, default=1e-5), b.mlp(cfg, hidden), b.window(cfg, 4096)
    types = layer_types(cfg, n, window)
    of = {
        "sliding_attention": replace(attn, window=window),
        "full_attention": replace(attn, rope=None if window else rope),  # a model without windows rotates everywhere
    }
    layers = b.by_type(types, {word: Layer(attn=x, mlp=ff, attn_post_norm=norm, mlp_post_norm=norm)
                               for word, x in of.items()})
    return b.decoder(cfg, "exaone4", layers, norm=norm, context=read_context(cfg, rope))


def layer_types(cfg: Config, n: int, window: int | None) -> tuple[str, ...]:
    """layer_types, else every sliding_window_pattern-th layer is full, or the L and G of a word, the last always G."""
    given = cfg.layer_types(n, ("full_attention", "sliding_attention"))
    if window is None and "sliding_attention" in (given or ()):
        raise cfg.refuse("config-layers", "layer_types holds 'sliding_attention', but sliding_window is null")
    if given is not None or window is None:
        return given or ("full_attention",) * n
    word = cfg.get("sliding_window_pattern", default=4)
    if isinstance(word, str) and word and set(word) <= set("LG"):
        local = [word[i % len(word)] == "L" and i < n - 1 for i in range(n)]
    else:
        every = cfg.integer("sliding_window_pattern", hi=LAYERS, default=4)
        local = [(i + 1) % every != 0 for i in range(n)]
    return tuple("sliding_attention" if x else "full_attention" for x in local)
