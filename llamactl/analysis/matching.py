"""Stored names against a model's own: which tensors are missing, left over or shaped otherwise, under one prefix rule.

The same weights are saved with and without `model.`, under wrappers, and with a language model inside or outside a
larger one. Each known way is tried on all names at once; the one with the fewest differences is used and named.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

from llamactl.spec.model import Model
from llamactl.spec.naming import Rule, Transposed, stored_tensors

Shape = tuple[int, ...]
Pairs = tuple[tuple[str, str], ...]  # (prefix in the file, prefix in the model); the first that fits is taken

WRAPPERS = ("model.", "transformer.", "module.", "_orig_mod.", "base_model.model.", "language_model.",
            "model.language_model.", "_fsdp_wrapped_module.")
LANGUAGE: tuple[Pairs, ...] = (
    (),
    (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."), ("model.", "")),
    (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."),
     *((f"{x}.", f"model.{x}.") for x in ("vision_tower", "multi_modal_projector", "visual", "vision_model"))),
    (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head.")),
    (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    (("visual.", "model.visual."), ("model.", "model.language_model.")),
    (("model.visual.", "visual."), ("model.language_model.", "model.")),
)
VISION: tuple[Pairs, ...] = (
    (), (("vision_tower.vision_model.", "vision_tower."),), (("vision_tower.", "vision_tower.vision_model."),),
    (("model.vision_tower.vision_model.", "model.vision_tower."),),
    (("model.vision_tower.", "model.vision_tower.vision_model."),),
)
_SAMPLE = 200


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
    rule, of = _best(names, want)
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


def _best(names: Sequence[str], want: Mapping[str, Expected]) -> tuple[str | None, dict[str, str]]:
    plain = {n: n for n in names}
    best: tuple[str | None, dict[str, str]] = (None, plain)
    fewest = _differences(plain.values(), want)
    if not fewest or not want or not names:
        return best
    sample = names[:: max(1, len(names) // _SAMPLE)]
    for pairs in _rewrites(want):
        if not any(_renamed(n, pairs) in want for n in sample):
            continue
        of = {n: _renamed(n, pairs) for n in names}
        if len(set(of.values())) < len(names):
            continue
        n = _differences(of.values(), want)
        if n < fewest:
            fewest, best = n, (_told(pairs), of)
    return best


def _rewrites(want: Mapping[str, Expected]) -> Iterator[Pairs]:
    """Every known way, the plainest first. A first word that is missing is the one most of the model's names have."""
    firsts = Counter(n.partition(".")[0] for n in want)
    base = firsts.most_common(1)[0][0]
    yield (*((f"{f}.", f"{f}.") for f in firsts), ("", f"{base}."))
    for wrapper in WRAPPERS:
        yield ((wrapper, ""),)
    for language in LANGUAGE:
        for vision in VISION:
            if language or vision:
                yield _then(language, vision)


def _then(first: Pairs, second: Pairs) -> Pairs:
    """One list of pairs that does what `first` and then `second` do."""
    both = [(a + rest, to) for a, b in first for x, to in second
            for rest in [x.removeprefix(b)] if x.startswith(b)]
    return (*both, *((a, _renamed(b, second)) for a, b in first), *second)


def _renamed(name: str, pairs: Pairs) -> str:
    for old, new in pairs:
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def _differences(names: Iterable[str], want: Mapping[str, Expected]) -> int:
    have = set(names)
    both = len(have & want.keys())
    return len(have) + len(want) - 2 * both


def _told(pairs: Pairs) -> str:
    changes = [(a, b) for a, b in pairs if a != b]
    return ", ".join(f"{a or 'no prefix'} -> {b or 'no prefix'}" for a, b in changes)


def grouped(names: Iterable[str], patterns: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """{why: names} of the names that a pattern takes; `{i}` in it stands for a layer's number, `*` for anything."""
    made = [(re.compile(re.escape(p).replace(r"\{i\}", r"\d{1,5}").replace(r"\*", ".*")), why) for p, why in patterns]
    out: dict[str, list[str]] = {}
    for name in names:
        for pattern, why in made:
            if pattern.fullmatch(name):
                out.setdefault(why, []).append(name)
                break
    return out


def beyond(names: Iterable[str], want: Mapping[str, Expected], n_layers: int) -> list[str]:
    """Names of layers that stand, without a gap, after the last of the model's own."""
    blocks = {n[: m.start(1)] for n in want if (m := re.search(r"\.(\d+)\.", n)) and int(m[1]) == n_layers - 1}
    out: dict[int, list[str]] = {}
    for name in names:
        m = re.search(r"\.(\d{1,5})\.", name)
        if m and name[: m.start(1)] in blocks and int(m[1]) >= n_layers:
            out.setdefault(int(m[1]), []).append(name)
    return [n for i in range(len(out)) for n in out.get(n_layers + i, [])]
