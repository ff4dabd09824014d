"""Parameters by component, by layer, active per token, and their bytes. Counted by multiplication per distinct part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from llamactl.analysis.dtypes import named, silent, weights
from llamactl.analysis.layers import ranges
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import Leaf, MoE

ATTENTION = ("q", "k", "v", "o", "other")
FEED_FORWARD = ("gate", "up", "down", "router", "routed_experts", "shared_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Parameters by role; the values sum to `total` of the report. Tied weights count once, as the embedding.

    attention and feed_forward hold their projections with biases; norms holds every norm, also on q, k and latents.
    """

    token_embedding: int
    position_embedding: int
    attention: dict[str, int]
    feed_forward: dict[str, int]
    norms: int
    state_space: int
    lm_head: int
    vision: int
    projector: int
    other: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Active:
    """Parameters one token meets: all but the routed experts that the router passes over. Each convention is named.

    all: everything else, the input embedding too. minus_input_embedding: without the token table.
    minus_embedding_and_head: without the table and the output projection (the same number where they are tied).
    """

    all: int
    minus_input_embedding: int
    minus_embedding_and_head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Equal layers: their indices as closed ranges, and the parameters of one of them."""

    layers: int
    ranges: tuple[tuple[int, int], ...]
    params: int
    attention: int
    feed_forward: int
    norms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamsReport:
    """What `llamactl params` says of one model. Counts are exact integers; shares are fractions of 1.

    text_total: without vision tower and projector. blocks_total: the decoder blocks alone, without the final norm.
    ffn_share_blocks = feed_forward / blocks_total, ffn_share_model = feed_forward / text_total.
    biases: how many of the parameters are bias vectors. weights_bytes: total at `dtype`, plain, without any
    quantisation that the files may have; of a GGUF file, what its tensors take unless a dtype is asked for.
    """

    id: str
    family: str
    model_type: str
    total: int
    text_total: int
    tied: bool
    tied_why: str
    layers: int
    blocks_total: int
    components: Components
    ffn_share_blocks: float
    ffn_share_model: float
    biases: int
    active: Active | None
    dtype: str
    dtype_from: str
    weights_bytes: int
    weights_at: dict[str, int]
    quantization: str | None
    not_counted: tuple[dict[str, Any], ...]
    layer_groups: tuple[LayerGroup, ...]
    notes: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the names that schema 1 fixes."""
        return asdict(self)

    def _repr_html_(self) -> str:
        from llamactl.render import html

        return html("params", [self])


@lru_cache
def layer_roles(layer: Layer) -> Counter[str]:
    """Parameters of one block by role; "bias" counts bias vectors beside."""
    return _by_role(layer.leaves())


def _by_role(leaves: Iterable[Leaf]) -> Counter[str]:
    out: Counter[str] = Counter()
    for leaf in leaves:
        if leaf.kind == "param":
            out[leaf.role] += leaf.elements
            if leaf.path.endswith(".bias"):
                out["bias"] += leaf.elements
    return out


def params(model: Model, *, id: str | None = None, dtype: str | None = None) -> ParamsReport:
    """Count `model`. dtype: the one to cost weights in, instead of the config's.

    Raises UsageError for an unknown dtype.
    """
    blocks: Counter[str] = Counter()
    groups: list[LayerGroup] = []
    inactive = 0
    for layer, n in model.distinct_layers():
        roles = layer_roles(layer)
        for role, count in roles.items():
            blocks[role] += n * count
        if isinstance(layer.mlp, MoE):
            routed = roles["feed_forward.routed_experts"]
            inactive += n * (routed - routed // layer.mlp.n_experts * layer.mlp.top_k)
        groups.append(_group(model, layer, roles))
    outer = _by_role(model.outer_leaves())
    every = blocks + outer
    biases = every.pop("bias", 0)
    blocks.pop("bias", 0)
    total = sum(every.values())
    components = _components(every)
    text_total = total - components.vision - components.projector
    blocks_total = sum(blocks.values())
    cost = weights(model, dtype)
    moe = any(isinstance(layer.mlp, MoE) for layer, _ in model.distinct_layers())
    return ParamsReport(
        id=id or model.model_type,
        family=model.family,
        model_type=model.model_type,
        total=total,
        text_total=text_total,
        tied=model.tied,
        tied_why=model.tied_why,
        layers=model.n_layers,
        blocks_total=blocks_total,
        components=components,
        ffn_share_blocks=components.feed_forward["total"] / blocks_total,
        ffn_share_model=components.feed_forward["total"] / text_total,
        biases=biases,
        active=_active(text_total - inactive, components) if moe else None,
        dtype=cost.dtype,
        dtype_from=cost.source,
        weights_bytes=cost.bytes,
        weights_at={d.name: d.bytes(total) for d in (named("fp32"), named("bf16"), named("int8"), named("int4"))},
        quantization=model.quantization,
        not_counted=_not_counted(model),
        layer_groups=tuple(groups),
        notes=silent(model, dtype),
    )


def _components(every: Counter[str]) -> Components:
    attention = {x: every[f"attention.{x}"] for x in ATTENTION}
    feed_forward = {x: every[f"feed_forward.{x}"] for x in FEED_FORWARD}
    for part in (attention, feed_forward):
        part["total"] = sum(part.values())
    known = {k: every[k] for k in ("token_embedding", "position_embedding", "norms", "state_space", "lm_head", "vision",
                                   "projector", "other")}
    components = Components(attention=attention, feed_forward=feed_forward, **known)
    # A role that no component takes in would be lost silently; refuse to go on instead.
    assert sum(known.values()) + attention["total"] + feed_forward["total"] == sum(every.values())
    return components


def _active(active: int, components: Components) -> Active:
    embedding, head = components.token_embedding, components.lm_head
    return Active(all=active, minus_input_embedding=active - embedding,
                  minus_embedding_and_head=active - embedding - head)


def _group(model: Model, layer: Layer, roles: Counter[str]) -> LayerGroup:
    where = ranges(i for i, other in enumerate(model.layers) if other is layer or other == layer)
    of = {name: sum(n for role, n in roles.items() if role.startswith(name))
          for name in ("attention", "feed_forward", "norms")}
    return LayerGroup(layers=sum(b - a + 1 for a, b in where), ranges=where,
                      params=sum(n for role, n in roles.items() if role != "bias"), **of)


def _not_counted(model: Model) -> tuple[dict[str, Any], ...]:
    out = [{"what": x.what, "params": x.params, "why": x.why} for x in model.not_counted]
    buffers = sum(n * leaf.elements for layer, n in model.distinct_layers() for leaf in layer.leaves()
                  if leaf.kind == "buffer")
    if buffers:
        out.append({"what": "router correction biases", "params": buffers,
                    "why": "stored in the checkpoint as buffers, not trained by gradient"})
    return tuple(out)
