"""Meta's original params.json in config.json's words (the sizing rule is that of Meta's own Llama model code)."""

from __future__ import annotations

from typing import Any

from llamactl.spec.config import COUNT, LAYERS, VOCAB, Config


def ffn_width(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """2/3 of 4 x dim, times the multiplier, rounded up to a multiple: SwiGLU's three matrices at the size of two."""
    width = int(2 * (4 * dim) / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return multiple_of * ((width + multiple_of - 1) // multiple_of)


def from_params(data: dict[str, Any], path: str) -> dict[str, Any]:
    """The Llama config that `data` stands for. Raises InputRefused; a vocabulary of -1 is only the tokenizer's."""
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
        "max_position_embeddings": cfg.integer("max_seq_len", default=None),
        "head_dim": cfg.integer("head_dim", default=None),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if cfg.flag("use_scaled_rope", default=False):
        out["rope_scaling"] = {
            "rope_type": "llama3", "factor": cfg.number("rope_scaling_factor", default=8.0), "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }
    return out
