"""Two checkpoints tensor by tensor, as a report; and where their descriptions differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Any

from llamactl.analysis.layers import Ranges, ranges
from llamactl.spec.model import Model

STATUSES = ("equal", "dtype", "rounding", "different", "shape", "missing")
DIFFER = ("different", "shape", "missing")
EXACT_ONLY = ("dtype", "rounding")  # equal, unless bits are what is asked for
# What bears on a result. Towers and families' own tensors are compared as tensors alone.
_PARTS = ("embed", "positions", "embed_norm", "norm", "head")
# Fields that say no more than which tensors there are, and these are compared one by one.
_TENSORS = {"bias", "qkv_bias", "o_bias", "router_bias", "tied"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two checkpoints. tensors: stored ones, of whatever meaning. tied: as its config says."""

    id: str
    family: str
    model_type: str
    layout: str
    path: str
    parameters: int
    tensors: int
    tied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """How far two tensors of one shape are apart, element by element.

    differing: elements whose values differ. max_abs: the largest |a - b| of finite pairs, null where there are none.
    relative: max_abs / the largest finite |a|, null where that is 0. nans: NaNs in a and in b. not_finite: differing
    elements of which one is infinite or NaN.
    """

    elements: int
    differing: int
    max_abs: float | None
    relative: float | None
    nans: tuple[int, int]
    not_finite: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """One tensor under its canonical name, or the stored one where the model has no part for it.

    status: equal (bit for bit), dtype (one side is the other in its own type), rounding (equal up to the rounding of
    the 1 that a layout adds), different, shape, missing (on one side). Of both sides: stored (names in the files),
    dtypes (as stored), shapes (canonical). numbers: null where nothing was computed.
    """

    name: str
    status: str
    stored: tuple[tuple[str, ...], tuple[str, ...]]
    dtypes: tuple[str | None, str | None]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    numbers: Numbers | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A part in which the descriptions differ, as each says it. layers: closed ranges, none for what is no layer's."""

    part: str
    layers: Ranges
    values: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Tensors by status."""

    equal: int
    dtype: int
    rounding: int
    different: int
    shape: int
    missing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """What `llamactl diff` says. strict: whether another dtype is a difference. differing: tensors that differ by that.

    same: no tensor and nothing in the descriptions differs.
    """

    models: tuple[Side, Side]
    same: bool
    strict: bool
    differing: int
    counts: Counts
    descriptions: tuple[Change, ...]
    tensors: tuple[TensorDiff, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `result`."""
        return asdict(self)

    def _repr_html_(self) -> str:
        from llamactl.render import html

        return html("diff", [self])


def report(models: tuple[Side, Side], descriptions: Sequence[Change], tensors: Sequence[TensorDiff], *, strict: bool
           ) -> DiffReport:
    """The tensors counted and judged."""
    by = Counter(t.status for t in tensors)
    differing = sum(by[s] for s in (*DIFFER, *(EXACT_ONLY if strict else ())))
    return DiffReport(models=models, same=not differing and not descriptions, strict=strict, differing=differing,
                      counts=Counts(**{s: by[s] for s in STATUSES}), descriptions=tuple(descriptions),
                      tensors=tuple(tensors))


def described(a: Model, b: Model) -> tuple[Change, ...]:
    """Every difference of two descriptions that bears on a result, but for what the tensors say themselves."""
    out = [] if a.n_layers == b.n_layers else [Change(part="layers", layers=(), values=(f"{a.n_layers:,}",
                                                                                        f"{b.n_layers:,}"))]
    for part in _PARTS:
        out += [Change(part=p, layers=(), values=v) for p, v in _changes(getattr(a, part), getattr(b, part), part)]
    told: dict[tuple[int, int], list[tuple[str, tuple[str, str]]]] = {}  # layers are few objects, many times
    where: dict[tuple[str, tuple[str, str]], list[int]] = {}
    for i, (x, y) in enumerate(zip(a.layers, b.layers, strict=False)):
        if (id(x), id(y)) not in told:
            told[id(x), id(y)] = list(_changes(x, y, ""))
        for change in told[id(x), id(y)]:
            where.setdefault(change, []).append(i)
    return (*out, *(Change(part=p, layers=ranges(at), values=v) for (p, v), at in where.items()))


def _changes(a: object, b: object, where: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """(dotted part, both values) of the innermost differences."""
    if a == b or where.rpartition(".")[2] in _TENSORS:
        return
    if is_dataclass(a) and type(a) is type(b):
        for f in fields(a):
            yield from _changes(getattr(a, f.name), getattr(b, f.name), f"{where}.{f.name}".lstrip("."))
        return
    one, other = _say(a), _say(b)
    yield where, (one, other) if one != other else (repr(a), repr(b))


def _say(value: object) -> str:
    """A value in short: of a part what is not its default."""
    if value is None or value is False:
        return "none" if value is None else "no"
    if is_dataclass(value):
        own = ((f, getattr(value, f.name)) for f in fields(value) if f.compare)
        words = [f"{f.name} {_say(x)}" for f, x in own if f.default is MISSING or x != f.default]
        return f"{type(value).__name__} ({', '.join(words)})"
    if isinstance(value, tuple) and len(value) > 8:
        return f"{len(value):,} values, {_say(value[0])} to {_say(value[-1])}"
    if isinstance(value, tuple):
        return f"[{_list(value)}]"
    return "yes" if value is True else f"{value:.10g}" if isinstance(value, float) else str(value)


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(_say, values))
