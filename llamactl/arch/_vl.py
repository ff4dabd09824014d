"""A decoder with a tower beside it: the text family describes the nested config, the tower is counted next to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llamactl.arch import _vision
from llamactl.spec.config import Config
from llamactl.spec.model import Model

NOTHING: Mapping[str, Any] = {}


def text_config(cfg: Config, silent: Mapping[str, Any] = NOTHING, *, flat: bool = False,
                one_tie: bool = False) -> Config:
    """text_config, with the family's defaults for what the file leaves out (`silent`).

    flat: older files have no such object.
    one_tie: transformers ties where the inner config says so, whatever the outer says; two that disagree are refused.
    """
    text = cfg.section("text_config")
    if text is None and not flat:
        raise cfg.refuse("config-missing", "text_config is missing")
    text = text or cfg
    if one_tie and [node.data.get("tie_word_embeddings") for node in (cfg, text)] == [False, True]:
        raise cfg.refuse("config-conflict", f"tie_word_embeddings is false, but {text.prefix}tie_word_embeddings is "
                         "true; transformers would tie")
    missing = {k: v for k, v in silent.items() if k not in text.data}
    whole = Config({**text.data, **missing}, text.path, prefix=text.prefix, parent=text.parent)
    whole.reads, whole.warnings = text.reads, text.warnings
    return whole


def around(model: Model, family: str, cfg: Config, *parts: _vision.Maker,
           silent: Mapping[str, Any] = NOTHING) -> Model:
    """The text `model` with the sections that `parts` make of vision_config. silent: as given to text_config."""
    sections, left_out = _vision.beside(cfg.section("vision_config"), model.hidden, *parts)
    text = cfg.section("text_config") or cfg
    filled = {text.prefix + k for k in silent if k not in text.data}
    reads = tuple((k, v, "family default" if k in filled else how) for k, v, how in cfg.reads)
    return replace(model, family=family, sections=(*model.sections, *sections),
                   not_counted=(*model.not_counted, *left_out), reads=reads, notes=tuple(cfg.warnings))


def unless_null(cfg: Config, key: str, default: float) -> float | None:
    """A number whose absence means the family's `default`, while null turns it off."""
    value: float | None = cfg.number(key, default=None if key in cfg.data else default)
    return value

