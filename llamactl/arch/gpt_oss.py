"""gpt-oss: attention sinks, biases everywhere, alternating windows, experts stored as one interleaved tensor."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch import _routing
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, PRE_NORMS, blocks, modules
from llamactl.spec.config import POSITIONS, Config
from llamactl.spec.model import Model
from llamactl.spec.naming import Fused, Transposed, rule
from llamactl.spec.rope import RopeScaling
from llamactl.spec.ropeconfig import read_context, read_rope, rope_block

MODEL_TYPES = ("gpt_oss",)
GGUF = ("gpt-oss",)
GGUF_NAMES = "post_attention"
H, L = "model.layers.{i}.", "layers.{i}."
E = f"{L}mlp.experts.{{e}}."
HF = (
    *modules(LLAMA_OUTER),
    *blocks(ATTENTION, PRE_NORMS, {"mlp.router": "mlp.router"}),
    rule(f"{H}self_attn.sinks", f"{L}attn.sinks"),
    rule(f"{H}mlp.experts.gate_up_proj", f"{E}gate.weight", f"{E}up.weight",
         ops=(Fused(order="interleaved"), Transposed()), stacked=True),
    rule(f"{H}mlp.experts.gate_up_proj_bias", f"{E}gate.bias", f"{E}up.bias", ops=(Fused(order="interleaved"),),
         stacked=True),
    rule(f"{H}mlp.experts.down_proj", f"{E}down.weight", ops=(Transposed(),), stacked=True),
    rule(f"{H}mlp.experts.down_proj_bias", f"{E}down.bias", stacked=True),
)


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden, head_dim=64), theta=150000.0)
    if rope_block(cfg) is None:  # the family's own default, which its files leave out only when they were cut down
        rope = replace(rope, scaling=RopeScaling(kind="yarn", factor=32.0, original=4096, beta_fast=32.0, beta_slow=1.0,
                                                 truncate=False))
    bias = cfg.flag("attention_bias", default=True)
    full = replace(b.attention(cfg, hidden, head_dim=64, kv_default="refuse", rope=rope, qkv_bias=bias, o_bias=bias),
                   sinks=True)
    expert = replace(b.mlp(cfg, hidden, activation="swigluoai", bias=True),
                     limit=cfg.number("swiglu_limit", default=7.0), alpha=cfg.number("swiglu_alpha", default=1.702))
    ff = b.moe(cfg, expert, "num_local_experts", "num_experts", router_bias=True, routing=_routing.CHOSEN)
    norm = b.rms(cfg, hidden, default=1e-5)
    of = {
        "full_attention": b.pre_norm(full, ff, norm),
        "sliding_attention": b.pre_norm(replace(full, window=b.window(cfg, 128)), ff, norm),
    }
    types = b.pattern(cfg, n, 2)
    return b.decoder(cfg, "gpt_oss", b.by_type(types, of), norm=norm, context=read_context(cfg, rope))


def from_gguf(meta: Config) -> dict[str, object]:
    """Experts are the only feed-forward; the window stands in every file."""
    return {"intermediate_size": meta.integer("expert_feed_forward_length"),
            "sliding_window": meta.integer("attention.sliding_window", hi=POSITIONS)}
