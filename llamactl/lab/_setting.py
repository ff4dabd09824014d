"""What every experiment is given, and the two ways to trained weights: `ablate` on a text, and the network itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from llamactl.errors import LlamactlError
from llamactl.net import kernels
from llamactl.net.decoder import Decoder, Source, build
from llamactl.spec.edits import apply
from llamactl.spec.model import Model
from llamactl.spec.parts import LearnedPositions, SinusoidalPositions
from llamactl.verify.ablate import Ablated, ablate

ROPE, TABLE = "RoPE", "learned positions"
NO_CHECKPOINT = "needs trained weights: --model CKPT"
LOST = ("its loss on this text is above that of a guess, ln(vocabulary): either it cannot read these tokens, or "
        "weights or arithmetic are wrong")
MADE_UP = "the tokens are made up, for want of a tokenizer: a loss on them says nothing of the weights"


@contextmanager
def named(id: str) -> Iterator[None]:
    """Inside, an error that names no file is of this checkpoint: there may be several."""
    try:
        yield
    except LlamactlError as e:
        e.path = e.path or id
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Trained weights and tokens to run them on. read: the tokens are a text's, not made up."""

    id: str
    model: Model
    source: Source
    ids: tuple[int, ...]
    read: bool

    def ablated(self, edits: Sequence[str] = (), shifts: Sequence[int] = (), tokens: int | None = None, *,
                copies: bool = False) -> Ablated:
        """What `llamactl ablate` measures, on the first tokens of the text; on the CPU, in fp32."""
        with named(self.id):
            return ablate(self.model, self.source, list(self.ids[:tokens]), edits=edits, shifts=shifts, copies=copies)

    def unread(self, loss: float) -> str | None:
        """Why its loss on these tokens says nothing; None where it does."""
        if not self.read:
            return MADE_UP
        return LOST if loss > math.log(self.model.embed.vocab) else None

    def network(self, layers: int) -> Decoder:
        """The network of the first layers, in fp32 on the CPU."""
        with named(self.id):
            net = build(apply(self.model, f"n_layers={layers}"))
            net.assign(self.source, dtype=torch.float32)
        return net

    @property
    def positions(self) -> str | None:
        """ROPE or TABLE where positions enter by that alone; None where by another way, which `otherwise` says."""
        table = self.model.positions
        if not self._turns:
            return TABLE if isinstance(table, LearnedPositions) else None
        return ROPE if table is None else None

    @property
    def otherwise(self) -> str:
        """Why what is said of RoPE and of learned positions is not said of it."""
        table = self.model.positions
        if self._turns:
            return "it has RoPE and positions added at the input"
        if isinstance(table, SinusoidalPositions):
            return "its positions are fixed sinusoids, added at the input: neither RoPE nor learned"
        if any(getattr(x.attn, "alibi", False) for x in self.model.layers):
            return "positions enter its scores by distance: ALiBi"
        return "no part of it tells positions: neither RoPE nor a table"

    @property
    def _turns(self) -> bool:
        return any(x.attn is not None and x.attn.rope is not None for x in self.model.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """describe: a bundled model by name. seed: of every draw. text: bytes that `blocks` learns; text_name: whose.

    threads: of the CPU, as they were asked for; None for all. steps: of training, None for what fits a minute or two.
    tell: told what is done next.
    """

    describe: Callable[[str], Model]
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    threads: int | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    text: bytes = b""
    text_name: str = ""
    steps: int | None = None
    tell: Callable[[str], None] = lambda _: None

    def lacking(self) -> tuple[str, ...]:
        """Kinds of trained weights that were not given, where positions are what is asked about."""
        kinds = {c.positions for c in self.checkpoints}
        return tuple(f"a checkpoint with {kind}" for kind in (ROPE, TABLE) if kind not in kinds)

    def draws(self) -> torch.Generator:
        """The random numbers of an experiment, from their beginning; made on the CPU, so that devices agree."""
        return torch.Generator().manual_seed(self.seed)

    def small(self, name: str, *edits: str) -> Model:
        """The bundled model `name` under edits, one after the other."""
        model = self.describe(name)
        for edit in edits:
            model = apply(model, edit)
        return model

    @property
    def wide(self) -> bool:
        """Whether the device computes in fp64."""
        return self.device.type != "mps"


@contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """Inside, the CPU's operations run on so many threads; None changes nothing."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def by_autograd(device: torch.device) -> Iterator[None]:
    """Inside, gradients flow through the network: the CPU's quicker kernels have none, so it takes its plain way."""
    if device.type != "cpu":
        yield
        return
    with kernels.plain():
        yield
