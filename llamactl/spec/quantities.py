"""Sizes and token counts as people write them; 10^n and 2^n are never mixed, and no float stands in between."""

from __future__ import annotations

import re
from typing import NamedTuple

_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_POWERS = {"": 0, "k": 10, "m": 20, "g": 30}


class Size(NamedTuple):
    """An exact fraction of bytes: 14.96GiB is not a whole number of them."""

    numerator: int
    denominator: int

    @property
    def floor(self) -> int:
        return self.numerator // self.denominator

    @property
    def ceil(self) -> int:
        return -(-self.numerator // self.denominator)


def size(text: str) -> Size | None:
    """16.1GB (10^9), 15GiB (2^30), 512 B; None where the unit is missing or could be either."""
    match = re.fullmatch(r"(\d{1,18})(?:\.(\d{1,12}))?\s*([kKMGT]?i?B)", text.strip(), re.ASCII)
    if not match or match[3] not in _UNITS:
        return None
    part = match[2] or ""
    return Size(int(match[1] + part) * _UNITS[match[3]], 10 ** len(part))


def tokens(text: str) -> int | None:
    """8192, 8,192, 128k (= 131,072: k is 2^10 tokens, m 2^20); None where it is no count. No range is checked."""
    match = re.fullmatch(r"(\d[\d_,]{0,25})([kmg]i?)?", text.strip(), re.I | re.ASCII)
    if not match:
        return None
    return int(match[1].replace(",", "").replace("_", "")) << _POWERS[(match[2] or "").lower().rstrip("i")]
