"""The digest of a tensor's bytes: XXH3 with 128 bits, which hashes about as fast as memory is read.

It finds damage and mistakes, not malice: whoever can change the tensor can change the manifest that holds its digest.
Source: github.com/Cyan4973/xxHash, XXH3 as frozen since 0.8.0; the hex digits are its canonical, big-endian form.
"""

from __future__ import annotations

from typing import TypeAlias

import xxhash

ALGORITHM = "xxh3_128"  # the word for it in the manifest

Buffer: TypeAlias = bytes | bytearray | memoryview


class Digest:
    """The digest of bytes that come block by block; how they are cut does not matter."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, block: Buffer) -> None:
        """Take in a contiguous block."""
        self._state.update(block)

    def hexdigest(self) -> str:
        """32 hex digits for all bytes so far; more may follow."""
        return self._state.hexdigest()


def digest(block: Buffer) -> str:
    """The digest of one whole buffer."""
    return xxhash.xxh3_128_hexdigest(block)
