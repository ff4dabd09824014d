"""What `check` composes: budgets of a file, probes that read devices and weights, and the formats of CI services."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from llamactl.analysis.budget import CheckReport, Probe
from llamactl.analysis.limits import Budget, Limit, Path, Value, near, read_budget
from llamactl.api import Loaded
from llamactl.cli.options import Access
from llamactl.errors import OutputError, UsageError
from llamactl.source.budget import BudgetFile
from llamactl.source.budgetwrite import rewrite


def chosen(file: BudgetFile, model: str | None) -> list[Budget]:
    """Every budget of the file, or that of the one model named. All of the file is read, so that no error hides."""
    lines: dict[str, dict[Path, int]] = {}
    for at, line in file.lines().items():
        lines.setdefault(str(at[0]), {})[at[1:]] = line
    every = {ref: read_budget(ref, table, path=file.path, lines=lines.get(ref)) for ref, table in file.tables.items()}
    if model is None:
        return list(every.values())
    if model not in every:
        raise UsageError("no-budget", f"{file.path} has no budget for {model!r}", help=near(model, every))
    return [every[model]]


def probes(loaded: Loaded, reach: Access) -> dict[str, Probe]:
    """How to judge `fit` and `inspect`, as far as this llamactl has them."""
    found: dict[str, Probe] = {}
    if find_spec("llamactl.analysis.fit") and find_spec("llamactl.source.gpus"):
        found["fit"] = lambda limit: _fit(loaded, limit)
    if find_spec("llamactl.analysis.inspect") and find_spec("llamactl.cli.checkpoint"):
        found["inspect"] = lambda limit: ("clean", _inspect(loaded, reach))
    return found


def _fit(loaded: Loaded, limit: Limit) -> tuple[Value, Value]:
    """(memory of one device, what it would hold), both in bytes."""
    o = limit.options
    gpu, devices = import_module("llamactl.source.gpus").find(o["gpu"])
    r: Any = import_module("llamactl.analysis.fit").fit(
        loaded.model, gpu, devices, o["ctx"], batch=o["batch"], weights=o["weights_dtype"], kv=o["kv_dtype"],
        tp=o["tp"], id=loaded.id)
    return int(r.memory_bytes), int(r.total_bytes)


def _inspect(loaded: Loaded, reach: Access) -> str:
    """`clean`, or what is not; of a Hub model by the headers of its files."""
    source = loaded.source
    remote = source.source == "hub"
    revision = f"@{source.revision}" if source.revision else ""
    ref = f"{source.id}{revision}" if remote else source.folder or source.path or source.id
    r: Any = import_module("llamactl.cli.checkpoint").open_checkpoint(ref, reach, remote=remote).report
    if r.clean:
        return "clean"
    wrong = [f"{len(x):,} {what}" for x, what in ((r.missing, "missing"), (r.unexpected, "unexpected"),
                                                 (r.reshaped, "shaped otherwise")) if x]
    return ", ".join(wrong or ([r.not_judged] if r.not_judged else dict.fromkeys(code for code, _ in r.notes)))


def write(file: BudgetFile, changes: Mapping[Path, Value]) -> None:
    """Rewrite the limits, and say so on stderr."""
    if changes:
        rewrite(file, changes)
    print(f"{file.path}: {len(changes)} limit{'' if len(changes) == 1 else 's'} updated", file=sys.stderr)


def own_format(report: CheckReport, format: str) -> str | None:
    """The report for a CI service, None for the formats that every command has."""
    if format not in ("github", "junit"):
        return None
    from llamactl.render import check

    if format == "junit":
        return check.junit(report)
    _summary(report)
    return check.github(report, _in_repository(report.budget))


def _in_repository(path: str) -> str:
    """The path from the top of the checkout, by which GitHub finds the line to mark."""
    top = os.environ.get("GITHUB_WORKSPACE")
    if not top:
        return path
    inside = os.path.relpath(os.path.realpath(path), os.path.realpath(top))
    return path if inside.startswith("..") else inside


def _summary(report: CheckReport) -> None:
    """Append the table to the page of the job, where GitHub gives a file for it."""
    file = os.environ.get("GITHUB_STEP_SUMMARY")
    if not file:
        return
    from llamactl.render import document, render

    try:
        with open(file, "a", encoding="utf-8") as f:
            f.write(render(document("check", [report]), "md") + "\n")
    except OSError as e:
        raise OutputError("summary", f"GITHUB_STEP_SUMMARY could not be written: {e.strerror}", path=file) from None
