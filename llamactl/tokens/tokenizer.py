"""What every vocabulary offers, whatever file it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llamactl.errors import InputRefused, NotAvailable

KEEP, STRIP, BARE = "keep", "strip", "bare"  # what becomes of the space a text begins with: see Tokenizer.lead


class Backend(Protocol):
    """A vocabulary: text in pieces, and the text of a piece. Special tokens that stand in the text are found there."""

    def ids(self, text: str, *, framed: bool) -> list[int]:
        """Ids of `text`; framed: with what the files put before and after it (BOS, EOS)."""

    def token(self, id: int) -> str | None:
        """The name of an id as the vocabulary spells it; None for an id it does not have."""

    def find(self, token: str) -> int | None:
        """The id of a token by its name."""

    def raw(self, id: int) -> bytes:
        """The bytes that an id adds to a text."""

    def whole(self, ids: Sequence[int]) -> str | None:
        """The text of all `ids` together where it is not the sum of their bytes; None where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A vocabulary that is ready to use.

    kind: "tokenizer.json" | "sentencepiece" | "tiktoken" | "vocab.json" | "gguf" | "bytes". size: the number of ids,
    the highest plus one. skipped: the special ids, which decode leaves out. lead: what becomes of the space that a
    text begins with: "keep"; "strip" removes one; "bare" takes every space from the first token. names: the
    strings that templates call bos_token and so on. ends: the ids by which the vocabulary itself ends a text.
    vocab: the rows of the model's embedding, where known: encode refuses an id beyond them.
    """

    kind: str
    size: int
    backend: Backend
    path: str
    lead: str = KEEP
    skipped: frozenset[int] = frozenset()
    names: Mapping[str, str] = field(default_factory=dict)
    ends: frozenset[int] = frozenset()
    vocab: int | None = None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of `text`. special: with the BOS (and EOS) the files ask for; special tokens in it are always found.

        Errors: InputRefused text-encoding for half a surrogate pair, token-range for an id the model has no row for.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:
            raise InputRefused("text-encoding", f"character {e.start:,} of the text is half a surrogate pair",
                               help="give the text as UTF-8") from None
        ids = self.backend.ids(text, framed=special)
        most = max(ids, default=0)
        if self.vocab is not None and most >= self.vocab:
            raise InputRefused("token-range", f"the token {self.backend.token(most)!r} has the id {most:,}, "
                               f"the model has {self.vocab:,} rows", path=self.path,
                               help="the tokenizer belongs to another model, or the model was not resized for it")
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD, one for each part that could begin a character."""
        kept = [i for i in ids if not (skip_special and i in self.skipped)]
        text = self.backend.whole(kept)
        if text is not None:
            return text
        pieces = [self.token_bytes(i) for i in kept]
        if self.lead == BARE and pieces:
            pieces[0] = self.first_bytes(kept[0])
        text = b"".join(pieces).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.lead == STRIP else text

    def token_bytes(self, id: int) -> bytes:
        """The bytes an id adds to a text that goes on; empty for an id the vocabulary does not have."""
        return self.backend.raw(id) if 0 <= id < self.size else b""

    def first_bytes(self, id: int) -> bytes:
        """The bytes of an id with which a text begins."""
        return self.token_bytes(id).replace(b" ", b"") if self.lead == BARE else self.token_bytes(id)

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name, e.g. "<|eot_id|>"."""
        return self.backend.find(token)


def extra_missing(package: str) -> NotAvailable:
    """The error for a package of the extra `generate` that is not there."""
    return NotAvailable("extra-missing", f"the package {package} is not installed",
                        help="pip install 'llamactl[generate]'")


def broken(path: str, what: str, e: BaseException) -> InputRefused:
    """The error for a vocabulary that its own package does not read; the first line of what it says."""
    said = (str(e).strip().splitlines() or [type(e).__name__])[0][:300]
    return InputRefused("tokenizer-format", f"not {what}: {said}", path=path, help="download the file again")
