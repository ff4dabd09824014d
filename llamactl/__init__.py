"""llamactl: what a language model is made of, what it costs, and whether this copy of it is right.

    from llamactl import load, params, kv_cache
    kv_cache("meta-llama/Meta-Llama-3-8B", ctx=131072).at[0].kv_cache_bytes    # 17179869184
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LlamactlError", "__version__", "compare", "evolve", "fit", "flops", "kv_cache", "load", "params", "rope"]

if TYPE_CHECKING:
    from llamactl.api import compare, evolve, fit, flops, kv_cache, load, params, rope
    from llamactl.errors import LlamactlError


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that `llamactl --version` imports nothing."""
    if name == "LlamactlError":
        from llamactl.errors import LlamactlError

        return LlamactlError
    if name in __all__:
        from llamactl import api

        return getattr(api, name)
    raise AttributeError(f"module 'llamactl' has no attribute {name!r}")
