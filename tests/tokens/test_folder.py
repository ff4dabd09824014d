"""Tokenizers of model folders: equal to transformers' own, and every broken file one clear refusal."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from llamactl.errors import InputRefused, LlamactlError, NotAvailable
from llamactl.tokens import Tokenizer, byte_tokenizer, open_tokenizer

NAMES = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


def auto(path: str) -> Any:
    """transformers' tokenizer of a folder."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(path)


def same(ours: Tokenizer, theirs: Any, texts: tuple[str, ...]) -> None:
    for text in texts:
        for special in (True, False):
            ids = ours.encode(text, special=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip), text


@pytest.mark.parametrize(
    "config",
    [
        {},
        NAMES,
        {**NAMES, "add_bos_token": False},
        {"add_bos_token": True},
        {**NAMES, "added_tokens_decoder": {"400": {"content": "<|new|>", "special": True}}},
    ],
)
def test_tokenizer_json_is_read_as_transformers_does(small: ModuleType, tmp_path: Path, config: dict[str, Any]) -> None:
    path = small.folder(
        tmp_path, small.byte_bpe(), tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", **config}
    )
    ours = open_tokenizer(path)
    assert (ours.kind, ours.size) == ("tokenizer.json", 401 if "added_tokens_decoder" in config else 400)
    same(ours, auto(path), (*small.SAMPLES, f"{small.TURN}user\n{small.EOS}the<|new|>dog"))


def test_the_post_processor_of_the_file_adds_what_it_says(small: ModuleType, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Engine
    from tokenizers import processors

    engine = Engine.from_str(small.byte_bpe().to_str())
    engine.post_processor = processors.TemplateProcessing(
        single=f"{small.BOS} $A {small.EOS}", special_tokens=[(small.BOS, 0), (small.EOS, 1)]
    )
    engine.enable_truncation(4)
    engine.enable_padding(length=9)
    ours = open_tokenizer(small.folder(tmp_path, engine))
    ids = ours.encode("the quick brown fox")
    assert (ids[0], ids[-1]) == (0, 1)
    assert ours.decode(ids) == "the quick brown fox", "cut or padded"
    assert ours.encode("", special=False) == []


def test_flags_add_what_the_post_processor_does_not(small: ModuleType, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Engine
    from tokenizers import processors

    def ids(engine: Any, **flags: bool) -> list[int]:
        path = small.folder(tmp_path, engine, tokenizer_config={**NAMES, **flags})
        return open_tokenizer(path).encode("the")

    bare = ids(small.byte_bpe())
    assert ids(small.byte_bpe(), add_bos_token=True) == [0, *bare]
    assert ids(small.byte_bpe(), add_bos_token=True, add_eos_token=True) == [0, *bare, 1]
    engine = Engine.from_str(small.byte_bpe().to_str())
    engine.post_processor = processors.TemplateProcessing(single=f"$A {small.TURN}", special_tokens=[(small.TURN, 2)])
    assert ids(engine, add_bos_token=True) == ids(engine, add_bos_token=False) == [*bare, 2], "the file's own counts"


def test_vocab_json_with_merges(small: ModuleType, tmp_path: Path) -> None:
    small.byte_bpe().model.save(str(tmp_path))
    for config in (
        {"tokenizer_class": "GPT2Tokenizer", **NAMES},
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
        {"tokenizer_class": "Qwen2Tokenizer"},
    ):
        path = small.folder(tmp_path, tokenizer_config={"unk_token": small.BOS, **NAMES, **config})
        ours = open_tokenizer(path)
        assert ours.kind == "vocab.json"
        same(ours, auto(path), (*small.SAMPLES, f"{small.BOS}x{small.EOS}", "1234567", "e\u0301"))


def test_vocab_json_needs_to_know_the_split(small: ModuleType, tmp_path: Path) -> None:
    small.byte_bpe().model.save(str(tmp_path))
    path = str(tmp_path)
    with pytest.raises(InputRefused, match="do not say how a text is split") as caught:
        open_tokenizer(path)
    assert caught.value.code == "tokenizer-unknown"
    assert open_tokenizer(path, model_type="gpt2").encode("the") == open_tokenizer(path, model_type="qwen2").encode(
        "the"
    )
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert open_tokenizer(path).kind == "vocab.json"


@pytest.mark.parametrize(
    "data",
    [
        "[]",
        "{}",
        '{"a": -1}',
        '{"a": 1.5}',
        '{"a": true}',
        '{"a": 0, "b": 0}',
        '{"a": 99999999}',
        "nope",
    ],
)
def test_a_broken_vocab_json_is_refused(tmp_path: Path, data: str) -> None:
    (tmp_path / "vocab.json").write_text(data)
    (tmp_path / "merges.txt").write_text("a b\n")
    with pytest.raises(InputRefused):
        open_tokenizer(str(tmp_path), model_type="gpt2")


@pytest.mark.parametrize("merges", [b"#version: 0.2\na b c\n", b"a \n", b"one\n", b"\xff \xfe\n", b"x y\n"])
def test_broken_merges_are_refused(tmp_path: Path, merges: bytes) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_bytes(merges)
    with pytest.raises(InputRefused) as caught:
        open_tokenizer(str(tmp_path), model_type="gpt2")
    assert caught.value.code == "tokenizer-format"


# --- SentencePiece


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_is_read_as_its_own_package_does(small: ModuleType, tmp_path: Path, prefix: bool) -> None:
    import sentencepiece

    (tmp_path / "tokenizer.model").write_bytes(small.piece_model(prefix))
    ours = open_tokenizer(str(tmp_path))
    engine = sentencepiece.SentencePieceProcessor()
    engine.LoadFromSerializedProto(small.piece_model(prefix))
    assert (ours.kind, ours.size, ours.ends) == ("sentencepiece", 400, frozenset({2}))
    for text in (*small.SAMPLES, "☃ snow", "\x00"):
        assert ours.encode(text) == [1, *engine.EncodeAsIds(text)]
        assert ours.decode(ours.encode(text)) == engine.DecodeIds(engine.EncodeAsIds(text)) == text
    turn = engine.PieceToId("[TURN]")
    assert ours.encode("the[TURN]dog") == [1, *engine.EncodeAsIds("the"), turn, *engine.EncodeAsIds("dog")]
    assert ours.id_of("[TURN]") == turn
    assert ours.id_of("no such piece") is None
    assert ours.token_bytes(ours.id_of("<0x0A>") or 0) == b"\n"


def test_sentencepiece_is_read_as_transformers_does(small: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf", exc_type=ImportError)
    (tmp_path / "tokenizer.model").write_bytes(small.piece_model())
    path = small.folder(
        tmp_path,
        tokenizer_config={
            "tokenizer_class": "LlamaTokenizer",
            "legacy": False,
            "add_bos_token": True,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
        },
        config={"model_type": "llama", "vocab_size": 400},
    )
    same(open_tokenizer(path), auto(path), ("Hello, world!", "naïve 日本語 🤖", "a\n\nb", "the</s>dog"))


def test_first_space_and_frame_follow_tokenizer_config(small: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(small.piece_model())
    bare = open_tokenizer(str(tmp_path)).encode("the", special=False)

    def encoded(text: str, **config: Any) -> list[int]:
        return open_tokenizer(small.folder(tmp_path, tokenizer_config=config)).encode(text)

    assert encoded("the", add_bos_token=False) == bare
    assert encoded("the", add_eos_token=True) == [1, *bare, 2]
    assert encoded("</s>the") == [1, 2, *bare]
    assert encoded("</s>the", legacy=False) != [1, 2, *bare]
    assert open_tokenizer(str(tmp_path)).decode(encoded("</s>the", legacy=False)) == "the"
    more = {"added_tokens_decoder": {"400": {"content": "<pad>"}, "401": {"content": "<pad>x"}}}
    assert encoded("the<pad>x<pad>", **more) == [1, *bare, 401, 400], "the longest counts"
    with pytest.raises(InputRefused, match="do not belong|should have the id"):
        encoded("x", added_tokens_decoder={"5": {"content": "<pad>", "special": True}})


@pytest.mark.parametrize(
    "data", [b"", b"\x0a\xff\xff\xff\xff", b"\x00" * 99, b"version https://git-lfs.github.com/spec/v1\n"]
)
def test_a_broken_model_is_refused(tmp_path: Path, data: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(InputRefused) as caught:
        open_tokenizer(str(tmp_path))
    assert caught.value.code in ("tokenizer-format", "lfs-pointer")
    assert "\n" not in caught.value.line()


# --- tiktoken


def ranks(small: ModuleType) -> bytes:
    """The ranks of the byte-level BPE without its special tokens."""
    from llamactl.tokens.fast import byte_alphabet

    letters = byte_alphabet()
    tokens = sorted(small.byte_bpe().get_vocab().items(), key=lambda x: x[1])[3:]
    return b"".join(base64.b64encode(bytes(letters[c] for c in t)) + b" %d\n" % n for n, (t, _) in enumerate(tokens))


def test_ranks_are_llama_3_or_refused(small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(ranks(small))
    with pytest.raises(
        InputRefused, match=r"397 ranks of a tiktoken vocabulary for a model of 653 rows; .* 128,256 rows"
    ):
        open_tokenizer(str(tmp_path), vocab=653)
    monkeypatch.setattr("llamactl.tokens.bpe.LLAMA3_RANKS", 397)
    ours = open_tokenizer(str(tmp_path), vocab=397 + 256)
    assert (ours.kind, ours.size) == ("tiktoken", 653)
    assert ours.encode("<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>")[:2] == [397, 397 + 6]
    assert {ours.backend.token(i) for i in ours.ends} == {"<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"}
    assert ours.id_of("<|reserved_special_token_0|>") == 397 + 2
    for text in small.SAMPLES:
        assert ours.decode(ours.encode(text)) == text


def test_ranks_merge_as_tiktoken_does(small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    from llamactl.tokens.bpe import read_ranks
    from llamactl.tokens.splits import LLAMA3

    monkeypatch.setattr("llamactl.tokens.bpe.LLAMA3_RANKS", 397)
    (tmp_path / "tokenizer.model").write_bytes(ranks(small))
    ours = open_tokenizer(str(tmp_path))
    theirs = tiktoken.Encoding("t", pat_str=LLAMA3[0], mergeable_ranks=read_ranks("r", ranks(small)), special_tokens={})
    for text in (*small.SAMPLES, small.TEXT):
        assert ours.encode(text, special=False) == theirs.encode_ordinary(text)


def test_a_token_is_put_together_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ab is merged before bc, so abc comes from ab and c though it could come from a and bc."""
    monkeypatch.setattr("llamactl.tokens.bpe.LLAMA3_RANKS", 259)
    tokens = [*(bytes([b]) for b in range(256)), b"ab", b"bc", b"abc"]
    lines = b"".join(base64.b64encode(t) + b" %d\n" % n for n, t in enumerate(tokens))
    (tmp_path / "tokenizer.model").write_bytes(lines)
    assert open_tokenizer(str(tmp_path)).encode("abcd", special=False) == [258, ord("d")]


@pytest.mark.parametrize(
    "line", [b"YQ== 0\nYg== 2\n", b"YQ== 0\nYQ== 1\n", b"YQ== 0\nnot base64! 1\n", b"YQ== 0\nYQ 1\n"]
)
def test_broken_ranks_are_refused(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(line)
    with pytest.raises(InputRefused) as caught:
        open_tokenizer(str(tmp_path))
    assert caught.value.code == "tokenizer-format"


# --- bytes, nothing, hostile files


def test_bytes_only_where_a_file_says_so(tmp_path: Path, small: ModuleType) -> None:
    path = small.folder(tmp_path, config={"model_type": "gpt2", "vocab_size": 256})
    with pytest.raises(NotAvailable) as caught:
        open_tokenizer(path)
    assert (caught.value.code, caught.value.help) == ("tokenizer-missing", "give token ids with --tokens")
    ours = open_tokenizer(small.folder(tmp_path, tokenizer_config={"tokenizer_class": "ByT5Tokenizer"}, config={}))
    assert ours.encode("aé") == [100, 198, 172, 1]
    assert ours.decode([100, 198, 172, 1]) == "aé"
    assert byte_tokenizer().encode("aé") == [97, 195, 169]


def test_what_is_there_but_not_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(NotAvailable, match=r"only tekken.json"):
        open_tokenizer(str(tmp_path))


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotAvailable):
        open_tokenizer(str(tmp_path / "no"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"not json",
        b"[" * 10_000,
        b'{"a":' * 5_000,
        b"\xff\xfe",
        b'{"model": {}}',
        b"version https://git-lfs.github.com/spec/v1\n",
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
    ],
)
def test_a_broken_tokenizer_json_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(InputRefused) as caught:
        open_tokenizer(str(tmp_path))
    assert "\n" not in caught.value.line()


def test_a_huge_tokenizer_json_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "tokenizer.json", "wb") as f:
        f.truncate(64_000_001)
    with pytest.raises(InputRefused, match="64,000,001 bytes; at most 64,000,000"):
        open_tokenizer(str(tmp_path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_only_regular_files_inside_the_folder(tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    os.mkfifo(inside / "tokenizer.json")
    with pytest.raises(InputRefused, match="named pipe"):
        open_tokenizer(str(inside))
    os.unlink(inside / "tokenizer.json")
    (tmp_path / "other.json").write_text("{}")
    os.symlink(tmp_path / "other.json", inside / "tokenizer.json")
    with pytest.raises(InputRefused) as caught:
        open_tokenizer(str(inside))
    assert caught.value.code == "link-outside"


def test_a_byte_order_mark_is_no_part_of_the_file(small: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xef\xbb\xbf" + small.byte_bpe().to_str().encode())
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(NAMES).encode())
    assert open_tokenizer(str(tmp_path)).names["bos_token"] == small.BOS


@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": "yes"},
        {"bos_token": 7},
        {"bos_token": ""},
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"-1": {"content": "x"}}},
        {"added_tokens_decoder": {"1": "x"}},
        {"added_tokens_decoder": {"9" * 30: {"content": "x"}}},
        {"added_tokens_decoder": {"999999": {"content": "x"}}},
    ],
)
def test_a_broken_tokenizer_config_is_refused(small: ModuleType, tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(InputRefused):
        open_tokenizer(small.folder(tmp_path, small.byte_bpe(), tokenizer_config=config))


def test_an_id_beyond_the_models_rows_is_refused(small: ModuleType, tmp_path: Path) -> None:
    path = small.folder(tmp_path, small.byte_bpe(), config={"vocab_size": 300})
    assert max(open_tokenizer(path).encode("x y z")) < 300
    with pytest.raises(InputRefused, match=r"the model has 300 rows") as caught:
        open_tokenizer(path).encode("the quick brown fox")
    assert caught.value.code == "token-range"
    assert open_tokenizer(path, vocab=400).encode("the quick brown fox")


def test_half_a_surrogate_pair_is_no_text(small: ModuleType, tmp_path: Path) -> None:
    for ours in (open_tokenizer(small.folder(tmp_path, small.byte_bpe())), byte_tokenizer()):
        with pytest.raises(InputRefused, match="character 1 of the text is half a surrogate pair"):
            ours.encode("a\ud800")


def test_a_missing_package_says_what_to_install(
    small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small.folder(tmp_path, small.byte_bpe())
    model = tmp_path / "sp"
    model.mkdir()
    (model / "tokenizer.model").write_bytes(small.piece_model())
    for name, at in (("tokenizers", path), ("sentencepiece", str(model))):
        monkeypatch.setitem(__import__("sys").modules, name, None)
        with pytest.raises(NotAvailable, match=f"the package {name} is not installed") as caught:
            open_tokenizer(at)
        assert (caught.value.code, caught.value.help) == ("extra-missing", "pip install 'llamactl[generate]'")


@settings(max_examples=150, deadline=None)
@given(cut=some.integers(0, 5000), at=some.integers(0, 5000), byte=some.integers(0, 255))
def test_a_damaged_model_never_crashes(
    small: ModuleType, tmp_path_factory: pytest.TempPathFactory, cut: int, at: int, byte: int
) -> None:
    """One byte changed and the end cut off: it opens, or it is one refusal."""
    folder = tmp_path_factory.mktemp("d")
    data = bytearray(small.piece_model())
    data[at % len(data)] = byte
    (folder / "tokenizer.model").write_bytes(data[: len(data) - cut % len(data)])
    with contextlib.suppress(LlamactlError):
        open_tokenizer(str(folder)).encode("the quick brown fox")
