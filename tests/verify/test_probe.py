"""The tokens two networks are compared on: real text, made ids, how many of them, and what they cannot show."""

from __future__ import annotations

import importlib.resources
from collections import Counter
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from llamactl import arch
from llamactl.spec.model import Model
from llamactl.spec.parts import Attention
from llamactl.tokens import byte_tokenizer
from llamactl.verify import probe as probing
from llamactl.verify.probe import made_ids, passage, probe, short


class Words:
    """A tokenizer of words, with a BOS as some put it."""

    def __init__(self, bos: int | None = 0) -> None:
        self.bos = bos

    def encode(self, text: str) -> list[int]:
        begin = [] if self.bos is None else [self.bos]
        return begin + [1 + sum(word.encode()) % 60 for word in text.split()]


def model(networks: ModuleType, name: str = "llama", **changes: Any) -> Model:
    said = changes or {"max_position_embeddings": 1 << 17}
    out: Model = arch.describe(networks.config(name, **said), name)
    return out


def windowed(networks: ModuleType, window: int, kind: str = "sliding", usable: int | None = 1 << 17) -> Model:
    m = model(networks)
    one = m.layers[0]
    assert isinstance(one.attn, Attention)
    narrow = replace(one, attn=replace(one.attn, window=window, window_kind=kind))
    return replace(m, layers=(narrow, *m.layers[1:]), context=replace(m.context, usable=usable))


def test_the_passage_comes_with_the_package() -> None:
    text = passage()
    assert importlib.resources.files("llamactl.verify").joinpath("passage.txt").is_file()
    assert text.isascii()
    assert 7_000 < len(text) < 10_000
    assert "\r" not in text
    start = text[:4000]  # what 1,024 tokens of a large vocabulary see: prose, indented code and numbers
    assert "LEONATO." in start
    assert "        if marks[n]:" in start
    assert "[2, 3, 5, 7, 11" in text


def test_text_goes_through_the_tokenizer(networks: ModuleType) -> None:
    m = model(networks)
    for tokenizer in (byte_tokenizer("x"), Words(), Words(None)):
        found = probe(m, tokenizer)
        assert (len(found.ids), found.source, found.note) == (1024, "passage", None)
        assert found.ids == tokenizer.encode(passage())[:1024]
    assert probe(m, Words(7)).ids[0] == 7
    assert len(probe(m, Words(), 17).ids) == 17


def test_text_that_is_too_short_goes_on(networks: ModuleType) -> None:
    whole = len(Words(None).encode(passage()))
    found = probe(model(networks), Words(None), 4096)
    assert whole < 4096 == len(found.ids)
    assert found.ids[whole : whole + 50] == found.ids[:50]


def test_a_tokenizer_that_says_nothing(networks: ModuleType) -> None:
    class Silent:
        def encode(self, text: str) -> list[int]:
            return []

    found = probe(model(networks), Silent(), 30)
    assert found == probe(model(networks), None, 30)
    assert found.source == "ids"


@pytest.mark.parametrize("vocab", [1, 2, 3, 97, 256, 50_257, 262_144])
def test_made_ids(vocab: int) -> None:
    ids = made_ids(vocab, 1024)
    assert len(ids) == 1024
    assert 0 <= min(ids) <= max(ids) < vocab
    assert ids == made_ids(vocab, 1024)
    assert made_ids(vocab, 100) == ids[:100]
    if vocab > 90:
        counts = [n for _, n in Counter(ids).most_common()]
        assert counts[0] > 3 * counts[9]  # a few are said often, many once
        assert counts[-1] == 1
        assert min(max(ids), vocab - min(ids)) > 0.97 * vocab
        four = Counter(zip(*(ids[k:] for k in range(4)), strict=False))
        assert sum(n - 1 for n in four.values()) > 100  # runs that came before


def test_made_ids_are_the_same_everywhere() -> None:
    assert made_ids(50_257, 12) == [25417, 28674, 19643, 9238, 35595, 31061, 39746, 35800, 40294, 10422, 25467, 32326]


@pytest.mark.parametrize(("window", "kind", "usable", "count", "says"), [
    (100, "sliding", 1 << 17, 1024, False),
    (1024, "sliding", 1 << 17, 1088, False),
    (4096, "sliding", 1 << 17, 4160, False),
    (4096, "chunked", 1 << 17, 4160, False),
    (4096, "sliding", None, 4160, False),
    (4096, "sliding", 4100, 4100, False),
    (4096, "sliding", 4096, 1024, False),
    (8128, "sliding", 1 << 17, 8192, False),
    (8192, "sliding", 1 << 17, 1024, True),
])
def test_the_text_passes_the_window(window: int, kind: str, usable: int | None, count: int, says: bool,
                                    networks: ModuleType) -> None:
    found = probe(windowed(networks, window, kind, usable), None)
    assert len(found.ids) == count
    assert (found.note is not None) == says
    if found.note is not None:
        assert found.note == "window 8,192 is longer than the probe: it cannot be judged"


def test_the_text_ends_with_the_positions(networks: ModuleType) -> None:
    assert len(probe(model(networks, "gpt2", n_positions=64), byte_tokenizer("x")).ids) == 64
    assert len(probe(model(networks, max_position_embeddings=50), None).ids) == 50
    m = model(networks)
    assert isinstance(m.layers[0].attn, Attention)
    ends = replace(m, layers=(replace(m.layers[0], attn=replace(m.layers[0].attn, exact_to=20)),))
    assert len(probe(ends, None).ids) == 20
    assert len(probe(model(networks, "bloom"), None).ids) == 1024
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    assert len(probe(model(networks, rope_parameters=dynamic, max_position_embeddings=40), None).ids) == 40


def test_no_more_than_are_needed(networks: ModuleType) -> None:
    found = probe(model(networks), None, 100_000)
    assert len(found.ids) == probing.MOST
    assert found.note is not None
    assert "not 100,000" in found.note


def test_what_a_short_text_cannot_show(networks: ModuleType) -> None:
    m = model(networks)
    assert short(m, 1024) == short(m, 64) == []
    assert "one token" in short(m, 1)[0]
    assert "RoPE" in short(m, 63)[0]
    assert short(model(networks, "bloom"), 63) == []
    w = windowed(networks, 128)
    assert "window of 128" in short(w, 128)[0]
    assert short(w, 129) == []
    assert "rows 64 to 99" in short(model(networks, "gpt2", n_positions=100), 64)[0]
    assert "rows 99 to 99" in short(model(networks, "gpt2", n_positions=100), 99)[0]
    assert short(model(networks, "gpt2", n_positions=100), 100) == []


def test_what_shows_in_long_texts_alone(networks: ModuleType) -> None:
    factors = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    llama3 = model(networks, rope_parameters={"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, **factors},
                   max_position_embeddings=1 << 17)
    assert "llama3 scaling shows weakly within the 8,192" in short(llama3, 1024)[0]
    assert short(llama3, 8192) == []
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    stretched = model(networks, rope_parameters=dynamic, max_position_embeddings=2048)
    assert "past 2,048 does not show" in short(stretched, 1024)[0]
    m = networks.golden("ministral3").model
    grows = next(x.attn.q_growth for x in m.layers if x.attn.q_growth)
    assert any("q grows" in line for line in short(m, grows[1]))
    assert not any("q grows" in line for line in short(m, grows[1] + 1))


def test_experts_that_no_token_chooses(networks: ModuleType) -> None:
    m = networks.golden("mixtral").model
    experts, chosen = m.layers[0].mlp.n_experts, m.layers[0].mlp.top_k
    few = -(-experts // chosen) - 1
    assert few > 1
    assert any("experts" in line for line in short(m, few))
    assert not any("experts" in line for line in short(m, few + 1))
