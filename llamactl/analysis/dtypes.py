"""Which dtype a cost is counted in, and the error for a word that names none."""

from __future__ import annotations

from typing import NamedTuple

from llamactl.errors import UsageError
from llamactl.spec.dtype import TORCH_NAMES, DType, find_dtype
from llamactl.spec.model import Model


class Weights(NamedTuple):
    """What all weights take. dtype: as people write it. source: what says so. bytes: of parameters, or of a file."""

    dtype: str
    source: str
    bytes: int


def weights(model: Model, asked: str | None) -> Weights:
    """Bytes of the weights: as the file stores them if it was read and no dtype is asked for, else all in one dtype."""
    if asked is None and model.stored_bytes is not None and model.stored_as is not None:
        return Weights(model.stored_as.lower().replace(" ", ""), "the file's own tensors", model.stored_bytes)
    one, source = weights_dtype(model, asked)
    return Weights(TORCH_NAMES.get(one.name, one.name), source, one.bytes(model.total()))


def weights_dtype(model: Model, asked: str | None) -> tuple[DType, str]:
    """(dtype to cost in, where it comes from): asked for, else the config's.

    A config that names none is made in float32 by PyTorch; one of quantised weights keeps the rest in bfloat16.
    """
    if asked is not None:
        found = find_dtype(asked)
        if found is None:
            raise unknown_dtype(asked)
        return found, "asked for"
    if model.dtype is not None:
        return named(model.dtype), "config"
    if model.quantization is not None:
        return named("bf16"), "assumed: the config names none, and what is not quantised is commonly bfloat16"
    return named("fp32"), "assumed: the config names none, and PyTorch's default is float32"


def silent(model: Model, asked: str | None, option: str = "--dtype") -> tuple[tuple[str, str], ...]:
    """A warning where the bytes rest on an assumed dtype."""
    if asked is not None or model.dtype is not None:
        return ()
    assumed, _ = weights_dtype(model, None)
    way = f", {option} sets another" if option else ""
    return (("dtype-absent", f"the config names no dtype; {assumed.name} is assumed{way}"),)


def unknown_dtype(word: str) -> UsageError:
    """The error for a dtype nobody knows, naming a near one."""
    from difflib import get_close_matches

    from llamactl.spec.dtype import ALIASES, DTYPES

    near = get_close_matches(word.lower(), [*DTYPES, *ALIASES], 1)
    return UsageError("dtype", f"{word!r} is not a known dtype",
                      help=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(DTYPES)}")


def named(name: str) -> DType:
    """The dtype of a name known to exist."""
    found = find_dtype(name)
    assert found is not None
    return found
