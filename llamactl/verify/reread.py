"""What was done to a block's tensors, told from the other side's own tensors: the edits that make exactly these."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llamactl.errors import InputRefused
from llamactl.net.taken import Taking, touches
from llamactl.spec.mistakes import Hypothesis, in_layer
from llamactl.verify.network import Network
from llamactl.verify.tensors import same

DROPPED = ("bias_dropped", "norm_bias")  # edits that leave tensors out: a port that keeps their place has zeros there


@torch.no_grad()
def reread(net: Network, i: int, ideas: Sequence[Hypothesis]) -> list[str]:
    """Edits that together make layer i's tensors those of `net.others`, and `another=NAMES` of what none of them makes.

    An edit counts where every tensor that it touches there becomes the other's. [] where no tensor is another.
    """
    prefix = f"layers.{i}."
    left = {n.removeprefix(prefix) for n in net.others if n.startswith(prefix)}
    made: list[tuple[set[str], str]] = []
    for h in ideas if left else ():
        model = in_layer(net.model, h.text, i)
        if model is None:
            continue
        own = {leaf.path for leaf in net.model.layers[i].leaves()}
        if h.about.name in DROPPED:
            touched = own - {leaf.path for leaf in model.layers[i].leaves()}
            makes = touched <= left and not any(bool(net.others[prefix + n].any()) for n in touched)
        elif model.layers == net.model.layers and model.taken:
            touched = {n for n in own if touches(model.taken[-1], n, i)}
            makes = bool(touched & left) and _makes(net, Taking(net.source, model), prefix, touched)
        else:
            continue
        if touched and makes:
            made.append((touched & left, h.text))
    out = []
    for touched, text in sorted(made, key=lambda m: -len(m[0])):
        if touched <= left:
            left -= touched
            out.append(text)
    order = [leaf.path for leaf in net.model.layers[i].leaves()]
    return [*out, *([f"another={','.join(sorted(left, key=order.index))}"] if left else [])]


def _makes(net: Network, edited: Taking, prefix: str, touched: set[str]) -> bool:
    try:
        return all(same(edited.tensor(n).float(), (net.others[n] if n in net.others else net.source.tensor(n)).float())
                   for n in (prefix + t for t in sorted(touched)))
    except InputRefused:
        return False
