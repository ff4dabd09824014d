"""The tensors of somebody's torch module that are not the checkpoint's, by canonical name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from llamactl.checkpoint.account import account
from llamactl.checkpoint.held import Held
from llamactl.errors import InputRefused
from llamactl.net.decoder import Source
from llamactl.spec.model import Model
from llamactl.spec.naming import Rule, Stored, read, read_expert

Layouts = Sequence[tuple[str, Sequence[Rule], Sequence[tuple[str, str]]]]
NEAR = 1e-6  # of the largest value: a module that was widened or folded and back


def different(module: nn.Module, model: Model, source: Source, layouts: Layouts) -> dict[str, Tensor]:
    """{canonical name: the module's tensor in fp32} where it is not the source's; {} where its names are not known.

    layouts: (name, rules, ignored) of those whose names are tried.
    """
    held = {n: p.detach() for n, p in module.state_dict().items() if isinstance(p, Tensor)}
    facts = {n: Held(name=n, dtype="F32", shape=tuple(p.shape), nbytes=4 * p.numel()) for n, p in held.items()
             if p.is_floating_point()}
    for layout, rules, ignored in layouts:
        try:
            found = account("", facts, model, rules, layout=layout, ignored=ignored)
        except InputRefused:
            continue
        out = _others(held, found.at, model, source)
        if found.twin is not None and model.head.tied and not same(held[found.twin].float(), source.tensor(
                "embed.weight").float()):
            out["head.weight"] = held[found.twin].float()
        return out
    return {}


@torch.no_grad()
def _others(held: Mapping[str, Tensor], at: Mapping[str, tuple[Stored, str]], model: Model, source: Source
            ) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, (stored, where) in at.items():
        if not stored.rule.stacked:
            mine: Tensor = read(stored, held[where], model)[name]
        else:
            (tensor,) = (t for t in stored.of if t.name == name)
            at_ = sorted({t.e for t in stored.of}).index(tensor.e)
            mine = read_expert(stored, tensor.e, held[where][at_], model)[name]
        mine = mine.float()
        if not same(mine, source.tensor(name).float()):
            out[name] = mine.contiguous()
    return out


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one but for what widening or folding and back does."""
    return a.shape == b.shape and float((a - b).abs().max()) <= NEAR * float(b.abs().max())
