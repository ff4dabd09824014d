"""A part's arithmetic as it stands in this model: the factors, caps and sinks that a formula for all models leaves out.

Source: the modelling code that llamactl.net is tested against.
"""

from __future__ import annotations

from llamactl.spec.features import other_scale
from llamactl.spec.latent import LatentAttention
from llamactl.spec.model import Model
from llamactl.spec.parts import Attention


def embedding(model: Model) -> str:
    """Where the stream starts."""
    return _times(model.embed.scale, "E[token]")


def logits(model: Model) -> str:
    """Where it ends."""
    h = model.head
    matrix = "E" if h.tied else "W"
    out = f"({matrix} / row lengths) x" if h.unit_rows else f"{matrix} x"
    if h.bias:
        out = f"({out} + b)" if h.scale is not None and h.scale != 1 else f"{out} + b"
    return _capped(h.softcap, _times(h.scale, out))


def softmax(a: Attention | LatentAttention) -> str:
    """The weights with which a query reads the values."""
    scale, width = other_scale(a), "d_qk" if isinstance(a, LatentAttention) else "d_head"
    scores = f"q k^T / sqrt({width})" if scale is None else _times(scale, "q k^T")
    if isinstance(a, LatentAttention):
        return f"softmax({scores})"
    scores = _capped(a.softcap, scores)
    return f"softmax([{scores}, sink])[:-1]" if a.sinks else f"softmax({scores})"


def _times(factor: float | None, what: str) -> str:
    return what if factor is None or factor == 1 else f"{factor:.6g} {what}"


def _capped(cap: float | None, what: str) -> str:
    if cap is None:
        return what
    one = f"({what})" if " / " in what or " + " in what else what
    return f"{cap:g} tanh({one} / {cap:g})"
