"""Where a file is silent: llamactl refuses, or reads what the family's own config class in transformers says.

Each key of each golden config is left out once; the config is then described as it is, and as transformers writes it
with every default filled in. Both must be the same Model.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llamactl import arch
from llamactl.errors import InputRefused
from llamactl.spec.model import Context, Model

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NAMES = sorted(p.name for p in GOLDEN.iterdir() if (p / "config.json").exists())

# families with one length for all sizes, or with a table of positions, which needs one
DRAFTS = {"qwen3_next", "qwen3_5", "qwen3_5_moe"}  # their files store a drafting layer without a word about it
ENDS = {"dbrx", "gemma3", "gpt2", "gpt_bigcode", "gptj", "mpt", "opt"}


def config(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    return data


def cases() -> Iterator[Any]:
    for name in NAMES:
        whole = config(name)
        for key in whole.get("text_config", whole):
            if key not in ("model_type", "vision_config"):  # a tower that is not described is listed, not filled in
                yield pytest.param(name, key)


def described(data: dict[str, Any]) -> Model | None:
    """The Model, None where the file is refused: for what is missing, or because the default does not fit the rest."""
    try:
        return arch.describe(data, "config.json")
    except InputRefused:
        return None


def written(make_golden: ModuleType, data: dict[str, Any]) -> dict[str, Any] | None:
    """`data` as transformers writes it again, None where it refuses the file."""
    with tempfile.TemporaryDirectory() as tmp:
        file = Path(tmp) / "config.json"
        file.write_text(json.dumps(data), encoding="utf-8")
        try:
            make_golden.AutoConfig.from_pretrained(tmp).save_pretrained(tmp)
        except Exception:  # it has many kinds of refusal, none of them ours to judge
            return None
        out: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return out


def comparable(model: Model, left_out: str) -> Model:
    """Without the words about where a value was read, and without what a silent file leaves open.

    A length that is not named stays unknown, instead of that of the family's first model; extra layers are listed where
    the file says that they are stored.
    """
    model = replace(model, notes=(), tied_why="")
    if left_out == "max_position_embeddings":
        model = replace(model, context=Context(trained=None, usable=None, why=""))
    return replace(model, not_counted=()) if left_out == "num_nextn_predict_layers" else model


@pytest.mark.parametrize(("name", "key"), list(cases()))
def test_a_silent_file(make_golden: ModuleType, name: str, key: str) -> None:
    silent = copy.deepcopy(config(name))
    del silent.get("text_config", silent)[key]
    ours, filled = described(silent), written(make_golden, silent)
    if ours is None or filled is None or (name.startswith("stablelm") and key == "num_key_value_heads"):
        return  # StableLM's class has 32 whatever the heads; ours are the heads
    assert comparable(ours, key) == comparable(arch.describe(filled, name), key)


def test_what_a_silent_file_leaves_open() -> None:
    for name in NAMES:
        silent = copy.deepcopy(config(name))
        inner = silent.get("text_config", silent)
        for key in ("max_position_embeddings", "num_nextn_predict_layers"):
            inner.pop(key, None)
        if arch.families()[silent["model_type"]] not in ENDS:
            model = arch.describe(silent, name)
            assert (model.context.trained, model.context.usable) == (None, None)
            if model.family not in DRAFTS:
                assert not any("prediction" in left.what for left in model.not_counted)
