"""Qwen3 MoE (30B-A3B, 235B-A22B, Coder): Qwen3 attention over routed experts, no shared expert (arXiv:2505.09388)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch import _routing
from llamactl.arch._names import EXPERTS, LLAMA, QK_NORM, blocks
from llamactl.arch.qwen2_moe import sparse_layers
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.ropeconfig import read_context, read_rope
from llamactl.spec.routing import Routing

MODEL_TYPES = ("qwen3_moe",)
GGUF = ("qwen3moe",)
GGUF_NAMES = "plain"
HF = (*LLAMA, *blocks(QK_NORM, EXPERTS))


def describe(cfg: Config) -> Model:
    return routed(cfg, "qwen3_moe", _routing.softmax(cfg, False))


def from_gguf(meta: Config) -> dict[str, object]:
    """Weights that sum to one are no metadata: llama.cpp has it so for this architecture."""
    return {"norm_topk_prob": meta.flag("expert_weights_norm", default=True)}


def routed(cfg: Config, family: str, routing: Routing | None) -> Model:
    """The Qwen3 stack with mixtures in the layers that the config names."""
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden))
    slides = cfg.flag("use_sliding_window", default=False)
    bias = cfg.flag("attention_bias", default=False)
    _, _, head_dim = b.heads(cfg, hidden, kv_default="refuse")
    attn = b.attention(cfg, hidden, rope=rope, window=b.window(cfg, 4096) if slides else None,
                       qkv_bias=bias, o_bias=bias, qk_norm=b.rms(cfg, head_dim))
    norm = b.rms(cfg, hidden)
    expert = b.mlp(cfg, hidden, key="moe_intermediate_size")
    sparse = b.pre_norm(attn, b.moe(cfg, expert, "num_experts", "num_local_experts", routing=routing), norm)
    is_moe = sparse_layers(cfg, n)
    dense = sparse if all(is_moe) else b.pre_norm(attn, b.mlp(cfg, hidden), norm)
    return b.decoder(cfg, family, [sparse if moe else dense for moe in is_moe], norm=norm,
                     context=read_context(cfg, rope), window_engines=("arch", "hf", "vllm"))
