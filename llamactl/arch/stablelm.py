"""StableLM 3B and 2: LayerNorm, partial RoPE, SwiGLU; optional qkv biases, per-head q/k norms, parallel residual."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA, modules
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.parts import Norm
from llamactl.spec.ropeconfig import partial_factor, read_context, read_rope

if TYPE_CHECKING:
    from llamactl.arch._ggufwords import Metadata

MODEL_TYPES = ("stablelm",)
GGUF = ("stablelm",)
HF_CLASS = "StableLmForCausalLM"
HF = (*LLAMA, *modules({
    f"layers.{{i}}.attn.{x}_norm.{{e}}": f"model.layers.{{i}}.self_attn.{x}_layernorm.norms.{{e}}" for x in "qk"
}))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden, factor=partial_factor(cfg, 0.25, "partial_rotary_factor",
                                                                        "rope_pct")))
    attn = b.attention(cfg, hidden, rope=rope, qkv_bias=cfg.flag("use_qkv_bias", default=False))
    norm = b.layer_norm(cfg, hidden, "layer_norm_eps", "norm_eps")
    if cfg.flag("qk_layernorm", default=False):
        one = Norm(dim=attn.head_dim, eps=norm.eps, kind="layer")
        attn = replace(attn, q_norm=replace(one, heads=attn.n_heads), k_norm=replace(one, heads=attn.n_kv_heads))
    layer = b.pre_norm(attn, b.mlp(cfg, hidden), norm, parallel=cfg.flag("use_parallel_residual", default=False))
    return b.decoder(cfg, "stablelm", (layer,) * n, norm=norm, context=read_context(cfg, rope))


def from_gguf(meta: Metadata) -> dict[str, object]:
    """All by tensors, as in llama.cpp: use_parallel_residual is written true for files that have both norms."""
    return {"use_qkv_bias": meta.holds("attn_q.bias"), "qk_layernorm": meta.holds("attn_q_norm.weight"),
            "use_parallel_residual": not meta.holds("ffn_norm.weight")}
