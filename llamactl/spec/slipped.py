"""The functions behind edits of attention, branches and norms that wrong ports make; pure, Model -> Model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from llamactl.errors import UsageError
from llamactl.spec.changes import each_attention, each_layer, impossible, with_heads
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import MLP, Attention, Head, MoE, Norm
from llamactl.spec.phrases import KINDS
from llamactl.spec.slips import Slips
from llamactl.spec.taken import Taken, take

NORMS = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")


def slip(model: Model, change: Callable[[Slips], Slips], there: Callable[[Layer], bool]) -> Model:
    """Every layer that is `there` slips in one more way."""
    if not any(there(x) for x in model.layers):
        raise impossible("no layer of this model has what the edit changes")
    return each_layer(model, lambda x: replace(x, slips=change(x.slips or Slips())) if there(x) else x)


def _attends(x: Layer) -> bool:
    return isinstance(x.attn, Attention) and x.attn.sparse is None and not x.attn.cross


def mask(model: Model, kind: str) -> Model:
    """Which keys a token sees."""
    return slip(model, lambda s: replace(s, mask=kind), _attends)


def kv_order(model: Model, kind: str) -> Model:
    """Which KV head a query head reads."""
    if not any(_attends(x) and x.attn.n_kv_heads not in (1, x.attn.n_heads) for x in model.layers  # type: ignore[union-attr]
               ) and kind != "reversed":
        raise impossible("query heads share no KV heads here")
    return slip(model, lambda s: replace(s, kv_order=kind), lambda x: _attends(x) and x.attn.n_kv_heads > 1)  # type: ignore[union-attr]


def residual(model: Model, text: str) -> Model:
    """normed | none, of both branches or one: "normed:attn"."""
    kind, _, only = text.partition(":")
    if kind not in ("normed", "none") or only not in ("", "attn", "mlp"):
        raise impossible(f"{text!r} is not normed or none, of attn or mlp")

    def one(s: Slips) -> Slips:
        return replace(s, attn_in=s.attn_in if only == "mlp" else kind, mlp_in=s.mlp_in if only == "attn" else kind)

    return slip(model, one, lambda x: x.attn is not None or x.mlp is not None)


def feed_forward(model: Model, kind: str) -> Model:
    """Another use of the same three matrices."""
    return slip(model, lambda s: replace(s, mlp=kind),
                lambda x: isinstance(x.mlp, MLP) and (x.mlp.gated or kind == "linear"))


def scale(model: Model, value: float) -> Model:
    """The factor on q.k."""
    return each_attention(model, lambda a: replace(a, scale=value), "attn_scale")


def attn_softcap(model: Model, value: float | None) -> Model:
    """Scores within +-value."""
    return each_attention(model, lambda a: replace(a, softcap=value), "attn_softcap")


def with_head(model: Model, **new: object) -> Model:
    """The output projection changed."""
    head: Head = replace(model.head, **new)  # type: ignore[arg-type]
    return replace(model, head=head)


def head_split(model: Model, factor: float) -> Model:
    """The same rows read as more, narrower heads (2), or fewer, wider ones (0.5)."""
    def one(a: Attention) -> Attention:
        n, kv, d = a.n_heads * factor, a.n_kv_heads * factor, a.head_dim / factor
        if n % 1 or kv % 1 or d % 2 or a.q_norm or a.k_norm:
            raise impossible(f"{a.n_heads} and {a.n_kv_heads} heads of {a.head_dim} cannot be read that way")
        rope = replace(a.rope, dim=max(2, int(a.rope.dim / factor) // 2 * 2)) if a.rope else None
        return replace(with_heads(replace(a, head_dim=int(d)), int(n), int(kv)), rope=rope)

    return each_attention(model, one, "head_split")


def parallel(model: Model, on: bool) -> Model:
    """Both branches from one input, or one after the other."""
    return each_layer(model, lambda x: replace(x, parallel=on) if x.attn is not None and x.mlp is not None else x)


def each_norm(model: Model, change: Callable[[Norm], Norm], places: tuple[str, ...] = (*NORMS, "norm", "embed_norm")
              ) -> Model:
    """The norms at `places` changed; those of q and k are "q_norm" and "k_norm"."""
    def one(x: Layer) -> Layer:
        own: dict[str, Any] = {p: change(n) for p in places if p in NORMS and (n := getattr(x, p)) is not None}
        if isinstance(x.attn, Attention):
            heads: dict[str, Any] = {p: change(n) for p in places if p in ("q_norm", "k_norm")
                                     and (n := getattr(x.attn, p)) is not None}
            if heads:
                own["attn"] = replace(x.attn, **heads)
        return replace(x, **own) if own else x

    changed = each_layer(model, one)
    ends: dict[str, Any] = {p: change(n) for p in places if p in ("norm", "embed_norm")
                            and (n := getattr(model, p)) is not None}
    out = replace(changed, **ends) if ends else changed
    if out == model:
        raise impossible("this model has no such norm, or it is that way already")
    return out


def at(place: str) -> tuple[str, ...]:
    """A word for norms -> their places."""
    known = {"all": (*NORMS, "norm", "embed_norm"), "layers": NORMS, "final": ("norm",), "attn": ("attn_norm",),
             "mlp": ("mlp_norm",), "attn_post": ("attn_post_norm",), "mlp_post": ("mlp_post_norm",),
             "q": ("q_norm",), "k": ("k_norm",), "qk": ("q_norm", "k_norm"), "embed": ("embed_norm",)}
    if place not in known:
        raise impossible(f"{place!r} is none of {', '.join(known)}")
    return known[place]


def norm_eps(model: Model, text: str) -> Model:
    """EPS[:PLACE]."""
    value, _, place = text.partition(":")
    return each_norm(model, lambda n: replace(n, eps=float(value)), at(place or "all"))


def norm_kind(model: Model, text: str) -> Model:
    """KIND[:PLACE]: a kind that net.slips knows, with the weights that are there."""
    kind, _, place = text.partition(":")
    if kind not in KINDS:
        raise impossible(f"{kind!r} is none of {', '.join(KINDS)}")

    def one(n: Norm) -> Norm:
        return replace(n, kind=kind, bias=n.bias and (kind.startswith("layer") or kind == "rms-bias"))

    return each_norm(model, one, at(place or "all"))


def norm_offset(model: Model, text: str) -> Model:
    """on | off, [:PLACE]: the factor is 1 + weight, or the weight."""
    on, _, place = text.partition(":")
    if on not in ("on", "off"):
        raise impossible(f"{on!r} is neither on nor off")
    return each_norm(model, lambda n: replace(n, offset=on == "on") if n.weight else n, at(place or "all"))


def norm_weight(model: Model, place: str) -> Model:
    """Weights never loaded: all ones."""
    return each_norm(model, lambda n: replace(n, weight=False, bias=False), at(place))


def norm_missing(model: Model, place: str) -> Model:
    """No norm at all at a place."""
    (p,) = at(place)
    if p in ("norm", "embed_norm"):
        if getattr(model, p) is None:
            raise impossible("this model has no such norm")
        gone: dict[str, Any] = {p: None}
        return replace(model, **gone)
    if p in ("q_norm", "k_norm"):
        return each_attention(model, lambda a: replace(a, **{p: None}), "norm_missing")  # type: ignore[arg-type]
    if all(getattr(x, p) is None for x in model.layers):
        raise impossible("this model has no such norm")
    return each_layer(model, lambda x: replace(x, **{p: None}))  # type: ignore[arg-type]


def norm_bias(model: Model, place: str) -> Model:
    """Biases of norms dropped."""
    return each_norm(model, lambda n: replace(n, bias=False), at(place))


def norms_swapped(model: Model, text: str) -> Model:
    """Two norms of a layer take each other's weights."""
    a, b = (p for place in text.split(",") for p in at(place))
    if any(getattr(x, a, None) is None or getattr(x, b, None) is None for x in model.layers):
        if not {a, b} <= {"q_norm", "k_norm"}:
            raise impossible("this model has no such norms")
        a, b = f"attn.{a}", f"attn.{b}"
    return take(model, *(Taken(f"{a}.{leaf}", "swap", f"{b}.{leaf}") for leaf in ("weight", "bias")))


def norm_place(model: Model, kind: str) -> Model:
    """after-sum: norms act on the sum (2017), after-branch: on the branch, before: the post norms before it."""
    new = []

    def one(x: Layer) -> Layer:
        if kind == "before":
            if x.attn_norm or x.mlp_norm or not (x.attn_post_norm and x.mlp_post_norm):
                raise impossible("this model's norms stand before its branches")
            return replace(x, attn_norm=x.attn_post_norm, mlp_norm=x.mlp_post_norm, attn_post_norm=None,
                           mlp_post_norm=None, post_residual=False)
        if x.attn_post_norm or x.mlp_post_norm or not (x.attn_norm and x.mlp_norm):
            raise impossible("this model has norms behind its branches")
        return replace(x, attn_post_norm=x.attn_norm, mlp_post_norm=x.mlp_norm, attn_norm=None, mlp_norm=None,
                       post_residual=kind == "after-sum")

    changed = each_layer(model, one)
    for branch in ("attn", "mlp"):
        here, there = f"{branch}_post_norm", f"{branch}_norm"
        if kind == "before":
            here, there = there, here
        new += [Taken(f"{here}.{leaf}", "from", f"{there}.{leaf}") for leaf in ("weight", "bias")]
    return take(changed, *new)


def biases_dropped(model: Model, place: str) -> Model:
    """qkv | o | mlp | head: biases of linear maps left behind; linear: all of the blocks; all: with norms and head."""
    if place in ("linear", "all"):
        changed = model
        for one in ("qkv", "o", "mlp", *(("head",) if place == "all" else ())):
            with suppress(UsageError):
                changed = biases_dropped(changed, one)
        with suppress(UsageError):
            changed = norm_bias(changed, "all") if place == "all" else changed
    elif place in ("qkv", "o"):
        changed = each_attention(model, lambda a: replace(a, **{f"{place}_bias": False}), "bias_dropped")  # type: ignore[arg-type]
    elif place == "head":
        changed = with_head(model, bias=False)
    else:
        changed = each_layer(model, lambda x: replace(x, mlp=_bare(x.mlp)) if x.mlp else x)
    if changed == model:
        raise impossible("this model has no such biases")
    return changed


def _bare(m: MLP | MoE) -> MLP | MoE:
    if isinstance(m, MLP):
        return replace(m, bias=False)
    return replace(m, expert=replace(m.expert, bias=False), shared=replace(m.shared, bias=False) if m.shared else None)
