"""Write a big LLaMA-shaped Hugging Face checkpoint in a second or two, without torch: something to copy and to time.

    python tests/bench/bigllama.py FOLDER [--gb 1.7] [--shards 4] [--dtype bf16]

Grouped heads (32 queries, 8 keys), an untied head, shards of equal size with an index. The values are noise of a
weight's size (|x| < 1/4; norms in [1, 2)), finite and in fp16's range; the same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HEADS, KV_HEADS = 32, 8
BLOCK = 64 << 20
STRIDE = 10_007 * 64  # bytes: where the next tensor starts in the block; no two neighbours hold the same


class Kind(NamedTuple):
    """A dtype: bytes an element, its words here, and the top bytes of a weight (without sign) and of a norm."""

    size: int
    stored: str
    config: str
    weight: bytes
    norm: int


# The top byte holds the sign and 7 bits of the exponent (fp16: 5, and 2 of the fraction), the next one the rest of it.
KINDS = {
    "bf16": Kind(2, "BF16", "bfloat16", b"\x3b\x3c\x3c\x3d", 0x3F),
    "fp16": Kind(2, "F16", "float16", bytes(range(0x18, 0x2C)), 0x3C),
    "fp32": Kind(4, "F32", "float32", b"\x3b\x3c\x3c\x3d", 0x3F),
}


def write(folder: str | os.PathLike[str], *, gb: float = 1.7, shards: int = 4, dtype: str = "bf16") -> int:
    """Write the checkpoint into `folder`, made where it is missing; the bytes of its tensors, about `gb` 10^9.

    shards: how many files; 1 gives a model.safetensors without an index. Raises ValueError for what cannot be.
    """
    kind = KINDS[dtype]
    config = _config(int(gb * 1e9) // kind.size, kind)
    tensors = list(_tensors(config))
    total = sum(_count(shape) for _, shape in tensors) * kind.size
    parts: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(shards)]
    at = 0
    for name, shape in tensors:
        parts[at * shards // total].append((name, shape))
        at += _count(shape) * kind.size
    if not all(parts):
        raise ValueError(f"{len(tensors)} tensors do not fill {shards} shards")
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    blocks = _blocks(kind)
    files: dict[str, str] = {}
    for n, part in enumerate(parts, 1):
        file = "model.safetensors" if shards == 1 else f"model-{n:05d}-of-{shards:05d}.safetensors"
        _shard(out / file, part, kind, *blocks)
        files |= dict.fromkeys((name for name, _ in part), file)
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return total


def _config(elements: int, kind: Kind) -> dict[str, object]:
    """The widest model of about `elements` weights that still has 8 layers, or the narrowest."""
    for head_dim in (128, 64, 32, 16, 8):
        hidden = HEADS * head_dim
        vocab = min(32_000, 16 * hidden)
        layers = round((elements - 2 * vocab * hidden) / _count_layer(hidden))
        if layers >= 8:
            break
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
            "intermediate_size": 4 * hidden, "num_hidden_layers": max(layers, 1), "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": head_dim, "vocab_size": vocab, "hidden_act": "silu",
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": None,
            "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "bos_token_id": 1,
            "eos_token_id": 2, "dtype": kind.config}


def _count_layer(hidden: int) -> int:
    """Weights of a layer: q, o; k, v of a quarter of the heads; three matrices of 4 times the width; two norms."""
    return 2 * hidden * hidden + 2 * hidden * hidden * KV_HEADS // HEADS + 12 * hidden * hidden + 2 * hidden


def _tensors(config: dict[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, vocab, layers = (int(str(config[k])) for k in (
        "hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"))
    kv = hidden * KV_HEADS // HEADS
    yield "model.embed_tokens.weight", (vocab, hidden)
    for n in range(layers):
        for name, shape in {
            "input_layernorm": (hidden,), "mlp.down_proj": (hidden, inner), "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden), "post_attention_layernorm": (hidden,), "self_attn.k_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden), "self_attn.q_proj": (hidden, hidden),
            "self_attn.v_proj": (kv, hidden),
        }.items():
            yield f"model.layers.{n}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _blocks(kind: Kind) -> tuple[memoryview, memoryview]:
    """Noise for weights, BLOCK bytes, and for norms, less of it: random bytes whose top bytes are set by a table."""
    raw = bytearray(random.Random(kind.stored).randbytes(BLOCK))
    top = slice(kind.size - 1, None, kind.size)
    size = 1 << 18
    norms = raw[:size]
    norms[top] = bytes([kind.norm]) * (size // kind.size)
    if kind.stored != "F16":  # the exponent's lowest bit stands in the next byte
        under = slice(kind.size - 2, None, kind.size)
        norms[under] = norms[under].translate(bytes(b | 0x80 for b in range(256)))
    raw[top] = raw[top].translate(bytes(b & 0x80 | kind.weight[b % len(kind.weight)] for b in range(256)))
    return memoryview(raw), memoryview(norms)


def _shard(path: Path, tensors: list[tuple[str, tuple[int, ...]]], kind: Kind, weights: memoryview,
           norms: memoryview) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors:
        end = at + _count(shape) * kind.size
        header[name] = {"dtype": kind.stored, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for n, (_, shape) in enumerate(tensors):
            block = norms if len(shape) == 1 else weights
            left, begin = _count(shape) * kind.size, n * STRIDE % len(block)
            while left:
                left -= f.write(block[begin : begin + left])
                begin = 0


def _count(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 1 else shape[0] * shape[1]


def main(args: list[str]) -> int:
    """Write what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--gb", type=float, default=1.7)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--dtype", choices=list(KINDS), default="bf16")
    given = parser.parse_args(args)
    total = write(given.folder, gb=given.gb, shards=given.shards, dtype=given.dtype)
    print(f"{given.folder}: {total:,} bytes of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
