"""The edits that lead from one Model to another, one at a time: what `evolve` walks and `verify` will search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from llamactl.errors import UsageError
from llamactl.spec.edits import apply
from llamactl.spec.features import diff, features, feed_forward
from llamactl.spec.features import positions as told
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import MLP, Attention, LearnedPositions, MoE, Norm, SinusoidalPositions

Wanted = Iterator[tuple[str, tuple[str, ...]]]  # titles and the edits behind them


class Step(NamedTuple):
    """edits: the texts that `edits.apply` takes; empty for the last step, which puts in what no edit describes."""

    title: str
    edits: tuple[str, ...]
    model: Model


def path(a: Model, b: Model) -> tuple[Step, ...]:
    """Steps from `a` to `b`: first the parts at a's size, then the sizes. The last model counts as b does.

    Edits that have no meaning for these models (a latent attention, experts) are not forced: they are gathered in a
    last step without edits, whose title names what it changes.
    """
    if not diff(a, b) and a.total() == b.total():
        return ()
    model, steps = a, []
    for title, edits in _wanted(a, b):
        changed = model
        try:
            for edit in edits:
                changed = apply(changed, edit)
        except UsageError:  # this edit has no meaning for this model
            continue
        if features(changed) != features(model) or changed.total() != model.total():
            model = changed
            steps.append(Step(title, edits, model))
    left = diff(model, b)
    if left or model.total() != b.total():
        title = "; ".join(f"{c.name} {c.after}" for c in left) or "what no edit describes"
        steps.append(Step(title, (), b))
    return tuple(steps)


def _wanted(a: Model, b: Model) -> Wanted:
    """Titles and edits in the order the lineage went: positions, norm, feed-forward, attention, biases, head, sizes."""
    x, y = b.layers[0], a.layers[0]
    yield from positions(a, b)
    yield from norms(a, b)
    yield from gate(a, b)
    if isinstance(x.attn, Attention) and isinstance(y.attn, Attention):
        shared = x.attn.n_heads // x.attn.n_kv_heads
        if y.attn.n_heads % shared == 0:
            yield f"{shared} query heads to a KV head", (f"n_kv_heads={y.attn.n_heads // shared}",)
    yield from biases(b)
    yield from head(b)
    yield from dropout(b)
    if isinstance(x.attn, Attention) and isinstance(y.attn, Attention):
        at = x.attn  # with KV heads for all query heads on the way, for those follow any number
        yield "width and heads", (f"hidden={b.hidden}", f"n_kv_heads={y.attn.n_heads}", f"n_heads={at.n_heads}",
                                  f"n_kv_heads={at.n_kv_heads}", f"head_dim={at.head_dim}")
    if isinstance(x.mlp, MLP) and feed_forward(a) != feed_forward(b):  # layers may differ, and this makes them alike
        yield "feed-forward width", (f"ffn={x.mlp.ffn}",)
    yield "layers", (f"n_layers={b.n_layers}",)
    if a.embed.vocab != b.embed.vocab:  # a head may have other rows than the table, which this edit would make alike
        yield "vocabulary", (f"vocab={b.embed.vocab}",)
    if b.context.usable:
        yield "context", (f"context={b.context.usable}",)
        yield from positions(a, b)  # a learned table could not be made where the first model names no context


def norms(a: Model, b: Model) -> Wanted:
    """b's kind of norm, where a has another."""
    some = _norm(b.layers[0])
    if some is not None and some != _norm(a.layers[0]):
        yield ("LayerNorm" if some.kind == "layer" else "RMSNorm"), (f"norm={some.kind}",)


def gate(a: Model, b: Model) -> Wanted:
    """b's gate and activation where a has others; of its experts, where it has those."""
    x, y = _feed_forward(b.layers[-1]), _feed_forward(a.layers[-1])
    if x is not None and y is not None:
        edits = {"gate": f"gate={str(x.gated).lower()}", "activation": f"activation={x.activation}"}
        other = [word for word in edits if changes(a, edits[word])]
        if other:
            yield " and ".join(other), tuple(edits[word] for word in other)


def biases(b: Model) -> Wanted:
    """b's biases, where its attention and feed-forward agree on having them."""
    at, ff = b.layers[-1].attn, _feed_forward(b.layers[-1])
    if ff is not None and isinstance(at, Attention) and ff.bias == at.qkv_bias == at.o_bias:
        yield "biases", (f"biases={str(ff.bias).lower()}",)


def head(b: Model) -> Wanted:
    """Whether the head is the embedding, as in b."""
    yield ("tied head" if b.tied else "untied head"), (f"tie={str(b.tied).lower()}",)


def dropout(b: Model) -> Wanted:
    """b's dropout."""
    yield "dropout", (f"dropout={b.dropout:g}",)


def positions(a: Model, b: Model) -> Wanted:
    """How positions enter b, where they enter a otherwise."""
    if told(a) == told(b):  # edits set all layers alike, which may be more than is wanted
        return
    first = b.layers[0].attn
    if isinstance(b.positions, LearnedPositions):
        yield "learned positions", ("positions=learned",)
    elif isinstance(b.positions, SinusoidalPositions):
        yield "sinusoidal positions", ("positions=sinusoidal",)
    elif isinstance(first, Attention) and first.rope:
        edits = ("positions=rope", f"rope_theta={first.rope.theta!r}")
        if _base(a) != _base(b) or _positions_after(a, edits) == told(b):  # else the layers that have none differ
            yield f"RoPE, base {first.rope.theta:,.10g}", edits
    elif isinstance(first, Attention) and first.alibi:
        yield "ALiBi", ("positions=alibi",)


def changes(model: Model, edit: str) -> bool:
    """Whether an edit can be made and makes another model."""
    try:
        return apply(model, edit) != model
    except UsageError:
        return False


def _base(model: Model) -> float | None:
    at = model.layers[0].attn
    return at.rope.theta if isinstance(at, Attention) and at.rope else None


def _positions_after(model: Model, edits: tuple[str, ...]) -> str | None:
    try:
        for edit in edits:
            model = apply(model, edit)
    except UsageError:
        return None
    return told(model)


def _feed_forward(layer: Layer) -> MLP | None:
    """The dense feed-forward, or one expert of a mixture."""
    return layer.mlp.expert if isinstance(layer.mlp, MoE) else layer.mlp


def _norm(layer: Layer) -> Norm | None:
    return layer.attn_norm or layer.attn_post_norm
