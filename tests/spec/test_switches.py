"""Switches: every subset of the edits between two models is a model, and all of them together are the goal."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from llamactl.api import load
from llamactl.errors import UsageError
from llamactl.source import presets
from llamactl.spec.edits import apply
from llamactl.spec.features import diff, features
from llamactl.spec.model import Layer, Model
from llamactl.spec.path import path as path_of
from llamactl.spec.switches import Choices, between, nearest, share_of, shares, with_share


def model(name: str) -> Model:
    return load(f"preset:{name}").model


def keys(choices: Choices) -> list[str]:
    return [s.key for s in choices.switches]


def test_gpt2_to_llama_is_switched_part_by_part() -> None:
    choices = between(model("gpt2"), model("llama-3-8b"))
    assert keys(choices) == ["positions", "norm", "gate", "ffn", "biases", "head", "vocab", "size"]
    assert choices.reached()
    last = choices.model(keys(choices), 4)
    assert last.total() == 8_030_261_248
    assert diff(last, model("llama-3-8b")) == ()


@pytest.mark.parametrize(("a", "b", "reached"), [
    ("gpt2", "gpt2-xl", True), ("llama-3-8b", "gpt2", True), ("llama-2-7b", "llama-3-8b", True),
    ("gpt2", "mixtral-8x7b", False), ("gpt2", "gemma-2-9b", False), ("gpt2", "deepseek-v3", False),
    ("gemma-2-2b", "qwen2.5-7b", False),  # layers that differ are not made more, and 7 heads of its 8 cannot share one
    ("transformer-base", "llama-3-8b", False),  # no edit moves a norm from behind the sum to before the branch
])
def test_what_edits_reach_is_told(a: str, b: str, reached: bool) -> None:
    assert between(model(a), model(b)).reached() is reached


@pytest.mark.parametrize(("a", "b", "rest"), [
    ("gemma-2b", "llama-3-8b", {"factors"}),  # the embedding times the root of the width
    ("gemma-7b", "llama-2-7b", {"factors"}),
    ("falcon-40b", "llama-13b", {"norm"}),  # two branches side by side, each with a norm of its own
    ("gemma-3-4b", "gpt2", {"norm", "attention", "factors", "beside the decoder"}),
])
def test_what_the_arithmetic_has_more_is_left(a: str, b: str, rest: set[str]) -> None:
    choices = between(model(a), model(b))
    assert not choices.reached()
    made = choices.model(keys(choices), nearest(choices.shares(keys(choices)), model(b)))
    assert {c.name for c in diff(made, model(b))} == rest


def test_what_is_reached_computes_the_same() -> None:
    """Factors, caps, windows and branches, from some presets to all; beside them epsilons alone could differ."""
    there = [model(n) for n in presets.names()]
    for a in there[::8]:
        for b in there:
            choices = between(a, b)
            if choices.reached():
                made = choices.model(keys(choices), share_of(b))
                assert [arithmetic(x) for x in made.layers] == [arithmetic(x) for x in b.layers], (a.model_type, b)
                assert (made.embed, made.head) == (b.embed, b.head)


def arithmetic(layer: Layer) -> list[object]:
    a, ff = layer.attn, layer.mlp
    return [layer.parallel, layer.post_residual, layer.residual_scale, type(a), type(ff), *(
        getattr(a, n, None)
        for n in ("scale", "softcap", "sinks", "window", "sparse", "cross", "clip", "rope", "alibi")),
        *(getattr(ff, n, None) for n in ("gated", "activation", "limit", "top_k", "routing"))]


@pytest.mark.parametrize(("a", "b", "titles"), [
    ("qwen2.5-7b", "qwen3-8b", ["feed-forward width", "biases", "vocabulary", "size"]),
    ("phi-3-mini-4k", "phi-3-mini-128k", ["context"]),
    ("gemma-2-9b", "llama-3-8b", ["RoPE, base 500,000", "RMSNorm", "activation", "feed-forward width", "untied head",
                                  "vocabulary", "size"]),
    ("llama-4-scout", "llama-4-maverick", ["context"]),  # RoPE in all layers is what neither has
])
def test_a_switch_is_called_what_it_changes(a: str, b: str, titles: list[str]) -> None:
    assert [s.title for s in between(model(a), model(b)).switches] == titles


def test_every_sharing_of_a_hybrid_can_be_made() -> None:
    """Its first layer has no heads; 71 of the start's could not be shared as its are."""
    goal = load(str(Path(__file__).resolve().parents[1] / "golden" / "nemotron_h")).model
    assert goal.layers[0].attn is None
    choices = between(model("falcon-7b"), goal)
    for share in choices.shares(keys(choices)):
        choices.model(keys(choices), share)
    assert not choices.reached()


def test_a_factor_that_does_not_follow_the_width_stays() -> None:
    granite = load(str(Path(__file__).resolve().parents[1] / "golden" / "granite")).model
    assert apply(granite, "hidden=96").embed.scale == granite.embed.scale == 12.0
    assert apply(model("gemma-2b"), "hidden=1024").embed.scale == 32.0


def test_a_model_and_itself_have_no_switch() -> None:
    for name in presets.names():
        choices = between(model(name), model(name))
        assert keys(choices) == [], name
        assert choices.reached(), name
        assert choices.model((), share_of(choices.a)) == choices.a, name


def test_no_family_has_a_switch_to_itself() -> None:
    """Also where the head has other rows than the table (Llama 3.2 Vision)."""
    for path in sorted((Path(__file__).resolve().parents[1] / "golden").iterdir()):
        golden = load(str(path)).model
        assert keys(between(golden, golden)) == [], path.name
        assert path_of(golden, golden) == (), path.name


@pytest.mark.parametrize("goal", ["llama-3-8b", "mixtral-8x7b", "gemma-2-9b", "deepseek-v3", "falcon-40b", "phi-2",
                                  "gpt-oss-20b", "qwen3-30b-a3b", "olmo-2-7b", "transformer-big"])
def test_every_subset_is_made_by_its_edits_in_their_order(goal: str) -> None:
    """What `edits` names, typed after --set one after the other, is what `model` makes; no subset is refused."""
    choices = between(model("gpt2"), model(goal))
    every = keys(choices)
    for n in range(len(every) + 1):
        for on in combinations(every, n):
            for share in (choices.shares(on) or (None,))[:2]:
                made = choices.a
                for _, edits in choices.edits(on, share):
                    for text in edits:
                        made = apply(made, text)
                assert made == choices.model(on, share)


def test_sizes_keep_proportions() -> None:
    """A feed-forward of 4 x hidden stays one at the other size, and so does the sharing of KV heads."""
    choices = between(model("gpt2"), model("llama-3-8b"))
    told = dict(features(choices.model({"size"}, 1)))
    assert told["feed-forward"] == "2 matrices, GELU (tanh form), 16,384 = 4 x hidden"
    assert told["attention"] == "MHA, 32 heads of 128"
    told = dict(features(choices.model({"ffn"}, 4)))
    assert told["feed-forward"] == "2 matrices, GELU (tanh form), 2,688 = 3.5 x hidden"
    assert told["attention"] == "GQA, 12 query heads share 3 KV heads of 64"


def test_shares_are_the_divisors_of_the_heads() -> None:
    assert shares(model("gpt2")) == (1, 2, 3, 4, 6, 12)
    assert share_of(model("llama-3-8b")) == 4
    assert with_share(model("llama-3-8b"), 32) == ("n_kv_heads=1",)
    assert with_share(model("llama-3-8b"), 4) == ()


@pytest.mark.parametrize(("name", "options", "share"), [
    ("llama-3-8b", (1, 2, 3, 4, 6, 12), 4), ("llama-3-70b", (1, 2, 3, 4, 6, 12), 6), ("gpt2", (1, 2, 4), 1),
    ("gemma-2b", (1, 2, 3, 4, 6, 12), 12),  # one KV head for all 8 stays one for all 12
    ("gemma-2b", (1, 2, 4, 8, 16), 16), ("falcon-40b", (1, 2, 3, 4, 6, 12), 12), ("deepseek-v3", (1, 2), None),
    ("llama-3-8b", (), None),
])
def test_the_nearest_sharing(name: str, options: tuple[int, ...], share: int | None) -> None:
    assert nearest(options, model(name)) == share


def test_heads_with_hundreds_of_divisors_have_few_choices() -> None:
    """55,440 heads have 120 divisors, and each choice doubles with every switch."""
    odd = load("llama-3-8b", edits=["head_dim=2", "n_kv_heads=1", "n_heads=55440", "n_kv_heads=18480"]).model
    assert shares(odd) == (1, 2, 3, 4, 8, 16, 55_440)
    assert share_of(odd) == 3


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite"])
def test_a_latent_has_no_heads_to_share(name: str) -> None:
    assert shares(model(name)) == ()
    assert share_of(model(name)) is None


def test_a_sharing_that_the_heads_do_not_have_is_refused() -> None:
    with pytest.raises(UsageError):
        between(model("gpt2"), model("llama-3-8b")).model((), 5).total()
