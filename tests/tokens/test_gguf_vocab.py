"""Vocabularies in GGUF files: the ids of the tokenizer they were made from, and llama.cpp's own test vectors."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llamactl.checkpoint.gguf import read_header
from llamactl.errors import InputRefused, LlamactlError, NotAvailable
from llamactl.tokens import Stream, chat, end_tokens, open_tokenizer, sampling_defaults
from llamactl.tokens.splits import splits

gguf = pytest.importorskip("gguf")
# A folder with ggml-vocab-*.gguf beside their .inp and .out files, as llama.cpp has them in models/
VECTORS = os.environ.get("LLAMACTL_VOCABS", "")


def write(path: Path, model: str, tokens: list[str], **more: Any) -> str:
    """A GGUF file without tensors. more: pre, types, scores, merges, and other keys of tokenizer.ggml as they are."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    for key, add in (
        ("types", writer.add_token_types),
        ("scores", writer.add_token_scores),
        ("merges", writer.add_token_merges),
        ("pre", writer.add_tokenizer_pre),
        ("template", writer.add_chat_template),
    ):
        if more.get(key) is not None:
            add(more[key])
    for key, value in more.items():
        if key.endswith("_id"):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        elif key.startswith("add_"):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif key.startswith("general_"):
            writer.add_float32(key.replace("general_sampling_", "general.sampling."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(path)


def bpe(small: ModuleType, path: Path, size: int = 400, **more: Any) -> str:
    """The byte-level BPE of the tests as GGUF."""
    import json

    model = json.loads(small.byte_bpe(size).to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [3 if n < 3 else 1 for n in range(len(tokens))]
    return write(
        path,
        "gpt2",
        tokens,
        **{
            "types": types,
            "pre": "gpt-2",
            "merges": [" ".join(m) for m in model["merges"]],
            "bos_token_id": 0,
            "eos_token_id": 1,
            **more,
        },
    )


@pytest.mark.parametrize("size", [400, 5000])
def test_the_ids_are_those_of_the_source(small: ModuleType, tmp_path: Path, size: int) -> None:
    """5,000 tokens are more than the header reader keeps in memory: they are read from the file."""
    source = small.byte_bpe(size)
    tokens = source.get_vocab_size()
    ours = open_tokenizer(bpe(small, tmp_path / "m.gguf", size))
    assert (ours.kind, ours.size) == ("gguf", tokens)
    for text in (*small.SAMPLES, small.TEXT, f"{small.TURN}the{small.EOS}"):
        assert ours.encode(text) == source.encode(text).ids
        assert ours.decode(ours.encode(text), skip_special=False) == text


def test_bos_and_eos_as_the_file_says(small: ModuleType, tmp_path: Path) -> None:
    def ids(**more: Any) -> list[int]:
        return open_tokenizer(bpe(small, tmp_path / "m.gguf", **more)).encode("the")

    bare = ids()
    assert ids(add_bos_token=True) == [0, *bare]
    assert ids(add_bos_token=True, add_eos_token=True) == [0, *bare, 1]
    assert ids(pre="llama-bpe")[0] == 0, "the default of this kind"
    assert ids(pre="llama-bpe", add_bos_token=False) == bare


def test_the_cut_is_the_named_one(small: ModuleType, tmp_path: Path) -> None:
    tokenizers = {pre: open_tokenizer(bpe(small, tmp_path / "m.gguf", pre=pre)) for pre in splits()}
    assert len(tokenizers) > 40
    for ours in tokenizers.values():
        for text in (*small.SAMPLES, small.TEXT):
            assert ours.decode(ours.encode(text)) == text
    path = write(tmp_path / "m.gguf", "gpt2", ["(", "a", "(a"], merges=["( a"], pre="qwen2")
    assert open_tokenizer(path).encode("(a") == [2]
    path = write(tmp_path / "m.gguf", "gpt2", ["(", "a", "(a"], merges=["( a"], pre="gpt-2")
    assert open_tokenizer(path).encode("(a") == [0, 1]
    lengths = {pre: len(t.encode("1234", special=False)) for pre, t in tokenizers.items()}
    assert lengths["qwen2"] == lengths["smollm"] == 4
    assert lengths["gpt-2"] < 4
    with pytest.raises(InputRefused, match=r"tokenizer.ggml.pre is 'zap': how it cuts a text is not known") as caught:
        open_tokenizer(bpe(small, tmp_path / "m.gguf", pre="zap"))
    assert caught.value.code == "tokenizer-unknown"


@pytest.mark.parametrize("prefix", [True, False])
def test_scored_pieces_are_sentencepieces(small: ModuleType, tmp_path: Path, prefix: bool) -> None:
    import sentencepiece

    engine = sentencepiece.SentencePieceProcessor()
    engine.LoadFromSerializedProto(small.piece_model(prefix))
    n = engine.GetPieceSize()
    types = [2 if engine.IsUnknown(i) else 3 if engine.IsControl(i) else 6 if engine.IsByte(i) else 1 for i in range(n)]
    path = write(
        tmp_path / "m.gguf",
        "llama",
        [engine.IdToPiece(i) for i in range(n)],
        types=types,
        scores=[engine.GetScore(i) for i in range(n)],
        add_space_prefix=prefix,
    )
    ours = open_tokenizer(path)
    for text in (*small.SAMPLES, small.TEXT, "☃\x00"):
        ids = ours.encode(text)
        assert ids == [1, *engine.EncodeAsIds(text)]
        stream = Stream(ours)
        assert "".join(map(stream.push, ids)) + stream.flush() == ours.decode(ids) == text
    assert ours.encode("the[TURN]") == [1, *engine.EncodeAsIds("the"), engine.PieceToId("[TURN]")]
    assert (ours.ends, ours.names["bos_token"], ours.lead) == (frozenset({2}), "<s>", "strip" if prefix else "keep")


def test_ends_template_and_settings(small: ModuleType, tmp_path: Path) -> None:
    path = bpe(
        small,
        tmp_path / "m.gguf",
        eot_token_id=2,
        general_sampling_temp=0.5,
        template="{{ bos_token }}{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}",
    )
    ours = open_tokenizer(path)
    assert end_tokens(path, ours) == end_tokens(path, None) == frozenset({1, 2})
    assert chat(path, ours, [{"role": "user", "content": "the"}]) == [0, 2, *ours.encode("the")]
    assert sampling_defaults(path) == {"temperature": 0.5}


def test_usual_control_tokens_end_a_text(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<|end|>", "<|eot_id|>", "a"]
    path = write(tmp_path / "m.gguf", "llama", tokens, types=[2, 3, 3, 3, 1, 1], scores=[0.0] * 6, eos_token_id=2)
    assert open_tokenizer(path).ends == {2, 3}, "a token of ordinary text ends nothing"
    harmony = [*tokens[:3], "<|end|>", "<|return|>", "<|call|>"]
    path = write(tmp_path / "m.gguf", "llama", harmony, types=[2, 3, 3, 3, 3, 3], scores=[0.0] * 6, eos_token_id=4)
    assert open_tokenizer(path).ends == {2, 4, 5}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"types": [1, 1]}, "3 tokens, but 2 types"),
        ({"merges": ["ab"]}, "not two parts"),
        ({"merges": ["a "]}, "not two parts"),
        ({"merges": ["a x"]}, "not a BPE vocabulary"),
        ({"tokens": ["a", "b", "a"]}, "1 of 3 tokens stand there twice"),
        ({"tokens": ["a", "b" * 5000, "ab"]}, "a token of 5,000 characters"),
        ({"merges": None}, "merges is missing"),
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; known: gpt2, llama"),
        ({"model": "llama", "scores": [1.0]}, "3 tokens, but 1 scores"),
        ({"model": "llama", "scores": [1.0, float("nan"), 0.0]}, "not finite"),
        ({"model": "llama", "types": [6, 1, 1]}, "all 256"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    given = {"model": "gpt2", "tokens": ["a", "b", "ab"], "merges": ["a b"], "pre": "gpt-2", "types": [1, 1, 1], **more}
    path = write(tmp_path / "m.gguf", given.pop("model"), given.pop("tokens"), **given)
    with pytest.raises(InputRefused, match=said) as caught:
        open_tokenizer(path)
    assert "\n" not in caught.value.line()


def test_a_file_without_a_vocabulary(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(NotAvailable) as caught:
        open_tokenizer(str(tmp_path / "m.gguf"))
    assert caught.value.code == "tokenizer-missing"


def test_a_file_cut_short_is_one_refusal(small: ModuleType, tmp_path: Path) -> None:
    path = Path(bpe(small, tmp_path / "m.gguf", 5000))
    data = path.read_bytes()
    for n in range(0, len(data), max(len(data) // 40, 1)):
        path.write_bytes(data[:n])
        with pytest.raises(LlamactlError):
            open_tokenizer(str(path))


@pytest.mark.skipif(not VECTORS, reason="LLAMACTL_VOCABS names no folder with llama.cpp's vocabularies")
def test_the_vectors_of_llama_cpp() -> None:
    seen = 0
    for out in sorted(Path(VECTORS).glob("ggml-vocab-*.gguf.out")):
        path = str(out.with_suffix(""))
        if read_header(path).metadata["tokenizer.ggml.model"] not in ("gpt2", "llama", "gemma4"):
            continue
        ours = open_tokenizer(path)
        text = out.with_suffix(".inp").read_bytes().decode("utf-8")
        for given, wanted in zip(text.split("\n__ggml_vocab_test__\n"), out.read_text().split("\n"), strict=False):
            assert ours.encode(given, special=False) == [int(x) for x in wanted.split()], (path, given)
            seen += 1
    assert seen > 300
