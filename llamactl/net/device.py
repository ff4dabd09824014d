"""The device a network runs on: which one, in which dtype, how much memory it has and how fast that is read."""

from __future__ import annotations

import os
import sys
import time
from typing import Protocol

import torch

from llamactl.errors import NotAvailable
from llamactl.spec.dtype import find_dtype
from llamactl.spec.model import Model

DEVICES = ("auto", "cuda", "cpu", "mps")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WORDS = {dtype: word for word, dtype in DTYPES.items()}


def find_device(word: str) -> torch.device:
    """The device for auto | cuda | cpu | mps; auto takes the fastest that is here. Raises NotAvailable (no-device)."""
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if word == "auto":
        word = next(name for name, there in here.items() if there)
    if not here[word]:
        built = "" if word != "cuda" or torch.version.cuda else f"; this is torch {torch.__version__}, without CUDA"
        raise NotAvailable("no-device", f"no {word} device here{built}", help="try --device cpu")
    return torch.device(word, 0) if word == "cuda" else torch.device(word)


def use_threads(count: int) -> None:
    """Let the CPU's operations run on `count` threads."""
    torch.set_num_threads(count)


def count_threads() -> int:
    """How many threads the CPU's operations run on."""
    return torch.get_num_threads()


class Stored(Protocol):
    """Weights that say what they lie in; see net.weights.Weights."""

    def dtype(self, name: str) -> torch.dtype: ...


def stored_dtype(weights: Stored, model: Model) -> str | None:
    """What most weights are stored in, by llamactl's name; of a plain checkpoint, what the embedding is."""
    if model.stored_as is not None:  # a file of mixed types: the first takes the most bytes
        found = find_dtype(model.stored_as.partition(" ")[0])
        return found.name if found else None
    return WORDS.get(weights.dtype("embed.weight"), model.dtype)


def choose_dtype(word: str, stored: str | None, device: torch.device) -> torch.dtype:
    """The dtype to compute in. auto: as the checkpoint stores it; fp16 becomes fp32 on a CPU.

    stored: llamactl's name of what the weights lie in. A CPU multiplies fp16 matrices three times slower than fp32
    ones (measured); other stored formats are computed in bf16 on a GPU, in fp32 on a CPU.
    Raises NotAvailable (no-dtype) where the device cannot compute in it.
    """
    if word != "auto":
        dtype = DTYPES[word]
    elif device.type == "cpu":
        dtype = torch.bfloat16 if stored == "bf16" else torch.float32
    else:
        dtype = DTYPES.get(stored or "bf16", torch.bfloat16)
    try:
        one = torch.ones(2, 2, dtype=dtype, device=device)
        (one @ one).sum().item()
    except (RuntimeError, TypeError) as e:
        if isinstance(e, torch.OutOfMemoryError):
            raise
        raise NotAvailable("no-dtype", f"{device.type} does not compute in {WORDS[dtype]}",
                           help="try --dtype fp32") from e
    return dtype


def name_of(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"cpu, {threads} thread{'' if threads == 1 else 's'}" if device.type == "cpu" else device.type


def free_memory(device: torch.device) -> int | None:
    """Bytes that could be taken now; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            found = {k: v for k, _, v in (line.partition(":") for line in f)}
        free = int(found["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None
    return free if (left := _left_to_group()) is None else min(free, left)


def _left_to_group(folder: str = "/sys/fs/cgroup") -> int | None:
    """Bytes that the control group of a container may still take, its file cache given back; None without a limit."""
    try:
        limit, used = (int(_line(f"{folder}/memory.{name}")) for name in ("max", "current"))
        with open(f"{folder}/memory.stat", encoding="ascii") as f:
            stat = dict(line.split() for line in f)
        cached = int(stat["active_file"]) + int(stat["inactive_file"])
    except (OSError, KeyError, ValueError):  # "max" is no number
        return None
    return max(0, limit - used + cached)


def _line(path: str) -> str:
    with open(path, encoding="ascii") as f:
        return f.read(64)


def peak_memory(device: torch.device) -> int | None:
    """Bytes: the most that tensors took on a GPU; on a CPU the most that this process held, mapped weights with it."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def bandwidth(device: torch.device, seconds: float = 0.15) -> float | None:
    """Bytes a second that this device reads, measured: the best of repeated sums over a buffer past its caches.

    None where there is no room for the buffer.
    """
    size = (1 << 30) if device.type == "cuda" else (1 << 28)
    free = free_memory(device)
    if free is not None and free < 4 * size:
        return None
    buffer = torch.ones(size // 8, dtype=torch.int64, device=device)  # a CPU sums fp32 slower than it reads it
    best, end = 0.0, time.perf_counter() + seconds
    while True:
        begin = time.perf_counter()
        buffer.sum().item()
        now = time.perf_counter()
        best = max(best, size / (now - begin))
        if now >= end:
            return best


def is_out_of_memory(e: BaseException) -> bool:
    """Whether torch or Python ran out of memory; torch's CPU allocator says so in words alone."""
    if isinstance(e, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(e, RuntimeError) and any(
        word in str(e) for word in ("DefaultCPUAllocator", "out of memory", os.strerror(12)))
