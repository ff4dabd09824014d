"""Phi-1, Phi-1.5, Phi-2: parallel block under one LayerNorm, partial RoPE, biases everywhere, also on the head."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA_OUTER, blocks, modules
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.ropeconfig import partial_factor, read_context, read_rope

MODEL_TYPES = ("phi",)
GGUF = ("phi2",)
BLOCK = {
    "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.dense", "attn.q_norm": "self_attn.q_layernorm", "attn.k_norm": "self_attn.k_layernorm",
    "attn_norm": "input_layernorm", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2",
}
HF = (*modules({**LLAMA_OUTER, "norm": "model.final_layernorm"}), *blocks(BLOCK))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden, factor=partial_factor(cfg, 0.5)))
    _, _, head_dim = b.heads(cfg, hidden)
    qk = b.layer_norm(cfg, head_dim, "layer_norm_eps") if cfg.flag("qk_layernorm", default=False) else None
    attn = b.attention(cfg, hidden, rope=rope, qkv_bias=True, o_bias=True, qk_norm=qk)
    act = cfg.activation("hidden_act", default="gelu_new")
    norm = b.layer_norm(cfg, hidden, "layer_norm_eps")
    layer = b.pre_norm(attn, b.mlp(cfg, hidden, activation=act, gated=False, bias=True), norm, parallel=True)
    return b.decoder(cfg, "phi", (layer,) * n, norm=norm, head_bias=True, context=read_context(cfg, rope))
