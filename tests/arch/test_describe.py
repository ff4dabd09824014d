"""describe() on files that are nearly right: one value of a golden config is replaced by anything JSON can say."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamactl import arch
from llamactl.errors import InputRefused

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NAMES = sorted(p.name for p in GOLDEN.iterdir() if (p / "config.json").exists())
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 1 << 40, 10**18, 0.5, 2.0, 1e300, float("nan"), float("inf"), "", "x", "auto", [],
    [1], ["x"], [None], [[]], {}, {"a": 1}, {"type": "linear"}, {"rope_type": ["x"]}, {"full_attention": {}},
)
ADDED = (
    "head_dim", "layer_types", "rope_scaling", "rope_parameters", "quantization_config", "architectures", "torch_dtype",
    "no_rope_layers", "moe_layers", "mlp_only_layers", "partial_rotary_factor", "text_config", "vision_config",
    "num_nextn_predict_layers", "attention_chunk_size", "sliding_window", "sliding_window_pattern", "hidden_activation",
)


def places(config: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of the file, nested ones too, and some that it does not have."""
    for key in (*config, *(k for k in ADDED if k not in config)):
        yield (*before, key)
        if isinstance(config.get(key), dict):
            yield from places(config[key], (*before, key))


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_value_is_refused_or_read_never_a_crash(name: str) -> None:
    config = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    refused: list[InputRefused] = []
    for place in places(config):
        for value in VALUES:
            changed = copy.deepcopy(config)
            node = changed
            for key in place[:-1]:
                node = node[key]
            node[place[-1]] = value
            try:
                arch.describe(changed, "config.json").total()
            except InputRefused as e:
                refused.append(e)
    assert len(refused) > 200
    assert all(e.line().isprintable() and e.path == "config.json" for e in refused)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "llava"])
def test_a_shape_never_has_a_default(name: str) -> None:
    """Without hidden size, layers, heads or vocabulary the file is refused by that key's name.

    Gemma 3's published files leave out heads and vocabulary, LLaVA's 7B every shape; their own config classes fill in.
    """
    config = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    inner = config.get("text_config", config)
    shapes = ["hidden_size", "num_hidden_layers", "n_embd", "n_layer", "n_head", "intermediate_size", "d_model",
              "n_layers", "n_heads", "ffn_dim", "num_layers",
              "moe_intermediate_size", "kv_lora_rank", "qk_nope_head_dim", "num_local_experts", "n_routed_experts"]
    if arch.families()[config["model_type"]] != "gemma3":
        shapes += ["num_attention_heads", "vocab_size"]
    taken = 0
    for key in shapes:
        if key in inner:
            value = inner.pop(key)
            with pytest.raises(InputRefused) as caught:
                arch.describe(config, "config.json")
            assert caught.value.code == "config-missing"
            inner[key] = value
            taken += 1
    assert taken >= 3
