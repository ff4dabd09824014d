"""Every field of every naming rule, changed once: the comparison with an independent writer must turn red each time.

Names, shapes and round trips cannot see two equal matrices exchanged or a square one left as it is; this file holds
that the references of this folder can. A change that nobody can see stands in `unseen`, with its reason.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llamactl import arch
from llamactl.arch._ggufnames import TABLES
from llamactl.spec.model import Model
from llamactl.spec.naming import Fused, Offset, Op, RopePairs, Rule, Transposed, stored_tensors
from llamactl.spec.parts import Attention

ORDERS = ("concat", "per_group", "interleaved", "transposed")
# (model, layout of the changed table); a table of Hugging Face names is read, the others are written
UNDER_TEST = (
    ("one", "meta"), ("one", "lesson"), ("one", "gguf"), ("one", "hf"), ("one-square", "meta"),
    ("one-square", "lesson"), ("one-square", "gguf"), ("one-square", "hf"), ("one-gpt2", "nanogpt"),
    ("one-gpt2", "lesson"), ("one-gpt2", "gguf"), ("one-gpt2-untied", "lesson"), ("one-gpt2-untied", "hf"),
    ("one-gemma", "gguf"), ("one-qwen2", "gguf"), ("one-mixtral", "gguf"), ("one-qwen3_moe", "gguf"))


class Change(NamedTuple):
    """What is done to a table. rules: by their place in it. unseen: why nobody can see it, None if it must be seen."""

    what: str
    rules: Mapping[int, Rule]
    unseen: str | None = None


def changes(rules: tuple[Rule, ...], model: Model, layout: str) -> Iterator[Change]:
    """Each field of each rule that a tensor of the model goes by, and each two rules whose tensors have one shape."""
    stored = {s.rule: s.shape for s in stored_tensors(model, rules)}
    attn = model.layers[0].attn
    assert isinstance(attn, Attention)
    alike = attn.n_heads == attn.n_kv_heads
    for n, r in enumerate(rules):
        if r in stored:
            for what, new, unseen in fields(r, len(stored[r]), alike):
                yield Change(f"{r.stored}: {what}", {n: new}, unseen)
        elif r.of == ("head.weight",) and layout in ("nanogpt", "lesson"):  # a tied head is written under its name too
            yield Change(f"{r.stored}: renamed", {n: r._replace(stored="other.weight")})
    for (n, a), (m, b) in combinations(enumerate(rules), 2):
        if a in stored and b in stored and stored[a] == stored[b]:
            yield Change(f"{a.stored}: exchanged with {b.stored}",
                         {n: a._replace(stored=b.stored), m: b._replace(stored=a.stored)})


def fields(r: Rule, axes: int, alike: bool) -> Iterator[tuple[str, Rule, str | None]]:
    """(what, the changed rule, why it is not to be seen). alike: as many KV heads as query heads."""
    yield "renamed", r._replace(stored=r.stored.replace(".weight", ".wight").replace(".bias", ".bais")
                                .replace(".gamma", ".gama")), None
    for k, op in enumerate(r.ops):
        yield f"without {type(op).__name__}", r._replace(ops=(*r.ops[:k], *r.ops[k + 1 :])), None
        for new in others(op):
            yield f"{op} as {new}", r._replace(ops=(*r.ops[:k], new, *r.ops[k + 1 :])), None
    if len(r.ops) > 1:
        yield "operations in the other order", r._replace(ops=r.ops[::-1]), None
    if axes > 1:
        yield "transposed once more", r._replace(ops=(*r.ops, Transposed())), None
    yield "shifted", r._replace(ops=(*r.ops, Offset(by=0.5))), None
    for k in range(len(r.of) - 1):
        yield f"{r.of[k]} after {r.of[k + 1]}", r._replace(of=(*r.of[:k], r.of[k + 1], r.of[k], *r.of[k + 2 :])), None
    grouped = any(isinstance(op, RopePairs) or op == Fused(order="per_group") for op in r.ops)
    unseen = "nothing but RopePairs and Fused per_group asks for the groups" if not grouped else (
        "both words mean the same number" if alike else None)
    yield "other groups", r._replace(groups="kv_heads" if r.groups == "heads" else "heads"), unseen
    yield "stacked" if not r.stacked else "not stacked", r._replace(stacked=not r.stacked), None


def others(op: Op) -> Iterator[Op]:
    if isinstance(op, RopePairs):
        yield RopePairs(pairs="half" if op.pairs == "adjacent" else "adjacent")
    elif isinstance(op, Fused):
        yield from (Fused(order=order) for order in ORDERS if order != op.order)
    elif isinstance(op, Offset):
        yield from (Offset(by=by) for by in (-op.by, 2 * op.by, 0.0))


@contextmanager
def table(model: Model, layout: str, rules: tuple[Rule, ...]) -> Iterator[None]:
    """The family with another table in one layout."""
    with pytest.MonkeyPatch.context() as m:
        module = arch.family(model.family)
        if layout == "gguf":
            m.setitem(TABLES, module.GGUF_NAMES, rules)
        else:
            m.setattr(module, layout.upper(), rules)
        yield


class Bench:
    """One model, converted from Hugging Face names under this table or that."""

    def __init__(self, references: Any, reference: Any, convert: Any, folder: Path, layout: str) -> None:
        self.references, self.convert, self.folder, self.layout = references, convert, folder, layout
        self.to = layout if layout != "hf" else next(x for x in ("meta", "lesson") if x in reference.case.layouts)
        self.model = arch.describe(reference.config, "config.json")
        self.rules = arch.names(self.model, layout)
        self.at, self.want = reference.put(folder / "source", "hf"), reference.wanted(self.to)

    def seen(self, changed: Mapping[int, Rule] | None = None) -> str | None:
        """How a changed table is found out: it is refused, or by the first difference; None if it is not."""
        out = self.folder / "out"
        rules = tuple((changed or {}).get(n, r) for n, r in enumerate(self.rules))
        with table(self.model, self.layout, rules):
            got = self.convert(self.at, out, "--to", self.to, "--no-proof", "--no-digest", "--no-tokenizer")
        if got.code:
            return "refused"
        near = {"rope_freqs.weight": 1e-6}
        found = self.references.differences(self.references.held(out, self.to), self.want, near=near)
        shutil.rmtree(out)
        return found[0] if found else None


@pytest.fixture
def bench(references: Any, reference: Callable[[str], Any], convert: Any, tmp_path: Path
          ) -> Callable[[str, str], Bench]:
    return lambda name, layout: Bench(references, reference(name), convert, tmp_path, layout)


@pytest.mark.parametrize(("name", "layout"), UNDER_TEST)
def test_each_change_of_a_rule_is_seen(bench: Callable[[str, str], Bench], name: str, layout: str) -> None:
    b = bench(name, layout)
    assert b.seen() is None
    tried = list(changes(b.rules, b.model, layout))
    found = {c.what: b.seen(c.rules) for c in tried}
    assert [c.what for c in tried if c.unseen is None and found[c.what] is None] == []
    assert [c.what for c in tried if c.unseen is not None and found[c.what] is not None] == []
    assert b.seen() is None
    by_values = [what for what, how in found.items() if how and how.endswith(" off")]
    assert len(tried) > 40
    assert len(by_values) > 8, found


@pytest.mark.parametrize("what", [
    "layers.{i}.attention.wo.weight: transposed once more",
    "layers.{i}.attention.wv.weight: exchanged with layers.{i}.attention.wo.weight",
    "layers.{i}.feed_forward.w1.weight: exchanged with layers.{i}.feed_forward.w3.weight",
    "layers.{i}.attention_norm.weight: exchanged with layers.{i}.ffn_norm.weight",
    "layers.{i}.attention.wq.weight: without RopePairs", "norm.weight: shifted"])
def test_what_names_and_shapes_cannot_see(bench: Callable[[str, str], Bench], what: str) -> None:
    """Of square matrices, every confusion is one of values alone."""
    b = bench("one-square", "meta")
    (change,) = (c for c in changes(b.rules, b.model, "meta") if c.what == what)
    assert str(b.seen(change.rules)).endswith(" off")


# What no tensor of these models goes by: the tables are shared, and name every module's weight and bias.
_NO_BIAS = {f"{x}.bias" for x in ("embed", "head", "norm", "layers.{i}.attn_norm", "layers.{i}.mlp_norm")}
_L = "layers.{i}."
_POST = {f"{_L}{x}.{p}" for x in ("attn_post_norm", "mlp_post_norm") for p in ("weight", "bias")}
_EXPERTS = {f"{_L}mlp.experts.{{e}}.{x}.bias" for x in ("gate", "up", "down")} | {f"{_L}mlp.router.bias"}
_NEVER = {
    ("llama", "META"): _NO_BIAS, ("llama", "LESSON"): {"embed.bias", "head.bias"}, ("llama", "HF"): _NO_BIAS,
    ("gpt2", "NANOGPT"): {"embed.bias", "pos_embed.bias", "head.bias", "head.weight"},
    ("gpt2", "LESSON"): {"embed.bias", "pos_embed.bias", "head.bias"},
    ("gpt2", "HF"): {"embed.bias", "pos_embed.bias", "head.bias"}}


@pytest.mark.parametrize(("family", "word"), _NEVER)
def test_every_rule_is_changed(reference: Callable[[str], Any], family: str, word: str) -> None:
    """All of META, NANOGPT, LESSON and HF; what is left over is listed."""
    held = set()
    for name, layout in UNDER_TEST:
        model = arch.describe(reference(name).config, name)
        if (model.family, layout.upper()) == (family, word):
            held |= {t.template for t in model.tensors()}
    rules = getattr(arch.family(family), word)
    assert {t for r in rules for t in r.of} - held == _NEVER[family, word]


def test_every_rule_of_gguf_is_changed_in_some_table(reference: Callable[[str], Any]) -> None:
    """What is left is of Gemma 2's and OLMo 2's norms after a branch, and of gpt-oss: its biases and sinks."""
    changed: set[Rule] = set()
    for name, layout in UNDER_TEST:
        if layout == "gguf":
            model = arch.describe(reference(name).config, name)
            held = {t.template for t in model.tensors()}
            changed |= {r for r in arch.names(model, "gguf") if not held.isdisjoint(r.of)}
    used = {"plain", "paired", "qkv", "norm_plus_one"}
    left = {t for word in used for r in TABLES[word] if r not in changed for t in r.of}
    assert left == {*_POST, *_EXPERTS, f"{_L}attn.sinks", "embed.bias", "pos_embed.bias", "head.bias"} | {
        f"{_L}attn.{x}_norm.{p}" for x in "qk" for p in ("weight", "bias")}


def test_the_changes_themselves() -> None:
    """Every kind of change is made, each to a rule that is no longer the old one."""
    model = arch.describe({"model_type": "gpt2", "vocab_size": 9, "n_positions": 8, "n_embd": 8, "n_layer": 1,
                           "n_head": 2}, "c")
    rules = arch.names(model)
    made = list(changes(rules, model, "hf"))
    assert all(new != rules[n] for c in made for n, new in c.rules.items())
    assert len({c.what for c in made}) == len(made)
