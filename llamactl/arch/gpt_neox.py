"""GPT-NeoX, Pythia, RedPajama: partial RoPE, LayerNorm, parallel residual, qkv fused by head (arXiv:2204.06745)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import modules
from llamactl.spec.config import COUNT, Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.naming import Fused, rule
from llamactl.spec.parts import Attention
from llamactl.spec.ropeconfig import partial_factor, read_context, read_rope

MODEL_TYPES = ("gpt_neox",)
GGUF = ("gptneox",)
GGUF_NAMES = "qkv"
HF_CLASS = "GPTNeoXForCausalLM"
HF_WORDS = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
H, L = "gpt_neox.layers.{i}.", "layers.{i}."
HF = (
    *modules({"embed": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out",
              f"{L}attn_norm": f"{H}input_layernorm", f"{L}mlp_norm": f"{H}post_attention_layernorm",
              f"{L}attn.o": f"{H}attention.dense", f"{L}mlp.up": f"{H}mlp.dense_h_to_4h",
              f"{L}mlp.down": f"{H}mlp.dense_4h_to_h"}),
    *(rule(f"{H}attention.query_key_value.{p}", *(f"{L}attn.{x}.{p}" for x in "qkv"),
           ops=(Fused(order="per_group"),), groups="heads") for p in ("weight", "bias")),
)
IGNORED = (
    (f"{H}attention.bias", "the causal mask as a buffer, computed from max_position_embeddings"),
    (f"{H}attention.masked_bias", "the value of a masked position, a constant"),
    (f"{H}attention.rotary_emb.inv_freq", "inverse frequencies of the RoPE, from its base"),
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    heads = cfg.integer("num_attention_heads", hi=COUNT)
    factor = partial_factor(cfg, 0.25, "rotary_pct", "partial_rotary_factor")
    rope = read_rope(cfg, b.rope_dim(cfg, hidden, factor=factor))
    bias = cfg.flag("attention_bias", default=True)
    attn = Attention(hidden=hidden, n_heads=heads, n_kv_heads=heads, head_dim=cfg.divided(hidden, heads), rope=rope,
                     qkv_bias=bias, o_bias=bias)
    ff = b.mlp(cfg, hidden, activation=cfg.activation("hidden_act", default="gelu"), gated=False, bias=True)
    norm = b.layer_norm(cfg, hidden, "layer_norm_eps")
    parallel = cfg.flag("use_parallel_residual", default=True)
    layer = Layer(attn=attn, mlp=ff, attn_norm=norm, mlp_norm=norm, parallel=parallel)
    return b.decoder(cfg, "gpt_neox", (layer,) * n, norm=norm, context=read_context(cfg, rope))
