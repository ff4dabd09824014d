"""Meta's original params.json in config.json's words."""

from __future__ import annotations

from typing import Any

from llamactl.spec.config import COUNT, LAYERS, POSITIONS, VOCAB, Config
from llamactl.spec.parts import ffn_width

FACTOR = 8.0  # of Llama 3.1; params.json itself never says it
# What use_scaled_rope stands for, in config.json's words: the constants of Meta's own code.
SCALED = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


def from_params(data: dict[str, Any], path: str, vocab_rows: int | None = None) -> dict[str, Any]:
    """The Llama config that `data` stands for. Raises InputRefused.

    vocab_rows: rows of tok_embeddings, which are the vocabulary where the file says -1 (Llama 1 and 2 leave it to the
    tokenizer). head_dim, rope_scaling_factor, attention_bias, mlp_bias and max_position_embeddings are llamactl's own
    keys: Meta writes none of them, and a model may need them.
    """
    if vocab_rows is not None and data.get("vocab_size", -1) == -1:
        data = {**data, "vocab_size": vocab_rows}
    cfg = Config(data, path)
    if "moe" in data or "moe_args" in data:
        raise cfg.refuse("config-unsupported", "params.json describes experts; only dense Llama is read from it",
                         "give the Hugging Face config.json")
    if data.get("vocab_size") == -1:
        raise cfg.refuse("config-missing", "vocab_size is -1: this file leaves it to the tokenizer",
                         "write it into the file: 32000 for Llama 1 and 2")
    dim = cfg.integer("dim")
    heads = cfg.integer("n_heads", hi=COUNT)
    out: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": dim,
        "num_hidden_layers": cfg.integer("n_layers", hi=LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": cfg.integer("n_kv_heads", hi=COUNT, default=heads),
        "vocab_size": cfg.integer("vocab_size", hi=VOCAB),
        "intermediate_size": cfg.integer("hidden_dim", "ffn_hidden_size", default=None) or ffn_width(
            dim, cfg.integer("multiple_of", default=256), cfg.number("ffn_dim_multiplier", default=None, hi=1e3)),
        "rms_norm_eps": cfg.number("norm_eps", default=1e-5),
        "rope_theta": cfg.number("rope_theta", default=10000.0, lo=1e-6),
        "max_position_embeddings": cfg.integer("max_position_embeddings", "max_seq_len", hi=POSITIONS, default=None),
        "head_dim": cfg.integer("head_dim", default=None),
        "attention_bias": cfg.flag("attention_bias", default=False),
        "mlp_bias": cfg.flag("mlp_bias", default=False),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if cfg.flag("use_scaled_rope", default=False):
        out["rope_scaling"] = {**SCALED, "factor": cfg.number("rope_scaling_factor", default=FACTOR)}
    return out
