"""Which rows of which tensors of one model make each tensor of another that has other KV heads, vocabulary or head.

For two equal models every tensor is itself. What else differs between the two is not carried over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from llamactl.errors import InputRefused
from llamactl.spec.model import Tensor
from llamactl.spec.windows import At, runs_as_range

KV = tuple(f"layers.{{i}}.attn.{x}.{p}" for x in "kv" for p in ("weight", "bias"))
ROWS_OF_VOCABULARY = ("embed.weight", "head.weight", "head.bias")


class Taken(NamedTuple):
    """Row rows[n] of the source's tensor `name` is row to[n] of the wanted one; rows without a source are zero.

    name: "" where there is no source at all.
    """

    name: str
    rows: At
    to: At


def carried(tensor: Tensor, source: Mapping[str, Tensor], heads: tuple[int, int]) -> tuple[Taken, ...]:
    """The tensors of the source whose mean is `tensor`: one, but for pooled KV heads.

    source: its tensors by canonical name. heads: KV heads of the tensor's layer in the source and in the target; heads
    are pooled by the mean of each group (arXiv:2305.13245), or each repeated. Raises InputRefused convert-shape.
    """
    name = tensor.name
    if name not in source and tensor.template == "head.weight":
        name = "embed.weight"  # a tied head made a matrix of its own
    if name not in source and name.endswith(".bias"):
        return (Taken("", (), ()),)  # the layout has a bias there, the model none: zeros
    if name not in source:
        raise InputRefused("convert-shape", f"nothing in the source makes {tensor.name}")
    have, want = source[name].shape, tensor.shape
    size = have[0] if have else 1
    if have == want:
        return (Taken(name, range(size), range(size)),)
    if have[1:] == want[1:]:
        if tensor.template in ROWS_OF_VOCABULARY and want[0] > have[0]:
            return (Taken(name, range(size), range(size)),)
        if tensor.template in KV and have[0] * heads[1] == want[0] * heads[0]:
            return _heads(name, have[0] // heads[0], *heads)
    raise InputRefused("convert-shape", f"{tensor.name} is {list(have)} in the source and {list(want)} in the target")


def _heads(name: str, dim: int, have: int, want: int) -> tuple[Taken, ...]:
    """KV heads of `dim` rows: `want` of them out of `have`."""
    to = range(want * dim)
    if want > have and want % have == 0:
        each = want // have
        return (Taken(name, [h // each * dim + r for h in range(want) for r in range(dim)], to),)
    if have % want:
        raise InputRefused("convert-shape", f"{have} KV heads cannot be shared out among {want}")
    each = have // want
    return tuple(Taken(name, runs_as_range([(h * each + j) * dim + r for h in range(want) for r in range(dim)]), to)
                 for j in range(each))
