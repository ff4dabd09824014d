"""`llamactl version`."""

from __future__ import annotations

import json
import platform
import sys

from llamactl import __version__
from llamactl.cli.options import Output, command, new_app
from llamactl.render import render
from llamactl.render.document import Column, Document, Facts, Table

app = new_app()
LIBRARIES = ("typer", "rich", "huggingface_hub", "safetensors", "PyYAML", "torch", "transformers", "tokenizers",
             "sentencepiece", "jinja2", "gguf", "numpy")


@command(app, access=False)
def version(*, out: Output) -> None:
    """Print the versions that a bug report needs.

    Example: llamactl version --json
    """
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    if out.quiet:
        print(__version__)
        return
    found: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            found[name] = installed(name)
        except PackageNotFoundError:
            found[name] = None
    if out.format == "json":
        print(json.dumps({"schema": 1, "command": "version", "model": None, "inputs": {}, "result": {
            "llamactl": __version__, "python": platform.python_version(), "platform": platform.platform(),
            "executable": sys.executable, "libraries": found}, "warnings": []}, indent=2))
        return
    rows = (("llamactl", __version__), ("python", platform.python_version()), ("platform", platform.platform()),
            *((name, word or "not installed") for name, word in found.items()))
    table = Table("", (Column("what"), Column("version")), rows)
    sys.stdout.write(render(Document((Facts("", rows),), table, ()), out.format, color=out.color))
