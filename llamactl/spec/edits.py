"""Edits: small named changes Model -> Model, each a pure function. The one word for every difference between models.

`apply(model, "n_kv_heads=1")`, `apply(model, "no-gate")`. An edit that cannot be made on a model (KV heads of a latent
attention, more layers of an uneven stack) is refused; it never changes something else instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from llamactl.errors import UsageError
from llamactl.spec.config import ACTIVATIONS, COUNT, LAYERS, VOCAB, WIDTH
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import MLP, Attention, LearnedPositions, MoE, Norm, SinusoidalPositions
from llamactl.spec.rope import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """name: key in `key=value`. words: other spellings (config keys). flags: bare words and the value they mean."""

    name: str
    summary: str
    read: Callable[[str, str], Any]
    change: Callable[[Model, Any], Model]
    words: tuple[str, ...] = ()
    flags: tuple[tuple[str, str], ...] = ()


def apply(model: Model, text: str) -> Model:
    """`model` with the edit that `text` names (`key=value` or a bare word). UsageError if unknown or impossible."""
    key, eq, value = text.partition("=")
    key = key.strip().replace("-", "_").lower()
    edit = _BY_WORD.get(key)
    if not eq:
        edit, value = _FLAGS.get(key, (None, ""))
        if edit is None and key in _BY_WORD:
            raise UsageError("edit", f"{text!r} needs a value", help=f"write {key}=VALUE")
    if edit is None:
        from difflib import get_close_matches

        near = get_close_matches(key, [*_BY_WORD, *_FLAGS], 1)
        raise UsageError("edit", f"{text!r} is not a known edit",
                         help=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(e.name for e in EDITS)}")
    changed = edit.change(model, edit.read(edit.name, value.strip()))
    return replace(changed, stored_bytes=None, stored_as=None)  # no file holds the edited model


def _impossible(why: str) -> UsageError:
    return UsageError("edit", why)


def _integer(lo: int, hi: int) -> Callable[[str, str], int]:
    def read(name: str, text: str) -> int:
        try:
            value = int(text.replace("_", "").replace(",", ""))
        except ValueError:
            raise UsageError("edit", f"{name}={text}: not an integer") from None
        if not lo <= value <= hi:
            raise UsageError("edit", f"{name}={value:,}: outside {lo:,}..{hi:,}")
        return value

    return read


def _boolean(name: str, text: str) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if text.lower() not in words:
        raise UsageError("edit", f"{name}={text}: neither true nor false")
    return words[text.lower()]


def _one_of(*words: str) -> Callable[[str, str], str]:
    def read(name: str, text: str) -> str:
        if text not in words:
            raise UsageError("edit", f"{name}={text}: not one of {', '.join(words)}")
        return text

    return read


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError("edit", f"{name}={text}: not a number") from None
    if not 1.0 <= value <= 1e12:
        raise UsageError("edit", f"{name}={text}: outside 1..1e12")
    return value


def _window(name: str, text: str) -> int | None:
    return None if text.lower() in ("none", "null", "off") else _integer(1, 1 << 40)(name, text)


def _activation(name: str, text: str) -> str:
    if text not in ACTIVATIONS:
        raise UsageError("edit", f"{name}={text}: not one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[text]


def _layers(model: Model, change: Callable[[Layer], Layer]) -> Model:
    """Every layer changed; equal layers are changed once and stay one object."""
    made: dict[Layer, Layer] = {}
    for layer, _ in model.distinct_layers():
        made[layer] = change(layer)
    return replace(model, layers=tuple(made[layer] for layer in model.layers))


def _attention(model: Model, change: Callable[[Attention], Attention], what: str) -> Model:
    def one(layer: Layer) -> Layer:
        if layer.attn is None:
            return layer
        if not isinstance(layer.attn, Attention):
            raise _impossible(f"{what} has no meaning for latent attention: all heads share one latent")
        return replace(layer, attn=change(layer.attn))

    return _layers(model, one)


def _mlps(model: Model, change: Callable[[MLP], MLP], *, dense: bool = True, expert: bool = False) -> Model:
    def one(layer: Layer) -> Layer:
        ff = layer.mlp
        if isinstance(ff, MLP) and dense:
            return replace(layer, mlp=change(ff))
        if isinstance(ff, MoE) and expert:
            return replace(layer, mlp=replace(ff, expert=change(ff.expert)))
        return layer

    return _layers(model, one)


def _heads(part: Attention, n_heads: int, n_kv: int) -> Attention:
    """Other head counts at the same head_dim; norms that span heads follow."""
    if n_heads % n_kv:
        raise _impossible(f"{n_heads} heads cannot share {n_kv} KV heads evenly")

    def norm(old: Norm | None, heads: int, before: int) -> Norm | None:
        if old is None:
            return None
        if old.heads:
            return replace(old, heads=heads)
        return replace(old, dim=heads * part.head_dim) if old.dim == before * part.head_dim != part.head_dim else old

    return replace(part, n_heads=n_heads, n_kv_heads=n_kv, q_norm=norm(part.q_norm, n_heads, part.n_heads),
                   k_norm=norm(part.k_norm, n_kv, part.n_kv_heads),
                   hf_cache_heads=n_heads if part.hf_cache_heads else None)


def _set_kv_heads(model: Model, n: int) -> Model:
    return _attention(model, lambda a: _heads(a, a.n_heads, n), "n_kv_heads")


def _set_heads(model: Model, n: int) -> Model:
    return _attention(model, lambda a: _heads(a, n, n if a.n_kv_heads == a.n_heads else a.n_kv_heads), "n_heads")


def _set_ffn(model: Model, n: int) -> Model:
    if not any(isinstance(layer.mlp, MLP) for layer in model.layers):
        raise _impossible("this model has no dense feed-forward: set expert_ffn")
    return _mlps(model, lambda m: replace(m, ffn=n))


def _moe(model: Model, change: Callable[[MoE], MoE]) -> Model:
    if not any(isinstance(layer.mlp, MoE) for layer in model.layers):
        raise _impossible("this model has no experts")
    return _layers(model, lambda x: replace(x, mlp=change(x.mlp)) if isinstance(x.mlp, MoE) else x)


def _experts(part: MoE, n: int, top_k: int) -> MoE:
    if top_k > n:
        raise _impossible(f"{top_k} experts per token of {n}")
    return replace(part, n_experts=n, top_k=top_k)


def _set_layers(model: Model, n: int) -> Model:
    if n > model.n_layers and len(set(model.layers)) > 1:
        raise _impossible(f"the {model.n_layers} layers differ, so what layer {model.n_layers} would be is a guess")
    layers = model.layers[:n] if n <= model.n_layers else (model.layers[0],) * n
    return replace(model, layers=layers)


def _set_vocab(model: Model, n: int) -> Model:
    return replace(model, embed=replace(model.embed, vocab=n), head=replace(model.head, vocab=n))


def _set_tie(model: Model, tied: bool) -> Model:
    return replace(model, head=replace(model.head, tied=tied), tied_why=f"edited: tie={str(tied).lower()}")


def _set_activation(model: Model, name: str) -> Model:
    return _mlps(model, lambda m: replace(m, activation=name), expert=True)


def _set_gate(model: Model, gated: bool) -> Model:
    return _mlps(model, lambda m: replace(m, gated=gated), expert=True)


def _set_norm(model: Model, kind: str) -> Model:
    """rms: a scale; layer: a scale and a shift. Norms on q, k and latents stay as they are."""

    def norm(old: Norm | None) -> Norm | None:
        return None if old is None else replace(old, kind=kind, bias=kind == "layer", offset=False)

    changed = _layers(model, lambda x: replace(
        x, attn_norm=norm(x.attn_norm), attn_post_norm=norm(x.attn_post_norm), mlp_norm=norm(x.mlp_norm),
        mlp_post_norm=norm(x.mlp_post_norm)))
    return replace(changed, norm=norm(model.norm), embed_norm=norm(model.embed_norm))


def _set_window(model: Model, window: int | None) -> Model:
    return _attention(model, lambda a: replace(a, window=window), "window")


def _set_theta(model: Model, theta: float) -> Model:
    if not any(layer.attn and layer.attn.rope for layer in model.layers):
        raise _impossible("this model has no RoPE")
    return _layers(model, lambda x: replace(
        x, attn=replace(x.attn, rope=replace(x.attn.rope, theta=theta))) if x.attn and x.attn.rope else x)


def _set_positions(model: Model, kind: str) -> Model:
    """How positions enter: exactly one way, the others are taken out."""
    rows = model.context.usable
    if kind == "learned" and rows is None:
        raise _impossible("learned positions need a table length, and this config names no context")
    table: LearnedPositions | SinusoidalPositions | None = None
    if kind == "learned":
        table = LearnedPositions(rows=rows or 0, dim=model.hidden)
    elif kind == "sinusoidal":
        table = SinusoidalPositions(dim=model.hidden)

    def one(a: Attention) -> Attention:
        rope = (a.rope or Rope(dim=a.head_dim, theta=10000.0)) if kind == "rope" else None
        return replace(a, rope=rope, alibi=kind == "alibi")

    return replace(_attention(model, one, "positions"), positions=table)


EDITS = (
    Edit(name="n_kv_heads", summary="KV heads; 1 is MQA, n_heads is MHA", read=_integer(1, COUNT), change=_set_kv_heads,
         words=("kv_heads", "num_key_value_heads")),
    Edit(name="n_heads", summary="query heads at the same head_dim", read=_integer(1, COUNT), change=_set_heads,
         words=("num_attention_heads", "n_head")),
    Edit(name="ffn", summary="width of the dense feed-forward", read=_integer(1, WIDTH), change=_set_ffn,
         words=("intermediate_size", "d_ff", "n_inner", "ffn_dim")),
    Edit(name="expert_ffn", summary="width of a routed expert", read=_integer(1, WIDTH),
         words=("moe_intermediate_size",),
         change=lambda m, n: _moe(m, lambda e: replace(e, expert=replace(e.expert, ffn=n)))),
    Edit(name="n_experts", summary="routed experts", read=_integer(1, COUNT),
         words=("num_experts", "num_local_experts", "n_routed_experts"),
         change=lambda m, n: _moe(m, lambda e: _experts(e, n, e.top_k))),
    Edit(name="top_k", summary="experts per token", read=_integer(1, COUNT), words=("num_experts_per_tok",),
         change=lambda m, n: _moe(m, lambda e: _experts(e, e.n_experts, n))),
    Edit(name="n_layers", summary="blocks", read=_integer(1, LAYERS), change=_set_layers,
         words=("layers", "num_hidden_layers", "n_layer")),
    Edit(name="vocab", summary="rows of the embedding and the head", read=_integer(1, VOCAB), change=_set_vocab,
         words=("vocab_size",)),
    Edit(name="tie", summary="head shares the embedding", read=_boolean, change=_set_tie,
         words=("tie_word_embeddings", "tied"), flags=(("tie", "true"), ("untie", "false"))),
    Edit(name="activation", summary="activation of the feed-forward", read=_activation, change=_set_activation,
         words=("hidden_act", "act"), flags=(("gelu", "gelu"), ("gelu_tanh", "gelu_tanh"), ("silu", "silu"),
                                             ("relu", "relu"))),
    Edit(name="gate", summary="a gate matrix in the feed-forward (three matrices instead of two)", read=_boolean,
         change=_set_gate, words=("gated",), flags=(("no_gate", "false"), ("gate", "true"))),
    Edit(name="norm", summary="rms or layer", read=_one_of("rms", "layer"), change=_set_norm,
         flags=(("layernorm", "layer"), ("rmsnorm", "rms"))),
    Edit(name="window", summary="tokens every layer sees; none for all", read=_window, change=_set_window,
         words=("sliding_window",)),
    Edit(name="rope_theta", summary="RoPE base", read=_number, change=_set_theta, words=("theta",)),
    Edit(name="positions", summary="rope, learned, sinusoidal, alibi or none", change=_set_positions,
         read=_one_of("rope", "learned", "sinusoidal", "alibi", "none"),
         flags=(("learned_positions", "learned"), ("no_positions", "none"))),
)
_BY_WORD = {word: e for e in EDITS for word in (e.name, *e.words)}
_FLAGS = {flag: (e, value) for e in EDITS for flag, value in e.flags}
