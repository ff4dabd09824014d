"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2 attention, routed experts beside one gated shared expert."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch import _routing
from llamactl.arch._names import EXPERTS, LLAMA, blocks
from llamactl.spec.config import LAYERS, Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("qwen2_moe",)
GGUF = ("qwen2moe",)
SHARED = {
    "mlp.shared.gate": "mlp.shared_expert.gate_proj", "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj", "mlp.shared_gate": "mlp.shared_expert_gate",
}
HF = (*LLAMA, *blocks(EXPERTS, SHARED))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden))
    full = b.attention(cfg, hidden, kv_default="refuse", rope=rope, qkv_bias=cfg.flag("qkv_bias", default=True))
    expert = b.mlp(cfg, hidden, key="moe_intermediate_size")
    shared = b.mlp(cfg, hidden, key="shared_expert_intermediate_size")
    sparse = b.moe(cfg, expert, "num_experts", shared=shared, shared_gate=True, routing=_routing.softmax(cfg, False))
    norm = b.rms(cfg, hidden)
    types = layer_types(cfg, n)
    window = cfg.integer("sliding_window", hi=1 << 40) if "sliding_attention" in types else None
    attn = {"full_attention": full, "sliding_attention": replace(full, window=window)}
    is_moe = sparse_layers(cfg, n)
    dense = None if all(is_moe) else b.mlp(cfg, hidden)
    layers: list[Layer] = []
    for word, moe in zip(types, is_moe, strict=True):
        ff = sparse if moe else dense
        assert ff is not None
        layers.append(b.pre_norm(attn[word], ff, norm))
    return b.decoder(cfg, "qwen2_moe", layers, norm=norm, context=read_context(cfg, rope),
                     window_engines=("arch", "hf", "vllm"))


def layer_types(cfg: Config, n: int) -> tuple[str, ...]:
    """Full everywhere unless use_sliding_window is on; then every other layer below max_window_layers slides."""
    given = cfg.layer_types(n, ("full_attention", "sliding_attention"))
    if not cfg.flag("use_sliding_window", default=False):
        return ("full_attention",) * n
    if given is not None:
        return given
    last = cfg.integer("max_window_layers", lo=0, hi=LAYERS, default=28)
    return tuple("sliding_attention" if i % 2 == 0 and i < last else "full_attention" for i in range(n))


def sparse_layers(cfg: Config, n: int) -> tuple[bool, ...]:
    """Which layers are MoE: every decoder_sparse_step-th, but not those in mlp_only_layers."""
    step = cfg.integer("decoder_sparse_step", hi=LAYERS, default=1)
    dense = set(cfg.integers("mlp_only_layers", hi=LAYERS, default=()))
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(n))
