"""Long GGUF arrays read back: the same values, and nothing beyond what the file holds."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from llamactl.checkpoint.gguf import GgufArray, GgufHeader, read_header
from llamactl.checkpoint.ggufarrays import read_numbers, read_strings
from llamactl.errors import InputRefused

STRING = 8


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def header(tmp_path: Path, *pairs: tuple[str, int, int, bytes]) -> GgufHeader:
    """A file of arrays: (key, element type, count, values)."""
    body = b"".join(text(key) + struct.pack("<IIQ", 9, kind, count) + values for key, kind, count, values in pairs)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + body + bytes(-(24 + len(body)) % 32))
    return read_header(str(path))


@pytest.mark.parametrize("count", [3, 5_000, 200_000])
def test_values_come_back(tmp_path: Path, count: int) -> None:
    strings = [f"tok€n {n}" * (n % 3) for n in range(count)]
    numbers = [n - 7 for n in range(count)]
    found = header(tmp_path, ("s", STRING, count, b"".join(map(text, strings))),
                   ("i", 5, count, struct.pack(f"<{count}i", *numbers)),
                   ("f", 6, count, struct.pack(f"<{count}f", *numbers)))
    assert isinstance(found.metadata["s"], GgufArray) is (count >= 4096)
    assert read_strings(found, "s") == strings
    assert read_numbers(found, "i") == numbers
    assert read_numbers(found, "f", floats=True) == numbers
    assert read_strings(found, "none") is None
    assert read_numbers(found, "none") is None


@pytest.mark.parametrize("count", [3, 5_000])
def test_other_types_are_refused(tmp_path: Path, count: int) -> None:
    found = header(tmp_path, ("s", STRING, count, text("a") * count), ("f", 6, count, bytes(4 * count)),
                   ("b", 7, count, bytes(count)))
    for key in ("f", "b"):
        with pytest.raises(InputRefused, match="array of strings"):
            read_strings(found, key)
    for key in ("s", "f", "b"):
        with pytest.raises(InputRefused, match="array of integers"):
            read_numbers(found, key)


def test_nan_and_bad_text_are_refused(tmp_path: Path) -> None:
    found = header(tmp_path, ("f", 6, 5000, struct.pack("<f", float("nan")) * 5000),
                   ("s", STRING, 5000, text(b"\xff") * 5000))
    with pytest.raises(InputRefused, match="not finite"):
        read_numbers(found, "f", floats=True)
    with pytest.raises(InputRefused, match="value 0 of 's' is not UTF-8"):
        read_strings(found, "s")


def test_a_file_that_changed_since_is_refused(tmp_path: Path) -> None:
    found = header(tmp_path, ("s", STRING, 5000, text("abc") * 5000), ("i", 5, 5000, bytes(20_000)))
    data = Path(found.path).read_bytes()
    Path(found.path).write_bytes(data[:3000])
    with pytest.raises(InputRefused, match="the file ends inside"):
        read_strings(found, "s")
    with pytest.raises(InputRefused, match="the file ends"):
        read_numbers(found, "i")
    array = found.metadata["s"]
    assert isinstance(array, GgufArray)
    broken = bytearray(data)
    broken[array.begin : array.begin + 8] = struct.pack("<Q", 1 << 40)
    Path(found.path).write_bytes(bytes(broken))
    with pytest.raises(InputRefused, match=r"claims 1,099,511,627,776 bytes"):
        read_strings(found, "s")
    many = replace(found, metadata={"i": GgufArray(element_type="INT32", length=1 << 40, begin=24)})
    with pytest.raises(InputRefused, match="at most 100,000,000"):
        read_numbers(many, "i")
