"""Models held to budgets: each limit beside the actual number, and the difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from llamactl.analysis.dtypes import weights
from llamactl.analysis.kvcache import kv_cache
from llamactl.analysis.limits import KEYS, Budget, Limit, Path, Value
from llamactl.analysis.params import Active, ParamsReport, params
from llamactl.errors import InputRefused, NotAvailable, UsageError
from llamactl.spec.model import Model

# What analysis cannot judge by itself, because it reads files: (the limit, the actual value) of a Limit.
Probe = Callable[[Limit], tuple[Value, Value]]
Notes = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One limit and what was found. bound: exact | max | min. unit: count | bytes | tokens | flag | word.

    actual: None where the model sets no such limit, which satisfies a min alone. delta = actual - limit, None for words
    and flags. options: what the number depends on, resolved. line: of the limit in the file. was: the limit before
    `--update`, None if it stayed.
    """

    name: str
    options: dict[str, int | str]
    bound: str
    limit: Value
    actual: Value | None
    delta: int | None
    unit: str
    ok: bool
    line: int | None
    was: Value | None
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """One model's rows, in the order of the file. reference: the model as the file names it."""

    id: str
    reference: str
    family: str
    model_type: str
    ok: bool
    rows: tuple[Row, ...]
    notes: Notes


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What `llamactl check` says. budget: the file. limits: how many were judged, exceeded: how many do not hold."""

    budget: str
    ok: bool
    limits: int
    exceeded: int
    models: tuple[ModelCheck, ...]

    @property
    def notes(self) -> Notes:
        return tuple(n for m in self.models for n in m.notes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the names that schema 1 fixes."""
        body = asdict(self)
        for model in body["models"]:
            del model["notes"]
        return body

    def _repr_html_(self) -> str:
        from llamactl.render import html

        return html("check", [self])


def check_report(path: str, models: Sequence[ModelCheck]) -> CheckReport:
    """The checks of one file's models, summed up."""
    rows = [row for m in models for row in m.rows]
    exceeded = sum(not row.ok for row in rows)
    return CheckReport(budget=path, ok=not exceeded, limits=len(rows), exceeded=exceeded, models=tuple(models))


def judge(budget: Budget, model: Model, *, id: str | None = None, probes: Mapping[str, Probe] | None = None,
          ) -> ModelCheck:
    """Hold `model` to `budget`. probes: key -> how to judge what a description alone does not say (fit, inspect).

    Raises InputRefused for a limit that cannot be judged on this model (tp that does not divide its heads, an engine
    without the dtype, no probe).
    """
    counted = params(model, id=id)
    rows: list[Row] = []
    notes: dict[tuple[str, str], None] = dict.fromkeys(budget.notes)
    for limit in budget.limits:
        try:
            row, said = _judge(limit, model, counted, probes or {})
        except UsageError as e:
            line = f"line {limit.line}: " if limit.line else ""
            raise InputRefused(e.code, f"{line}{budget.reference} {limit.key}: {e.message}", path=budget.path,
                               help=e.help) from None
        except NotAvailable as e:  # a device that nobody knows
            e.path = e.path or budget.path
            raise
        rows.append(row)
        notes.update(dict.fromkeys(said))
    return ModelCheck(id=id or model.model_type, reference=budget.reference, family=model.family,
                      model_type=model.model_type, ok=all(r.ok for r in rows), rows=tuple(rows), notes=tuple(notes))


def _judge(limit: Limit, model: Model, counted: ParamsReport, probes: Mapping[str, Probe]) -> tuple[Row, Notes]:
    wanted: Value = limit.value
    actual: Value | None
    options = limit.options
    notes: Notes = ()
    if limit.key in ("fit", "inspect"):
        if limit.key not in probes:
            raise UsageError("budget-unsupported", f"this llamactl cannot judge {limit.key}",
                             help="a later version can; take it out of the budget until then")
        wanted, actual = probes[limit.key](limit)
    else:
        actual, options, notes = _measure(limit, model, counted)
    words = isinstance(wanted, bool | str) or isinstance(actual, bool | str) or actual is None
    return Row(
        name=limit.key, options={k: v for k, v in options.items() if v is not None}, bound=limit.bound, limit=wanted,
        actual=actual, delta=None if words else _minus(actual, wanted), unit=KEYS[limit.key].unit,
        ok=_holds(limit.bound, wanted, actual), line=limit.line, was=None, meaning=KEYS[limit.key].meaning), notes


def _minus(actual: Any, limit: Any) -> int:
    return int(actual - limit)


def _holds(bound: str, limit: Any, actual: Any) -> bool:
    if actual is None:  # no limit of its own: more than any
        return bound == "min"
    return bool(actual == limit if bound == "exact" else actual <= limit if bound == "max" else actual >= limit)


def _measure(limit: Limit, model: Model, counted: ParamsReport) -> tuple[Value | None, dict[str, Any], Notes]:
    """(the number, the options with the model's own values filled in, warnings)."""
    o = limit.options
    if limit.key == "active_params":
        return getattr(_active(counted), o["convention"]), o, ()
    if limit.key == "weights_bytes":
        cost = weights(model, o["dtype"])
        return cost.bytes, {"dtype": cost.dtype}, counted.notes if o["dtype"] is None else ()
    if limit.key == "kv_cache_bytes":
        r = kv_cache(model, o["ctx"], batch=o["batch"], dtype=o["dtype"], engine=o["engine"], tp=o["tp"])
        return r.at[0].kv_cache_bytes, {**o, "dtype": r.k_dtype}, r.notes
    if limit.key == "kv_bytes_per_token":
        r = kv_cache(model, 1, dtype=o["dtype"], tp=o["tp"])
        return sum(g.bytes_per_token for g in r.groups), {**o, "dtype": r.k_dtype}, r.notes
    plain: dict[str, Value | None] = {
        "params": counted.total, "text_params": counted.text_total, "context": model.context.usable,
        "tied": model.tied, "layers": model.n_layers, "vocab": model.embed.vocab, "family": model.family,
    }
    return plain[limit.key], o, ()


def _active(counted: ParamsReport) -> Active:
    """The report has it for mixtures of experts; of a dense model every parameter is active."""
    if counted.active is not None:
        return counted.active
    all, embedding, head = counted.text_total, counted.components.token_embedding, counted.components.lm_head
    return Active(all=all, minus_input_embedding=all - embedding, minus_embedding_and_head=all - embedding - head)


def updates(budget: Budget, check: ModelCheck) -> dict[Path, Value]:
    """What `--update` writes, by path below the model: exact values that differ, and a max that is exceeded.

    A max that holds keeps its headroom; a min, a fit and the state of files are never made to pass.
    """
    found: dict[Path, Value] = {}
    for limit, row in zip(budget.limits, check.rows, strict=True):
        if not row.ok and row.actual is not None and limit.bound != "min" and limit.key not in ("fit", "inspect"):
            found[limit.at] = row.actual
    return found


def updated(budget: Budget, check: ModelCheck) -> ModelCheck:
    """`check` after its `updates` were written: these rows now hold, and say what stood there."""
    changed = updates(budget, check)
    rows = tuple(
        replace(row, ok=True, limit=changed[limit.at], was=row.limit, delta=None if row.delta is None else 0)
        if limit.at in changed else row for limit, row in zip(budget.limits, check.rows, strict=True))
    return replace(check, rows=rows, ok=all(r.ok for r in rows))
