"""`llamactl kv-cache`."""

from __future__ import annotations

from typing import Annotated

import typer

from llamactl.cli.load import load_all, own_context
from llamactl.cli.options import (
    Access,
    ForceOpt,
    ModelArg,
    Output,
    PlotOpt,
    SetOpt,
    command,
    new_app,
    sweep,
    token_list,
    tokens,
)
from llamactl.cli.show import draw, show

app = new_app()


@command(app)
def kv_cache(
    models: ModelArg = None,
    ctx: Annotated[list[str] | None, typer.Option("--ctx", metavar="N", show_default=False,
                   help="Tokens per sequence: 8192, 128k, 1k..128k; several allowed. Default: all the model can use."),
                   ] = None,
    batch: Annotated[list[str] | None, typer.Option("--batch", metavar="B", show_default=False,
                     help="Sequences at once; several allowed. Default: 1.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", show_default=False, help="Cache dtype: bf16, fp16, fp32, fp8, "
                     "int8, q8_0, q5_1, q5_0, q4_1, q4_0. Default: the model's.")] = None,
    k_dtype: Annotated[str | None, typer.Option("--k-dtype", help="Dtype of K alone.", show_default=False)] = None,
    v_dtype: Annotated[str | None, typer.Option("--v-dtype", help="Dtype of V alone.", show_default=False)] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, max=4096, help="Devices that share the KV heads; bytes are then of "
                  "one device.")] = 1,
    engine: Annotated[str, typer.Option("--engine", metavar="arch|hf|vllm|llama.cpp",
                      help="Whose definition of the cache.")] = "arch",
    engine_batch: Annotated[int | None, typer.Option("--engine-batch", min=1, max=1 << 24, show_default=False,
                            help="Tokens the engine computes at once: vLLM 2048, llama.cpp 512.")] = None,
    expanded: Annotated[bool, typer.Option("--expanded", help="Cache MLA's full K and V instead of the latent.")
                        ] = False,
    sweep_: Annotated[str | None, typer.Option("--sweep", metavar="ctx=..,batch=..,dtype=..", show_default=False,
                      help="A table over all combinations, e.g. ctx=1k..128k,batch=1,8,dtype=bf16,q8_0.")] = None,
    set_: SetOpt = None,
    plot: PlotOpt = None,
    force: ForceOpt = False,
    *,
    out: Output,
    reach: Access,
) -> None:
    """Cost the KV cache per token, per layer group and at a context, to the byte.

    Example: llamactl kv-cache meta-llama/Meta-Llama-3-8B --ctx 131072
    """
    from llamactl.analysis.kvcache import kv_cache as cost

    over = sweep(sweep_) if sweep_ else {}
    contexts = token_list([*(ctx or ()), *over.get("ctx", ())])
    batches = [tokens(b, "--batch") for v in (*(batch or ()), *over.get("batch", ())) for b in v.split(",") if b]
    dtypes: list[str | None] = [*over.get("dtype", ())] or [dtype]
    loaded = load_all(models, set_, reach)
    reports = [
        cost(x.model, contexts or [own_context(x)], batch=batches or [1], dtype=dtypes, k_dtype=k_dtype,
             v_dtype=v_dtype, tp=tp, engine=engine, step=engine_batch, expanded=expanded, id=x.id)
        for x in loaded
    ]
    inputs = {"ctx": contexts or None, "batch": batches or [1], "dtype": dtypes, "k_dtype": k_dtype,
              "v_dtype": v_dtype, "tp": tp, "engine": engine, "engine_batch": engine_batch, "expanded": expanded,
              "set": list(set_ or ())}
    draw("kv-cache", reports, plot, force)
    show("kv-cache", loaded, reports, inputs, out)
