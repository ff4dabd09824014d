"""Names in GGUF files, as llama.cpp's converter writes them; its architectures differ in few words.

Sources: docs/gguf.md of ggml, gguf-py's tensor tables, and what the converters change (modify_tensors): rows of q and k
in neighbouring pairs for the architectures that llama.cpp rotates so, 1 added to Gemma's norms, experts stacked.
"""

from __future__ import annotations

from llamactl.arch._names import blocks, modules, paired
from llamactl.spec.naming import Fused, Offset, Rule, rule

H, L = "blk.{i}.", "layers.{i}."
NORMS = {
    "attn_norm": "attn_norm", "attn_post_norm": "post_attention_norm", "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm", "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm",
}
MATRICES = {
    **{f"attn.{x}": f"attn_{x}" for x in "qkv"}, "attn.o": "attn_output",
    **{f"mlp.{x}": f"ffn_{x}" for x in ("gate", "up", "down")}, "mlp.router": "ffn_gate_inp",
}
PLAIN = (
    *modules({"embed": "token_embd", "pos_embed": "position_embd", "norm": "output_norm", "head": "output"}),
    *blocks(NORMS, MATRICES, prefix=H),
    *(rule(f"{H}ffn_{x}_exps.{p}", f"{L}mlp.experts.{{e}}.{x}.{p}", stacked=True)
      for x in ("gate", "up", "down") for p in ("weight", "bias")),
    rule(f"{H}attn_sinks.weight", f"{L}attn.sinks"),
)


def but(*changed: Rule) -> tuple[Rule, ...]:
    """PLAIN with other rules for the tensors that `changed` names."""
    taken = {template for r in changed for template in r.of}
    return (*(r for r in PLAIN if taken.isdisjoint(r.of)), *changed)


def _fused(stored: str, *parts: str) -> tuple[Rule, ...]:
    return tuple(rule(f"{H}{stored}.{p}", *(f"{L}{x}.{p}" for x in parts), ops=(Fused(),)) for p in ("weight", "bias"))


_QKV = _fused("attn_qkv", "attn.q", "attn.k", "attn.v")
PAIRED = but(*paired(f"{H}attn_q", f"{H}attn_k"))
QKV = but(*_QKV)
QKV_GATE_UP = but(*_QKV, *_fused("ffn_up", "mlp.gate", "mlp.up"))
NORM_PLUS_ONE = but(rule("output_norm.weight", "norm.weight", ops=(Offset(),)), *(
    rule(f"{H}{s}.weight", f"{L}{c}.weight", ops=(Offset(),)) for c, s in NORMS.items()))
POST_ATTENTION = but(*blocks({"mlp_norm": "post_attention_norm"}, prefix=H))

# The word that a family file gives as GGUF_NAMES -> its table.
TABLES = {"plain": PLAIN, "paired": PAIRED, "qkv": QKV, "qkv_gate_up": QKV_GATE_UP, "norm_plus_one": NORM_PLUS_ONE,
          "post_attention": POST_ATTENTION}

# rope_freqs and rope_factors_* are no weights either, but they change the rotation: see _ggufrope.
IGNORED = (
    ("rope_freqs.weight", "frequency factors of a stretched RoPE"),
    ("blk.{i}.rope_freqs.weight", "frequency factors of a stretched RoPE"),
    ("rope_factors_long.weight", "frequency factors of a stretched RoPE"),
    ("rope_factors_short.weight", "frequency factors of a stretched RoPE"),
    ("blk.{i}.attn_rot_embd.weight", "inverse frequencies of the RoPE, computed from its base"),
)
