"""Weights in the order that the CPU's matrix multiplication reads fastest: a private copy for speed."""

from __future__ import annotations

from torch import Tensor, nn

from llamactl.net.blocks import Linear
from llamactl.net.decoder import Decoder
from llamactl.net.kernels import packed
from llamactl.net.latent import Latent


def pack(network: Decoder) -> int:
    """Repack what only ever multiplies, the head too; bytes copied, 0 where this machine or dtype gains nothing by it.

    A tied head gets a copy of its own, for rows of the embedding are looked up as they lie.
    """
    head = network.head
    kept = {id(m) for x in network.modules() if isinstance(x, Latent) for m in (x.k_b, x.v_b)}  # read head by head
    taken = 0
    for module in network.modules():
        if isinstance(module, Linear) and id(module) not in kept:
            taken += _replace(module, module.weight)
    return taken if head.part.unit_rows else taken + _replace(head, head.weight if head.weight is not None
                                                              else network.embed.weight)


def _replace(module: nn.Module, weight: Tensor) -> int:
    new = packed(weight)
    if new is weight:
        return 0
    module.weight = nn.Parameter(new, requires_grad=False)  # not into _parameters: a tied head has a None of that name
    return weight.nbytes
