"""Texts as bytes: one id for each byte of UTF-8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamactl.tokens.tokenizer import Tokenizer

_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RawBytes:
    """The byte b has the id b + offset. Below the offset stand `named` tokens. after: ids put behind a text."""

    offset: int = 0
    named: tuple[str, ...] = ()
    after: tuple[int, ...] = ()

    def ids(self, text: str, *, framed: bool) -> list[int]:
        """Ids of the bytes of `text`."""
        return [b + self.offset for b in text.encode("utf-8")] + (list(self.after) if framed else [])

    def token(self, id: int) -> str | None:
        """A named token, or the byte as <0x0A>."""
        if id < len(self.named):
            return self.named[id]
        return f"<0x{id - self.offset:02X}>" if self.offset <= id < self.offset + _BYTES else None

    def find(self, token: str) -> int | None:
        """The id of what `token` writes."""
        return next((i for i in range(self.offset + _BYTES) if self.token(i) == token), None)

    def raw(self, id: int) -> bytes:
        """The byte, or the name of a token that is none."""
        byte = id - self.offset
        return bytes([byte]) if 0 <= byte < _BYTES else (self.token(id) or "").encode()

    def whole(self, ids: Sequence[int]) -> str | None:
        """Texts are the sum of their bytes."""
        return None


def byte_tokenizer(path: str = "", *, vocab: int | None = None) -> Tokenizer:
    """Ids that are bytes, for a model of which a person knows that it was trained so; no file is read to guess it."""
    return Tokenizer(kind="bytes", size=_BYTES, backend=RawBytes(), path=path, vocab=vocab)


def byt5_tokenizer(path: str, *, vocab: int | None = None) -> Tokenizer:
    """The bytes of ByT5: <pad>, </s>, <unk>, then the 256 bytes; </s> behind a text. Source: arXiv:2105.13626."""
    names = ("<pad>", "</s>", "<unk>")
    backend = RawBytes(offset=len(names), named=names, after=(1,))
    return Tokenizer(kind="bytes", size=len(names) + _BYTES, backend=backend, path=path, vocab=vocab,
                     ends=frozenset({1}), skipped=frozenset(range(len(names))),
                     names={"pad_token": names[0], "eos_token": names[1], "unk_token": names[2]})
