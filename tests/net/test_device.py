"""What a device is asked: its free memory in a container too, its dtypes, its bandwidth."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from llamactl.net import device
from llamactl.net.device import bandwidth, choose_dtype, free_memory, is_out_of_memory, peak_memory

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def group(folder: Path, limit: str, used: int, active: int, inactive: int) -> str:
    """The files of a control group."""
    for name, text in (("max", limit), ("current", str(used)),
                       ("stat", f"anon 5\nactive_file {active}\ninactive_file {inactive}\nslab 3")):
        (folder / f"memory.{name}").write_text(text + "\n")
    return str(folder)


def test_a_container_may_take_its_limit_less_what_it_holds_beside_the_file_cache(tmp_path: Path) -> None:
    assert device._left_to_group(group(tmp_path, "1000", 900, 100, 50)) == 250
    assert device._left_to_group(group(tmp_path, "1000", 1200, 0, 0)) == 0
    assert device._left_to_group(group(tmp_path, "max", 900, 100, 50)) is None
    assert device._left_to_group(str(tmp_path / "none")) is None


def test_a_group_with_less_than_the_machine_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_left_to_group", lambda: None)
    whole = free_memory(CPU)
    if whole is None:
        pytest.skip("no /proc/meminfo here")
    assert 0 < whole < 1 << 50
    monkeypatch.setattr(device, "_left_to_group", lambda: 12_345)
    assert free_memory(CPU) == 12_345
    monkeypatch.setattr(device, "_left_to_group", lambda: 1 << 60)
    assert free_memory(CPU) < 1 << 60  # type: ignore[operator]


@pytest.mark.parametrize(("word", "stored", "on_cpu", "on_gpu"), [
    ("auto", "fp32", torch.float32, torch.float32), ("auto", "bf16", torch.bfloat16, torch.bfloat16),
    ("auto", "fp16", torch.float32, torch.float16), ("auto", "q4_0", torch.float32, torch.bfloat16),
    ("auto", None, torch.float32, torch.bfloat16), ("fp16", "bf16", torch.float16, torch.float16),
    ("fp32", "bf16", torch.float32, torch.float32),
])
def test_dtypes(word: str, stored: str | None, on_cpu: torch.dtype, on_gpu: torch.dtype,
                monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_dtype(word, stored, CPU) == on_cpu
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *s, dtype, device: ones(*s, dtype=dtype))  # a GPU that does all
    assert choose_dtype(word, stored, CUDA) == on_gpu


def test_bandwidth_is_a_number_of_bytes_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_memory", lambda _: 1 << 40)
    found = bandwidth(CPU, 0.0)
    assert found is not None
    assert found > 1e8
    monkeypatch.setattr(device, "free_memory", lambda _: 1 << 29)
    assert bandwidth(CPU) is None


def test_the_peak_holds_what_was_taken() -> None:
    size = 1 << 28
    torch.ones(size // 4)
    peak = peak_memory(CPU)
    assert peak is None or peak > size


def test_words_for_no_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(RuntimeError(os.strerror(errno.ENOMEM)))
    assert not is_out_of_memory(RuntimeError("shapes"))
    assert not is_out_of_memory(ValueError("out of memory"))
