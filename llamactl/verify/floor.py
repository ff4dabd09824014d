"""What arithmetic alone does to a model's logits, measured: the bar under which two networks are the same.

Largest |dlogit| of honest fp32 ports over the RMS of the logits (rows less their means), one thread, PyTorch 2.13:

    against this network              the second path here    transformers eager, sdpa     weakest fault
    69 small models, 24 tokens        1e-6 - 1.1e-5           1e-6 - 9e-6, <= 1.7 floors
    GPT-2 on bytes, 128 tokens        1.1e-6 - 1.6e-6         1.2e-6                        5.0e-5 (exact GELU, 1 layer)
    glassllm, 512 tokens              5.7e-6                  7.0e-6                        5.1e-3 (eps 1e-5 for 1e-6)
    SmolLM2-135M, 112 tokens          2.9e-5                  3.0e-5                        4.1e-3 (eps 1e-6 for 1e-5)
    SmolLM2-135M, 512 tokens          3.7e-5                  3.2e-5
    SmolLM2-135M, 1,024 tokens        1.6e-4                  3.9e-5                        8.0e-3 (the same)
    SmolLM2-135M, 4,096 tokens        4.5e-4                  2.6e-4

The second path grows with the text because its angles are exact and those of fp32 are not: ports that round frequencies
otherwise lie that far apart. fp64 throughout, by the other kernels, gave no more than the second path does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from llamactl.analysis.verification import Floor, Measures
from llamactl.net import kernels, streamed
from llamactl.net.decoder import Source
from llamactl.net.divergence import blocks, kl
from llamactl.spec.model import Model
from llamactl.verify.measure import measure

TIMES = 16.0
BACKSTOP = 1e-5  # of the RMS: what small models show at most; it rules where both paths agree by chance
TOKENS = 512  # of the text that take the second path: it is flat so far, and the time it takes is not
WHOLE = 1024  # longer texts take it whole, for the sake of the angles
PATH = "attention by matrices, other matrix products and exact angles, in fp32"


def floor(model: Model, source: Source, ids: Tensor, logits: Tensor, *, times: float = TIMES,
          progress: Callable[[int, int], None] | None = None) -> tuple[Floor, Tensor]:
    """The floor under `logits` (T, V), which streamed.logits gave of `ids` (1, T), and the second path's (T', V).

    T' is T, or TOKENS of a text up to WHOLE. Rows that are not finite are left out. Errors: those of streamed.logits.
    """
    tokens = ids.shape[1]
    n = tokens if tokens > WHOLE else min(tokens, TOKENS)
    with kernels.plain():
        second = streamed.logits(model, source, ids[:, :n], length=tokens, progress=progress)[0]
    largest, most = _apart(logits[:n], second)
    backstop = BACKSTOP * spread(logits[:n])
    return Floor(path=PATH, max_abs_dlogit=largest, max_kl=most, times=times, backstop=backstop,
                 limit=max(times * largest, backstop)), second


def bf16_floor(model: Model, source: Source, ids: Tensor, logits: Tensor, limit: float = 0.0, *,
               progress: Callable[[int, int], None] | None = None) -> Measures:
    """What bf16 arithmetic with these weights in bf16 does to `logits` (T, V), which fp32 gave of `ids` (1, T).

    limit: as in measure. Errors: those of streamed.logits.
    """
    low = streamed.logits(model, source, ids, dtype=torch.bfloat16, progress=progress)[0]
    return measure(logits, low, ids[0], limit)


def spread(logits: Tensor) -> float:
    """The RMS of (T, V) logits, each row less its mean; of the rows that are finite, 0 without any."""
    squares, count = 0.0, 0
    for _, (x,) in blocks(logits):
        x = x[x.isfinite().all(-1)]
        squares += float((x - x.mean(-1, keepdim=True)).square().sum())
        count += x.numel()
    return math.sqrt(squares / count) if count else 0.0


def _apart(a: Tensor, b: Tensor) -> tuple[float, float]:
    """(max |dlogit|, max KL) of the rows in which both are finite."""
    largest = most = 0.0
    for _, (x, y) in blocks(a, b):
        sure = (x - y).isfinite().all(-1)
        x, y = x[sure], y[sure]
        if len(x):
            largest = max(largest, float((x - y).abs().max()))
            most = max(most, float(kl(x.log_softmax(-1), y.log_softmax(-1)).max()))
    return largest, most
