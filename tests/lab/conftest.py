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
