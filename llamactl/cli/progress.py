"""How far a long job is, on standard error of a terminal; nowhere else."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType

from llamactl.cli.options import Output

_FIRST, _EVERY = 0.5, 0.2  # seconds


class Progress:
    """One line that is written over: bytes done and to do, rate, time left. Appears after half a second."""

    def __init__(self, out: Output, what: str, total: int) -> None:
        off = out.format == "json" or out.quiet or "CI" in os.environ or "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ
        self.on = not off and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.what, self.total, self.done = what, total, 0
        self.start = self.said = time.monotonic()
        self.shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def begin(self, what: str, total: int) -> None:
        """The next part of the job."""
        self.what, self.total, self.done = what, total, 0
        self.start = time.monotonic()

    def __call__(self, nbytes: int) -> None:
        """Told after each block."""
        self.done += nbytes
        now = time.monotonic()
        if not self.on or now - self.start < _FIRST or now - self.said < _EVERY:
            return
        self.said, self.shown = now, True
        rate = self.done / (now - self.start)
        left = max(0, self.total - self.done) / rate if rate else 0
        sys.stderr.write(f"\r\x1b[K{self.what}: {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, "
                         f"{rate / 1e9:.2f} GB/s, {left:.0f} s left")
        sys.stderr.flush()
