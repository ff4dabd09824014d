"""bf16 as fp16 without torch: every value there is, against torch's own cast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from llamactl.checkpoint.moves import Rect, bands
from llamactl.checkpoint.plan import Output, Piece
from llamactl.errors import InputRefused
from llamactl.net.halves import Halves, halved

CODES = np.arange(1 << 16, dtype=np.uint16)
ABS = CODES & 0x7FFF
FITS, ODD = ABS <= 0x477F, ABS >= 0x7F80  # finite and within fp16; infinities and NaN


class Bytes:
    """A checkpoint of one tensor."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @contextmanager
    def view(self, key: str) -> Iterator[memoryview]:
        yield memoryview(self.data)


def planned(count: int, dtype: str = "F16", source: str = "BF16", **rect: Any) -> Output:
    """A column of `count` values, taken as it is."""
    term = bands([Rect(0, 0, count, 1, 0, **rect)], count, 1)
    return Output(name="w", dtype=dtype, shape=(count,), nbytes=2 * count, rows=count, cols=1, terms=(term,),
                  sources=(Piece("w", "w", source, count, 1),), how="values")


def cast(codes: Any) -> tuple[Any, Halves]:
    """The fp16 bits of bf16 bits."""
    halves: Any = Halves(Bytes(codes.tobytes()))  # type: ignore[arg-type]
    o = planned(len(codes))
    halves.check(o)
    return np.frombuffer(b"".join(map(bytes, halves.blocks(o))), np.uint16), halves


def by_torch(codes: Any) -> Any:
    return torch.from_numpy(codes.view(np.int16)).view(torch.bfloat16).half().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("which", [FITS, FITS | ODD, FITS & (ABS >= 0x3880)], ids=["finite", "all", "normal"])
def test_every_value_is_torchs(which: Any) -> None:
    codes = CODES[which]
    got, halves = cast(codes)
    number = (codes & 0x7FFF) <= 0x7F80
    assert np.array_equal(got[number], by_torch(codes)[number])
    assert np.isnan(got[~number].view(np.float16)).all()
    lost = int(((by_torch(codes) & 0x7FFF) == 0).sum()) - int(((codes & 0x7FFF) == 0).sum())
    assert halves.flushed == ({"w": lost} if lost else {})


def test_blocks_are_put_together_in_order() -> None:
    codes = np.random.default_rng(1).integers(0x3A00, 0x3F00, 1 << 19, dtype=np.uint16)
    got, _ = cast(codes)
    assert np.array_equal(got, by_torch(codes))


@pytest.mark.parametrize("code", [0x4780, 0xC780, 0x7F7F])
def test_what_does_not_fit_is_refused_by_name(code: int) -> None:
    with pytest.raises(InputRefused, match="w: .* beyond what F16 holds") as caught:
        cast(np.array([0x3F80, code, 0x7F80], np.uint16))
    assert caught.value.code == "convert-overflow"


def test_only_plain_bf16_rows_are_taken() -> None:
    assert halved(planned(4))
    assert not halved(planned(4, dtype="F32"))
    assert not halved(planned(4, source="F32"))
    assert not halved(planned(4, turned=True))
    assert not halved(planned(4, add=1.0))
