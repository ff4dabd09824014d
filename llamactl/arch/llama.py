"""LLaMA 1-3.x, TinyLlama, SmolLM and others of the type: RMSNorm, RoPE, GQA, SwiGLU, no biases (arXiv:2302.13971)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA, blocks, modules, paired
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.naming import rule
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("llama",)
GGUF = ("llama",)
HF = LLAMA
IGNORED = (("model.layers.{i}.self_attn.rotary_emb.inv_freq", "inverse frequencies of the RoPE, from its base"),)
GGUF_NAMES = "paired"
# Meta's own files: consolidated.NN.pth beside params.json.
META = (
    *modules({"embed": "tok_embeddings", "norm": "norm", "head": "output"}),
    *blocks({"attn_norm": "attention_norm", "attn.v": "attention.wv", "attn.o": "attention.wo", "mlp_norm": "ffn_norm",
             "mlp.gate": "feed_forward.w1", "mlp.down": "feed_forward.w2", "mlp.up": "feed_forward.w3"},
            prefix="layers.{i}."),
    *paired("layers.{i}.attention.wq", "layers.{i}.attention.wk"),
)
META_IGNORED = (("rope.freqs", "frequencies of the RoPE, computed from its base"),)
# As it is written when the model is built by hand in plain words; w1 gates, w3 projects back.
LESSON = (
    *modules({"embed": "wte", "head": "lm_head"}), rule("norm.gamma", "norm.weight"),
    *blocks({"attn.v": "gqa.wv", "attn.o": "gqa.wo", "mlp.gate": "ff.w1", "mlp.up": "ff.w2", "mlp.down": "ff.w3"},
            prefix="blocks.{i}."),
    rule("blocks.{i}.rms_1.gamma", "layers.{i}.attn_norm.weight"),
    rule("blocks.{i}.rms_2.gamma", "layers.{i}.mlp_norm.weight"),
    *paired("blocks.{i}.gqa.wq", "blocks.{i}.gqa.wk"),
)
LESSON_IGNORED = tuple((f"*{x}", "a table computed from the config") for x in (".mask", ".cos", ".sin", "inv_freq"))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    cfg.layer_types(n, ("full_attention",))
    rope = read_rope(cfg, b.rope_dim(cfg, hidden))
    bias = cfg.flag("attention_bias", default=False)
    attn = b.attention(cfg, hidden, rope=rope, qkv_bias=bias, o_bias=bias)
    ff = b.mlp(cfg, hidden, bias=cfg.flag("mlp_bias", default=False))
    layer = b.pre_norm(attn, ff, b.rms(cfg, hidden))
    context = read_context(cfg, rope)
    return b.decoder(cfg, "llama", (layer,) * n, norm=b.rms(cfg, hidden), context=context)
