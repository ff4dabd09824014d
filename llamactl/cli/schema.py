"""`llamactl schema`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from llamactl.cli.options import new_app
from llamactl.errors import UsageError

app = new_app()


@app.command()
def schema(
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="params, kv-cache, presets, version.")],
    json_: Annotated[bool, typer.Option("--json", help="The only format there is.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Print the JSON Schema of a command's --json output.

    Example: llamactl schema params
    """
    from llamactl.render.schema import SCHEMAS, schema_of

    if command not in SCHEMAS:
        from difflib import get_close_matches

        near = get_close_matches(command, SCHEMAS, 1)
        raise UsageError("usage", f"no schema for {command!r}",
                         help=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(SCHEMAS)}")
    print(json.dumps(schema_of(command), indent=2))
