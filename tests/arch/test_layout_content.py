"""Every canonical tensor holds what its name says, in every golden and in variants of them; see content.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from llamactl import arch

HERE = Path(__file__).resolve().parent
GOLDENS = sorted(p.name for p in (HERE.parent / "golden").iterdir() if (p / "config.json").exists())
NAMES = [*GOLDENS, *json.loads((HERE / "variants.json").read_text())]


@pytest.mark.parametrize("name", NAMES)
def test_canonical_tensors_compute_what_transformers_computes(content: ModuleType, name: str) -> None:
    b = content.built(name)
    rules = arch.names(b.model)
    assert content.inventory(b.model, rules) == b.header
    assert b.model.total() == b.total
    tensors = content.canonical(b, rules)
    assert content.wrong(b, tensors) is None
    assert tensors.used == set(tensors), "canonical tensors that no claim looks at"


@pytest.mark.parametrize("name", NAMES)
def test_each_kind_of_tensor_is_seen_when_it_is_off(content: ModuleType, name: str) -> None:
    """One tensor of each template is changed in one element; the checks above must notice."""
    b = content.built(name)
    right = content.canonical(b, arch.names(b.model))
    last = {t.template: t.name for t in b.model.tensors()}
    unseen = []
    for path in last.values():
        tensors = content.Canonical(right)
        tensors[path] = right[path].clone()
        tensors[path][(-1,) * right[path].dim()] += 0.5
        if content.wrong(b, tensors) is None:
            unseen.append(path)
    assert unseen == []


@pytest.mark.parametrize("name", NAMES)
def test_the_config_that_transformers_writes_says_the_same(content: ModuleType, name: str) -> None:
    """Its version 5 writes every default, rope_parameters, layer_types and dtype, whatever it read."""
    b = content.built(name)
    again = arch.describe(b.written, name)
    assert replace(again, notes=(), tied_why="") == replace(b.model, notes=(), tied_why="")
