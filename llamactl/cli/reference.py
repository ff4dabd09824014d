"""`llamactl reference`."""

from __future__ import annotations

from typing import Annotated

import typer

from llamactl.cli.options import Access, Output, command, complete_model, new_app
from llamactl.errors import UsageError

app = new_app()
EXAMPLE = "llamactl reference ./my-model -o reference.safetensors"
ENDING = ".safetensors"


@command(app)
def reference(
    model: Annotated[str | None, typer.Argument(metavar="CKPT", autocompletion=complete_model, show_default=False,
                     help="Folder, .gguf or weights file, or a Hub id in the local cache. Default: the current folder."
                     )] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", show_default=False,
                      help="The .safetensors file to make.")] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", metavar="IDS|FILE", show_default=False, help="Token ids, "
                      "1,15043, or a file of them: .npy, .npz, .safetensors or text. Default: verify's own probe.")
                      ] = None,
    text: Annotated[str | None, typer.Option("--text", "--text-file", metavar="FILE", show_default=False,
                    help="A UTF-8 text, whose first 1,024 tokens are taken; -: standard input.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Also the stream after every layer, so that the first layer "
                      "that differs is found.")] = False,
    top_k: Annotated[int | None, typer.Option("--top-k", metavar="K", min=1, max=1 << 31, show_default=False,
                     help="Only the K largest logits of each token: a small file that sees less.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a reference that is there.")] = False,
    *,
    out: Output,
    reach: Access,
) -> None:
    """Record what a checkpoint answers, for verify to compare with where the checkpoint itself is not.

    Example: llamactl reference ./my-model -o reference.safetensors
    """
    if output is None:
        raise UsageError("usage", "no FILE to write: -o is missing", help=f"try: {EXAMPLE}")
    if not output.endswith(ENDING):
        raise UsageError("usage", f"-o {output!r} does not end in {ENDING}", help=f"write -o {output or 'ref'}{ENDING}")
    if tokens is not None and text is not None:
        raise UsageError("usage", "--tokens stand in place of a text: leave out one of them")
    if model is None:
        from llamactl.cli.runnable import model_here

        model_here(EXAMPLE)
    from llamactl.cli.recording import Asked, run

    run(Asked(ref=model, path=output, tokens=tokens, text=text, layers=layers, top_k=top_k, force=force), out, reach)
