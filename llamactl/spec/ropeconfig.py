"""RoPE as configs spell it: rope_theta, rotary_emb_base, rope_scaling, rope_parameters (also by layer type)."""

from __future__ import annotations

from typing import Any

from llamactl.spec.config import POSITIONS, Config, kind_of
from llamactl.spec.model import Context
from llamactl.spec.rope import SCHEMES, Rope, RopeScaling

_ALIASES = {"su": "longrope", "mrope": "default", "none": "default"}


def rope_block(cfg: Config, layer_type: str | None = None) -> Config | None:
    """The object that holds the scaling: rope_parameters (its part for `layer_type` if split so) or rope_scaling."""
    for key in ("rope_parameters", "rope_scaling"):
        value = cfg.data.get(key)
        if value is None or value == {}:
            continue
        block = cfg.section(key)
        assert block is not None
        nested = [k for k, v in block.data.items() if isinstance(v, dict)]
        if nested:
            if layer_type is None:
                raise cfg.refuse("config-rope", f"{block.prefix[:-1]} is split by layer type ({', '.join(nested)}), "
                                 "but this family has one rotation")
            return block.section(layer_type)
        return block
    return None


def read_theta(cfg: Config, default: float, block: Config | None) -> float:
    """The base: in the block (transformers 5), else at the top level, else the family's own default."""
    if block is not None and block.data.get("rope_theta") is not None:
        theta: float = block.number("rope_theta", lo=1e-6)
        return theta
    value: float = cfg.number("rope_theta", "rotary_emb_base", default=default, lo=1e-6)
    return value


def partial_factor(cfg: Config, default: float, *keys: str) -> float:
    """The share of each head that rotates: partial_rotary_factor, rotary_pct, also inside rope_parameters."""
    block = rope_block(cfg)
    if block is not None and block.data.get("partial_rotary_factor") is not None:
        factor: float = block.number("partial_rotary_factor", hi=1.0)
        return factor
    value: float = cfg.number(*(keys or ("partial_rotary_factor",)), default=default, hi=1.0)
    return value


def read_rope(
    cfg: Config,
    dim: int,
    *,
    theta: float = 10000.0,
    layer_type: str | None = None,
    pairs: str = "half",
) -> Rope:
    """The rotation of `dim` dimensions as the config has it. theta: the family's own default base."""
    block = rope_block(cfg, layer_type)
    return Rope(dim=dim, theta=read_theta(cfg, theta, block), scaling=read_scaling(cfg, block, dim), pairs=pairs)


def read_scaling(cfg: Config, block: Config | None, dim: int) -> RopeScaling | None:
    """The stretching, None for none. An unknown scheme is refused."""
    if block is None:
        return None
    word = block.get("rope_type", "type", default="default") if _same_type(block) else block.data["rope_type"]
    kind = _ALIASES.get(word, word) if isinstance(word, str) else word
    if kind not in SCHEMES:
        from difflib import get_close_matches

        near = get_close_matches(str(word), [*SCHEMES, *_ALIASES], 1)
        raise cfg.refuse(
            "config-rope", f"{block.prefix}rope_type is {kind_of(word)}, not a known scheme",
            f"did you mean {near[0]!r}?" if near else f"known: {', '.join(SCHEMES)}",
        )
    if kind == "default":
        if block.data.get("factor") is not None and not {"type", "rope_type"} & block.data.keys():
            raise cfg.refuse("config-rope", f"{block.prefix}factor stands there without a rope_type")
        return None
    original = block.integer("original_max_position_embeddings", hi=POSITIONS, default=None)
    if original is None:
        original = cfg.integer("original_max_position_embeddings", hi=POSITIONS, default=None)
    needs_factor = kind in ("linear", "dynamic", "yarn", "llama3")
    extra: dict[str, Any] = {}
    if kind == "llama3":
        extra = {
            "low_freq_factor": block.number("low_freq_factor"),
            "high_freq_factor": block.number("high_freq_factor"),
        }
        if original is None:
            raise cfg.refuse("config-missing", f"{block.prefix}original_max_position_embeddings is missing")
    elif kind == "yarn":
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0), ("mscale", None), ("mscale_all_dim", None)):
            extra[key] = block.number(key, default=default)
        extra["truncate"] = block.flag("truncate", default=True)
    elif kind == "longrope":
        extra = {name: _factors(block, f"{name}_factor", dim) for name in ("short", "long")}
    return RopeScaling(
        kind=kind,
        factor=block.number("factor", lo=1e-6) if needs_factor else block.number("factor", default=None),
        original=original,
        attention_factor=block.number("attention_factor", default=None),
        **extra,
    )


def _same_type(block: Config) -> bool:
    """False where both spellings of the scheme stand there and differ, as in files written twice: the newer wins."""
    a, b = block.data.get("rope_type"), block.data.get("type")
    return a is None or b is None or a == b


def _factors(block: Config, key: str, dim: int) -> tuple[float, ...]:
    value = block.get(key)
    if not isinstance(value, list) or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in value):
        raise block.refuse("config-type", f"{block.prefix}{key} is {kind_of(value)}, not a list of numbers")
    if len(value) != dim // 2:
        raise block.refuse("config-rope", f"{block.prefix}{key} has {len(value)} entries for {dim // 2} pairs")
    return tuple(float(x) for x in value)


def read_context(cfg: Config, rope: Rope | None, *, final: bool = False, default: int | None = None) -> Context:
    """Trained and usable positions.

    max_position_embeddings is the stretched length already for llama3 and longrope, and where it reaches the original
    length times the factor; other files keep the trained length there, and the factor multiplies. final: the family
    writes the stretched length whatever the scheme (Gemma 3). default: the family's own, where the file is silent.
    """
    limit = cfg.integer("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", hi=POSITIONS,
                    default=default)
    scaling = rope.scaling if rope else None
    if limit is None:
        return Context(trained=None, usable=None, why="the config names no length")
    if scaling is None or final:
        return Context(trained=limit, usable=limit, why="max_position_embeddings")
    trained = scaling.original or limit
    usable = round(trained * (scaling.factor or 1.0))
    if scaling.kind in ("llama3", "longrope") or limit >= usable:
        return Context(trained=trained, usable=limit, why=f"max_position_embeddings, stretched by {scaling.kind}")
    return Context(trained=trained, usable=usable, why=f"{trained:,} x {scaling.factor:g} ({scaling.kind})")
