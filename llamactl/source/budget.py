"""Budget files: found, read with suspicion, and rewritten in place where a limit is changed on purpose."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from llamactl.errors import InputRefused, NotAvailable, UsageError
from llamactl.source import is_path, presets
from llamactl.source.tomlspans import Path, Spans, toml_spans
from llamactl.spec.jsontext import MAX_DEPTH, read_bytes, too_deep

MAX_BUDGET_BYTES = 256 * 1000
EXAMPLE = ("write [tool.llamactl.budget.\"llama-3-8b\"] with params = 8030261248 into pyproject.toml, or name a file: "
           "llamactl check budget.toml")
_ROOT = ("tool", "llamactl", "budget")
# tomllib takes quadratic time over a dotted key of a hundred thousand parts.
_LONG_KEY = re.compile(r"""(?:(?:(?<![\w-])[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){65}""")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetFile:
    """A budget file as it was read. tables: model reference -> what is asked of it, raw.

    root: where in the file the tables stand. spans: path below root -> (start, end) in text. bom: it began with one.
    """

    path: str
    raw: bytes
    text: str
    bom: bool
    root: tuple[str, ...]
    tables: dict[str, Any]
    spans: Spans

    def lines(self) -> Mapping[Path, int]:
        """Path below root -> line of the value, from 1."""
        ends = list(accumulate(len(line) for line in self.text.split("\n")))
        starts = [end + n for n, end in enumerate(ends, 1)]  # offset of each line after the first
        return {at: 1 + bisect_right(starts, start) for at, (start, _) in self.spans.items()}


def find(budget: str | None) -> str:
    """The path of the budget: as given, or the nearest pyproject.toml from the current folder upwards."""
    if budget is not None:
        path = os.path.expanduser(budget)
        return os.path.join(path, "pyproject.toml") if os.path.isdir(path) else path
    try:
        folder = here = os.getcwd()
    except OSError as e:
        raise NotAvailable("not-found", f"the current folder: {e.strerror}") from None
    while not os.path.lexists(os.path.join(folder, "pyproject.toml")):
        if folder == os.path.dirname(folder):
            raise UsageError("no-budget", "no BUDGET given, and no pyproject.toml here or above", help=EXAMPLE)
        folder = os.path.dirname(folder)
    return os.path.relpath(os.path.join(folder, "pyproject.toml"), here)


def read(budget: str | None) -> BudgetFile:
    """The budgets of a pyproject.toml, a TOML or a YAML file; None: see `find`.

    Raises UsageError (nothing found), NotAvailable (no such file), InputRefused (malformed, with the line if known).
    """
    path = find(budget)
    if not path.lower().endswith((".toml", ".yaml", ".yml")):
        raise InputRefused("budget-format", "a budget is a .toml, .yaml or .yml file", path=path, help=EXAMPLE)
    file = parse(read_bytes(path, limit=MAX_BUDGET_BYTES), path)
    if not file.tables:
        if budget is None:
            raise UsageError("no-budget", f"{path} has no [tool.llamactl.budget]", help=EXAMPLE)
        raise InputRefused("budget-empty", "holds no budget", path=path, help=EXAMPLE)
    return file


def parse(raw: bytes, path: str) -> BudgetFile:
    """Parse untrusted bytes by the ending of `path`. Raises InputRefused, never anything else."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise InputRefused("budget-encoding", f"line {line}: not UTF-8", path=path, help="save it as UTF-8") from None
    bom, text = text.startswith("\ufeff"), text.removeprefix("\ufeff")
    data, spans = _toml(text, path) if path.lower().endswith(".toml") else _yaml(text, path)
    root = _ROOT if "tool" in data or os.path.basename(path) == "pyproject.toml" else ()
    for n, key in enumerate(root):
        data = data.get(key, {})
        if not isinstance(data, dict):
            raise InputRefused("budget-type", f"{'.'.join(root[:n + 1])} is not a table", path=path)
    below = {at[len(root):]: span for at, span in spans.items() if at[:len(root)] == root}
    return BudgetFile(path=path, raw=raw, text=text, bom=bom, root=root, tables=data, spans=below)


def _toml(text: str, path: str) -> tuple[dict[str, Any], Spans]:
    import tomllib

    deep = InputRefused("budget-depth", f"nested deeper than {MAX_DEPTH} levels", path=path)
    if _LONG_KEY.search(text):
        raise deep
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise deep from None
    except ValueError as e:
        said = str(e).replace("at end of document", f"at line {text.count(chr(10)) + 1}, the end of the file")
        raise InputRefused("budget-syntax", f"not TOML: {said}", path=path) from None
    if too_deep(data):
        raise deep
    return data, toml_spans(text)


def _yaml(text: str, path: str) -> tuple[dict[str, Any], Spans]:
    from llamactl.source.yamlvalues import read_yaml

    data, spans = read_yaml(text, path)
    if data is None:
        return {}, {}
    if not isinstance(data, dict):
        raise InputRefused("budget-type", "not a table of models", path=path, help="write MODEL: {params: 8030261248}")
    return data, spans


def located(ref: str, budget: str, *, hub: bool = False) -> str:
    """`ref` as a budget file means it: a relative path starts at the file's own folder, never at the current one."""
    if ref.startswith(("preset:", "hf://")):
        return ref
    path = os.path.expanduser(ref)
    if os.path.isabs(path):
        return path
    there = os.path.join(os.path.dirname(budget) or ".", path)
    if is_path(ref) or os.path.lexists(there):
        return there if there.startswith((".", "/")) else os.path.join(".", there)
    if not os.path.lexists(path):
        return ref
    return f"hf://{ref}" if hub or "@" in ref or presets.find(ref) is None else f"preset:{ref}"
