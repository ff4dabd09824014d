"""Mixtral: a Mistral block whose feed-forward is a mixture of SwiGLU experts (arXiv:2401.04088)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch import _routing
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, PRE_NORMS, blocks, modules
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("mixtral",)
GGUF = ("llama",)
GGUF_WITH = "expert_count"
GGUF_NAMES = "paired"
EXPERTS = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.{e}.gate": "block_sparse_moe.experts.{e}.w1",
    "mlp.experts.{e}.down": "block_sparse_moe.experts.{e}.w2",
    "mlp.experts.{e}.up": "block_sparse_moe.experts.{e}.w3",
}
HF = (*modules(LLAMA_OUTER), *blocks(ATTENTION, PRE_NORMS, EXPERTS))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden), theta=1e6)
    attn = b.attention(cfg, hidden, kv_default="refuse", rope=rope, window=b.window(cfg, None))
    ff = b.moe(cfg, b.mlp(cfg, hidden), "num_local_experts", "num_experts", routing=_routing.MIXTRAL)
    layer = b.pre_norm(attn, ff, b.rms(cfg, hidden, default=1e-5))
    context = read_context(cfg, rope)
    return b.decoder(cfg, "mixtral", (layer,) * n, norm=b.rms(cfg, hidden, default=1e-5), context=context,
                     window_engines=("arch", "hf", "vllm"))
