"""A position in the header of a GGUF file that never reads, allocates or skips past what is there."""

from __future__ import annotations

import struct
from typing import Any, BinaryIO

from llamactl.errors import InputRefused

MAX_HEADER_BYTES = 100_000_000
MAX_STRING_BYTES = 64_000_000  # whole tokenizer.json files stand in metadata, 10 to 40 MB
_CHUNK = 1 << 20
_U64 = struct.Struct("<Q")


def refused(path: str, message: str, *, help: str | None = None, code: str | None = None) -> InputRefused:
    """The error for a broken GGUF header."""
    return InputRefused(code or "gguf-header", message, path=path, help=help or "download the file again")


class Cursor:
    """A window of bytes over `file`, which has `size` bytes; all counts are checked against `left` first."""

    def __init__(self, path: str, file: BinaryIO, size: int) -> None:
        self.path = path
        self.size = size
        self._file = file
        self._limit = min(size, MAX_HEADER_BYTES)
        self._base = 0  # the window's place in the file
        self._window = b""
        self._at = 0  # the position in the window

    @property
    def position(self) -> int:
        """Bytes from the start of the file."""
        return self._base + self._at

    @property
    def left(self) -> int:
        """Bytes that may still be read."""
        return self._limit - self.position

    def peek(self, n: int) -> bytes:
        """Up to `n` of the next bytes; fewer at the end of the file."""
        n = min(n, self.left)
        self._need(n, "the start")
        return self._window[self._at : self._at + n]

    def unpack(self, layout: str, what: str) -> tuple[Any, ...]:
        n = struct.calcsize(layout)
        self._need(n, what)
        values = struct.unpack_from(layout, self._window, self._at)
        self._at += n
        return values

    def u32(self, what: str) -> int:
        value: int = self.unpack("<I", what)[0]
        return value

    def string(self, what: str, *, limit: int | None = None) -> str:
        """A string. limit: of a name, which must be UTF-8; in other strings odd bytes are shown as \\xNN."""
        self._need(8, what)
        n: int = _U64.unpack_from(self._window, self._at)[0]
        self._at += 8
        most = MAX_STRING_BYTES if limit is None else limit
        if n > most:
            raise refused(self.path, f"{what} claims {n:,} bytes; at most {most:,} are read")
        self._need(n, what)
        data = self._window[self._at : self._at + n]
        self._at += n
        try:
            return data.decode("utf-8", "strict" if limit else "backslashreplace")
        except UnicodeDecodeError:
            raise refused(self.path, f"{what} at byte {self.position - n:,} is not UTF-8") from None

    def skip(self, n: int) -> None:
        """Move on by `n`, which is at most `left`."""
        self._at += n
        if self._at > len(self._window):
            self._base, self._window, self._at = self.position, b"", 0
            self._file.seek(self._base)

    def skip_strings(self, count: int, what: str) -> None:
        """Move over `count` strings; their lengths are read, their bytes are not decoded."""
        window, at, end = self._window, self._at, len(self._window) - 8
        for _ in range(count):
            if at > end:
                self._at = at
                self.skip(0)
                self._need(8, what)
                window, at, end = self._window, self._at, len(self._window) - 8
            at += 8 + _U64.unpack_from(window, at)[0]
            if self._base + at > self._limit:
                raise self._short(what, self._base + at - self._limit)
        self._at = at
        self.skip(0)

    def _need(self, n: int, what: str) -> None:
        """Have the next `n` bytes in the window."""
        if self._at + n <= len(self._window):
            return
        if n > self.left:
            raise self._short(what, n - self.left)
        rest = self._window[self._at :]
        try:
            window = rest + self._file.read(max(n - len(rest), _CHUNK))
        except OSError as e:
            raise InputRefused("io-error", f"not readable: {e.strerror or e}", path=self.path) from None
        self._base, self._window, self._at = self.position, window, 0
        if len(window) < n:  # cut short since it was measured
            raise self._short(what, n - len(window))

    def _short(self, what: str, missing: int) -> InputRefused:
        end = "the file ends" if self._limit == self.size else f"the header passes {MAX_HEADER_BYTES:,} bytes"
        return refused(self.path, f"{end} {missing:,} bytes before {what} does")
