"""Small checkpoints with values in them, written and read by the formats' own rules: no llamactl, no torch."""

from __future__ import annotations

import json
import math
import os
import random
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
LETTERS = {"F64": "d", "F32": "f", "F16": "e"}  # struct's
WORDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 112, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 101, "n_positions": 64, "n_embd": 32,
    "n_layer": 2, "n_head": 4, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
}


class Tensor(NamedTuple):
    """One stored tensor: its type, its shape, its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def floats(self) -> list[float]:
        return unpack(self.dtype, self.data)

    @property
    def rows(self) -> list[bytes]:
        size = len(self.data) // self.shape[0]
        return [self.data[n : n + size] for n in range(0, len(self.data), size)]


def pack(dtype: str, values: Sequence[float]) -> bytes:
    """Values as bytes; bf16 by cutting fp32 short, so give it values that it has."""
    if dtype == "BF16":
        raw = struct.pack(f"<{len(values)}f", *values)
        return b"".join(raw[n + 2 : n + 4] for n in range(0, len(raw), 4))
    return struct.pack(f"<{len(values)}{LETTERS[dtype]}", *values)


def unpack(dtype: str, data: bytes) -> list[float]:
    """Bytes as values, exactly."""
    count = len(data) // SIZES[dtype]
    if dtype == "BF16":
        data, dtype = b"".join(b"\0\0" + data[n : n + 2] for n in range(0, len(data), 2)), "F32"
    return list(struct.unpack(f"<{count}{LETTERS[dtype]}", data))


def noise(dtype: str, shape: Sequence[int], seed: object) -> Tensor:
    """Weights of a usual size; around one for a norm's vector. The same seed gives the same bytes."""
    draw = random.Random(str(seed))
    around = 1.0 if len(shape) == 1 and re.search(r"(norm|ln_\w)\.weight|^norm$", str(seed)) else 0.0
    values = [around + draw.gauss(0, 0.05) for _ in range(math.prod(shape))]
    return Tensor(dtype, tuple(shape), pack(dtype, values))


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama checkpoint; without the head where it is tied."""
    h, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim = config.get("head_dim") or h // config["num_attention_heads"]
    q, kv = dim * config["num_attention_heads"], dim * config["num_key_value_heads"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, h)}
    for i in range(config["num_hidden_layers"]):
        block = {"self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
                 "self_attn.o_proj": (h, q), "mlp.gate_proj": (f, h), "mlp.up_proj": (f, h), "mlp.down_proj": (h, f),
                 "input_layernorm": (h,), "post_attention_layernorm": (h,)}
        out |= {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}
    out["model.norm.weight"] = (h,)
    return out if config["tie_word_embeddings"] else out | {"lm_head.weight": (v, h)}


def gpt2_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The same of GPT-2, whose matrices are (in, out)."""
    h = config["n_embd"]
    out: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (config["vocab_size"], h),
                                       "transformer.wpe.weight": (config["n_positions"], h)}
    for i in range(config["n_layer"]):
        block = {"attn.c_attn": (h, 3 * h), "attn.c_proj": (h, h), "mlp.c_fc": (h, 4 * h), "mlp.c_proj": (4 * h, h),
                 "ln_1": (h,), "ln_2": (h,)}
        for name, shape in block.items():
            out[f"transformer.h.{i}.{name}.weight"] = shape
            out[f"transformer.h.{i}.{name}.bias"] = shape[-1:]
    return out | {"transformer.ln_f.weight": (h,), "transformer.ln_f.bias": (h,)}


def llama(folder: Path, dtype: str = "BF16", *, change: Mapping[str, Tensor | None] | None = None,
          **config: Any) -> dict[str, Tensor]:
    """Write a Llama folder; its tensors. change: other tensors by name, None to leave one out. config: other words."""
    words = {**LLAMA, "torch_dtype": WORDS[dtype], **config}
    return _folder(folder, words, {n: noise(dtype, s, n) for n, s in llama_shapes(words).items()}, change)


def gpt2(folder: Path, dtype: str = "F32", *, change: Mapping[str, Tensor | None] | None = None,
         **config: Any) -> dict[str, Tensor]:
    """The same for GPT-2."""
    words = {**GPT2, "torch_dtype": WORDS[dtype], **config}
    return _folder(folder, words, {n: noise(dtype, s, n) for n, s in gpt2_shapes(words).items()}, change)


def _folder(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor],
            change: Mapping[str, Tensor | None] | None) -> dict[str, Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    out = {n: t for n, t in {**tensors, **(change or {})}.items() if t is not None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write(folder / "model.safetensors", out)
    return out


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, t in tensors.items():
        header[name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [end, end + len(t.data)]}
        end += len(t.data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t.data for t in tensors.values()))


def header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file."""
    with path.open("rb") as f:
        found: dict[str, Any] = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    return found


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of all of a folder, in the order of the bytes; none may be left over."""
    if path.is_dir():
        parts = [read(f) for f in sorted(path.glob("*.safetensors"))]
        out = {n: t for part in parts for n, t in part.items()}
        assert len(out) == sum(map(len, parts)), "a tensor stands in two files"
        return out
    raw, found = path.read_bytes(), header(path)
    assert found.pop("__metadata__") == {"format": "pt"}
    start = at = 8 + int.from_bytes(raw[:8], "little")
    out = {}
    for name, e in sorted(found.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = (start + n for n in e["data_offsets"])
        assert (first, last - first) == (at, math.prod(e["shape"]) * SIZES[e["dtype"]])
        out[name] = Tensor(e["dtype"], tuple(e["shape"]), raw[first:last])
        at = last
    assert at == len(raw)
    return out


def tree(folder: Path) -> dict[str, bytes] | None:
    """Every file below a folder with its bytes, hidden ones too; None where there is nothing."""
    if not os.path.lexists(folder):
        return None
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
