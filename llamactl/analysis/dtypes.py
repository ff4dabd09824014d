"""Which dtype a cost is counted in, and the error for a word that names none."""

from __future__ import annotations

from llamactl.errors import UsageError
from llamactl.spec.dtype import DType, find_dtype
from llamactl.spec.model import Model


def weights_dtype(model: Model, asked: str | None) -> tuple[DType, str]:
    """(dtype to cost weights in, where it comes from): asked for, else the config's, else float32 as PyTorch has it."""
    if asked is not None:
        found = find_dtype(asked)
        if found is None:
            raise unknown_dtype(asked)
        return found, "asked for"
    if model.dtype is not None:
        return named(model.dtype), "config"
    return named("fp32"), "the config names none; float32 is PyTorch's default"


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
