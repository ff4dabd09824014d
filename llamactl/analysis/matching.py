"""Stored names against a model's own: which tensors are missing, left over or shaped otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

from llamactl.spec.model import Model
from llamactl.spec.naming import Rule, Transposed, stored_tensors
from llamactl.spec.prefixes import best

Shape = tuple[int, ...]


class StoredWeight(Protocol):
    """One weight that a file holds (checkpoint.logical.LogicalWeight is one).

    shape: None where only the number of elements is known. stored: the name of the tensor that holds it. container: the
    packing, None for a plain tensor. turned: the shape is (out, in) even where this layout stores (in, out).
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> Shape | None: ...
    @property
    def elements(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def stored(self) -> str: ...
    @property
    def container(self) -> str | None: ...
    @property
    def bits(self) -> int | None: ...
    @property
    def turned(self) -> bool: ...


class Expected(NamedTuple):
    """One tensor that a checkpoint of the model has. buffer: stored, but no parameter."""

    shape: Shape
    buffer: bool
    transposed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshaped:
    """A tensor whose stored shape is not the config's. stored: None where only the number of elements is known."""

    name: str
    stored: tuple[int, ...] | None
    config: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """rule: how names were rewritten, None for as they stand. of: stored name -> the model's name."""

    rule: str | None
    of: Mapping[str, str]
    missing: tuple[str, ...]
    left: tuple[StoredWeight, ...]
    reshaped: tuple[Reshaped, ...]


def expected(model: Model, rules: Iterable[Rule]) -> dict[str, Expected]:
    """Every tensor of `model` as `rules` name it."""
    return {s.name: Expected(s.shape, all(t.kind == "buffer" for t in s.of),
                             any(isinstance(op, Transposed) for op in s.rule.ops))
            for s in stored_tensors(model, rules)}


def head_and_embedding(rules: Iterable[Rule]) -> tuple[str | None, str | None]:
    """The stored names of output head and token embedding, whether or not the model has a head of its own."""
    at = {template: r.stored for r in rules for template in r.of}
    return at.get("head.weight"), at.get("embed.weight")


def match(weights: Sequence[StoredWeight], want: Mapping[str, Expected]) -> Match:
    """Pair stored weights with expected tensors under the prefix rule that leaves the fewest alone.

    Where nothing is expected, no weight is left over either.
    """
    names = [w.name for w in weights]
    rule, of = best(names, want)
    held = {of[w.name]: w for w in weights} if want else {}
    missing = tuple(n for n in want if n not in held)
    left = tuple(w for n, w in held.items() if n not in want)
    reshaped = tuple(Reshaped(name=w.name, stored=w.shape, config=want[n].shape)
                     for n, w in held.items() if n in want and not _fits(w, want[n]))
    return Match(rule=rule, of=of, missing=missing, left=left, reshaped=reshaped)


def _fits(w: StoredWeight, e: Expected) -> bool:
    if w.shape is None:
        return w.elements == prod(e.shape)
    if w.turned and e.transposed and (*w.shape[:-2], *w.shape[:-3:-1]) == e.shape:
        return True
    return w.shape == e.shape
