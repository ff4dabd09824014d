"""How far a long job is, on standard error of a terminal; nowhere else."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType

from llamactl.cli.options import Output

_FIRST, _EVERY = 0.5, 0.2  # seconds


def _on(out: Output) -> bool:
    off = out.format == "json" or out.quiet or "CI" in os.environ or "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ
    return not off and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class Words:
    """One line that is written over, in words: what is being done and for how long. Appears after half a second."""

    def __init__(self, out: Output) -> None:
        self.on, self.start, self.said, self.shown = _on(out), time.monotonic(), 0.0, False

    def __enter__(self) -> Words:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self.shown = False

    def __call__(self, what: str) -> None:
        now = time.monotonic()
        if not self.on or now - self.start < _FIRST or now - self.said < _EVERY:
            return
        self.said, self.shown = now, True
        sys.stderr.write(f"\r\x1b[K{what}, {now - self.start:.0f} s")
        sys.stderr.flush()


class Progress:
    """One line that is written over: bytes done and to do, rate, time left. Appears after half a second."""

    def __init__(self, out: Output, what: str, total: int) -> None:
        self.on = _on(out)
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
