"""What Gemma 3n and Gemma 4 share: embeddings for every layer, and layers that read an earlier layer's K and V."""

from __future__ import annotations

from collections.abc import Sequence

from llamactl.arch._names import blocks, modules
from llamactl.spec.config import LAYERS, VOCAB, Config
from llamactl.spec.model import NotCounted, Section
from llamactl.spec.parts import Attention, Leaf, Leaves, Norm, linear, under

PER_LAYER = (
    *modules({"per_layer.embed": "model.embed_tokens_per_layer",
              "per_layer.projection": "model.per_layer_model_projection",
              "per_layer.norm": "model.per_layer_projection_norm"}),
    *blocks({"per_layer.gate": "per_layer_input_gate", "per_layer.up": "per_layer_projection",
             "per_layer.norm": "post_per_layer_input_norm"}),
)


def per_layer_section(cfg: Config, hidden: int, width: int, layers: int, eps: float) -> Section:
    """A second table with `width` numbers of each token for every layer, and their share from the first embedding."""
    rows = cfg.integer("vocab_size_per_layer_input", hi=VOCAB)
    return Section(name="per_layer", leaves=tuple(under("per_layer", (
        Leaf("embed.weight", (rows, layers * width), "token_embedding"),
        *linear("projection", layers * width, hidden, "other"), *Norm(dim=width, eps=eps).leaves("norm"),
    ))))


def per_layer_leaves(hidden: int, width: int, eps: float) -> Leaves:
    """A layer's own part: up(act(gate(x)) * its embedding), normed and added."""
    return tuple(under("per_layer", (*linear("gate", width, hidden, "other"), *linear("up", hidden, width, "other"),
                                     *Norm(dim=hidden, eps=eps).leaves("norm"))))


def shared(cfg: Config, types: Sequence[str], default: int) -> tuple[bool, ...]:
    """Which layers read another's K and V: the last num_kv_shared_layers, each kind from the last of its kind before."""
    n = cfg.integer("num_kv_shared_layers", lo=0, hi=LAYERS, default=default)
    first = len(types) - n
    if first < 1 or set(types[:first]) != set(types):
        raise cfg.refuse("config-layers", f"{n} of {len(types)} layers share K and V, but not every kind of layer stands "
                         "before them")
    return tuple(i >= first for i in range(len(types)))


def idle(layers: Sequence[Attention]) -> list[NotCounted]:
    """The matrices that published files still hold for layers which share K and V; nothing reads them."""
    n = sum(2 * a.n_kv_heads * a.head_dim * (a.hidden + a.qkv_bias) // (2 if a.v_from_k else 1) + a.head_dim
            for a in layers if a.shares_kv)
    return [NotCounted(what="k, v and k norm of layers that share K and V", params=n,
                       why="published files may hold them, and no code reads them")] if n else []
