"""The `model_args` of a nanoGPT checkpoint in GPT-2's config words."""

from __future__ import annotations

from typing import Any

from llamactl.errors import InputRefused
from llamactl.spec.config import COUNT, LAYERS, POSITIONS, VOCAB, Config, kind_of

EPSILON = 1e-5  # of its layer norms, in its code and in no checkpoint


def from_model_args(data: Any, path: str, said: Any = None) -> dict[str, Any]:
    """The GPT-2 config that `data` stands for: exact GELU, biases by its flag, a tied head. Raises InputRefused.

    said: the hf_config of the same checkpoint, which llamactl keeps there: the form of the GELU, the epsilon, and the
    bos and eos ids are taken from it, nothing else.
    """
    if not isinstance(data, dict):
        raise InputRefused("config-type", f"model_args is {kind_of(data)}, not an object", path=path)
    cfg = Config(data, path, prefix="model_args.")
    out = {
        "model_type": "gpt2",
        "n_layer": cfg.integer("n_layer", hi=LAYERS),
        "n_head": cfg.integer("n_head", hi=COUNT),
        "n_embd": cfg.integer("n_embd"),
        "n_positions": cfg.integer("block_size", hi=POSITIONS),
        "vocab_size": cfg.integer("vocab_size", hi=VOCAB),
        "bias": cfg.flag("bias", default=True),
        "activation_function": "gelu",
        "layer_norm_epsilon": EPSILON,
        "tie_word_embeddings": True,
    }
    return out if said is None else out | _said(said, path, out["vocab_size"])


def _said(said: Any, path: str, vocab: int) -> dict[str, Any]:
    """What a kept config adds. Ids outside the vocabulary are left out: GPT-2's 50256 in a model of fewer tokens."""
    if not isinstance(said, dict):
        raise InputRefused("config-type", f"hf_config is {kind_of(said)}, not an object", path=path)
    cfg = Config(said, path, prefix="hf_config.")
    word = cfg.get("activation_function", default="gelu_new")
    if (form := cfg.activation("activation_function", default="gelu_new")) not in ("gelu", "gelu_tanh"):
        raise cfg.refuse("config-unsupported", f"hf_config.activation_function is {form}, but nanoGPT's is GELU")
    out = {"activation_function": word,
           "layer_norm_epsilon": cfg.number("layer_norm_epsilon", default=EPSILON)}
    for key in ("bos_token_id", "eos_token_id"):
        many = isinstance(said.get(key), list)
        ids = cfg.integers(key, hi=VOCAB, default=()) if many else (cfg.integer(key, lo=0, hi=VOCAB, default=None),)
        known = [n for n in ids if n is not None and n < vocab]
        if known:
            out[key] = known if many else known[0]
    return out
