"""Print a command's reports in the asked format, and its warnings on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from llamactl.cli.options import Output
from llamactl.errors import printable

if TYPE_CHECKING:
    from llamactl.api import Loaded

Warnings = Iterable[tuple[str, str]]


def show(command: str, loaded: Sequence[Loaded], reports: Sequence[Any], inputs: dict[str, Any], out: Output,
         *, warnings: Warnings = (), result: dict[str, Any] | None = None, text: str | None = None,
         **view: Any) -> None:
    """The answer on stdout, warnings on stderr.

    result: the JSON's `result`, where it is not one report a model. text: the answer in a format that this command
    alone has. view: what the command's own view needs to know.
    """
    said = [w for x in loaded for w in x.warnings] + [w for r in reports for w in getattr(r, "notes", ())]
    said = list(dict.fromkeys([*said, *warnings, *(w for f in view.get("files") or () for w in f.warnings)]))
    if out.format == "json" and not out.quiet:
        body = result or {"models": _models(loaded, reports, view)}
        print_json(command, [x.source.to_dict() for x in loaded], body, inputs, said)
        return
    _warn(said)
    if text is not None and not out.quiet:
        sys.stdout.write(text)
        return
    from llamactl.render import document, render

    if out.verbose:
        view["reads"] = [x.model.reads if x.model else () for x in loaded]  # inspect may have no model
    view["sources"] = [f"source: {x.source.source}" + "".join(f", {e}" for e in x.edits) for x in loaded]
    if command in ("kv-cache", "rope", "ablate", "verify"):
        view["chart"] = out.format == "table"
    doc = document(command, reports, verbose=out.verbose, **view)
    if out.quiet:
        sys.stdout.write("".join(f"{n}\n" for n in doc.primary))
    else:
        sys.stdout.write(render(doc, out.format, color=out.color))


def _models(loaded: Sequence[Loaded], reports: Sequence[Any], view: dict[str, Any]) -> list[dict[str, Any]]:
    models = []
    for n, (x, r) in enumerate(zip(loaded, reports, strict=True)):
        body = {"id": r.id, "source": x.source.to_dict(), **r.to_dict()}
        body.pop("notes", None)
        if view.get("files"):
            body["files"] = view["files"][n].to_dict()
        models.append(body)
    return models


def print_json(command: str, sources: Sequence[dict[str, Any]], result: dict[str, Any],
               inputs: dict[str, Any], warnings: Warnings) -> None:
    """The envelope that every command shares. `model` is the one model asked about, null for several."""
    import json

    body = {
        "schema": 1,
        "command": command,
        "model": sources[0] if len(sources) == 1 else None,
        "inputs": inputs,
        "result": result,
        "warnings": [{"code": code, "message": printable(message)} for code, message in warnings],
    }
    sys.stdout.write(json.dumps(body, indent=2, allow_nan=False) + "\n")


def _warn(warnings: Warnings) -> None:
    for code, message in warnings:
        print(f"warning[{code}]: {printable(message)}", file=sys.stderr)


def draw(command: str, reports: Sequence[Any], file: str | None, force: bool) -> None:
    """The picture that --plot asks for; before the answer, so that a failure leaves stdout empty."""
    if file is not None:
        from llamactl.atomic import create
        from llamactl.render.plot import picture

        create(file, picture(command, reports, file), force=force)
