"""Writing safetensors: the header from the plan, then each tensor as it comes; one file, or shards and their index."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import BinaryIO

from llamactl.checkpoint.emit import Emitter
from llamactl.checkpoint.plan import Output
from llamactl.checkpoint.safetensors import BITS

METADATA = {"format": "pt"}  # transformers refuses a file without it
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_ALIGNMENT = 8


def shards(outputs: Sequence[Output], limit: int | None) -> list[list[Output]]:
    """Outputs by file, none larger than `limit` bytes of tensors, unless it holds one tensor alone."""
    if limit is None:
        return [list(outputs)]
    files: list[list[Output]] = [[]]
    held = 0
    for o in outputs:
        if files[-1] and held + o.nbytes > limit:
            files.append([])
            held = 0
        files[-1].append(o)
        held += o.nbytes
    return files


def names(count: int) -> list[str]:
    """model.safetensors, or model-00001-of-00003.safetensors and so on."""
    return [SINGLE] if count == 1 else [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]


def in_order(outputs: Sequence[Output]) -> list[Output]:
    """The widest types first, so that every tensor begins at a multiple of its element's size."""
    return sorted(outputs, key=lambda o: -BITS[o.dtype])


def header(outputs: Sequence[Output]) -> bytes:
    """What stands before the data of `outputs`, which follow one another in this order."""
    at = 0
    entries: dict[str, object] = {"__metadata__": METADATA}
    for o in outputs:
        entries[o.name] = {"dtype": o.dtype, "shape": list(o.shape), "data_offsets": [at, at + o.nbytes]}
        at += o.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def file_bytes(outputs: Sequence[Output]) -> int:
    """The size of the file that write() makes."""
    return len(header(in_order(outputs))) + sum(o.nbytes for o in outputs)


def write(file: BinaryIO, outputs: Sequence[Output], emitter: Emitter, key: Callable[[Output], str]) -> None:
    """One safetensors file. key: what an output's digest is kept under."""
    ordered = in_order(outputs)
    file.write(header(ordered))
    for o in ordered:
        emitter.write(o, file, key(o))


def index(files: Sequence[Sequence[Output]]) -> bytes:
    """model.safetensors.index.json."""
    at = {o.name: name for name, outputs in zip(names(len(files)), files, strict=True) for o in outputs}
    total = sum(o.nbytes for outputs in files for o in outputs)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(at.items()))}, indent=2).encode()
