"""Which edits `ablate` makes when none are named: one or two of each part, of those that any edit list knows."""

from __future__ import annotations

from llamactl.errors import UsageError
from llamactl.spec.edits import EDITS, apply
from llamactl.spec.mistaken import TRIES
from llamactl.spec.mistakes import MISTAKES
from llamactl.spec.model import Model

ABLATIONS = (
    "gate=false", "mlp=gate-only", "activation=gelu", "activation=silu", "activation=relu",
    "kv_order=tile", "n_kv_heads=1", "positions=none", "rope_pairs=adjacent", "rope_pairs=half", "rope_theta=10000",
    "rope_theta=100000", "rope_scaling=none", "window=128", "mask=none", "attn_softcap=none", "logits_softcap=none",
    "norm_kind=layer", "norm_kind=rms", "norm_offset=off", "bias_dropped=qkv", "parallel=true",
    "embed_scale=none", "weights=int8", "weights=int4",
)


def chosen(model: Model) -> tuple[str, ...]:
    """Those of ABLATIONS that have a meaning for `model` and change it."""
    out = []
    for text in ABLATIONS:
        try:
            edited = apply(model, text)
        except UsageError:
            continue
        if not same(model, edited):
            out.append(text)
    return tuple(out)


def same(a: Model, b: Model) -> bool:
    """Whether two descriptions compute the same; what they say of files and of training does not count."""
    parts = ("embed", "layers", "norm", "head", "positions", "embed_norm", "context", "taken")
    return all(getattr(a, x) == getattr(b, x) for x in parts)


def words(model: Model, text: str) -> str | None:
    """What an edit does, in plain words; None where only its name says it."""
    key, eq, value = text.partition("=")
    key = key.strip().replace("-", "_").lower()
    for e in (*EDITS, *MISTAKES):
        flags = dict(e.flags)
        if key in (e.name, *e.words) or (not eq and key in flags):
            value = value.strip() if eq else flags[key]
            says = [t.says for t in TRIES if t.name == e.name and value in t.values(model)]
            return says[0].replace("{}", value) if says else None
    return None
