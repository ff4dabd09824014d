"""Streams: all that is handed out is what decode gives, never half a character, never a stop string."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from llamactl.errors import UsageError
from llamactl.tokens import Stream, Tokenizer, byte_tokenizer, open_tokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory, small: ModuleType) -> dict[str, Tokenizer]:
    """One tokenizer of every way to decode."""
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers

    root = tmp_path_factory.mktemp("v")
    found = {"bytes": byte_tokenizer(), "bpe": open_tokenizer(small.folder(root / "bpe", small.byte_bpe()))}
    for prefix in (True, False):
        (root / f"sp{prefix}").mkdir()
        (root / f"sp{prefix}" / "tokenizer.model").write_bytes(small.piece_model(prefix))
        found[f"sp{prefix}"] = open_tokenizer(str(root / f"sp{prefix}"))
    engine = Engine.from_str(small.byte_bpe().to_str())
    engine.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])  # the same text, in an unknown way
    found["window"] = open_tokenizer(small.folder(root / "window", engine))
    words = Engine(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "##c": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.decoder = decoders.WordPiece()
    found["words"] = open_tokenizer(small.folder(root / "words", words))
    spaced = Engine(models.WordLevel({"<unk>": 0, "▁a": 1, "▁b": 2, "▁▁": 3}, unk_token="<unk>"))
    spaced.pre_tokenizer = pre_tokenizers.Metaspace()
    spaced.decoder = decoders.Metaspace()
    found["metaspace"] = open_tokenizer(small.folder(root / "metaspace", spaced))
    return found


KINDS = ("bytes", "bpe", "spTrue", "spFalse", "window")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=some.text(max_size=40))
def test_pieces_are_the_whole_for_any_text(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    stream = Stream(tokenizer)
    parts = [stream.push(i) for i in ids]
    assert "".join(parts) + stream.flush() == tokenizer.decode(ids) == text
    assert all("�" not in p for p in parts) or "�" in text


@pytest.mark.parametrize("kind", [*KINDS, "words", "metaspace"])
@settings(max_examples=60, deadline=None)
@given(ids=some.lists(some.integers(0, 420), max_size=30))
def test_pieces_are_the_whole_for_any_ids(tokenizers: dict[str, Tokenizer], kind: str, ids: list[int]) -> None:
    """Also for ids no text gives: bytes that are no UTF-8, ids beyond the vocabulary."""
    tokenizer = tokenizers[kind]
    for skip in (True, False):
        stream = Stream(tokenizer, skip)
        assert "".join(stream.push(i) for i in ids) + stream.flush() == tokenizer.decode(ids, skip_special=skip)
        assert stream.flush() == ""


@settings(max_examples=60, deadline=None)
@given(ids=some.lists(some.integers(0, 399), max_size=30))
def test_the_whole_is_what_the_engine_decodes(tokenizers: dict[str, Tokenizer], ids: list[int]) -> None:
    for kind, skip in (("bpe", True), ("bpe", False), ("words", True), ("metaspace", True)):
        tokenizer: Any = tokenizers[kind]
        known = [i for i in ids if tokenizer.backend.token(i) is not None]
        assert tokenizer.decode(known, skip_special=skip) == tokenizer.backend.engine.decode(
            known, skip_special_tokens=skip
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["🤖", "日本語", "🏳️‍🌈!"])
def test_a_character_over_several_tokens_comes_whole(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    stream = Stream(tokenizer)
    ids = tokenizer.encode(text)
    parts = [stream.push(i) for i in ids]
    assert "" in parts, "the text is one token a character; the case tests nothing"
    assert "".join(parts) == text
    cut = Stream(tokenizer)
    assert "�" not in "".join(cut.push(i) for i in tokenizer.encode("é")[:-1])
    assert Stream(tokenizer).flush() == ""


def test_half_a_character_at_the_end_is_told_at_the_end() -> None:
    stream = Stream(byte_tokenizer())
    assert [stream.push(b) for b in "ab🤖".encode()[:-1]] == ["a", "b", "", "", ""]
    assert stream.flush() == "�"


@pytest.mark.parametrize(
    ("stop", "shown", "stopped"),
    [
        (["END"], "some text ", True),
        (["xt E"], "some te", True),
        (["nope"], "some text END more", False),
        (["more!", "ore"], "some text END m", True),
        (["ENDE", "END "], "some text ", True),
        ([], "some text END more", False),
    ],
)
def test_stop_strings_over_token_borders(stop: list[str], shown: str, stopped: bool) -> None:
    for tokenizer in (byte_tokenizer(),):
        stream = Stream(tokenizer, stop=stop)
        out = ""
        for id in tokenizer.encode("some text END more"):
            out += stream.push(id)
            assert not any(s in out for s in stop)
            assert shown.startswith(out), "handed out too much"
        assert out + stream.flush() == shown
        assert stream.stopped is stopped
        assert stream.push(65) == ("" if stopped else "A")


def test_what_may_begin_a_stop_string_is_held_and_then_given() -> None:
    stream = Stream(byte_tokenizer(), stop=["abc"])
    assert [stream.push(b) for b in b"xabab"] == ["x", "", "", "ab", ""]
    assert stream.flush() == "ab"
    assert not stream.stopped


@settings(max_examples=100, deadline=None)
@given(
    text=some.text("abc", max_size=30),
    stop=some.lists(some.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_any_stop_strings_end_where_the_first_one_begins(text: str, stop: list[str]) -> None:
    """Byte by byte, so the stop string that is whole first ends the text, at its earliest place."""
    tokenizer = byte_tokenizer()
    stream = Stream(tokenizer, stop=stop)
    out = "".join(stream.push(b) for b in text.encode()) + stream.flush()
    whole = next((n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stop)), None)
    assert stream.stopped is (whole is not None)
    wanted = text if whole is None else text[: min(text[:whole].find(s) for s in stop if s in text[:whole])]
    assert out == wanted


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="empty stop string"):
        Stream(byte_tokenizer(), stop=[""])


def test_a_text_that_follows_keeps_its_first_space(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["spTrue"]
    (first, *_) = tokenizer.encode("the dog", special=False)
    assert Stream(tokenizer).push(first) + "|" == tokenizer.decode([first]) + "|"
    assert Stream(tokenizer, follows=True).push(first) == " " + tokenizer.decode([first])


def test_special_tokens_are_left_out_or_shown(tokenizers: dict[str, Tokenizer], small: ModuleType) -> None:
    tokenizer = tokenizers["bpe"]
    ids = tokenizer.encode(f"{small.TURN}the{small.EOS}")
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special=False) == f"{small.TURN}the{small.EOS}"
