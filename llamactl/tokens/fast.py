"""Vocabularies of the `tokenizers` package: tokenizer.json, and what is put into its form in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from llamactl.errors import InputRefused
from llamactl.tokens.files import AddedToken, TokenFiles
from llamactl.tokens.tokenizer import BARE, KEEP, STRIP, Tokenizer, broken, extra_missing

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine

T = TypeVar("T")
_SPACE = "▁"


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary. Source: bytes_to_unicode of GPT-2."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [b for b in range(256) if b not in shown]
    return {**{chr(b): b for b in shown}, **{chr(256 + n): b for n, b in enumerate(hidden)}}


class Fast:
    """A vocabulary inside `tokenizers`.

    frame: the ids before and after a text; None: what the file's own post-processor adds. style: how a token's name
    becomes bytes: "bytes" (byte-level), "spaces" (▁ for a space and <0x0A> for a byte), "spaces-only"; None: only
    the engine knows, and texts are decoded whole.
    """

    def __init__(self, engine: Engine, style: str | None, frame: tuple[Sequence[int], Sequence[int]] | None) -> None:
        self.engine = engine
        self.style = style
        self.frame = frame
        self._alphabet = byte_alphabet()
        self._known: dict[int, bytes] = {}

    def ids(self, text: str, *, framed: bool) -> list[int]:
        """Ids of `text`, special tokens found in it."""
        try:
            ids: list[int] = self.engine.encode(text, add_special_tokens=framed and self.frame is None).ids
        except Exception as e:  # the engine raises nothing narrower, e.g. where a regex of the file gives up
            said = (str(e).splitlines() or [""])[0][:200]
            raise InputRefused("tokenizer-failed", f"the vocabulary cannot encode this text: {said}") from None
        if framed and self.frame is not None:
            return [*self.frame[0], *ids, *self.frame[1]]
        return ids

    def token(self, id: int) -> str | None:
        """The token's name in the file."""
        name: str | None = self.engine.id_to_token(id)
        return name

    def find(self, token: str) -> int | None:
        """Its id."""
        id: int | None = self.engine.token_to_id(token)
        return id

    def raw(self, id: int) -> bytes:
        """The bytes of a token, by the style of the file's decoder."""
        data = self._known.get(id)
        if data is None:
            data = self._known[id] = self._raw(self.token(id) or "")
        return data

    def _raw(self, name: str) -> bytes:
        if self.style == "bytes":
            if all(c in self._alphabet for c in name):
                return bytes(self._alphabet[c] for c in name)
            return name.encode("utf-8")  # an added token, written as it is
        if self.style == "spaces" and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            try:
                return bytes([int(name[3:5], 16)])
            except ValueError:
                pass
        return name.replace(_SPACE, " ").encode("utf-8") if self.style else name.encode("utf-8")

    def whole(self, ids: Sequence[int]) -> str | None:
        """The engine's own decoding, where it is no sum of bytes."""
        if self.style is not None:
            return None
        text: str = self.engine.decode([i for i in ids if self.token(i) is not None], skip_special_tokens=False)
        return text


def style_of(engine: Engine) -> tuple[str | None, str]:
    """How tokens become bytes and what happens to the first space, read from the file's decoder."""
    parts = _parts(_state(engine.decoder)) if engine.decoder is not None else []
    kinds = [p.get("type") for p in parts]
    if kinds == ["ByteLevel"]:
        return "bytes", KEEP
    if kinds == ["Metaspace"] and parts[0].get("replacement") == _SPACE:
        scheme = parts[0].get("prepend_scheme", "always" if parts[0].get("add_prefix_space", True) else "never")
        return "spaces-only", KEEP if scheme == "never" else BARE
    replace = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if parts[:1] == [replace] and kinds[1:3] == ["ByteFallback", "Fuse"] and parts[3:] in ([], [strip]):
        return "spaces", STRIP if parts[3:] else KEEP
    return None, KEEP


def _state(part: Any) -> dict[str, Any]:
    state = json.loads(part.__getstate__())
    return state if isinstance(state, dict) else {}


def _parts(state: dict[str, Any]) -> list[dict[str, Any]]:
    """A decoder as the list of its parts."""
    inner = state.get("decoders") if state.get("type") == "Sequence" else [state]
    return [p for p in inner if isinstance(p, dict)] if isinstance(inner, list) else []


def guarded(path: str, what: str, build: Callable[[], T]) -> T:
    """Run `build`; whatever the engine says against the data, a panic too, is one refusal."""
    try:
        return build()
    except InputRefused:
        raise
    except BaseException as e:
        if isinstance(e, Exception) or type(e).__name__ == "PanicException":  # pyo3's is no Exception
            raise broken(path, what, e) from None
        raise


def open_json(path: str, data: bytes, files: TokenFiles, vocab: int | None) -> Tokenizer:
    """A tokenizer.json. BOS and EOS are its own post-processor's, as in transformers 5; where that adds nothing and
    tokenizer_config.json says add_bos_token (or add_eos_token) is true, they are added, as DeepSeek's files mean it and
    transformers 4 and llama.cpp do. Errors: InputRefused tokenizer-format, token-range.
    """
    try:
        from tokenizers import Tokenizer as Engine
    except ImportError:
        raise extra_missing("tokenizers") from None
    if data.startswith(b"version https://git-lfs"):
        raise InputRefused("lfs-pointer", "a Git LFS pointer, not the file itself", path=path,
                           help="run 'git lfs pull'")
    text = data.removeprefix(b"\xef\xbb\xbf")
    engine = guarded(path, "a tokenizer.json", lambda: Engine.from_str(text.decode("utf-8")))
    engine.no_truncation()
    engine.no_padding()
    frame = None
    bos, eos = files.flag("add_bos_token"), files.flag("add_eos_token")
    if (bos or eos) and not guarded(path, "a tokenizer.json", lambda: engine.encode("").ids):
        frame = framing(engine.token_to_id, files.names, bos=bool(bos), eos=bool(eos))
    return finish("tokenizer.json", path, engine, files, frame=frame, vocab=vocab)


def framing(
    find: Callable[[str], int | None], names: Any, *, bos: bool, eos: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids before and after a text; a token that has no name or no id is left out."""
    def one(key: str, wanted: bool) -> tuple[int, ...]:
        id = find(names[key]) if wanted and key in names else None
        return () if id is None else (id,)
    return one("bos_token", bos), one("eos_token", eos)


def finish(
    kind: str, path: str, engine: Engine, files: TokenFiles, *, vocab: int | None,
    frame: tuple[Sequence[int], Sequence[int]] | None = None, ends: frozenset[int] = frozenset(),
) -> Tokenizer:
    """An engine as a Tokenizer, with the tokens that the folder's files add. frame: see Fast."""
    add_tokens(path, engine, files.added)
    known: dict[int, Any] = engine.get_added_tokens_decoder()
    special = {t.id for t in files.added if t.special} | {i for i, t in known.items() if t.special}
    special |= {i for n in files.names.values() if (i := engine.token_to_id(n)) is not None and i in known}
    style, lead = style_of(engine)
    size = max(engine.get_vocab_size(with_added_tokens=True), max(known, default=-1) + 1)
    if engine.id_to_token(size - 1) is None:  # ids with holes: the count says less than the highest
        size = max(engine.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    eos = engine.token_to_id(files.names["eos_token"]) if "eos_token" in files.names else None
    return Tokenizer(kind=kind, size=size, backend=Fast(engine, style, frame), path=path, lead=lead, vocab=vocab,
                     skipped=frozenset(special), names=files.names,
                     ends=ends or (frozenset() if eos is None else frozenset({eos})))


def add_tokens(path: str, engine: Engine, added: Sequence[AddedToken]) -> None:
    """Give the engine the tokens it does not have; each must get the id that the file says. Errors: token-range."""
    from tokenizers import AddedToken as Added

    known = engine.get_added_tokens_decoder()
    for t in added:
        if t.id in known and known[t.id].content == t.text:
            continue
        token = Added(t.text, lstrip=t.lstrip, rstrip=t.rstrip, normalized=t.normalized, single_word=t.single_word,
                      special=t.special)
        (engine.add_special_tokens if t.special else engine.add_tokens)([token])
        if engine.token_to_id(t.text) != t.id:
            raise InputRefused("token-range", f"the added token {t.text!r} should have the id {t.id:,}, the vocabulary "
                               f"gives it {engine.token_to_id(t.text):,}", path=path,
                               help="the files of the tokenizer do not belong together")
