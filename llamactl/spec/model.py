"""A decoder as one frozen tree, and the two ways to read it: by multiplication (counts) and tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from llamactl.spec.parts import (
    Attention,
    Cache,
    Embedding,
    FeedForward,
    Head,
    Leaf,
    Leaves,
    Mixer,
    Norm,
    Positions,
    under,
)

if TYPE_CHECKING:  # only hybrids and wrong ports need these, and start-up counts milliseconds
    from llamactl.spec.slips import Slips
    from llamactl.spec.state import StateMixer
    from llamactl.spec.taken import Taken


class Tensor(NamedTuple):
    """One tensor of a checkpoint under its canonical name, e.g. `layers.0.attn.q.weight` (out, in).

    template is the name with `{i}` for the layer and `{e}` for the expert or head; i and e are -1 where absent.
    """

    name: str
    template: str
    i: int
    e: int
    shape: tuple[int, ...]
    role: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One block. A norm that is None is not there; in a parallel block the MLP reads the attention's input.

    attn_norm and mlp_norm stand before their branch (pre-norm), attn_post_norm and mlp_post_norm after it.
    post_residual: the post norms act on the sum (the 2017 block), not on the branch (Gemma 2, OLMo 2).
    state: a mixer with a fixed state (Mamba, linear attention) instead of attention, or beside it. Hybrids have layers
    without attention, and some without a feed-forward. extra: tensors of one family's own, under canonical paths.
    residual_scale: factor on each branch before it is added (MiniCPM, Granite), None for 1.
    slips: what a wrong port computes here and no family does, None for nothing.
    """

    attn: Mixer | None
    mlp: FeedForward | None
    state: StateMixer | None = None
    extra: Leaves = ()
    attn_norm: Norm | None = None
    attn_post_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    parallel: bool = False
    post_residual: bool = False
    residual_scale: float | None = None
    slips: Slips | None = None

    @lru_cache  # noqa: B019  layers are values: few distinct ones
    def leaves(self) -> Leaves:
        out: list[Leaf] = []
        attn = "cross" if isinstance(self.attn, Attention) and self.attn.cross else "attn"
        for name, before, parts, after in (
            ("attn", self.attn_norm, {attn: self.attn, "state": self.state}, self.attn_post_norm),
            ("mlp", self.mlp_norm, {"mlp": self.mlp}, self.mlp_post_norm),
        ):
            if before:
                out += before.leaves(f"{name}_norm")
            for branch, part in parts.items():
                if part:
                    out += under(branch, part.leaves())
            if after:
                out += after.leaves(f"{name}_post_norm")
        return (*out, *self.extra)

    def caches(self) -> tuple[Cache, ...]:
        """What the layer keeps for each token; nothing where it has no attention."""
        return self.attn.caches() if self.attn else ()

    def state_elements(self) -> int:
        """What the layer keeps for each sequence, however long."""
        return self.state.state_elements() if self.state else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the checkpoint beside the decoder: a vision tower or a projector. Counted, not run."""

    name: str
    leaves: Leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class NotCounted:
    """What a checkpoint may hold that `total` leaves out; params is None where it cannot be known from the config."""

    what: str
    params: int | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Positions: `trained` before any stretching, `usable` after it; None where the architecture sets no limit."""

    trained: int | None
    usable: int | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A whole decoder.

    layers: one Layer per index, n_layers is their number. tied_why, dtype_why: what decided, for the reader.
    quantization: method named by the config, None for plain weights. window_engines: engines that cut the cache of
    windowed layers at the window (llama.cpp ignores the window of uniformly windowed families).
    dropout: the largest rate the config trains with. extra: tensors of one family's own outside the blocks.
    stored_bytes, stored_as: what one file's tensors take and their types by size, "Q4_1 + F32"; None if not read.
    taken: tensors that edits have read otherwise than stored. notes: (code, message) warnings of the reading.
    reads: (key, value, how) of every config value used.
    """

    family: str
    model_type: str
    hidden: int
    embed: Embedding
    layers: tuple[Layer, ...]
    norm: Norm | None
    head: Head
    tied_why: str
    context: Context
    positions: Positions | None = None
    embed_norm: Norm | None = None
    extra: Leaves = ()
    sections: tuple[Section, ...] = ()
    not_counted: tuple[NotCounted, ...] = ()
    dtype: str | None = None
    quantization: str | None = None
    dropout: float = 0.0
    stored_bytes: int | None = None
    stored_as: str | None = None
    window_engines: tuple[str, ...] = ("arch", "hf", "vllm", "llama.cpp")
    taken: tuple[tuple[Taken, ...], ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    reads: tuple[tuple[str, object, str], ...] = field(default=(), compare=False, repr=False)

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def tied(self) -> bool:
        return self.head.tied

    def distinct_layers(self) -> list[tuple[Layer, int]]:
        """Each different layer once, with how often it stands in the stack; by first appearance."""
        times = Counter(map(id, self.layers))  # most layers are one object, and a layer's hash walks the whole of it
        objects = {id(x): x for x in self.layers}
        if len(objects) == 1:
            return [(self.layers[0], self.n_layers)]
        found: Counter[Layer] = Counter()
        for key, layer in objects.items():
            found[layer] += times[key]
        return list(found.items())

    def outer_leaves(self) -> Iterator[Leaf]:
        """Leaves outside the blocks: embeddings, final norm, head, sections."""
        yield from under("embed", self.embed.leaves())
        if self.positions:
            yield from under("pos_embed", self.positions.leaves())
        if self.embed_norm:
            yield from self.embed_norm.leaves("embed_norm")
        if self.norm:
            yield from self.norm.leaves("norm")
        yield from self.extra
        yield from under("head", self.head.leaves())
        for section in self.sections:
            yield from section.leaves

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the checkpoint, one by one, for conversion and verification; never used for counting."""
        for leaf in self.outer_leaves():
            yield from _expand(leaf, leaf.path, -1, -1)
        for i, layer in enumerate(self.layers):
            for leaf in layer.leaves():
                yield from _expand(leaf, "layers.{i}." + leaf.path, i, -1)

    def total(self) -> int:
        """Parameters: tied weights once, buffers not counted."""
        outer = sum(leaf.elements for leaf in self.outer_leaves() if leaf.kind == "param")
        return outer + sum(n * layer_params(layer) for layer, n in self.distinct_layers())


@lru_cache
def layer_params(layer: Layer) -> int:
    """Parameters of one block; computed once per distinct layer."""
    return sum(leaf.elements for leaf in layer.leaves() if leaf.kind == "param")


def _expand(leaf: Leaf, template: str, i: int, e: int) -> Iterator[Tensor]:
    """A leaf as its tensors: `{i}` runs over a tower's layers, `{e}` over experts or heads."""
    if i < 0 and "{i}" in template:
        for n in range(leaf.copies):
            yield Tensor(template.replace("{i}", str(n)), template, n, -1, leaf.shape, leaf.role, leaf.kind)
        return
    name = template.replace("{i}", str(i))
    if "{e}" not in template:
        yield Tensor(name, template, i, e, leaf.shape, leaf.role, leaf.kind)
        return
    for n in range(leaf.copies):
        yield Tensor(name.replace("{e}", str(n)), template, i, n, leaf.shape, leaf.role, leaf.kind)
