"""`llamactl ablate`."""

from __future__ import annotations

from typing import Annotated

import typer

from llamactl.cli.options import Access, ForceOpt, Output, PlotOpt, command, complete_model, new_app, tokens
from llamactl.errors import UsageError

app = new_app()
EXAMPLE = "llamactl ablate ./my-model --tokens 64 --edits rope_theta=500000,no-gate"
MOST = 1 << 17


@command(app)
def ablate(
    model: Annotated[str | None, typer.Argument(metavar="CKPT", autocompletion=complete_model, show_default=False,
                     help="Folder or .gguf file with trained weights, or a Hub id in the local cache. Default: the "
                     "current folder.")] = None,
    text: Annotated[str | None, typer.Option("--text", metavar="FILE", show_default=False,
                    help="UTF-8 text to measure on; -: standard input. Default: a passage of prose and code.")] = None,
    edits: Annotated[list[str] | None, typer.Option("--edits", metavar="EDIT,...", show_default=False,
                     help="Edits to make, each alone: no-gate,rope_theta=10000. May be repeated. Default: one or two "
                     "of each part.")] = None,
    count: Annotated[str | None, typer.Option("--tokens", metavar="N", show_default=False, help="Tokens, from the "
                     "text's beginning. Default: 1024, or as many as the model has positions.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", metavar="N", min=1, max=4096, show_default=False,
                       help="CPU threads.")] = None,
    plot: PlotOpt = None,
    force: ForceOpt = False,
    *,
    out: Output,
    reach: Access,
) -> None:
    """Measure what each part of trained weights is worth: the loss on a text under one edit at a time.

    Example: llamactl ablate ./my-model --tokens 64 --edits rope_theta=500000,no-gate
    """
    n = None if count is None else tokens(count, "--tokens")
    if n is not None and not 2 <= n <= MOST:
        raise UsageError("usage", f"--tokens {n:,}: outside 2..{MOST:,}")
    wanted = None
    if edits is not None:
        wanted = tuple(dict.fromkeys(w.strip() for words in edits for w in words.split(",")))
        if "" in wanted:
            raise UsageError("usage", "--edits: an edit is empty", help="write --edits no-gate,rope_theta=10000")
    if model is None:
        from llamactl.cli.runnable import model_here

        model_here(EXAMPLE)
    from llamactl.cli.ablating import Asked, run

    run(Asked(ref=model, text=text, edits=wanted, tokens=n, threads=threads, plot=plot, force=force), out, reach)
