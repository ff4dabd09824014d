"""SentencePiece vocabularies: tokenizer.model, and the scored pieces of a GGUF file put into the same form."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from llamactl.errors import InputRefused
from llamactl.tokens.fast import guarded
from llamactl.tokens.files import AddedToken, TokenFiles
from llamactl.tokens.tokenizer import KEEP, STRIP, Tokenizer, extra_missing

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor as Processor

_SPACE = "▁"
# Types of pieces, the same numbers in sentencepiece_model.proto and in tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_BPE = 2  # TrainerSpec.ModelType


class Pieces:
    """A vocabulary inside `sentencepiece`. Tokens of `outside` are found in a text first, and each stretch between
    them is a text of its own, with its own first space unless `once`.

    outside: names to ids, control pieces among them. frame: ids before and after a text.
    """

    def __init__(
        self, proto: bytes, path: str, outside: Mapping[str, int], *, once: bool,
        frame: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        self.engine = load(proto, path)
        self.frame = frame
        self._later = load(proto, path, dummy_prefix=False) if once else self.engine
        self._outside = dict(outside)
        self._names = {id: name for name, id in outside.items()}
        self._own = self.engine.GetPieceSize()
        self._find = _alternatives(outside)
        self._known: dict[int, bytes] = {}

    def ids(self, text: str, *, framed: bool) -> list[int]:
        """Ids of `text`."""
        ids: list[int] = []
        at = 0
        for found in self._find.finditer(text) if self._find else ():
            ids += self._plain(text[at : found.start()], at == 0)
            ids.append(self._outside[found[0]])
            at = found.end()
        ids += self._plain(text[at:], at == 0)
        return [*self.frame[0], *ids, *self.frame[1]] if framed else ids

    def _plain(self, text: str, first: bool) -> list[int]:
        if not text:
            return []
        out: list[int] = (self.engine if first else self._later).EncodeAsIds(text)
        return out

    def token(self, id: int) -> str | None:
        """The name of a piece, or of a token beside the pieces."""
        if id in self._names:
            return self._names[id]
        name: str | None = self.engine.IdToPiece(id) if 0 <= id < self._own else None
        return name

    def find(self, token: str) -> int | None:
        """The id of a piece by its name."""
        if token in self._outside:
            return self._outside[token]
        id: int = self.engine.PieceToId(token)  # the id of <unk> for what it does not know
        return id if self.token(id) == token else None

    def raw(self, id: int) -> bytes:
        """The bytes of a piece: ▁ is a space, <0x0A> a byte."""
        data = self._known.get(id)
        if data is None:
            name = self.token(id) or ""
            if id not in self._names and id < self._own and self.engine.IsByte(id):
                data = bytes([int(name[3:5], 16)])
            else:
                data = (name if id in self._names else name.replace(_SPACE, " ")).encode("utf-8")
            self._known[id] = data
        return data

    def whole(self, ids: Sequence[int]) -> str | None:
        """Texts are the sum of their pieces."""
        return None

    def spaced(self) -> bool:
        """Whether a text gets a space before its first word."""
        text: str = self.engine.Normalize("a")
        return text.startswith(_SPACE)


def _alternatives(names: Iterable[str]) -> re.Pattern[str] | None:
    """Finds any of `names`, the longest first; their first characters are looked for before all else."""
    ordered = sorted(names, key=len, reverse=True)
    if not ordered:
        return None
    first = "".join(sorted({re.escape(n[0]) for n in ordered}))
    return re.compile(f"(?=[{first}])(?:{'|'.join(map(re.escape, ordered))})")


def load(proto: bytes, path: str, *, dummy_prefix: bool = True) -> Processor:
    """An engine for a model's bytes. dummy_prefix=False: no space before a text, whatever the model says.

    Errors: InputRefused tokenizer-format, lfs-pointer; NotAvailable extra-missing.
    """
    try:
        from sentencepiece import SentencePieceProcessor as Processor
    except ImportError:
        raise extra_missing("sentencepiece") from None
    if proto.startswith(b"version https://git-lfs"):
        raise InputRefused("lfs-pointer", "a Git LFS pointer, not the file itself", path=path,
                           help="run 'git lfs pull'")
    if not dummy_prefix:  # a message field that comes again is merged into the first: the one flag is overwritten
        proto += _field(3, _number(3, 0))

    def build() -> Processor:
        engine = Processor()
        engine.LoadFromSerializedProto(proto)
        if not engine.GetPieceSize():
            raise ValueError("no pieces")
        return engine

    return guarded(path, "a SentencePiece model", build)


def open_model(path: str, data: bytes, files: TokenFiles, rows: int | None) -> Tokenizer:
    """A tokenizer.model. BOS stands before a text unless add_bos_token is false or the model has none; EOS behind it
    only with add_eos_token. Control pieces and added tokens are found in a text; `legacy: false` gives the first space
    to the start of a text alone. Errors: those of `load`; InputRefused token-range.
    """
    engine = load(data, path)
    own = engine.GetPieceSize()
    control = {i for i in range(own) if engine.IsControl(i) or engine.IsUnknown(i)}
    outside = {str(engine.IdToPiece(i)): i for i in sorted(control)}
    for t in files.added:
        if t.id >= own or t.special:
            _known(path, engine, t, own)
            outside[t.text] = t.id
    special = control | {t.id for t in files.added if t.special}
    said = (("bos_token", engine.bos_id()), ("eos_token", engine.eos_id()), ("unk_token", engine.unk_id()),
            ("pad_token", engine.pad_id()))
    names = {key: str(engine.IdToPiece(id)) for key, id in said if id >= 0} | dict(files.names)
    ids = {key: outside.get(name, engine.PieceToId(name)) for key, name in names.items()}
    bos = (ids["bos_token"],) if "bos_token" in ids and files.flag("add_bos_token") is not False else ()
    eos = (ids["eos_token"],) if "eos_token" in ids and files.flag("add_eos_token") else ()
    backend = Pieces(data, path, outside, once=files.flag("legacy") is False, frame=(bos, eos))
    return Tokenizer(kind="sentencepiece", size=max(own, *(i + 1 for i in outside.values())), path=path,
                     backend=backend, lead=STRIP if backend.spaced() else KEEP, skipped=frozenset(special), names=names,
                     ends=frozenset({ids["eos_token"]} if "eos_token" in ids else ()), vocab=rows)


def _known(path: str, engine: Processor, token: AddedToken, own: int) -> None:
    """An added token inside the model's own ids must be the piece that stands there."""
    if token.id < own and engine.IdToPiece(token.id) != token.text:
        raise InputRefused("token-range", f"the added token {token.text!r} should have the id {token.id:,}, where the "
                           f"vocabulary has {engine.IdToPiece(token.id)!r}", path=path,
                           help="the files of the tokenizer do not belong together")


def model_proto(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], *, prefix: bool, trim: bool
) -> bytes:
    """A SentencePiece BPE model of scored pieces. prefix: a space before a text; trim: no spaces in a row.

    Text is taken as it is (no normalization), as llama.cpp does. Source: sentencepiece_model.proto.
    """
    out = bytearray()
    for token, score, kind in zip(tokens, scores, types, strict=True):
        out += _field(1, _field(1, token.encode("utf-8")) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
    trainer = _number(3, _BPE) + _number(35, BYTE in types)
    normalizer = _field(1, b"identity") + _number(3, prefix) + _number(4, trim) + _number(5, 1)
    return bytes(out + _field(2, trainer) + _field(3, normalizer))


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    """A protobuf field of type varint."""
    return _varint(field << 3) + _varint(value)


def _field(field: int, data: bytes) -> bytes:
    """A protobuf field of bytes, a string or a message."""
    return _varint(field << 3 | 2) + _varint(len(data)) + data
