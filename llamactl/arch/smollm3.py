"""SmolLM3: a Llama block, every fourth layer without positions (NoPE), tied head."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA
from llamactl.spec.config import LAYERS, Config
from llamactl.spec.model import Model
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("smollm3",)
GGUF = ("smollm3",)
GGUF_NAMES = "paired"
HF_CLASS = "SmolLM3ForCausalLM"
HF = LLAMA


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden), theta=2e6)
    bias = cfg.flag("attention_bias", default=False)
    attn = b.attention(cfg, hidden, kv_default="refuse", rope=rope, qkv_bias=bias, o_bias=bias)
    ff, norm = b.mlp(cfg, hidden, bias=cfg.flag("mlp_bias", default=False)), b.rms(cfg, hidden)
    has_rope = rotated_layers(cfg, n)
    slides = cfg.flag("use_sliding_window", default=False)
    window = b.window(cfg, None) if slides else None
    types = cfg.layer_types(n, ("full_attention", "sliding_attention")) or tuple(
        "sliding_attention" if window and not turned else "full_attention" for turned in has_rope
    )
    kinds = {
        (turned, word): b.pre_norm(
            replace(attn, rope=rope if turned else None, window=window if word == "sliding_attention" else None),
            ff, norm,
        )
        for turned in (True, False) for word in ("full_attention", "sliding_attention")
    }
    layers = [kinds[key] for key in zip(has_rope, types, strict=True)]
    return b.decoder(cfg, "smollm3", layers, norm=norm, tied_default=True, context=read_context(cfg, rope),
                     window_engines=("arch", "hf", "vllm"))


def rotated_layers(cfg: Config, n: int) -> tuple[bool, ...]:
    """no_rope_layers (1 = rotated), else every no_rope_layer_interval-th layer goes without."""
    given = cfg.integers("no_rope_layers", hi=1, default=())
    if given:
        if len(given) != n:
            raise cfg.refuse("config-layers", f"no_rope_layers has {len(given)} entries for {n} layers")
        return tuple(bool(x) for x in given)
    every = cfg.integer("no_rope_layer_interval", hi=LAYERS, default=4)
    return tuple((i + 1) % every != 0 for i in range(n))
