"""`llamactl generate`."""

from __future__ import annotations

from typing import Annotated

import typer

from llamactl.cli.options import Access, Output, command, complete_model, new_app
from llamactl.cli.prompt import EXAMPLE, read_ids, read_prompt
from llamactl.cli.sampling import check_given
from llamactl.errors import UsageError

app = new_app()
MOST = 1 << 32


@command(app, only=("plain", "json"))
def generate(
    words: Annotated[list[str] | None, typer.Argument(metavar="MODEL [-]", autocompletion=complete_model,
                     show_default=False, help="Folder or .gguf file with weights, or a Hub id in the local cache. "
                     "Default: the current folder. -: the prompt is on standard input.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", show_default=False,
                      help="The text to continue, exactly as it stands.")] = None,
    prompt_file: Annotated[str | None, typer.Option("--prompt-file", metavar="FILE", show_default=False,
                           help="The text to continue, its last newline too.")] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", metavar="IDS", show_default=False,
                      help="Token ids instead of text: 1,15043.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's turn in the model's chat format.")
                    ] = False,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", show_default=False,
                      help="With --chat: the system message.")] = None,
    max_new: Annotated[int, typer.Option("--max-new", "-n", metavar="N", min=0, max=MOST, help="Tokens at most.")
                       ] = 128,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    temperature: Annotated[float | None, typer.Option("--temperature", metavar="T", show_default=False,
                           help="Default: the model's generation_config.json, else 0.8. 0: greedy.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", metavar="K", show_default=False,
                     help="Draw from the K likeliest tokens; 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", metavar="P", show_default=False,
                     help="Draw from the likeliest tokens that together reach P.")] = None,
    min_p: Annotated[float | None, typer.Option("--min-p", metavar="P", show_default=False,
                     help="Draw from tokens at least P times as likely as the likeliest.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option("--repetition-penalty", metavar="R", show_default=False,
                                  help="Above 1: tokens that stand there already get less likely.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", min=0, max=(1 << 63) - 1, show_default=False,
                    help="The same text again. Default: a new one each time.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", show_default=False,
                    help="End before this text. May be repeated.")] = None,
    ignore_end: Annotated[bool, typer.Option("--ignore-end", help="Go on after an end token.")] = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="With --json: log-probability of each token.")] = False,
    device: Annotated[str, typer.Option("--device", metavar="auto|cuda|cpu|mps", help="Where to compute.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", metavar="auto|bf16|fp16|fp32", help="What to compute in. auto: as "
                     "stored; on a CPU fp16 becomes fp32.")] = "auto",
    threads: Annotated[int | None, typer.Option("--threads", metavar="N", min=1, max=4096, show_default=False,
                       help="CPU threads, of each process.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", metavar="N", min=1, max=1024, show_default=False,
                  help="Share the model among N processes, each with a GPU of its own or some of the CPU's cores.")
                  ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Make kernels for this model first: faster, after a minute."
                       )] = False,
    pack: Annotated[bool, typer.Option("--pack", help="On a CPU, put bf16 weights in the order read fastest.")
                    ] = False,
    quant: Annotated[str | None, typer.Option("--quant", metavar="int8", show_default=False,
                     help="Matrices in 8 bits, rounded row by row while loading.")] = None,
    *,
    out: Output,
    reach: Access,
) -> None:
    """Continue a prompt with a model's own weights, and say how fast it went.

    The text goes to standard output as it comes, one line of numbers to standard error.

    Example: llamactl generate ./my-model --prompt "Once upon a time" --max-new 32
    """
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
             "repetition_penalty": repetition_penalty}
    check_given(given, greedy)
    ref, dash = _words(words or [])
    _one_of("--device", device, ("auto", "cuda", "cpu", "mps"))
    _one_of("--dtype", dtype, ("auto", "bf16", "fp16", "fp32"))
    if quant is not None:
        _one_of("--quant", quant, ("int8",))
    if logprobs and (out.format != "json" or out.quiet):
        raise UsageError("usage", "--logprobs are part of the JSON answer", help="add --json")
    if system is not None and not chat:
        raise UsageError("usage", "--system belongs to --chat", help="add --chat")
    if tokens is not None and (prompt is not None or prompt_file is not None or dash or chat):
        raise UsageError("usage", "--tokens stand in place of a text: give no other prompt and no --chat")
    if stop and "" in stop:
        raise UsageError("usage", "--stop '' would end every text at once")
    if ref is None:
        from llamactl.cli.runnable import model_here

        model_here(EXAMPLE)
    ids = None if tokens is None else read_ids(tokens)
    from llamactl.cli.ranks import entered, launch, seat

    here = seat(tp)
    world = here.world if here else tp or 1
    if world > 1 and (compile or quant):
        raise UsageError("usage", f"{'--compile' if compile else '--quant'} is for one process, and these are {world}")
    if world > 1 and here is None:
        raise typer.Exit(launch(world))
    with entered(here, device) as group:
        leads = here is None or here.rank == 0
        text = None if tokens is not None or not leads else read_prompt(prompt, prompt_file, dash)
        from llamactl.cli.running import Asked, run

        run(Asked(ref=ref, ids=ids, text=text, chat=chat, system=system, max_new=max_new, greedy=greedy, given=given,
                  seed=seed, stop=tuple(stop or ()), ignore_end=ignore_end, logprobs=logprobs, device=device,
                  dtype=dtype, threads=threads, compile=compile, pack=pack, quant=quant, tp=world), out, reach, group)


def _words(words: list[str]) -> tuple[str | None, bool]:
    """(MODEL, whether - stood after it)."""
    dash = words[-1:] == ["-"]
    refs = words[:-1] if dash else words
    if len(refs) > 1:
        raise UsageError("usage", f"{len(refs)} words where one MODEL is expected",
                         help="give the text with --prompt, in quotes")
    return (refs[0] if refs else None), dash


def _one_of(option: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise UsageError("usage", f"{option} {word!r} is not one of {', '.join(known)}")
