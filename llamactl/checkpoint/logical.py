"""Quantised containers -> the weights that they hold, from headers alone (and a few bytes where a header is silent)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from llamactl.checkpoint.containers import ACTIVATIONS, CONTAINERS, FOREIGN, Container, Packed, Shape, Stored, Unread

_MARKS = tuple(dict.fromkeys(c.mark for c in CONTAINERS))
_FOREIGN = tuple(FOREIGN)


class LogicalWeight(NamedTuple):
    """One weight as the model has it. shape: None where the header tells only how many elements it has.

    container: the kind of packing, None for a plain tensor. bits: of one element. nbytes: with its bookkeeping.
    stored: the name of the tensor that holds it. turned: shape is (out, in) whatever the plain layout stores.
    """

    name: str
    shape: Shape | None
    elements: int
    nbytes: int
    dtype: str
    stored: str
    container: str | None = None
    bits: int | None = None
    turned: bool = False


class Unpacked(NamedTuple):
    """A file's tensors sorted: weights, bookkeeping (name -> container) and what could not be read (name -> why)."""

    weights: tuple[LogicalWeight, ...]
    bookkeeping: dict[str, str]
    unread: dict[str, str]


def unpack(tensors: Mapping[str, Stored], words: Mapping[str, Any] | None = None, *,
           peek: Callable[[Stored], bytes | None] = lambda _: None) -> Unpacked:
    """Every tensor as the weight that it holds. words: the config's quantization_config, where it has one.

    peek: the bytes of a small tensor, None where they cannot be had. What is not understood is named in `unread`.
    """
    packed: dict[str, LogicalWeight] = {}
    bookkeeping: dict[str, str] = {}
    unread: dict[str, str] = {}
    for name in tensors:
        if name.endswith(_FOREIGN):
            kind = next(k for suffix, k in FOREIGN.items() if name.endswith(suffix))
            unread[name] = f"a container of {kind}, which is not read here"
        if not name.endswith(_MARKS):
            continue
        for c in CONTAINERS:
            if name.endswith(c.mark):
                _one(c, name[: len(name) - len(c.mark)], tensors, words or {}, peek, packed, bookkeeping, unread)
    if packed or unread:
        bookkeeping |= {n: "scales" for n in tensors if n.endswith(ACTIVATIONS) and n not in bookkeeping}
    weights = [packed[n] if n in packed else LogicalWeight(n, t.shape, t.elements, t.nbytes, t.dtype, n)
               for n, t in tensors.items() if n not in bookkeeping and n not in unread]
    return Unpacked(tuple(weights), bookkeeping, unread)


def _one(c: Container, stem: str, tensors: Mapping[str, Stored], words: Mapping[str, Any],
         peek: Callable[[Stored], bytes | None], packed: dict[str, LogicalWeight], bookkeeping: dict[str, str],
         unread: dict[str, str]) -> None:
    """Read the weight of one mark, if it is one, into the dicts."""
    main = tensors.get(stem + c.main)
    if main is None or main.name in packed or main.name in unread or (c.dtypes and main.dtype not in c.dtypes):
        return
    beside = {s: tensors[stem + s] for s in c.beside if stem + s in tensors}
    try:
        w = c.read(Packed(stem, main, beside, words, peek))
    except Unread as e:
        unread[main.name] = str(e)
        bookkeeping |= {t.name: "unread" for t in beside.values()}
        return
    bookkeeping |= {t.name: w.kind for t in beside.values()}
    nbytes = main.nbytes + sum(t.nbytes for t in beside.values())
    packed[main.name] = LogicalWeight(stem + c.logical, w.shape, w.elements, nbytes, main.dtype, main.name, w.kind,
                                      w.bits, w.turned)
