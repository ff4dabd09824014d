"""Where each value of a TOML file stands. tomllib says what a file means, and not where; an edit must know both."""

from __future__ import annotations

import re
import tomllib

Path = tuple[str | int, ...]
Spans = dict[Path, tuple[int, int]]

_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_STRINGS = {
    '"""': re.compile(r'"""(?:\\.|[^\\])*?"""(?:"{0,2})', re.S),
    "'''": re.compile(r"'''.*?'''(?:'{0,2})", re.S),
    '"': re.compile(r'"(?:\\.|[^"\\])*"'),
    "'": re.compile(r"'[^']*'"),
}
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}#\r\n]+")


def toml_spans(text: str) -> Spans:
    """{path of keys and indices: (start, end) of the value's text} of every value that is no table and no array.

    text: TOML that tomllib accepts; of other text nothing is promised.
    """
    scanner = _Scanner(text)
    scanner.document()
    return scanner.spans


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.spans: Spans = {}
        self.lengths: dict[Path, int] = {}  # of arrays of tables, so far

    def document(self) -> None:
        inside: Path = ()
        while self._skip():
            if self.text.startswith("[[", self.at):
                self.at += 2
                inside = self._element(self._key())
                self._past("]]")
            elif self.text[self.at] == "[":
                self.at += 1
                inside = self._table(self._key())
                self._past("]")
            else:
                self._pair(inside)

    def _skip(self) -> str:
        """Go past blanks, line ends and comments; the next character, "" at the end."""
        self.at = self._end(_BLANK)
        return self.text[self.at:self.at + 1]

    def _end(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self.text, self.at)
        assert match is not None
        return match.end()

    def _past(self, mark: str) -> None:
        self.at = self.text.index(mark, self.at) + len(mark)

    def _key(self) -> tuple[str, ...]:
        parts = []
        while True:
            mark = self._skip()
            start = self.at
            self.at = self._end(_STRINGS[mark] if mark in "\"'" else _BARE)
            word = self.text[start:self.at]
            parts.append(str(tomllib.loads(f"x = {word}")["x"]) if mark in "\"'" else word)
            if self._skip() != ".":
                return tuple(parts)
            self.at += 1

    def _table(self, keys: Path) -> Path:
        """The path of a header's table: where an array of tables is on the way, its last element is meant."""
        path: Path = ()
        for key in keys:
            path += (key,)
            if path in self.lengths:
                path += (self.lengths[path] - 1,)
        return path

    def _element(self, keys: Path) -> Path:
        path = (*self._table(keys[:-1]), keys[-1])
        self.lengths[path] = self.lengths.get(path, 0) + 1
        return (*path, self.lengths[path] - 1)

    def _pair(self, inside: Path) -> None:
        path = (*inside, *self._key())
        self._past("=")
        self._skip()
        self._value(path)

    def _value(self, path: Path) -> None:
        mark, start = self.text[self.at], self.at
        if mark == "[":
            self.at += 1
            n = 0
            while self._skip() != "]":
                self._value((*path, n))
                n += 1
                self._comma()
            self.at += 1
        elif mark == "{":
            self.at += 1
            while self._skip() != "}":
                self._pair(path)
                self._comma()
            self.at += 1
        elif mark in "\"'":
            self.at = self._end(_STRINGS[mark * 3 if self.text.startswith(mark * 3, self.at) else mark])
            self.spans[path] = (start, self.at)
        else:
            self.at = self._end(_SCALAR)
            self.spans[path] = (start, start + len(self.text[start:self.at].rstrip()))

    def _comma(self) -> None:
        if self._skip() == ",":
            self.at += 1
