"""config.json, read with suspicion: aliases, exact types, sane ranges, and never a default for a shape.

A shape (hidden size, layers, heads, vocabulary) that is missing is an error that names the key. Where a family's own
config class has a default for a flag, the family passes it. Every value read is recorded, so that `-v` can say where
a number comes from.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from llamactl.errors import InputRefused

WIDTH = 1 << 24  # hidden, ffn, head_dim, ranks
COUNT = 1 << 16  # heads, experts
LAYERS = 10_000
VOCAB = 1 << 28
POSITIONS = 1 << 40

_MISSING: Any = object()

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "swiglu": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh", "relu": "relu",
    "relu2": "relu2", "quick_gelu": "quick_gelu", "tanh": "tanh", "sigmoid": "sigmoid",
}


class Config:
    """One JSON object of a config, with the path that errors name.

    reads: (key, value, how) of everything asked for, in order. warnings: (code, message).
    """

    def __init__(self, data: dict[str, Any], path: str, *, prefix: str = "", parent: Config | None = None) -> None:
        self.data = data
        self.path = path
        self.prefix = prefix
        self.parent = parent
        self.reads: list[tuple[str, Any, str]] = parent.reads if parent else []
        self.warnings: list[tuple[str, str]] = parent.warnings if parent else []

    def refuse(self, code: str, message: str, help: str | None = None) -> InputRefused:
        return InputRefused(code, message, path=self.path, help=help)

    def section(self, *keys: str) -> Config | None:
        """The nested object under the first of `keys` that is there, e.g. text_config."""
        for key in keys:
            value = self.data.get(key)
            if value is None:
                continue
            if not isinstance(value, dict):
                raise self.refuse("config-type", f"{self.prefix}{key} is {kind_of(value)}, not an object")
            return Config(value, self.path, prefix=f"{self.prefix}{key}.", parent=self)
        return None

    def get(self, *keys: str, default: Any = _MISSING) -> Any:
        """The value under whichever of `keys` is there and not null. Two that disagree are refused."""
        found = [(k, self.data[k]) for k in keys if self.data.get(k) is not None]
        if found:
            key, value = found[0]
            for other, second in found[1:]:
                if second != value:
                    raise self.refuse(
                        "config-conflict", f"{self.prefix}{key} is {value!r}, but {self.prefix}{other} is {second!r}"
                    )
            self.reads.append((self.prefix + key, value, "config"))
            return value
        if default is not _MISSING:
            if default is not None:
                self.reads.append((self.prefix + keys[0], default, "family default"))
            return default
        for key in keys:
            if key in self.data:
                raise self.refuse("config-type", f"{self.prefix}{key} is null, but a number is needed")
        raise self.refuse("config-missing", f"{self.prefix}{keys[0]} is missing", self._near(keys[0]))

    def _near(self, key: str) -> str | None:
        from difflib import get_close_matches

        near = get_close_matches(key, [k for k in self.data if isinstance(k, str)], 1, 0.8)
        return f"did you mean {near[0]!r}, which the file has?" if near else None

    def integer(self, *keys: str, lo: int = 1, hi: int = WIDTH, default: Any = _MISSING) -> Any:
        """An exact integer in lo..hi. 16.0 is taken as 16 with a warning; true, "16" and 16.5 are refused."""
        value = self.get(*keys, default=default)
        if value is default and not isinstance(value, int):
            return value
        return self._int(self._name(keys), value, lo, hi)

    def _int(self, name: str, value: Any, lo: int, hi: int) -> int:
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            self.warnings.append(("config-type", f"{name} is written {value!r}; read as {int(value)}"))
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse("config-type", f"{name} is {kind_of(value)}, not an integer")
        if not lo <= value <= hi:
            raise self.refuse("config-range", f"{name} is {value:,}, outside {lo:,}..{hi:,}")
        return value

    def _name(self, keys: tuple[str, ...]) -> str:
        return self.prefix + next((k for k in keys if self.data.get(k) is not None), keys[0])

    def number(self, *keys: str, default: Any = _MISSING, lo: float = 0.0, hi: float = 1e30) -> Any:
        """A finite number in lo..hi."""
        value = self.get(*keys, default=default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse("config-type", f"{self._name(keys)} is {kind_of(value)}, not a number")
        if not math.isfinite(value):
            raise self.refuse("config-type", f"{self._name(keys)} is {value}, not a finite number")
        if not lo <= value <= hi:
            raise self.refuse("config-range", f"{self._name(keys)} is {value:g}, outside {lo:g}..{hi:g}")
        return float(value)

    def flag(self, *keys: str, default: bool) -> bool:
        """true or false; a flag's default is the family's own."""
        value = self.get(*keys, default=default)
        if not isinstance(value, bool):
            raise self.refuse("config-type", f"{self._name(keys)} is {kind_of(value)}, not true or false")
        return value

    def expect(self, *keys: str, allowed: Collection[Any], default: Any = _MISSING) -> Any:
        """A value out of `allowed`; anything else is a feature this family does not have here, and is refused."""
        value = self.get(*keys, default=default)
        if isinstance(value, dict | list) or value not in allowed:
            known = ", ".join(str(a) for a in allowed)
            raise self.refuse("config-unsupported", f"{self._name(keys)} is {value!r}; known here: {known}")
        return value

    def activation(self, *keys: str, default: str = _MISSING) -> str:
        """The activation under one name each: silu, gelu (exact), gelu_tanh, relu, ..."""
        value = self.get(*keys, default=default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            from difflib import get_close_matches

            near = get_close_matches(str(value), ACTIVATIONS, 1)
            help = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(ACTIVATIONS))}"
            raise self.refuse("config-activation", f"{self._name(keys)} is {value!r}, not a known activation", help)
        return ACTIVATIONS[value]

    def integers(self, *keys: str, lo: int = 0, hi: int = WIDTH, default: Any = _MISSING) -> Any:
        """A list of exact integers in lo..hi, as a tuple."""
        value = self.get(*keys, default=default)
        if value is default and not isinstance(value, list):
            return value
        if not isinstance(value, list):
            raise self.refuse("config-type", f"{self._name(keys)} is {kind_of(value)}, not a list")
        return tuple(self._int(f"{self._name(keys)}[{n}]", v, lo, hi) for n, v in enumerate(value))

    def layer_types(self, n_layers: int, allowed: Collection[str]) -> tuple[str, ...] | None:
        """`layer_types`, one word per layer, or None where the file has none."""
        value = self.get("layer_types", default=None)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.refuse("config-type", f"{self.prefix}layer_types is {kind_of(value)}, not a list")
        if len(value) != n_layers:
            raise self.refuse("config-layers", f"layer_types has {len(value)} entries for {n_layers} layers")
        for word in value:
            if word not in allowed:
                raise self.refuse(
                    "config-layers", f"layer_types holds {word!r}; known here: {', '.join(sorted(allowed))}"
                )
        return tuple(value)

    def heads(self, *, hidden: int, head_dim: int | None = None) -> tuple[int, int, int]:
        """(n_heads, n_kv_heads, head_dim): KV heads absent or null = heads; head_dim absent = hidden / heads.

        head_dim: the family's own fixed default where it has one.
        """
        n_heads = self.integer("num_attention_heads", "n_head", "n_heads", hi=COUNT)
        n_kv = self.integer("num_key_value_heads", hi=COUNT, default=None)
        if n_kv is None:
            n_kv = n_heads
            self.reads.append((self.prefix + "num_key_value_heads", n_kv, "= num_attention_heads"))
        if n_heads % n_kv:
            raise self.refuse("config-heads", f"{n_heads} heads cannot share {n_kv} KV heads evenly")
        stated_null = "head_dim" in self.data and self.data["head_dim"] is None  # then the fixed default is not meant
        dim = self.integer("head_dim", default=None if stated_null else head_dim)
        if dim is None:
            dim = self.divided(hidden, n_heads)
        return n_heads, n_kv, dim

    def divided(self, hidden: int, n_heads: int) -> int:
        """hidden / heads, refused where it is no integer."""
        if hidden % n_heads:
            raise self.refuse("config-heads", f"hidden size {hidden:,} is not divisible by {n_heads} heads",
                              "give head_dim in the config")
        self.reads.append((self.prefix + "head_dim", hidden // n_heads, "= hidden_size / num_attention_heads"))
        return hidden // n_heads


def kind_of(value: Any) -> str:
    """What a JSON value is, in plain words with the value where it is short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
