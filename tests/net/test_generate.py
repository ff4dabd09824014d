"""Token after token against transformers' own generate, and every way in which a text ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llamactl.cli.options import Access
from llamactl.cli.runnable import open_model
from llamactl.errors import InputRefused, UsageError
from llamactl.net import generate as room
from llamactl.net.cache import Cache
from llamactl.net.decoder import Decoder, build
from llamactl.net.generate import Generated, cache_length, generate
from llamactl.net.sample import Sampling

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
GREEDY = Sampling(temperature=0.0)
PROMPT = [3, 61, 7, 11, 30, 2, 45]


class Pair:
    """One random model twice: ours and transformers'."""

    def __init__(self, ours: Decoder, theirs: Any) -> None:
        self.ours, self.theirs = ours, theirs

    def generate(self, ids: list[int], max_new: int, **options: Any) -> Generated:
        model = self.ours.model
        cache = Cache(model, 1, cache_length(model, len(ids), max_new), dtype=torch.float32)
        return generate(self.ours, ids, max_new=max_new, sampling=options.pop("sampling", GREEDY), cache=cache,
                        **options)

    def expected(self, ids: list[int], max_new: int, **options: Any) -> list[int]:
        out = self.theirs.generate(torch.tensor([ids]), max_new_tokens=max_new, do_sample=False, pad_token_id=0,
                                   eos_token_id=None, attention_mask=torch.ones(1, len(ids)), **options)
        tokens: list[int] = out[0, len(ids):].tolist()
        return tokens


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def pair(request: pytest.FixtureRequest, make_golden: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return made(request.param, make_golden, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def table(make_golden: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model whose positions end: GPT-2 with 64 of them."""
    return made("gpt2", make_golden, tmp_path_factory.mktemp("table"))


def made(name: str, make_golden: Any, folder: Path) -> Pair:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": None, "eos_token_id": None}))
    theirs = make_golden.build(folder)
    theirs.save_pretrained(folder)
    opened = open_model(str(folder), Access(offline=True, hub=False))
    ours = build(opened.model)
    ours.assign(opened.weights)
    return Pair(ours, theirs)


@pytest.mark.parametrize("chunk", [512, 7, 3, 1])
def test_greedy_is_what_transformers_generates(pair: Pair, chunk: int) -> None:
    found = pair.generate(PROMPT, 40, prefill_chunk=chunk)
    assert found.tokens == pair.expected(PROMPT, 40)
    assert (found.stop, found.decoded, found.logprobs) == ("length", 39, None)
    assert len(set(found.tokens)) > 1


def test_a_repetition_penalty_counts_prompt_and_text(pair: Pair) -> None:
    found = pair.generate(PROMPT, 40, sampling=Sampling(temperature=0.0, repetition_penalty=1.4))
    assert found.tokens == pair.expected(PROMPT, 40, repetition_penalty=1.4)
    assert len(set(found.tokens)) > 5


def test_logprobs_are_those_of_one_pass_over_the_whole(pair: Pair) -> None:
    for sampling in (GREEDY, Sampling(temperature=1.5, top_k=20, seed=3)):
        found = pair.generate(PROMPT, 12, logprobs=True, sampling=sampling)
        whole = torch.tensor([PROMPT + found.tokens])
        with torch.no_grad():
            wanted = pair.theirs(whole).logits[0].double().log_softmax(-1)
        rows = wanted[len(PROMPT) - 1:-1].gather(1, torch.tensor(found.tokens)[:, None])[:, 0]
        assert found.logprobs is not None
        torch.testing.assert_close(torch.tensor(found.logprobs, dtype=torch.float64), rows, rtol=0, atol=1e-3)


def test_a_seed_is_a_text(pair: Pair) -> None:
    def text(seed: int) -> list[int]:
        return pair.generate(PROMPT, 30, sampling=Sampling(temperature=1.0, seed=seed)).tokens

    first = text(1)
    torch.manual_seed(99)
    assert text(1) == first
    assert text(2) != first


# ---- ends


def test_an_end_token_ends_it_and_is_not_told(pair: Pair) -> None:
    whole = pair.generate(PROMPT, 30).tokens
    end = whole[5]
    at = whole.index(end)
    told: list[int] = []
    found = pair.generate(PROMPT, 30, end={end, 10_000}, on_token=told.append)
    assert (found.tokens, found.stop, told) == (whole[:at + 1], "end", whole[:at])


def test_the_caller_may_end_it(pair: Pair) -> None:
    told: list[int] = []
    found = pair.generate(PROMPT, 30, on_token=lambda t: told.append(t) or len(told) == 4)
    assert (found.tokens, found.stop) == (told, "stop")
    assert len(told) == 4


def test_a_few_tokens_or_none(pair: Pair) -> None:
    whole = pair.generate(PROMPT, 3).tokens
    assert pair.generate(PROMPT, 1).tokens == whole[:1]
    none = pair.generate(PROMPT, 0)
    assert (none.tokens, none.stop, none.first_token_s, none.decoded) == ([], "length", None, 0)


def test_the_table_of_positions_ends_it(table: Pair) -> None:
    rows = 64
    found = table.generate(PROMPT, 500)
    assert found.stop == "context"
    assert len(PROMPT) + len(found.tokens) == rows + 1  # the last one is drawn, and nothing could follow it
    assert found.tokens == table.expected(PROMPT, rows + 1 - len(PROMPT))
    exact = table.generate(PROMPT, rows + 1 - len(PROMPT))
    assert (exact.tokens, exact.stop) == (found.tokens, "length")
    full = table.generate([5] * rows, 9)
    assert (len(full.tokens), full.stop) == (1, "context")


# ---- refusals


def test_a_prompt_past_the_table_is_refused_before_anything_runs(table: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "forward", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(InputRefused, match=r"the prompt is 65 tokens; this model's table of positions ends at 64"):
        table.generate([1] * 65, 5)


@pytest.mark.parametrize("past", [0, 1 << 40, None])
def test_an_id_outside_the_vocabulary_is_refused(pair: Pair, past: int | None) -> None:
    vocab = pair.ours.model.embed.vocab
    bad = -1 if past is None else vocab + past
    with pytest.raises(InputRefused, match=rf"token {bad} is outside this model's vocabulary, 0\.\.{vocab - 1}"):
        pair.generate([1, bad, 2], 5)
    assert pair.generate([1, vocab - 1], 2).tokens


def test_a_prompt_without_tokens_is_refused(pair: Pair) -> None:
    with pytest.raises(UsageError, match="the prompt has no tokens"):
        pair.generate([], 5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_no_numbers_are_refused(make_golden: Any, tmp_path: Path, temperature: float) -> None:
    pair = made("llama", make_golden, tmp_path)
    pair.ours.put("norm.weight", pair.ours.norm.weight * float("nan"))  # type: ignore[union-attr, operator]
    with pytest.raises(InputRefused, match="the logits for token 7 are nan, not numbers"):
        pair.generate(PROMPT, 5, sampling=Sampling(temperature=temperature))


# ---- how it works


class Watched:
    """A network that notes how it is called, and a clock that only it and `wait` move."""

    def __init__(self, network: Decoder) -> None:
        self.network, self.model, self.calls, self.now = network, network.model, list[tuple[int, bool]](), 0.0

    def __call__(self, ids: torch.Tensor, cache: Cache | None = None, *, last: bool = False) -> torch.Tensor:
        self.calls.append((ids.shape[1], last))
        self.now += 1
        out: torch.Tensor = self.network(ids, cache, last=last)
        return out


def test_the_prompt_goes_in_pieces_and_asks_for_last_logits_only(pair: Pair) -> None:
    seen = Watched(pair.ours)
    Pair(seen, None).generate(PROMPT, 4, prefill_chunk=3)  # type: ignore[arg-type]
    assert seen.calls == [(3, True), (3, True), (1, True), (1, True), (1, True), (1, True)]


def test_times_are_the_networks_without_the_readers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Watched(pair.ours)
    monkeypatch.setattr(room.time, "perf_counter", lambda: seen.now)

    def slow(_: int) -> None:
        seen.now += 1000

    found = Pair(seen, None).generate(PROMPT, 6, prefill_chunk=4, on_token=slow)  # type: ignore[arg-type]
    assert (found.prefill_s, found.first_token_s, found.decode_s, found.decoded) == (2.0, 2.0, 5.0, 5)
