"""Bundled presets: one YAML file a model, values only, found by name or by any of its Hub ids, always offline."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from llamactl.errors import InputRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """hub: ids that share the config. published: what the maker says of it (total, approx, active, source)."""

    name: str
    config: dict[str, Any]
    title: str = ""
    hub: tuple[str, ...] = ()
    published: dict[str, Any] = field(default_factory=dict)


@lru_cache
def folder() -> str:
    """presets/models, inside the wheel (llamactl/_presets) or in the checkout of an editable install."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for base in (os.path.join(package, "_presets"), os.path.join(os.path.dirname(package), "presets")):
        if os.path.isdir(os.path.join(base, "models")):
            return os.path.join(base, "models")
    raise InputRefused("presets-missing", "the bundled presets are not installed", path=package,
                       help="install llamactl again")


def names() -> tuple[str, ...]:
    """Every preset's name, which is its file's."""
    return tuple(sorted(n[:-5] for n in os.listdir(folder()) if n.endswith(".yaml")))


@lru_cache
def hub_ids() -> dict[str, str]:
    """{Hub id: preset name}, read off the `hub: [...]` lines alone: parsing eighty YAML files is slow."""
    out: dict[str, str] = {}
    for name in names():
        with open(os.path.join(folder(), name + ".yaml"), encoding="utf-8") as f:
            listed = f.read().partition("\nhub: [")[2].partition("]")[0]
        for word in filter(None, map(str.strip, listed.split(","))):
            out[word.strip("'\"")] = name
    return out


@lru_cache
def aliases() -> dict[str, str]:
    """The same with ids in lower case: the Hub does not tell them apart either."""
    return {i.lower(): name for i, name in hub_ids().items()}


def find(ref: str) -> Preset | None:
    """The preset named `ref`, or that has the Hub id `ref` (in any case); None if there is none."""
    word = ref.lower()
    if word + ".yaml" in os.listdir(folder()):
        return load(word)
    name = aliases().get(word)
    return load(name) if name else None


def near(ref: str) -> str | None:
    """The preset whose name or Hub id looks most like `ref`, for "did you mean"."""
    from difflib import get_close_matches

    word = ref.lower()
    close = get_close_matches(word, names(), 1, 0.6)
    if close:
        return close[0]
    by_id = get_close_matches(word, aliases(), 1, 0.75)
    return aliases()[by_id[0]] if by_id else None


def load(name: str) -> Preset:
    """One preset with its config alone; its title and published figures stay unread (see `full`).

    `config:` stands last in the file and is written as JSON, which YAML contains: reading it so saves 9 ms of importing
    a YAML parser on every `llamactl params llama-3-8b`.
    """
    import json

    with open(os.path.join(folder(), name + ".yaml"), encoding="utf-8") as f:
        config = json.loads(f.read().partition("\nconfig: ")[2])
    return Preset(name=name, config=config)


def full(name: str) -> Preset:
    """One preset with everything its file says."""
    import yaml

    with open(os.path.join(folder(), name + ".yaml"), encoding="utf-8") as f:
        data = yaml.load(f, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return Preset(name=data["name"], title=data["title"], hub=tuple(data.get("hub") or ()),
                  published=dict(data.get("published") or {}), config=data["config"])


def every() -> Iterator[Preset]:
    """All presets, by name, with everything their files say."""
    for name in names():
        yield full(name)
