"""The other side in all its forms: logits of another width, the largest, log-probabilities, states, modules, files."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from llamactl import arch
from llamactl.errors import InputRefused
from llamactl.spec.edits import apply
from llamactl.spec.mistakes import Change
from llamactl.verify.other import of_checkpoint, of_saved, ran
from llamactl.verify.saved import Saved

sides: Any = sys.modules["llamactl_tests_sides"]  # loaded by conftest.py
N, SETTING = sides.N, sides.SETTING


# ---- other forms of logits


def test_another_vocabulary_is_told(at: Any) -> None:
    """Padded rows, or rows left out: the rest is compared, and that they differ is said."""
    a = at()
    for theirs, size in ((torch.cat((a.ours, torch.zeros(N, 7)), 1), 104), (a.ours[:, :90], 90)):
        r = a.judge(theirs.clone())
        assert any(f"{size}" in x and "97" in x for x in r.limits), r.limits
        assert r.verdict == "same"  # what one side alone has was not compared, so they are not equal
        bad = theirs.clone()
        bad[5, 5] += 1
        assert a.judge(bad, replace(SETTING, explain=False)).verdict == "different"


def test_another_number_of_tokens_is_refused(at: Any) -> None:
    a = at()
    with pytest.raises(InputRefused) as caught:
        a.judge(a.ours[:-1])
    assert caught.value.code == "tokens-differ"


def test_the_largest_alone(at: Any) -> None:
    a = at()
    values, columns = a.ours.topk(5)
    r = a.judge(None, top=(values, columns))
    assert r.verdict == "same"
    wrong = a.judge(None, top=(a.wrong(Change("activation=gelu")).topk(5)))
    assert (wrong.verdict, wrong.explanations) == ("different", ())
    swapped = values.clone()
    swapped[4, :2] = values[4, :2].flip(0)
    assert a.judge(None, top=(swapped, columns)).verdict == "different"
    swapped[4, 0] = float("nan")
    assert a.judge(None, top=(swapped, columns)).verdict == "different"


def test_log_probabilities(at: Any) -> None:
    a = at()
    note = (("log-probs", "a constant in a row is not compared"),)
    r = a.judge(a.ours.log_softmax(-1), log_probs=True, notes=note)
    assert r.passed
    assert any("constant" in x for x in r.limits)
    wrong = a.wrong(Change("activation=gelu")).log_softmax(-1)
    assert a.judge(wrong, replace(SETTING, explain=False), log_probs=True).verdict == "different"


@pytest.mark.parametrize("form", ["log-probabilities", "a wider vocabulary", "a narrower one"])
def test_a_mistake_is_named_in_other_forms_too(form: str, at: Any) -> None:
    """A softmax takes nothing away that a mistake needs, nor does a padded head."""
    a = at()
    wrong = a.wrong(Change("activation=gelu"))
    given = {"log-probabilities": wrong.log_softmax(-1), "a wider vocabulary": torch.cat((wrong, wrong[:, :7]), 1),
             "a narrower one": wrong[:, :90]}[form]
    r = a.judge(given, replace(SETTING, sweep=False, seconds=20.0), log_probs=form == "log-probabilities")
    assert r.verdict == "explained"
    assert [e.edit for e in r.explanations] == ["activation=gelu"]


# ---- what flows through


def saved(a: Any, *changes: Change) -> Saved:
    """Logits and hidden states of an edited network."""
    made = a.net.opened(changes, N)
    x = made.embedded()
    hidden = {0: x[0]}
    for i in range(3):
        x = made.layer(i, x)
        hidden[i + 1] = x[0]
    return Saved(path="x", logits=made.head(x)[0], vocab=97, dtype="fp32", computed_in="fp32", hidden=hidden)


def test_saved_hidden_states_give_the_layer(at: Any) -> None:
    a = at()
    states = saved(a, Change("residual=none:mlp", 2))
    r = a.against(of_saved(states, a.model, "logits", "x"))
    assert r.verdict == "explained"
    assert [(e.edit, e.scope) for e in r.explanations] == [("residual=none:mlp", "layer 2")]
    assert (r.first_difference.where, r.first_difference.others) == ("layer 2", ())
    assert [x.layer for x in r.layers] == [0, 1, 2]
    assert r.layers[1].relative < 1e-4 < r.layers[2].relative
    some = replace(states, hidden={2: states.hidden[2]})
    assert of_saved(some, a.model, "logits", "x").flow() is None


def test_what_shows_in_one_layer_and_is_as_true_of_all_is_said_of_all(networks: ModuleType) -> None:
    """An epsilon beside a small embedding: after the first block the stream is far above it."""
    a = sides.At(networks, "llama", factors={"embed.weight": 1e-2, "layers.0.mlp.down.weight": 1e4})
    r = a.against(of_saved(saved(a, Change("norm_eps=1e-3")), a.model, "logits", "x"))
    assert [(e.edit, e.scope) for e in r.explanations] == [("norm_eps=1e-3", "all layers")]
    assert (r.first_difference.where, r.first_difference.others) == ("layer 0", ())
    assert "norm_eps=1e-3 in layer 0" in r.explanations[0].equivalent
    r = a.against(of_saved(saved(a, Change("activation=relu", 1)), a.model, "logits", "x"))
    assert [(e.edit, e.scope) for e in r.explanations] == [("activation=relu", "layer 1")]


def test_a_layer_that_is_not_there(at: Any, networks: ModuleType) -> None:
    """A module of one layer less."""
    a = at()
    config = networks.config("llama")
    port = networks.theirs(config)
    del port.model.layers[1]
    port.config.num_hidden_layers, port.config.use_cache = 2, False
    layouts = [("hf", arch.names(a.model, "hf"), arch.ignored(a.model, "hf"))]
    r = a.against(ran(port, a.ids, a.model, a.source, ref="x", label="the candidate", layouts=layouts))
    assert r.verdict == "explained"
    assert [e.edit for e in r.explanations] == ["layer_order=missing:1"]
    assert r.first_difference.where == "layer 1"


def test_another_checkpoint(at: Any, networks: ModuleType) -> None:
    a = at()
    model = apply(a.model, "norm_eps=1e-2")
    r = a.against(of_checkpoint(model, a.source, a.ids, "other"))
    assert [(e.edit, e.scope) for e in r.explanations] == [("norm_eps=1e-2", "all layers")]
    assert a.against(of_checkpoint(a.model, a.source, a.ids, "other")).verdict == "equal"
