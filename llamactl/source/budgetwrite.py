"""Change values inside a budget file: only their own characters, all or nothing."""

from __future__ import annotations

import copy
import json
import os
import stat
from collections.abc import Mapping
from typing import Any

from llamactl.atomic import put
from llamactl.errors import InputRefused, OutputError
from llamactl.source.budget import BudgetFile, parse
from llamactl.source.tomlspans import Path


def rewrite(file: BudgetFile, changes: Mapping[Path, int | str | bool]) -> None:
    """Put the new values where the old ones stand; comments, order and layout stay.

    The new text is read again first, and must differ from the old in these values alone.
    Raises OutputError where that cannot be had, or where the file changed since it was read; the old file then stays.
    """
    text = _edited(file, changes)
    raw = (b"\xef\xbb\xbf" if file.bom else b"") + text.encode("utf-8")
    wanted = copy.deepcopy(file.tables)
    for at, value in changes.items():
        _put(wanted, at, value)
    try:
        same = parse(raw, file.path).tables == wanted
    except InputRefused:
        same = False
    if not same:
        raise _unsafe(file, "the new text would not say what it should")
    _replace(file, raw)


def _edited(file: BudgetFile, changes: Mapping[Path, int | str | bool]) -> str:
    text = file.text
    for at in sorted(changes, key=lambda at: file.spans.get(at, (-1, 0)), reverse=True):
        if at not in file.spans:
            raise _unsafe(file, f"{'.'.join(map(str, at))} is not a value on its own")
        start, end = file.spans[at]
        text = text[:start] + _literal(changes[at], text[start:end]) + text[end:]
    return text


def _literal(value: int | str | bool, old: str) -> str:
    """As TOML and YAML both write it; digits stay grouped where they were."""
    if isinstance(value, bool) or not isinstance(value, int):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:_}" if "_" in old else str(value)


def _put(tables: Any, at: Path, value: int | str | bool) -> None:
    for key in at[:-1]:
        tables = tables[key]
    tables[at[-1]] = value


def _unsafe(file: BudgetFile, why: str) -> OutputError:
    return OutputError("budget-update", f"not updated: {why}", path=file.path, help="change the limits by hand")


def _replace(file: BudgetFile, raw: bytes) -> None:
    path = os.path.realpath(file.path)

    def unchanged() -> None:
        with open(path, "rb") as f:
            if f.read(len(file.raw) + 1) != file.raw:
                raise _unsafe(file, "the file was changed meanwhile")

    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) or not os.access(path, os.W_OK):
            raise _unsafe(file, "the file is read-only")
        put(path, raw, stat.S_IMODE(mode), unchanged)
    except OSError as e:
        raise OutputError("budget-update", f"not updated: {e.strerror or e}", path=file.path) from None
