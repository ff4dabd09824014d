"""A text that a model is writing, on its way to standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamactl.tokens import Tokenizer


class Printer:
    """Text that became certain, kept and, when live, written to standard output at once.

    follows: the text goes on where the prompt ended, so a space between them belongs to it.
    Controls that could steer a terminal are escaped on one; in a pipe or a file the text stays as the model wrote it.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...], *, live: bool, follows: bool) -> None:
        from llamactl.render.generate import harmless

        self.stream = None
        if tokenizer is not None:
            from llamactl.tokens import Stream

            self.stream = Stream(tokenizer, stop=stop, follows=follows)
        self.live = live
        self.clean = harmless if live and sys.stdout.isatty() else str
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def token(self, token: int) -> bool:
        """Take one token; True when a stop string was met."""
        if self.stream is None:
            self._write(f" {token}" if self.pieces else str(token))
            return False
        self._write(self.stream.push(token))
        return self.stream.stopped

    @contextmanager
    def lines(self) -> Iterator[None]:
        """Leave the output at the start of a line, however the block ends, so that no message stands beside text."""
        try:
            yield
            if self.stream is not None and not self.stream.stopped:
                self._write(self.stream.flush())
        except BrokenPipeError:
            raise
        except BaseException:
            if self.pieces:
                self._end()
            raise
        self._end()

    def _write(self, text: str) -> None:
        if text:
            self.pieces.append(text)
            if self.live:
                sys.stdout.write(self.clean(text))
                sys.stdout.flush()

    def _end(self) -> None:
        if self.live and not (self.pieces and self.pieces[-1].endswith("\n")):
            sys.stdout.write("\n")
            sys.stdout.flush()
