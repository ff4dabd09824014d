"""Numbers as people read them: always the exact integer, GB (10^9) and GiB (2^30) never mixed."""

from __future__ import annotations

from llamactl.render.document import Cell

_DECIMAL = (("EB", 10**18), ("PB", 10**15), ("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
_BINARY = (("EiB", 2**60), ("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def count(n: int) -> str:
    """8030261248 -> 8,030,261,248."""
    return f"{n:,}"


def scaled(n: int) -> str:
    """17179869184 -> 17.18 GB, 16.00 GiB; empty below a kilobyte, where the integer says it all."""
    words = [f"{n / size:.2f} {unit}" for units in (_DECIMAL, _BINARY)
             for unit, size in [next(((u, s) for u, s in units if n >= s), ("", 0))] if size]
    return ", ".join(words)


def size(n: int) -> str:
    """17179869184 -> 17,179,869,184 B (17.18 GB, 16.00 GiB)."""
    short = scaled(n)
    return f"{n:,} B ({short})" if short else f"{n:,} B"


def share(x: float) -> str:
    """0.8077 -> 80.8%."""
    return f"{100 * x:.1f}%"


def ratio(x: float) -> str:
    """4.0 -> 4x, 71.1 -> 71.1x."""
    return f"{x:.4g}x"


def cell(value: Cell, kind: str) -> str:
    """One cell as text."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if kind == "share":
        return share(float(value))
    if kind == "ratio":
        return ratio(float(value))
    if kind == "bytes" and isinstance(value, int):
        return size(value)
    return count(value) if isinstance(value, int) else f"{value:g}"


def layer_ranges(where: tuple[tuple[int, int], ...], whole: bool = False) -> str:
    """((0, 2), (5, 5)) -> 0-2, 5; unless `whole`, a long and even pattern -> two runs and the last: 0, 2, ..., 40."""
    words = [f"{a}" if a == b else f"{a}-{b}" for a, b in where]
    return ", ".join([*words[:2], "...", words[-1]] if not whole and len(where) > 6 and _even(where)
                     else words)


def _even(where: tuple[tuple[int, int], ...]) -> bool:
    """Whether the first two runs and the last say all the others; the last may be cut short by the model's end."""
    step, length = where[1][0] - where[0][0], where[0][1] - where[0][0]
    starts = all(a == where[0][0] + n * step for n, (a, _) in enumerate(where))
    return starts and all(b - a == length for a, b in where[:-1]) and where[-1][1] - where[-1][0] <= length
