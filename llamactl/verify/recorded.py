"""A recorded reference: what a checkpoint answered, in one safetensors file that later runs are compared with.

    tokens (T) i64
    logits (T, V) f32                         or, of the K largest, top.values f32 and top.indices i64 (T, K), with
                                              top.logsumexp f32 (T), from which their log-probabilities follow
    hidden_states (L + 1, T, D) f32           or layers.rms (L + 1, T) and layers.projection (L + 1, T, 16) f32

Neither time nor place stands in it: the same checkpoint gives the same bytes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llamactl.checkpoint.digest import digest
from llamactl.checkpoint.disk import open_regular
from llamactl.checkpoint.files import Files
from llamactl.checkpoint.folder import REFERENCE
from llamactl.checkpoint.safetensors import header_from
from llamactl.errors import InputRefused
from llamactl.net.weights_bytes import buffer
from llamactl.verify.arrays import Arrays, open_arrays

NAME = REFERENCE  # what verify looks for beside a checkpoint
FORMAT = "llamactl-reference"  # the key of the metadata that says which form this is
VERSION = "1"
COLUMNS = 16  # of a projection
STATES_BYTES = 256 << 20  # larger hidden states are kept as fingerprints
WORDS = ("version", "id", "family", "layout", "computed_in", "source", "config_digest", "weights_digest")
_SEED = 20240229
_DTYPES = {torch.float32: "F32", torch.int64: "I64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Where a reference comes from. version: of llamactl. computed_in: dtype of the arithmetic. source: of the tokens.

    config_digest, weights_digest: see config_digest, weights_digest below; vocab: columns of the logits.
    """

    version: str
    id: str
    family: str
    layout: str
    computed_in: str
    source: str
    config_digest: str
    weights_digest: str
    vocab: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """ids (T,) int64; logits (T, V) fp32, or top: values (T, K), token numbers (T, K) and the logsumexp of all (T,).

    hidden: {n: (T, D) after n layers}; rms (L + 1, T) and projection (L + 1, T, 16): of the same, where it was large.
    """

    about: About
    ids: Tensor
    logits: Tensor | None = None
    top: tuple[Tensor, Tensor, Tensor] | None = None
    hidden: dict[int, Tensor] | None = None
    rms: Tensor | None = None
    projection: Tensor | None = None

    @property
    def layers(self) -> int | None:
        """Layers that it tells something of, None without."""
        if self.hidden is not None:
            return len(self.hidden) - 1
        return None if self.rms is None else len(self.rms) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """A file ready to be written: its size in bytes, and blocks() of it, good as long as this lives.

    entries: (name, dtype, shape, bytes) of what it holds.
    """

    nbytes: int
    head: bytes
    entries: tuple[tuple[str, str, tuple[int, ...], int], ...]
    tensors: tuple[Tensor, ...]

    def blocks(self) -> Iterator[bytes | memoryview]:
        """All bytes in order, one block a tensor."""
        yield self.head
        yield from map(buffer, self.tensors)


class Layers:
    """Takes the stream after each layer, as net.streamed.logits tells it, whole or as fingerprints."""

    def __init__(self, layers: int, tokens: int, dim: int) -> None:
        self.whole = 4 * (layers + 1) * tokens * dim <= STATES_BYTES
        self._states: list[Tensor] = []
        self._prints: list[tuple[Tensor, Tensor]] = []

    def __call__(self, n: int, x: Tensor) -> None:
        """n: layers before it; x: (1, T, D)."""
        if self.whole:
            self._states.append(x[0].float().clone())
        else:
            self._prints.append(fingerprint(x[0]))

    def tensors(self) -> tuple[dict[int, Tensor] | None, Tensor | None, Tensor | None]:
        """hidden, rms and projection of a Recorded."""
        if self.whole:
            return dict(enumerate(self._states)), None, None
        rms, projection = zip(*self._prints, strict=True)
        return None, torch.stack(rms), torch.stack(projection)


def fingerprint(x: Tensor) -> tuple[Tensor, Tensor]:
    """(T, D) -> the RMS of each token (T,) and 16 fixed sums of signs over the square root of D (T, 16), fp32.

    Any change of a token's stream moves its sums by about as much, relative to the stream.
    """
    dim = x.shape[-1]
    bits = random.Random(_SEED).getrandbits(dim * COLUMNS)  # the same everywhere, as torch's own numbers are not
    signs = torch.frombuffer(bytearray(bits.to_bytes(dim * COLUMNS // 8, "little")), dtype=torch.uint8)
    signs = (signs[:, None] >> torch.arange(8) & 1).view(dim, COLUMNS)
    wide = x.double()
    return wide.square().mean(-1).sqrt().float(), (wide @ (signs.double() * 2 - 1) / dim**0.5).float()


def top_of(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest of each row (T, V), their columns, and the logsumexp of all."""
    values, indices = logits.topk(min(k, logits.shape[-1]), dim=-1)
    return values, indices, torch.stack([row.double().logsumexp(-1).float() for row in logits])


def encode(r: Recorded) -> Encoded:
    """The file of `r`, none of whose tensors is copied where it is contiguous fp32 already."""
    named: dict[str, Tensor] = {}
    for name, x in (("logits", r.logits), ("layers.rms", r.rms), ("layers.projection", r.projection)):
        if x is not None:
            named[name] = x.float()
    if r.top is not None:
        named |= {"top.values": r.top[0].float(), "top.logsumexp": r.top[2].float(), "top.indices": r.top[1].long()}
    named["tokens"] = r.ids.long()
    stack = [] if r.hidden is None else [x.float().contiguous() for _, x in sorted(r.hidden.items())]
    order = sorted(named, key=lambda n: (named[n].dtype != torch.int64, n))  # eight bytes first: all lie aligned
    tensors = [*(named[n].contiguous() for n in order), *stack]
    entries = [(n, _DTYPES[t.dtype], tuple(t.shape), t.nbytes) for n, t in zip(order, tensors, strict=False)]
    if stack:
        entries.append(("hidden_states", "F32", (len(stack), *stack[0].shape), sum(t.nbytes for t in stack)))
    said = {"format": "pt", FORMAT: VERSION, **{w: str(getattr(r.about, w)) for w in WORDS},
            "vocab": str(r.about.vocab)}
    head: dict[str, object] = {"__metadata__": said}
    at = 0
    for name, dtype, shape, nbytes in entries:
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    return Encoded(nbytes=len(start) + at, head=start, entries=tuple(entries), tensors=tuple(tensors))


def is_recorded(path: str) -> bool:
    """Whether the file at `path` says that it is a recorded reference; False for whatever cannot be read."""
    try:
        file, size = open_regular(path)
        with file:
            return FORMAT in header_from(file, size, path).metadata
    except Exception:  # noqa: BLE001  it is no reference, whatever else is wrong with it
        return False


def read_recorded(path: str) -> Recorded:
    """The reference at `path`; its large tensors are views of the file.

    Errors (InputRefused): recorded-format where it is none, or not whole; those of arrays.open_arrays.
    """
    return from_arrays(open_arrays(path))


def from_arrays(found: Arrays) -> Recorded:
    """The same from an opened file."""
    if found.metadata.get(FORMAT) != VERSION:
        said = found.metadata.get(FORMAT)
        raise _wrong(found, "no recorded reference" if said is None else f"a reference of form {said!r}, not {VERSION}",
                     "record one: llamactl reference ./my-model -o FILE")
    about = _about(found)
    ids = _take(found, "tokens", torch.int64, (None,))
    if ids is None or not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= about.vocab:
        raise _wrong(found, f"its tokens are not there, or not within the vocabulary of {about.vocab:,}")
    count = len(ids)
    logits = _take(found, "logits", torch.float32, (count, about.vocab))
    values = _take(found, "top.values", torch.float32, (count, None))
    indices = _take(found, "top.indices", torch.int64, (count, None))
    total = _take(found, "top.logsumexp", torch.float32, (count,))
    top = None
    if values is not None and indices is not None and total is not None:
        if values.shape != indices.shape or not values.numel() or not _within(indices, about.vocab):
            raise _wrong(found, "top.values and top.indices do not belong together")
        top = values, indices, total
    if (logits is None) is (top is None):
        raise _wrong(found, "it must hold either logits or top.values, top.indices and top.logsumexp")
    states = _take(found, "hidden_states", torch.float32, (None, count, None))
    rms = _take(found, "layers.rms", torch.float32, (None, count))
    projection = _take(found, "layers.projection", torch.float32, (None, count, COLUMNS))
    if (rms is None) is not (projection is None) or (
            rms is not None and projection is not None and len(rms) != len(projection)):
        raise _wrong(found, "layers.rms and layers.projection do not belong together")
    return Recorded(about=about, ids=ids, logits=logits, top=top, rms=rms, projection=projection,
                    hidden=None if states is None else dict(enumerate(states)))


def config_digest(config: Mapping[str, object]) -> str:
    """XXH3 of a config, whatever the order of its keys."""
    return digest(json.dumps(config, sort_keys=True, default=str).encode())


def weights_digest(files: Files) -> str:
    """XXH3 of what the headers say: every tensor's name, dtype, shape and bytes; not of the weights themselves."""
    held = sorted((t.name, t.dtype, list(t.shape), t.nbytes) for t in files.tensors.values())
    return digest(json.dumps(held).encode())


def _about(found: Arrays) -> About:
    said = found.metadata
    absent = [w for w in (*WORDS, "vocab") if w not in said]
    vocab = said.get("vocab", "")
    if absent or not vocab.isascii() or not vocab.isdigit() or len(vocab) > 9:
        raise _wrong(found, f"its metadata lack {absent[0]!r}" if absent else f"its vocab is {vocab!r}, no number")
    return About(**{w: said[w][:1000] for w in WORDS}, vocab=int(vocab))


def _take(found: Arrays, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> Tensor | None:
    """The tensor `name` of a shape, None standing for any size; None where it is not there."""
    a = found.by.get(name)
    if a is None:
        return None
    fits = len(a.shape) == len(shape) and all(w in (None, n) for w, n in zip(shape, a.shape, strict=True))
    if a.dtype != dtype or not fits:
        want = ", ".join("any" if n is None else f"{n:,}" for n in shape)
        raise _wrong(found, f"{name} is {a.kind} {list(a.shape)}, not {_DTYPES[dtype]} ({want})")
    return a.read()


def _within(indices: Tensor, vocab: int) -> bool:
    return int(indices.min()) >= 0 and int(indices.max()) < vocab


def _wrong(found: Arrays, what: str, help: str = "record it again: llamactl reference ./my-model -o FILE"
           ) -> InputRefused:
    return InputRefused("recorded-format", what, path=found.path, help=help)
