"""Somebody's saved logits, and what can be told of them by their values alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llamactl.checkpoint.safetensors import quote
from llamactl.errors import InputRefused
from llamactl.verify.arrays import Arrays, open_arrays
from llamactl.verify.npy import Array, refused
from llamactl.verify.recorded import FORMAT, from_arrays

LOGITS = ("logits", "output", "lm_logits")
TOKENS = ("tokens", "input_ids", "ids", "token_ids")
WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
SAMPLES, ROWS = 200_000, 64  # of the entries and the tokens that are looked at
_LAYER = re.compile(r"(?:hidden|hidden_states|(layers))\.(\d{1,4})")
_LOG_PROBS = {"bf16": 3e-2, "fp16": 1e-2}  # the halves, and what rounding to them does to a logsumexp


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saved:
    """Logits (T, V) in the dtype they are stored in, or the K largest of each token, from a recorded reference.

    ids (T,) int64. top: values (T, K), columns (T, K), logsumexp (T,). hidden: {n: (T, D) after n layers}, hidden[0]
    the embedded tokens; of transformers' own hidden_states the last one is normed. rms, projection: of a recorded
    reference. dtype: "bf16", "fp16", "fp32" or "fp64". computed_in: the coarsest of them that holds every value.
    log_probs: each row is a log-softmax already. vocab: V. notes: (code, message) for the reader.
    """

    path: str
    logits: Tensor | None
    vocab: int
    dtype: str
    computed_in: str
    log_probs: bool = False
    ids: Tensor | None = None
    top: tuple[Tensor, Tensor, Tensor] | None = None
    hidden: dict[int, Tensor] = field(default_factory=dict)
    rms: Tensor | None = None
    projection: Tensor | None = None
    notes: tuple[tuple[str, str], ...] = ()


def read_saved(path: str, *, vocab: int | None = None) -> Saved:
    """The logits in a .safetensors, .npy or .npz file, or in a recorded reference; large ones are views of the file.

    vocab: of the model they are to be held against, by which a (V, T) array is known.
    Errors (InputRefused): saved-format, saved-shape, saved-names, saved-values; those of arrays.open_arrays.
    """
    found = open_arrays(path)
    if FORMAT in found.metadata:
        r = from_arrays(found)
        given = r.logits if r.logits is not None else r.top[0] if r.top is not None else torch.empty(0)
        return Saved(path=path, logits=r.logits, vocab=r.about.vocab, dtype="fp32", computed_in=computed_in(given),
                     ids=r.ids, top=r.top, hidden=r.hidden or {}, rms=r.rms, projection=r.projection)
    named = {n: a for n, a in found.by.items() if n == "hidden_states" or _LAYER.fullmatch(n)}
    at = _logits_of(found, named)
    _check_shape(found, at, vocab)
    logits = at.read()
    logits = logits[0] if logits.dim() == 3 else logits
    ids = _ids(found, next((found.by[n] for n in TOKENS if n in found.by), None), len(logits))
    said, kind = computed_in(logits), WORDS[logits.dtype]
    _check_values(found, at, logits)
    log_probs = are_log_probs(logits, _LOG_PROBS.get(said, 1e-3))
    return Saved(path=path, logits=logits, vocab=logits.shape[-1], dtype=kind, computed_in=said, log_probs=log_probs,
                 ids=ids, hidden=_hidden(found, named, len(logits)), notes=_notes(found, kind, said, log_probs))


def read_ids(path: str) -> Tensor:
    """(T,) int64: the token ids in a .safetensors, .npy or .npz file. Errors as read_saved's."""
    found = open_arrays(path)
    whole = {n: a for n, a in found.by.items() if _whole(a)}
    at = next((found.by[n] for n in TOKENS if n in found.by), next(iter(whole.values())) if len(whole) == 1 else None)
    if at is None:
        raise InputRefused("saved-names", f"no token ids: it holds {_names(found)}", path=path,
                           help=f"name them {' or '.join(TOKENS)}")
    ids = _ids(found, at, None)
    assert ids is not None
    return ids


def computed_in(x: Tensor) -> str:
    """The coarsest of bf16, fp16, fp32 and fp64 that holds every one of some 200,000 values: what computed them, or
    less. Only finite values other than zero tell; where there are none, the dtype they are stored in.
    """
    some = _some(x)
    some = some[torch.isfinite(some) & (some != 0)]
    own = WORDS[x.dtype]
    if not len(some):
        return own
    return next((word for kind, word in WORDS.items() if kind.itemsize <= x.dtype.itemsize
                 and bool((some.to(kind).to(some.dtype) == some).all())), own)


def are_log_probs(logits: Tensor, within: float = 1e-3) -> bool:
    """Whether every one of some 64 rows (T, V) sums to 1 as exponentials, and none of them is above 0 by more."""
    step = max(1, len(logits) // ROWS)
    total = logits[::step][:ROWS].double().logsumexp(-1)
    return logits.shape[-1] > 1 and bool((total.abs() <= within).all())


def _some(x: Tensor) -> Tensor:
    """Some 200,000 entries from all over (T, V): whole rows' worth of columns that wander from row to row."""
    if x.numel() <= SAMPLES:
        return x.reshape(-1)
    rows = torch.linspace(0, len(x) - 1, min(len(x), ROWS)).long()
    each = min(x.shape[-1], SAMPLES // len(rows))
    columns = (torch.arange(each) * x.shape[-1] // each)[None] + torch.arange(len(rows))[:, None] * 7919
    return x[rows[:, None], columns % x.shape[-1]].reshape(-1)


def _floats(a: Array) -> bool:
    return a.dtype in WORDS


def _whole(a: Array) -> bool:
    return a.dtype is not None and not a.dtype.is_floating_point and a.dtype != torch.bool


def _name(a: Array) -> str:
    return quote(a.name) if a.name else "the array"


def _names(found: Arrays) -> str:
    said = [f"{quote(n)} {a.kind} {list(a.shape)}" for n, a in found.by.items()]
    return ", ".join(said[:12]) + (f" and {len(said) - 12:,} more" if len(said) > 12 else "") if said else "nothing"


def _logits_of(found: Arrays, hidden: Mapping[str, Array]) -> Array:
    """The array that is meant: by its name, or because no other could be."""
    at = next((found.by[n] for n in LOGITS if n in found.by), None)
    if at is None:
        fits = [a for n, a in found.by.items() if n not in hidden and _floats(a) and len(a.shape) in (2, 3)]
        if len(fits) != 1 and "" not in found.by:
            raise InputRefused("saved-names", f"which array holds the logits? It holds {_names(found)}",
                               path=found.path, help=f"name it {' or '.join(LOGITS)}")
        at = fits[0] if fits else found.by[""]
    if not _floats(at):
        help = "numpy has no bf16: save float32, or a .safetensors file" if "V2" in at.kind else "save them as float32"
        raise refused(found.path, f"{_name(at)} is of type {at.kind}, not floating-point logits", help)
    return at


def _check_shape(found: Arrays, at: Array, vocab: int | None) -> None:
    shape, name = at.shape, _name(at)
    wrong: tuple[str, str] | None = None
    if len(shape) == 3 and shape[0] > 1:
        wrong = f"{shape[0]:,} sequences: {name} is {list(shape)}", "save one of them: logits[0]"
    elif len(shape) not in (2, 3):
        wrong = f"{name} is {list(shape)}", "logits are (tokens, vocabulary): one row for every token"
    elif 0 in shape or max(shape) >= 1 << 31:
        wrong = f"{name} is {list(shape)}: nothing to compare", "save logits of all tokens"
    elif vocab is not None and shape[-2] == vocab != shape[-1]:
        wrong = (f"{name} is {list(shape)}, and this model's vocabulary is {vocab:,}: rows and columns are exchanged",
                 "save its transpose, (tokens, vocabulary)")
    if wrong:
        raise InputRefused("saved-shape", wrong[0], path=found.path, help=wrong[1])


def _ids(found: Arrays, at: Array | None, tokens: int | None) -> Tensor | None:
    """(T,) int64, checked against the number of rows of the logits."""
    if at is None:
        return None
    name = _name(at)
    if not _whole(at):
        raise refused(found.path, f"{name} is of type {at.kind}, not token ids", "save token ids as int64")
    shape = at.shape[1:] if len(at.shape) == 2 and at.shape[0] == 1 else at.shape
    if len(shape) != 1 or not 0 < shape[0] < 1 << 24:
        raise InputRefused("saved-shape", f"{name} is {list(at.shape)}, not one row of token ids", path=found.path,
                           help="save the ids of one sequence")
    ids = at.read().reshape(-1).to(torch.int64)
    if tokens is not None and len(ids) != tokens:
        raise InputRefused("saved-shape", f"{len(ids):,} token ids and logits of {tokens:,}", path=found.path,
                           help="save the logits of every token, and the ids they were computed from")
    if int(ids.min()) < 0 or int(ids.max()) >= 1 << 31:
        bad = ids[(ids < 0) | (ids >= 1 << 31)][0]
        raise InputRefused("saved-values", f"{name} holds {int(bad)}, which is no token id", path=found.path)
    return ids


def _hidden(found: Arrays, named: Mapping[str, Array], tokens: int) -> dict[int, Tensor]:
    """{n: (T, D) after n layers}."""
    out: dict[int, Tensor] = {}
    for name, a in named.items():
        match = _LAYER.fullmatch(name)
        want = 3 if match is None else 2
        shape = a.shape[:-3] + a.shape[-2:] if len(a.shape) == want + 1 and a.shape[-3] == 1 else a.shape
        if not _floats(a) or len(shape) != want or shape[-2] != tokens or 0 in shape:
            form = "(layers + 1, tokens, width)" if match is None else "(tokens, width)"
            raise InputRefused("saved-shape", f"{quote(name)} is {list(a.shape)}, not {form} of {tokens:,} tokens",
                               path=found.path, help="save the hidden states of the same sequence, or leave them out")
        x = a.read().reshape(shape)
        if match is None:
            out |= dict(enumerate(x))
        else:
            out[int(match[2]) + (match[1] is not None)] = x
    return dict(sorted(out.items()))


def _check_values(found: Arrays, at: Array, logits: Tensor) -> None:
    """Refuse probabilities: their logarithms are lost where they are zero."""
    step = max(1, len(logits) // ROWS)
    rows = logits[::step][:ROWS].double()
    if logits.shape[-1] > 1 and bool((rows >= 0).all()) and bool(((rows.sum(-1) - 1).abs() <= 1e-2).all()):
        raise InputRefused("saved-values", f"{_name(at)} holds probabilities: every row is positive "
                           "and sums to 1", path=found.path, help="save the logits, before the softmax")


def _notes(found: Arrays, kind: str, said: str, log_probs: bool) -> tuple[tuple[str, str], ...]:
    out = []
    if said != kind and said in _LOG_PROBS:
        out.append(("saved-rounded", f"{found.path}: stored as {kind}, and every value is one that {said} holds: they "
                    f"were computed or rounded in {said}"))
    if log_probs:
        out.append(("saved-log-probs", f"{found.path}: the rows are log-probabilities; what a softmax cannot see, a "
                    "constant in a row, is not compared"))
    return tuple(out)
