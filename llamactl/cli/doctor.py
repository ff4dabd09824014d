"""`llamactl doctor`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import typer

from llamactl import __version__
from llamactl.cli.options import Output, command, new_app
from llamactl.cli.show import print_json
from llamactl.errors import LlamactlError
from llamactl.render import render
from llamactl.render.document import Column, Document, Table

app = new_app()
Check = tuple[str, bool, str]


@command(app, access=False)
def doctor(*, out: Output) -> None:
    """Look at this installation: what works, what is missing; no network, no token shown.

    Exit 1 if llamactl itself is broken.

    Example: llamactl doctor
    """
    checks = list(_needed())
    seen = [*checks, *_optional()]
    if out.format == "json":
        body = [{"check": name, "ok": ok, "says": says} for name, ok, says in seen]
        print_json("doctor", [], {"llamactl": __version__, "checks": body}, {}, ())
    elif not out.quiet:
        table = Table("", (Column("ok"), Column("check"), Column("says")),
                      tuple(("ok" if ok else "--", name, says) for name, ok, says in seen))
        sys.stdout.write(render(Document((table,), table, ()), out.format, color=out.color))
    if not all(ok for _, ok, _ in checks):
        raise typer.Exit(1)


def _needed() -> Iterator[Check]:
    """What every command needs."""
    from llamactl import arch
    from llamactl.api import load
    from llamactl.source import presets

    python = ".".join(map(str, sys.version_info[:3]))
    yield "python", sys.version_info >= (3, 11), python
    try:
        yield "presets", True, f"{len(presets.names())} in {presets.folder()}"
        yield "families", True, f"{len(set(arch.families().values()))} for {len(arch.families())} model types"
        total = load("preset:llama-3-8b").model.total()
        yield "counts", total == 8_030_261_248, f"llama-3-8b has {total:,} parameters"
    except (LlamactlError, OSError, RuntimeError) as e:
        yield "presets", False, str(e)


def _optional() -> Iterator[Check]:
    """What some uses need; missing is no fault."""
    from importlib.util import find_spec

    for name, why in (("torch", "running models"), ("tokenizers", "text"), ("sentencepiece", "tokenizer.model"),
                      ("jinja2", "--chat"), ("gguf", "quantised GGUF"), ("transformers", "a reference"),
                      ("llama_cpp", "bench --against llama.cpp"), ("pynvml", "--gpu auto"), ("matplotlib", "--plot")):
        there = find_spec(name) is not None
        yield name, there, "installed" if there else f"not installed; needed for {why}"
    from llamactl.source.hub import settings

    hub = settings()
    yield "Hub cache", os.path.isdir(hub.cache), hub.cache
    yield "Hub token", hub.token, "found" if hub.token else "none; gated models need one"
    yield "Hub endpoint", not hub.offline, "offline by HF_HUB_OFFLINE" if hub.offline else hub.endpoint
