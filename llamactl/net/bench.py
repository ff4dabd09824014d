"""Timing a network: prompts read and tokens made, the device's own limits beside them, rivals in the same rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from llamactl.net.cache import Cache
from llamactl.net.decoder import Decoder
from llamactl.net.device import free_memory
from llamactl.net.generate import Network, wait
from llamactl.net.kernels import linear

Ids = list[list[int]]  # a batch of equally long prompts
CHUNK = 512  # prompt tokens computed at once, as `generate` does


class Engine(Protocol):
    """Something that can be timed on token ids."""

    name: str

    def can(self, batch: int) -> bool:
        """Whether it takes so many sequences at once."""

    def prefill(self, ids: Ids) -> float:
        """Seconds until the last logits of new prompts stand."""

    def decode(self, ids: Ids, new: int) -> float:
        """Seconds from the first greedy token after the prompts to the one `new` tokens later."""


class Case(Protocol):
    """What is timed; see analysis.bench.Case."""

    @property
    def phase(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def new(self) -> int: ...


class Ours:
    """llamactl's own network. Every token is brought over to the host as it comes, as for a reader."""

    name = "llamactl"

    def __init__(self, network: Decoder, run: Network | None = None) -> None:
        """run: what is called in place of `network`, as `compiling.ready` gives it."""
        self.network, self.run = network, run or network
        self.cache: Cache | None = None

    def can(self, batch: int) -> bool:
        return True

    @torch.inference_mode()
    def prefill(self, ids: Ids) -> float:
        wait(self.network.device)
        begin = time.perf_counter()
        self.cache = None
        self._read(ids, self._room(ids, 0))
        return time.perf_counter() - begin

    @torch.inference_mode()
    def decode(self, ids: Ids, new: int) -> float:
        cache = self._room(ids, new)
        token = self._read(ids, cache)
        begin = time.perf_counter()
        for _ in range(new):
            token = self.run(token[:, None], cache, last=True)[:, -1].argmax(-1)
            token.tolist()
        return time.perf_counter() - begin

    def _read(self, ids: Ids, cache: Cache) -> torch.Tensor:
        """(B,) the tokens after the prompts."""
        prompt = torch.tensor(ids, device=self.network.device)
        for at in range(0, prompt.shape[1], CHUNK):
            logits = self.run(prompt[:, at : at + CHUNK], cache, last=True)
        token = logits[:, -1].argmax(-1)
        token.tolist()
        return token

    def _room(self, ids: Ids, new: int) -> Cache:
        """An empty cache, the one of the round before where it is of that size: what was recorded for it stays."""
        batch, length = len(ids), len(ids[0]) + new
        if self.cache is None or (self.cache.batch, self.cache.length) != (batch, length):
            self.cache = None
            self.cache = Cache(self.network.model, batch, length, dtype=self.network.dtype, device=self.network.device)
        self.cache.rewind()
        return self.cache


class Meter:
    """What the device can do: bytes a second and operations a second, the best seen so far; None without room."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        cuda = device.type == "cuda"
        self.device, self.bytes, self.flops = device, 0.0, 0.0
        self.side = 8192 if cuda else 1024
        size = (1 << 30) if cuda else (1 << 28)
        free = free_memory(device)
        small = free is not None and free < 6 * size
        # Integers: a sum of floats on one CPU thread is slower than the memory it reads.
        self.buffer = None if small else torch.ones(size // 8, dtype=torch.int64, device=device) if (
            device.type == "cpu") else torch.ones(size // 4, dtype=torch.float32, device=device)
        self.target = torch.empty_like(self.buffer) if cuda and self.buffer is not None else None
        self.matrix = torch.ones(self.side, self.side, device=device).to(dtype)

    def read(self) -> None:
        """Time reads over a buffer that no cache holds; on CUDA a copy, which reads and writes."""
        if self.buffer is None:
            return
        for _ in range(3):
            wait(self.device)
            begin = time.perf_counter()
            if self.target is not None:
                self.target.copy_(self.buffer)
                wait(self.device)
            else:
                self.buffer.sum().item()
            moved = self.buffer.nbytes * (1 if self.target is None else 2)
            self.bytes = max(self.bytes, moved / (time.perf_counter() - begin))

    @torch.inference_mode()
    def multiply(self) -> None:
        """Time products of two square matrices."""
        for _ in range(3):
            wait(self.device)
            begin = time.perf_counter()
            linear(self.matrix, self.matrix, None)
            wait(self.device)
            self.flops = max(self.flops, 2 * self.side**3 / (time.perf_counter() - begin))


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """An engine that stands. load_s, first_s: see analysis.bench.Engine; private: bytes, None where not said."""

    engine: Engine
    load_s: float
    first_s: float
    private: int | None


@dataclass(slots=True, kw_only=True)
class Timed:
    """One case's seconds, engine by engine, one a round."""

    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict)


def prompts(vocab: int, batch: int, tokens: int) -> Ids:
    """Evenly spread token ids, the same ones each time: n times 2^32 / golden ratio, modulo 2^32, scaled to `vocab`."""
    return [[(n * 2654435761 % (1 << 32) * vocab) >> 32 for n in range(1 + b * tokens, 1 + (b + 1) * tokens)]
            for b in range(batch)]


def start(load: Callable[[], Engine], ids: Ids) -> Started:
    """Load an engine and let it read its first prompt. Raises what `load` does."""
    before, begin = private_memory(), time.perf_counter()
    engine = load()
    load_s = time.perf_counter() - begin
    first_s = engine.prefill(ids)
    after = private_memory()
    grown = None if before is None or after is None else max(0, after - before)
    return Started(engine=engine, load_s=load_s, first_s=first_s, private=grown)


def measure(engines: Sequence[Engine], cases: Sequence[Case], meter: Meter, *, vocab: int, repeat: int,
            tell: Callable[[Case], None] = lambda _: None) -> list[Timed]:
    """Each case `repeat` times, all engines in turn in every round, after one round that does not count.

    An engine that cannot take a case's batch has no samples there. tell: called before each case.
    """
    out = []
    for case in cases:
        tell(case)
        ids = prompts(vocab, case.batch, case.tokens)
        able = [e for e in engines if e.can(case.batch)]
        timed = Timed(case=case, seconds={e.name: [] for e in able})
        for n in range(repeat + 1):
            meter.read() if case.phase == "decode" else meter.multiply()
            for e in able:
                took = e.prefill(ids) if case.phase == "prefill" else e.decode(ids, case.new)
                if n:
                    timed.seconds[e.name].append(took)
        out.append(timed)
    return out


def threads(device: torch.device) -> int | None:
    """The CPU's threads that compute; None on another device."""
    return torch.get_num_threads() if device.type == "cpu" else None


def private_memory(status: str = "/proc/self/status") -> int | None:
    """Bytes of this process' own memory, mapped files left out; None where the system does not say."""
    try:
        with open(status, encoding="ascii") as f:
            found: Mapping[str, str] = {k: v for k, _, v in (line.partition(":") for line in f)}
        return int(found["RssAnon"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None
