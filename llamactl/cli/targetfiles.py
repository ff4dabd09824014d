"""The outputs of a target in the order of its files: by layers, by tensor-parallel rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamactl.errors import UsageError
from llamactl.spec.model import Model

if TYPE_CHECKING:
    from llamactl.checkpoint.plan import Output, Planner


def by_layers(planner: Planner) -> list[Output]:
    """Embeddings, the layers, what comes after them."""
    from llamactl.spec.naming import stored_tensors

    stored = list(stored_tensors(planner.target.model, planner.target.rules))
    first = [s for s in stored if s.of[0].i < 0 and "embed" in s.of[0].template]
    layers = [s for s in stored if s.of[0].template.startswith("layers.")]
    done = {s.name for s in (*first, *layers)}
    return [planner.output(s) for s in (*first, *layers, *(s for s in stored if s.name not in done))]


def head(planner: Planner) -> tuple[str, str]:
    """(the layout's name of the head, that of the token embedding)."""
    at = {template: r.stored for r in planner.target.rules for template in r.of}
    return at["head.weight"], at["embed.weight"]


def ranks(planner: Planner, count: int) -> list[list[Output]]:
    """The outputs of each of Meta's tensor-parallel files: slices along the axis that its code gathers by."""
    from llamactl.arch._metaranks import rank_axes
    from llamactl.checkpoint.plan import Slice
    from llamactl.spec.naming import stored_tensors

    model = planner.target.model
    axes = rank_axes(model, planner.target.rules)
    out: list[list[Output]] = []
    for n in range(count):
        here: list[Output] = []
        for s in stored_tensors(model, planner.target.rules):
            axis = axes.get(s.rule.stored) if count > 1 else None
            if axis is None:
                here.append(planner.output(s))
                continue
            if s.shape[axis] % count or (s.rule.groups == "kv_heads" and s.rule.ops and _kv(model) % count):
                raise UsageError("ranks", f"{s.name} {list(s.shape)} cannot be shared out among {count} ranks evenly")
            size = s.shape[axis] // count
            rows, cols = s.shape[0], s.shape[1] if len(s.shape) > 1 else 1
            if axis == 0:
                part = Slice(n * size, 0, size, cols, (size, *s.shape[1:]))
            else:
                part = Slice(0, n * size, rows, size, (rows, size))
            here.append(planner.output(s, part))
        out.append(here)
    return out


def _kv(model: Model) -> int:
    from llamactl.spec.parts import Attention

    attn = model.layers[0].attn
    return attn.n_kv_heads if isinstance(attn, Attention) else 1
