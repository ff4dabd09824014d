"""One family a file: MODEL_TYPES, describe(config) -> Model, and its names in each layout (HF, ...).

A file is found by the model types it lists; there is no other list. Files that start with `_` are shared pieces.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

from llamactl.errors import InputRefused
from llamactl.spec.config import Config
from llamactl.spec.model import Model
from llamactl.spec.naming import Rule

_TABLE = {"gguf": "GGUF_NAMES"}  # GGUF itself lists the architectures that a family answers to


@lru_cache
def families() -> Mapping[str, str]:
    """{model_type: family file} of every file in this folder, read from their text without importing them."""
    import ast

    folder = os.path.dirname(__file__)
    out: dict[str, str] = {}
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".py") or name.startswith("_"):
            continue
        with open(os.path.join(folder, name), encoding="utf-8") as f:
            listed = re.search(r"^MODEL_TYPES = (\(.*?\))$", f.read(), re.M | re.S)
        if listed is None:
            raise RuntimeError(f"arch/{name} has no MODEL_TYPES")
        for model_type in ast.literal_eval(listed[1]):
            if model_type in out:
                raise RuntimeError(f"{model_type!r} is listed by arch/{name} and arch/{out[model_type]}.py")
            out[model_type] = name[:-3]
    return out


def family(name: str) -> ModuleType:
    """The module of a family file."""
    return import_module(f"llamactl.arch.{name}")


def find(model_type: str) -> ModuleType | None:
    """The family that lists `model_type`; most files are named after it, and then the others are not even read."""
    if model_type.isidentifier() and os.path.isfile(os.path.join(os.path.dirname(__file__), model_type + ".py")):
        module = family(model_type)
        if model_type in getattr(module, "MODEL_TYPES", ()):
            return module
    name = families().get(model_type)
    return family(name) if name else None


def describe(data: Any, path: str) -> Model:
    """The Model that a config.json says. data: the parsed object. path: its name in errors.

    Raises InputRefused for an unknown model_type (naming near ones) and for every value that cannot be judged.
    """
    if not isinstance(data, dict):
        from llamactl.spec.config import kind_of

        raise InputRefused("config-type", f"the top level is {kind_of(data)}, not an object", path=path)
    cfg = Config(data, path)
    model_type = data.get("model_type")
    if model_type is None:
        raise InputRefused("config-model-type", "no model_type, so the architecture is not known", path=path,
                           help="add \"model_type\" to the file, e.g. \"llama\"")
    if not isinstance(model_type, str):
        raise cfg.refuse("config-type", "model_type is not a string")
    found = find(model_type)
    if found is None:
        raise _unknown(cfg, model_type)
    model: Model = found.describe(cfg)
    return model


def _unknown(cfg: Config, model_type: str) -> InputRefused:
    from difflib import get_close_matches

    known = sorted(families())
    near = get_close_matches(model_type, known, 4, 0.5) or get_close_matches(model_type, known, 3, 0.0)
    nearest = f"nearest known: {', '.join(near)}"
    shown = model_type if len(model_type) <= 60 else model_type[:60] + "..."
    if "auto_map" in cfg.data:
        return cfg.refuse("config-remote-code",
                          f"model_type {shown!r} is not supported, and its own code is never run; {nearest}",
                          "'llamactl presets' lists what is bundled")
    return cfg.refuse("config-model-type", f"model_type {shown!r} is not supported; {nearest}",
                      "another type's numbers would be a guess, so none are given")


def names(model: Model, layout: str = "hf") -> tuple[Rule, ...]:
    """The naming table of `model`'s family in `layout`. Raises InputRefused layout-unknown."""
    table = getattr(family(model.family), _TABLE.get(layout, layout.upper()), None)
    if table is None:
        raise InputRefused("layout-unknown", f"the {layout} names of {model.family} tensors are not known",
                           help="give the model as a Hugging Face folder")
    if layout in _TABLE:  # named, not held, so that no config command reads the tables of GGUF
        from llamactl.arch._ggufnames import TABLES

        return TABLES[table]
    rules: tuple[Rule, ...] = table(model) if callable(table) else table
    return rules


def ignored(model: Model, layout: str = "hf") -> tuple[tuple[str, str], ...]:
    """(pattern, why) of tensors that stand in files of `layout` and are no weights of the model."""
    if layout in _TABLE:
        from llamactl.arch._ggufnames import IGNORED

        return IGNORED
    word = "IGNORED" if layout == "hf" else f"{layout.upper()}_IGNORED"
    patterns: tuple[tuple[str, str], ...] = getattr(family(model.family), word, ())
    return patterns
