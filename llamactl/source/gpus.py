"""Accelerators: the bundled published values, and the devices of this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from llamactl.errors import NotAvailable
from llamactl.source import presets


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device. memory_bytes: what its driver reports; bandwidth: bytes/s; rates: dense operations/s by dtype."""

    name: str
    title: str
    memory_bytes: int
    bandwidth: float | None
    rates: dict[str, float]


def every() -> dict[str, Gpu]:
    """The bundled devices by name."""
    import yaml

    path = os.path.join(os.path.dirname(presets.folder()), "gpus.yaml")
    with open(path, encoding="utf-8") as f:
        data = yaml.load(f, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {
        name: Gpu(name=name, title=g["title"], memory_bytes=g["memory_mib"] << 20, bandwidth=g["bandwidth"] * 1e9,
                  rates={d: r * 1e12 for d, r in g["tflops"].items() if r})
        for name, g in data.items()
    }


def find(text: str) -> tuple[Gpu, int]:
    """`h100-80gb`, `h100-80gbx4`, `h100` or `auto` as (device, how many). Raises NotAvailable naming the near ones."""
    if text.lower() == "auto":
        return local()
    name, _, number = text.lower().replace("_", "-").rpartition("x")
    if not (name and number.isdigit() and 1 <= int(number) <= 4096):
        name, number = text.lower().replace("_", "-"), "1"
    known = every()
    short = [n for n in known if n.startswith(name + "-")]
    if name in known:
        return known[name], int(number)
    if len(short) == 1:
        return known[short[0]], int(number)
    from difflib import get_close_matches

    near = short or get_close_matches(name, known, 3)
    raise NotAvailable("gpu-not-found", f"no GPU {text!r}",
                       help=f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known)}")


def local() -> tuple[Gpu, int]:
    """The NVIDIA GPUs of this machine, which must be alike; their published rates where the name is known."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise NotAvailable("extra-missing", "reading the local GPUs needs nvidia-ml-py",
                           help="pip install 'llamactl[gpu]', or name a GPU") from None
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        seen = {(str(pynvml.nvmlDeviceGetName(h)), int(pynvml.nvmlDeviceGetMemoryInfo(h).total)) for h in handles}
    except pynvml.NVMLError as e:
        raise NotAvailable("no-gpu", f"no NVIDIA GPU can be read here: {e}", help="name one, e.g. --gpu h100-80gb"
                           ) from None
    if len(seen) != 1:
        found = ", ".join(sorted(n for n, _ in seen)) or "none"
        raise NotAvailable("no-gpu", f"the local GPUs are not alike: {found}", help="name one, e.g. --gpu h100-80gb")
    ((title, memory),) = seen
    words = set(title.lower().replace("-", " ").split())
    match = [g for g in every().values() if set(g.name.split("-")[0].split()) <= words]
    same = min(match, key=lambda g: abs(g.memory_bytes - memory), default=None)
    return Gpu(name=title, title=title, memory_bytes=memory, bandwidth=same.bandwidth if same else None,
               rates=same.rates if same else {}), len(handles)
