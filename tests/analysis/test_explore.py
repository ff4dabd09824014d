"""What a page is made from: tables that give back, for every state, what costing that model gives."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamactl.analysis import explore as module
from llamactl.analysis import outline as module_outline
from llamactl.analysis.explore import ExploreReport, Table, explore
from llamactl.analysis.kvcache import coefficients, kv_cache
from llamactl.analysis.outline import outline
from llamactl.analysis.params import params
from llamactl.analysis.rope import rope
from llamactl.analysis.rotations import turnings
from llamactl.api import load
from llamactl.source import presets
from llamactl.spec.features import features
from llamactl.spec.model import NotCounted
from llamactl.spec.parts import MoE
from llamactl.spec.switches import between, share_of, shares

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def report(a: str, b: str | None = None) -> ExploreReport:
    return explore(load(a).model, load(b).model if b else None, start=a, goal=b)


def look(table: Table, on: set[str], share: int | None) -> Any:
    """What the page does to find a value."""
    return table.values[",".join(str(share or "") if k == "share" else str(int(k in on)) for k in table.by)]


@pytest.mark.parametrize(("a", "b"), [("gpt2", "llama-3-8b"), ("gpt2", "deepseek-v3"), ("llama-3-8b", "mixtral-8x7b"),
                                      ("gemma-2-9b", "gpt2")])
def test_tables_give_back_what_costing_gives(a: str, b: str) -> None:
    found, choices, chance = report(a, b), between(load(a).model, load(b).model), random.Random(3)
    (world, *_), keys = found.worlds, [s.key for s in choices.switches]
    for _ in range(40):
        on = {k for k in keys if chance.random() < 0.5}
        options = choices.shares(on)
        assert tuple(look(world.shares, on, None)) == options
        share = chance.choice(options or (None,))
        model = choices.model(on, share)
        p = params(model)
        assert look(world.counts["total"], on, share) == p.total
        assert look(world.counts["blocks_total"], on, share) == p.blocks_total
        assert look(world.counts["feed_forward.total"], on, share) == p.components.feed_forward["total"]
        assert look(world.counts["attention.k"], on, share) == p.components.attention["k"]
        assert look(world.counts["lm_head"], on, share) == p.components.lm_head
        assert look(world.counts["active"], on, share) == (p.active.all if p.active else None)
        assert {n: look(t, on, share) for n, t in world.words.items()} == dict(features(model))
        assert look(world.cache, on, share) == coefficients(model)
        parts = {k: v for k, t in world.parts.items() if (v := look(t, on, share))}
        assert parts == outline(model).parts
        edits = [e for t in world.edits for e in look(t, on, share)]
        assert edits == [e for _, es in choices.edits(on, share) for e in es]


def test_a_goal_that_edits_do_not_reach_is_a_world_of_its_own() -> None:
    found = report("gpt2", "gemma-2-9b")
    goal = found.worlds[1]
    assert goal.switches == ()
    assert [n for n, _, _ in found.rest] == ["norm", "attention", "head", "factors"]
    for share in shares(load("gemma-2-9b").model):
        made = load("gemma-2-9b", edits=[f"n_kv_heads={16 // share}"]).model
        assert look(goal.counts["total"], set(), share) == made.total()
    assert [e for t in goal.edits for e in look(t, set(), 16)] == ["n_kv_heads=1"]
    assert [e for t in goal.edits for e in look(t, set(), 2)] == []


def test_an_end_without_a_sharing_has_the_others() -> None:
    llama, latent = load("llama-3-8b").model, load("deepseek-v3").model
    assert module._aims((1, 2, 4, 8), (latent, llama)) == (4, 4)
    assert module._aims((1, 2), (latent, latent)) == (1, 1)
    assert module._aims((), (latent, llama)) == (None, None)
    found = report("gpt2", "llama-3-70b").worlds[0]
    assert [look(found.aims, on, None) for on in (set(), {"size"})] == [(1, 6), (1, 8)]


def test_a_table_holds_no_control_that_tells_nothing_apart() -> None:
    counts = report("gpt2", "llama-3-8b").worlds[0].counts
    assert counts["norms"].by == ("norm", "size")
    assert counts["attention.q"].by == ("biases", "size")
    assert counts["token_embedding"].by == ("vocab", "size")
    assert counts["state_space"].by == ()
    assert set(counts["norms"].values) == {"0,0", "0,1", "1,0", "1,1"}


def test_one_model_alone_has_its_kv_heads() -> None:
    found = report("llama-3-8b")
    assert (found.goal, found.switches, found.rest, found.states) == (None, (), (), 6)
    (world,) = found.worlds
    assert look(world.counts["attention.k"], set(), 32) == 32 * 128 * 4096


def test_coefficients_are_what_kv_cache_multiplies() -> None:
    for name in ("llama-3-8b", "gemma-2-9b", "deepseek-v3", "gpt-oss-20b", "phi-2", "mistral-7b-v0.1"):
        model = load(name).model
        for ctx, batch, dtype in ((1, 1, "bf16"), (5000, 3, "q4_0"), (100_000, 2, "fp8")):
            (at,) = kv_cache(model, ctx, batch=batch, dtype=dtype).at
            seen = [(min(ctx, c.window) if c.window else ctx) * batch for c in coefficients(model)]
            assert tuple(n * c.bytes[dtype] for n, c in zip(seen, coefficients(model), strict=True)) == at.group_bytes
            assert sum(n * c.full_bytes[dtype] for n, c in zip(seen, coefficients(model), strict=True)
                       ) == at.full_heads_bytes


def test_rows_that_do_not_fill_blocks_are_named() -> None:
    (group,) = coefficients(load("phi-2").model)  # heads of 80
    assert set(group.padded) == {"q8_0", "q5_1", "q5_0", "q4_1", "q4_0"}
    assert all(g.padded == () for g in coefficients(load("llama-3-8b").model))


def test_an_outline_leaves_nothing_out() -> None:
    for name in presets.names():
        model = load(f"preset:{name}").model
        found = outline(model)
        assert sum(p.params for p in found.parts.values()) == model.total(), name
        for part in found.parts.values():
            assert all(line.count("=") <= 1 for line in part.lines)


def test_the_lines_of_a_part_are_products() -> None:
    parts = outline(load("llama-3-8b").model).parts
    assert parts["attn"].lines == (
        "q, 32 query heads: 32 x 128 x 4,096 = 16,777,216", "k, 8 KV heads: 8 x 128 x 4,096 = 4,194,304",
        "v, 8 KV heads: 8 x 128 x 4,096 = 4,194,304", "o, 32 query heads: 32 x 128 x 4,096 = 16,777,216",
        "kept, K and V: 2 x 8 x 128 = 2,048 elements a token and layer",
        "kept in all layers: 32 x 2,048 = 65,536 elements a token")
    assert outline(load("deepseek-v3").model).parts["attn"].lines[-1] == (
        "kept in all layers: 61 x 576 = 35,136 elements a token")
    for name in presets.names():
        for part in outline(load(f"preset:{name}").model).parts.values():
            for line in part.lines:
                left, equals, right = line.partition(" = ")
                if equals:
                    product = 1
                    for factor in left.rpartition(": ")[2].split(" x "):
                        product *= int(factor.replace(",", "").split()[0])
                    assert product == int(right.split()[0].replace(",", "")), (name, line)


def counted(line: str) -> int:
    """The parameters that a line adds to its part's."""
    words = line.rpartition(" = ")[2] if " = " in line else line.rpartition(": ")[2]
    here = not line.startswith(("one expert", "kept", "expanded", "run for a token"))
    return int(words.replace(",", "")) if here else 0


def test_the_lines_of_a_part_add_up_to_a_block() -> None:
    seen = set()
    for name in presets.names():
        for key, part in outline(load(f"preset:{name}").model).parts.items():
            whole = part.each if part.blocks else part.params
            if part.lines and whole is not None:
                assert sum(map(counted, part.lines)) == whole, (name, key)
                seen.add(part.kind)
    assert {"mha", "gqa", "mqa", "mla", "moe", "gated", "plain", "embedding", "untied"} <= seen


def test_what_runs_for_a_token_is_all_that_runs() -> None:
    """Against `params`: a token's share of the parameters is all but the experts that were not chosen."""
    for name, runs in (("deepseek-v3", "8 of 256 experts and what stands beside them, 398,196,736"),
                       ("mixtral-8x7b", "2 of 8 experts and what stands beside them, 352,354,304"),
                       ("gpt-oss-20b", "4 of 32 experts and what stands beside them, 99,659,552")):
        model = load(name).model
        said = next(x for x in outline(model).parts["mlp"].lines if x.startswith("run for a token: "))
        assert said == f"run for a token: {runs}"
        moe = next(x.mlp for x in model.layers if isinstance(x.mlp, MoE))
        blocks = sum(isinstance(x.mlp, MoE) for x in model.layers)
        asleep = (moe.n_experts - moe.top_k) * sum(x.elements for x in moe.expert.leaves()) * blocks
        active, block = params(model).active, sum(x.elements for x in moe.leaves() if x.kind == "param")
        assert active is not None
        assert params(model).total - active.all == asleep
        assert int(runs.partition("them, ")[2].replace(",", "")) == block - asleep // blocks


def test_a_hybrids_parts_are_all_drawn() -> None:
    """Blocks of one branch each: the drawing shows every kind, and how many blocks have it."""
    found = outline(load(str(GOLDEN / "nemotron_h")).model)
    blocks = {k: p.blocks for k, p in found.parts.items() if p.blocks}
    assert set(blocks) == {"attn_norm", "state", "attn", "mlp_norm", "mlp"}
    assert blocks["attn_norm"] == blocks["state"] + blocks["attn"] == found.layers - blocks["mlp"]
    assert found.parts["state"].words == f"Mamba2 on {blocks['state']} of {found.layers} layers"
    assert found.parts["attn"].words.startswith("GQA, ")
    assert "Mamba" not in found.parts["attn"].words
    assert "other" not in found.parts


def test_every_rotation_is_told() -> None:
    assert outline(load("gemma-3-27b").model).parts["rotation"].words == (
        "RoPE, base 10,000 on 52 of 62 layers; RoPE, base 1,000,000, linear x8 on 10 of 62 layers; 64 pairs")
    scout = outline(load("llama-4-scout").model).parts["rotation"]
    assert (scout.blocks, scout.words) == (36, "RoPE, base 500,000, llama3 x16 on 36 of 48 layers; 64 pairs")


def test_each_rotation_has_its_pairs() -> None:
    gemma = load(str(GOLDEN / "gemma4_text")).model
    ropes = [x.attn.rope for x, _ in gemma.distinct_layers() if x.attn is not None and x.attn.rope is not None]
    pairs = dict.fromkeys(str(rope.dim // 2) for rope in ropes)
    assert len(pairs) == 2
    assert outline(gemma).parts["rotation"].words.endswith(f"; {' and '.join(pairs)} pairs")


def test_parts_of_every_family_add_up() -> None:
    """Of each golden model: the lines of a part to its block, and what runs for a token to all but the sleeping."""
    mixtures = 0
    for path in sorted(GOLDEN.iterdir()):
        model = load(str(path)).model
        found = outline(model)
        assert sum(p.params for p in found.parts.values()) == model.total(), path.name
        for key, part in found.parts.items():
            whole = part.each if part.blocks else part.params
            if part.lines and whole is not None:
                assert sum(map(counted, part.lines)) == whole, (path.name, key)
        if found.parts.get("mlp") and found.parts["mlp"].kind == "moe" and found.parts["mlp"].each:
            moe, each = next(x.mlp for x in model.layers if isinstance(x.mlp, MoE)), found.parts["mlp"].each
            asleep = (moe.n_experts - moe.top_k) * sum(x.elements for x in moe.expert.leaves())
            assert found.parts["mlp"].lines[-1].endswith(f", {each - asleep:,}"), path.name
            mixtures += 1
    assert mixtures >= 10


def test_a_norm_whose_weights_are_added_to_one_says_so() -> None:
    assert outline(load("gemma-2-9b").model).parts["attn_norm"].kind == "rmsnorm-offset"
    assert outline(load("llama-3-8b").model).parts["attn_norm"].kind == "rmsnorm"
    assert outline(load("gpt2").model).parts["attn_norm"].kind == "layernorm"


def test_a_product_that_is_none_is_not_said() -> None:
    assert module_outline._product("x", (2, 3), 6) == [("x: 2 x 3 = 6", 6)]
    assert module_outline._product("x", (2, 3), 6, " kept") == [("x: 2 x 3 = 6 kept", 0)]
    assert module_outline._product("x", (2, 3), 7) == []


def test_the_most_common_block_is_drawn() -> None:
    deepseek = outline(load("deepseek-v3").model)
    assert (deepseek.uniform, deepseek.parts["mlp"].kind, deepseek.parts["mlp"].each) == (False, "moe", None)
    assert outline(load("transformer-base").model).after_sum
    assert outline(load("falcon-7b").model).parallel


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-4b", "phi-3-mini-128k", "deepseek-v3", "llama-4-scout"])
def test_rotations_are_those_of_rope(name: str) -> None:
    model = load(name).model
    found = turnings(model)
    assert len(found) == len(rope(model).rotations)
    for n, turning in enumerate(found):
        for way in turning.ways:
            said = rope(model, target=way.target, method=way.method or None).rotations[n]
            assert way.frequencies == tuple(p.stretched_frequency for p in said.pairs)
            assert way.unseen.count("1") == said.unseen
            assert way.kinds.count("s") == said.slowed
        assert turning.ways[0].target is None


def test_what_turns_nothing_has_no_rotation() -> None:
    assert turnings(load("gpt2").model) == ()


def test_proofs_are_spread_over_the_states() -> None:
    found = report("gpt2", "llama-3-8b")
    assert 0.9 * module.PROOFS < len(found.proofs) <= module.PROOFS
    assert {p.dtype for p in found.proofs} == set(found.cache_dtypes)
    assert len({p.total for p in found.proofs}) > 40
    assert {k for p in found.proofs for k in p.on} == {s.key for s in found.switches}


@pytest.mark.slow
def test_no_state_between_any_families_is_refused() -> None:
    """Every subset of the switches is a model: for pairs of one preset a family, drawn at random."""
    first = {load(f"preset:{n}").model.family: load(f"preset:{n}").model for n in reversed(list(presets.names()))}
    pairs = [(a, b) for a in first.values() for b in first.values() if a != b]
    random.Random(5).shuffle(pairs)
    for a, b in pairs[:25]:
        choices = between(a, b)
        states = module._costed(choices, [s.key for s in choices.switches])
        assert len(states) >= 2 ** len(choices.switches)
        assert choices.reached() in (True, False)


@pytest.mark.slow
def test_a_page_can_be_made_of_every_family() -> None:
    """From GPT-2 to one of each family: the goal on the page is what is published."""
    start = load("gpt2").model
    for goal in {(m := load(f"preset:{n}").model).family: m for n in presets.names()}.values():
        name = goal.family
        found = explore(start, goal, start="gpt2", goal=name)
        world = found.worlds[-1]
        on = {s.key for s in found.switches} if len(found.worlds) == 1 else set()
        assert look(world.counts["total"], on, share_of(goal)) == goal.total(), name
        assert look(world.cache, on, share_of(goal)) == coefficients(goal), name


@pytest.mark.parametrize(("name", "why"), [
    ("gpt2", "added at the input"), ("transformer-base", "added at the input"), ("llama-3-8b", None),
])
def test_what_turns_nothing_says_why(name: str, why: str | None) -> None:
    end = report(name).start
    assert (why is None) == (end.silent is None) == bool(end.rotations)
    assert why is None or why in str(end.silent)


def test_alibi_is_told_as_such() -> None:
    end = explore(load("gpt2", edits=["positions=alibi"]).model, None, start="x").start
    assert end.silent == "turns nothing: each score gets a penalty that grows with the distance (ALiBi)"


def test_rotations_that_a_file_hides_are_told_and_the_rest_is_there() -> None:
    model = load("llama-3-8b").model
    hidden = replace(model, not_counted=(*model.not_counted, NotCounted(what="RoPE factors", params=None, why="x")))
    end = explore(hidden, None, start="x").start
    assert end.rotations == ()
    assert "not read" in str(end.silent)
