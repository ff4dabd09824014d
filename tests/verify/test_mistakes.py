"""The list of mistakes: each can be made on some model, runs, is one of a kind, and stays where it is put."""

from __future__ import annotations

from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from llamactl.errors import UsageError
from llamactl.spec import edits
from llamactl.spec.edits import apply
from llamactl.spec.mistaken import TRIES
from llamactl.spec.mistakes import BY_NAME, MISTAKES, Change, Hypothesis, hypotheses, in_layer, worded
from llamactl.spec.model import Model
from llamactl.verify.network import Network

FAMILIES = ("llama", "llama-bias-tied-llama3", "gpt2", "gemma2", "qwen2", "qwen3", "mixtral", "olmo2", "gpt_oss",
            "falcon", "bloom", "cohere", "gptj")
NAMES = {e.name for e in (*edits.EDITS, *MISTAKES)}
N = 12


def net_of(g: Any, networks: ModuleType, others: dict[str, Tensor] | None = None) -> Network:
    return Network(g.model, networks.Held(g.tensors), g.ids, others)


def first_that_runs(net: Network, ideas: list[Hypothesis]) -> tuple[Hypothesis, Tensor] | None:
    for h in ideas:
        got = net.logits([Change(h.text)], N)
        if got is not None:
            return h, got
    return None


@pytest.fixture(scope="module")
def ran(networks: ModuleType) -> dict[str, set[str]]:
    """Edit -> the families in which one of its values runs and moves the logits."""
    out: dict[str, set[str]] = {}
    for family in FAMILIES:
        net = net_of(networks.golden(family), networks)
        right = net.logits((), N)
        assert right is not None
        by_name: dict[str, list[Hypothesis]] = {}
        for h in hypotheses(net.model):
            by_name.setdefault(h.about.name, []).append(h)
        for name, ideas in by_name.items():
            if len(out.get(name, ())) >= 2:
                continue
            found = first_that_runs(net, ideas)
            if found is not None and (found[1].shape != right.shape or not torch.equal(found[1], right)):
                out.setdefault(name, set()).add(family)
    return out


@pytest.mark.parametrize("name", [t.name for t in TRIES if t.name != "another"])
def test_every_mistake_runs_somewhere(name: str, ran: dict[str, set[str]]) -> None:
    assert ran.get(name), f"{name} is tried nowhere, or changes nothing"


def test_every_mistake_is_tried_and_every_try_is_an_edit() -> None:
    tried = [t.name for t in TRIES]
    assert len(set(tried)) == len(tried)
    assert set(tried) <= NAMES
    assert set(BY_NAME) - set(tried) == set()
    assert set(BY_NAME).isdisjoint(word for e in edits.EDITS for word in (e.name, *e.words))


def test_every_try_says_what_it_is() -> None:
    for t in TRIES:
        assert t.says
        assert t.cause
        assert t.fix
        assert t.says.count("{}") <= 1
        words, cause, fix = worded(f"{t.name}=SO")
        assert words
        assert "{" not in words
        assert (cause, fix) == (t.cause, t.fix)
    for e in MISTAKES:
        assert e.summary
    assert worded("ffn=3") == ("ffn=3", "", "")
    assert worded("rope_theta=7")[0] == "the RoPE base is 7"


@pytest.mark.parametrize("family", FAMILIES)
def test_hypotheses_are_distinct(family: str, networks: ModuleType) -> None:
    model = networks.golden(family).model
    found = hypotheses(model)
    made = [apply(model, h.text) for h in found]
    assert len(found) > 100
    assert len({h.text for h in found}) == len(found)
    assert len(set(made)) == len(made)
    assert model not in made
    for h in found:
        assert h.text.startswith(f"{h.about.name}=")
        assert h.text == f"{h.about.name}={h.value}"
        assert "{}" not in h.words


def test_hypotheses_can_be_chosen(networks: ModuleType) -> None:
    model = networks.golden("llama").model
    found = hypotheses(model, only=lambda t: t.name == "rope_pairs")
    assert [h.text for h in found] == ["rope_pairs=adjacent", "rope_pairs=q", "rope_pairs=k"]  # half is its own
    assert all(h.layered and h.about.blind and not h.whole for h in found)
    assert [h.whole for h in hypotheses(model, only=lambda t: t.name == "mask")] == [True, True, False, True]
    assert not any(h.layered for h in hypotheses(model, only=lambda t: t.name in ("layer_order", "row_shift")))


def test_what_a_model_lacks_is_not_tried(networks: ModuleType) -> None:
    def names(family: str) -> set[str]:
        return {h.about.name for h in hypotheses(networks.golden(family).model)}

    assert {"position_rows", "bias_dropped", "norm_bias", "transposed"} <= names("gpt2")
    assert not {"rope_pairs", "rope_theta", "rope_bands", "gate", "rope_scaling", "norm_offset=off"} & names("gpt2")
    assert not {"position_rows", "bias_dropped", "rope_bands", "norm_bias"} & names("llama")
    assert "rope_bands" in names("llama-bias-tied-llama3")
    assert "rope_bands" in names("gpt_oss")


# ---- edits found by name


def test_mistakes_are_edits_like_any_other(networks: ModuleType) -> None:
    model = networks.golden("llama").model
    assert apply(model, "kv-order=tile") == apply(model, "kv_order=tile") != model
    assert apply(model, "KV_ORDER = tile") == apply(model, "kv_order=tile")
    assert apply(model, "attn_scale=0.5").layers[2].attn.scale == 0.5
    assert apply(model, "attn_softcap=none") == model
    assert apply(apply(model, "weights=bf16"), "swapped=mlp.gate,mlp.up").taken == (
        *apply(model, "weights=bf16").taken, *apply(model, "swapped=mlp.gate,mlp.up").taken)


@pytest.mark.parametrize(("text", "said"), [
    ("kv_ordr=tile", "did you mean 'kv_order'?"), ("rope_pair=half", "did you mean 'rope_pairs'?"),
    ("norm-ep=1", "did you mean 'norm_eps'?"), ("rope_thet=3", "did you mean 'rope_theta'?"), ("kv_order", "VALUE"),
])
def test_near_names_are_told(text: str, said: str, networks: ModuleType) -> None:
    with pytest.raises(UsageError) as caught:
        apply(networks.golden("llama").model, text)
    assert said in (caught.value.help or "")


@pytest.mark.parametrize("text", [
    "kv_order=sideways", "attn_scale=wide", "attn_scale=nan", "attn_scale=1e40", "rope_shift=1.5", "parallel=maybe",
    "mask=", "transposed=mlp.up", "transposed=nothing", "swapped=attn.q,attn.k", "swapped=attn.q", "copied=attn.q<x",
    "constant=zero:nowhere", "another=nowhere", "layer_order=missing:3", "layer_order=swapped:0,9", "layer_order=x",
    "layer_order=missing:", "position_rows=1", "norm_eps=1e-3:nowhere", "norm_missing=attn_post", "norm_bias=all",
    "rope_bands=1:4", "rope_dim=3", "bias_dropped=qkv", "norms_swapped=attn,attn_post", "norm_place=before",
    "head_tied=false", "heads=nothing:reversed", "scaled=nowhere*2", "head_split=0.25",
])
def test_what_cannot_be_made_is_refused(text: str, networks: ModuleType) -> None:
    """In words; never as another edit, never as a fault of llamactl's own."""
    with pytest.raises(UsageError) as caught:
        apply(networks.golden("llama").model, text)
    assert caught.value.message


@pytest.mark.parametrize("text", [
    "norm_eps=small", "layer_order=shifted:x", "scaled=attn.q.weight", "scaled=attn.q.weight*x", "row_shift=embed:x",
    "row_shift=embed", "rope_dim=x", "rope_dim=8/x", "rope_scaling=linear", "rope_scaling=linear:x", "rope_rows=q",
    "rope_rows=q:half>adjacent:x", "layer_order=swapped:1", "rope_dim=8/0", "norm_offset=what",
])
def test_what_no_edit_understands_is_refused(text: str, networks: ModuleType) -> None:
    """These come from --accept and from ablate's --edits: a typo is no bug of llamactl's."""
    with pytest.raises(UsageError):
        apply(networks.golden("llama").model, text)


@pytest.mark.parametrize("text", [
    "rope_scaling=what:2", "norm_kind=what", "residual=what", "weights=what", "fused=what", "rope_rows=q:x>y",
    "constant=what:attn.q.weight", "heads=attn.q:what", "rope_rows=v:half>sideways", "fused=qkv>what",
])
def test_what_cannot_be_carried_out_is_refused(text: str, networks: ModuleType) -> None:
    """When it is made, or at the latest when it is run."""
    g = networks.golden("llama")
    try:
        apply(g.model, text)
    except UsageError:
        return
    assert net_of(g, networks).logits([Change(text)], N) is None


def test_two_edits_that_leave_no_numbers(networks: ModuleType) -> None:
    """A row of zeros without an epsilon: no number comes out, and no error of Python's."""
    net = net_of(networks.golden("llama"), networks)
    for n in (1, N):
        got = net.logits([Change("constant=zero:embed.weight"), Change("norm_eps=0")], n)
        assert got is None or not got.isfinite().all() or not got.any()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_any_two_edits_run_or_are_refused(family: str, networks: ModuleType) -> None:
    """None of Python's errors, in whatever order two are made (a sample)."""
    net = net_of(networks.golden(family), networks)
    texts = [h.text for h in hypotheses(net.model)]
    draw = Random(family)
    for _ in range(120):
        one, two = draw.sample(texts, 2)
        layer = draw.choice((None, 0, 1))
        got = net.logits([Change(one, layer), Change(two, layer)], N)
        assert got is None or got.shape == (N, net.model.head.vocab), (one, two, layer)


def test_a_tensor_of_another_checkpoint(networks: ModuleType) -> None:
    g = networks.golden("llama")
    other = {"layers.1.attn.q.weight": torch.zeros_like(g.tensors["layers.1.attn.q.weight"])}
    net = net_of(g, networks, other)
    got = net.logits([Change("another=attn.q.weight", 1)], N)
    want = net.logits([Change("constant=zero:attn.q.weight", 1)], N)
    assert got is not None
    assert torch.equal(got, want)
    assert net.logits([Change("another=attn.k.weight", 1)], N) is None


# ---- one layer


def test_a_change_in_one_layer_stays_there(networks: ModuleType) -> None:
    g = networks.golden("llama")
    net = net_of(g, networks)
    seen = set()
    for h in hypotheses(g.model):
        made = in_layer(g.model, h.text, 1) if h.layered else None
        if made is None or h.about.name in seen:
            continue
        seen.add(h.about.name)
        assert made.layers[0] == g.model.layers[0]
        assert made.layers[2] == g.model.layers[2]
        assert (made.embed, made.norm, made.head) == (g.model.embed, g.model.norm, g.model.head)
        assert {t.layers for group in made.taken for t in group} <= {(1,)}
        x = net.streams(N)[1]
        blocks = [net.block([Change(h.text, 1)], i, x) for i in range(3)]
        right = [net.block((), i, x) for i in range(3)]
        if None in (blocks[0], blocks[2]):
            continue
        assert torch.equal(blocks[0], right[0]), h.text
        assert torch.equal(blocks[2], right[2]), h.text
    assert {"rope_pairs", "norm_eps", "activation", "swapped", "transposed", "weights", "mask", "residual"} - seen == {
        "transposed"}  # nothing of it is square


def test_a_change_in_one_layer_changes_it(networks: ModuleType) -> None:
    g = networks.golden("gpt2")
    net = net_of(g, networks)
    for text in ("transposed=attn.o", "activation=relu", "norm_eps=1e-2", "fused=qkv>kqv", "bias_dropped=mlp",
                 "mask=none", "weights=fp8_e4m3", "norms_swapped=attn,mlp", "heads=attn.v:reversed"):
        x = net.streams(N)[2]
        got, right = net.block([Change(text, 2)], 2, x), net.block((), 2, x)
        assert got is not None
        assert right is not None
        assert not torch.equal(got, right), text
        whole, single = net.logits([Change(text)], N), net.logits([Change(text, 2)], N)
        assert whole is not None
        assert single is not None
        assert not torch.equal(whole, single), text


def test_what_is_no_change_in_a_layer(networks: ModuleType) -> None:
    gemma: Model = networks.golden("gemma2").model
    windows = [x.attn.window for x in gemma.layers]
    assert windows == [8, None, 8]
    assert in_layer(gemma, "window=none", 1) is None
    assert in_layer(gemma, "window=none", 0) is not None
    assert in_layer(gemma, "layer_order=missing:0", 1) is None
    assert in_layer(gemma, "embed_scale=2", 1) is None
    assert in_layer(gemma, "weights=bf16:embed.weight", 1) is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_every_value_runs_or_is_refused(family: str, networks: ModuleType) -> None:
    """None of them ends in an error of Python's; most of them run."""
    net = net_of(networks.golden(family), networks)
    found = hypotheses(net.model)
    ran = sum(net.logits([Change(h.text)], 4) is not None for h in found)
    assert ran > 0.9 * len(found)
