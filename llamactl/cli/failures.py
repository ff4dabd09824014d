"""Every failure as the contract wants it: one `error[code]: ...` line, at most one `help: ...`, the right exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import typer

from llamactl.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    LlamactlError,
    OutputError,
    UsageError,
    printable,
)

# typer carries click inside from 0.2x on and depended on it before; its own classes lead to the right bases in both.
_CLICK_USAGE: Any = typer.BadParameter.__mro__[1]
_CLICK_ERROR: Any = typer.BadParameter.__mro__[2]


class Outcome:
    """The exit code, filled in when the command ends."""

    code = 0


class Terminated(BaseException):
    """SIGTERM, raised so that cleaning up runs."""


def on_sigterm(*_: object) -> NoReturn:
    """Signal handler: end like an exception, so that cleaning up runs."""
    raise Terminated


@contextmanager
def handled(argv: Sequence[str]) -> Iterator[Outcome]:
    """Turn whatever is raised inside into its line and its exit code."""
    outcome = Outcome()
    try:
        yield outcome
    except LlamactlError as e:
        outcome.code = _report(e, argv)
    except typer.Exit as e:
        outcome.code = e.exit_code
    except BrokenPipeError:
        _swallow_stdout()
    except (KeyboardInterrupt, typer.Abort):
        outcome.code = _report(_Stopped("interrupted", "interrupted", EXIT_INTERRUPTED), argv)
    except Terminated:
        outcome.code = _report(_Stopped("terminated", "terminated", EXIT_TERMINATED), argv)
    except _CLICK_USAGE as e:
        outcome.code = _report(_from_click(e), argv)
    except _CLICK_ERROR as e:
        outcome.code = _report(UsageError("usage", e.format_message()), argv)
    except MemoryError:
        outcome.code = _report(OutputError("memory", "out of memory"), argv)
    except ImportError as e:
        outcome.code = _report(OutputError("memory", "out of memory"), argv) if _no_room(e) else _bug(e, argv)
    except OSError as e:
        outcome.code = _not_written(e, argv) if _is_stdout(e) else _bug(e, argv)
    except Exception as e:
        outcome.code = _bug(e, argv)


def unknown_command(name: str, known: Iterable[str]) -> UsageError:
    """The error for a command that does not exist, naming the nearest."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), 1)
    return UsageError("usage", f"no such command {name!r}",
                      help=f"did you mean {near[0]!r}?" if near else "'llamactl --help' lists them")


def _from_click(e: Any) -> UsageError:
    """A click usage error in our words, with its suggestions as the help."""
    message = e.format_message().replace("\n", " ").rstrip(".")
    near = getattr(e, "possibilities", None)
    command = getattr(getattr(e, "ctx", None), "command_path", "llamactl")
    if near:
        message = f"no such option {e.option_name}"
        return UsageError("usage", message, help=f"did you mean {near[0]}?")
    return UsageError("usage", message[:1].lower() + message[1:], help=f"see '{command} --help'")


def _wants_json(argv: Sequence[str]) -> bool:
    """Whether the answer was to be JSON; told from the words alone, for the command line may be what is wrong."""
    asked = [b for a, b in zip(argv, argv[1:], strict=False) if a == "--format"]
    asked += [a.partition("=")[2] for a in argv if a.startswith("--format=")]
    return "--json" in argv or "json" in (asked or [os.environ.get("LLAMACTL_FORMAT", "")])


def _report(e: LlamactlError, argv: Sequence[str]) -> int:
    if _wants_json(argv):
        import json

        command = next((a for a in argv if not a.startswith("-")), None)
        body = {"schema": 1, "command": command, "error": e.to_dict()}
        try:
            print(json.dumps(body, indent=2), flush=True)
        except OSError:
            _swallow_stdout()
    _say(e.line())
    if e.help:
        _say(f"help: {printable(e.help)}")
    if "--debug" in argv:
        import traceback

        for line in "".join(traceback.format_exception(e)).splitlines():
            _say(printable(line))
    return e.exit_code


class _Stopped(LlamactlError):
    """Ended from outside, or by what nobody foresaw."""

    def __init__(self, code: str, message: str, exit_code: int) -> None:
        super().__init__(code, message)
        self.exit_code = exit_code


def _bug(e: Exception, argv: Sequence[str]) -> int:
    """Anything unforeseen is our bug: one line, and the traceback only on request."""
    where = printable(f"{type(e).__name__}: {e}".replace("\n", " "), 300)
    bug = _Stopped("bug", f"{where}; please report this, with --debug's output", EXIT_BUG)
    bug.__cause__ = e
    return _report(bug, argv)


def _no_room(e: ImportError) -> bool:
    """Whether a library could not be loaded for want of memory ('ulimit -v')."""
    return "failed to map" in str(e) or "annot allocate memory" in str(e)


def _is_stdout(e: OSError) -> bool:
    """Whether the answer itself could not be written; errors of files carry their name."""
    return e.filename is None and e.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EBADF)


def _not_written(e: OSError, argv: Sequence[str]) -> int:
    _swallow_stdout()
    return _report(OutputError("stdout", f"the answer could not be written: {e.strerror}"), argv)


def _say(line: str) -> None:
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _swallow_stdout() -> None:
    """The reader is gone (`| head`): point stdout at nothing, so that the interpreter's last flush is silent too."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.close(devnull)
