"""`llamactl flops`."""

from __future__ import annotations

from typing import Annotated

import typer

from llamactl.cli.load import load_all, own_context
from llamactl.cli.options import Access, ModelArg, Output, SetOpt, command, new_app, tokens
from llamactl.cli.show import show

app = new_app()


@command(app)
def flops(
    models: ModelArg = None,
    ctx: Annotated[str | None, typer.Option("--ctx", metavar="N", show_default=False,
                   help="Tokens: the prompt's in prefill, those so far in decode. Default: all the model can use.")
                   ] = None,
    phase: Annotated[str, typer.Option("--phase", metavar="prefill|decode", help="A prompt, or one more token.")
                     ] = "prefill",
    batch: Annotated[int, typer.Option("--batch", metavar="B", min=1, max=1 << 20, help="Sequences at once.")] = 1,
    set_: SetOpt = None,
    *,
    out: Output,
    reach: Access,
) -> None:
    """Count the floating-point operations of a forward pass, part by part.

    Example: llamactl flops meta-llama/Meta-Llama-3-8B --ctx 8192 --phase prefill
    """
    from llamactl.analysis.flops import flops as counted

    length = tokens(ctx) if ctx else None
    loaded = load_all(models, set_, reach)
    reports = [counted(x.model, length or own_context(x), phase=phase, batch=batch, id=x.id) for x in loaded]
    inputs = {"ctx": length, "phase": phase, "batch": batch, "set": list(set_ or ())}
    show("flops", loaded, reports, inputs, out)
