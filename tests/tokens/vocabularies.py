"""Small vocabularies that the tests make themselves: a trained byte-level BPE, a trained SentencePiece model."""

from __future__ import annotations

import io
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

TEXT = (
    """The quick brown fox jumps over the lazy dog, and the dog doesn't mind; it's 1234 o'clock.
Wörter mit Umlauten, naïve café, 日本語のテキスト, emoji 🤖🎉 and numbers 3.14159 -- again and again.
def main():\n    return "hello world"  # a comment with   several   spaces\n\tand a tab
"""
    * 3
)
SAMPLES = (
    "Hello, world!",
    "the quick   brown\n\n fox",
    "naïve 日本語 🤖 🏳️‍🌈",
    "",
    " lead",
    "trail ",
    "1234567 it's",
    "\t\r\n x",
)
BOS, EOS, TURN = "<|begin|>", "<|end|>", "<|turn|>"


@lru_cache
def byte_bpe(size: int = 400) -> Any:
    """A byte-level BPE of `tokenizers` with three special tokens in front."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[BOS, EOS, TURN],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    engine.train_from_iterator([TEXT], trainer)
    return engine


@lru_cache
def piece_model(prefix: bool = True) -> bytes:
    """A SentencePiece BPE model with byte fallback, as Llama 2 has it."""
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=out,
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        minloglevel=2,
        normalization_rule_name="identity",
        user_defined_symbols=[],
        control_symbols=["[TURN]"],
        pad_id=-1,
    )
    return out.getvalue()


def folder(path: Path, engine: Any | None = None, **files: Any) -> str:
    """A model folder: tokenizer.json of `engine`, and JSON files by their names with _ for the dot."""
    path.mkdir(exist_ok=True)
    if engine is not None:
        (path / "tokenizer.json").write_text(engine.to_str(), encoding="utf-8")
    for name, data in files.items():
        (path / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
    return str(path)
