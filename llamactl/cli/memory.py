"""Running out of memory, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llamactl.errors import LlamactlError, OutputError


@contextmanager
def enough(otherwise: str | LlamactlError, message: str = "out of memory") -> Iterator[None]:
    """Let memory that ran out inside, on any device, end as one line.

    otherwise: the error, or what to do about OutputError memory, whose words are `message`.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        from llamactl.net.device import is_out_of_memory

        if not is_out_of_memory(e):
            raise
        error = OutputError("memory", message, help=otherwise) if isinstance(otherwise, str) else otherwise
        raise error from e
