"""From positions to rectangles to bytes: every golden between every pair of its layouts, and each step by itself."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llamactl import arch
from llamactl.checkpoint.moves import NOTHING, Rect, among, bands, cut, joined, rectangles
from llamactl.errors import InputRefused
from llamactl.spec.model import Model
from llamactl.spec.naming import Stored, read, read_expert, stored_tensors
from llamactl.spec.windows import Window, grid, matrix, windows

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NAMES = sorted(p.parent.name for p in GOLDEN.glob("*/config.json"))
LAYOUTS = ("hf", "gguf", "meta", "lesson", "nanogpt")


def tables(model: Model) -> Iterator[tuple[str, list[Stored]]]:
    """(layout, its tensors) of every layout that holds all of this model."""
    for layout in LAYOUTS:
        with suppress(InputRefused, *([KeyError] if layout == "gguf" else [])):  # llama.cpp has no names for some
            yield layout, list(stored_tensors(model, arch.names(model, layout)))


def content(stored: Stored, array: Tensor, model: Model) -> dict[str, Tensor]:
    """The canonical tensors in a stored one, as naming reads values."""
    if not stored.rule.stacked:
        found: dict[str, Tensor] = read(stored, array, model)
        return found
    out: dict[str, Tensor] = {}
    for n, e in enumerate(sorted({t.e for t in stored.of})):
        out |= read_expert(stored, e, array[n], model)
    return out


def moved(rects: Sequence[Rect], sources: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
    """Rectangles at work on matrices: what stays NaN was not filled."""
    out = torch.full(size, float("nan"), dtype=torch.float64)
    for r in rects:
        to = out[r.row : r.row + r.rows, r.col : r.col + r.cols]
        if r.source == NOTHING:
            to[:] = 0
            continue
        m = sources[r.source].t() if r.turned else sources[r.source]
        to[:] = m[r.from_row : r.from_row + r.rows, r.from_col : r.from_col + r.cols] + r.add
    return out


@pytest.mark.parametrize("name", NAMES)
def test_every_golden_between_all_its_layouts(name: str) -> None:
    """What the rectangles put together is read as the same tensors; the same layout twice is one rectangle a tensor."""
    model = arch.describe(json.loads((GOLDEN / name / "config.json").read_text()), name)
    random_values = torch.Generator().manual_seed(0)
    for (one, held), (other, wanted) in product(list(tables(model)), repeat=2):
        data = [torch.randn(s.shape, generator=random_values, dtype=torch.float64) for s in held]
        truth = {k: v for s, t in zip(held, data, strict=True) for k, v in content(s, t, model).items()}
        at = {k: (n, w) for n, s in enumerate(held) for k, w in windows(s, model).items()}
        matrices = [t.reshape(grid(s)) for s, t in zip(held, data, strict=True)]
        for s in wanted:
            shapes = {t.name: matrix(t.shape) for t in s.of}
            rects = joined(r for k, w in windows(s, model).items()
                           for r in rectangles(*at[k], w, range(shapes[k][0]), range(shapes[k][0])))
            bands(rects, *grid(s))
            if one == other:
                assert rects == (Rect(0, 0, *grid(s), next(n for n, h in enumerate(held) if h.name == s.name)),), s.name
            got = content(s, moved(rects, matrices, grid(s)).reshape(s.shape), model)
            assert got.keys() == {t.name for t in s.of}
            for k, v in got.items():
                assert torch.allclose(v, truth[k].reshape(v.shape), rtol=0, atol=1e-12), (one, other, k)


def test_what_the_goldens_cover() -> None:
    """Turned, shifted, reordered, cut and stacked: every kind of move is among them."""
    pairs, kinds = 0, set()
    for name in ("gpt2", "gemma", "llama", "mixtral", "gpt_oss", "falcon-new"):
        model = arch.describe(json.loads((GOLDEN / name / "config.json").read_text()), name)
        found = dict(tables(model))
        pairs += len(found) ** 2
        for held in found.values():
            for s in held:
                kinds |= {type(op).__name__ for op in s.rule.ops} | ({"stacked"} if s.rule.stacked else set())
    assert pairs > 40
    assert kinds == {"Fused", "Transposed", "RopePairs", "Offset", "stacked"}


# --- rectangles of two windows


def one(rects: Any) -> Any:
    (r,) = rects
    return r


def test_equal_windows_are_one_rectangle() -> None:
    w = Window(range(4), range(6))
    assert one(rectangles(3, w, w, range(4), range(4))) == Rect(0, 0, 4, 6, 3)


def test_a_turned_window_is_read_through_the_transpose() -> None:
    """A canonical 4 x 6, stored as 6 x 4 and as rows 10 to 13 of something wider."""
    held, wanted = Window(range(6), range(4), turned=True), Window(range(10, 14), range(6))
    assert one(rectangles(0, held, wanted, range(4), range(4))) == Rect(10, 0, 4, 6, 0, 0, 0, True)
    assert one(rectangles(0, wanted, held, range(4), range(4))) == Rect(0, 0, 6, 4, 0, 0, 10, True)
    assert one(rectangles(0, held, held, range(4), range(4))) == Rect(0, 0, 6, 4, 0)


def test_what_is_added_is_the_difference() -> None:
    held, wanted = Window(range(3), range(1), add=1.0), Window(range(3), range(1), add=0.25)
    assert one(rectangles(0, held, wanted, range(3), range(3))).add == -0.75


def test_rows_in_another_order_are_as_many_rectangles_as_runs() -> None:
    held, wanted = Window(range(6), range(2)), Window([3, 4, 5, 0, 1, 2], range(2))
    got = list(rectangles(0, held, wanted, range(6), range(6)))
    assert got == [Rect(0, 0, 3, 2, 0, 3), Rect(3, 0, 3, 2, 0, 0)]
    assert joined(got) == tuple(got)
    columns = list(rectangles(0, Window(range(2), range(4)), Window(range(2), [2, 3, 0, 1]), range(2), range(2)))
    assert sorted(columns) == [Rect(0, 0, 2, 2, 0, 0, 2), Rect(0, 2, 2, 2, 0, 0, 0)]


def test_rows_chosen_and_placed() -> None:
    """Row rows[n] of the source becomes row to[n]; rows that nobody names are not there."""
    w = Window(range(8), range(3))
    got = joined(rectangles(0, w, w, [4, 5, 4, 5], range(4)))
    assert got == (Rect(0, 0, 2, 3, 0, 4), Rect(2, 0, 2, 3, 0, 4))
    assert joined(rectangles(0, w, w, range(2), [6, 7])) == (Rect(6, 0, 2, 3, 0, 0),)
    assert list(rectangles(0, w, w, range(0), range(0))) == []


# --- joined


@pytest.mark.parametrize(("rects", "want"), [
    ([Rect(0, 0, 2, 4, 0), Rect(2, 0, 3, 4, 0, 2)], [Rect(0, 0, 5, 4, 0)]),
    ([Rect(2, 0, 3, 4, 0, 2), Rect(0, 0, 2, 4, 0)], [Rect(0, 0, 5, 4, 0)]),
    ([Rect(0, 0, 2, 4, 0), Rect(0, 4, 2, 1, 0, 0, 4)], [Rect(0, 0, 2, 5, 0)]),
    ([Rect(0, 0, 1, 1, 0), Rect(0, 1, 1, 1, 0, 0, 1), Rect(1, 0, 1, 1, 0, 1), Rect(1, 1, 1, 1, 0, 1, 1)],
     [Rect(0, 0, 2, 2, 0)]),
    ([Rect(0, 0, 2, 4, 0, turned=True), Rect(2, 0, 3, 4, 0, 2, turned=True)], [Rect(0, 0, 5, 4, 0, turned=True)]),
    ([Rect(0, 0, 2, 4, 0, add=1.0), Rect(2, 0, 1, 4, 0, 2, add=1.0)], [Rect(0, 0, 3, 4, 0, add=1.0)]),
    ([], [])])
def test_rectangles_that_touch_on_both_sides_are_one(rects: list[Rect], want: list[Rect]) -> None:
    assert joined(rects) == tuple(want)


@pytest.mark.parametrize("other", [
    Rect(2, 0, 3, 4, 1, 2), Rect(2, 0, 3, 4, 0, 3), Rect(3, 0, 3, 4, 0, 2), Rect(2, 0, 3, 4, 0, 2, 1),
    Rect(2, 0, 3, 3, 0, 2), Rect(2, 1, 3, 4, 0, 2), Rect(2, 0, 3, 4, 0, 2, 0, True),
    Rect(2, 0, 3, 4, 0, 2, 0, False, 1), Rect(0, 4, 2, 1, 1, 0, 4), Rect(0, 4, 2, 1, 0, 0, 5),
    Rect(0, 4, 2, 1, 0, 1, 4), Rect(0, 4, 1, 1, 0, 0, 4), Rect(0, 5, 2, 1, 0, 0, 4), Rect(0, 4, 2, 1, 0, 0, 4, True),
    Rect(0, 4, 2, 1, 0, 0, 4, False, 1), Rect(1, 4, 2, 1, 0, 0, 4)])
def test_others_stay_apart(other: Rect) -> None:
    """Another source, a gap on either side, another width, turned or shifted alone."""
    first = Rect(0, 0, 2, 4, 0)
    assert joined([other, first]) == tuple(sorted([first, other]))


# --- bands


def test_bands_are_columns_filled_from_top_to_bottom() -> None:
    rects = [Rect(2, 0, 1, 4, 0), Rect(0, 0, 2, 3, 1), Rect(0, 3, 2, 1, 2, 5, 7)]
    assert bands(rects, 3, 4) == (
        (0, 3, (Rect(0, 0, 2, 3, 1), Rect(2, 0, 1, 3, 0))),
        (3, 1, (Rect(0, 3, 2, 1, 2, 5, 7), Rect(2, 3, 1, 1, 0, 0, 3))))
    assert bands([Rect(0, 0, 3, 4, 0)], 3, 4) == ((0, 4, (Rect(0, 0, 3, 4, 0),)),)


@pytest.mark.parametrize(("rects", "says"), [
    ([Rect(0, 0, 2, 4, 0), Rect(1, 0, 2, 4, 1)], "columns 0..3: row 1 is filled twice"),
    ([Rect(0, 0, 3, 4, 0), Rect(0, 2, 3, 2, 1)], "columns 2..3: row 0 is filled twice"),
    ([Rect(0, 0, 3, 4, 0), Rect(0, 0, 3, 4, 0)], "columns 0..3: row 0 is filled twice"),
    ([Rect(0, 0, 1, 4, 0), Rect(2, 0, 1, 4, 0, 2)], "columns 0..3: row 1 is not filled"),
    ([Rect(1, 0, 2, 4, 0)], "columns 0..3: row 0 is not filled"),
    ([Rect(0, 0, 2, 4, 0)], "columns 0..3: 2 of 3 rows are filled"),
    ([Rect(0, 0, 4, 4, 0)], "columns 0..3: 4 of 3 rows are filled"),
    ([Rect(0, 0, 3, 3, 0)], "columns 3..3: 0 of 3 rows are filled"),
    ([Rect(0, 1, 3, 3, 0)], "columns 0..0: 0 of 3 rows are filled"),
    ([], "columns 0..3: 0 of 3 rows are filled")])
def test_what_is_not_filled_exactly_once_is_an_error(rects: list[Rect], says: str) -> None:
    with pytest.raises(ValueError, match=rf"^{says}$"):
        bands(rects, 3, 4)


@pytest.mark.parametrize("size", [(0, 4), (3, 0), (0, 0)])
def test_nothing_has_no_bands(size: tuple[int, int]) -> None:
    assert bands([], *size) == ()


# --- cut and among


def tiles(generator: random.Random, height: int, width: int, sizes: Sequence[tuple[int, int]]) -> list[Rect]:
    """Random rectangles that fill height x width once, from anywhere in random sources."""
    ups = [0, *sorted(generator.sample(range(1, height), 2)), height]
    out = []
    for top, bottom in pairwise(ups):
        lefts = [0, *sorted(generator.sample(range(1, width), 2)), width]
        for left, right in pairwise(lefts):
            n, turned = generator.randrange(len(sizes)), generator.random() < 0.5
            deep, broad = sizes[n][::-1] if turned else sizes[n]
            tall, wide = bottom - top, right - left
            if generator.random() < 0.1:
                out.append(Rect(top, left, tall, wide, NOTHING))
            else:
                at = generator.randint(0, deep - tall), generator.randint(0, broad - wide)
                out.append(Rect(top, left, tall, wide, n, *at, turned))
    return out


@pytest.mark.parametrize("seed", range(20))
def test_a_part_of_an_output(seed: int) -> None:
    generator = random.Random(seed)
    sources = [torch.rand(9, 8, dtype=torch.float64), torch.rand(10, 12, dtype=torch.float64)]
    rects = tiles(generator, 7, 6, [(9, 8), (10, 12)])
    whole = moved(rects, sources, (7, 6))
    row, col = generator.randint(0, 4), generator.randint(0, 3)
    tall, wide = generator.randint(1, 7 - row), generator.randint(1, 6 - col)
    part = list(cut(rects, row, col, tall, wide))
    bands(part, tall, wide)
    assert torch.equal(moved(part, sources, (tall, wide)), whole[row : row + tall, col : col + wide])
    assert list(cut(rects, 7, 0, 3, 6)) == []


@pytest.mark.parametrize("seed", range(20))
def test_sources_in_parts(seed: int) -> None:
    """One source cut by columns, one by rows, one whole; each part is a source of its own."""
    generator = random.Random(seed)
    sizes = [(9, 8), (10, 12), (8, 9)]
    sources = [torch.rand(*s, dtype=torch.float64) for s in sizes]
    rects = tiles(generator, 7, 6, sizes)
    parts = [[(0, 0, 9, 3), (0, 3, 9, 5)], [(0, 0, 4, 12), (4, 0, 5, 12), (9, 0, 1, 12)], [(0, 0, 8, 9)]]
    first, pieces = [0, 2, 5], []
    for m, places in zip(sources, parts, strict=True):
        pieces += [m[a : a + tall, b : b + wide] for a, b, tall, wide in places]
    found = list(among(rects, parts, first))
    bands(found, 7, 6)
    assert torch.equal(moved(found, pieces, (7, 6)), moved(rects, sources, (7, 6)))
    assert all(r.source == NOTHING or r.source < 6 for r in found)
