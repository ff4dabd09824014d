"""What Gemma 3n and Gemma 4 share: embeddings for every layer, and layers that read an earlier layer's K and V."""

from __future__ import annotations

from collections.abc import Sequence

from llamactl.arch._names import blocks, modules
from llamactl.spec.config import COUNT, LAYERS, VOCAB, Config
from llamactl.spec.model import NotCounted, Section
from llamactl.spec.naming import rule
from llamactl.spec.parts import Attention, Leaf, Leaves, Norm, linear, under

PER_LAYER = (
    *modules({"per_layer.embed": "model.embed_tokens_per_layer",
              "per_layer.projection": "model.per_layer_model_projection",
              "per_layer.norm": "model.per_layer_projection_norm"}),
    *blocks({"per_layer.gate": "per_layer_input_gate", "per_layer.up": "per_layer_projection",
             "per_layer.norm": "post_per_layer_input_norm"}),
)


ALTUP = (
    *modules({"altup.project.{i}": "model.altup_projections.{i}",
              "altup.unproject.{i}": "model.altup_unembed_projections.{i}"}),
    *blocks({"altup.norm": "altup.router_norm", "altup.router": "altup.modality_router",
             "altup.predict": "altup.prediction_coefs", "altup.correct": "altup.correction_coefs",
             "laurel.left": "laurel.linear_left", "laurel.right": "laurel.linear_right",
             "laurel.norm": "laurel.post_laurel_norm"}),
    rule("model.layers.{i}.altup.correct_output_scale", "layers.{i}.altup.output.scale"),
)
EMBEDDERS = modules({f"projector.{kind}.{c}": f"model.embed_{kind}.{s}" for kind in ("vision", "audio") for c, s in {
    "embed": "embedding", "hard_norm": "hard_embedding_norm", "projection": "embedding_projection",
    "soft_norm": "soft_embedding_norm"}.items()})


def altup_section(cfg: Config, hidden: int) -> Section:
    """The other streams start as projections of the embedding and are projected back at the end."""
    n = streams(cfg) - 1
    return Section(name="altup", leaves=tuple(
        Leaf(f"altup.{x}.{{i}}.weight", (hidden, hidden), "other", copies=n) for x in ("project", "unproject")))


def streams(cfg: Config) -> int:
    """How many streams run side by side."""
    n: int = cfg.integer("altup_num_inputs", lo=2, hi=COUNT)
    return n


def altup_leaves(cfg: Config, hidden: int, eps: float) -> Leaves:
    """A layer's mixing of the streams: a router, coefficients to predict and to correct, a scale of what comes out."""
    n = streams(cfg)
    return tuple(under("altup", (
        *Norm(dim=hidden, eps=eps).leaves("norm"), *linear("router", n, hidden, "other"),
        *linear("predict", n * n, n, "other"), *linear("correct", n, n, "other"),
        Leaf("output.scale", (hidden,), "other"),
    )))


def laurel_leaves(cfg: Config, hidden: int, eps: float) -> Leaves:
    """A low-rank detour beside attention: x + norm(right(left(x)))."""
    rank = cfg.integer("laurel_rank")
    return tuple(under("laurel", (*linear("left", rank, hidden, "other"), *linear("right", hidden, rank, "other"),
                                  *Norm(dim=hidden, eps=eps).leaves("norm"))))


def embedder(cfg: Config, text_hidden: int) -> tuple[Section, ...]:
    """Each tower's own small vocabulary and the matrix into the text's width, where the file has the tower's config."""
    leaves: list[Leaf] = []
    for kind in ("vision", "audio"):
        part = cfg.section(f"{kind}_config")
        if part is not None:
            width, norm = part.integer("hidden_size"), Norm(dim=part.integer("hidden_size"), eps=1e-6)
            leaves += under(f"projector.{kind}", (
                Leaf("embed.weight", (part.integer("vocab_size", hi=VOCAB), width), "projector"),
                *norm.leaves("hard_norm"), *linear("projection", text_hidden, width, "projector"),
                *norm.leaves("soft_norm")), role="projector")
    return (Section(name="projector", leaves=tuple(leaves)),) if leaves else ()


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
    """Which layers read another's K and V: the last num_kv_shared_layers, each kind from the last of it."""
    n = cfg.integer("num_kv_shared_layers", lo=0, hi=LAYERS, default=default)
    first = len(types) - n
    if first < 1 or set(types[:first]) != set(types):
        raise cfg.refuse("config-layers", f"{n} of {len(types)} layers share K and V, but not every kind of layer "
                         "stands before them")
    return tuple(i >= first for i in range(len(types)))


def idle(layers: Sequence[Attention]) -> list[NotCounted]:
    """The matrices that published files still hold for layers which share K and V; nothing reads them."""
    n = sum(2 * a.n_kv_heads * a.head_dim * (a.hidden + a.qkv_bias) // (2 if a.v_from_k else 1) + a.head_dim
            for a in layers if a.shares_kv)
    return [NotCounted(what="k, v and k norm of layers that share K and V", params=n,
                       why="published files may hold them, and no code reads them")] if n else []


def widths(cfg: Config, n: int) -> tuple[int, ...]:
    """intermediate_size of each layer: a list, or one number for all."""
    given = cfg.integers("intermediate_size", lo=1, default=None) if isinstance(
        cfg.data.get("intermediate_size"), list) else (cfg.integer("intermediate_size"),) * n
    if len(given) != n:
        raise cfg.refuse("config-layers", f"intermediate_size has {len(given)} entries for {n} layers")
    return tuple(given)
