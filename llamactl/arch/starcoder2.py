"""StarCoder2: LayerNorm, GELU, GQA, biases where use_bias says so, a window on every layer (arXiv:2402.19173)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamactl.arch import _build as b
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, PRE_NORMS, blocks, modules
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.ropeconfig import read_context, read_rope

if TYPE_CHECKING:
    from llamactl.arch._ggufwords import Metadata

MODEL_TYPES = ("starcoder2",)
GGUF = ("starcoder2",)
GGUF_NAMES = "plain"
HF = (*modules(LLAMA_OUTER), *blocks(ATTENTION, PRE_NORMS, {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.expect("mlp_type", allowed=("default",), default="default")
    cfg.expect("norm_type", allowed=("layer_norm",), default="layer_norm")
    rope = read_rope(cfg, b.rope_dim(cfg, hidden))
    bias = cfg.flag("use_bias", default=True)
    attn = b.attention(cfg, hidden, kv_default="refuse", rope=rope, window=b.window(cfg, None), qkv_bias=bias,
                       o_bias=bias)
    act = cfg.activation("hidden_act", default="gelu_pytorch_tanh")
    norm = b.layer_norm(cfg, hidden, "norm_epsilon")
    layer = b.pre_norm(attn, b.mlp(cfg, hidden, activation=act, gated=False, bias=bias), norm)
    return b.decoder(cfg, "starcoder2", (layer,) * n, norm=norm, tied_default=True, context=read_context(cfg, rope),
                     window_engines=("arch", "hf", "vllm"))


def from_gguf(meta: Metadata) -> dict[str, object]:
    """use_bias is in no key."""
    return {"use_bias": meta.holds("attn_q.bias")}
