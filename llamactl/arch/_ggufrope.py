"""Frequency factors that a GGUF file keeps as a tensor: the description must say the rotation that they stand for.

llama.cpp divides each pair's frequency by its factor. Its converter writes the factors of Llama 3.1's scheme as
`rope_freqs.weight` and nothing of the scheme into the metadata; the scheme is told from the factors themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from llamactl.errors import InputRefused
from llamactl.spec.frequencies import frequencies, plain
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import Attention
from llamactl.spec.rope import Rope, RopeScaling

TENSOR = "rope_freqs.weight"
FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")  # LongRoPE's; their scheme is not read here
# Of every release with this scheme (Meta's reference code); the factor is the largest of the stored ones.
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192
SMALLEST, LARGEST = 1.0, 1e4


def stretched(model: Model, factors: Sequence[float], path: str) -> Model:
    """`model` with the rotation that `factors` stand for, one of each pair; raises InputRefused gguf-rope."""
    if not factors or not all(math.isfinite(f) and SMALLEST <= f <= LARGEST for f in factors):
        raise refused(path, TENSOR, "holds values that divide no frequency")
    if max(factors) == 1.0:
        return model
    scaling = RopeScaling(kind="llama3", factor=_rounded(max(factors)), original=ORIGINAL, low_freq_factor=LOW,
                          high_freq_factor=HIGH)
    of = {layer: _layer(layer, scaling, factors, path) for layer, _ in model.distinct_layers()}
    return replace(model, layers=tuple(of[layer] for layer in model.layers))


def refused(path: str, tensor: str, what: str) -> InputRefused:
    """The error for factors whose scheme is not known."""
    return InputRefused("gguf-rope", f"{tensor} {what}; without it the rotation would be wrong past short texts",
                        path=path, help="run the Hugging Face folder that the file was made from")


def _layer(layer: Layer, scaling: RopeScaling, factors: Sequence[float], path: str) -> Layer:
    if not isinstance(layer.attn, Attention) or layer.attn.rope is None:
        return layer
    rope = layer.attn.rope
    if rope.scaling is not None:
        raise refused(path, TENSOR, f"stands beside a {rope.scaling.kind} scaling")
    new = replace(rope, scaling=scaling)
    if len(factors) != rope.dim // 2 or not _same(new, rope, factors):
        raise refused(path, TENSOR, f"holds {len(factors)} factors up to {max(factors):g} of an unknown scheme")
    return replace(layer, attn=replace(layer.attn, rope=new))


def _same(new: Rope, old: Rope, factors: Sequence[float]) -> bool:
    """Whether the scheme gives these factors, which the file keeps in float32."""
    turned = frequencies(new)[0]
    return all(math.isclose(was / now, f, rel_tol=1e-4)
               for was, now, f in zip(plain(old), turned, factors, strict=True))


def _rounded(factor: float) -> float:
    """8.0 for a float32 that is 8 to its last digits."""
    near = round(factor)
    return float(near) if math.isclose(factor, near, rel_tol=1e-5) else factor
