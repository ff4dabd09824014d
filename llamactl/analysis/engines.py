"""What an inference engine keeps of the KV cache: how many tokens a layer holds, in which dtypes.

"KV cache" has several honest definitions; each is one Engine here and says its own in words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llamactl.spec.parts import Cache

GGML = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
PLAIN = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """cells(cache, ctx, batch, step): tokens all `batch` sequences keep together in one layer, padding included.

    step: tokens the engine computes at once (vLLM's max_num_batched_tokens, llama.cpp's n_ubatch), None if it plays
    no part. definition holds {step} where it does. default_dtype: the cache's, None for the model's own.
    """

    name: str
    definition: str
    dtypes: tuple[str, ...]
    cells: Callable[[Cache, int, int, int], int]
    step: int | None = None
    default_dtype: str | None = None
    expands_heads: bool = False


def _pad(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _arch(cache: Cache, ctx: int, batch: int, step: int) -> int:
    return batch * (min(ctx, cache.window) if cache.window else ctx)


def _hf(cache: Cache, ctx: int, batch: int, step: int) -> int:
    return batch * (min(ctx, cache.window - 1) if cache.window else ctx)


def _vllm(cache: Cache, ctx: int, batch: int, step: int) -> int:
    """Pages of 16. A sliding window may start inside a page, hence one more (vLLM, v1/kv_cache_interface.py)."""
    if cache.window is None:
        return batch * _pad(ctx, 16)
    if cache.kind == "chunked":
        return batch * _pad(min(cache.window + step, ctx), 16)
    return batch * (_pad(min(cache.window - 1 + step, ctx), 16) + 16)


def _llama_cpp(cache: Cache, ctx: int, batch: int, step: int) -> int:
    """One unified pool for all sequences, padded to 256 cells (llama-kv-cache-iswa.cpp)."""
    pool = _pad(ctx * batch, 256)
    if cache.window is None:
        return pool
    return _pad(min(pool, cache.window * batch + step), 256)


ENGINES = {
    e.name: e
    for e in (
        Engine(name="arch", definition="what the architecture can still see: min(ctx, window) tokens a layer",
               dtypes=(*PLAIN, "fp8", "int8", *GGML), cells=_arch),
        Engine(name="hf", definition="transformers' DynamicCache between steps: window - 1 tokens where a layer slides",
               dtypes=PLAIN, cells=_hf, expands_heads=True),
        Engine(name="vllm", definition="vLLM pages of 16 tokens; sliding layers window - 1 + {step:,} batched tokens",
               dtypes=(*PLAIN, "fp8", "int8"), cells=_vllm, step=2048),
        Engine(name="llama.cpp", definition="llama.cpp's unified pool in steps of 256 cells; sliding layers window x "
               "sequences + {step:,}", dtypes=(*PLAIN, *GGML), cells=_llama_cpp, step=512,
               default_dtype="fp16"),
    )
}
