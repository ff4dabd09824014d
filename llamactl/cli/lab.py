"""`llamactl lab`."""

from __future__ import annotations

from typing import Annotated

import typer

from llamactl.cli.options import Access, ForceOpt, Output, command, new_app
from llamactl.errors import UsageError

app = new_app()
ACTIONS = ("list", "run")
DEVICES = ("auto", "cuda", "cpu", "mps")


def complete_words(incomplete: str) -> list[str]:
    """list, run, all and the experiments; read from their files' text, never run."""
    from llamactl.lab import EVERY, cards

    return [x for x in (*ACTIONS, EVERY, *(c.name for c in cards())) if x.startswith(incomplete.lower())]


def _meant(word: str, actions: tuple[str, ...] = ()) -> str:
    """What may have been meant by a word in the wrong place, and works; the list where nothing is near."""
    from difflib import get_close_matches

    from llamactl.lab import EVERY, cards

    known = {EVERY, *(c.name for c in cards())}
    near = [word] if word in known else get_close_matches(word.lower(), [*actions, *sorted(known)], 1)
    if not near:
        return "try: llamactl lab list"
    return f"did you mean {near[0]!r}?" if near[0] in actions else f"try: llamactl lab run {near[0]}"


@command(app)
def lab(
    words: Annotated[list[str] | None, typer.Argument(metavar="[list | run NAME...|all]", show_default=False,
                     autocompletion=complete_words, help="list: what there is, the default. run: these experiments."
                     )] = None,
    model: Annotated[list[str] | None, typer.Option("--model", metavar="CKPT", show_default=False, help="Folder, .gguf "
                     "file or Hub id in the local cache with trained weights, for the claims about them, which are "
                     "skipped without. May be repeated.")] = None,
    text: Annotated[str | None, typer.Option("--text", metavar="FILE", show_default=False, help="UTF-8 text that "
                    "blocks learns and trained weights are measured on. Default: Hamlet; verify's passage.")] = None,
    bytes_: Annotated[bool, typer.Option("--bytes", help="A model of 256 tokens without a tokenizer reads bytes.")
                      ] = False,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, max=(1 << 63) - 1, help="Of every draw.")] = 0,
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", min=1, max=100_000, show_default=False,
                     help="Training steps of blocks. Default: 250, some two minutes on one thread.")] = None,
    device: Annotated[str, typer.Option("--device", metavar="auto|cuda|cpu|mps", help="Where to compute; trained "
                      "weights are measured on the CPU.")] = "cpu",
    threads: Annotated[int | None, typer.Option("--threads", metavar="N", min=1, max=4096, show_default=False,
                       help="CPU threads. Default: all, but for blocks 1, so that a seed says every bit.")] = None,
    report: Annotated[str | None, typer.Option("--report", metavar="FILE.html", show_default=False, help="Also a page "
                      "with the curves drawn.")] = None,
    force: ForceOpt = False,
    *,
    out: Output,
    reach: Access,
) -> None:
    """Measure what is claimed of these blocks: experiments by name, each with its verdict; exit 1 if one does not hold.

    Example: llamactl lab run swiglu rope-stretch
    """
    action, *names = words or ["list"]
    from llamactl.lab import EVERY, cards, chosen

    if action not in ACTIONS:
        raise UsageError("usage", f"{action!r} is neither list nor run", help=_meant(action, ACTIONS))
    if action == "list":
        if names:
            raise UsageError("usage", f"list takes no name: {names[0]!r}", help=_meant(names[0]))
        given = {"--model": model, "--text": text is not None, "--bytes": bytes_, "--seed": seed, "--steps": steps,
                 "--device": device != "cpu", "--threads": threads, "--report": report is not None, "--force": force}
        if idle := [option for option, value in given.items() if value]:
            raise UsageError("usage", f"{idle[0]} is for run, and list runs nothing",
                             help=f"try: llamactl lab run {EVERY}")
        from llamactl.analysis.experiment import LabList
        from llamactl.cli.show import show

        found = LabList(experiments=cards())
        show("lab", [], [found], {"action": "list"}, out, result=found.to_dict())
        return
    if not names:
        raise UsageError("usage", "run takes the names of experiments, or all", help="try: llamactl lab list")
    if device not in DEVICES:
        raise UsageError("usage", f"--device {device!r} is not one of {', '.join(DEVICES)}")
    if report is not None and not report.lower().endswith(".html"):
        raise UsageError("usage", f"--report {report!r} does not end in .html")
    wanted = chosen(names)
    from llamactl.cli.labbing import Asked, run

    code = run(Asked(cards=wanted, models=tuple(model or ()), text=text, bytes=bytes_, seed=seed, steps=steps,
                     device=device, threads=threads, report=report, force=force), out, reach)
    if code:
        raise typer.Exit(code)
