"""Qwen1.5, Qwen2 and Qwen2.5: a Llama block with biases on q, k and v; a window on the upper layers if switched on."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA
from llamactl.spec.config import LAYERS, Config
from llamactl.spec.model import Model
from llamactl.spec.parts import Norm
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("qwen2",)
GGUF = ("qwen2",)
GGUF_NAMES = "plain"
HF = LLAMA


def describe(cfg: Config) -> Model:
    return dense(cfg, "qwen2", qkv_bias=True)


def dense(cfg: Config, family: str, *, qkv_bias: bool, o_bias: bool = False, qk_norm: Norm | None = None,
          head_dim: int | None = None) -> Model:
    """The dense Qwen stack; Qwen3 adds q/k norms and drops the biases."""
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden, head_dim=head_dim))
    full = b.attention(cfg, hidden, head_dim=head_dim, kv_default="refuse", rope=rope, qkv_bias=qkv_bias,
                       o_bias=o_bias, qk_norm=qk_norm)
    ff, norm = b.mlp(cfg, hidden), b.rms(cfg, hidden)
    of = {"full_attention": b.pre_norm(full, ff, norm)}
    types = layer_types(cfg, n)
    if "sliding_attention" in types:
        window = cfg.integer("sliding_window", hi=1 << 40)
        of["sliding_attention"] = b.pre_norm(replace(full, window=window), ff, norm)
    context = read_context(cfg, rope)
    return b.decoder(cfg, family, b.by_type(types, of), norm=norm, context=context,
                     window_engines=("arch", "hf", "vllm"))


def layer_types(cfg: Config, n: int) -> tuple[str, ...]:
    """Full everywhere unless use_sliding_window is on; then the layers from max_window_layers upwards slide."""
    given = cfg.layer_types(n, ("full_attention", "sliding_attention"))
    if not cfg.flag("use_sliding_window", default=False) or b.window(cfg, 4096) is None:
        return ("full_attention",) * n
    if given is not None:
        return given
    first = cfg.integer("max_window_layers", lo=0, hi=LAYERS, default=28)
    return tuple("sliding_attention" if i >= first else "full_attention" for i in range(n))
