"""The `model_args` of a nanoGPT checkpoint in GPT-2's config words."""

from __future__ import annotations

from typing import Any

from llamactl.errors import InputRefused
from llamactl.spec.config import COUNT, LAYERS, POSITIONS, VOCAB, Config, kind_of


def from_model_args(data: Any, path: str) -> dict[str, Any]:
    """The GPT-2 config that `data` stands for: exact GELU, biases by its flag, a tied head. Raises InputRefused."""
    if not isinstance(data, dict):
        raise InputRefused("config-type", f"model_args is {kind_of(data)}, not an object", path=path)
    cfg = Config(data, path, prefix="model_args.")
    return {
        "model_type": "gpt2",
        "n_layer": cfg.integer("n_layer", hi=LAYERS),
        "n_head": cfg.integer("n_head", hi=COUNT),
        "n_embd": cfg.integer("n_embd"),
        "n_positions": cfg.integer("block_size", hi=POSITIONS),
        "vocab_size": cfg.integer("vocab_size", hi=VOCAB),
        "bias": cfg.flag("bias", default=True),
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    }
