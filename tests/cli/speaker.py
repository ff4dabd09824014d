"""A checkpoint that says what a test wants: each token leads to the next one of a chain, whatever stood before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BOS, END, VOCAB, HIDDEN = 256, 257, 258, 288
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 1,
    "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "dtype": "float32",
}
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]  # printed as they are by GPT-2's byte alphabet


def alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    rest = iter(range(256, 512))
    return [chr(b) if b in BYTES else chr(next(rest)) for b in range(256)]


def tokenizer(bos: bool = False, vocab: Sequence[str] | None = None) -> dict[str, Any]:
    """A tokenizer.json of single bytes, byte b at id b, then <s> and </s>. bos: <s> before every text."""
    pieces = list(vocab or alphabet())
    special = [] if vocab else [("<s>", BOS), ("</s>", END)]
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                                         {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}}}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [{"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True} for name, i in special],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": template if bos else None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {p: i for i, p in enumerate(pieces)}, "merges": []},
    }


def write(folder: Path, chain: Sequence[int], *, bos: bool = False, files: dict[str, Any] | None = None,
          dtype: str = "float32", words: bool = True) -> Path:
    """A folder whose model goes on along `chain`: token chain[i] is followed by chain[i + 1], the last by the first.

    Every token stands in it once at most. files: more JSON files. words: with a tokenizer.
    """
    import torch
    from safetensors.torch import save_file

    assert len(set(chain)) == len(chain)
    folder.mkdir(parents=True, exist_ok=True)
    kind = getattr(torch, dtype)
    kv = HIDDEN // 8
    t = {"model.embed_tokens.weight": torch.eye(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN),
         "lm_head.weight": torch.zeros(VOCAB, HIDDEN)}
    for a, b in zip(chain, [*chain[1:], chain[0]], strict=True):
        t["lm_head.weight"][b, a] = 1
    shapes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN),
              "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (4, HIDDEN), "mlp.up_proj": (4, HIDDEN),
              "mlp.down_proj": (HIDDEN, 4), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    t |= {f"model.layers.0.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    save_file({k: v.to(kind).contiguous() for k, v in t.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    made = {"config.json": CONFIG | {"dtype": dtype}, "generation_config.json": {"eos_token_id": [END]},
            **({"tokenizer.json": tokenizer(bos)} if words else {}), **(files or {})}
    for name, data in made.items():
        (folder / name).write_text(json.dumps(data), encoding="utf-8")
    return folder


def chain(text: str | bytes, *, then: Sequence[int] = (END,)) -> list[int]:
    """The bytes of `text`, each of them once, and then `then`."""
    return [*(text.encode() if isinstance(text, str) else text), *then]
