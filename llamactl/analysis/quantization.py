"""Which quantisation containers the files hold, and whether the config says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from llamactl.analysis.matching import StoredWeight

# The config's quant_method -> the containers that it may mean.
METHODS: dict[str, tuple[str, ...]] = {
    "bitsandbytes": ("bitsandbytes-4bit", "bitsandbytes-8bit"), "gptq": ("gptq",), "awq": ("awq",),
    "auto-round": ("gptq", "awq"), "fp8": ("fp8", "int8", "mxfp4"), "fbgemm_fp8": ("fp8",), "mxfp4": ("mxfp4",),
    "compressed-tensors": ("pack-quantized", "fp8", "int8", "nvfp4", "mxfp4"), "modelopt": ("nvfp4", "fp8", "int8"),
    "quark": ("fp8", "int8", "mxfp4"), "mlx": ("mlx",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerGroup:
    """Packed weights of one kind. bits: of an element. elements: of the weights. weights_bytes: with bookkeeping."""

    kind: str
    bits: int
    weights: int
    elements: int
    weights_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """config: the method it names. found: containers in the files. agree: None where nothing can be said."""

    config: str | None
    found: tuple[ContainerGroup, ...]
    unread: tuple[str, ...]
    agree: bool | None


def containers(weights: Iterable[StoredWeight]) -> tuple[ContainerGroup, ...]:
    """The packed weights by kind and bits."""
    sums: dict[tuple[str, int], list[int]] = {}
    for w in weights:
        if w.container:
            at = sums.setdefault((w.container, w.bits or 0), [0, 0, 0])
            for i, n in enumerate((1, w.elements, w.nbytes)):
                at[i] += n
    return tuple(ContainerGroup(kind=k, bits=b, weights=n, elements=e, weights_bytes=x)
                 for (k, b), (n, e, x) in sorted(sums.items()))


def agrees(method: str | None, kinds: Sequence[ContainerGroup], unread: Mapping[str, str]) -> bool | None:
    """Whether the containers are those of the config's method; None where one of them is not known here."""
    if unread or (method and method not in METHODS and kinds):
        return None
    if method is None or not kinds:
        return method is None and not kinds
    return all(k.kind in METHODS[method] for k in kinds)


def quantization_notes(method: str | None, kinds: Sequence[ContainerGroup], unread: Mapping[str, str]
                        ) -> list[tuple[str, str]]:
    """A warning where the files are packed otherwise than the config says."""
    if agrees(method, kinds, unread) is not False:
        return []
    words = ", ".join(dict.fromkeys(k.kind for k in kinds))
    if method is None:
        return [("quantization-undeclared", f"the files hold {words} weights, and the config names no quantisation")]
    if not kinds:
        return [("quantization-absent", f"the config says {method}, and the files hold plain weights")]
    return [("quantization-differs", f"the config says {method}, the files hold {words} weights")]


def unread_lines(unread: Mapping[str, str]) -> list[str]:
    """Each reason once, with one name as an example."""
    by: dict[str, list[str]] = {}
    for name, why in unread.items():
        by.setdefault(why, []).append(name)
    return [f"{names[0]}{f' and {len(names) - 1:,} more' if len(names) > 1 else ''}: {why}" if names[0] else why
            for why, names in by.items()]


def unread_notes(unread: Mapping[str, str]) -> list[tuple[str, str]]:
    """One warning for all that could not be read."""
    lines = unread_lines(unread)
    more = f"; and {len(lines) - 3:,} other reasons" if len(lines) > 3 else ""
    return [("container-unread", "; ".join(lines[:3]) + more)] if lines else []
