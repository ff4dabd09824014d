"""Reports of `verify` to be shown: one of every verdict, and one whose every text was written by an enemy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llamactl.analysis.verification import (
    Explanation,
    Finding,
    Floor,
    Inventory,
    Layer,
    Measures,
    Place,
    Probe,
    Side,
    VerifyReport,
)

HOSTILE = "<script>alert(1)</script>\"'&amp; \x1b[31m \u202e ]]> --> %0A ::error::x\r\n::set-output a=b,c|`x` "
HOSTILE += "\ufffe\x00\x85"
ROPE = Explanation(
    edit="rope-interleaved", scope="all layers", words="RoPE turns neighbouring lanes instead of the two halves",
    cause="q and k rows are read in Meta's lane order", fix="permute the rows of q and k by head, biases too",
    residual=3.07e-6, residual_kl=2e-9, equivalent=("q-lanes + k-lanes",), separate="no text that was tried tells them "
    "apart: they compute the same")
FLOOR = Floor(path="attention by matrices, in fp32", max_abs_dlogit=2.94e-5, max_kl=3.6e-7, times=16.0, backstop=5.5e-5,
              limit=4.7e-4)
INVENTORY = Inventory(
    path="/models/port", layout="hf", tensors=272, parameters=134_515_008, dtypes=(("F32", 134_515_008),), head="tied",
    norm_mean=(0.0189, 0.85, 3.1), nan=0, inf=0, findings=(
        Finding(code="dtype-differs", level="warning", message="the config says bf16, most of the weights are fp32"),
        Finding(code="zero-rows", level="note", message="8 of 49,152 rows are zero", tensor="model.embed.weight")))
SIDES = (Side(label="reference", kind="checkpoint", ref="/models/right", family="llama", layout="hf", dtype="bf16"),
         Side(label="candidate", kind="logits", ref="port.npy"))


def measures(far: float | None, kls: tuple[float | None, ...]) -> Measures:
    """Measures of logits that are at most `far` apart, with these KLs."""
    known = [x for x in kls if x is not None]
    most = max(known) if known and len(known) == len(kls) else None
    n = len(kls)
    return Measures(
        tokens=n, max_kl=most, mean_kl=None if most is None else sum(known) / n, max_abs_dlogit=far,
        max_relative=None if far is None else far / 20, top1_agreement=None if far is None else 0.35,
        top5_agreement=None if far is None else 0.61, kl_position_0=kls[0] if kls else None,
        kl_by_quarter=tuple(kls[i * n // 4] for i in range(4)) if n else (), kl_by_position=kls,
        columns=49152 if far else 0, columns_of=49152, first_column=0 if far else None, loss_first=2.41,
        loss_second=None if far is None else 4.53, non_finite=(0, 0) if far is not None else (0, 77))


def growing(n: int = 1024) -> tuple[float, ...]:
    """The KLs of wrong positions: none at the first token, then more and more."""
    return tuple(0.0 if i == 0 else 10 * (i / n) ** 1.5 * (0.3 + 0.7 * ((i * 37) % 101) / 100) for i in range(n))


def reports() -> dict[str, VerifyReport]:
    """A report by name: each verdict, and odd ones."""
    layers = tuple(Layer(layer=i, relative=0.4 if i in (3, 7) else 1e-6 * (1 + i % 5)) for i in range(30))
    base = VerifyReport(
        verdict="different", why="the logits are up to 8.31 apart, 17,700 times what arithmetic does, and no edit "
        "explains it", sides=SIDES, probe=Probe(tokens=1024, source="a passage of English"), explanations=(),
        first_difference=Place(where="layer 3 attention", relative=0.4, floor=1e-6, others=("layer 7",)), layers=layers,
        measures=measures(8.31, growing()), floor=FLOOR, inventory=(INVENTORY, replace(INVENTORY, findings=())),
        limits=("eps of the norms within 1e-7: the change is below arithmetic",), tried=152)
    still = tuple(replace(x, relative=2e-6) for x in layers)
    same = replace(base, verdict="same", why="the logits are 3.3e-05 apart, within arithmetic", layers=still,
                   first_difference=None, measures=measures(3.3e-5, tuple(3e-7 * (1 + i % 9) for i in range(64))))
    bad = Finding(code="nan-values", level="error", message="3 of 9 values are NaN", tensor="model.norm.weight")
    return {
        "equal": replace(same, verdict="equal", why="every bit is the same", measures=measures(0.0, (0.0,) * 64),
                         layers=tuple(replace(x, relative=0.0) for x in layers), tried=0, limits=()),
        "same": same,
        "explained": replace(base, verdict="explained", why="rope-interleaved explains it", explanations=(
            ROPE, replace(ROPE, edit="gelu", scope="layer 7", equivalent=(), separate=None))),
        "different": base,
        "partly": replace(base, explanations=(replace(ROPE, residual=0.5),)),
        "cannot-judge": replace(same, verdict="cannot-judge", why="one token is no text", measures=None, floor=None,
                                layers=(), sides=None, probe=None, tried=0),
        "nan": replace(base, why="77 logits are not finite", measures=measures(None, (1e-3, None, 2e-3, None, None)),
                       layers=(Layer(layer=0, relative=1e-6), Layer(layer=1, relative=None)), floor=None,
                       first_difference=Place(where="layer 1", relative=1e30, floor=0.0),
                       inventory=(replace(INVENTORY, nan=3, inf=1, norm_mean=None, dtypes=(), findings=(bad,) * 12),)),
        "bare": replace(base, measures=None, floor=None, layers=(), first_difference=None, inventory=(), sides=None,
                        probe=None, limits=(), tried=0),
        "no floor of zero": replace(base, floor=replace(FLOOR, limit=0.0, max_abs_dlogit=0.0, max_kl=0.0, backstop=0.0),
                                    measures=measures(float("inf"), (float("nan"), float("inf"), 0.0, -1e-17))),
        "empty": replace(base, measures=measures(1.0, ()), layers=()),
    }


def hostile() -> VerifyReport:
    """Every text of the report, written by an enemy."""
    x = HOSTILE
    base = reports()["explained"]
    return replace(
        base, why=x, sides=(Side(label=x, kind=x, ref=x, family=x, layout=x, dtype=x),) * 2, limits=(x,),
        probe=Probe(tokens=9, source=x, note=x), first_difference=Place(where=x, relative=0.1, floor=0.0, others=(x,)),
        explanations=(Explanation(edit=x, scope=x, words=x, cause=x, fix=x, residual=float("nan"), residual_kl=None,
                                  equivalent=(x, x), separate=x),), floor=replace(FLOOR, path=x),
        inventory=(Inventory(path=x, layout=x, tensors=1, parameters=1, dtypes=((x, 1),), head=x, norm_mean=None, nan=0,
                             inf=0, findings=tuple(Finding(code=x, level=level, message=x, tensor=x)
                                                   for level in ("error", "warning", "note"))),))


NAMES = (*reports(), "hostile")


@pytest.fixture(params=NAMES)
def each(request: Any) -> tuple[str, VerifyReport]:
    """(name, report), one after the other."""
    return request.param, hostile() if request.param == "hostile" else reports()[request.param]


@pytest.fixture
def named() -> Callable[[str], VerifyReport]:
    """named(name): that report."""
    return lambda name: hostile() if name == "hostile" else reports()[name]


@pytest.fixture
def enemy() -> str:
    """The text that the hostile report is made of."""
    return HOSTILE
