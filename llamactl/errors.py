"""Every failure a user can meet, one tree; nothing else reaches a terminal.

    LlamactlError
    ├── CheckFailed      exit 1   the check that was asked for failed
    ├── UsageError       exit 2   the command line is wrong
    ├── InputRefused     exit 3   malformed, unsafe or not supported input
    ├── NotAvailable     exit 4   not found, gated, offline, an extra not installed
    └── OutputError      exit 5   the output was not written

A message is one line that carries the path and the numbers; `help` is one line that says what to do.
"""

from __future__ import annotations

import unicodedata

EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class LlamactlError(Exception):
    """Base of all expected failures.

    code: stable machine-readable word, e.g. "config-range". path: the file or reference at fault.
    """

    exit_code = EXIT_BUG

    def __init__(self, code: str, message: str, *, path: str | None = None, help: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.path = path
        self.help = help

    def line(self) -> str:
        """`error[code]: path: what is wrong`, safe to print: no control characters, one line."""
        where = f"{printable(self.path)}: " if self.path else ""
        return f"error[{self.code}]: {where}{printable(self.message)}"

    def to_dict(self) -> dict[str, object]:
        """The error object that `--json` prints."""
        return {
            "code": self.code,
            "message": printable(self.message),
            "path": None if self.path is None else printable(self.path),
            "help": None if self.help is None else printable(self.help),
            "exit_code": self.exit_code,
        }


class CheckFailed(LlamactlError):
    """The check that was asked for failed (a budget exceeded, a mismatch)."""

    exit_code = 1


class UsageError(LlamactlError):
    """The command line does not say what to do."""

    exit_code = 2


class InputRefused(LlamactlError):
    """The input is malformed, unsafe or not supported; llamactl never guesses around it."""

    exit_code = 3


class NotAvailable(LlamactlError):
    """The thing asked for is not here: not found, gated, offline, an extra not installed."""

    exit_code = 4


class OutputError(LlamactlError):
    """The output could not be written; nothing half-written is left behind."""

    exit_code = 5


def printable(text: str, limit: int = 2000) -> str:
    """`text` with control, format (bidi) and surrogate characters escaped, so that it cannot steer a terminal."""
    if len(text) > limit:
        text = text[:limit] + "..."
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if _is_safe(c) else c.encode("unicode_escape").decode("ascii") for c in text)


def _is_safe(c: str) -> bool:
    return unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
