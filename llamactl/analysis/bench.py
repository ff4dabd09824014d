"""What `llamactl bench` reports: tokens a second, their spread, shares of what the device can do, ratios in pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from llamactl.analysis.dtypes import named
from llamactl.analysis.flops import elements_read, flops
from llamactl.analysis.generation import Quality, weights_bytes
from llamactl.errors import InputRefused
from llamactl.spec.model import Model
from llamactl.spec.parts import MoE

OURS = "llamactl"
PROMPTS, AFTER, NEW = (512, 2048), (32, 512), 64
Samples = Mapping[str, Sequence[float]]  # engine -> seconds, one a round


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The middle of several samples, the least and the most of them."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is timed. prefill: `batch` prompts of `tokens` each. decode: `new` tokens more for each, one at a time."""

    phase: str
    tokens: int
    batch: int
    new: int = 0

    @property
    def length(self) -> int:
        """Tokens that the cache holds at the end."""
        return self.tokens + self.new

    @property
    def made(self) -> int:
        """Tokens read or made in the time that counts, of the whole batch."""
        return self.batch * (self.new or self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Who was timed. dtype: what its weights lie in, None where that is not one of llamactl's.

    load_seconds: from the files to a network that can be called, imports left out. first_token_seconds: the first
    prompt after that, cold. private_bytes: memory of the process' own (RssAnon) that both added; None without /proc.
    """

    name: str
    version: str
    dtype: str | None
    load_seconds: float
    first_token_seconds: float
    private_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine in one case. seconds: of each round. Rates count every sequence of the batch.

    decode: step_bytes of weights and cache are read for the middle token of `new`; share: of the measured bandwidth.
    prefill: flops of the prompts, logits at the last position; share: of the measured matrix multiplication.
    Both None where they are not known for this model or engine. ratio: llamactl's rate over this engine's, round by
    round; None for llamactl itself.
    """

    phase: str
    tokens: int
    batch: int
    new: int
    engine: str
    seconds: tuple[float, ...]
    tokens_per_second: Spread
    step_bytes: int | None
    flops: int | None
    share: float | None
    ratio: Spread | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """One model's speed here and now.

    bandwidth_bytes_per_second and matmul_flops_per_second: the best of the same run, measured between the rounds.
    threads: of the CPU, None on another device. quant: int8 where llamactl's matrices are in 8 bits, None where all is
    in `dtype`; quant_quality: what that changes on the shortest prompt, measured; weights_bytes: of the decoder so.
    first_token_prompt: tokens of the prompt behind first_token_seconds.
    """

    id: str
    family: str
    model_type: str
    device: str
    device_name: str
    dtype: str
    quant: str | None
    quant_quality: Quality | None
    threads: int | None
    compiled: bool
    packed: bool
    repeat: int
    weights_bytes: int
    bandwidth_bytes_per_second: float | None
    matmul_flops_per_second: float | None
    first_token_prompt: int
    engines: tuple[Engine, ...]
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the names that schema 1 fixes."""
        return asdict(self)

    def _repr_html_(self) -> str:
        from llamactl.render import html

        return html("bench", [self])


def spread(values: Sequence[float]) -> Spread:
    """Median and range of at least one value."""
    return Spread(median=median(values), min=min(values), max=max(values))


def cases(model: Model, prompts: Sequence[int], after: Sequence[int], new: int | None,
          batches: Sequence[int]) -> tuple[Case, ...]:
    """What to time, prefill first. Lengths that were not asked for (empty, None) are those of PROMPTS, AFTER and NEW
    that the model's context holds, else the longest that it holds.
    """
    room = model.context.usable or 1 << 40
    new = new or min(NEW, max(1, room - 1))
    prompts = prompts or [n for n in PROMPTS if n <= room] or [room]
    after = after or [n for n in AFTER if n + new <= room] or [max(1, room - new)]
    return (*(Case(phase="prefill", tokens=n, batch=b) for b in batches for n in prompts),
            *(Case(phase="decode", tokens=n, batch=b, new=new) for b in batches for n in after))


def step_bytes(model: Model, dtype: str, case: Case, *, int8: bool = False) -> int | None:
    """Bytes of weights and cache that the middle one of the case's new tokens reads for the batch, all in `dtype`.

    int8: with the matrices in 8 bits; None then for several sequences that choose experts of their own.
    """
    weights, cache = elements_read(model, case.tokens + (case.new + 1) // 2, 1, case.batch)
    if not int8:
        return named(dtype).bytes(weights + cache)
    if case.batch > 1 and any(isinstance(layer.mlp, MoE) for layer in model.layers):
        return None
    return weights_bytes(model, dtype, int8=True, read=True) + named(dtype).bytes(cache)


def prompt_flops(model: Model, case: Case) -> int | None:
    """Operations of the case's prompts with logits at the last position alone; None where they are not counted."""
    try:
        counted = flops(model, case.tokens, batch=case.batch)
    except InputRefused:
        return None
    head = counted.parts["output head"]
    return counted.total - head + head // case.tokens


def rows(model: Model, dtype: str, timed: Sequence[tuple[Case, Samples]], engines: Sequence[Engine],
         bandwidth: float | None, matmul: float | None, *, int8: bool = False) -> tuple[Row, ...]:
    """Each case's samples as rows, in the order of `engines`; an engine without samples of a case has none there.

    int8: llamactl's own matrices are in 8 bits.
    """
    same = {OURS, *(e.name for e in engines if e.dtype == dtype)}
    out: list[Row] = []
    for case, samples in timed:
        decode = case.phase == "decode"
        done = None if decode else prompt_flops(model, case)
        for name in (e.name for e in engines if e.name in samples):
            seconds = tuple(samples[name])
            rate = spread([case.made / s for s in seconds])
            times = rate.median / (case.batch if decode else case.made)  # steps, or batches of prompts, a second
            known = name in same
            moved = step_bytes(model, dtype, case, int8=int8 and name == OURS) if decode and known else None
            work, most = (moved, bandwidth) if decode else (done, matmul)
            pairs = [theirs / ours for ours, theirs in zip(samples[OURS], seconds, strict=True)]
            out.append(Row(
                phase=case.phase, tokens=case.tokens, batch=case.batch, new=case.new, engine=name, seconds=seconds,
                tokens_per_second=rate, step_bytes=moved, flops=done,
                share=work * times / most if work and most and known else None,
                ratio=None if name == OURS else spread(pairs)))
    return tuple(out)
