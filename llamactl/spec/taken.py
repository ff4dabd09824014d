"""Tensors that are read otherwise than they lie in the checkpoint: what a wrong loader does, as data.

A Model carries them in `taken`: one group for each edit, in the order in which they were made. Within a group, what a
change reads is what was there before all of the group. net.taken carries them out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llamactl.spec.model import Model


class Taken(NamedTuple):
    """One change of what is read. at: canonical path, inside a layer without `layers.N.` ("attn.q.weight"), or "*".

    how     from: the tensor at path `arg` of the same layer instead     swap: that, and the other way round
            order: the layer arg[n] in place of layer n
            rows: rows of each of `heads` groups in another order, arg "adjacent>half" or "half>adjacent"
            heads: groups of rows reversed or rolled                     transposed: rows for columns (square matrices)
            shift, roll: row n + arg in place of row n, ends stay or wrap    round: rounded to the dtype `arg` and back
            fused: rows of (q, k, v) or (gate, up) laid out as arg[0] and read as arg[1]
            zero, ones; first: row 0 in place of each; scale: multiplied by `arg`
            another: of another checkpoint, given apart
    layers: of which layers, None for all; outside the layers it has no meaning.
    """

    at: str
    how: str
    arg: str | int | float | tuple[int, ...] | None = None
    heads: int = 1
    layers: tuple[int, ...] | None = None


def take(model: Model, *new: Taken) -> Model:
    """`model` with further tensors read otherwise, by one edit."""
    return replace(model, taken=(*model.taken, new))
