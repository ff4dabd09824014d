"""GLM-4.5, 4.6 and Air: biased GQA with half of each head rotating, DeepSeek-V3's experts, MTP (arXiv:2508.06471)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch import _routing
from llamactl.arch._moe import SHARED, experts, moe_layers, mtp
from llamactl.arch._names import EXPERTS, LLAMA, QK_NORM, blocks
from llamactl.spec.config import COUNT, Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.naming import rule
from llamactl.spec.ropeconfig import partial_factor, read_context, read_rope

MODEL_TYPES = ("glm4_moe",)
HF = (
    *LLAMA, *blocks(QK_NORM, EXPERTS, SHARED),
    rule("model.layers.{i}.mlp.gate.e_score_correction_bias", "layers.{i}.mlp.router.correction_bias"),
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden, factor=partial_factor(cfg, 0.5)))
    _, _, dim = b.heads(cfg, hidden, kv_default="refuse")
    qk = b.rms(cfg, dim, default=1e-5) if cfg.flag("use_qk_norm", default=False) else None
    attn = b.attention(cfg, hidden, rope=rope, qkv_bias=cfg.flag("attention_bias", default=False), qk_norm=qk)
    norm, sparse = b.rms(cfg, hidden, default=1e-5), moe_layers(cfg, n)
    of: dict[bool, Layer] = {}
    if any(sparse):
        cfg.integer("n_shared_experts", lo=0, hi=COUNT)
        of[True] = b.pre_norm(attn, experts(cfg, hidden, _routing.noaux(cfg)), norm)
    if not all(sparse):
        of[False] = b.pre_norm(attn, b.mlp(cfg, hidden), norm)
    return b.decoder(cfg, "glm4_moe", [of[moe] for moe in sparse], norm=norm, context=read_context(cfg, rope),
                     not_counted=mtp(cfg, of[True], hidden) if any(sparse) else ())
