"""What a budget may ask of a model: the keys, their units and options, and the reading of raw values with suspicion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Never

from llamactl.analysis.dtypes import unknown_dtype
from llamactl.analysis.engines import ENGINES
from llamactl.analysis.params import Active
from llamactl.errors import InputRefused
from llamactl.spec.config import kind_of
from llamactl.spec.dtype import find_dtype
from llamactl.spec.quantities import size, tokens

Value = int | str | bool
Path = tuple[str | int, ...]
BOUNDS = ("exact", "max", "min")
MOST = 10**18  # parameters and bytes
CONVENTIONS = tuple(f.name for f in fields(Active))


class Key(NamedTuple):
    """unit: count | bytes | tokens | flag | word. defaults: option -> value; None: the model's own. needs: options
    without a default."""

    unit: str
    meaning: str
    defaults: Mapping[str, int | str | None] = {}
    needs: tuple[str, ...] = ()
    bounds: tuple[str, ...] = BOUNDS


KEYS: dict[str, Key] = {
    "params": Key("count", "all parameters; tied weights once, buffers not"),
    "text_params": Key("count", "parameters without vision tower and projector"),
    "active_params": Key("count", "parameters one token meets, by the convention named",
                         {"convention": "minus_input_embedding"}),
    "weights_bytes": Key("bytes", "all parameters in one dtype; without one, in the model's own", {"dtype": None}),
    "kv_cache_bytes": Key("bytes", "the KV cache of `batch` sequences of `ctx` tokens, on one of `tp` devices; a fixed "
                          "state (Mamba) is not in it",
                          {"batch": 1, "dtype": None, "engine": "arch", "tp": 1}, ("ctx",)),
    "kv_bytes_per_token": Key("bytes", "what one more token adds before any window is full, on one of `tp` devices",
                              {"dtype": None, "tp": 1}),
    "context": Key("tokens", "positions the model can use"),
    "tied": Key("flag", "the output head shares the embedding", bounds=("exact",)),
    "layers": Key("count", "blocks"),
    "vocab": Key("count", "rows of the token embedding"),
    "family": Key("word", "the family that describes the model", bounds=("exact",)),
    "fit": Key("bytes", "memory of one device: weights, cache, activations and overhead, as `llamactl fit` counts them",
               {"batch": 1, "weights_dtype": None, "kv_dtype": None, "tp": None}, ("gpu", "ctx"), ()),
    "inspect": Key("word", "what `llamactl inspect` says of the files", bounds=("exact",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One bound on one number. key: see KEYS. options: under which conditions. at: where its value stands in the table.

    value: True for `fit`, which has no number of its own. line: in the file, None where not known.
    """

    key: str
    options: dict[str, Any]
    bound: str
    value: Value
    at: Path
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one model is held to. reference: as the file names it. path: the file. notes: (code, message) of reading."""

    reference: str
    path: str
    limits: tuple[Limit, ...]
    notes: tuple[tuple[str, str], ...] = ()


def read_budget(reference: str, table: Any, *, path: str, lines: Mapping[Path, int] | None = None) -> Budget:
    """The budget of one model, from the raw table of a file. lines: path below `reference` -> line.

    Raises InputRefused for a key that is unknown and for a value that is not exactly what its key takes.
    """
    return _Reader(reference, path, lines or {}).budget(table)


class _Reader:
    def __init__(self, reference: str, path: str, lines: Mapping[Path, int]) -> None:
        self.reference = reference
        self.path = path
        self.lines = lines
        self.notes: list[tuple[str, str]] = []

    def line(self, at: Path) -> int | None:
        """Where the value stands, or the first thing inside it."""
        return self.lines.get(at) or min((n for p, n in self.lines.items() if p[:len(at)] == at), default=None)

    def refuse(self, at: Path, code: str, message: str, help: str | None = None) -> Never:
        line = self.line(at)
        name = " ".join([self.reference, ".".join(str(x) for x in at)]).strip()
        raise InputRefused(code, f"{f'line {line}: ' if line else ''}{name}: {message}", path=self.path, help=help)

    def budget(self, table: Any) -> Budget:
        if not isinstance(table, dict):
            self.refuse((), "budget-type", f"is {_kind(table)}, not a table of limits")
        if not table:
            self.refuse((), "budget-empty", "asks nothing", "write params = 8030261248")
        limits = tuple(x for key, value in table.items() for x in self.key(key, value))
        return Budget(reference=self.reference, path=self.path, limits=limits, notes=tuple(self.notes))

    def key(self, key: str, value: Any) -> list[Limit]:
        if key not in KEYS:
            self.refuse((key,), "budget-key", "not a key that a budget has", near(key, KEYS))
        if not isinstance(value, list):
            return self.entry((key,), KEYS[key], value)
        if not (KEYS[key].defaults or KEYS[key].needs):
            self.refuse((key,), "budget-type", f"is {_kind(value)}, but takes one limit")
        if not value:
            self.refuse((key,), "budget-empty", "is an empty list")
        return [x for n, one in enumerate(value) for x in self.entry((key, n), KEYS[key], one)]

    def entry(self, at: Path, key: Key, value: Any) -> list[Limit]:
        """A bare value is exact; a table holds options and bounds."""
        if not isinstance(value, dict):
            if key.needs:
                self.refuse(at, "budget-option", f"needs {' and '.join(key.needs)}", _example(key))
            return [self.limit(at, {**key.defaults}, "exact", self.value(at, key, "exact", value))]
        known = (*key.bounds, *key.defaults, *key.needs)
        for word in value:
            if word not in known:
                self.refuse((*at, word), "budget-key", "not an option of it", near(word, known))
        options = {**key.defaults, **{n: self.option((*at, n), n, v) for n, v in value.items() if n not in BOUNDS}}
        missing = [n for n in key.needs if n not in options]
        if missing:
            self.refuse(at, "budget-option", f"needs {' and '.join(missing)}", _example(key))
        options = {n: options[n] for n in (*key.needs, *key.defaults)}
        if not key.bounds:
            return [self.limit(at, options, "max", True)]
        bounds = {b: self.value((*at, b), key, b, value[b]) for b in BOUNDS if b in value}
        if not bounds:
            self.refuse(at, "budget-empty", f"names no {' or '.join(key.bounds)}", _example(key))
        if "exact" in bounds and len(bounds) > 1:
            self.refuse(at, "budget-conflict", "exact stands alone, without max or min")
        if "max" in bounds and "min" in bounds and bounds["min"] > bounds["max"]:  # type: ignore[operator]
            self.refuse(at, "budget-conflict", f"min {bounds['min']:,} is above max {bounds['max']:,}")
        return [self.limit((*at, b), options, b, v) for b, v in bounds.items()]

    def limit(self, at: Path, options: dict[str, Any], bound: str, value: Value) -> Limit:
        return Limit(key=str(at[0]), options=options, bound=bound, value=value, at=at, line=self.line(at))

    def value(self, at: Path, key: Key, bound: str, value: Any) -> Value:
        """A limit: an exact integer, for bytes also a size, for tokens also 128k; a flag or a word where that is it."""
        if key.unit == "flag":
            if not isinstance(value, bool):
                self.refuse(at, "budget-type", f"is {_kind(value)}, not true or false")
            return value
        if key.unit == "word":
            return self.word(at, value, ("clean",) if at[0] == "inspect" else ())
        if isinstance(value, str) and key.unit == "bytes":
            return self.size(at, bound, value)
        if isinstance(value, str) and key.unit == "tokens":
            return self.tokens(at, value)
        return self.integer(at, value, 0, 1 << 40 if key.unit == "tokens" else MOST)

    def option(self, at: Path, name: str, value: Any) -> int | str:
        if name == "ctx":
            return self.tokens(at, value) if isinstance(value, str) else self.integer(at, value, 1, 1 << 40)
        if name in ("batch", "tp"):
            return self.integer(at, value, 1, 4096 if name == "tp" else 1 << 24)
        word = self.word(at, value, {"engine": tuple(ENGINES), "convention": CONVENTIONS}.get(name, ()))
        if name.endswith("dtype") and find_dtype(word) is None:
            self.refuse(at, "budget-value", f"{word!r} is not a known dtype", unknown_dtype(word).help)
        return word

    def word(self, at: Path, value: Any, known: tuple[str, ...]) -> str:
        if not isinstance(value, str) or not 0 < len(value) <= 200:
            self.refuse(at, "budget-type", f"is {_kind(value)}, not a word")
        if known and value not in known:
            self.refuse(at, "budget-value", f"{value!r} is not one of {', '.join(known)}", near(value, known))
        return value

    def integer(self, at: Path, value: Any, low: int, high: int) -> int:
        """16.0 is taken as 16 with a warning; true, "16" and 16.5 are refused."""
        if isinstance(value, float) and value.is_integer():
            name = ".".join(str(x) for x in at)
            self.notes.append(("budget-type", f"{self.reference} {name} is written {value!r}; read as {int(value)}"))
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(at, "budget-type", f"is {_kind(value)}, not an integer")
        if not low <= value <= high:
            said = f"{value:,}" if abs(value) <= 1 << 64 else "far"
            self.refuse(at, "budget-range", f"is {said}, outside {low:,}..{high:,}")
        return value

    def size(self, at: Path, bound: str, text: str) -> int:
        """Whole bytes: a max is rounded down and a min up, which asks the same of whole numbers."""
        found = size(text)
        if found is None:
            self.refuse(at, "budget-value", f"{text!r} is not a size",
                        "write 16.1GB (10^9), 15GiB (2^30) or an integer")
        if bound == "exact" and found.floor != found.ceil:
            self.refuse(at, "budget-value", f"{text!r} is not a whole number of bytes", "write max, or the integer")
        return self.integer(at, found.ceil if bound == "min" else found.floor, 0, MOST)

    def tokens(self, at: Path, text: str) -> int:
        found = tokens(text)
        if found is None:
            self.refuse(at, "budget-value", f"{text!r} is not a number of tokens", "write 8192 or 128k")
        return self.integer(at, found, 1, 1 << 40)


def near(word: object, known: Iterable[str]) -> str:
    """The help for a word that is not one of `known`."""
    from difflib import get_close_matches

    words = list(known)
    close = get_close_matches(str(word), words, 1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(words)}"


def _kind(value: Any) -> str:
    """What a raw value is; TOML has dates and times, which JSON has not, and integers too long to print."""
    if isinstance(value, int) and abs(value) > 1 << 64:
        return "a huge integer"
    return kind_of(value) if value is None or isinstance(value, dict | list | str | int | float) else "a date or time"


def _example(key: Key) -> str:
    options = {"ctx": "8192", "gpu": '"h100-80gb"'}
    said = [f"{n} = {options[n]}" for n in key.needs] + (["max = 1000"] if key.bounds else [])
    return f"write {{{', '.join(said)}}}"
