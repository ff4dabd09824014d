"""dots.llm1: Qwen3's attention, DeepSeek-V3's experts; layers from max_window_layers may slide (arXiv:2506.05767)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch import _routing
from llamactl.arch._moe import experts, moe_layers
from llamactl.arch.glm4_moe import HF
from llamactl.spec.config import COUNT, LAYERS, Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import MLP, MoE
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("dots1",)
__all__ = ["HF", "MODEL_TYPES", "describe"]


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden))
    bias = cfg.flag("attention_bias", default=False)
    _, _, dim = b.heads(cfg, hidden, kv_default="refuse")
    full = b.attention(cfg, hidden, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm=b.rms(cfg, dim))
    norm, window, sparse = b.rms(cfg, hidden), b.window(cfg, 4096), moe_layers(cfg, n)
    types = layer_types(cfg, n, window)
    ff: dict[bool, MLP | MoE] = {}
    if any(sparse):
        cfg.integer("n_shared_experts", hi=COUNT)
        ff[True] = experts(cfg, hidden, _routing.noaux(cfg, normalise=False))
    if not all(sparse):
        ff[False] = b.mlp(cfg, hidden)
    attn = {"full_attention": full, "sliding_attention": replace(full, window=window)}
    made: dict[tuple[str, bool], Layer] = {}
    keys = tuple(zip(types, sparse, strict=True))
    for word, moe in dict.fromkeys(keys):
        made[word, moe] = b.pre_norm(attn[word], ff[moe], norm)
    return b.decoder(cfg, "dots1", [made[key] for key in keys], norm=norm, context=read_context(cfg, rope),
                     window_engines=("arch", "hf", "vllm"))


def layer_types(cfg: Config, n: int, window: int | None) -> tuple[str, ...]:
    """layer_types, else the layers from max_window_layers on slide where there is a window."""
    given = cfg.layer_types(n, ("full_attention", "sliding_attention"))
    if window is None and "sliding_attention" in (given or ()):
        raise cfg.refuse("config-layers", "layer_types holds 'sliding_attention', but sliding_window is null")
    if given is not None:
        return given
    first = cfg.integer("max_window_layers", lo=0, hi=LAYERS, default=62)
    if window is None or first >= n:
        return ("full_attention",) * n
    if not cfg.flag("use_sliding_window", default=True):
        raise cfg.refuse("config-conflict", f"use_sliding_window is false, but layers from {first} on have a window of "
                         f"{window:,}", "write sliding_window: null if no layer slides")
    return tuple("sliding_attention" if i >= first else "full_attention" for i in range(n))
