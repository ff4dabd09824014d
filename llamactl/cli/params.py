"""`llamactl params`."""

from __future__ import annotations

from typing import Annotated

import typer

from llamactl.cli.load import load_all
from llamactl.cli.options import Access, ModelArg, Output, SetOpt, command, new_app
from llamactl.cli.show import show
from llamactl.errors import UsageError

app = new_app()


@command(app)
def params(
    models: ModelArg = None,
    set_: SetOpt = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Cost the weights in this dtype, e.g. bf16, int4, q4_0.",
                                              show_default=False)] = None,
    by: Annotated[str, typer.Option("--by", metavar="component|layer", help="What the rows are.")] = "component",
    tree: Annotated[bool, typer.Option("--tree", help="Print the parts as a tree.")] = False,
    weights: Annotated[bool, typer.Option("--weights", help="Read the headers of the weight files too, and compare.")
                       ] = False,
    *,
    out: Output,
    reach: Access,
) -> None:
    """Count parameters by component, exactly; active ones for MoE; weights in bytes.

    Example: llamactl params meta-llama/Meta-Llama-3-8B mistralai/Mixtral-8x7B-v0.1
    """
    from llamactl.analysis.params import params as count

    if by not in ("component", "layer"):
        raise UsageError("usage", f"--by {by!r} is neither component nor layer")
    loaded = load_all(models, set_, reach)
    reports = [count(x.model, id=x.id, dtype=dtype) for x in loaded]
    files = None
    if weights:
        from llamactl.cli.weights import read_weights

        files = [read_weights(x) for x in loaded]
    inputs = {"set": list(set_ or ()), "dtype": dtype, "by": by, "weights": weights}
    show("params", loaded, reports, inputs, out, by=by, tree=tree, files=files)
