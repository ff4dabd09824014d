"""A folder's tokenizer as GGUF fields: a reader of the file gives every text the same tokens, or it is refused."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llamactl.errors import InputRefused, NotAvailable
from llamactl.tokens import Tokenizer, end_tokens, open_tokenizer
from llamactl.tokens.ggufspm import read_model
from llamactl.tokens.splits import GPT2, LLAMA3, QWEN2, splits
from llamactl.tokens.togguf import first_difference, gguf_tokenizer

gguf = pytest.importorskip("gguf")
NAMES = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
HARD = (
    "Hello, world!", "the quick   brown\n\n fox", "  \n\n\t x  ", "it's I'LL we'Ve don't o'clock", "12 345 67890 3.14",
    "naïve café Straße", "日本語のテキスト。中文", "🤖🎉🏳️‍🌈", "\r\n\r\n a\r b", "def f(x):\n\treturn x  # c", "", " ",
    "a", "\x00\x7f", "the" * 30, "x" + " " * 45 + "y", "----====____", "Ünïcödé ½ ² ٣",
)


def write(path: Path, fields: list[tuple[str, str, Any]]) -> str:
    """A GGUF file of these fields alone, by the package that defines the format; types are checked on the way."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, kind, value in fields:
        if kind.startswith("ARRAY:"):
            item = {"STRING": str, "INT32": int, "FLOAT32": float}[kind.removeprefix("ARRAY:")]
            assert all(type(x) is item for x in value), key
            writer.add_array(key, value)
        else:
            assert type(value) is {"STRING": str, "UINT32": int, "BOOL": bool}[kind], key
            getattr(writer, f"add_{kind.lower()}")(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(path)


def carried(folder: str, rows: int, path: Path, notes: list[str] | None = None) -> tuple[dict[str, Any], str]:
    """The fields by key, and a GGUF file with them."""
    fields = gguf_tokenizer(folder, rows, notes)
    assert len({key for key, _, _ in fields}) == len(fields)
    return {key.removeprefix("tokenizer.ggml."): value for key, _, value in fields}, write(path, fields)


def texts(*special: str) -> list[str]:
    """The hard texts, others by chance, and each special token in the middle of a text."""
    dice = random.Random(7)
    letters = ("ab ", "the quick brown\n", "1234567890 ", "日本語テキ 🤖é", "\t\r\n -='", "naïve'd 've")
    mixed = ["".join(dice.choice(dice.choice(letters)) for _ in range(dice.randint(1, 60))) for _ in range(300)]
    return [*HARD, *mixed, *(t for s in special for t in (s, f"a{s}b", f"the {s} dog {s}{s}"))]


def same(one: Tokenizer, other: Tokenizer, given: list[str]) -> None:
    for text in given:
        for special in (True, False):
            ids = one.encode(text, special=special)
            assert ids == other.encode(text, special=special), text
            for skip in (True, False):
                assert one.decode(ids, skip_special=skip) == other.decode(ids, skip_special=skip), text


def engine(small: ModuleType, *splits: str, use_regex: bool = False, digits: bool = False, **model: Any) -> Any:
    """The byte-level BPE of the tests behind another cut."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    state = json.loads(small.byte_bpe().to_str())
    state["model"] |= model
    out = Tokenizer.from_str(json.dumps(state))
    out.pre_tokenizer = pre_tokenizers.Sequence([
        *([pre_tokenizers.Digits(True)] if digits else []),
        *(pre_tokenizers.Split(Regex(s), "isolated") for s in splits),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex),
    ])
    return out


# --- byte-level BPE


def cuts(small: ModuleType) -> list[tuple[str, Any]]:
    known = splits()
    return [
        ("gpt-2", small.byte_bpe()), ("gpt-2", engine(small, use_regex=True)), ("gpt-2", engine(small, *GPT2)),
        ("smollm", engine(small, use_regex=True, digits=True)), ("qwen2", engine(small, *QWEN2)),
        ("llama-bpe", engine(small, *LLAMA3, ignore_merges=True)), ("dbrx", engine(small, *LLAMA3)),
        ("tekken", engine(small, *known["tekken"].patterns, ignore_merges=True)),
        ("gpt-4o", engine(small, *known["gpt-4o"].patterns)),
        ("deepseek-v3", engine(small, *known["deepseek-v3"].patterns)),
    ]


def test_a_byte_level_bpe_is_carried_with_its_cut(small: ModuleType, tmp_path: Path) -> None:
    for n, (pre, source) in enumerate(cuts(small)):
        folder = small.folder(tmp_path / str(n), source, tokenizer_config={**NAMES, "add_bos_token": n % 2 == 0})
        notes: list[str] = []
        found, path = carried(folder, 400, tmp_path / f"{n}.gguf", notes)
        assert (found["model"], found["pre"], notes) == ("gpt2", pre, [])
        assert found["token_type"] == [3] * 3 + [1] * 397
        assert found["add_bos_token"] is (n % 2 == 0)
        same(open_tokenizer(folder), open_tokenizer(path), texts(small.BOS, small.TURN))


def test_the_vocabulary_is_that_of_the_file(small: ModuleType, tmp_path: Path) -> None:
    found, _ = carried(small.folder(tmp_path / "m", small.byte_bpe(), tokenizer_config=NAMES), 400, tmp_path / "m.gguf")
    model = json.loads(small.byte_bpe().to_str())["model"]
    assert {t: i for i, t in enumerate(found["tokens"])} == model["vocab"]
    assert found["merges"] == [" ".join(m) for m in model["merges"]]
    assert (found["bos_token_id"], found["eos_token_id"]) == (0, 1)
    assert (found["add_bos_token"], found["add_eos_token"], found["add_space_prefix"]) == (False, False, False)


def test_rows_without_a_token_are_padding(small: ModuleType, tmp_path: Path) -> None:
    folder = small.folder(tmp_path / "m", small.byte_bpe(), tokenizer_config={
        "added_tokens_decoder": {"400": {"content": "<new>"}, "401": {"content": "<sp>", "special": True}}})
    found, path = carried(folder, 405, tmp_path / "m.gguf")
    assert found["tokens"][400:] == ["<new>", "<sp>", "[PAD402]", "[PAD403]", "[PAD404]"]
    assert found["token_type"][400:] == [4, 3, 5, 5, 5]
    same(open_tokenizer(folder), open_tokenizer(path), texts("<new>", "<sp>", "[PAD402]"))
    with pytest.raises(InputRefused, match=r"402 tokens for a model of 401 rows") as caught:
        gguf_tokenizer(folder, 401)
    assert caught.value.code == "token-range"
    assert len(carried(folder, 402, tmp_path / "m.gguf")[0]["tokens"]) == 402


def test_a_padding_name_that_a_token_has_is_refused(small: ModuleType, tmp_path: Path) -> None:
    folder = small.folder(tmp_path, small.byte_bpe(), tokenizer_config={
        "added_tokens_decoder": {"400": {"content": "[PAD401]"}}})
    assert gguf_tokenizer(folder, 401)
    with pytest.raises(InputRefused, match=r"two tokens would be named '\[PAD401\]'"):
        gguf_tokenizer(folder, 402)


def test_vocab_json_with_merges(small: ModuleType, tmp_path: Path) -> None:
    small.byte_bpe().model.save(str(tmp_path))
    folder = small.folder(tmp_path, tokenizer_config={"tokenizer_class": "GPT2Tokenizer", **NAMES})
    found, path = carried(folder, 400, tmp_path / "m.gguf")
    assert (found["pre"], found["bos_token_id"]) == ("gpt-2", 0)
    same(open_tokenizer(folder), open_tokenizer(path), texts(small.BOS))
    notes: list[str] = []
    folder = small.folder(tmp_path, tokenizer_config={"tokenizer_class": "Qwen2Tokenizer"})
    found, path = carried(folder, 400, tmp_path / "m.gguf", notes)
    assert found["pre"] == "qwen2"
    assert ["NFC" in n for n in notes] == [True]
    same(open_tokenizer(folder), open_tokenizer(path), texts())
    assert open_tokenizer(folder).encode("e\u0301") != open_tokenizer(path).encode("e\u0301"), "what the note says"


def test_the_ranks_of_a_tiktoken_file(small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import base64

    from llamactl.tokens.fast import byte_alphabet

    letters = byte_alphabet()
    tokens = sorted(small.byte_bpe().get_vocab().items(), key=lambda x: x[1])[3:]
    lines = [base64.b64encode(bytes(letters[c] for c in t)) + b" %d\n" % n for n, (t, _) in enumerate(tokens)]
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    monkeypatch.setattr("llamactl.tokens.bpe.LLAMA3_RANKS", 397)
    found, path = carried(str(tmp_path), 653, tmp_path / "m.gguf")
    assert (found["pre"], found["add_bos_token"], found["bos_token_id"]) == ("llama-bpe", True, 397)
    assert found["token_type"] == [1] * 397 + [3] * 256
    source, ours = open_tokenizer(str(tmp_path), vocab=653), open_tokenizer(path)
    same(source, ours, texts("<|eot_id|>", "<|start_header_id|>"))
    assert source.ends <= ours.ends


def test_a_cut_that_has_no_name_is_refused(small: ModuleType, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, normalizers, pre_tokenizers

    byte = small.byte_bpe().to_str()

    def refused(n: int, source: Any) -> str:
        with pytest.raises(InputRefused) as caught:
            gguf_tokenizer(small.folder(tmp_path / str(n), source), 400)
        assert caught.value.code == "tokenizer-format"
        assert "\n" not in caught.value.line()
        return caught.value.message

    assert "no name for the pre-tokenizer" in refused(0, engine(small, r"\p{L}+|\p{N}|."))
    assert "with ignore_merges" in refused(1, engine(small, *QWEN2, ignore_merges=True))
    prefixed = Tokenizer.from_str(byte)
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert "add_prefix_space" in refused(2, prefixed)
    inverted = engine(small, *QWEN2)
    inverted.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(__import__("tokenizers").Regex(QWEN2[0]), "removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    assert "Removed" in refused(3, inverted)
    twice = Tokenizer.from_str(byte)
    twice.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Digits(True)])
    assert "no name" in refused(4, twice)
    lower = Tokenizer.from_str(byte)
    lower.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    assert "normalized by Lowercase" in refused(5, lower)
    assert "end_of_word_suffix is '</w>'" in refused(6, engine(small, *GPT2, end_of_word_suffix="</w>"))


def test_other_kinds_of_vocabulary_are_refused(small: ModuleType, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    with pytest.raises(InputRefused, match="type WordLevel"):
        gguf_tokenizer(small.folder(tmp_path / "w", words), 400)
    folder = small.folder(tmp_path / "b", tokenizer_config={"tokenizer_class": "ByT5Tokenizer"})
    with pytest.raises(InputRefused, match="a vocabulary of bytes"):
        gguf_tokenizer(folder, 400)


def test_a_byte_without_a_token_is_refused_where_something_stands_for_it(small: ModuleType, tmp_path: Path) -> None:
    state = json.loads(small.byte_bpe().to_str())
    id = state["model"]["vocab"].pop("Z")
    state["model"]["vocab"]["<hole>"] = id
    from tokenizers import Tokenizer

    folder = small.folder(tmp_path / "a", Tokenizer.from_str(json.dumps(state)))
    same(open_tokenizer(folder), open_tokenizer(carried(folder, 400, tmp_path / "a.gguf")[1]), texts("Z", "aZb"))
    state["model"]["unk_token"] = small.BOS
    with pytest.raises(InputRefused, match="stands for bytes without a token"):
        gguf_tokenizer(small.folder(tmp_path / "b", Tokenizer.from_str(json.dumps(state))), 400)


# --- what stands around a text, and what ends it


def test_bos_and_eos_of_the_post_processor(small: ModuleType, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    def found(single: str, **config: Any) -> dict[str, Any]:
        source = Tokenizer.from_str(small.byte_bpe().to_str())
        source.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(small.BOS, 0), (small.EOS, 1), (small.TURN, 2)])
        folder = small.folder(tmp_path / "m", source, tokenizer_config=config)
        fields, path = carried(folder, 400, tmp_path / "m.gguf")
        same(open_tokenizer(folder), open_tokenizer(path), ["a", "", "the quick", small.BOS])
        return fields

    def flags(fields: dict[str, Any]) -> tuple[bool, bool]:
        return fields["add_bos_token"], fields["add_eos_token"]

    assert flags(found(f"{small.BOS} $A", **NAMES)) == (True, False)
    assert flags(found(f"{small.BOS} $A {small.EOS}", **NAMES)) == (True, True)
    assert flags(found(f"$A {small.EOS}", **NAMES)) == (False, True)
    assert flags(found("$A", **NAMES)) == (False, False)
    unnamed = found(f"{small.TURN} $A")
    assert (flags(unnamed), unnamed["bos_token_id"]) == ((True, False), 2)
    for single in (f"{small.TURN} $A", f"{small.BOS} {small.BOS} $A", f"$A {small.TURN}"):
        with pytest.raises(InputRefused, match="a text gets the tokens"):
            found(single, **NAMES)


def test_bos_where_the_probe_has_no_token(small: ModuleType, tmp_path: Path) -> None:
    """Before nothing and behind nothing is one place; the names say which was meant."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    source = Tokenizer(models.BPE({"b": 0, small.BOS: 1, small.EOS: 2}, []))
    source.pre_tokenizer, source.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for single, flags in ((f"{small.BOS} $A", (True, False)), (f"$A {small.EOS}", (False, True))):
        source.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(small.BOS, 1), (small.EOS, 2)])
        folder = small.folder(tmp_path / "m", source, tokenizer_config=NAMES)
        found, _ = carried(folder, 3, tmp_path / "m.gguf")
        assert (found["add_bos_token"], found["add_eos_token"]) == flags


def test_a_difference_is_found_in_ids_and_in_text(small: ModuleType, tmp_path: Path) -> None:
    from dataclasses import replace

    one = open_tokenizer(small.folder(tmp_path, small.byte_bpe(), tokenizer_config=NAMES))
    assert first_difference(one, one, [*HARD, small.BOS]) is None
    assert first_difference(one, replace(one, skipped=frozenset()), ["a", small.BOS, "b"]) == small.BOS
    other = open_tokenizer(small.folder(tmp_path, engine(small, *QWEN2)))
    assert first_difference(one, other, ["the", "def f(x):\n    return x**2"]) == "def f(x):\n    return x**2"


def test_ids_and_ends_of_the_other_files(small: ModuleType, tmp_path: Path) -> None:
    folder = small.folder(tmp_path / "m", small.byte_bpe(), config={"bos_token_id": 0, "eos_token_id": 1},
                          generation_config={"eos_token_id": [2, 300, 301], "pad_token_id": 7})
    notes: list[str] = []
    found, path = carried(folder, 400, tmp_path / "m.gguf", notes)
    assert {k: v for k, v in found.items() if k.endswith("_id")} == {
        "bos_token_id": 0, "eos_token_id": 2, "padding_token_id": 7, "eot_token_id": 300, "eom_token_id": 301}
    assert open_tokenizer(path).ends == end_tokens(folder, open_tokenizer(folder)) | {1}, "<|end|> ends one everywhere"
    assert notes == []
    small.folder(tmp_path / "m", generation_config={"eos_token_id": [2, 300, 301, 302], "pad_token_id": 999})
    found, _ = carried(folder, 400, tmp_path / "m.gguf", notes)
    assert "padding_token_id" not in found, "an id that the model has no row for is none"
    assert notes == ["3 tokens end a text, GGUF has words for 2: [300, 301, 302]"]
    small.folder(tmp_path / "m", tokenizer_config={"eos_token": "<|turn|>", "unk_token": "<|begin|>"},
                 generation_config={"eos_token_id": 1})
    found, _ = carried(folder, 400, tmp_path / "m.gguf")
    assert (found["eos_token_id"], found["unknown_token_id"]) == (2, 0)


def test_the_chat_template(small: ModuleType, tmp_path: Path) -> None:
    folder = small.folder(tmp_path / "m", small.byte_bpe())
    assert all(key != "tokenizer.chat_template" for key, _, _ in gguf_tokenizer(folder, 400))
    small.folder(tmp_path / "m", tokenizer_config={"chat_template": "{{ x }}"})
    assert ("tokenizer.chat_template", "STRING", "{{ x }}") in gguf_tokenizer(folder, 400)
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ y }}")
    assert ("tokenizer.chat_template", "STRING", "{{ y }}") in gguf_tokenizer(folder, 400)
    small.folder(tmp_path / "m", tokenizer_config={"chat_template": 7})
    os.unlink(tmp_path / "m" / "chat_template.jinja")
    with pytest.raises(InputRefused, match="chat_template must be text"):
        gguf_tokenizer(folder, 400)


def test_no_tokenizer_is_none(small: ModuleType, tmp_path: Path) -> None:
    notes: list[str] = []
    folder = small.folder(tmp_path / "m", config={"vocab_size": 400})
    assert gguf_tokenizer(folder, 400, notes) == [("tokenizer.ggml.model", "STRING", "none")]
    assert notes == ["no tokenizer.json, tokenizer.model or vocab.json with merges.txt in this folder"]
    with pytest.raises(NotAvailable) as caught:
        open_tokenizer(write(tmp_path / "m.gguf", gguf_tokenizer(folder, 400)))
    assert caught.value.code == "tokenizer-missing"
    (tmp_path / "m" / "tokenizer.json").write_text("{")
    with pytest.raises(InputRefused):
        gguf_tokenizer(folder, 400)


def test_a_missing_package_is_no_missing_tokenizer(
    small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small.folder(tmp_path, small.byte_bpe())
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(NotAvailable) as caught:
        gguf_tokenizer(folder, 400)
    assert caught.value.code == "extra-missing"


def test_tokens_that_take_their_surroundings_are_told(small: ModuleType, tmp_path: Path) -> None:
    new = {"content": "<new>", "special": True}
    for key, said in (("rstrip", "takes the spaces behind it"), ("lstrip", "takes the spaces before it"),
                      ("single_word", "is found only as a word of its own")):
        folder = small.folder(tmp_path / key, small.byte_bpe(), tokenizer_config={
            "added_tokens_decoder": {"400": {**new, key: True}, "401": {**new, "content": "<n2>", key: True}}})
        notes: list[str] = []
        _, path = carried(folder, 402, tmp_path / "m.gguf", notes)
        assert notes == [f"the token '<new>' (and 1 more) {said}, which GGUF cannot say of a token"]
        same(open_tokenizer(folder), open_tokenizer(path), texts())


def test_a_text_that_would_come_out_otherwise_is_refused(
    small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last word has the proof on hard texts, whatever was thought to be known before."""
    monkeypatch.setattr("llamactl.tokens.togguf._cut", lambda steps: QWEN2)
    with pytest.raises(InputRefused, match=r"would give the text .* other tokens") as caught:
        gguf_tokenizer(small.folder(tmp_path, small.byte_bpe()), 400)
    assert caught.value.code == "tokenizer-format"


# --- SentencePiece


def spm(small: ModuleType, prefix: bool = True, **more: Any) -> bytes:
    """The SentencePiece model of the tests; more: options of its trainer."""
    if not more:
        return bytes(small.piece_model(prefix))
    import io

    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(**{
        "sentence_iterator": iter(small.TEXT.splitlines()), "model_writer": out, "vocab_size": 400, "model_type": "bpe",
        "byte_fallback": True, "character_coverage": 0.98, "add_dummy_prefix": prefix, "minloglevel": 2,
        "remove_extra_whitespaces": False, "normalization_rule_name": "identity", "pad_id": -1, **more})
    return out.getvalue()


def fast(model: bytes, style: str) -> Any:
    """A tokenizer.json as transformers makes it of a SentencePiece model; merges in the order of their scores."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = read_model(model, "m").pieces
    vocab = {p.text: i for i, p in enumerate(pieces)}
    whole = [p for p in pieces if p.type == 1]
    normal = {p.text for p in whole}
    merges = [(p.text[:n], p.text[n:]) for p in sorted(whole, key=lambda p: -p.score) for n in range(1, len(p.text))
              if {p.text[:n], p.text[n:]} <= normal]
    out = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    if style == "prepend":
        out.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    elif style == "plain":
        out.normalizer = space
        out.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        out.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=style, split=False)
    strip = [] if style in ("plain", "never") else [decoders.Strip(" ", 1, 0)]
    out.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    out.add_special_tokens([AddedToken(p.text, normalized=False, special=True) for p in pieces if p.type in (2, 3)])
    return out


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_model_is_carried(small: ModuleType, tmp_path: Path, prefix: bool) -> None:
    (tmp_path / "tokenizer.model").write_bytes(spm(small, prefix))
    notes: list[str] = []
    found, path = carried(str(tmp_path), 410, tmp_path / "m.gguf", notes)
    pieces = read_model(spm(small, prefix), "m").pieces
    assert found["model"] == "llama"
    assert found["tokens"] == [p.text for p in pieces] + [f"[PAD{i}]" for i in range(400, 410)]
    assert found["token_type"] == [p.type for p in pieces] + [5] * 10
    assert found["scores"] == [p.score for p in pieces] + [-10000.0] * 10
    assert (found["add_space_prefix"], found["add_bos_token"], found["unknown_token_id"]) == (prefix, True, 0)
    assert notes == []
    same(open_tokenizer(str(tmp_path)), open_tokenizer(path), texts("</s>", "[TURN]"))


def test_pieces_are_read_as_sentencepiece_does(small: ModuleType) -> None:
    import sentencepiece

    for options in ({}, {"model_type": "unigram", "vocab_size": 330}, {"user_defined_symbols": ["<u>", "dog fox"]}):
        data = spm(small, True, **options)
        engine = sentencepiece.SentencePieceProcessor()
        engine.LoadFromSerializedProto(data)
        proto = read_model(data, "m")
        ids = range(engine.GetPieceSize())
        assert [(p.text, p.score) for p in proto.pieces] == [(engine.IdToPiece(i), engine.GetScore(i)) for i in ids]
        for i, p in enumerate(proto.pieces):
            assert (p.type == 2, p.type == 3, p.type == 6) == (engine.IsUnknown(i), engine.IsControl(i),
                                                               engine.IsByte(i))
        assert (proto.bpe, proto.prefix, proto.trim, proto.escape, proto.charsmap, proto.suffix) == (
            "model_type" not in options, True, False, True, False, False)
    assert read_model(spm(small, False, normalization_rule_name="nfkc"), "m").charsmap
    assert read_model(spm(small, False, treat_whitespace_as_suffix=True), "m").suffix
    empty = read_model(b"", "m")
    assert empty == read_model(b"\x12\x00\x1a\x00", "m")
    assert (empty.bpe, empty.prefix, empty.trim, empty.escape) == (False, True, True, True), "defaults"
    for broken in (b"\x0a\x05abc", b"\x0b", b"\x0a\x03\x15\x00\x00", b"\x48" + b"\xff" * 12 + b"\x01", b"\x0a",
                   b"\x0a\x02\x0a\x01", b"\x0a\x03\x0a\x01\xff"):
        with pytest.raises(InputRefused, match="not a SentencePiece model"):
            read_model(broken, "m")


def test_added_tokens_and_user_defined_pieces(small: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(spm(small, False, user_defined_symbols=["<u>", "dog▁fox", "▁▁▁"]))
    folder = small.folder(tmp_path, tokenizer_config={
        "add_bos_token": False, "add_eos_token": True, "added_tokens_decoder": {
            "400": {"content": "<pad>", "special": True}, "401": {"content": "<new one>"}}})
    notes: list[str] = []
    found, path = carried(folder, 402, tmp_path / "m.gguf", notes)
    assert found["tokens"][400:] == ["<pad>", "<new one>"]
    assert found["token_type"][3:6] + found["token_type"][400:] == [4, 4, 4, 3, 4]
    assert found["tokens"][3:6] == ["<u>", "dog fox", "   "], "as they stand in a text"
    assert (found["add_bos_token"], found["add_eos_token"]) == (False, True)
    assert notes == []
    source, ours = open_tokenizer(folder), open_tokenizer(path)
    same(source, ours, texts("<pad>", "<new one>", "<u>", "dog fox", "   "))
    assert source.encode("the dog fox", special=False)[-1] == 4
    (tmp_path / "tokenizer.model").write_bytes(spm(small, True, user_defined_symbols=["<u>"]))
    _, path = carried(folder, 402, tmp_path / "m.gguf", notes)
    assert ["the text behind each special token too" in n for n in notes] == [True]
    source, ours = open_tokenizer(folder), open_tokenizer(path)
    same(source, ours, texts())
    assert source.encode("the<u>dog") != ours.encode("the<u>dog"), "what the note says"


def test_what_a_sentencepiece_model_has_that_gguf_has_not(small: ModuleType, tmp_path: Path) -> None:
    def refused(data: bytes) -> str:
        (tmp_path / "tokenizer.model").write_bytes(data)
        with pytest.raises(InputRefused) as caught:
            gguf_tokenizer(str(tmp_path), 400)
        assert caught.value.code == "tokenizer-format"
        return caught.value.message

    for kind in ("unigram", "char"):
        more = {"vocab_size": 330} if kind == "unigram" else {"hard_vocab_limit": False}
        assert "is not BPE" in refused(spm(small, model_type=kind, **more))
    assert "changes the text" in refused(spm(small, normalization_rule_name="nfkc"))
    assert "changes the text" in refused(spm(small, treat_whitespace_as_suffix=True))
    (tmp_path / "tokenizer.model").write_bytes(spm(small, remove_extra_whitespaces=True))
    notes: list[str] = []
    found, path = carried(str(tmp_path), 400, tmp_path / "m.gguf", notes)
    assert found["remove_extra_whitespaces"] is True
    assert "spaces in a row" in notes[0]
    same(open_tokenizer(str(tmp_path)), open_tokenizer(path), texts())
    (tmp_path / "tokenizer.model").write_bytes(spm(small))
    small.folder(tmp_path, tokenizer_config={"legacy": False})
    _, path = carried(str(tmp_path), 400, tmp_path / "m.gguf", notes := [])
    assert "only the start of a text gets a space" in notes[0]
    same(open_tokenizer(str(tmp_path)), open_tokenizer(path), texts())


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(("style", "prefix"), [("prepend", True), ("plain", False), ("always", True), ("first", True),
                                               ("never", False)])
def test_a_tokenizer_json_of_pieces(small: ModuleType, tmp_path: Path, style: str, prefix: bool, beside: bool) -> None:
    model = spm(small, prefix)
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    folder = small.folder(tmp_path / "m", fast(model, style), tokenizer_config=config)
    if beside:
        (tmp_path / "m" / "tokenizer.model").write_bytes(model)
    notes: list[str] = []
    found, path = carried(folder, 400, tmp_path / "m.gguf", notes)
    pieces = read_model(model, "m").pieces
    assert (found["tokens"], found["token_type"]) == ([p.text for p in pieces], [p.type for p in pieces])
    assert found["add_space_prefix"] is prefix
    assert [n.split()[1] for n in notes] == {"always": ["text"], "first": ["text", "the"]}.get(style, [])
    source, ours = open_tokenizer(folder), open_tokenizer(path)
    if notes:  # what they say
        assert source.encode(" a") != ours.encode(" a")
        assert (source.encode("</s>a") == ours.encode("</s>a")) is (style == "always")
        same(source, ours, [t for t in texts() if not t.startswith((" ", "▁"))])
    else:
        same(source, ours, texts("</s>", "[TURN]"))


def test_merges_that_no_scores_can_say(small: ModuleType, tmp_path: Path) -> None:
    """One merge of many is missing: the pieces of the SentencePiece model decide, or nothing does."""
    from tokenizers import Tokenizer

    model = spm(small)
    state = json.loads(fast(model, "prepend").to_str())
    ways: dict[str, int] = {}
    for a, b in state["model"]["merges"]:
        ways[a + b] = ways.get(a + b, 0) + 1
    full = list(state["model"]["merges"])
    extra = next(m for m in reversed(full) if ways["".join(m)] > 1)
    for merges in ([m for m in full if m != extra], [full[-1], *full[:-1], extra]):
        state["model"]["merges"] = merges
        folder = tmp_path / str(len(merges))
        small.folder(folder, Tokenizer.from_str(json.dumps(state)))
        with pytest.raises(InputRefused, match="not those of pieces with scores"):
            gguf_tokenizer(str(folder), 400)
    state["model"]["merges"] = [m for m in full if m != extra]
    folder = tmp_path / "both"
    small.folder(folder, Tokenizer.from_str(json.dumps(state)))
    (folder / "tokenizer.model").write_bytes(model)
    found, _ = carried(str(folder), 400, tmp_path / "m.gguf")
    assert found["scores"] == [p.score for p in read_model(model, "m").pieces]
    (folder / "tokenizer.model").write_bytes(spm(small, False, user_defined_symbols=["<u>"]))
    with pytest.raises(InputRefused, match=r"the token \d+ is .* not what tokenizer.model has there"):
        gguf_tokenizer(str(folder), 400)


def test_characters_cut_in_other_ways_are_refused(small: ModuleType, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    def refused(name: str, source: Any) -> str:
        with pytest.raises(InputRefused) as caught:
            gguf_tokenizer(small.folder(tmp_path / name, source), 400)
        return caught.value.message

    split = fast(spm(small), "first")
    split.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=True)
    assert "none of a SentencePiece model" in refused("split", split)
    bare = fast(spm(small), "prepend")
    bare.normalizer = None
    assert "none of a SentencePiece model" in refused("bare", bare)
    keeps = fast(spm(small), "prepend")
    keeps.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert "put together" in refused("keeps", keeps)
    state = json.loads(fast(spm(small), "prepend").to_str())
    state["model"]["byte_fallback"] = False
    assert "byte_fallback true" in refused("bytes", Tokenizer.from_str(json.dumps(state)))
    state["model"]["byte_fallback"] = True
    hole = json.loads(json.dumps(state))
    hole["model"]["vocab"]["<hole>"] = hole["model"]["vocab"].pop("<0x41>")
    assert "all 256 bytes must be tokens" in refused("hole", Tokenizer.from_str(json.dumps(hole)))
    state["model"]["ignore_merges"] = True
    assert "ignore_merges false" in refused("whole", Tokenizer.from_str(json.dumps(state)))
