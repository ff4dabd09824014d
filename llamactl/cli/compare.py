"""`llamactl compare`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from llamactl.cli.load import load_all
from llamactl.cli.options import Access, ModelArg, Output, SetOpt, command, new_app
from llamactl.cli.show import show
from llamactl.errors import UsageError

app = new_app()


@command(app)
def compare(
    models: ModelArg = None,
    set_: SetOpt = None,
    fail_on_diff: Annotated[bool, typer.Option("--fail-on-diff", help="Exit 1 if anything differs, for CI.")] = False,
    *,
    out: Output,
    reach: Access,
) -> None:
    """Put models side by side and tell their difference as edits.

    Example: llamactl compare gpt2 meta-llama/Meta-Llama-3-8B
    """
    from llamactl.analysis.compare import compare as compared

    if len(models or ()) < 2:
        raise UsageError("usage", "compare needs two models or more", help="try: llamactl compare gpt2 llama-3-8b")
    loaded = load_all(models, set_, reach)
    report = compared([(x.id, x.model) for x in loaded])
    body = report.to_dict()
    body["models"] = [{**m, "source": x.source.to_dict()} for m, x in zip(body["models"], loaded, strict=True)]
    show("compare", loaded, [report], {"set": list(set_ or ()), "fail_on_diff": fail_on_diff}, out, result=body)
    if fail_on_diff and not report.same:
        print(f"error[diff]: {len(report.differences)} features differ", file=sys.stderr)
        raise typer.Exit(1)
