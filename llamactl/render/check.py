"""The view of `llamactl check`, and what CI services read: workflow commands for GitHub, JUnit XML for the others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from llamactl.analysis.budget import CheckReport, ModelCheck, Row
from llamactl.errors import printable
from llamactl.render.document import Block, Column, Document, Facts, Table
from llamactl.render.units import count, scaled

_SIGNS = {"exact": "=", "max": "<=", "min": ">="}


def view(reports: Sequence[CheckReport], *, verbose: bool = False, sources: Sequence[str] = (), **_: Any) -> Document:
    """A table a model: name, limit, actual, delta."""
    (r,) = reports
    was = any(row.was is not None for m in r.models for row in m.rows)
    head = (Column(""), Column("name"), Column("limit", "count"), Column("actual", "count"), Column("delta", "count"),
            *((Column("limit before", "count"),) if was else ()))
    blocks: list[Block] = [
        Table(f"{m.reference} ({source})" if source else m.reference, head, tuple(
            ("ok" if row.ok else "FAILS", label(row), f"{_SIGNS[row.bound]} {_value(row, row.limit)}",
             _value(row, row.actual, long=True), _delta(row), *((_was(row),) if was else ())) for row in m.rows))
        for m, source in zip(r.models, sources or [""] * len(r.models), strict=True)]
    held = f"{count(r.limits - r.exceeded)} of {count(r.limits)} hold"
    blocks.append(Facts("", (("budget", r.budget), ("limits", held))))
    if verbose:
        blocks.append(Facts("what is counted", tuple({row.name: row.meaning for m in r.models for row in m.rows}
                                                     .items())))
    columns = ("model", "name", "options", "bound", "limit", "actual", "delta", "unit", "ok", "line")
    main = Table("", tuple(Column(c) for c in columns), tuple(
        (m.reference, row.name, _options(row), row.bound, _word(row.limit), _word(row.actual), row.delta, row.unit,
         _word(row.ok), row.line) for m in r.models for row in m.rows))
    return Document(tuple(blocks), main, (r.exceeded,))


def label(row: Row) -> str:
    """`kv_cache_bytes (ctx 8,192, batch 1, bf16, arch)`: words speak for themselves, and one device is no news."""
    said = ", ".join(f"{k} {count(v)}" if isinstance(v, int) else f"{k.partition('_')[0]} {v}" if "_" in k else v
                     for k, v in row.options.items() if (k, v) != ("tp", 1))
    return f"{row.name} ({said})" if said else row.name


def sentence(row: Row) -> str:
    """What is wrong, or that nothing is, with the numbers."""
    found = f"{label(row)} is {_value(row, row.actual, long=True)}"
    limit = {"exact": "exactly ", "max": "at most ", "min": "at least "}[row.bound] + _value(row, row.limit)
    return f"{found}, the budget says {limit}" + (f" ({_delta(row)})" if row.delta else "")


def github(r: CheckReport, file: str) -> str:
    """Workflow commands, one a limit that does not hold, and a last line that says how many hold.

    file: the budget's path as the repository has it.
    """
    out = []
    for m in r.models:
        for row in m.rows:
            if not row.ok:
                line = "" if row.line is None else f",line={row.line}"
                out.append(f"::error file={_property(file)}{line},title={_property(m.reference)}::"
                           f"{_data(sentence(row))}")
    return "\n".join([*out, f"{r.limits - r.exceeded} of {r.limits} limits hold"]) + "\n"


def _data(text: str) -> str:
    """The escapes of @actions/core; no line may end early and begin a command of its own."""
    return printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def junit(r: CheckReport) -> str:
    """One test suite a model, one test case a limit."""
    out = ['<?xml version="1.0" encoding="UTF-8"?>',
           f'<testsuites name="llamactl check" tests="{r.limits}" failures="{r.exceeded}" errors="0">']
    for m in r.models:
        wrong = sum(not row.ok for row in m.rows)
        out.append(f'  <testsuite name={_xml(m.reference)} tests="{len(m.rows)}" failures="{wrong}" errors="0" '
                   'skipped="0">')
        out += [_case(r, m, row) for row in m.rows]
        out.append("  </testsuite>")
    return "\n".join([*out, "</testsuites>"]) + "\n"


def _case(r: CheckReport, m: ModelCheck, row: Row) -> str:
    line = "" if row.line is None else f' line="{row.line}"'
    case = (f"    <testcase classname={_xml(m.reference)} name={_xml(f'{label(row)} {row.bound}')} "
            f'file={_xml(r.budget)}{line}')
    if row.ok:
        return case + "/>"
    return f'{case}>\n      <failure type="budget" message={_xml(sentence(row))}/>\n    </testcase>'


def _xml(text: str) -> str:
    """A quoted attribute in ASCII; noncharacters, which XML cannot hold, are written out."""
    text = re.sub("[\ufffe\uffff]", lambda m: f"\\u{ord(m[0]):x}", printable(text))
    for mark, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("'", "&apos;")):
        text = text.replace(mark, entity)
    return '"' + text.encode("ascii", "xmlcharrefreplace").decode("ascii") + '"'


def _options(row: Row) -> str:
    return " ".join(f"{k}={v}" for k, v in row.options.items())


def _value(row: Row, value: int | str | bool | None, long: bool = False) -> str:
    """A limit or an actual value; long: in GB and GiB as well."""
    if value is None:
        return "no limit of its own"
    if isinstance(value, bool | str):
        return str(_word(value))
    if row.unit != "bytes":
        return count(value)
    short = scaled(value) if long else ""
    return f"{count(value)} B" + (f" ({short})" if short else "")


def _word(value: int | str | bool | None) -> int | str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else value


def _delta(row: Row) -> str:
    if row.delta is None:
        return "-"
    return f"{row.delta:+,}" + (" B" if row.unit == "bytes" else "") if row.delta else "0"


def _was(row: Row) -> str:
    return "-" if row.was is None else _value(row, row.was)
