"""What goes wrong when a model is ported: edits nobody would want, with their usual cause and their cure.

They are edits like any other (`edits.apply` finds them by name); a Mistake also says which values are worth trying on a
given model, for edits of this list and of edits.EDITS alike. `hypotheses(model)` are all of them that change something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from llamactl.errors import UsageError
from llamactl.spec import misread, misturned, slipped
from llamactl.spec.edits import Edit, apply
from llamactl.spec.mistaken import TRIES, Tries
from llamactl.spec.model import Model
from llamactl.spec.phrases import phrase


def _text(name: str, text: str) -> str:
    return text


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError("edit", f"{name}={text}: not a number") from None
    if not abs(value) < 1e30:
        raise UsageError("edit", f"{name}={text}: too large")
    return value


def _or_none(name: str, text: str) -> float | None:
    return None if text.lower() == "none" else _number(name, text)


def _integer(name: str, text: str) -> int:
    value = _number(name, text)
    if value % 1:
        raise UsageError("edit", f"{name}={text}: not an integer")
    return int(value)


def _switch(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise UsageError("edit", f"{name}={text}: neither true nor false")
    return text == "true"


def _word(*words: str) -> Callable[[str, str], str]:
    def read(name: str, text: str) -> str:
        if text not in words:
            raise UsageError("edit", f"{name}={text}: not one of {', '.join(words)}")
        return text

    return read


def _scale_of(part: str) -> Callable[[Model, float | None], Model]:
    def change(model: Model, value: float | None) -> Model:
        if part == "embed":
            return replace(model, embed=replace(model.embed, scale=value))
        return slipped.with_head(model, **{part.removeprefix("head_"): value})

    return change


def _residual_scale(model: Model, value: float | None) -> Model:
    return replace(model, layers=tuple(replace(x, residual_scale=value) for x in model.layers))


def _edit(name: str, summary: str, change: Callable[[Model, Any], Model], read: Callable[[str, str], Any] = _text
          ) -> Edit:
    return Edit(name=name, summary=summary, read=read, change=change)


# Names are read as `name=value`; summaries say what the wrong port does.
MISTAKES: tuple[Edit, ...] = (
    _edit("rope_pairs", "which lanes rotate together: adjacent, half; q or k: the other order on that side alone",
          misturned.pairs, _word("adjacent", "half", "q", "k")),
    _edit("rope_rows", "rows of q, k or both reordered once more, SIDE:FROM>TO[:HEADS]", misturned.rows),
    _edit("rope_direction", "rotation turned backwards: both, q, k", misturned.backwards, _word("both", "q", "k")),
    _edit("rope_on", "what is rotated: q, k, qkv, v, none", misturned.on, _word("q", "k", "qkv", "v", "none")),
    _edit("rope_shift", "q's positions moved against k's by so many", misturned.shift, _integer),
    _edit("rope_dim", "dimensions of a head that rotate: N, or N/M with exponents that count to M", misturned.width),
    _edit("rope_scaling", "none, or KIND:FACTOR[:ORIGINAL]", misturned.scaling),
    _edit("rope_bands", "LOW:HIGH of llama3, FAST:SLOW of yarn", misturned.bands),
    _edit("rope_table", "angles or cosines rounded: positions-bf16, bf16, fp16", misturned.table,
          _word("positions-bf16", "positions-fp16", "bf16", "fp16")),
    _edit("position_rows", "positions taken from another row of the table: 1, -1, first", misturned.rows_of),
    _edit("kv_order", "which KV head a query head reads: tile, reversed, first, rolled", slipped.kv_order,
          _word("tile", "reversed", "first", "rolled")),
    _edit("head_split", "the same rows read as more (2) or fewer (0.5) heads", slipped.head_split, _number),
    _edit("attn_scale", "factor on q.k", slipped.scale, _number),
    _edit("attn_softcap", "soft cap of the scores, or none", slipped.attn_softcap, _or_none),
    _edit("mask", "which keys a token sees: none (all), ahead (one more), strict, strict-uniform", slipped.mask,
          _word("none", "ahead", "strict", "strict-uniform")),
    _edit("mlp", "another use of the feed-forward's matrices: gate-only, up-only, product, both, linear",
          slipped.feed_forward, _word("gate-only", "up-only", "product", "both", "linear")),
    _edit("residual", "normed (the branch is added to what it read) or none, [:attn|:mlp]", slipped.residual),
    _edit("parallel", "both branches read the block's input", slipped.parallel, _switch),
    _edit("norm_eps", "EPS[:PLACE]", slipped.norm_eps),
    _edit("norm_kind", "KIND[:PLACE]: layer, rms, and wrong forms of them", slipped.norm_kind),
    _edit("norm_offset", "on: the factor is 1 + weight; off: the weight; [:PLACE]", slipped.norm_offset),
    _edit("norm_weight", "weights never loaded (ones), by PLACE", slipped.norm_weight),
    _edit("norm_missing", "no norm at PLACE", slipped.norm_missing),
    _edit("norm_bias", "biases of norms dropped, by PLACE", slipped.norm_bias),
    _edit("norms_swapped", "two norms of a layer swapped: attn,mlp", slipped.norms_swapped),
    _edit("norm_place", "after-sum, after-branch, before", slipped.norm_place,
          _word("after-sum", "after-branch", "before")),
    _edit("embed_scale", "factor on the embedding, or none", _scale_of("embed"), _or_none),
    _edit("logits_scale", "factor on the logits, or none", _scale_of("head_scale"), _or_none),
    _edit("logits_softcap", "soft cap of the logits, or none", _scale_of("head_softcap"), _or_none),
    _edit("residual_scale", "factor on each branch, or none", _residual_scale, _or_none),
    _edit("bias_dropped", "biases left behind: qkv, o, mlp, head, linear (all of the blocks), all (with norms)",
          slipped.biases_dropped, _word("qkv", "o", "mlp", "head", "linear", "all")),
    _edit("transposed", "a square matrix read (in, out)", misread.transposed),
    _edit("swapped", "two tensors in each other's place: mlp.gate,mlp.up", misread.swapped),
    _edit("copied", "one tensor read in place of another: attn.v<attn.k", misread.copied),
    _edit("fused", "a fused tensor's parts in another order, WRITTEN>READ", misread.fused),
    _edit("heads", "whole heads in another order: attn.k:reversed", misread.heads),
    _edit("weights", "weights rounded: bf16, fp16, fp8_e4m3, fp8_e5m2, int8, int4 [:TENSOR]", misread.rounded),
    _edit("constant", "a tensor that was never loaded: zero:NAME, ones:NAME", misread.constant),
    _edit("another", "a tensor that is not the checkpoint's, by NAME", misread.another),
    _edit("scaled", "a tensor multiplied: NAME*FACTOR", misread.scaled),
    _edit("row_shift", "rows of the vocabulary shifted, SIDE:BY[:roll] of embed, head, both", misread.shifted),
    _edit("head_tied", "the embedding in place of the head's own matrix", misread.tie, _switch),
    _edit("layer_order", "missing:I, repeated:I, twice:I, swapped:I,J, shifted:BY, clamped:BY, strings, reversed, "
          "first", misread.layers),
)
BY_NAME = {e.name: e for e in MISTAKES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """An edit worth trying. text: what `edits.apply` takes; layered: whether it can hold in one layer alone."""

    text: str
    about: Tries
    layered: bool

    @property
    def value(self) -> str:
        return self.text.partition("=")[2]

    @property
    def whole(self) -> bool:
        """Whether the first logits depend on the rest of the text."""
        return self.value in self.about.whole

    @property
    def words(self) -> str:
        return phrase(self.about.name, self.value, self.about.says)


def hypotheses(model: Model, *, only: Callable[[Tries], bool] = lambda t: True) -> list[Hypothesis]:
    """Every mistake that can be made on `model` and changes its description; equal ones once."""
    found: dict[Any, Hypothesis] = {}
    for t in TRIES:
        if not only(t):
            continue
        for value in t.values(model):
            text = f"{t.name}={value}"
            try:
                made = apply(model, text)
            except UsageError:
                continue
            key = (made.layers, made.taken, made.embed, made.norm, made.head, made.positions, made.embed_norm)
            if made != model and key not in found:
                found[key] = Hypothesis(text=text, about=t, layered=t.layered and _layered(model, made))
    return list(found.values())


def _layered(model: Model, made: Model) -> bool:
    """Whether only layers are changed, each in its own place."""
    if made.n_layers != model.n_layers:
        return False
    outer = ("embed", "norm", "head", "positions", "embed_norm")
    return all(getattr(made, x) == getattr(model, x) for x in outer) or made.layers != model.layers


def in_layer(model: Model, text: str, i: int) -> Model | None:
    """The edit made in layer i alone; None where it changes nothing there."""
    made = apply(model, text)
    if made.n_layers != model.n_layers:
        return None
    inner = {leaf.path for leaf in (*model.layers[i].leaves(), *made.layers[i].leaves())}
    new = tuple(t._replace(layers=(i,)) for group in made.taken[len(model.taken):] for t in group
                if t.at == "*" or t.at in inner)
    layers = (*model.layers[:i], made.layers[i], *model.layers[i + 1:])
    out = replace(model, layers=layers, taken=(*model.taken, new) if new else model.taken)
    return None if out == model else out


class Change(NamedTuple):
    """An edit and the layers it is made in: None for all."""

    text: str
    layer: int | None = None

    def on(self, model: Model) -> Model | None:
        return apply(model, self.text) if self.layer is None else in_layer(model, self.text, self.layer)


def worded(text: str) -> tuple[str, str, str]:
    """(plain words, usual cause, cure) of an edit."""
    name, _, value = text.partition("=")
    for t in TRIES:
        if t.name == name:
            return phrase(name, value, t.says), t.cause, t.fix
    return text, "", ""
