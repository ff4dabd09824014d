"""The command group. A command's module is imported when it is called, so `--help` pays for none of them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from llamactl import __version__
from llamactl.cli import failures
from llamactl.errors import OutputError

# name -> (module, the one line that --help shows; a test holds it equal to the command's own first line)
COMMANDS = {
    "params": ("llamactl.cli.params", "Count parameters by component, exactly; active ones for MoE; weights in bytes."),
    "kv-cache": ("llamactl.cli.kvcache", "Cost the KV cache per token, per layer group and at a context, to the byte."),
    "flops": ("llamactl.cli.flops", "Count the floating-point operations of a forward pass, part by part."),
    "fit": ("llamactl.cli.fit", "Say whether a model fits on a GPU, how far it reaches and how fast it can be; exit 1 "
            "if not."),
    "compare": ("llamactl.cli.compare", "Put models side by side and tell their difference as edits."),
    "evolve": ("llamactl.cli.evolve", "Walk from one model to another, one edit at a time, costing each step."),
    "explore": ("llamactl.cli.explore", "Make a page to play with: a model, or the way from one to another, with every "
                "number exact."),
    "rope": ("llamactl.cli.rope", "Read the rotary positions: every pair's frequency, wavelength and turns, before and "
             "after stretching."),
    "check": ("llamactl.cli.check", "Hold models to a budget: exact, max and min values of what they are and cost."),
    "inspect": ("llamactl.cli.inspect", "Read what a checkpoint really holds, by header alone, against what its config "
                "says."),
    "generate": ("llamactl.cli.generate", "Continue a prompt with a model's own weights, and say how fast it went."),
    "bench": ("llamactl.cli.bench", "Time prompts and new tokens, against what the device can do and against other "
              "engines."),
    "convert": ("llamactl.cli.convert", "Move weights between layouts, streaming and atomic, and prove that what was "
                "written is what was read."),
    "diff": ("llamactl.cli.diff", "Compare two checkpoints in any layouts, tensor by tensor; exit 1 if they differ."),
    "verify": ("llamactl.cli.verify", "Say whether a checkpoint or a port is right, where it goes wrong, and what the "
               "mistake is; exit 1 if not."),
    "reference": ("llamactl.cli.reference", "Record what a checkpoint answers, for verify to compare with where the "
                  "checkpoint itself is not."),
    "ablate": ("llamactl.cli.ablate", "Measure what each part of trained weights is worth: the loss on a text under "
               "one edit at a time."),
    "lab": ("llamactl.cli.lab", "Measure what is claimed of these blocks: experiments by name, each with its verdict; "
            "exit 1 if one does not hold."),
    "presets": ("llamactl.cli.presets", "List the bundled models, or show one."),
    "schema": ("llamactl.cli.schema", "Print the JSON Schema of a command's --json output."),
    "doctor": ("llamactl.cli.doctor", "Look at this installation: what works, what is missing; no network, no token "
               "shown."),
    "version": ("llamactl.cli.version", "Print the versions that a bug report needs."),
}

EPILOG = (
    "Exit codes: 0 done, 1 the check failed, 2 usage, 3 input refused, 4 not available, 5 output not written, "
    "70 a bug in llamactl, 130 interrupted, 143 terminated."
)


class LazyGroup(TyperGroup):
    """Commands by name, loaded on use; unknown ones answer with the nearest."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        command: Any = typer.main.get_command(import_module(COMMANDS[cmd_name][0]).app)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise failures.unknown_command(args[0], COMMANDS)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=LazyGroup, name="llamactl", add_completion=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(value: bool) -> None:
    if value:
        print(f"llamactl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", "-V", callback=_version, is_eager=True,
                                          help="Print the version and exit.")] = False,
) -> None:
    """What a language model is made of, what it costs, and whether this copy of it is right.

    MODEL is a folder, a config.json, a .gguf file, a preset (llama-3-8b) or a Hub id (ORG/NAME[@REV]).

    Example: llamactl kv-cache meta-llama/Meta-Llama-3-8B --ctx 131072
    """


def run(argv: Sequence[str]) -> int:
    """Run one command line; every failure becomes one line on stderr and an exit code."""
    if hasattr(signal, "SIGTERM"):
        signal.signal(signal.SIGTERM, failures.on_sigterm)
    if sys.stderr is None:  # closed by the caller (2>&-), and then `print` would fall back on stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  open as long as the process
    with failures.handled(argv) as outcome:
        if sys.stdout is None:
            raise OutputError("stdout", "standard output is closed")
        for stream in (sys.stderr, sys.stdout):
            # A narrow code page (ascii, cp1252) must never turn an answer into a crash.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        command: Any = typer.main.get_command(app)
        if "_LLAMACTL_COMPLETE" in os.environ:
            command.main(list(argv), prog_name="llamactl")  # a shell asks for completions; this ends the process
        # Not `main`, which turns Ctrl-C and a closed pipe into exit codes of its own before they can be told apart.
        with command.make_context("llamactl", list(argv)) as ctx:
            command.invoke(ctx)
        sys.stdout.flush()
    return outcome.code
