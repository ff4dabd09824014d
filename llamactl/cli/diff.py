"""`llamactl diff`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from llamactl.cli.options import Access, Output, command, complete_model, new_app

app = new_app()
_HELP = ("Folder (Hugging Face, Meta, nanoGPT or written by hand), .gguf file, weights file beside a config.json, or a "
         "Hub id in the local cache.")


@command(app)
def diff(
    first: Annotated[str, typer.Argument(metavar="A", autocompletion=complete_model, show_default=False, help=_HELP)],
    second: Annotated[str, typer.Argument(metavar="B", autocompletion=complete_model, show_default=False,
                                          help="The other one, in any layout.")],
    every: Annotated[bool, typer.Option("--all", help="List equal tensors too.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Another dtype is a difference too.")] = False,
    *,
    out: Output,
    reach: Access,
) -> None:
    """Compare two checkpoints in any layouts, tensor by tensor; exit 1 if they differ.

    Example: llamactl diff ./my-model ./my-model
    """
    from llamactl.cli.diffing import diff as run

    report = run(first, second, out, reach, strict=strict, every=every)
    if not report.same:
        words = [f"{report.differing:,} of {len(report.tensors):,} tensors differ"] if report.differing else []
        if report.descriptions:
            words.append(f"the descriptions differ in {len(report.descriptions):,}")
        print(f"error[diff]: {'; '.join(words)}", file=sys.stderr)
        raise typer.Exit(1)
