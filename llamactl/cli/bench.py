"""`llamactl bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from llamactl.cli.options import Access, Output, command, complete_model, new_app, tokens
from llamactl.errors import UsageError

app = new_app()
EXAMPLE = "llamactl bench ./my-model --against transformers"


@command(app)
def bench(
    model: Annotated[str | None, typer.Argument(metavar="CKPT", autocompletion=complete_model, show_default=False,
                     help="Folder or .gguf file with weights, or a Hub id in the local cache. Default: the current "
                     "folder.")] = None,
    prompt_tokens: Annotated[str | None, typer.Option("--prompt-tokens", metavar="N,...", show_default=False,
                             help="Prompts to read. Default: 512,2048, as far as the model's context goes.")] = None,
    decode_after: Annotated[str | None, typer.Option("--decode-after", metavar="N,...", show_default=False,
                            help="Prompts to continue. Default: 32,512, likewise.")] = None,
    new: Annotated[int | None, typer.Option("--new", metavar="N", min=1, max=1 << 20, show_default=False,
                   help="Tokens to make after each. Default: 64.")] = None,
    batch: Annotated[str, typer.Option("--batch", metavar="B,...", help="Sequences at once.")] = "1,8",
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", min=1, max=1000, help="Rounds that count; one more "
                      "goes before.")] = 5,
    against: Annotated[list[str] | None, typer.Option("--against", metavar="transformers|llama.cpp",
                       show_default=False, help="Time that too, in the same rounds. May be repeated.")] = None,
    gguf: Annotated[str | None, typer.Option("--gguf", metavar="FILE", show_default=False,
                    help="The same model for llama.cpp, where CKPT is no .gguf.")] = None,
    device: Annotated[str, typer.Option("--device", metavar="auto|cuda|cpu|mps", help="Where to compute.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", metavar="auto|bf16|fp16|fp32", help="What to compute in. auto: as "
                     "stored; on a CPU fp16 becomes fp32.")] = "auto",
    threads: Annotated[int | None, typer.Option("--threads", metavar="N", min=1, max=4096, show_default=False,
                       help="CPU threads.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Make kernels for this model first.")] = False,
    pack: Annotated[bool, typer.Option("--pack", help="On a CPU, put bf16 weights in the order read fastest.")
                    ] = False,
    quant: Annotated[str | None, typer.Option("--quant", metavar="int8", show_default=False,
                     help="Matrices in 8 bits, rounded row by row while loading.")] = None,
    *,
    out: Output,
    reach: Access,
) -> None:
    """Time prompts and new tokens, against what the device can do and against other engines.

    Example: llamactl bench ./my-model --prompt-tokens 64 --decode-after 16 --new 8 --batch 1 --repeat 2
    """
    rivals = tuple(dict.fromkeys(against or ()))
    for option, word, known in (("--device", device, ("auto", "cuda", "cpu", "mps")),
                                ("--dtype", dtype, ("auto", "bf16", "fp16", "fp32")),
                                *(("--quant", x, ("int8",)) for x in (quant,) if x is not None),
                                *(("--against", x, ("transformers", "llama.cpp")) for x in rivals)):
        if word not in known:
            raise UsageError("usage", f"{option} {word!r} is not one of {', '.join(known)}")
    if gguf is not None and "llama.cpp" not in rivals:
        raise UsageError("usage", "--gguf is what llama.cpp reads", help="add --against llama.cpp")
    if model is None:
        from llamactl.cli.runnable import model_here

        model_here(EXAMPLE)
    from llamactl.cli.benching import Asked, run

    run(Asked(ref=model, prompts=_counts(prompt_tokens, "--prompt-tokens"), after=_counts(decode_after,
              "--decode-after"), new=new, batches=_counts(batch, "--batch"), repeat=repeat, rivals=rivals, gguf=gguf,
              device=device, dtype=dtype, threads=threads, compile=compile, pack=pack, quant=quant), out, reach)


def _counts(text: str | None, option: str) -> tuple[int, ...]:
    """A comma list of numbers, in which 32,512 is two of them: a comma never stands inside a number here."""
    words = [] if text is None else [w.strip() for w in text.split(",")]
    if wrong := [w for w in words if not w or w.startswith("0")]:
        raise UsageError("usage", f"{option} {text!r}: {wrong[0]!r} is no number of its own", help="write 512,2048")
    return tuple(dict.fromkeys(tokens(w, option) for w in words))
