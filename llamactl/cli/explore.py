"""`llamactl explore`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from llamactl.cli.load import load_all
from llamactl.cli.options import Access, ForceOpt, Output, command, complete_model, new_app
from llamactl.errors import UsageError

app = new_app()


@command(app)
def explore(
    start: Annotated[str | None, typer.Argument(metavar="[MODEL]", autocompletion=complete_model, show_default=False,
                     help="Folder, config.json, .gguf file, preset or Hub id. Default: the current folder.")] = None,
    goal: Annotated[str | None, typer.Argument(metavar="[MODEL2]", autocompletion=complete_model, show_default=False,
                    help="The model that the page's switches lead to.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="FILE.html", show_default=False,
                      help="Where to write the page.")] = None,
    force: ForceOpt = False,
    serve: Annotated[bool, typer.Option("--serve", help="Show it in the browser, from this machine to itself alone, "
                                        "until Ctrl-C.")] = False,
    port: Annotated[int | None, typer.Option("--port", metavar="N", min=0, max=65535, show_default=False,
                                             help="For --serve. Default: a free one.")] = None,
    browser: Annotated[bool | None, typer.Option("--browser/--no-browser", show_default=False, help="Whether --serve "
                                                 "opens the browser. Default: it does.")] = None,
    *,
    out: Output,
    reach: Access,
) -> None:
    """Make a page to play with: a model, or the way from one to another, with every number exact.

    Example: llamactl explore gpt2 meta-llama/Meta-Llama-3-8B -o page.html
    """
    from llamactl.cli.exploring import made, show_page
    from llamactl.cli.serving import server

    if output is None and not serve:
        raise UsageError("usage", "explore makes a page, and nothing says where",
                         help="give -o page.html, or --serve to look at it at once")
    if output is not None and not output.lower().endswith(".html"):
        raise UsageError("usage", f"--output {output!r} does not end in .html")
    alone = "--port" if port is not None else "--browser" if browser else "--no-browser" if browser is False else None
    if alone and not serve:
        raise UsageError("usage", f"{alone} is for --serve, and nothing is served", help="add --serve")
    refs = [ref for ref in (start, goal) if ref is not None]
    loaded = load_all(refs or None, None, reach)
    report, page = made(loaded)
    inputs = {"output": output, "force": force, "serve": serve, "port": port or 0, "browser": browser is not False}
    if output is not None:
        from llamactl.atomic import create

        create(os.path.expanduser(output), page, force=force)
    if not serve:
        show_page(loaded, report, page, output, None, inputs, out)
        return
    with server(page, port or 0) as (url, run):
        show_page(loaded, report, page, output, url, inputs, out)
        run(browser is not False)
