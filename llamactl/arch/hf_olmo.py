"""OLMo 1 as its own package stores it (OLMo-1B, OLMo-7B): fused q, k, v, and up beside gate (arXiv:2402.00838)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import modules
from llamactl.spec.config import COUNT, VOCAB, Config
from llamactl.spec.model import Model
from llamactl.spec.naming import Fused, rule
from llamactl.spec.parts import MLP, Attention, Embedding, Head, Norm
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("hf_olmo",)
H, L = "model.transformer.blocks.{i}.", "layers.{i}."
HF = (
    *modules({"embed": "model.transformer.wte", "head": "model.transformer.ff_out", f"{L}attn.o": f"{H}attn_out",
              f"{L}mlp.down": f"{H}ff_out"}),
    rule(f"{H}att_proj.weight", *(f"{L}attn.{x}.weight" for x in "qkv"), ops=(Fused(),)),
    rule(f"{H}ff_proj.weight", f"{L}mlp.up.weight", f"{L}mlp.gate.weight", ops=(Fused(),)),
)
# What the package can build and no release uses, with the package's own defaults.
FIXED = {
    "block_type": ("sequential", "sequential"), "activation_type": ("swiglu", "swiglu"), "alibi": (False, False),
    "rope": (True, False), "layer_norm_type": ("default", "default"), "layer_norm_with_affine": (False, True),
    "attention_layer_norm": (False, False), "include_bias": (False, True), "scale_logits": (False, False),
    "block_group_size": (1, 1), "norm_after": (False, False), "embedding_layer_norm": (False, False),
}


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    for key, (known, default) in FIXED.items():
        cfg.expect(key, allowed=(known,), default=default)
    heads = cfg.integer("n_heads", hi=COUNT)
    kv = cfg.integer("n_kv_heads", hi=COUNT, default=None)
    if kv is None:
        kv = 1 if cfg.flag("multi_query_attention", default=False) else heads
    if heads % kv:
        raise cfg.refuse("config-heads", f"{heads} heads cannot share {kv} KV heads evenly")
    dim = cfg.divided(hidden, heads)
    rope = read_rope(cfg, dim)
    attn = Attention(hidden=hidden, n_heads=heads, n_kv_heads=kv, head_dim=dim, rope=rope,
                     clip=cfg.number("clip_qkv", default=None))
    norm = Norm(dim=hidden, eps=cfg.number("layer_norm_eps", default=1e-5), kind="layer", weight=False)
    vocab = cfg.integer("embedding_size", hi=VOCAB, default=None) or cfg.integer("vocab_size", hi=VOCAB)
    tied = cfg.flag("weight_tying", default=True)
    layer = b.pre_norm(attn, MLP(hidden=hidden, ffn=width(cfg, hidden), activation="silu"), norm)
    model = b.decoder(cfg, "hf_olmo", (layer,) * n, norm=norm, context=read_context(cfg, rope))
    return replace(model, embed=Embedding(vocab=vocab, dim=hidden), head=Head(vocab=vocab, hidden=hidden, tied=tied),
                   tied_why=f"weight_tying is {str(tied).lower()}" if "weight_tying" in cfg.data else
                   "weight_tying is absent; this family's default is tied")


def width(cfg: Config, hidden: int) -> int:
    """Half of mlp_hidden_size, which counts gate and up together; null stands for mlp_ratio x d_model."""
    both = cfg.integer("mlp_hidden_size", default=None)
    if both is None:
        both = hidden * cfg.integer("mlp_ratio", default=4)
    if both % 2:
        raise cfg.refuse("config-range", f"mlp_hidden_size is {both:,}, which gate and up cannot share evenly")
    return int(both // 2)
