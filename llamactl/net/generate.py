"""Text by one sequence, token after token: the prompt in pieces, then one token at a time over the cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from llamactl.errors import InputRefused, UsageError
from llamactl.net.cache import Cache
from llamactl.net.decoder import exact_to
from llamactl.net.sample import Sampler, Sampling
from llamactl.spec.model import Model
from llamactl.spec.parts import LearnedPositions

OnToken = Callable[[int], bool | None]


class Network(Protocol):
    """What can be sampled from: fp32 logits (1, T, V) of ids (1, T), with last=True (1, 1, V)."""

    @property
    def model(self) -> Model: ...

    def __call__(self, ids: Tensor, cache: Cache | None = None, *, last: bool = False) -> Tensor: ...


@dataclass(slots=True, kw_only=True)
class Generated:
    """What came out. tokens: without the prompt; an end token that stopped it is the last of them.

    stop: end (an end token), stop (the caller had enough), length (max_new), context (the table of positions ends).
    logprobs: of each token, None where they were not asked for. prefill_s: until the prompt's logits stood.
    first_token_s: from the same start until the first token was drawn. decode_s: from then to the last token, without
    the time that the caller spent on them. decoded: tokens drawn in decode_s, the first one is none of them.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    stop: str = "length"
    prefill_s: float = 0.0
    first_token_s: float | None = None
    decode_s: float = 0.0

    @property
    def decoded(self) -> int:
        return max(0, len(self.tokens) - 1)


def positions(model: Model) -> int | None:
    """Tokens after which the network has no position left; None where positions are computed without an end."""
    table = model.positions
    return table.rows - table.offset if isinstance(table, LearnedPositions) else exact_to(model)


def cache_length(model: Model, prompt: int, max_new: int) -> int:
    """Tokens the cache must hold: prompt and text, but for the last token, which nothing follows."""
    most = positions(model)
    wanted = prompt + max(0, max_new - 1)
    return wanted if most is None else min(wanted, most)


def check_ids(model: Model, ids: Sequence[int]) -> None:
    """Refuse a prompt that the network cannot read: empty, an id that is no row, more tokens than positions.

    Raises UsageError (prompt-empty) and InputRefused (token-range, prompt-too-long).
    """
    if not ids:
        raise UsageError("prompt-empty", "the prompt has no tokens, and this tokenizer adds none of its own",
                         help="give some text, or a first token: --tokens 0")
    vocab = model.embed.vocab
    if wrong := [i for i in ids if not 0 <= i < vocab]:
        raise InputRefused("token-range", f"token {wrong[0]} is outside this model's vocabulary, 0..{vocab - 1:,}",
                           help="the tokenizer may belong to another model")
    most = positions(model)
    if most is not None and len(ids) > most:
        table = "table of positions" if isinstance(model.positions, LearnedPositions) else "described attention"
        raise InputRefused("prompt-too-long", f"the prompt is {len(ids):,} tokens; this model's {table} "
                           f"ends at {most:,}", help=f"shorten it to at most {most:,} tokens")


@torch.inference_mode()
def generate(
    network: Network,
    ids: Sequence[int],
    *,
    max_new: int,
    sampling: Sampling,
    cache: Cache,
    end: Collection[int] = (),
    on_token: OnToken | None = None,
    logprobs: bool = False,
    prefill_chunk: int = 512,
    sampler: Sampler | None = None,
) -> Generated:
    """Continue `ids` by at most `max_new` tokens over an empty cache of at least `cache_length` tokens.

    end: tokens that end it. on_token: told each token as it comes, end tokens aside; True stops. prefill_chunk: prompt
    tokens computed at once. sampler: another one than the plain (net.parallel). The device is the cache's.
    Raises what check_ids does, and InputRefused (not-finite) where the logits are no numbers.
    """
    check_ids(network.model, ids)
    out = Generated(logprobs=[] if logprobs else None)
    most = positions(network.model)
    device = torch.device(cache.device)
    prompt = torch.tensor([list(ids)], dtype=torch.long, device=device)
    sampler = sampler or Sampler(sampling, device)
    begin = time.perf_counter()
    if max_new < 1:
        return out
    for at in range(0, len(ids), prefill_chunk):
        logits = network(prompt[:, at:at + prefill_chunk], cache, last=True)
    wait(device)
    out.prefill_s = time.perf_counter() - begin
    sampler.meet(prompt, logits.shape[-1])
    spent = 0.0
    while True:
        token = sampler.choose(logits[:, -1])
        chosen = _read(sampler, logits[:, -1], *token, out, len(ids))
        now = time.perf_counter()
        if out.first_token_s is None:
            out.first_token_s = now - begin
            first = now
        out.decode_s = now - first - spent
        if chosen in end:
            out.stop = "end"
            return out
        if on_token is not None:
            enough = on_token(chosen)
            spent += time.perf_counter() - now
            if enough:
                out.stop = "stop"
                return out
        if len(out.tokens) >= max_new:
            return out
        if most is not None and len(ids) + len(out.tokens) > most:
            out.stop = "context"
            return out
        following = token[0][:, None]
        sampler.meet(following, logits.shape[-1])
        logits = network(following, cache, last=True)


def _read(sampler: Sampler, logits: Tensor, token: Tensor, top: Tensor, out: Generated, prompt: int) -> int:
    """The token as a number, noted in `out`; all that is asked of the device comes over in one copy."""
    wanted = [token.float(), top]  # a float holds every id below 2^24, and no vocabulary has more
    if out.logprobs is not None:
        wanted.append(sampler.logprob(logits, token))
    chosen, largest, *chance = torch.stack(wanted)[:, 0].tolist()
    if not math.isfinite(largest):
        at = prompt + len(out.tokens)
        raise InputRefused("not-finite", f"the logits for token {at:,} are {largest}, not numbers",
                           help="weights or arithmetic overflow: try --dtype fp32, and llamactl inspect")
    out.tokens.append(int(chosen))
    if out.logprobs is not None:
        out.logprobs.extend(chance)
    return int(chosen)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given, for a time that means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
