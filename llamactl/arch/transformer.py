"""The 2017 Transformer's decoder block without cross-attention: post-norm LayerNorm, ReLU, MHA (arXiv:1706.03762).

Section 3 of the paper: attention projections have no biases, the feed-forward has both; the embedding is scaled by
sqrt(d) and shared with the output (section 3.4); positions are fixed sinusoids (3.5).
"""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, blocks, modules
from llamactl.spec.config import COUNT, Config
from llamactl.spec.model import Context, Layer, Model
from llamactl.spec.parts import Attention, Norm, SinusoidalPositions

MODEL_TYPES = ("transformer",)
HF = (*modules(LLAMA_OUTER), *blocks(ATTENTION, {"attn_post_norm": "post_attention_layernorm", "mlp.up": "mlp.up_proj",
                                                 "mlp_post_norm": "post_feedforward_layernorm",
                                                 "mlp.down": "mlp.down_proj"}))


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    heads = cfg.integer("num_attention_heads", hi=COUNT)
    attn = Attention(hidden=hidden, n_heads=heads, n_kv_heads=heads, head_dim=cfg.divided(hidden, heads))
    ff = b.mlp(cfg, hidden, activation=cfg.activation("hidden_act", default="relu"), gated=False, bias=True)
    norm = Norm(dim=hidden, eps=cfg.number("layer_norm_eps", default=1e-6), kind="layer", bias=True)
    layer = Layer(attn=attn, mlp=ff, attn_post_norm=norm, mlp_post_norm=norm, post_residual=True)
    return b.decoder(cfg, "transformer", (layer,) * n, norm=None, tied_default=True, embed_scale=hidden**0.5,
                     positions=SinusoidalPositions(dim=hidden),
                     context=Context(trained=None, usable=None, why="fixed sinusoids set no limit"))
