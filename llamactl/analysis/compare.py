"""Models side by side: what each is made of, what it costs, and the difference told as edits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llamactl.analysis.kvcache import kv_cache
from llamactl.analysis.params import params
from llamactl.spec.features import features, shown
from llamactl.spec.model import Model
from llamactl.spec.path import path


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One model of a comparison. features: feature -> words. kv_*: per token in bfloat16, whatever the config's dtype.

    total_ratio, kv_ratio: against the first model. active: per token, without the input embedding; None if dense.
    """

    id: str
    family: str
    model_type: str
    features: dict[str, str]
    total: int
    active: int | None
    ffn_share_blocks: float
    weights_bytes: int
    dtype: str
    kv_elements_per_token: int
    kv_bytes_per_token_bf16: int
    total_ratio: float
    kv_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A feature in which the models differ, each model's words in order."""

    feature: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareReport:
    """What `llamactl compare` says. same: no feature differs and all costs are equal."""

    models: tuple[Card, ...]
    differences: tuple[Difference, ...]
    same: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the names that schema 1 fixes."""
        return asdict(self)

    def told(self) -> tuple[str, ...]:
        """The features to show: what most models have none of only where one of these has."""
        return shown([m.features for m in self.models])

    def _repr_html_(self) -> str:
        from llamactl.render import html

        return html("compare", [self])


def compare(models: Sequence[tuple[str, Model]]) -> CompareReport:
    """Compare (id, model) pairs; the first is what ratios are measured against."""
    told = [dict(features(m)) for _, m in models]
    costs = [(params(m, id=i), kv_cache(m, 1, dtype="bf16", id=i)) for i, m in models]
    first, cache = costs[0]
    kept = [c.elements_per_token_full + c.elements_per_token_windowed for _, c in costs]
    cards = tuple(
        Card(id=p.id, family=p.family, model_type=p.model_type, features=f, total=p.total,
             active=p.active.minus_input_embedding if p.active else None, ffn_share_blocks=p.ffn_share_blocks,
             weights_bytes=p.weights_bytes, dtype=p.dtype, kv_elements_per_token=k, kv_bytes_per_token_bf16=2 * k,
             total_ratio=p.total / first.total, kv_ratio=k / kept[0] if kept[0] else 0.0)
        for f, (p, _), k in zip(told, costs, kept, strict=True))
    names = list(dict.fromkeys(name for f in told for name in f))
    differ = tuple(Difference(feature=n, values=tuple(f[n] for f in told)) for n in names
                   if len({f[n] for f in told}) > 1)
    equal = all((c.total, c.kv_elements_per_token) == (first.total, kept[0]) for c in cards)
    assert cache.id == first.id
    return CompareReport(models=cards, differences=differ, same=equal and not differ)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolveStep:
    """One edit on the way. edits: what `--set` takes; empty for the start and for what no edit describes."""

    title: str
    edits: tuple[str, ...]
    total: int
    ffn_share_blocks: float
    kv_elements_per_token: int
    kv_bytes_per_token_bf16: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolveReport:
    """What `llamactl evolve A B` says: the start, then each step; the last one costs what B costs."""

    start: str
    goal: str
    steps: tuple[EvolveStep, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the names that schema 1 fixes."""
        return asdict(self)

    def _repr_html_(self) -> str:
        from llamactl.render import html

        return html("evolve", [self])


def evolve(a: Model, b: Model, *, start: str, goal: str) -> EvolveReport:
    """Walk from `a` to `b`, costing the model after every edit."""
    steps = [_step(start, (), a), *(_step(s.title, s.edits, s.model) for s in path(a, b))]
    return EvolveReport(start=start, goal=goal, steps=tuple(steps))


def _step(title: str, edits: tuple[str, ...], model: Model) -> EvolveStep:
    p, c = params(model), kv_cache(model, 1, dtype="bf16")
    kept = c.elements_per_token_full + c.elements_per_token_windowed
    return EvolveStep(title=title, edits=edits, total=p.total, ffn_share_blocks=p.ffn_share_blocks,
                      kv_elements_per_token=kept, kv_bytes_per_token_bf16=2 * kept)
