"""What Llama 4's config says of its attention and of the layers that are mixtures."""

from __future__ import annotations

from llamactl.spec.config import LAYERS, POSITIONS, Config
from llamactl.spec.parts import Norm


def unit_norm(cfg: Config, head_dim: int, eps: float) -> Norm | None:
    """The norm without weight on rotated q and k; use_qk_norm false leaves it out (Maverick)."""
    return Norm(dim=head_dim, eps=eps, weight=False) if cfg.flag("use_qk_norm", default=True) else None


def growth(cfg: Config) -> tuple[float, int, int] | None:
    """How queries grow with their position on layers without rotation (arXiv:2501.19399)."""
    if not cfg.flag("attn_temperature_tuning", default=True):
        return None
    return cfg.number("attn_scale", default=0.1), cfg.integer("floor_scale", hi=POSITIONS, default=8192), 1


def chunk_size(cfg: Config) -> int | None:
    """attention_chunk_size; null turns chunking off, absent means 8,192."""
    if "attention_chunk_size" in cfg.data and cfg.data["attention_chunk_size"] is None:
        return None
    value: int = cfg.integer("attention_chunk_size", hi=1 << 40, default=8192)
    return value


def moe_layers(cfg: Config, n: int) -> tuple[bool, ...]:
    """moe_layers lists them, else every interleave_moe_layer_step-th is one."""
    given = cfg.integers("moe_layers", hi=LAYERS, default=None)
    if given is not None:
        return tuple(i in set(given) for i in range(n))
    step = cfg.integer("interleave_moe_layer_step", hi=LAYERS, default=1)
    return tuple((i + 1) % step == 0 for i in range(n))
