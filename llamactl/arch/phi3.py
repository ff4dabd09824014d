"""Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini: a Llama block with fused qkv and gate-up (arXiv:2404.14219)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA_OUTER, PRE_NORMS, blocks, modules
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.naming import Fused, rule
from llamactl.spec.ropeconfig import partial_factor, read_context, read_rope

MODEL_TYPES = ("phi3",)
GGUF = ("phi3",)
GGUF_NAMES = "qkv_gate_up"
H, L = "model.layers.{i}.", "layers.{i}."
HF = (
    *modules(LLAMA_OUTER),
    *blocks(PRE_NORMS, {"attn.o": "self_attn.o_proj", "mlp.down": "mlp.down_proj"}),
    rule(f"{H}self_attn.qkv_proj.weight", *(f"{L}attn.{x}.weight" for x in "qkv"), ops=(Fused(),)),
    rule(f"{H}mlp.gate_up_proj.weight", f"{L}mlp.gate.weight", f"{L}mlp.up.weight", ops=(Fused(),)),
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        cfg.expect(key, allowed=(False,), default=False)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden, factor=partial_factor(cfg, 1.0)))
    if rope.scaling and rope.scaling.original is None:
        rope = replace(rope, scaling=replace(rope.scaling, original=4096))
    attn = b.attention(cfg, hidden, rope=rope, window=b.window(cfg, None))
    layer = b.pre_norm(attn, b.mlp(cfg, hidden), b.rms(cfg, hidden, default=1e-5))
    return b.decoder(cfg, "phi3", (layer,) * n, norm=b.rms(cfg, hidden, default=1e-5),
                     context=read_context(cfg, rope), window_engines=("arch", "hf", "vllm"))
