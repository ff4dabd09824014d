"""What a verify report says, in words: the same for a terminal, a page and a CI log."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llamactl.analysis.verification import (
    TEXTS,
    Explanation,
    Finding,
    Floor,
    Inventory,
    Measures,
    Place,
    Side,
    VerifyReport,
)
from llamactl.render.units import count, layer_ranges, share

MOST = 1e30  # an error as large as this stands for one that is not finite
Pairs = list[tuple[str, str]]


def word(r: VerifyReport, accepted: bool = False) -> str:
    """The verdict as people write it: "cannot judge". accepted: all that is wrong was said to be allowed."""
    return r.verdict.replace("-", " ") + (", accepted" if accepted else "")


def sentence(r: VerifyReport) -> str:
    """The verdict and why: "different: the logits are ..."."""
    return r.why if r.why.lower().startswith(word(r)) else f"{word(r)}: {r.why}"


def finite(x: float | None) -> float | None:
    """x, or None where it is no number to draw or to divide by."""
    return x if x is not None and math.isfinite(x) and abs(x) < MOST else None


def number(x: float | None) -> str:
    """3.07e-06; "-" for what does not exist, "not finite" for what is not."""
    if x is None or math.isnan(x):
        return "-"
    return f"{x:.3g}" if finite(x) is not None else "not finite"


def multiple(m: Measures | None, f: Floor | None) -> float | None:
    """The largest |dlogit| in limits; None where one of them does not exist."""
    far, limit = (finite(m.max_abs_dlogit) if m else None), (finite(f.limit) if f else None)
    return finite(far / limit) if far is not None and limit else None


def times(x: float) -> str:
    """152283.4 -> 152,000 x; three digits, for it is an order of magnitude that is told."""
    if 1000 <= x < 1e9:
        return f"{float(f'{x:.3g}'):,.0f} x"
    return f"{x:.3g} x"


def side(s: Side) -> str:
    """What was run: its reference, and in brackets what is known of it."""
    known = (s.kind, s.family and f"family {s.family}", s.layout and f"layout {s.layout}", s.dtype)
    return f"{s.ref} ({', '.join(x for x in known if x)})"


def compared(r: VerifyReport) -> Pairs:
    """The two sides and the text on which they were run."""
    out = [(s.label, side(s)) for s in r.sides or ()]
    if r.probe is not None:
        said = f"{count(r.probe.tokens)} tokens: {TEXTS.get(r.probe.source, r.probe.source)}"
        out.append(("probe", f"{said}; {r.probe.note}" if r.probe.note else said))
    return out


def explained(e: Explanation, f: Floor | None, several: bool) -> Pairs:
    """An explanation: the edit, what it means, what causes and mends it, what is left, and what else it could be."""
    kl = f" (KL {number(e.residual_kl)} nats)" if e.residual_kl is not None else ""
    floor = f", floor {number(f.max_abs_dlogit)}, limit {number(e.limit or f.limit)}" if f else ""
    out = [("edit", e.edit), ("where", e.scope), ("what", e.words), ("cause", e.cause), ("fix", e.fix),
           ("left with all" if several else "what is left", f"{number(e.residual)}{kl}{floor}")]
    if e.equivalent:
        out.append(("as good here", "; ".join(e.equivalent)))
    if e.separate:
        out.append(("to tell apart", e.separate))
    return out


def located(p: Place) -> Pairs:
    """The first place that differs, and the others that are wrong on their own."""
    floor = f", floor {number(p.floor)}" if p.floor > 0 else ""
    out = [("first difference", f"{p.where}: relative error {number(p.relative)}{floor}")]
    if p.others:
        out.append(("wrong on its own", _places(p.others)))
    return out


def _places(places: Sequence[str]) -> str:
    """"layer 4", "layer 5", "layer 7", "head" -> layers 4-5, 7; head. Other names stay as they are."""
    layers = sorted({n for x in places if (n := layer_of(x)) is not None and x == f"layer {n}"})
    if len(layers) < 2:
        return "; ".join(places)
    runs: list[tuple[int, int]] = []
    for n in layers:
        if runs and n == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], n)
        else:
            runs.append((n, n))
    named = {f"layer {n}" for n in layers}
    return "; ".join([f"layers {layer_ranges(tuple(runs), whole=True)}", *(x for x in places if x not in named)])


def faulty(r: VerifyReport) -> tuple[str, ...]:
    """Names of the places that are wrong, the first one first; none where the verdict passes."""
    p = r.first_difference
    return () if p is None or r.passed else tuple(dict.fromkeys((p.where, *p.others)))


def layer_of(place: str) -> int | None:
    """"layer 3 attention" -> 3; None for a place that is no single layer."""
    words = place.split()
    return int(words[1]) if len(words) > 1 and words[0] == "layer" and words[1].isdecimal() else None


def measured(m: Measures, f: Floor | None) -> Pairs:
    """The measures, those of a kind on one line."""
    far = multiple(m, f)
    out = [("non-finite", f"{count(m.non_finite[0])} and {count(m.non_finite[1])} logits")] if any(m.non_finite) else []
    out += [("max |dlogit|", number(m.max_abs_dlogit) + (f", {times(far)} the limit" if far is not None else ""))]
    if f is not None:
        out += [("floor", f"{number(f.max_abs_dlogit)} (KL {number(f.max_kl)}) by {f.path}"),
                ("limit", f"{number(f.limit)}: {number(f.times)} x the floor, or {number(f.backstop)} if that is more")]
    out += [
        ("relative error", f"{number(m.max_relative)} in the worst token"),
        ("KL", f"max {number(m.max_kl)}, mean {number(m.mean_kl)} nats; at position 0: {number(m.kl_position_0)}"),
        ("KL by quarter", ", ".join(map(number, m.kl_by_quarter)) or "-"),
        ("agreement", f"top-1 {_share(m.top1_agreement)}, top-5 {_share(m.top5_agreement)}"),
        ("columns", f"{count(m.columns)} of {count(m.columns_of)} beyond the limit"
         + (f", the first is {count(m.first_column)}" if m.first_column is not None else "")),
    ]
    if (m.loss_first, m.loss_second) != (None, None):
        out.append(("loss", f"{_loss(m.loss_first)} -> {_loss(m.loss_second)} nats per token"))
    return out


def _share(x: float | None) -> str:
    return "-" if finite(x) is None or x is None else share(x)


def _loss(x: float | None) -> str:
    return f"{x:.4f}" if x is not None and finite(x) is not None else number(x)


def listed(i: Inventory) -> str:
    """A checkpoint in one line."""
    dtypes = ", ".join(f"{name} {count(n)}" for name, n in i.dtypes)
    norms = ""
    if i.norm_mean is not None:
        least, median, largest = i.norm_mean
        norms = f"; norm weights average {number(least)} to {number(largest)}, median {number(median)}"
    odd = f"{count(i.nan)} NaN, {count(i.inf)} Inf" if i.nan or i.inf else "no NaN, no Inf"
    return (f"{i.path} ({i.layout}): {count(i.tensors)} tensors, {count(i.parameters)} parameters"
            + (f", {dtypes} elements" if dtypes else "") + f"; head {i.head}{norms}; {odd}")


def noticed(f: Finding) -> str:
    """A finding in one line: where, what, and its code."""
    return (f"{f.tensor}: " if f.tensor else "") + f"{f.message} [{f.code}]"


def stretches(values: Sequence[float | None], most: int, alone: int = 0) -> list[tuple[int, int, float | None]]:
    """(first, last, largest) of at most about `most` equal stretches; the first `alone` stand each on its own.

    A stretch in which a value does not exist has no largest.
    """
    out: list[tuple[int, int, float | None]] = [(i, i, finite(x)) for i, x in enumerate(values[:alone])]
    step = max(1, -(-(len(values) - alone) // max(1, most - alone)))
    for at in range(min(alone, len(values)), len(values), step):
        part = [finite(x) for x in values[at : at + step]]
        known = [x for x in part if x is not None]
        out.append((at, at + len(part) - 1, max(known) if len(known) == len(part) else None))
    return out


def decades(values: Sequence[float | None], span: int = 12) -> tuple[int, int]:
    """Powers of ten (low, high) that hold the positive values, low < high; at most `span` of them, the higher ones."""
    known = [v for x in values if (v := finite(x)) is not None and v > 0]
    if not known:
        return -1, 0
    high = math.ceil(math.log10(max(known)))
    low = min(math.floor(math.log10(min(known))), high - 1)
    return max(low, high - span), high
