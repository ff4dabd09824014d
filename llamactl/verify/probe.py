"""The tokens on which two networks are compared, and what a text of some length cannot show."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from llamactl.net.divergence import stride
from llamactl.net.generate import positions
from llamactl.spec.model import Model
from llamactl.spec.parts import Attention, LearnedPositions, MoE

MOST = 4096  # tokens, unless a window asks for more
MOST_OF_WINDOW = 8192
PAST = 64  # tokens past a window's edge, to see it from more than one place
NEAR = 64  # tokens under which RoPE's slower pairs have hardly turned
LONG = ("dynamic", "longrope")  # rotations that change where the text is longer than the training; nobody does it alike


class Encodes(Protocol):
    """A tokenizer, of which nothing more is needed (tokens.Tokenizer)."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTokens:
    """source: "passage" through the model's tokenizer, or "ids" that a formula made. note: what is not as asked."""

    ids: list[int]
    source: str
    note: str | None = None


def probe(model: Model, tokenizer: Encodes | None, n: int = 1024) -> ProbeTokens:
    """About n tokens for `model`: real text where there is a tokenizer, with the BOS that it puts first, else made ids.

    More than n where a window is longer and the context allows, fewer where positions end. Errors: the tokenizer's.
    """
    count, note = _length(model, n)
    ids = _encoded(tokenizer, count) if tokenizer is not None else []
    if ids:
        return ProbeTokens(ids=ids, source="passage", note=note)
    return ProbeTokens(ids=made_ids(model.embed.vocab, count), source="ids", note=note)


def passage() -> str:
    """The bundled text, plain ASCII: prose (Much Ado about Nothing), some code and numbers, and prose again."""
    return importlib.resources.files("llamactl.verify").joinpath("passage.txt").read_text("ascii")


def made_ids(vocab: int, n: int) -> list[int]:
    """n ids below `vocab`, the same everywhere: frequencies as in a text (Zipf's law), and runs that come again.

    The order of ranks has nothing to do with that of ids, so that all parts of the vocabulary come up.
    """
    draws, step = _draws(), stride(vocab)
    out: list[int] = []
    while len(out) < n:
        if len(out) >= 16 and next(draws) % 3 == 0:
            start = next(draws) % (len(out) - 15)
            out += out[start : start + 4 + next(draws) % 12]
            continue
        for _ in range(3 + next(draws) % 6):
            level = next(draws) % vocab.bit_length()  # a rank r about as often as 1 / r
            rank = ((1 << level) - 1 + next(draws) % (1 << level)) % vocab
            out.append((rank + 1) * step % vocab)
    return out[:n]


def short(model: Model, n: int) -> list[str]:
    """What n tokens cannot tell of `model`, in sentences; empty where there is nothing to say."""
    if n <= 1:
        return ["one token sees itself alone: q and k, positions, the mask and the scale of attention have no effect"]
    out: list[str] = []
    if _rotated(model) and n < NEAR:
        out.append(f"{n} tokens: RoPE's base and scaling hardly show under {NEAR}")
    for window in _windows(model):
        if n <= window:
            out.append(f"{n:,} tokens: none is past the window of {window:,}, so whether it is kept does not show")
    for kind, original in _scalings(model):
        if kind in LONG and n <= original:
            out.append(f"{n:,} tokens: how {kind} rotates past {original:,} does not show")
        elif kind in ("llama3", "yarn") and n < original:
            out.append(f"{n:,} tokens: {kind} scaling shows weakly within the {original:,} that were there before it")
    for first in sorted({a.q_growth[1] - a.q_growth[2] for a in _attentions(model) if a.q_growth is not None}):
        if n <= first:
            out.append(f"{n:,} tokens: q grows with its position from {first:,} on, which does not show")
    table = model.positions
    if isinstance(table, LearnedPositions) and n < table.rows - table.offset:
        last = table.rows - table.offset - 1
        out.append(f"{n:,} tokens: rows {n:,} to {last:,} of the position table are not read")
    if any(isinstance(x.mlp, MoE) and n * x.mlp.top_k < x.mlp.n_experts for x in model.layers):
        out.append(f"{n:,} tokens: fewer are chosen than there are experts, so that some are not read")
    return out


def _length(model: Model, n: int) -> tuple[int, str | None]:
    """How many tokens, and what is to be said of it."""
    ends = [positions(model), model.context.usable]
    ends += [original for kind, original in _scalings(model) if kind in LONG]
    room = min((end for end in ends if end is not None), default=None)
    count, notes = min(n, MOST), []
    if n > MOST:
        notes.append(f"{MOST:,} tokens, not {n:,}: no more are needed")
    for window in _windows(model):
        if room is not None and room <= window:
            continue  # no token ever stands past it
        if window + PAST <= MOST_OF_WINDOW:
            count = max(count, window + PAST)
        else:
            notes.append(f"window {window:,} is longer than the probe: it cannot be judged")
    return max(1, count if room is None else min(count, room)), "; ".join(notes) or None


def _encoded(tokenizer: Encodes, n: int) -> list[int]:
    """The first n tokens of the passage, repeated where it is too short; fewer from a tokenizer that gives no more."""
    text, copies = passage(), 1
    ids = tokenizer.encode(text)
    while 0 < len(ids) < n and copies < 32:
        copies *= 2
        ids = tokenizer.encode("\n".join([text] * copies))
    return ids[:n]


def _draws() -> Iterator[int]:
    """Numbers below 2^32, the same on every machine (a linear congruence of 64 bits, its upper half)."""
    state = 20_170_612
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        yield state >> 32


def _attentions(model: Model) -> Sequence[Attention]:
    return [x.attn for x, _ in model.distinct_layers() if isinstance(x.attn, Attention)]


def _windows(model: Model) -> list[int]:
    return sorted({a.window for a in _attentions(model) if a.window is not None})


def _rotated(model: Model) -> bool:
    return any(x.attn is not None and x.attn.rope is not None for x in model.layers)


def _scalings(model: Model) -> list[tuple[str, int]]:
    """(kind, length before it) of every different RoPE scaling that has such a length."""
    ropes = {x.attn.rope for x in model.layers if x.attn is not None and x.attn.rope is not None}
    found = {(r.scaling.kind, r.scaling.original or model.context.trained) for r in ropes if r.scaling is not None}
    return sorted((kind, original) for kind, original in found if original is not None)
