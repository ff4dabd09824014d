"""Bits and bytes per element, block formats included, and the words that mean them."""

from __future__ import annotations

import pytest

from llamactl.spec.dtype import ALIASES, DTYPES, TORCH_NAMES, find_dtype


@pytest.mark.parametrize(("name", "bits"), [
    ("fp64", 64), ("fp32", 32), ("bf16", 16), ("fp16", 16), ("fp8", 8), ("int8", 8), ("int4", 4), ("fp4", 4),
    ("q8_0", 8.5), ("q5_1", 6), ("q5_0", 5.5), ("q4_1", 5), ("q4_0", 4.5),
])
def test_bits(name: str, bits: float) -> None:
    """ggml's blocks of 32: an fp16 scale (q4_1, q5_1: and a minimum) beside the quantised elements."""
    assert DTYPES[name].bits == bits


def test_every_dtype_is_tested_above_and_named_by_its_key() -> None:
    assert len(DTYPES) == 13
    assert all(DTYPES[name].name == name for name in DTYPES)


def test_cache_of_llama_3_8b_at_131072_tokens() -> None:
    elements = 2 * 32 * 8 * 128 * 131_072
    assert DTYPES["bf16"].bytes(elements) == 17_179_869_184
    assert DTYPES["q8_0"].bytes(elements) == 9_126_805_504
    assert DTYPES["q4_0"].bytes(elements) == 4_831_838_208


@pytest.mark.parametrize(("name", "elements", "size"), [
    ("q4_0", 0, 0), ("q4_0", 1, 18), ("q4_0", 32, 18), ("q4_0", 33, 36), ("int4", 3, 2), ("int4", 4, 2),
    ("fp4", 1, 1), ("bf16", 3, 6), ("q8_0", 64, 68),
])
def test_bytes_are_whole_blocks(name: str, elements: int, size: int) -> None:
    assert DTYPES[name].bytes(elements) == size


def test_bytes_stay_exact_integers_where_a_float_would_not() -> None:
    elements = 2**60 + 32
    assert DTYPES["q4_0"].bytes(elements) == (2**60 + 32) // 32 * 18
    assert isinstance(DTYPES["bf16"].bytes(elements), int)


@pytest.mark.parametrize(("word", "name"), [
    ("bfloat16", "bf16"), ("torch.bfloat16", "bf16"), ("bf16", "bf16"), ("BF16", "bf16"), ("Float32", "fp32"),
    ("float", "fp32"), ("half", "fp16"), ("torch.float8_e4m3fn", "fp8"), ("Q4_0", "q4_0"), ("uint8", "int8"),
])
def test_words(word: str, name: str) -> None:
    found = find_dtype(word)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("word", ["", "torch.", "float17", "bf16 ", "int", "q3_k", "bfloat-16"])
def test_unknown_words_are_not_guessed(word: str) -> None:
    assert find_dtype(word) is None


def test_every_alias_leads_to_a_dtype_and_none_hides_one() -> None:
    assert set(ALIASES.values()) <= set(DTYPES)
    assert not set(ALIASES) & set(DTYPES)
    assert all(find_dtype(word) is DTYPES[name] for word, name in ALIASES.items())


def test_torch_names_lead_back() -> None:
    assert all(find_dtype(f"torch.{word}") is DTYPES[name] for name, word in TORCH_NAMES.items())
