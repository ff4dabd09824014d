"""The settings of `generate`: what the user gave, then what the model's own generation_config.json says, then ours."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

from llamactl.errors import UsageError

DEFAULTS = {"temperature": 0.8, "top_k": 0.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
PENALTY, OWN = "repetition_penalty", "generation_config.json"
Given = Mapping[str, float | None]


class Range(NamedTuple):
    """Which values a setting takes, in words and as a test."""

    words: str
    holds: Callable[[float], bool]


RANGES = {
    "temperature": Range("0 or more", lambda x: x >= 0),
    "top_k": Range("0 (all) or more", lambda x: x >= 0),
    "top_p": Range("above 0 and at most 1", lambda x: 0 < x <= 1),
    "min_p": Range("0 or more and below 1", lambda x: 0 <= x < 1),
    "repetition_penalty": Range("between 0.01 and 100", lambda x: 0.01 <= x <= 100),
}


class Settings(NamedTuple):
    """values: of DEFAULTS' keys, and the seed. origin: who said each of the values."""

    values: dict[str, float]
    origin: dict[str, str]
    seed: int

    def say(self) -> str:
        """One line of every value with where it comes from."""
        said = [f"{key} {value:g} ({self.origin[key]})" for key, value in self.values.items()
                if self.origin[key] != "default" or key == "temperature"]
        return ", ".join([*said, f"seed {self.seed}"])


def check_given(given: Given, greedy: bool) -> None:
    """Refuse settings that mean nothing. Raises UsageError."""
    for key, value in given.items():
        if value is not None and not (math.isfinite(value) and RANGES[key].holds(value)):
            raise UsageError("usage", f"--{key.replace('_', '-')} {value:g} is not {RANGES[key].words}")
    if greedy and given.get("temperature"):
        raise UsageError("usage", "--greedy always takes the likeliest token, --temperature draws",
                         help="give one of them")


def settle(given: Given, greedy: bool, own: Mapping[str, object], seed: int | None) -> Settings:
    """Each setting from the first that says it. own: of generation_config.json; a value that no option would take is
    passed over. Its do_sample, where false, means greedy, unless the user asks for any way of drawing.
    seed: one is drawn where none is given, so that every run can be repeated.
    """
    values, origin = {}, {}
    never = own.get("do_sample") is False and all(given.get(key) is None for key in DEFAULTS if key != PENALTY)
    for key, default in DEFAULTS.items():
        value, asked = own.get(key), given.get(key)
        if key == "temperature" and greedy:
            values[key], origin[key] = 0.0, "--greedy"
        elif key == "temperature" and never:
            values[key], origin[key] = 0.0, f"do_sample false, {OWN}"
        elif asked is not None:
            values[key], origin[key] = float(asked), f"--{key.replace('_', '-')}"
        elif isinstance(value, int | float) and math.isfinite(value) and RANGES[key].holds(value):
            values[key], origin[key] = float(value), OWN
        else:
            values[key], origin[key] = default, "default"
    return Settings(values, origin, random.SystemRandom().getrandbits(48) if seed is None else seed)
