"""`llamactl rope`."""

from __future__ import annotations

from typing import Annotated

import typer

from llamactl.cli.load import load_all
from llamactl.cli.options import Access, ForceOpt, ModelArg, Output, PlotOpt, SetOpt, command, new_app, tokens
from llamactl.cli.show import draw, show

app = new_app()


@command(app)
def rope(
    models: ModelArg = None,
    target_ctx: Annotated[str | None, typer.Option("--target-ctx", metavar="N", show_default=False,
                          help="Judge the pairs at this many positions, e.g. 128k.")] = None,
    method: Annotated[str | None, typer.Option("--method", metavar="linear|ntk|dynamic|yarn|llama3|longrope",
                      help="Stretch to --target-ctx by this scheme instead of the config's.",
                      show_default=False)] = None,
    set_: SetOpt = None,
    plot: PlotOpt = None,
    force: ForceOpt = False,
    *,
    out: Output,
    reach: Access,
) -> None:
    """Read the rotary positions: every pair's frequency, wavelength and turns, before and after stretching.

    Example: llamactl rope meta-llama/Llama-3.1-8B
    """
    from llamactl.analysis.rope import rope as read

    target = tokens(target_ctx, "--target-ctx") if target_ctx else None
    loaded = load_all(models, set_, reach)
    reports = [read(x.model, id=x.id, target=target, method=method) for x in loaded]
    draw("rope", reports, plot, force)
    show("rope", loaded, reports, {"target_ctx": target, "method": method, "set": list(set_ or ())}, out)
