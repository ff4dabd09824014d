"""Every known mistake made in the right network, one at a time: how far each goes, and from which token on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llamactl.analysis.verification import Floor
from llamactl.errors import UsageError
from llamactl.net.divergence import blocks, kl
from llamactl.net.generate import positions
from llamactl.spec.mistakes import Change, Hypothesis, hypotheses
from llamactl.spec.model import Model
from llamactl.verify.network import Network

COLUMNS = 256  # of the last token's logits that are kept to tell mistakes apart
ITSELF = 2.0  # times what a second honest path does
EXACT = {"positions-bf16": 257, "positions-fp16": 2049}  # the first whole number that the type does not have
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Seed:
    """A mistake and where it is made. scope: in words."""

    idea: Hypothesis
    change: Change
    scope: str

    @property
    def name(self) -> str:
        """As it stands in a list of equivalents."""
        return self.change.text if self.change.layer is None else f"{self.change.text} in {self.scope}"


@dataclass(frozen=True, slots=True)
class Plant:
    """A seed that was made. far: the largest |dlogit|, infinite where a logit is not finite; None: it cannot be run.

    mark: (T + COLUMNS,) numbers no two of which are further apart than the logits that they are made of.
    """

    seed: Seed
    far: float | None = None
    max_kl: float | None = None
    tokens: int | None = None
    mark: Tensor | None = None


def seeds(model: Model, ideas: Sequence[Hypothesis] | None = None) -> tuple[list[Seed], int]:
    """What is planted: each idea in the whole model, and those of layers in one layer near the middle as well.

    Of the orders of layers a dozen; the second number says how many there are. ideas: all that fit the model.
    """
    found = list(hypotheses(model)) if ideas is None else list(ideas)
    orders = [h for h in found if h.about.name == "layer_order"]
    few = set(_few(model.n_layers))
    chosen = [h for h in found if h.about.name != "layer_order" or h.text in few or len(orders) <= len(few)]
    whole, single = [], []
    for h in chosen:
        i = _layer(model, h)
        whole.append(Seed(h, Change(h.text), "model" if i is None else "all layers"))
        if i is not None and model.n_layers > 1:
            single.append(Seed(h, Change(h.text, i), f"layer {i}"))
    return whole + single, len(orders)


def _few(n: int) -> list[str]:
    """A dozen orders of n layers, one of each kind and both ways where there are two."""
    m = n // 2
    words = ("strings", "reversed", "first", "shifted:1", "shifted:-1", "clamped:1", "clamped:-1", f"missing:{m}",
             f"repeated:{m}", f"twice:{m}", f"swapped:{m},{m + 1}", f"swapped:0,{n - 1}")
    return [f"layer_order={w}" for w in words]


def _layer(model: Model, h: Hypothesis) -> int | None:
    """The layer nearest to the middle in which the idea changes something; None for one of the whole model."""
    if not h.layered:
        return None
    middle = model.n_layers // 2
    for i in sorted(range(model.n_layers), key=lambda i: abs(i - middle)):
        try:
            if Change(h.text, i).on(model) is not None:
                return i
        except UsageError:
            continue
    return None


@torch.no_grad()
def planted(net: Network, base: Tensor, limit: float, some: Sequence[Seed], say: Say) -> list[Plant]:
    """Each seed made in the network whose own logits are `base` (T, V)."""
    columns = torch.arange(0, base.shape[1], max(1, base.shape[1] // COLUMNS))
    out = []
    for n, seed in enumerate(some, 1):
        say(f"planting {n:,} of {len(some):,}: {seed.name}")
        got = net.logits([seed.change], net.tokens)
        if got is None:
            out.append(Plant(seed))
            continue
        rows, nats = _rows(base, got)
        over = (rows > limit).nonzero()
        tokens = int(over[0]) + 1 if len(over) else None
        if tokens is not None and seed.idea.whole:
            tokens = _beginning(net, base, limit, seed.change)
        out.append(Plant(seed, float(rows.max()), nats, tokens, torch.cat([rows.float(), got[-1, columns]])))
    return out


def _rows(base: Tensor, got: Tensor) -> tuple[Tensor, float | None]:
    """((T,) the largest |dlogit| of each token, the largest KL in nats); infinite, and None, where not finite."""
    rows, nats = [], []
    for _, (x, y) in blocks(base, got):
        d = (x - y).abs().amax(-1)
        rows.append(torch.where(d.isfinite(), d, torch.inf))
        nats.append(kl(x.log_softmax(-1), y.log_softmax(-1)).max())
    most = torch.stack(nats).max()
    return torch.cat(rows), float(most) if bool(most.isfinite()) else None


def _beginning(net: Network, base: Tensor, limit: float, change: Change) -> int:
    """The shortest beginning that shows a change under which tokens see later ones: each is run anew."""
    def shows(n: int) -> bool:
        got = net.logits([change], n)
        return got is not None and bool(_rows(base[:n], got)[0].max() > limit)

    low, high = 0, 1
    while high < net.tokens and not shows(high):
        low, high = high, min(2 * high, net.tokens)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shows(middle) else (middle, high)
    return high


def shows(model: Model, plant: Plant, tokens: int, bar: Floor) -> str:
    """What might show a mistake that `tokens` tokens do not, in words."""
    need, name = _needs(model, plant.seed.change), plant.seed.idea.about.name
    room = min((n for n in (positions(model), model.context.usable) if n is not None), default=None)
    if need is not None and room is not None and need > room:
        return f"no text: it acts from {need:,} tokens on, and positions end at {room:,}"
    if need is not None and need > tokens:
        return f"a text of {need:,} tokens or more"
    assert plant.far is not None
    if plant.far == 0:
        if name == "weights":
            return "no text: the weights are stored no finer than that"
        if name in ("norm_bias", "bias_dropped", "norm_weight", "constant", "copied"):
            return "no text: the weights hold these values already"
        return "no text that is known: the logits stay what they are bit for bit"
    share = f"{plant.far / bar.limit:.0%} of the limit here"
    if plant.far <= ITSELF * bar.max_abs_dlogit:
        return f"perhaps none: no more than arithmetic itself, {share}"
    longer = plant.seed.idea.about.blind and (room is None or room > tokens)
    return f"perhaps a {'longer' if longer else 'different'} text: {share}"


def _needs(model: Model, change: Change) -> int | None:
    """The shortest text on which a change of a window or of rounded positions can act; None for other changes."""
    name, _, value = change.text.partition("=")
    if name == "rope_table" and value in EXACT:
        return EXACT[value] + 1  # tokens count from 1, positions from 0
    made = change.on(model) if name == "window" else None
    if made is None:
        return None
    both = [[getattr(x.attn, "window", None) for x in pair] for pair in zip(model.layers, made.layers, strict=True)]
    return min((min(w for w in pair if w is not None) + 1 for pair in both if pair[0] != pair[1]), default=None)
