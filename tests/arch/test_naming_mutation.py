"""Each field of each naming rule is changed once, and some check must go red.

Where a change leaves all names and shapes as they are (a square matrix, fused rows in another order, two stored names
exchanged), only content.py can see it. A change that nothing can see must stand in EQUIVALENT, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import lru_cache
from inspect import signature
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

from llamactl import arch
from llamactl.spec.model import Model
from llamactl.spec.naming import Fused, Offset, Op, RopePairs, Rule, Transposed, stored_tensors

HERE = Path(__file__).resolve().parent
VARIANTS = json.loads((HERE / "variants.json").read_text())
GOLDENS = sorted(p.name for p in (HERE.parent / "golden").iterdir() if (p / "config.json").exists())
ORDERS = {"concat", "per_group", "interleaved", "transposed"}
FIELDS = tuple(signature(Rule).parameters)

# (family, stored name): why switching `groups` changes nothing. Without a per_group cut nothing reads groups at all.
EQUIVALENT = {
    ("deepseek_v2", "model.layers.{i}.self_attn.kv_b_proj.weight"): "latent attention has one head count",
    ("deepseek_v3", "model.layers.{i}.self_attn.kv_b_proj.weight"): "latent attention has one head count",
    ("deepseek_v32", "model.layers.{i}.self_attn.kv_b_proj.weight"): "latent attention has one head count",
    ("glm_moe_dsa", "model.layers.{i}.self_attn.kv_b_proj.weight"): "latent attention has one head count",
    ("minicpm3", "model.layers.{i}.self_attn.kv_b_proj.weight"): "latent attention has one head count",
    ("bloom", "transformer.h.{i}.self_attention.query_key_value.weight"): "the family has as many KV heads as heads",
    ("bloom", "transformer.h.{i}.self_attention.query_key_value.bias"): "the family has as many KV heads as heads",
    ("kimi_k25", "language_model.model.layers.{i}.self_attn.kv_b_proj.weight"): "latent attention has one head count",
    ("gpt_neox", "gpt_neox.layers.{i}.attention.query_key_value.weight"): "the family has as many KV heads as heads",
    ("gpt_neox", "gpt_neox.layers.{i}.attention.query_key_value.bias"): "the family has as many KV heads as heads",
    ("qwen3_next", "model.layers.{i}.linear_attn.in_proj_qkvz.weight"): "a delta net is cut by its key heads alone",
    ("qwen3_next", "model.layers.{i}.linear_attn.in_proj_ba.weight"): "a delta net is cut by its key heads alone",
}
# Rules for weights that no config of the family has: tables are shared between families.
UNREACHABLE = {
    ("deepseek_v2", "layers.{i}.mlp.router.correction_bias"): "V3's table",
    ("kimi_k25", "layers.{i}.attn.q.weight"): "DeepSeek-V3's table, proved there",
    ("deepseek_v32", "layers.{i}.attn.q.weight"): "V2's table; the indexer needs a factored q",
    ("glm_moe_dsa", "layers.{i}.attn.q.weight"): "V2's table; the indexer needs a factored q",
    ("olmoe", "layers.{i}.mlp.gate.weight"): "Llama's table; every OLMoE layer is a mixture",
    ("olmoe", "layers.{i}.mlp.up.weight"): "Llama's table; every OLMoE layer is a mixture",
    ("olmoe", "layers.{i}.mlp.down.weight"): "Llama's table; every OLMoE layer is a mixture",
}


@lru_cache
def models(family: str) -> dict[str, Model]:
    """{golden or variant: Model} of one family."""
    out = {}
    for name in (*GOLDENS, *VARIANTS):
        golden, changes = VARIANTS.get(name, (name, {}))
        config = json.loads((HERE.parent / "golden" / golden / "config.json").read_text())
        if arch.families()[config["model_type"]] == family:
            out[name] = arch.describe({**config, **changes}, name)
    return out


FAMILIES = sorted({f for f in arch.families().values() if models(f)})


def shapes(model: Model) -> dict[Rule, tuple[int, ...]]:
    """The rules that `model` has tensors for, with the shape of the first tensor each makes."""
    out: dict[Rule, tuple[int, ...]] = {}
    for s in stored_tensors(model, arch.names(model)):
        out.setdefault(s.rule, s.shape)
    return out


def table(model: Model, *changed: tuple[Rule, Rule]) -> list[Rule]:
    """The naming table of `model` with some rules in the place of others."""
    new = dict(changed)
    return [new.get(r, r) for r in arch.names(model)]


def replace(rule: Rule, **changes: Any) -> Rule:
    return Rule(**{**{f: getattr(rule, f) for f in FIELDS}, **changes})


def mutations(rule: Rule, others: Sequence[str]) -> Iterator[tuple[str, Rule]]:
    """(what was changed, the changed rule), each field once. others: canonical templates of other rules."""
    for n, template in enumerate(rule.of):
        rest = rule.of[:n] + rule.of[n + 1:]
        yield f"of: {template} dropped", replace(rule, of=rest)
        for other in (*rest, *others[:2]):
            yield f"of: {template} -> {other}", replace(rule, of=(*rule.of[:n], other, *rule.of[n + 1:]))
        if n:
            yield f"of: {template} moved to the front", replace(rule, of=(template, *rest))
    yield "stored renamed", replace(rule, stored=f"{rule.stored}_")
    for n, op in enumerate(rule.ops):
        yield f"ops: {op} removed", replace(rule, ops=rule.ops[:n] + rule.ops[n + 1:])
        for order in sorted(ORDERS):
            if isinstance(op, Fused) and order != op.order:
                changed = (*rule.ops[:n], Fused(order=order), *rule.ops[n + 1:])
                yield f"ops: {op.order} -> {order}", replace(rule, ops=changed)
    yield "ops: Transposed added", replace(rule, ops=(*rule.ops, Transposed()))
    yield "stacked flipped", replace(rule, stacked=not rule.stacked)
    yield "groups switched", replace(rule, groups="heads" if rule.groups == "kv_heads" else "kv_heads")


def cuts_by_group(rule: Rule) -> bool:
    return any(isinstance(op, Fused) and op.order == "per_group" for op in rule.ops)


def test_everything_that_can_be_changed_is_changed() -> None:
    """A new field, order or operation needs a mutation above; tables of other layouts are mutated in tests/net."""
    assert set(FIELDS) == {"of", "stored", "ops", "stacked", "groups"}
    assert {op: [f.name for f in fields(op)] for op in get_args(Op)} == {
        Fused: ["order"], Transposed: [], RopePairs: ["pairs"], Offset: ["by"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_change_of_a_field_goes_unseen(content: ModuleType, family: str) -> None:
    used = {name: shapes(model) for name, model in models(family).items()}
    survivors, expected = set(), {stored for f, stored in EQUIVALENT if f == family}
    for rule in dict.fromkeys(r for rules in used.values() for r in rules):
        where = [name for name, rules in used.items() if rule in rules]
        others = [t for r in used[where[0]] for t in r.of if t not in rule.of]
        for what, changed in mutations(rule, others):
            assert changed != rule
            tables = ((name, table(models(family)[name], (rule, changed))) for name in where)
            if not any(content.verdict(content.built(name), rules) for name, rules in tables):
                survivors.add((rule.stored, what))
        if not cuts_by_group(rule):
            assert (rule.stored, "groups switched") in survivors, "groups is read by more than per_group"
            expected.add(rule.stored)
    assert survivors == {(stored, "groups switched") for stored in expected}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_exchange_of_two_stored_names_goes_unseen(content: ModuleType, family: str) -> None:
    """Two tensors of one shape under each other's names: every inventory still agrees, so content must tell."""
    done, unseen, by_content = set(), [], 0
    for name, model in models(family).items():
        for (a, shape), (b, second) in combinations(shapes(model).items(), 2):
            if shape != second or (a, b) in done or a.stored == b.stored:  # one name, in blocks of two kinds
                continue
            done.add((a, b))
            exchanged = table(model, (a, replace(a, stored=b.stored)), (b, replace(b, stored=a.stored)))
            red = content.verdict(content.built(name), exchanged)
            if red is None:
                unseen.append((a.stored, b.stored))
            by_content += bool(red and red.startswith("content"))
    assert unseen == []
    assert by_content >= 2, "the two norms, k and v, ...: names and shapes cannot tell these apart"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rule_is_exercised(family: str) -> None:
    """A rule that no golden or variant uses is proved by nothing. Biases that a family never has are left out."""
    tables = {r for m in models(family).values() for r in arch.names(m)}
    assert {op.order for r in tables for op in r.ops if isinstance(op, Fused)} <= ORDERS
    used = {r for m in models(family).values() for r in shapes(m)}
    idle = {(family, r.of[0]) for r in tables - used if not r.of[0].endswith(".bias")}
    assert idle == {key for key in UNREACHABLE if key[0] == family}
