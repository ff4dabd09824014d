"""`llamactl fit`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from llamactl.cli.load import load_all, own_context
from llamactl.cli.options import Access, ModelArg, Output, SetOpt, command, new_app, size, tokens
from llamactl.cli.show import show

app = new_app()


@command(app)
def fit(
    models: ModelArg = None,
    gpu: Annotated[str, typer.Option("--gpu", metavar="NAME[xN]|auto", help="h100-80gb, h100-80gbx4, ..., or auto for "
                   "this machine's.")] = "auto",
    ctx: Annotated[str | None, typer.Option("--ctx", metavar="N", show_default=False,
                   help="Tokens per sequence. Default: all the model can use.")] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="B", min=1, max=1 << 20, help="Sequences at once.")] = 1,
    weights_dtype: Annotated[str | None, typer.Option("--weights-dtype", show_default=False,
                             help="Dtype of the weights. Default: the model's.")] = None,
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", show_default=False,
                        help="Dtype of the cache. Default: the model's.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, max=4096, show_default=False,
                  help="Devices per copy of the model. Default: all of them.")] = None,
    overhead: Annotated[str, typer.Option("--overhead", metavar="SIZE", help="What each device keeps for itself.")
                        ] = "1GiB",
    step: Annotated[int, typer.Option("--step", min=1, max=1 << 24, help="Tokens computed at once.")] = 2048,
    set_: SetOpt = None,
    *,
    out: Output,
    reach: Access,
) -> None:
    """Say whether a model fits on a GPU, how far it reaches and how fast it can be; exit 1 if not.

    Example: llamactl fit meta-llama/Meta-Llama-3-8B --gpu l4-24gb --ctx 8192
    """
    from llamactl.analysis.fit import fit as judge
    from llamactl.source.gpus import find

    device, devices = find(gpu)
    length, kept = tokens(ctx) if ctx else None, size(overhead, "--overhead")
    loaded = load_all(models, set_, reach)
    reports = [judge(x.model, device, devices, length or own_context(x), batch=batch, weights=weights_dtype,
                     kv=kv_dtype, tp=tp, overhead=kept, step=step, id=x.id) for x in loaded]
    inputs = {"gpu": gpu, "ctx": length, "batch": batch, "weights_dtype": weights_dtype, "kv_dtype": kv_dtype, "tp": tp,
              "overhead_bytes": kept, "step": step, "set": list(set_ or ())}
    show("fit", loaded, reports, inputs, out)
    if not all(r.fits for r in reports):
        short = [r.id for r in reports if not r.fits]
        print(f"error[does-not-fit]: {', '.join(short)} on {device.name} x {devices}", file=sys.stderr)
        raise typer.Exit(1)
