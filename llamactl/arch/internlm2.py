"""InternLM2, InternLM2.5: a Llama block whose wqkv holds q, k and v by KV group (arXiv:2403.17297)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import blocks, modules
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.naming import Fused, rule
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("internlm2",)
H, L = "model.layers.{i}.", "layers.{i}."
BLOCK = {
    "attn_norm": "attention_norm", "attn.o": "attention.wo", "mlp_norm": "ffn_norm",
    "mlp.gate": "feed_forward.w1", "mlp.up": "feed_forward.w3", "mlp.down": "feed_forward.w2",
}
HF = (
    *modules({"embed": "model.tok_embeddings", "norm": "model.norm", "head": "output"}),
    *blocks(BLOCK),
    *(rule(f"{H}attention.wqkv.{p}", *(f"{L}attn.{x}.{p}" for x in "qkv"), ops=(Fused(order="per_group"),))
      for p in ("weight", "bias")),
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.expect("head_dim", allowed=(None,), default=None)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden))
    bias = cfg.flag("bias", default=True)
    attn = b.attention(cfg, hidden, kv_default="refuse", rope=rope, qkv_bias=bias, o_bias=bias)
    norm = b.rms(cfg, hidden)
    return b.decoder(cfg, "internlm2", (b.pre_norm(attn, b.mlp(cfg, hidden), norm),) * n, norm=norm,
                     context=read_context(cfg, rope))
