"""The functions behind edits of which tensor is read, and how, that wrong loaders make; pure, Model -> Model."""

from __future__ import annotations

from dataclasses import replace

from llamactl.spec.changes import impossible
from llamactl.spec.model import Model
from llamactl.spec.parts import MLP, Attention
from llamactl.spec.taken import Taken, take

_ORDERS = ("gu", "ug", "interleaved", "per_head", "per_lane")
LINEAR = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Canonical path in a layer (or whole, outside them) -> shape, of the first layer that has it."""
    out: dict[str, tuple[int, ...]] = {}
    for layer, _ in model.distinct_layers():
        for leaf in layer.leaves():
            out.setdefault(leaf.path, leaf.shape)
    for leaf in model.outer_leaves():
        out.setdefault(leaf.path, leaf.shape)
    return out


def there(model: Model, path: str) -> tuple[int, ...]:
    """The shape of a tensor. UsageError where the model has none of that name."""
    found = shapes(model)
    if path not in found:
        raise impossible(f"this model has no tensor {path!r}")
    return found[path]


def transposed(model: Model, name: str) -> Model:
    """A square matrix read (in, out)."""
    shape = there(model, f"{name}.weight")
    if len(shape) != 2 or shape[0] != shape[1]:
        raise impossible(f"{name} is {shape}, not square: the other orientation does not load")
    return take(model, Taken(f"{name}.weight", "transposed"))


def swapped(model: Model, text: str) -> Model:
    """Two tensors of one shape in each other's place, with their biases: "mlp.gate,mlp.up"."""
    a, _, b = text.partition(",")
    if there(model, f"{a}.weight") != there(model, f"{b}.weight"):
        raise impossible(f"{a} and {b} differ in shape")
    new = []
    for leaf in ("weight", "bias"):
        if f"{a}.{leaf}" in shapes(model):
            new.append(Taken(f"{a}.{leaf}", "swap", f"{b}.{leaf}"))
    return take(model, *new)


def copied(model: Model, text: str) -> Model:
    """"attn.v<attn.k": one tensor read in place of another of its shape."""
    a, _, b = text.partition("<")
    if there(model, f"{a}.weight") != there(model, f"{b}.weight"):
        raise impossible(f"{a} and {b} differ in shape")
    return take(model, *(Taken(f"{a}.{leaf}", "from", f"{b}.{leaf}") for leaf in ("weight", "bias")
                         if f"{a}.{leaf}" in shapes(model)))


def fused(model: Model, text: str) -> Model:
    """WRITTEN>READ: orders of q, k, v ("qkv>kqv", "qkv>per_head", "per_head>qkv") or of gate, up ("gu>interleaved")."""
    orders = text.split(">")
    if len(orders) != 2 or not all(x in _ORDERS or sorted(x) == ["k", "q", "v"] for x in orders):
        raise impossible(f"{text!r} is not WRITTEN>READ of orders such as qkv, per_head, gu, interleaved")
    names = ("mlp.gate", "mlp.up") if {"gu", "ug"} & set(orders) else ("attn.q", "attn.k", "attn.v")
    for name in names:
        there(model, f"{name}.weight")
    return take(model, *(Taken(f"{n}.{leaf}", "fused", text) for n in names for leaf in ("weight", "bias")
                         if f"{n}.{leaf}" in shapes(model)))


def heads(model: Model, text: str) -> Model:
    """NAME:reversed or NAME:rolled: whole heads' rows in another order (of o: columns)."""
    name, _, how = text.partition(":")
    there(model, f"{name}.weight")
    return take(model, Taken(f"{name}.weight", "heads", how), Taken(f"{name}.bias", "heads", how))


def rounded(model: Model, text: str) -> Model:
    """DTYPE[:PLACE]: every matrix of the blocks, embedding and head rounded and widened again; or one place."""
    dtype, _, place = text.partition(":")
    return take(model, Taken(place or "*", "round", dtype))


def constant(model: Model, text: str) -> Model:
    """zero:NAME, ones:NAME."""
    how, _, name = text.partition(":")
    there(model, name)
    return take(model, Taken(name, how))


def another(model: Model, text: str) -> Model:
    """NAME[,NAME...]: tensors of another checkpoint (which ones is not said here)."""
    names = text.split(",")
    if "head.weight" in names and model.head.tied:
        model = replace(model, head=replace(model.head, tied=False))
    for name in names:
        there(model, name)
    return take(model, *(Taken(name, "another") for name in names))


def scaled(model: Model, text: str) -> Model:
    """NAME*FACTOR."""
    name, _, factor = text.partition("*")
    there(model, name)
    return take(model, Taken(name, "scale", float(factor)))


def shifted(model: Model, text: str) -> Model:
    """SIDE:BY[:roll] of embed, head, both: row n + BY in place of row n; the ends stay, or wrap around."""
    side, by, *how = text.split(":")
    if side not in ("embed", "head", "both") or not by.removeprefix("-").isdigit() or how not in ([], ["roll"]):
        raise impossible(f"{text!r} is not SIDE:BY of embed, head or both")
    kind = "roll" if how else "shift"
    if model.head.tied and side != "both":
        model = take(replace(model, head=replace(model.head, tied=False)), Taken("head.weight", "from", "embed.weight"))
    names = [f"{n}.weight" for n in ("embed", "head") if side in (n, "both") and not (n == "head" and model.head.tied)]
    return take(model, *(Taken(n, kind, int(by)) for n in names))


def tie(model: Model, tied: bool) -> Model:
    """The head reads the embedding though it has a matrix of its own."""
    if model.head.tied or not tied:
        raise impossible("the head is the embedding already" if tied else "a head of its own is not in the checkpoint")
    return replace(model, head=replace(model.head, tied=True))


def layers(model: Model, text: str) -> Model:
    """missing:I, repeated:I, swapped:I,J, shifted:BY, strings, reversed, first: which layer's weights each layer reads.
    """
    n = model.n_layers
    kind, _, rest = text.partition(":")
    order = list(range(n))
    if kind == "missing":
        order.pop(_index(rest, n))
    elif kind == "repeated":
        order.insert(_index(rest, n), _index(rest, n))
    elif kind == "twice":
        order[min(_index(rest, n) + 1, n - 1)] = _index(rest, n)
    elif kind == "swapped":
        i, j = (_index(x, n) for x in rest.split(","))
        order[i], order[j] = order[j], order[i]
    elif kind == "shifted":
        by = int(rest)
        order = [(i + by) % n for i in order]
    elif kind == "clamped":
        by = int(rest)
        order = [min(max(i + by, 0), n - 1) for i in order]
    elif kind == "strings":
        order.sort(key=str)
    elif kind == "reversed":
        order.reverse()
    elif kind == "first":
        order = [0] * n
    else:
        raise impossible(f"{kind!r} is no order of layers")
    if order == list(range(n)):
        raise impossible("that is the order they have")
    changed = replace(model, layers=tuple(model.layers[i] for i in order))
    return take(changed, Taken("*", "order", tuple(order)))


def _index(text: str, n: int) -> int:
    if not text.isdigit() or int(text) >= n:
        raise impossible(f"layer {text!r} is not one of 0..{n - 1}")
    return int(text)


def squares(model: Model) -> list[str]:
    """Linear maps of the blocks whose matrix is square."""
    found = shapes(model)
    return [n for n in LINEAR if len(s := found.get(f"{n}.weight", ())) == 2 and s[0] == s[1]]


def gated(model: Model) -> bool:
    """Whether a dense feed-forward has a gate."""
    return any(isinstance(x.mlp, MLP) and x.mlp.gated for x in model.layers)


def attention(model: Model) -> Attention | None:
    """The first layer's attention, where it is of whole heads."""
    return next((x.attn for x in model.layers if isinstance(x.attn, Attention)), None)
