"""When an edited network's logits count as the ones that are looked for."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from llamactl.spec.mistakes import Change
from llamactl.verify.matching import NOISIER, NOISIEST, Target

sides: Any = sys.modules["llamactl_tests_sides"]  # loaded by conftest.py
N = sides.N
GELU = [Change("activation=gelu")]


def moved(x: Tensor, by: float) -> Tensor:
    """One logit of one token moved."""
    out = x.clone()
    out[5, 3] += by
    return out


def test_the_limit_is_the_limit(at: Any) -> None:
    a = at()
    wrong = a.wrong(*GELU)
    quiet = Target(wrong, a.limit).own_limit(a.net, GELU, wrong)
    assert quiet < 1.3 * a.limit  # this edit makes the network no noisier
    for times, holds in ((0.9, True), (-0.9, True), (1.5, False), (-1.5, False), (7.0, False)):
        assert Target(moved(wrong, times * a.limit), a.limit).reached(a.net, GELU, N) is holds, times


@pytest.mark.parametrize(("off", "base", "holds"), [
    (NOISIER * 0.9, 0.0, True), (NOISIER * 1.1, 0.0, False),  # little was wrong: a little noise is allowed
    (NOISIER * 1.1, NOISIER * 1.0 / NOISIEST[1], False), (NOISIER * 1.1, NOISIER * 1.3 / NOISIEST[1], True),
    (NOISIEST[0] * 0.9, 1e9, True), (NOISIEST[0] * 1.1, 1e9, False),  # much was: never more than so many limits
])
def test_a_noisier_network_is_held_against_its_own_floor(
        at: Any, monkeypatch: pytest.MonkeyPatch, off: float, base: float, holds: bool) -> None:
    a = at()
    target = Target(moved(a.wrong(*GELU), off * a.limit), a.limit, base=base * a.limit)
    monkeypatch.setattr(Target, "own_limit", lambda *_: 1e9)
    assert target.reached(a.net, GELU, N) is holds
    monkeypatch.setattr(Target, "own_limit", lambda *_: 0.5 * off * a.limit)
    assert not target.reached(a.net, GELU, N)


def test_what_is_not_finite_is_never_reached(at: Any) -> None:
    a = at()
    wrong = a.wrong(*GELU)
    for value in (torch.nan, torch.inf):
        assert not Target(moved(wrong, value), a.limit, base=1e30).reached(a.net, GELU, N)


def test_an_edit_that_cannot_be_made_reaches_nothing(at: Any) -> None:
    a = at()
    assert not Target(a.ours, a.limit).reached(a.net, [Change("position_rows=1")], N)
