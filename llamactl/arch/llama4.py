"""Llama 4 Scout, Maverick: chunked attention where rotated, full on every fourth layer, experts beside a shared one."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch import _routing, _vision
from llamactl.arch._llama4 import chunk_size, growth, moe_layers, unit_norm
from llamactl.arch._names import ATTENTION, LLAMA_OUTER, PRE_NORMS, blocks, modules, under
from llamactl.arch.smollm3 import rotated_layers
from llamactl.spec.config import Config
from llamactl.spec.model import Layer, Model
from llamactl.spec.naming import Fused, Rule, Transposed, rule
from llamactl.spec.parts import MLP, MoE
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("llama4", "llama4_text")
GGUF = ("llama4",)
H, L = "model.layers.{i}.", "layers.{i}."
E = f"{L}mlp.experts.{{e}}."
DENSE = {f"mlp.{x}": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")}
SHARED = {f"mlp.shared.{x}": f"feed_forward.shared_expert.{x}_proj" for x in ("gate", "up", "down")}
TEXT = (
    *modules(LLAMA_OUTER),
    *blocks(ATTENTION, PRE_NORMS, DENSE, SHARED, {"mlp.router": "feed_forward.router"}),
    rule(f"{H}feed_forward.experts.gate_up_proj", f"{E}gate.weight", f"{E}up.weight", ops=(Fused(), Transposed()),
         stacked=True),
    rule(f"{H}feed_forward.experts.down_proj", f"{E}down.weight", ops=(Transposed(),), stacked=True),
)


def HF(model: Model) -> tuple[Rule, ...]:  # noqa: N802  a table that depends on whether a vision tower stands beside
    return TEXT if model.model_type == "llama4_text" else (*under("language_model.", TEXT), *_vision.LLAMA4_VISION)


def describe(cfg: Config) -> Model:
    text = cfg.section("text_config")
    cfg, vision = text or cfg, cfg.section("vision_config") if text else None
    hidden, n = b.shape(cfg)
    rope = read_rope(cfg, b.rope_dim(cfg, hidden, head_dim=128), theta=500000.0, pairs="adjacent")
    bias = cfg.flag("attention_bias", default=False)
    attn = b.attention(cfg, hidden, head_dim=128, kv_default="refuse", rope=rope, qkv_bias=bias, o_bias=bias)
    norm, chunk = b.rms(cfg, hidden, default=1e-5), chunk_size(cfg)
    unit, grows = unit_norm(cfg, attn.head_dim, norm.eps), growth(cfg)
    has_rope, sparse = rotated_layers(cfg, n), moe_layers(cfg, n)
    expert = b.mlp(cfg, hidden)
    ff: dict[bool, MLP | MoE] = {}
    if not all(sparse):
        ff[False] = b.mlp(cfg, hidden, key="intermediate_size_mlp")
    if any(sparse):
        ff[True] = b.moe(cfg, expert, "num_local_experts", shared=expert, routing=_routing.LLAMA4)
    words = cfg.layer_types(n, ("full_attention", "chunked_attention"))
    chunked = tuple(w == "chunked_attention" for w in words or ()) or tuple(r and chunk is not None for r in has_rope)
    kinds: dict[tuple[bool, bool, bool], Layer] = {}
    keys = tuple(zip(has_rope, chunked, sparse, strict=True))
    for turned, cut, moe in dict.fromkeys(keys):
        part = replace(attn, rope=rope if turned else None, window=chunk if cut else None, window_kind="chunked",
                       q_norm=unit if turned else None, k_norm=unit if turned else None, norm_after_rope=turned,
                       q_growth=None if turned else grows)
        kinds[turned, cut, moe] = b.pre_norm(part, ff[moe], norm)
    layers = [kinds[key] for key in keys]
    sections, left_out = _vision.beside(vision, hidden, _vision.llama4, _vision.llama4_projector) if text else ((), ())
    return b.decoder(cfg, "llama4", layers, norm=norm, sections=sections, not_counted=left_out,
                     context=read_context(cfg, rope))


def from_gguf(meta: Config) -> dict[str, object]:
    """feed_forward_length is the dense width; llama.cpp fixes chunks of 8,192, and a window of 0 turns them off."""
    chunk = None if meta.data.get("attention.sliding_window") == 0 else 8192
    return {"model_type": "llama4_text", "intermediate_size_mlp": meta.integer("feed_forward_length"),
            "intermediate_size": meta.integer("expert_feed_forward_length"), "attention_chunk_size": chunk}
