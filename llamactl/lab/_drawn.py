"""Weights drawn at random for a description, as networks start their training: matrices keep the size of a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llamactl.net.decoder import Decoder, build
from llamactl.spec.model import Model


class Drawn:
    """A Source: matrices N(0, 1 / columns), norms 1, biases 0; drawn once, in the order of the tensors' names."""

    def __init__(self, model: Model, draws: torch.Generator) -> None:
        self._held = {t.name: _tensor(t.name, t.shape, draws) for t in sorted(model.tensors())}

    def tensor(self, name: str) -> Tensor:
        """The tensor under its canonical name."""
        return self._held[name]


def _tensor(name: str, shape: tuple[int, ...], draws: torch.Generator) -> Tensor:
    if len(shape) > 1:
        return torch.randn(shape, generator=draws) * float(shape[-1] ** -0.5)
    return torch.full(shape, float(name.endswith("norm.weight")))


def network(model: Model, draws: torch.Generator, device: Any = "cpu") -> Decoder:
    """The network of `model` with drawn weights, in fp32."""
    net = build(model)
    net.assign(Drawn(model, draws), dtype=torch.float32, device=device)
    return net
