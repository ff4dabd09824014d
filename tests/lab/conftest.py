"""What the experiments are given in tests: bundled descriptions, no checkpoint, few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llamactl import lab
from llamactl.analysis.experiment import Experiment, Finding
from llamactl.api import load


@pytest.fixture(scope="session")
def setting() -> Callable[..., Any]:
    """setting(**changes): a Setting on the CPU, with Hamlet and few steps."""
    from llamactl.lab._setting import Setting

    def make(**changes: Any) -> Setting:
        said: dict[str, Any] = {"describe": lambda name: load(f"preset:{name}").model, "text": lab.excerpt(),
                                "text_name": "Hamlet", "steps": 3, **changes}
        return Setting(**said)

    return make


@pytest.fixture(scope="session")
def done(setting: Callable[..., Any]) -> Callable[..., Experiment]:
    """done(name, **changes): an experiment that was run; the same one is run once."""
    kept: dict[str, Experiment] = {}

    def run(name: str, **changes: Any) -> Experiment:
        (card,) = lab.chosen([name])
        if changes:
            return lab.run(card, setting(**changes))
        if name not in kept:
            kept[name] = lab.run(card, setting())
        return kept[name]

    return run


@pytest.fixture(scope="session")
def pick() -> Callable[..., Finding]:
    """pick(experiment, what, of): the one finding whose words begin so."""

    def find(e: Experiment, what: str, of: str = "") -> Finding:
        hits = [f for c in e.claims for f in c.findings if f.what.startswith(what) and f.of.startswith(of)]
        assert len(hits) == 1, [(f.what, f.of) for f in hits]
        return hits[0]

    return find


@pytest.fixture
def drawn(setting: Any) -> Callable[..., Any]:
    """drawn(kind): a small checkpoint of drawn weights whose positions are of that kind."""
    import torch

    from llamactl.lab._drawn import Drawn
    from llamactl.lab._setting import Checkpoint

    def make(kind: str) -> Any:
        given = setting()
        model = given.small("gpt2", "n_layers=2", "n_heads=2", "head_dim=16", "hidden=32", "vocab=256",
                            f"positions={kind}")
        ids = torch.randint(256, (24,), generator=given.draws()).tolist()
        return Checkpoint(id=kind, model=model, source=Drawn(model, given.draws()), ids=tuple(ids), read=False)

    return make
