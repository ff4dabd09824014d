"""How Meta's code shares a model out among tensor-parallel files: the axis that each matrix is cut along.

Column-parallel matrices are cut along their outputs, row-parallel ones along their inputs; norms stand in every file.
Source: the ParallelEmbedding (columns; Llama 1 and 2) and VocabParallelEmbedding (rows; Llama 3) of Meta's model code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamactl.spec.model import Model
from llamactl.spec.naming import Rule

OUTPUTS, INPUTS = 0, 1
_OF = {**dict.fromkeys(("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up"), OUTPUTS),
       **dict.fromkeys(("attn.o", "mlp.down"), INPUTS)}
LARGE_VOCABULARY = 1 << 16  # Llama 3's code, with its 128k tokens, is the one that cuts the embedding by rows


def rank_axes(model: Model, rules: Sequence[Rule]) -> Mapping[str, int]:
    """{stored template: axis}; what is not named stands whole in every file."""
    out: dict[str, int] = {}
    for r in rules:
        path, _, leaf = r.of[0].removeprefix("layers.{i}.").rpartition(".")
        axis = _OF.get(path)
        if axis is not None and (leaf == "weight" or axis == OUTPUTS):
            out[r.stored] = axis
        elif path == "head":
            out[r.stored] = OUTPUTS
        elif path == "embed":
            out[r.stored] = OUTPUTS if model.embed.vocab > LARGE_VOCABULARY else INPUTS
    return out
