"""One text through a network, stage by stage: shapes and sizes of what flows, from hooks on its modules."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from llamactl.analysis.experiment import Cell, Grid
from llamactl.net.decoder import Decoder
from llamactl.verify.hooks import Recorder

# The parts of a block in the order in which they run; `attn.o` and `mlp.down` give what the branch adds.
PARTS = ("attn_norm", "attn.q", "attn.k", "attn.v", "attn.o", "attn_post_norm", "mlp_norm", "mlp.gate", "mlp.up",
         "mlp.down", "mlp_post_norm")


class Stage(NamedTuple):
    """What came out of one part: shape, RMS over everything, and the largest |mean| of a row."""

    shape: tuple[int, ...]
    rms: float
    mean: float


@torch.no_grad()
def trace(net: Decoder, ids: Tensor) -> dict[str, Stage]:
    """The stages of (1, T) ids by name: into the first block, inside it, after every block, the last norm, logits."""
    recorder = Recorder(net, ids.shape[1], layers=net.model.n_layers, parts=(0,))
    with recorder.on():
        logits = net(ids)
    seen = recorder.captured(net.model.head.vocab)
    assert seen is not None
    out = {"into block 0": _stage(seen.embedded)}
    inside = seen.parts[0]
    out |= {f"block 0: {name}": _stage(inside[name][1]) for name in PARTS if name in inside}
    out |= {f"after block {n}": _stage(x) for n, x in enumerate(seen.outputs)}
    if net.norm is not None:
        out["norm"] = _stage(net.norm(seen.outputs[-1].to(net.device)))
    out["logits"] = _stage(logits[0])
    return out


def _stage(x: Tensor) -> Stage:
    wide = x.cpu().double()
    return Stage(tuple(x.shape), float(wide.square().mean().sqrt()), float(wide.mean(-1).abs().max()))


def side_by_side(title: str, names: tuple[str, str], a: dict[str, Stage], b: dict[str, Stage]) -> Grid:
    """Two traces in one table; a stage that one of them does not have is told by the last column."""
    order = sorted({**a, **b}, key=lambda s: _place(s, max(len(a), len(b))))
    rows: list[tuple[Cell, ...]] = []
    for name in order:
        one, two = a.get(name), b.get(name)
        only = names[0] if two is None else names[1] if one is None else None
        rows.append((name, *_cells(one), *_cells(two), only))
    columns = ("stage", *(f"{n} {w}" for n in names for w in ("shape", "RMS", "|row mean|")), "only in")
    return Grid(title=title, columns=columns, rows=tuple(rows))


def _place(stage: str, most: int) -> tuple[int, int]:
    head, _, part = stage.partition(": ")
    if part:
        return 1, PARTS.index(part)
    word = head.rpartition(" ")[2]
    return {"into block 0": (0, 0), "norm": (3, 0), "logits": (4, 0)}.get(stage, (2, int(word) if word.isdigit() else
                                                                                  most))


def _cells(stage: Stage | None) -> tuple[Cell, ...]:
    if stage is None:
        return None, None, None
    return " x ".join(map(str, stage.shape)), float(f"{stage.rms:.4g}"), float(f"{stage.mean:.2g}")
