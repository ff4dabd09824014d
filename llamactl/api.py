"""The Python API: `load` a model reference, then cost it with the same frozen reports that the commands print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamactl import arch
from llamactl.source import Resolved, resolve
from llamactl.spec.model import Model

if TYPE_CHECKING:
    from llamactl.analysis.compare import CompareReport, EvolveReport
    from llamactl.analysis.fit import FitReport
    from llamactl.analysis.flops import FlopsReport
    from llamactl.analysis.kvcache import KvCacheReport
    from llamactl.analysis.params import ParamsReport
    from llamactl.analysis.rope import RopeReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A described model and where it came from. edits: the `key=value` edits already applied."""

    model: Model
    source: Resolved
    edits: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return self.source.id

    @property
    def warnings(self) -> tuple[tuple[str, str], ...]:
        """(code, message) of everything odd but acceptable in the source and the config."""
        return (*self.source.notes, *self.model.notes)


def load(ref: str | None = None, *, edits: Sequence[str] = (), offline: bool = False, hub: bool = False) -> Loaded:
    """Describe the model that `ref` names: a folder, config.json, GGUF file, preset or Hub id `ORG/NAME[@REV]`.

    edits: changes such as "n_kv_heads=1" (see llamactl.spec.edits). offline: never open a socket. hub: ask the Hub even
    where a preset is bundled. Raises llamactl.errors.LlamactlError.
    """
    found = resolve(ref, offline=offline, hub=hub)
    model = describe(found)
    if edits:
        from llamactl.spec.edits import apply

        for edit in edits:
            model = apply(model, edit)
    return Loaded(model=model, source=found, edits=tuple(edits))


def describe(found: Resolved) -> Model:
    """The Model that a resolved reference says. Raises InputRefused."""
    where = found.path or f"preset:{found.id}"
    if found.form == "hf":
        return arch.describe(found.config, where)
    if found.form == "meta":
        from llamactl.arch._meta import from_params

        return arch.describe(from_params(found.config, where), where)
    from llamactl.arch._gguf import describe_gguf
    from llamactl.checkpoint.ggufparts import read_parts

    assert found.path is not None
    return describe_gguf(read_parts(found.path), where)


def _loaded(model: Loaded | str) -> Loaded:
    return load(model) if isinstance(model, str) else model


def params(model: Loaded | str, *, dtype: str | None = None) -> ParamsReport:
    """Parameters by component, active per token, bytes. model: what `load` gave, or a reference. dtype: of weights."""
    from llamactl.analysis.params import params as count

    loaded = _loaded(model)
    return count(loaded.model, id=loaded.id, dtype=dtype)


def kv_cache(
    model: Loaded | str,
    ctx: int | Sequence[int],
    *,
    batch: int | Sequence[int] = 1,
    dtype: str | Sequence[str] | None = None,
    k_dtype: str | None = None,
    v_dtype: str | None = None,
    tp: int = 1,
    engine: str = "arch",
    step: int | None = None,
    expanded: bool = False,
) -> KvCacheReport:
    """Bytes of the KV cache at `ctx` tokens (one or several) x `batch` sequences; see analysis.kvcache.kv_cache."""
    from llamactl.analysis.kvcache import kv_cache as cost

    loaded = _loaded(model)
    return cost(loaded.model, ctx, batch=batch, dtype=dtype, k_dtype=k_dtype, v_dtype=v_dtype, tp=tp, engine=engine,
                step=step, expanded=expanded, id=loaded.id)


def flops(model: Loaded | str, tokens: int, *, phase: str = "prefill", batch: int = 1) -> FlopsReport:
    """Multiply-adds x 2 of a prompt of `tokens`, or of one token more ("decode"); see analysis.flops.flops."""
    from llamactl.analysis.flops import flops as count

    loaded = _loaded(model)
    return count(loaded.model, tokens, phase=phase, batch=batch, id=loaded.id)


def fit(
    model: Loaded | str,
    gpu: str,
    ctx: int,
    *,
    batch: int = 1,
    weights: str | None = None,
    kv: str | None = None,
    tp: int | None = None,
    overhead: int = 1 << 30,
    step: int = 2048,
) -> FitReport:
    """Whether a model fits on `gpu` ("h100-80gb", "h100-80gbx4", "auto"); see analysis.fit.fit."""
    from llamactl.analysis.fit import fit as judge
    from llamactl.source.gpus import find

    loaded = _loaded(model)
    device, devices = find(gpu)
    return judge(loaded.model, device, devices, ctx, batch=batch, weights=weights, kv=kv, tp=tp, overhead=overhead,
                 step=step, id=loaded.id)


def rope(model: Loaded | str, *, target: int | None = None, method: str | None = None) -> RopeReport:
    """Every rotated pair, as trained and as stretched; see analysis.rope.rope."""
    from llamactl.analysis.rope import rope as read

    loaded = _loaded(model)
    return read(loaded.model, id=loaded.id, target=target, method=method)


def compare(*models: Loaded | str) -> CompareReport:
    """Models side by side, the first the measure of the others."""
    from llamactl.analysis.compare import compare as compared

    return compared([(x.id, x.model) for x in map(_loaded, models)])


def evolve(start: Loaded | str, goal: Loaded | str) -> EvolveReport:
    """From one model to another, one edit at a time."""
    from llamactl.analysis.compare import evolve as walk

    a, b = _loaded(start), _loaded(goal)
    return walk(a.model, b.model, start=a.id, goal=b.id)
