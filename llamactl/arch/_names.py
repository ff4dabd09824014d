"""Name tables that several families share, as data: canonical path -> stored path."""

from __future__ import annotations

import re
from collections.abc import Mapping

from llamactl.spec.naming import RopePairs, Rule, rule

# canonical -> HF, for modules with a .weight and possibly a .bias
LLAMA_OUTER = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
ATTENTION = {
    "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
}
QK_NORM = {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}
PRE_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
MLP = {"mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}
EXPERTS = {
    "mlp.router": "mlp.gate",
    "mlp.experts.{e}.gate": "mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up": "mlp.experts.{e}.up_proj",
    "mlp.experts.{e}.down": "mlp.experts.{e}.down_proj",
}


def modules(table: Mapping[str, str]) -> tuple[Rule, ...]:
    """Two rules for each module, for its weight and its bias; names that a model lacks are never asked for."""
    return tuple(rule(f"{s}.{p}", f"{c}.{p}") for c, s in table.items() for p in ("weight", "bias"))


def blocks(*tables: Mapping[str, str], prefix: str = "model.layers.{i}.") -> tuple[Rule, ...]:
    """The modules of every block under `prefix`."""
    return modules({f"layers.{{i}}.{c}": prefix + s for t in tables for c, s in t.items()})


def paired(q: str, k: str) -> tuple[Rule, ...]:
    """q and k of every block, stored as `q` and `k` with rows that rotate in neighbouring pairs; biases too."""
    return tuple(rule(f"{s}.{p}", f"layers.{{i}}.attn.{x}.{p}", ops=(RopePairs(),), groups=groups)
                 for x, s, groups in (("q", q, "heads"), ("k", k, "kv_heads")) for p in ("weight", "bias"))


def under(prefix: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The same table with every stored name below `prefix` (a language model inside another)."""
    return tuple(Rule(of=r.of, stored=prefix + r.stored, ops=r.ops, stacked=r.stacked, groups=r.groups) for r in rules)


def nested(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The same table with `model.language_model.` for `model.`; the head stays where it is."""
    return tuple(Rule(of=r.of, stored=re.sub(r"^model\.", "model.language_model.", r.stored), ops=r.ops,
                      stacked=r.stacked, groups=r.groups) for r in rules)


LLAMA = (*modules(LLAMA_OUTER), *blocks(ATTENTION, PRE_NORMS, MLP))
