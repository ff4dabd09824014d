"""Edits: small named changes Model -> Model, each a pure function. The one word for every difference between models.

`apply(model, "n_kv_heads=1")`, `apply(model, "no-gate")`. An edit that cannot be made on a model (KV heads of a latent
attention, more layers of an uneven stack) is refused; it never changes something else instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from llamactl.errors import UsageError
from llamactl.spec import changes
from llamactl.spec.config import ACTIVATIONS, COUNT, LAYERS, POSITIONS, VOCAB, WIDTH
from llamactl.spec.model import Model


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
    edit = _BY_WORD.get(key) or _mistake(key)
    if not eq:
        edit, value = _FLAGS.get(key, (None, ""))
        if edit is None and (key in _BY_WORD or _mistake(key)):
            raise UsageError("edit", f"{text!r} needs a value", help=f"write {key}=VALUE")
    if edit is None:
        from difflib import get_close_matches

        from llamactl.spec.mistakes import BY_NAME

        near = get_close_matches(key, [*_BY_WORD, *_FLAGS, *BY_NAME], 1)
        known = f"known: {', '.join(e.name for e in EDITS)}; mistakes of ports: {', '.join(BY_NAME)}"
        raise UsageError("edit", f"{text!r} is not a known edit", help=f"did you mean {near[0]!r}?" if near else known)
    try:
        changed = edit.change(model, edit.read(edit.name, value.strip()))
    except (ValueError, KeyError, IndexError, ZeroDivisionError):
        raise UsageError("edit", f"{edit.name}={value.strip()}: not understood", help=f"{edit.name}: {edit.summary}"
                         ) from None
    return replace(changed, stored_bytes=None, stored_as=None)  # no file holds the edited model


def _mistake(key: str) -> Edit | None:
    """What only a wrong port does; the list is read when one is asked for."""
    from llamactl.spec.mistakes import BY_NAME

    return BY_NAME.get(key)


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


def _number(lo: float, hi: float) -> Callable[[str, str], float]:
    def read(name: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise UsageError("edit", f"{name}={text}: not a number") from None
        if not lo <= value <= hi:
            raise UsageError("edit", f"{name}={text}: outside {lo:g}..{hi:g}")
        return value

    return read


def _window(name: str, text: str) -> int | None:
    return None if text.lower() in ("none", "null", "off") else _integer(1, 1 << 40)(name, text)


def _activation(name: str, text: str) -> str:
    if text not in ACTIVATIONS:
        raise UsageError("edit", f"{name}={text}: not one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[text]


EDITS = (
    Edit(name="n_kv_heads", summary="KV heads; 1 is MQA, n_heads is MHA", read=_integer(1, COUNT),
         change=changes.set_kv_heads, words=("kv_heads", "num_key_value_heads")),
    Edit(name="n_heads", summary="query heads at the same head_dim", read=_integer(1, COUNT), change=changes.set_heads,
         words=("num_attention_heads", "n_head")),
    Edit(name="head_dim", summary="width of a head", read=_integer(1, WIDTH), change=changes.set_head_dim),
    Edit(name="hidden", summary="width of the stream", read=_integer(1, WIDTH), change=changes.set_hidden,
         words=("hidden_size", "n_embd", "d_model")),
    Edit(name="ffn", summary="width of the dense feed-forward", read=_integer(1, WIDTH), change=changes.set_ffn,
         words=("intermediate_size", "d_ff", "n_inner", "ffn_dim")),
    Edit(name="expert_ffn", summary="width of a routed expert", read=_integer(1, WIDTH),
         words=("moe_intermediate_size",),
         change=lambda m, n: changes.each_moe(m, lambda e: replace(e, expert=replace(e.expert, ffn=n)))),
    Edit(name="n_experts", summary="routed experts", read=_integer(1, COUNT),
         words=("num_experts", "num_local_experts", "n_routed_experts"),
         change=lambda m, n: changes.each_moe(m, lambda e: changes.with_experts(e, n, e.top_k))),
    Edit(name="top_k", summary="experts per token", read=_integer(1, COUNT), words=("num_experts_per_tok",),
         change=lambda m, n: changes.each_moe(m, lambda e: changes.with_experts(e, e.n_experts, n))),
    Edit(name="n_layers", summary="blocks", read=_integer(1, LAYERS), change=changes.set_layers,
         words=("layers", "num_hidden_layers", "n_layer")),
    Edit(name="vocab", summary="rows of the embedding and the head", read=_integer(1, VOCAB), change=changes.set_vocab,
         words=("vocab_size",)),
    Edit(name="tie", summary="head shares the embedding", read=_boolean, change=changes.set_tie,
         words=("tie_word_embeddings", "tied"), flags=(("tie", "true"), ("untie", "false"))),
    Edit(name="activation", summary="activation of the feed-forward", read=_activation, change=changes.set_activation,
         words=("hidden_act", "act"), flags=(("gelu", "gelu"), ("gelu_tanh", "gelu_tanh"), ("silu", "silu"),
                                             ("relu", "relu"))),
    Edit(name="gate", summary="a gate matrix in the feed-forward (three matrices instead of two)", read=_boolean,
         change=changes.set_gate, words=("gated",), flags=(("no_gate", "false"), ("gate", "true"))),
    Edit(name="norm", summary="rms or layer", read=_one_of("rms", "layer"), change=changes.set_norm,
         flags=(("layernorm", "layer"), ("rmsnorm", "rms"))),
    Edit(name="biases", summary="biases on attention and feed-forward", read=_boolean, change=changes.set_biases,
         words=("bias",), flags=(("no_biases", "false"), ("biases", "true"))),
    Edit(name="context", summary="positions the model is made for", read=_integer(1, POSITIONS),
         change=changes.set_context, words=("max_position_embeddings", "n_positions")),
    Edit(name="dropout", summary="rate in training; it costs nothing", read=_number(0.0, 1.0),
         change=lambda m, x: replace(m, dropout=x)),
    Edit(name="window", summary="tokens every layer sees; none for all", read=_window, change=changes.set_window,
         words=("sliding_window",)),
    Edit(name="rope_theta", summary="RoPE base", read=_number(1.0, 1e12), change=changes.set_theta, words=("theta",)),
    Edit(name="positions", summary="rope, learned, sinusoidal, alibi or none", change=changes.set_positions,
         read=_one_of("rope", "learned", "sinusoidal", "alibi", "none"),
         flags=(("learned_positions", "learned"), ("no_positions", "none"))),
)
_BY_WORD = {word: e for e in EDITS for word in (e.name, *e.words)}
_FLAGS = {flag: (e, value) for e in EDITS for flag, value in e.flags}
