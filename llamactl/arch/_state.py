"""Name tables of the mixers with a fixed state, and what their families read alike."""

from __future__ import annotations

from collections.abc import Mapping

from llamactl.arch._names import modules
from llamactl.spec.config import Config
from llamactl.spec.model import Context
from llamactl.spec.naming import Rule, rule
from llamactl.spec.state import Mamba2

MAMBA = {"in": "in_proj", "conv": "conv1d", "x": "x_proj", "dt": "dt_proj", "out": "out_proj"}
MAMBA_VECTORS = ("A_log", "D")
MAMBA2 = {"in": "in_proj", "conv": "conv1d", "norm": "norm", "out": "out_proj"}
MAMBA2_VECTORS = ("A_log", "D", "dt_bias")
ENDLESS = Context(trained=None, usable=None, why="the state has one size however long the text")


def mixer(stored: str, table: Mapping[str, str], vectors: tuple[str, ...] = ()) -> tuple[Rule, ...]:
    """The modules of each layer's mixer below `stored`, and the tensors it holds without a module."""
    return (*modules({f"layers.{{i}}.state.{c}": stored + s for c, s in table.items()}),
            *(rule(stored + v, f"layers.{{i}}.state.{v}") for v in vectors))


def dt_rank(cfg: Config, hidden: int, key: str) -> int:
    """Rank of the step-size projection: a number, or "auto" for hidden / 16 rounded up."""
    if cfg.data.get(key) in (None, "auto"):
        rank = -(-hidden // 16)
        cfg.reads.append((cfg.prefix + key, rank, "= hidden_size / 16, rounded up"))
        return rank
    value: int = cfg.integer(key)
    return value


def inner(cfg: Config, hidden: int, key: str, *beside: str) -> int:
    """Channels: `key` x hidden. A file that writes another number under `beside` is refused."""
    channels = int(cfg.number(key, lo=1e-3, hi=64) * hidden)
    for other in beside:
        if cfg.integer(other, default=channels) != channels:
            raise cfg.refuse("config-conflict", f"{cfg.prefix}{other} is {cfg.data[other]:,}, but {key} makes "
                             f"{channels:,} channels")
    return channels


def grouped(cfg: Config, state: Mamba2) -> Mamba2:
    """`state`, refused where its groups do not share the heads evenly."""
    if state.heads % state.groups:
        raise cfg.refuse("config-heads", f"{state.heads} state-space heads cannot share {state.groups} groups evenly")
    return state
