"""Which part of a faulty block is wrong: the parts of somebody's block, each beside ours on the same input."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from llamactl.net.kernels import plain
from llamactl.net.streamed import Streamed
from llamactl.verify.network import Network

TIMES, LEAST = 16, 2e-6  # as in blockwise.py
# What parts are called in ports, and ours; a name is taken by its last word.
PARTS = {
    "attention": ("attn", ("self_attn", "attn", "attention", "self_attention", "mixer")),
    "feed-forward": ("mlp", ("mlp", "feed_forward", "ffn", "ff", "feedforward", "block_sparse_moe")),
    "norm before attention": ("attn_norm", ("input_layernorm", "ln_1", "attention_norm", "norm1", "ln1", "attn_norm")),
    "norm before the feed-forward": ("mlp_norm", ("post_attention_layernorm", "ln_2", "ffn_norm", "norm2", "ln2",
                                                  "mlp_norm")),
}


@torch.no_grad()
def wrong_part(net: Network, i: int, parts: Mapping[str, tuple[Tensor, Tensor]]) -> str | None:
    """The first part of block i whose output is not ours on its own input; None where none is known to be wrong.

    parts: path inside the block -> (input, output), (T, D) each.
    """
    run = net.opened((), net.tokens)
    assert run is not None
    order = ("norm before attention", "attention", "norm before the feed-forward", "feed-forward")
    for word in order:
        ours, names = PARTS[word]
        for path, (x, y) in parts.items():
            if path.rpartition(".")[2] in names and _off(run, i, ours, x, y):
                return word
    return None


def _off(run: Streamed, i: int, name: str, x: Tensor, y: Tensor) -> bool:
    part = getattr(run.block(i), name, None)
    if part is None:
        return False
    call: Callable[[Tensor], Tensor] = (lambda t: part(t, run.step)) if name == "attn" else part
    try:
        got = call(x[None].float())[0]
        with plain():
            other = call(x[None].float())[0]
    except RuntimeError:  # of other widths: not the part that its name says
        return False
    if got.shape != y.shape:
        return False
    size = got.norm(dim=-1).clamp_min(1e-30)
    floor = max(LEAST, TIMES * float(((other - got).norm(dim=-1) / size).max()))
    far = float(((y - got).norm(dim=-1) / size).max())
    return not far <= floor
