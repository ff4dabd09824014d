"""`llamactl presets`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from llamactl.api import load
from llamactl.cli.options import Output, command, complete_model, new_app
from llamactl.errors import NotAvailable, UsageError
from llamactl.render import render
from llamactl.render.document import Column, Document, Facts, Lines, Table
from llamactl.source import presets as bundled

app = new_app()


@command(app, access=False)
def presets(
    action: Annotated[str, typer.Argument(metavar="[list|show]")] = "list",
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", autocompletion=complete_model, show_default=False,
                                               help="With show: a preset or a Hub id.")] = None,
    *,
    out: Output,
) -> None:
    """List the bundled models, or show one.

    Example: llamactl presets show llama-3-8b
    """
    if action not in ("list", "show"):
        raise UsageError("usage", f"{action!r} is neither list nor show", help="try: llamactl presets list")
    found = list(bundled.every()) if action == "list" else [_one(name)]
    if out.format == "json":
        models = [{**_row(p), **({"config": p.config} if action == "show" else {})} for p in found]
        print(json.dumps({"schema": 1, "command": "presets", "model": None, "inputs": {"action": action, "name": name},
                          "result": {"models": models}, "warnings": []}, indent=2))
        return
    rows = [(p.name, load(f"preset:{p.name}").model.total(), p.title, ", ".join(p.hub)) for p in found]
    table = Table("", (Column("name"), Column("parameters", "count"), Column("model"), Column("Hub ids")), tuple(rows))
    doc = Document((table,), table, tuple(r[1] for r in rows))
    if action == "show":
        p = found[0]
        facts = Facts(p.title, (("name", p.name), ("Hub ids", ", ".join(p.hub) or "none"),
                                *((f"published {k}", str(v)) for k, v in p.published.items())))
        doc = Document((facts, Lines("config", tuple(json.dumps(p.config, indent=2).splitlines()))), table, doc.primary)
    if out.quiet:
        sys.stdout.write("".join(f"{p.name}\n" for p in found))
    else:
        sys.stdout.write(render(doc, out.format, color=out.color))


def _one(name: str | None) -> bundled.Preset:
    if name is None:
        raise UsageError("usage", "show needs a name", help="try: llamactl presets show llama-3-8b")
    name = name.removeprefix("preset:")
    found = bundled.find(name)
    if found is None:
        near = bundled.near(name)
        raise NotAvailable("preset-not-found", f"no preset {name!r}",
                           help=f"did you mean {near}?" if near else "'llamactl presets' lists them")
    return bundled.full(found.name)


def _row(p: bundled.Preset) -> dict[str, Any]:
    model = load(f"preset:{p.name}").model
    return {"id": p.name, "family": model.family, "model_type": model.model_type, "title": p.title,
            "hub": list(p.hub), "published": p.published, "total": model.total()}
