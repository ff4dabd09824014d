"""Pictures inside a page, written by hand: a curve and bars on a log scale, coloured by the page's theme."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from llamactl.render.theme import text
from llamactl.render.verdict import decades, finite, number

WIDTH, HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 22, 14, 38
_TICKS = 6  # labels on an axis, at most about so many


def curve(name: str, said: str, values: Sequence[float | None], *, across: str, numbers: Sequence[int],
          level: float | None = None) -> str:
    """`values` at `numbers` as a line, gaps and red ticks where they do not exist; zeros lie on the ground.

    name, said: the picture's name and what it shows, for those who cannot see it. level: a dashed line. across: the
    x axis.
    """
    scale = _Scale([*values, level])
    at = [(_across(i, len(values)), finite(x)) for i, x in enumerate(values)]
    runs: list[list[str]] = [[]]
    odd = []
    for x, y in at:
        if y is None:
            runs.append([])
            odd.append(f"<rect class=\"wrong\" x=\"{x - 1:.1f}\" y=\"{_TOP}\" width=\"2\" height=\"8\"/>")
        else:
            runs[-1].append(f"{x:.1f},{scale(y):.1f}")
    lines = [f"<polyline class=\"line\" points=\"{' '.join(run if len(run) > 1 else run * 2)}\"/>"
             for run in runs if run]
    ticks = [(at[n][0], numbers[n]) for n in sorted(_spread(len(values)))]
    return _svg(name, said, [*scale.grid(), *_level(scale, level), *lines, *odd], ticks, across)


def bars(name: str, said: str, values: Sequence[tuple[int, float | None]], *, across: str, level: float | None = None,
         wrong: Collection[int] = ()) -> str:
    """A bar for each (number, value), red for those in `wrong` and, as high as can be, where there is no value."""
    scale = _Scale([*(x for _, x in values), level])
    room = (WIDTH - _LEFT - _RIGHT) / max(1, len(values))
    drawn, ticks, ground = [], [], HEIGHT - _BOTTOM
    for n, (i, value) in enumerate(values):
        y, x = finite(value), _LEFT + n * room
        top = float(_TOP) if y is None else min(scale(y), ground - 1.5) if y > 0 else ground
        wide = min(room * 0.8, 48)
        kind = "wrong" if y is None or i in wrong else "bar"
        drawn.append(f"<rect class=\"{kind}\" x=\"{x + (room - wide) / 2:.1f}\" y=\"{top:.1f}\" width=\"{wide:.1f}\" "
                     f"height=\"{max(0.0, ground - top):.1f}\"><title>{text(f'{across} {i}: {number(value)}')}</title>"
                     "</rect>")
        if n in _spread(len(values)):
            ticks.append((x + room / 2, i))
    return _svg(name, said, [*scale.grid(), *drawn, *_level(scale, level)], ticks, across)


class _Scale:
    """Values -> heights on a log scale, whole powers of ten; what is below the lowest lies on the ground."""

    def __init__(self, values: Sequence[float | None]) -> None:
        self.low, self.high = decades(values)

    def __call__(self, value: float) -> float:
        ground = HEIGHT - _BOTTOM
        if value <= 0:
            return ground
        part = (math.log10(value) - self.low) / (self.high - self.low)
        return ground - min(1.0, max(0.0, part)) * (ground - _TOP)

    def grid(self) -> list[str]:
        out = []
        step = max(1, -(-(self.high - self.low) // _TICKS))
        for power in range(self.low, self.high + 1, step):
            y = self(10.0 ** power)
            out.append(f"<line class=\"axis\" x1=\"{_LEFT}\" y1=\"{y:.1f}\" x2=\"{WIDTH - _RIGHT}\" y2=\"{y:.1f}\"/>"
                       f"<text x=\"{_LEFT - 6}\" y=\"{y + 4:.1f}\" text-anchor=\"end\">1e{power}</text>")
        return out


def lines(name: str, said: str, curves: Sequence[tuple[str, Sequence[int], Sequence[float]]], *, across: str) -> str:
    """Curves (label, numbers, values) over one axis, heights on a linear scale; the second is dashed, for those who
    see no colours. name, said, across: as for `curve`.
    """
    known = [y for _, _, values in curves for y in values if finite(y) is not None]
    at = [x for _, numbers, _ in curves for x in numbers]
    levels = _round(min(known, default=0.0), max(known, default=1.0))
    low, high, first, last = levels[0], levels[-1], min(at, default=0), max(at, default=1)
    ground, wide = HEIGHT - _BOTTOM, WIDTH - _LEFT - _RIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        up = (y - low) / (high - low) if high > low else 0.5
        return _LEFT + wide * (x - first) / max(1, last - first), ground - up * (ground - _TOP)

    parts = []
    for level in levels:
        _, y = place(first, level)
        parts.append(f"<line class=\"axis\" x1=\"{_LEFT}\" y1=\"{y:.1f}\" x2=\"{WIDTH - _RIGHT}\" y2=\"{y:.1f}\"/>"
                     f"<text x=\"{_LEFT - 6}\" y=\"{y + 4:.1f}\" text-anchor=\"end\">{text(number(level))}</text>")
    for n, (label, numbers, values) in enumerate(curves):
        points = [place(x, y) for x, y in zip(numbers, values, strict=True) if finite(y) is not None]
        kind, top = "line" if n == 0 else "line other", _TOP + 12 + 16 * n
        parts.append(f"<polyline class=\"{kind}\" points=\"{' '.join(f'{x:.1f},{y:.1f}' for x, y in points)}\"/>"
                     f"<line class=\"{kind}\" x1=\"{WIDTH - 120}\" y1=\"{top - 4}\" x2=\"{WIDTH - 92}\" "
                     f"y2=\"{top - 4}\"/><text x=\"{WIDTH - 86}\" y=\"{top}\">{text(label)}</text>")
    marks = sorted({round(x) for x in _round(first, last) if x == round(x) and first <= x <= last} or {first})
    return _svg(name, said, parts, [(place(x, low)[0], x) for x in marks], across)


def _round(low: float, high: float) -> list[float]:
    """Round values from no more than `low` to no less than `high`, 1, 2 or 5 times a power of ten apart."""
    wide = (high - low) / (_TICKS - 1) or abs(low) or 1.0
    power = 10.0 ** math.floor(math.log10(wide))
    step = next(x * power for x in (1, 2, 5, 10) if x * power >= wide * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, max(last, first + 1) + 1)]


def _level(scale: _Scale, level: float | None) -> list[str]:
    if (known := finite(level)) is None or known <= 0:
        return []
    y = scale(known)
    return [f"<line class=\"limit\" x1=\"{_LEFT}\" y1=\"{y:.1f}\" x2=\"{WIDTH - _RIGHT}\" y2=\"{y:.1f}\"/>"
            f"<text class=\"limit-text\" x=\"{WIDTH - _RIGHT}\" y=\"{y - 4:.1f}\" text-anchor=\"end\">floor "
            f"{text(number(known))}</text>"]


def _across(i: int, n: int) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * (i / max(1, n - 1))


def _spread(n: int) -> set[int]:
    """Indices of 0..n-1 that get a label."""
    return {round(k * (n - 1) / (_TICKS - 1)) for k in range(_TICKS)} if n > _TICKS else set(range(n))


def _svg(name: str, said: str, parts: Sequence[str], ticks: Sequence[tuple[float, int]], across: str) -> str:
    """name is this picture's id on the page, too."""
    code = "".join(c if c.isalnum() else "-" for c in name.lower())
    below = [(x, HEIGHT - _BOTTOM + 16, f"{i:,}") for x, i in ticks]
    below.append(((WIDTH + _LEFT - _RIGHT) / 2, HEIGHT - 4, across))
    marks = [f"<text x=\"{x:.1f}\" y=\"{y}\" text-anchor=\"middle\">{text(label)}</text>" for x, y, label in below]
    body = "\n".join([*parts, *marks])
    return (f"<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-labelledby=\"{code}-name {code}-said\">\n"
            f"<title id=\"{code}-name\">{text(name)}</title>\n<desc id=\"{code}-said\">{text(said)}</desc>\n"
            f"{body}\n</svg>")
