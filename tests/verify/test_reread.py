"""Which edits make another port's tensors, told from the tensors alone."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from llamactl.net.taken import Taking
from llamactl.spec.mistakes import Change, hypotheses
from llamactl.spec.model import Model
from llamactl.verify.network import Network
from llamactl.verify.reread import reread

sides: Any = sys.modules["llamactl_tests_sides"]  # loaded by conftest.py


def held_by(networks: ModuleType, name: str, *changes: Change) -> Network:
    """The network, and a port's tensors where `changes` were made to its weights."""
    g = networks.golden(name)
    source = networks.Held(g.tensors)
    model: Model = g.model
    for c in changes:
        made = c.on(model)
        assert made is not None
        model = made
    edited = Taking(source, model)
    others = {n: t.clone() for n in g.tensors if not torch.equal(t := edited.tensor(n).float(), g.tensors[n].float())}
    return Network(g.model, source, g.ids, others)


@pytest.mark.parametrize("texts", [
    ("heads=attn.q:reversed",), ("constant=zero:attn.q.weight",), ("norms_swapped=attn,mlp",), ("heads=attn.k:rolled",),
    ("weights=bf16",), ("swapped=mlp.gate,mlp.up",), ("heads=attn.q:reversed", "swapped=mlp.gate,mlp.up"),
    ("constant=ones:attn_norm.weight", "rope_rows=q:half>adjacent"),
])
def test_the_edits_that_make_the_tensors(networks: ModuleType, texts: tuple[str, ...]) -> None:
    net = held_by(networks, "llama", *(Change(t, 1) for t in texts))
    ideas = [h for h in hypotheses(net.model) if h.layered]
    found = reread(net, 1, ideas)
    assert reread(net, 0, ideas) == []
    assert len(found) == len(texts)
    for text in texts:  # or another text for the same reading
        assert any(f.partition("=")[0] == text.partition("=")[0] for f in found) or "norm" in text, found
    remade = held_by(networks, "llama", *(Change(t, 1) for t in found))
    assert remade.others.keys() == net.others.keys()
    assert all(torch.equal(remade.others[n], t) for n, t in net.others.items())


def test_biases_of_zeros_are_biases_left_out(networks: ModuleType) -> None:
    net = held_by(networks, "gpt2")
    ideas = [h for h in hypotheses(net.model) if h.layered]
    biases = [f"layers.0.attn.{x}.bias" for x in "qkv"]
    net.others |= {n: torch.zeros_like(net.source.tensor(n)) for n in biases}
    assert reread(net, 0, ideas) == ["bias_dropped=qkv"]
    net.others[biases[2]][0] = 1
    assert reread(net, 0, ideas) == ["constant=zero:attn.q.bias", "constant=zero:attn.k.bias", "another=attn.v.bias"]


def test_what_no_edit_makes_is_another(networks: ModuleType) -> None:
    net = held_by(networks, "llama", Change("heads=attn.q:reversed", 1))
    for n in ("layers.1.mlp.down.weight", "layers.1.attn.k.weight", "layers.0.mlp.up.weight"):
        net.others[n] = net.source.tensor(n) + 1
    ideas = [h for h in hypotheses(net.model) if h.layered]
    assert reread(net, 1, ideas) == ["heads=attn.q:reversed", "another=attn.k.weight,mlp.down.weight"]
    assert reread(net, 0, ideas) == ["another=mlp.up.weight"]


def test_an_edit_that_would_touch_more_is_none(networks: ModuleType) -> None:
    """Gate and up are swapped, but the port's up is its own: half a swap is no swap."""
    net = held_by(networks, "llama", Change("swapped=mlp.gate,mlp.up", 1))
    del net.others["layers.1.mlp.up.weight"]
    ideas = [h for h in hypotheses(net.model) if h.layered]
    found = reread(net, 1, ideas)
    assert not any(f.startswith("swapped") for f in found)
    assert found == ["copied=mlp.gate<mlp.up"] or found == ["another=mlp.gate.weight"]
