"""`llamactl inspect`."""

from __future__ import annotations

import sys
from typing import Annotated, Any, cast

import typer

from llamactl.cli.options import Access, Output, command, new_app
from llamactl.cli.show import show
from llamactl.errors import InputRefused

app = new_app()


@command(app)
def inspect(
    models: Annotated[list[str] | None, typer.Argument(metavar="CKPT...", show_default=False,
                      help="Folder, .safetensors or .gguf file; a Hub id with --remote. Default: the current folder.",
                      )] = None,
    remote: Annotated[bool, typer.Option("--remote", help="Read the headers of a Hub repository by HTTP Range; no "
                      "weights are downloaded.")] = False,
    headers_only: Annotated[bool, typer.Option("--headers-only", help="Leave the config aside: for weights without "
                            "one, or of an unknown architecture.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 if anything is missing, unexpected, shaped "
                      "otherwise, contradictory or not judged, for CI.")] = False,
    *,
    out: Output,
    reach: Access,
) -> None:
    """Read what a checkpoint really holds, by header alone, against what its config says.

    Example: llamactl inspect ./my-model
    """
    from llamactl.cli.checkpoint import open_checkpoint

    found = [open_checkpoint(ref, reach, remote=remote, alone=headers_only) for ref in models or (None,)]
    reports = [x.report for x in found]
    for x in found:
        if out.quiet and x.report.parameters.files is None:
            raise InputRefused("container-unread", f"not countable: {x.report.not_judged}", path=x.source.path)
    inputs = {"remote": remote, "headers_only": headers_only, "strict": strict}
    show("inspect", cast("Any", found), reports, inputs, out)
    if strict and not all(r.clean for r in reports):
        print("error[inspect]: not clean; the warnings say why", file=sys.stderr)
        raise typer.Exit(1)
