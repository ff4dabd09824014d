"""Bits per element of every dtype llamactl costs, exact also for block formats (q4_0: 18 bytes per 32 elements)."""

from __future__ import annotations

from typing import NamedTuple


class DType(NamedTuple):
    """`block` elements take `block_bytes` bytes; plain dtypes are blocks of one (or of two, for 4 bits)."""

    name: str
    block: int
    block_bytes: int

    @property
    def bits(self) -> float:
        """Bits per element, scales included."""
        return 8 * self.block_bytes / self.block

    def bytes(self, elements: int) -> int:
        """Bytes of `elements` in whole blocks; exact where elements is a multiple of the block."""
        return -(-elements // self.block) * self.block_bytes


# ggml block formats (ggml-common.h): an fp16 scale (and minimum) beside 32 quantised elements.
DTYPES = {
    d.name: d
    for d in (
        DType("fp64", 1, 8), DType("fp32", 1, 4), DType("bf16", 1, 2), DType("fp16", 1, 2), DType("fp8", 1, 1),
        DType("int8", 1, 1), DType("int4", 2, 1), DType("fp4", 2, 1), DType("q8_0", 32, 34), DType("q5_1", 32, 24),
        DType("q5_0", 32, 22), DType("q4_1", 32, 20), DType("q4_0", 32, 18),
    )
}

ALIASES = {
    "float64": "fp64", "double": "fp64", "float32": "fp32", "float": "fp32", "f32": "fp32", "bfloat16": "bf16",
    "float16": "fp16", "half": "fp16", "f16": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
    "float8_e4m3fnuz": "fp8", "float8_e5m2fnuz": "fp8", "float8": "fp8", "f8": "fp8", "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8", "i8": "int8", "uint8": "int8", "i4": "int4", "nf4": "fp4",
}

TORCH_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def find_dtype(word: str) -> DType | None:
    """The dtype that `word` means (`bfloat16`, `torch.bfloat16`, `bf16`, `BF16`), None if unknown."""
    word = word.lower().removeprefix("torch.")
    return DTYPES.get(ALIASES.get(word, word))
