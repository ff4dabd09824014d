"""Tensors that look wrong beside what they should be: zero, constant, never loaded, off by one, there twice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import NamedTuple

from llamactl.analysis.verification import Finding
from llamactl.checkpoint.held import Held
from llamactl.spec.model import Model, Tensor
from llamactl.spec.naming import Offset, Rule
from llamactl.spec.parts import Norm
from llamactl.verify.scan import Facts

FEW = 8  # elements: fewer may agree by chance
# What tells weights stored as w = g - 1 from weights g. The means do not: a trained model of plain RMSNorms has one of
# 0.001 and a median of 0.25. But g is hardly ever negative, except in a layer or two, and w is as often as not.
NEGATIVE = 0.25
HARDLY = 0.01
AROUND_ONE = 0.25
MOST = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One tensor, or one entry of a stack. shape: of it alone; of, rule: the canonical tensors in it, () for none.

    beside: no network uses it.
    """

    held: Held
    shape: tuple[int, ...]
    of: tuple[Tensor, ...] = ()
    rule: Rule | None = None
    beside: bool = False
    entry: int | None = None

    @property
    def norm(self) -> bool:
        """Whether it holds weights of norms and nothing else."""
        return bool(self.of) and all(t.role == "norms" and t.name.endswith(".weight") for t in self.of)

    @property
    def trained(self) -> bool:
        """Whether a parameter is in it: not a buffer, nor a tensor of a tower."""
        return any(t.kind == "param" for t in self.of)

    @property
    def words(self) -> str:
        """Which entry of a stack it is, to be said after a noun."""
        return "" if self.entry is None else f" of entry {self.entry}"

    @property
    def layer(self) -> int:
        """Its layer, -1 outside the blocks."""
        return self.of[0].i if self.of else -1

    def index(self, flat: int) -> str:
        """A flat index as that of the stored tensor: [3, 0, 17]."""
        out: list[int] = []
        for n in reversed(self.shape):
            flat, last = divmod(flat, n)
            out.append(last)
        return str([*(() if self.entry is None else (self.entry,)), *reversed(out)])


class Look(NamedTuple):
    """A unit and what its bytes say."""

    unit: Unit
    facts: Facts


def plain(looks: Iterable[Look]) -> Iterator[Finding]:
    """Matrices of one value alone."""
    for u, f in looks:
        if len(u.shape) < 2 or prod(u.shape) < FEW or not u.trained or not f.constant:
            continue
        entry = "" if u.entry is None else f"entry {u.entry}: "
        if f.zero:
            yield Finding(code="zero-tensor", level="warning", tensor=u.held.name, message=f"{entry}all "
                          f"{f.elements:,} values are 0")
        else:
            yield Finding(code="constant-tensor", level="warning", tensor=u.held.name, message=f"{entry}all "
                          f"{f.elements:,} values are {f.least:g}")


def norms(looks: Sequence[Look], model: Model) -> Iterator[Finding]:
    """The weights of all norms beside each other, and beside what the description does with them."""
    found = [x for x in looks if x.unit.norm and x.facts.read and not x.facts.nan and prod(x.unit.shape) > 1]
    if not found:
        return
    varied = [x for x in found if not x.facts.constant]
    if not varied:
        yield Finding(code="norms-constant", level="note", message=f"all {len(found):,} norms have weights of one "
                      f"value ({found[0].facts.least:g}): not trained, or not loaded; norms that change places are not "
                      "seen")
    yield from _not_loaded(found, varied)
    yield from _offset(found, model)


def _not_loaded(found: Iterable[Look], varied: Sequence[Look]) -> Iterator[Finding]:
    kinds: dict[str, list[Look]] = {}
    for x in found:
        kinds.setdefault(x.unit.of[0].template, []).append(x)
    for same in kinds.values():
        siblings = sum(not x.facts.constant for x in same) if len(same) > 1 else len(varied)
        by: dict[str, list[Look]] = {}
        for x in same:
            if x.facts.constant and siblings:
                by.setdefault(x.unit.held.name, []).append(x)
        for name, (x, *more) in by.items():
            of = f" of entry {x.unit.entry} and {len(more):,} more" if more else x.unit.words
            yield Finding(code="norm-not-loaded", level="warning", tensor=name, message=f"all {x.facts.elements:,} "
                          f"weights{of} are {x.facts.least or 0:g}, and those of {siblings:,} norms like it vary: an "
                          "initial value, so never trained or never loaded")


def _offset(found: Iterable[Look], model: Model) -> Iterator[Finding]:
    """Whether weights lie around 0 that should lie around 1, or the other way round."""
    by: dict[float, list[Look]] = {}
    for x in found:
        norm = _part(x.unit.of[0], model) if len(x.unit.of) == 1 else None
        if norm is not None and x.unit.rule is not None:
            added = sum(op.by for op in x.unit.rule.ops if isinstance(op, Offset))
            by.setdefault((not norm.offset) + added, []).append(x)
    for around, some in by.items():
        means = [f.mean for _, f in some if f.mean is not None]
        negative = [f.negative for _, f in some if f.negative is not None]
        if len(means) < 2:
            continue
        kinds = {norm.kind for x in some if (norm := _part(x.unit.of[0], model)) is not None}
        near = sum(abs(m - 1) <= AROUND_ONE for m in means) >= MOST * len(means)
        share, other = median(negative), None
        if around == 1 and (share >= NEGATIVE or all(f.zero for _, f in some)):
            other = "weights w for factors 1 + w, around 0"
        elif around == 0 and near and share <= HARDLY and kinds == {"rms"}:  # LayerNorm1P may start at w = 1
            other = "the factors themselves, around 1"
        if other is not None:
            yield Finding(code="norm-offset", level="warning", message=f"norm weights look like {other} (means "
                          f"{min(means):.3g} .. {max(means):.3g}, {share:.0%} negative in the median norm), and this "
                          f"model's files are described as holding them around {around:g}")


def _part(tensor: Tensor, model: Model) -> Norm | None:
    """The norm on the residual stream that `tensor` is the weight of; None for one inside a branch."""
    name = tensor.template.removeprefix("layers.{i}.").removesuffix(".weight")
    part = getattr(model.layers[tensor.i] if tensor.i >= 0 else model, name, None)
    return part if isinstance(part, Norm) else None


def duplicates(looks: Iterable[Look], tables: Collection[str]) -> Iterator[Finding]:
    """Tensors that hold the same bytes. tables: stored embedding and head, which may. One finding for two layers."""
    first: dict[tuple[str, tuple[int, ...], str], Unit] = {}
    pairs: dict[tuple[int, int], list[tuple[Unit, Unit]]] = {}
    for u, f in looks:
        if not u.trained or f.constant or f.elements < FEW or (u.held.name in tables):
            continue
        one = first.setdefault((u.held.dtype, u.shape, f.digest), u)
        if one is not u:
            pairs.setdefault((one.layer, u.layer), []).append((one, u))
    for (i, j), some in pairs.items():
        one, u = some[0]
        of = f"{one.held.name}{one.words}"
        text = f"the same bytes as {of}" if i == j else f"the same bytes as {of}, of another layer ({j} as {i})"
        if len(some) > 1:
            text += f"; {len(some) - 1:,} more tensors of " + (f"layer {j}" if i == j else "the two layers") + " too"
        yield Finding(code="duplicate-tensor", level="warning", tensor=u.held.name, message=text)
