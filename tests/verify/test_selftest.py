"""Mistakes planted in a network that is right: how far they go, which are alike, which hide, what the search finds.

Numbers are held against the edited network run on its own; what is alike or hidden follows from the mathematics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from llamactl import arch
from llamactl.analysis.selftest import Planted, SelftestReport
from llamactl.errors import InputRefused
from llamactl.net import streamed
from llamactl.net.taken import Taking
from llamactl.spec.edits import apply
from llamactl.spec.mistaken import TRIES
from llamactl.spec.mistakes import Hypothesis, hypotheses, in_layer
from llamactl.spec.model import Model
from llamactl.verify import search
from llamactl.verify import selftest as module
from llamactl.verify.measure import gap, measure
from llamactl.verify.planted import seeds
from llamactl.verify.selftest import selftest


def idea(text: str, **about: Any) -> Hypothesis:
    name = text.partition("=")[0]
    found = next(t for t in TRIES if t.name == name)
    return Hypothesis(text=text, about=replace(found, **about), layered=found.layered)


class Case:
    """A golden's model with its weights."""

    def __init__(self, networks: ModuleType, name: str = "llama") -> None:
        g = networks.golden(name)
        self.model, self.source, self.ids = g.model, networks.Held(g.tensors), g.ids

    def run(self, *ideas: Hypothesis | str, seconds: float = 0.0, **more: Any) -> SelftestReport:
        made = [idea(x) if isinstance(x, str) else x for x in ideas]
        return selftest(self.model, self.source, self.ids[0].tolist(), id="golden", text="its ids", seconds=seconds,
                        ideas=made, **more)

    def logits(self, model: Model, n: int | None = None) -> Tensor:
        return streamed.logits(model, Taking(self.source, model), self.ids[:, :n], length=self.ids.shape[1])[0]


@pytest.fixture(scope="module")
def llama(networks: ModuleType) -> Case:
    return Case(networks)


def row(r: SelftestReport, edit: str, layer: bool = False) -> Planted:
    (found,) = (x for x in r.planted if x.edit == edit and x.scope.startswith("layer ") is layer)
    return found


def blind(r: SelftestReport) -> dict[str, str]:
    return {b.edit: b.shows for b in r.blind_spots if not b.scope.startswith("layer ")}


SEEN = ("activation=gelu", "rope_theta=100", "window=4", "kv_order=tile", "logits_scale=2.0", "layer_order=reversed")


def test_what_is_seen_and_how_far(llama: Case) -> None:
    r = llama.run(*SEEN)
    base = llama.logits(llama.model)
    for edit in SEEN:
        wrong = llama.logits(apply(llama.model, edit))
        want = measure(base, wrong, None, r.floor.limit)
        first = int(((base - wrong).abs().amax(-1) > r.floor.limit).nonzero()[0])
        got = row(r, edit)
        assert (got.seen, got.named, got.equivalent) == (True, "yes", ())
        assert got.max_abs_dlogit == pytest.approx(want.max_abs_dlogit)
        assert got.max_kl == pytest.approx(want.max_kl)
        assert got.tokens == first + 1
    assert row(r, "activation=gelu").tokens == 1
    assert row(r, "window=4").tokens == 5  # the fifth token no longer sees the first
    assert row(r, "logits_scale=2.0").scope == row(r, "layer_order=reversed").scope == "model"
    assert row(r, "window=4").scope == "all layers"
    assert r.totals.seen == r.totals.named == r.totals.planted == len(r.planted)
    assert r.totals.most_tokens == max(x.tokens or 0 for x in r.planted)
    assert (r.blind_spots, r.checked, r.passed) == ((), 0, True)


def test_one_layer(llama: Case) -> None:
    r = llama.run("activation=gelu")
    i = llama.model.n_layers // 2
    one = in_layer(llama.model, "activation=gelu", i)
    assert one is not None
    got = row(r, "activation=gelu", layer=True)
    assert got.scope == f"layer {i}"
    assert got.max_abs_dlogit == pytest.approx(gap(llama.logits(llama.model), llama.logits(one)))
    assert got.max_abs_dlogit != pytest.approx(row(r, "activation=gelu").max_abs_dlogit)
    assert f"layer {i} of {llama.model.n_layers}" in " ".join(r.limits)


def test_the_layer_nearest_to_the_middle_that_can_have_it(networks: ModuleType) -> None:
    model = networks.golden("gemma3").model
    windowed = [i for i, x in enumerate(model.layers) if getattr(x.attn, "window", None) is not None]
    others = [i for i in range(model.n_layers) if i not in windowed]
    assert windowed, others
    (_, one), _ = seeds(model, [idea("window=none")])
    middle = model.n_layers // 2
    assert one.change.layer == min(windowed, key=lambda i: abs(i - middle))


def test_a_change_that_shows_later_tokens_is_run_on_every_beginning(llama: Case) -> None:
    """Token 0 differs on the whole text, and not on a text of one token."""
    r = llama.run("mask=none")
    wrong = apply(llama.model, "mask=none")
    assert gap(llama.logits(llama.model)[:1], llama.logits(wrong)[:1]) > r.floor.limit
    assert gap(llama.logits(llama.model, 1), llama.logits(wrong, 1)) <= r.floor.limit
    assert gap(llama.logits(llama.model, 2), llama.logits(wrong, 2)) > r.floor.limit
    assert row(r, "mask=none").tokens == 2


ALIKE = (("positions=none", "rope_on=none"), ("rope_pairs=adjacent", "rope_rows=both:adjacent>half"),
         ("scaled=attn.q.weight*2", "scaled=attn.k.weight*2"), ("norm_weight=final", "constant=ones:norm.weight"))


def test_what_gives_the_same_logits_is_said(llama: Case) -> None:
    r = llama.run(*(x for pair in ALIKE for x in pair), "activation=gelu")
    for a, b in ALIKE:
        assert row(r, a).equivalent == (b,)
        assert row(r, b).equivalent == (a,)
        assert row(r, a).named == row(r, b).named == "equivalent"
    where = f" in layer {llama.model.n_layers // 2}"
    assert row(r, "positions=none", layer=True).equivalent == (f"rope_on=none{where}",)
    assert row(r, "activation=gelu").equivalent == ()
    assert r.totals.equivalent == 2 * (2 * len(ALIKE) - 1) == r.totals.seen - 2  # the final norm is in no layer


def test_near_is_not_the_same(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks alike from afar is held against each other on all logits."""
    monkeypatch.setattr(module, "_near", lambda plants, limit: [(0, 1), (0, 2)])
    r = llama.run(idea("positions=none"), idea("activation=gelu"), idea("rope_on=none"))
    assert [x.equivalent for x in r.planted[:3]] == [("rope_on=none",), (), ("positions=none",)]


def test_one_in_a_layer_may_be_one_of_the_whole_model_and_not_the_reverse(networks: ModuleType) -> None:
    """In a model of which one layer alone can have the change."""
    case = Case(networks)
    layers = case.model.layers
    assert len(layers) >= 2
    plain = replace(layers[0], attn=replace(layers[0].attn, window=3))
    case.model = replace(case.model, layers=(*layers[:-1], plain))
    r = case.run("window=none")
    whole, one = row(r, "window=none"), row(r, "window=none", layer=True)
    assert one.scope == f"layer {len(layers) - 1}"
    assert one.max_abs_dlogit == whole.max_abs_dlogit
    assert (one.named, one.equivalent) == ("equivalent", ("window=none",))
    assert (whole.named, whole.equivalent) == ("yes", ())


def test_blind_spots(llama: Case) -> None:
    n = llama.ids.shape[1]
    assert n < 60
    r = llama.run("window=64", f"window={n}", f"window={n - 1}", "rope_table=positions-bf16", "window=4096")
    assert (row(r, "window=64").named, row(r, "window=64").seen, row(r, "window=64").tokens) == ("no-op", False, None)
    assert row(r, f"window={n - 1}").tokens == n  # the last token is the first that shows it
    told = blind(r)
    assert told["window=64"] == "a text of 65 tokens or more"
    assert told[f"window={n}"] == f"a text of {n + 1} tokens or more"
    room = llama.model.context.usable
    assert room is not None
    assert room < 4097
    assert told["window=4096"] == f"no text: it acts from 4,097 tokens on, and positions end at {room:,}"
    assert f"window={n - 1}" not in told
    assert set(told) <= {"window=64", f"window={n}", "rope_table=positions-bf16", "window=4096"}
    assert r.totals.no_op == len(r.blind_spots) == sum(x.named == "no-op" for x in r.planted)


def test_weights_that_are_no_finer(networks: ModuleType) -> None:
    case = Case(networks)
    case.source = networks.Held({k: v.bfloat16().float() for k, v in case.source.tensors.items()})
    r = case.run("weights=bf16", "norm_eps=1e-7:final", "norm_bias=all", "weights=int4")
    assert blind(r)["weights=bf16"] == "no text: the weights are stored no finer than that"
    assert row(r, "weights=bf16").max_abs_dlogit == 0
    assert row(r, "weights=int4").seen


def test_a_mistake_within_arithmetic(llama: Case, networks: ModuleType) -> None:
    """What is no more than a second honest path is called so; what is more is put down to the text."""
    without_rotation = Case(networks, "gpt2")
    same = "rope_rows=both:adjacent>half"  # lanes of q and k in another order, which no score knows
    r = without_rotation.run(same)
    assert row(r, same).named == "no-op"
    assert 0 < (row(r, same).max_abs_dlogit or 0) < r.floor.limit
    assert blind(r)[same].startswith("perhaps none: no more than arithmetic itself, ")
    top = float(llama.logits(llama.model).abs().max())
    limit = llama.run("window=4").floor.limit
    half = f"logits_scale={1 + 0.5 * limit / top!r}"
    assert blind(llama.run(half))[half] == "perhaps a different text: 50% of the limit here"
    assert blind(llama.run(idea(half, blind=True)))[half] == "perhaps a longer text: 50% of the limit here"


def test_what_has_no_name(llama: Case) -> None:
    """NaN; what the search would not try, because it takes it for one that the first token cannot show."""
    r = llama.run("norm_eps=-1e9", idea("activation=relu", blind=True), idea("window=4"), "fused=qkv>per_lane")
    bad = row(r, "norm_eps=-1e9")
    assert (bad.named, bad.seen, bad.max_abs_dlogit, bad.max_kl, bad.tokens) == ("not-finite", True, None, None, 1)
    assert (row(r, "activation=relu").named, row(r, "window=4").named) == ("no", "yes")
    odd = row(r, "fused=qkv>per_lane")
    assert (odd.named, odd.seen, odd.max_abs_dlogit) == ("cannot-run", False, None)
    t = r.totals
    assert (t.not_finite, t.not_named, t.cannot_run) == (2, 2, 2)
    assert t.planted == len(r.planted) - 2
    assert (r.checked, r.passed) == (0, True)


def test_a_dozen_orders_of_layers(networks: ModuleType) -> None:
    model = arch.describe(networks.config("llama", num_hidden_layers=12), "long")
    some, orders = seeds(model)
    made = [s.change.text for s in some if s.idea.about.name == "layer_order"]
    assert len(made) <= 12 < orders
    assert {"layer_order=strings", "layer_order=missing:6", "layer_order=swapped:6,7"} <= set(made)
    every = {h.text for h in hypotheses(model)}
    assert set(made) <= every
    others = {h.text for h in hypotheses(model, only=lambda t: t.name != "layer_order")}
    assert others == {s.change.text for s in some if s.change.layer is None and s.change.text not in made}
    assert all(s.change.layer in (5, 6, 7) for s in some if s.change.layer is not None)


def test_the_search_finds_what_has_a_name(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ideas = [idea(x) for x in ("positions=none", "rope_on=none", "activation=gelu", "kv_order=tile", "window=64",
                               "layer_order=reversed")]
    monkeypatch.setattr(search, "hypotheses", few(ideas))
    monkeypatch.setattr(search, "fitted", lambda *_, **__: [])
    r = llama.run(*ideas, seconds=600)
    named = [x for x in r.planted if x.named in ("yes", "equivalent")]
    assert len(named) == 9  # all but the window, five of them in the whole model and four in a layer
    assert (r.checked, r.checked_named, r.missed, r.passed) == (9, 9, (), True)


def test_what_the_search_does_not_find_fails(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ideas = [idea(x) for x in ("activation=gelu", "kv_order=tile")]
    monkeypatch.setattr(search, "hypotheses", few(ideas[:1]))
    monkeypatch.setattr(search, "fitted", lambda *_, **__: [])
    r = llama.run(*ideas, seconds=600)
    assert (r.checked, r.checked_named, r.passed) == (4, 2, False)
    assert {(m.edit, m.scope, m.said) for m in r.missed} == {
        ("kv_order=tile", "all layers", None), ("kv_order=tile", f"layer {llama.model.n_layers // 2}", None)}


def few(ideas: Sequence[Hypothesis]) -> Any:
    """`hypotheses` that knows these alone; windows are looked up by the search itself."""
    return lambda model, only=None: [h for h in ideas if only is None or only(h.about)] or [idea("window=7")]


def test_a_wrong_name_is_a_miss(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamactl.spec.mistakes import Change

    monkeypatch.setattr(module.Search, "solve", lambda *_, **__: [([Change("mask=strict", 1)], [])])
    r = llama.run("logits_scale=2.0", seconds=600)
    assert [(m.edit, m.said) for m in r.missed] == [("logits_scale=2.0", "mask=strict in layer 1")]


def test_an_equal_name_is_none(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamactl.spec.mistakes import Change

    monkeypatch.setattr(module.Search, "solve", lambda *_, **__: [([Change("norm_weight=final")], [])])
    r = llama.run("norm_weight=final", "constant=ones:norm.weight", seconds=600)
    assert (r.checked, r.checked_named) == (2, 2)


def test_one_that_time_was_too_short_for_is_not_counted(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: Any, *_: Any, **__: Any) -> list[Any]:
        self.stopped = True
        return []

    monkeypatch.setattr(module.Search, "solve", late)
    r = llama.run("logits_scale=2.0", seconds=600)
    assert (r.checked, r.missed, r.passed) == (0, (), True)


def test_a_network_that_is_not_finite_is_refused(networks: ModuleType) -> None:
    case = Case(networks)
    case.source = networks.Held({**case.source.tensors, "norm.weight": torch.full_like(
        case.source.tensors["norm.weight"], torch.nan)})
    with pytest.raises(InputRefused, match="not all finite"):
        case.run("window=4")


def test_what_is_being_done_is_told(llama: Case) -> None:
    said: list[str] = []
    llama.run("activation=gelu", "positions=none", "rope_on=none", say=said.append)
    assert said[0] == "measuring the floor of arithmetic"
    assert "planting 1 of 6: activation=gelu" in said
    assert any(x.startswith("comparing ") for x in said)


@pytest.mark.slow
def test_every_mistake_in_a_small_network(llama: Case) -> None:
    r = selftest(llama.model, llama.source, llama.ids[0].tolist(), id="golden", text="its ids", seconds=30.0)
    t = r.totals
    assert t.planted == t.seen + t.no_op == len(r.planted) - t.cannot_run
    assert t.seen == t.named + t.equivalent + t.not_named + t.not_finite
    assert t.seen > 0.75 * t.planted
    assert t.not_named == 0
    assert r.passed, r.missed
