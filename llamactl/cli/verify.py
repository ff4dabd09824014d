"""`llamactl verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from llamactl.cli.options import Access, Output, command, complete_model, new_app
from llamactl.errors import UsageError

app = new_app()
EXAMPLE = "llamactl verify ./my-model --candidate logits.npy"


@command(app)
def verify(
    model: Annotated[str | None, typer.Argument(metavar="CKPT", autocompletion=complete_model, show_default=False,
                     help="Folder, .gguf or weights file, or a Hub id in the local cache. Default: the current folder."
                     )] = None,
    reference: Annotated[str | None, typer.Option("--reference", metavar="REF", show_default=False, help="What is "
                         "right: another checkpoint in any layout, a recorded reference, 'transformers', or "
                         "package.module:name. Default: llamactl-reference.safetensors beside the checkpoint, else "
                         "transformers.")] = None,
    candidate: Annotated[str | None, typer.Option("--candidate", metavar="CAND", show_default=False, help="A port to "
                         "be judged against the checkpoint: saved logits (.npy, .npz, .safetensors), "
                         "package.module:name, or another checkpoint.")] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", metavar="IDS|FILE", show_default=False, help="Token ids, "
                      "1,15043, or a file of them: .npy, .npz, .safetensors or text. Default: verify's own probe."
                      )] = None,
    text: Annotated[str | None, typer.Option("--text", "--text-file", metavar="FILE", show_default=False,
                    help="A UTF-8 text, whose first 1,024 tokens are taken; -: standard input.")] = None,
    selftest: Annotated[bool, typer.Option("--selftest", help="Plant every mistake in the checkpoint's own network, "
                        "and list what is seen, what is named and what cannot be seen.")] = False,
    explain: Annotated[bool, typer.Option("--explain/--no-explain", help="Look for the mistake where there is one.")
                       ] = True,
    sweep: Annotated[bool, typer.Option("--sweep/--no-sweep", help="Look in single layers too.")] = True,
    seconds: Annotated[int | None, typer.Option("--seconds", metavar="N", min=1, max=86_400, show_default=False,
                       help="After which no new idea is tried. Default: 540; 60 for each of --selftest.")] = None,
    accept: Annotated[list[str] | None, typer.Option("--accept", metavar="EDIT", show_default=False, help="Exit 0 "
                      "where this edit is all there is, e.g. weights=bf16.")] = None,
    report: Annotated[str | None, typer.Option("--report", metavar="FILE.html", show_default=False, help="Also a page "
                      "with pictures.")] = None,
    junit: Annotated[str | None, typer.Option("--junit", metavar="FILE.xml", show_default=False, help="Also a JUnit "
                     "report.")] = None,
    annotate: Annotated[bool, typer.Option("--annotate", help="Also GitHub's workflow commands, on standard error.")
                        ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace report files that are there.")] = False,
    *,
    out: Output,
    reach: Access,
) -> None:
    """Say whether a checkpoint or a port is right, where it goes wrong, and what the mistake is; exit 1 if not.

    Example: llamactl verify ./my-model --reference ./my-model
    """
    from llamactl.cli.verifying import Asked, run

    if tokens is not None and text is not None:
        raise UsageError("usage", "--tokens stand in place of a text: leave out one of them")
    if selftest and (reference or candidate):
        raise UsageError("usage", "--selftest plants mistakes itself: leave out --reference and --candidate")
    for option, path, ending in (("--report", report, ".html"), ("--junit", junit, ".xml")):
        if path is not None and not path.lower().endswith(ending):
            raise UsageError("usage", f"{option} {path!r} does not end in {ending}")
    if model is None:
        from llamactl.cli.runnable import model_here

        model_here(EXAMPLE)
    code = run(Asked(ref=model, reference=reference, candidate=candidate, tokens=tokens, text=text, selftest=selftest,
                     explain=explain, sweep=sweep, seconds=seconds, accept=tuple(accept or ()), report=report,
                     junit=junit, annotate=annotate, force=force), out, reach)
    if code:
        raise typer.Exit(code)
