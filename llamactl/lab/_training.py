"""Training of a described network by autograd, through the same modules that generate and verify run.

shapes: B windows a step, T tokens a window. A text is its bytes: the vocabulary is 256.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from llamactl.errors import InputRefused
from llamactl.lab._drawn import network
from llamactl.lab._setting import by_autograd
from llamactl.net.decoder import Decoder
from llamactl.spec.model import Model

BYTES = 256
LEAST = 16_384  # bytes of a text


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The same for every network: AdamW, a tenth of the steps warming up, then down to a tenth along a cosine.

    rate: the highest learning rate. windows: of the text's last tenth, on which the loss is measured.
    """

    steps: int
    batch: int = 16
    tokens: int = 128
    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)
    decay: float = 0.1
    clip: float = 1.0
    windows: int = 64

    def rate_at(self, step: int) -> float:
        """Of step 0 .. steps - 1."""
        warm = max(1, self.steps // 10)
        if step < warm:
            return self.rate * (step + 1) / warm
        share = (step - warm) / max(1, self.steps - warm)
        return self.rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """(size, T + 1) windows of `rows`, one batch a step, each drawn when its step comes: the same ones at every pass.

    state: of the random numbers before the first.
    """

    rows: Tensor
    steps: int
    size: int
    state: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        draws = torch.Generator()
        draws.set_state(self.state)
        for _ in range(self.steps):
            yield self.rows[torch.randint(len(self.rows), (self.size,), generator=draws)]


class Windows(NamedTuple):
    """(n, T + 1) ids: `batches` one a step, and the held-out ones."""

    batches: Iterable[Tensor]
    held: Tensor


class Learned(NamedTuple):
    """A trained network. losses: of each step's batch before the step; held: (n,) of each held-out window after all,
    in nats per byte.
    """

    net: Decoder
    losses: tuple[float, ...]
    held: Tensor


def check_text(text: bytes, path: str | None = None) -> None:
    """Raise InputRefused text-short where there is too little to learn. path: of the text."""
    if len(text) < LEAST:
        raise InputRefused("text-short", f"{len(text):,} bytes, and a network learns nothing from under {LEAST:,}",
                           path=path, help="give a longer text with --text")


def windows(text: bytes, recipe: Recipe, draws: torch.Generator) -> Windows:
    """Windows drawn from the first nine tenths, and evenly spread ones of the last. Raises InputRefused text-short."""
    check_text(text)
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut, long = len(ids) * 9 // 10, recipe.tokens + 1
    first, last = ids[:cut].unfold(0, long, 1), ids[cut:].unfold(0, long, 1)
    batches = Batches(rows=first, steps=recipe.steps, size=recipe.batch, state=draws.get_state())
    n = min(recipe.windows, (len(ids) - cut) // long)
    return Windows(batches, last[torch.linspace(0, len(last) - 1, n).long()])


def learn(model: Model, recipe: Recipe, data: Windows, draws: torch.Generator, device: torch.device,
          tell: Callable[[int], None] = lambda _: None) -> Learned:
    """`model` from drawn weights through every batch. tell: told the step that comes next.

    Raises InputRefused not-finite where a loss is no number.
    """
    with by_autograd(device):
        net = network(model, draws, device).requires_grad_(True)
        optimizer = torch.optim.AdamW(net.parameters(), lr=recipe.rate, betas=recipe.betas, weight_decay=recipe.decay)
        losses = []
        for n, batch in enumerate(data.batches):
            tell(n)
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate_at(n)
            loss = _loss(net, batch.to(device)).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(net.parameters(), recipe.clip)
            optimizer.step()
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                raise InputRefused("not-finite", f"the loss of step {n + 1:,} is {losses[-1]}: nothing is learned",
                                   help="another --seed or --text may do")
        net.requires_grad_(False)
        net.zero_grad(set_to_none=True)
        net.forget()
        return Learned(net, tuple(losses), held_loss(net, data.held))


@torch.no_grad()
def held_loss(net: Decoder, held: Tensor) -> Tensor:
    """(n,) mean loss of each window, in fp64 on the CPU."""
    with by_autograd(net.device):
        return torch.cat([_loss(net, part.to(net.device)).mean(1).cpu().double() for part in torch.split(held, 16)])


def _loss(net: Decoder, ids: Tensor) -> Tensor:
    """(B, T) -log p of each byte after those before it."""
    logits = net(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
