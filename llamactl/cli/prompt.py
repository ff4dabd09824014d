"""What `generate` is asked to continue: a text of the command line, a file or standard input, or token ids."""

from __future__ import annotations

import re
import sys

from llamactl.errors import InputRefused, UsageError

MOST_BYTES = 64_000_000
EXAMPLE = "llamactl generate ./my-model --prompt 'Once upon a time'"


def read_prompt(text: str | None, file: str | None, dash: bool) -> str:
    """The prompt, exactly as it stands, its last newline too. dash: standard input, as `-` in place of a text or file.

    Without any of them, standard input is read where it is no terminal.
    Raises UsageError (no-prompt, usage) and InputRefused (not UTF-8, too large).
    """
    if sum((text is not None, file is not None, dash)) > 1:
        raise UsageError("usage", "several prompts: give one of --prompt, --prompt-file and -")
    if dash or "-" in (text, file):
        return _stdin()
    if text is not None:
        return _unicode(text.encode("utf-8", "surrogateescape"), "--prompt")
    if file is not None:
        return _file(file)
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("no-prompt", "no prompt given", help=f"try: {EXAMPLE}")
    found = _stdin()
    if not found:
        raise UsageError("no-prompt", "no prompt given, and standard input is empty", help=f"try: {EXAMPLE}")
    return found


def _stdin() -> str:
    if sys.stdin is None:
        raise UsageError("no-prompt", "standard input is closed", help=f"try: {EXAMPLE}")
    try:
        data = sys.stdin.buffer.read(MOST_BYTES + 1)
    except OSError as e:  # a folder, or closed
        raise UsageError("no-prompt", f"standard input cannot be read: {e.strerror}",
                         help=f"try: {EXAMPLE}") from None
    return _unicode(data, "standard input")


def _file(path: str) -> str:
    from llamactl.checkpoint.disk import open_regular

    handle, size = open_regular(path)
    with handle:
        data = handle.read(MOST_BYTES + 1) if size <= MOST_BYTES else b" " * (MOST_BYTES + 1)
    return _unicode(data, path)


def _unicode(data: bytes, path: str) -> str:
    if len(data) > MOST_BYTES:
        raise InputRefused("prompt-too-large", f"more than {MOST_BYTES:,} bytes", path=path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise InputRefused("prompt-encoding", f"not UTF-8: byte {e.start:,} is 0x{data[e.start]:02x}",
                           path=path) from None


def read_ids(text: str) -> list[int]:
    """`1,2,3` (or with blanks) as token ids. Raises UsageError."""
    words = [w for w in re.split(r"[,\s]+", text.strip("[] \t\n")) if w]
    for w in words:
        if not re.fullmatch(r"\d{1,9}", w):
            raise UsageError("usage", f"--tokens: {w!r} is not a token id", help="write --tokens 1,15043,29892")
    return [int(w) for w in words]
