"""End tokens and sampling settings, in the order the files are asked."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llamactl.errors import InputRefused
from llamactl.tokens import end_tokens, open_tokenizer, sampling_defaults


def test_the_first_file_that_says_it_counts(small: ModuleType, tmp_path: Path) -> None:
    path = small.folder(tmp_path, small.byte_bpe())
    assert end_tokens(path, None) == end_tokens(path, open_tokenizer(path)) == frozenset()
    small.folder(tmp_path, tokenizer_config={"eos_token": {"content": "<|end|>", "__type": "AddedToken"}})
    tokenizer = open_tokenizer(path)
    assert end_tokens(path, tokenizer) == {1}
    small.folder(tmp_path, config={"text_config": {"eos_token_id": 7}})
    assert end_tokens(path, tokenizer) == {7}
    small.folder(tmp_path, config={"eos_token_id": 2, "text_config": {"eos_token_id": 7}})
    assert end_tokens(path, tokenizer) == {2}
    small.folder(tmp_path, generation_config={"eos_token_id": None})
    assert end_tokens(path, tokenizer) == {2}
    small.folder(tmp_path, generation_config={"eos_token_id": [5, 6, 5]})
    assert end_tokens(path, tokenizer) == {5, 6}
    small.folder(tmp_path, generation_config={"eos_token_id": -1})
    assert end_tokens(path, None) == frozenset(), "-1 means none"


@pytest.mark.parametrize("value", [True, 1.0, "2", [2, "x"], -2, 1 << 40, {}])
def test_an_end_token_that_is_no_id_is_refused(small: ModuleType, tmp_path: Path, value: object) -> None:
    with pytest.raises(InputRefused, match="eos_token_id must be") as caught:
        end_tokens(small.folder(tmp_path, generation_config={"eos_token_id": value}), None)
    assert caught.value.path == str(tmp_path / "generation_config.json")


def test_sampling_settings_that_are_there(small: ModuleType, tmp_path: Path) -> None:
    assert sampling_defaults(str(tmp_path)) == {}
    given = {
        "do_sample": True,
        "temperature": 1,
        "top_k": 0,
        "top_p": 0.9,
        "min_p": 0,
        "repetition_penalty": 1.1,
        "max_new_tokens": 5,
        "typical_p": "odd",
        "eos_token_id": 3,
    }
    found = sampling_defaults(small.folder(tmp_path, generation_config=given))
    assert found == {
        k: given[k]
        for k in ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
    }
    assert isinstance(found["temperature"], float)
    assert sampling_defaults(small.folder(tmp_path, generation_config={"temperature": None})) == {}


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"temperature": -1}, "config-range"),
        ({"temperature": "hot"}, "config-type"),
        ({"temperature": True}, "config-type"),
        ({"top_p": 0}, "config-range"),
        ({"top_p": 1.5}, "config-range"),
        ({"top_k": -1}, "config-range"),
        ({"top_k": 2.5}, "config-type"),
        ({"min_p": 1}, "config-range"),
        ({"repetition_penalty": 0}, "config-range"),
        ({"max_new_tokens": 0}, "config-range"),
        ({"do_sample": 1}, "config-type"),
    ],
)
def test_settings_out_of_range_are_refused(
    small: ModuleType, tmp_path: Path, config: dict[str, Any], code: str
) -> None:
    with pytest.raises(InputRefused) as caught:
        sampling_defaults(small.folder(tmp_path, generation_config=config))
    assert caught.value.code == code
    (key,) = config
    assert key in caught.value.message


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999"])
def test_a_number_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"temperature": {text}}}')
    with pytest.raises(InputRefused):
        sampling_defaults(str(tmp_path))


def test_files_that_are_no_objects_are_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[]")
    for ask in (lambda p: end_tokens(p, None), sampling_defaults):
        with pytest.raises(InputRefused, match="one JSON object"):
            ask(str(tmp_path))
