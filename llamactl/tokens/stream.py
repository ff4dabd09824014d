"""Tokens to text, one at a time: what was handed out is never taken back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from llamactl.errors import UsageError
from llamactl.tokens.tokenizer import BARE, KEEP, STRIP, Tokenizer

_HOLD = 64  # ids that a decoder of whole texts may look back over


class Stream:
    """The text of ids as they come: no half character, and nothing that may still become a stop string.

    All that `push` and `flush` return, joined, is what `decode` gives for the same ids, up to the first stop string.
    stopped: a stop string came; it and all behind it is not handed out. follows: the text goes on after other text,
    so its first space is kept. Errors: UsageError stop-empty.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool = True, stop: Sequence[str] = (), *, follows: bool = False
    ) -> None:
        if any(not s for s in stop):
            raise UsageError("stop-empty", "an empty stop string would end every text", help="leave it out")
        self.stopped = False
        self._tokenizer = tokenizer
        self._skipped = tokenizer.skipped if skip_special else frozenset()
        self._stop = tuple(stop)
        self._held = ""  # certain characters that may begin a stop string
        self._lead = KEEP if follows else tokenizer.lead
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] | None = [] if tokenizer.backend.whole([]) is not None else None
        self._shown = 0  # of _ids: those whose text was handed out

    def push(self, id: int) -> str:
        """The text that became certain with `id`; often empty."""
        if self.stopped or id in self._skipped:
            return ""
        return self._emit(self._window(id) if self._ids is not None else self._bytes(id))

    def flush(self) -> str:
        """What was held back, at the end of all ids; half a character as U+FFFD."""
        if self.stopped:
            return ""
        rest = self._rest() if self._ids is not None else self._first(self._utf8.decode(b"", True))
        text = self._emit(rest)
        text, self._held = (text, "") if self.stopped else (text + self._held, "")
        return text

    def _bytes(self, id: int) -> str:
        if self._lead == BARE:
            self._lead = KEEP
            return self._utf8.decode(self._tokenizer.first_bytes(id))
        return self._first(self._utf8.decode(self._tokenizer.token_bytes(id)))

    def _first(self, text: str) -> str:
        """`text` without the space that stands for the start of a text."""
        if self._lead != STRIP or not text:
            return text
        self._lead = KEEP
        return text.removeprefix(" ")

    def _window(self, id: int) -> str:
        """New text of a decoder that needs neighbours: that of the last ids with and without the new ones."""
        assert self._ids is not None
        self._ids.append(id)
        whole = self._text(self._ids)
        before = self._text(self._ids[: self._shown])
        if len(whole) <= len(before) or (whole.endswith("�") and len(self._ids) - self._shown < _HOLD):
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return whole[len(before) :]

    def _rest(self) -> str:
        assert self._ids is not None
        rest = self._text(self._ids)[len(self._text(self._ids[: self._shown])) :]
        self._shown = len(self._ids)
        return rest

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.backend.whole(ids) or ""

    def _emit(self, new: str) -> str:
        """`new` after what is held, up to a stop string, less what may begin one."""
        text = self._held + new
        found = [at for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        longest = max((len(s) for s in self._stop), default=1) - 1
        keep = next((n for n in range(min(longest, len(text)), 0, -1)
                     if any(s.startswith(text[-n:]) for s in self._stop)), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
