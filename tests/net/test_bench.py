"""What is timed and what is not: rounds in turn, the warm-up left out, the same number of tokens from every engine."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llamactl.analysis.bench import Case
from llamactl.cli.options import Access
from llamactl.cli.runnable import open_model
from llamactl.errors import InputRefused, NotAvailable
from llamactl.net import bench, packing, rivals
from llamactl.net.bench import Meter, Ours, measure, private_memory, prompts, start
from llamactl.net.cache import Cache
from llamactl.net.decoder import Decoder, build
from llamactl.net.generate import generate
from llamactl.net.packing import pack
from llamactl.net.rivals import LlamaCpp, Transformers, check_installed
from llamactl.net.sample import Sampling

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(written: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose own settings would draw, and stop at almost any token."""
    path: Path = tmp_path_factory.mktemp("llama")
    written.saved(path, written.config_of("llama"))
    vocab = json.loads((path / "config.json").read_text())["vocab_size"]
    (path / "generation_config.json").write_text(json.dumps(
        {"do_sample": True, "temperature": 5.0, "eos_token_id": list(range(1, vocab)), "max_new_tokens": 2}))
    return path


@pytest.fixture
def network(folder: Path) -> Decoder:
    opened = open_model(str(folder), Access(offline=True, hub=False))
    made = build(opened.model)
    made.assign(opened.weights)
    return made


class Fake:
    """An engine that notes what it is asked for. most: sequences that it takes."""

    def __init__(self, name: str, log: list[Any], most: int = 99) -> None:
        self.name, self.log, self.most, self.calls = name, log, most, 0

    def can(self, batch: int) -> bool:
        return batch <= self.most

    def prefill(self, ids: bench.Ids) -> float:
        self.log.append((self.name, "prefill", len(ids), len(ids[0])))
        self.calls += 1
        return float(self.calls)

    def decode(self, ids: bench.Ids, new: int) -> float:
        self.log.append((self.name, "decode", len(ids), len(ids[0]), new))
        self.calls += 1
        return float(self.calls)


class NoMeter:
    """Measures nothing, and notes when."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def read(self) -> None:
        self.log.append("read")

    def multiply(self) -> None:
        self.log.append("multiply")


def test_engines_take_turns_and_the_first_round_does_not_count() -> None:
    log: list[Any] = []
    cases = [Case(phase="prefill", tokens=5, batch=2), Case(phase="decode", tokens=3, batch=1, new=4)]
    told: list[Any] = []
    meter: Any = NoMeter(log)
    got = measure([Fake("a", log), Fake("b", log, most=1)], cases, meter, vocab=50, repeat=2, tell=told.append)
    a, b = ("a", "decode", 1, 3, 4), ("b", "decode", 1, 3, 4)
    assert log == ["multiply", ("a", "prefill", 2, 5)] * 3 + ["read", a, b] * 3
    assert got[0].seconds == {"a": [2.0, 3.0]}
    assert got[1].seconds == {"a": [5.0, 6.0], "b": [2.0, 3.0]}
    assert [x.case for x in got] == told == cases


@pytest.mark.parametrize("vocab", [1, 2, 97, 7919, 128256])
def test_prompts_are_the_same_each_time_and_inside_the_vocabulary(vocab: int) -> None:
    ids = prompts(vocab, 3, 400)
    assert ids == prompts(vocab, 3, 400)
    assert [len(row) for row in ids] == [400] * 3
    assert all(0 <= i < vocab for row in ids for i in row)
    assert len({i for row in ids for i in row}) >= min(vocab, 1200) * 0.99  # spread over all of it
    assert vocab < 3 or ids[0] != ids[1] != ids[2] != ids[0]


# ---- llamactl's own network


class Counted:
    """The network, with what it was called on."""

    def __init__(self, network: Decoder) -> None:
        self.network, self.model = network, network.model
        self.widths: list[tuple[int, int]] = []
        self.chosen: list[int] = []

    def __call__(self, ids: torch.Tensor, cache: Cache | None = None, *, last: bool = False) -> torch.Tensor:
        self.widths.append((ids.shape[0], ids.shape[1]))
        logits: torch.Tensor = self.network(ids, cache, last=last)
        self.chosen.append(int(logits[0, -1].argmax()))
        return logits


def test_ours_makes_the_tokens_that_generate_makes(network: Decoder) -> None:
    counted = Counted(network)
    ours = Ours(network, counted)
    ids = prompts(network.model.embed.vocab, 1, 20)
    for _ in range(2):  # the second time over the cache of the first
        counted.chosen.clear()
        assert ours.decode(ids, 6) > 0
        cache = Cache(network.model, 1, 26, dtype=torch.float32)
        made = generate(network, ids[0], max_new=7, sampling=Sampling(temperature=0.0), cache=cache)
        assert counted.chosen == made.tokens
    assert counted.widths == [(1, 20), *[(1, 1)] * 6] * 2


def test_ours_reads_prompts_in_pieces_and_keeps_a_cache_for_each_size(network: Decoder,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CHUNK", 8)
    counted = Counted(network)
    ours = Ours(network, counted)
    assert ours.prefill(prompts(50, 2, 20)) > 0
    assert counted.widths == [(2, 8), (2, 8), (2, 4)]
    ours.decode(prompts(50, 2, 20), 3)
    first = ours.cache
    ours.decode(prompts(50, 2, 20), 3)
    assert ours.cache is first
    assert first is not None
    assert (first.batch, first.length, first.filled) == (2, 23, 23)
    ours.decode(prompts(50, 1, 20), 3)
    assert ours.cache is not first
    before = ours.cache
    ours.prefill(prompts(50, 1, 23))
    assert ours.cache is not before  # a prompt's time holds its cache's


def test_a_start_is_loading_and_a_first_prompt(network: Decoder) -> None:
    held: list[torch.Tensor] = []

    def load() -> Ours:
        held.append(torch.ones(1 << 24))
        return Ours(network)

    got = start(load, prompts(50, 1, 9))
    assert got.load_s > 0
    assert got.first_s > 0
    if private_memory() is None:
        assert got.private is None
    else:
        assert got.private is not None
        assert (1 << 26) * 0.9 < got.private < (1 << 26) * 1.5


def test_where_the_system_does_not_say_private_memory_is_unknown(network: Decoder,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "private_memory", lambda: None)
    assert start(lambda: Ours(network), prompts(50, 1, 9)).private is None


def test_private_memory_is_what_the_system_says(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmRSS:\t   999 kB\nRssAnon:\t   123 kB\n")
    assert private_memory(str(status)) == 123 * 1024
    status.write_text("Name:\tx\nVmRSS:\t   999 kB\n")
    assert private_memory(str(status)) is None
    assert private_memory(str(tmp_path / "none")) is None


# ---- the device


def test_the_meter_measures_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "free_memory", lambda _: None)
    meter = Meter(CPU, torch.bfloat16)
    assert (meter.bytes, meter.flops) == (0.0, 0.0)
    meter.read()
    meter.multiply()
    first = meter.bytes
    assert 1e8 < first < 1e13
    assert 1e8 < meter.flops < 1e16
    meter.read()
    assert meter.bytes >= first


def test_the_meter_asks_for_no_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "free_memory", lambda _: 1 << 28)
    meter = Meter(CPU, torch.float32)
    meter.read()
    assert (meter.buffer, meter.bytes) == (None, 0.0)


# ---- packed weights


def test_packing_replaces_what_multiplies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied head too, by a copy of its own: the embedding's rows stay as they lie."""
    opened = open_model(str(folder), Access(offline=True, hub=False))
    network = build(replace(opened.model, head=replace(opened.model.head, tied=True)))
    network.assign(opened.weights)
    ids = torch.tensor(prompts(50, 1, 9))
    before = network(ids)
    monkeypatch.setattr(packing, "packed", lambda w: w)
    assert pack(network) == 0
    monkeypatch.setattr(packing, "packed", lambda w: w * 2.0)
    table = network.embed.weight
    taken = pack(network)
    linear = [m for m in network.modules() if isinstance(m, packing.Linear)]
    assert taken == sum(m.weight.nbytes for m in linear) + table.nbytes
    assert torch.equal(network.head.weight, table * 2.0)
    assert network.embed.weight is table
    assert not torch.equal(network(ids), before)


def test_packed_logits_are_the_same(folder: Path) -> None:
    opened = open_model(str(folder), Access(offline=True, hub=False))
    plain, fast = (build(opened.model) for _ in range(2))
    for net in (plain, fast):
        net.assign(opened.weights, dtype=torch.bfloat16)
    if not pack(fast):
        pytest.skip("this CPU does not multiply bf16")
    ids = torch.tensor(prompts(50, 1, 9))
    assert (fast(ids) - plain(ids)).abs().max() < 0.1 * plain(ids).abs().max()


def test_what_latent_attention_reads_head_by_head_is_left(written: Any, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    written.saved(tmp_path, written.config_of("deepseek_v3"))
    opened = open_model(str(tmp_path), Access(offline=True, hub=False))
    net = build(opened.model)
    net.assign(opened.weights)
    before = {n: p for n, p in net.named_parameters() if n.endswith(("k_b.weight", "v_b.weight"))}
    monkeypatch.setattr(packing, "packed", lambda w: w * 2.0)
    assert pack(net)
    now = dict(net.named_parameters())
    assert before
    assert all(now[n] is p for n, p in before.items())


# ---- rivals


def test_transformers_makes_exactly_so_many_greedy_tokens(folder: Path, network: Decoder,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    Transformers.prepare(str(folder))
    theirs = Transformers(str(folder), CPU, torch.float32)
    assert theirs.version.split(".")[0].isdigit()
    assert theirs.model.dtype == torch.float32
    heard: list[Any] = []

    class Clock(rivals._Clock):
        def put(self, value: Any) -> None:
            heard.append(value)
            super().put(value)

    monkeypatch.setattr(rivals, "_Clock", Clock)
    ids = prompts(network.model.embed.vocab, 1, 20)
    assert theirs.prefill(ids) > 0
    assert theirs.decode(ids, 6) > 0
    counted = Counted(network)
    Ours(network, counted).decode(ids, 6)
    assert [int(x) for x in heard[1:]] == counted.chosen
    heard.clear()
    assert theirs.decode(prompts(50, 3, 5), 4) > 0
    assert [x.numel() for x in heard] == [15, *[3] * 5]
    assert theirs.can(8)


def test_transformers_time_is_from_the_first_token_to_the_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = Transformers(str(folder), CPU, torch.float32)
    clock = iter([100.0, 200.0, 201.0, 203.0, 206.5])  # told the prompt, the first token, and three more
    monkeypatch.setattr(rivals.time, "perf_counter", lambda: next(clock))
    assert theirs.decode(prompts(50, 1, 5), 3) == 6.5


def test_transformers_computes_in_the_dtype_asked_for(folder: Path) -> None:
    assert Transformers(str(folder), CPU, torch.bfloat16).model.dtype == torch.bfloat16


def test_a_folder_that_transformers_does_not_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody-knows-this"}))
    for load in (lambda: Transformers.prepare(str(tmp_path)), lambda: Transformers(str(tmp_path), CPU, torch.float32)):
        with pytest.raises(InputRefused, match="transformers does not load this model") as e:
            load()
        assert e.value.code == "rival-refused"
        assert "\n" not in e.value.message


def test_no_memory_for_a_rival_is_no_refusal_of_the_model() -> None:
    def load() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        rivals._loaded("x", load)


@pytest.mark.parametrize(("name", "module"), [("transformers", "transformers"), ("llama.cpp", "llama_cpp")])
def test_a_rival_that_is_not_installed(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "find_spec", lambda m: None if m == module else object())
    with pytest.raises(NotAvailable, match=f"--against {name} needs {module}, which is not installed") as e:
        check_installed(name)
    assert e.value.code == "extra-missing"
    assert "pip install" in str(e.value.help)
    monkeypatch.setattr(rivals, "find_spec", lambda m: object())
    check_installed(name)


class FakeLlama:
    """What is used of llama_cpp.Llama, with a log."""

    made: dict[str, Any]

    def __init__(self, path: str, **how: Any) -> None:
        if path == "bad":
            raise ValueError("\n  no good \nmore")
        self.made, self.log, self.ctx = {"path": path, **how}, [], "ctx"  # type: ignore[var-annotated]

    def reset(self) -> None:
        self.log.append("reset")

    def eval(self, ids: list[int]) -> None:
        self.log.append(("eval", list(ids)))

    def generate(self, ids: list[int], **how: Any) -> Any:
        self.log.append(("generate", list(ids), how))
        try:
            while True:
                self.log.append("token")
                yield 1
        finally:
            self.log.append("closed")


@pytest.fixture
def llama_cpp(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = types.ModuleType("llama_cpp")
    module.Llama, module.__version__, module.waited = FakeLlama, "0.0.1", []
    module.llama_synchronize = module.waited.append
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    return module


def test_llama_cpp_starts_afresh_and_its_first_token_is_not_timed(llama_cpp: Any,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    LlamaCpp.prepare()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    theirs = LlamaCpp("x.gguf", length=577, device=CPU)
    assert theirs.version == "0.0.1"
    how = theirs.model.made
    assert (how["path"], how["n_ctx"], how["n_threads"], how["n_threads_batch"], how["n_gpu_layers"]) == (
        "x.gguf", 577, 3, 3, 0)
    assert LlamaCpp("x.gguf", length=577, device=torch.device("cuda")).model.made["n_gpu_layers"] == -1
    assert theirs.decode([[4, 5]], 3) > 0
    assert theirs.model.log == ["reset", ("generate", [4, 5], {"temp": 0.0}), *["token"] * 4, "closed"]
    theirs.model.log.clear()
    assert theirs.prefill([[4, 5]]) > 0
    assert theirs.model.log == ["reset", ("eval", [4, 5])]
    assert llama_cpp.waited == ["ctx"]
    assert theirs.can(1)
    assert not theirs.can(2)


def test_what_llama_cpp_does_not_load_is_refused(llama_cpp: Any) -> None:
    with pytest.raises(InputRefused, match=r"^llama.cpp does not load this model: no good$"):
        LlamaCpp("bad", length=5, device=CPU)
