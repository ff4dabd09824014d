"""One stored tensor before it is read, whatever file holds it."""

from __future__ import annotations

import math
from dataclasses import dataclass

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # plain types: bytes of an element


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """dtype: as safetensors (BF16) or GGML (Q4_K) write it. shape: row-major, the whole tensor's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)
