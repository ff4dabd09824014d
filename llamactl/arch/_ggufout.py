"""A Model's GGUF metadata: what _ggufwords reads, written from the Model's parts, and proven by reading it.

The keys and the words they stand for are those of _ggufwords' tables; nothing here lists a family's keys. A description
of the written metadata beside the tensors that will follow must be the Model again, or the file is refused: it would be
another model than the one it was made from.
Sources: docs/gguf.md of ggml, what llama.cpp's converter writes (conversion/*.py) and its loaders read (src/models).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from llamactl import arch
from llamactl.arch._gguf import describe_gguf
from llamactl.arch._ggufrope import TENSOR, stretched
from llamactl.arch._ggufwords import INTEGERS, NUMBERS
from llamactl.errors import InputRefused
from llamactl.spec.frequencies import frequencies, plain
from llamactl.spec.model import Model
from llamactl.spec.naming import stored_tensors
from llamactl.spec.parts import MLP, Attention, MoE
from llamactl.spec.rope import Rope

Field = tuple[str, str, Any]
_PLAIN_TYPES = (0, 1, 32)  # general.file_type of F32, F16 and BF16: nothing is quantised
_QUANTIZATION_VERSION = 2
_UINT32 = (1 << 32) - 1
_STRETCHED = ("linear", "yarn")  # schemes that metadata can say; llama3's is a tensor
# What only some loaders of llama.cpp read. Written for another architecture it would be ignored there, or refused.
_OWN = frozenset((
    "gemma2.attn_logit_softcapping", "gptneox.use_parallel_residual", f"llama.{TENSOR}",
    "phi3.attention.sliding_window",  # 0 where there is none: loaders of 2024 ask for it
))
# What can differ where all tensors have names and add up; the rest of a Model is where it came from, or words about it.
_PROVEN = ("embed", "embed_norm", "positions", "layers", "norm", "head")


class _Info(NamedTuple):
    """A tensor as the proof's header has it. Its type plays no part in a description of the weights."""

    name: str
    dims: tuple[int, ...]
    type: str = "F32"
    nbytes: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.dims)


class _Header(NamedTuple):
    """What describe_gguf reads."""

    metadata: dict[str, Any]
    tensors: tuple[_Info, ...]
    notes: tuple[tuple[str, str], ...] = ()


def gguf_fields(model: Model, config: Mapping[str, Any], *, name: str, file_type: int) -> list[Field]:
    """The metadata of `model` without its vocabulary: (key, GGUF type word, value).

    config: the source's config.json, for the lengths that the Model does not keep as they were written. name:
    general.name. file_type: general.file_type, 0 F32, 1 F16, 7 Q8_0, 32 BF16. A stretched RoPE may need the tensor of
    rope_factors() beside it.
    Raises InputRefused layout-unknown (no GGUF names), layout-cannot-say (what no GGUF file of the family can hold).
    """
    tensors = _tensors(model)
    architecture = arch.family(model.family).GGUF[0]
    out: list[Field] = [
        ("general.architecture", "STRING", architecture), ("general.type", "STRING", "model"),
        ("general.name", "STRING", name), ("general.file_type", "UINT32", file_type),
    ]
    if file_type not in _PLAIN_TYPES:
        out.append(("general.quantization_version", "UINT32", _QUANTIZATION_VERSION))
    out += ((f"{architecture}.{key}", kind, value) for key, kind, value in _keys(model, config, architecture))
    for key, kind, value in out:
        if kind == "UINT32" and value > _UINT32:
            raise _refused(f"{key} would be {value:,}, which 32 bits do not hold")
    _prove(model, architecture, out, tensors)
    return out


def rope_factors(model: Model) -> tuple[float, ...] | None:
    """What each pair's frequency is divided by, rope.dim / 2 float32 numbers for the tensor `rope_freqs.weight`.

    None where the file needs no such tensor: llama3's is the only scheme that is written so.
    """
    rope = _rope(model)
    if rope is None or rope.scaling is None or rope.scaling.kind != "llama3":
        return None
    return tuple(_float32(was / now) for was, now in zip(plain(rope), frequencies(rope)[0], strict=True))


def _tensors(model: Model) -> tuple[_Info, ...]:
    """The weights that will stand beside the metadata."""
    rules = arch.names(model, "gguf")
    if model.sections:
        held = ", ".join(f"{s.name} ({sum(leaf.elements for leaf in s.leaves):,} parameters)" for s in model.sections)
        raise _refused(f"a GGUF file of {model.model_type} holds the text decoder alone; beside it here: {held}")
    named = {template for rule in rules for template in rule.of}
    for tensor in model.tensors():
        if tensor.template not in named:
            raise _refused(f"the GGUF layout of {model.family} has no name for {tensor.name}")
    return tuple(_Info(s.name, s.shape[::-1]) for s in stored_tensors(model, rules))


def _keys(model: Model, config: Mapping[str, Any], architecture: str) -> Iterator[Field]:
    """The keys below the architecture's name, in the order of the tables that read them."""
    heads = [layer.attn for layer in model.layers if isinstance(layer.attn, Attention)]
    if len(heads) < model.n_layers:
        raise _refused(f"the GGUF metadata of {model.family} is written for layers with attention; "
                       f"{model.n_layers - len(heads):,} of {model.n_layers:,} have none")
    first, words = heads[0], _words(model, config)
    for key, (names, _, _) in INTEGERS.items():
        if (value := _first(words, names)) is not None:
            yield key, "UINT32", value
    if f"{architecture}.attn_logit_softcapping" in _OWN:
        words["attn_logit_softcapping"] = first.softcap
    for key, names in NUMBERS.items():
        if (value := _first(words, names)) is not None:
            yield key, "FLOAT32", value
    yield "vocab_size", "UINT32", model.embed.vocab
    yield "attention.key_length", "UINT32", first.head_dim
    yield "attention.value_length", "UINT32", first.head_dim
    yield from _rotation(_rope(model))
    yield from _windows([a.window for a in heads], zero=f"{architecture}.attention.sliding_window" in _OWN)
    if f"{architecture}.use_parallel_residual" in _OWN:
        yield "use_parallel_residual", "BOOL", model.layers[0].parallel


def _words(model: Model, config: Mapping[str, Any]) -> dict[str, Any]:
    """The Model in the config words that the tables name."""
    text = config.get("text_config")
    said = text if isinstance(text, Mapping) else config
    attn = next(x.attn for x in model.layers if isinstance(x.attn, Attention))
    out: dict[str, Any] = {
        "num_hidden_layers": model.n_layers, "max_position_embeddings": _context(model, said),
        "hidden_size": model.hidden, "num_attention_heads": attn.n_heads, "num_key_value_heads": attn.n_kv_heads,
        "final_logit_softcapping": model.head.softcap, "intermediate_size": _width(model, said),
    }
    if model.norm is not None:
        out["rms_norm_eps" if model.norm.kind == "rms" else "layer_norm_eps"] = model.norm.eps
    moe = next((x.mlp for x in model.layers if isinstance(x.mlp, MoE)), None)
    if moe is not None:
        out |= {"num_experts": moe.n_experts, "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.expert.ffn}
    bases = {a.window is None: a.rope.theta for x in model.layers if isinstance(a := x.attn, Attention) and a.rope}
    if len(bases) == 2:
        out["rope_local_base_freq"] = bases[False]
    return out


def _context(model: Model, said: Mapping[str, Any]) -> int:
    """The positions as the config writes them, which a scheme may stretch further; where they do not fit, the Model's.

    Those are the stretched ones where the scheme names what it began with, else the length that it began with.
    """
    limit, context = said.get("max_position_embeddings"), model.context
    if context.trained is None or context.usable is None:
        raise _refused(f"GGUF needs a context length, and for this model there is none: {context.why}")
    if type(limit) is int and context.trained <= limit <= context.usable:
        return limit
    rope = _rope(model)
    return context.trained if rope and rope.scaling and rope.scaling.original is None else context.usable


def _width(model: Model, said: Mapping[str, Any]) -> int | None:
    """The dense width. Without a dense layer it is the experts', or what the config keeps beside theirs."""
    dense = next((x.mlp for x in model.layers if isinstance(x.mlp, MLP)), None)
    if dense is not None:
        return dense.ffn
    moe = next((x.mlp for x in model.layers if isinstance(x.mlp, MoE)), None)
    if moe is None:
        return None
    own = said.get("intermediate_size") if _first(said, INTEGERS["expert_feed_forward_length"][0]) else None
    return own if type(own) is int and own > 0 else moe.expert.ffn


def _rope(model: Model) -> Rope | None:
    """The rotation of the layers that see everything, or the only one; sliding layers may have a base of their own."""
    found = [a for layer in model.layers if isinstance(a := layer.attn, Attention) and a.rope]
    return min(found, key=lambda a: a.window is not None).rope if found else None


def _rotation(rope: Rope | None) -> Iterator[Field]:
    """rope.*; a scheme that no key says is left out, and the proof names it."""
    if rope is None:
        return
    yield "rope.dimension_count", "UINT32", rope.dim
    yield "rope.freq_base", "FLOAT32", rope.theta
    if rope.scaling is None:
        return
    if rope.scaling.kind in _STRETCHED:
        yield "rope.scaling.type", "STRING", rope.scaling.kind
        yield "rope.scaling.factor", "FLOAT32", rope.scaling.factor
    if rope.scaling.original is not None:
        yield "rope.scaling.original_context_length", "UINT32", rope.scaling.original


def _windows(windows: list[int | None], *, zero: bool) -> Iterator[Field]:
    """The window, and which layers have it where some have none. zero: no window is written as 0."""
    cut = [w for w in windows if w is not None]
    if cut or zero:
        yield "attention.sliding_window", "UINT32", cut[0] if cut else 0
    if cut and len(cut) < len(windows):
        yield "attention.sliding_window_pattern", "ARRAY:BOOL", [w is not None for w in windows]


def _first(words: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((words[name] for name in names if words.get(name) is not None), None)


def _prove(model: Model, architecture: str, out: list[Field], tensors: tuple[_Info, ...]) -> None:
    """Read the metadata back, as float32 keeps it, beside the tensors."""
    metadata = {key: _float32(value) if kind == "FLOAT32" else tuple(value) if isinstance(value, list) else value
                for key, kind, value in out}
    factors = rope_factors(model)
    if factors and f"{architecture}.{TENSOR}" not in _OWN:
        raise _refused(f"a RoPE stretched by llama3 is a tensor that llama.cpp does not read in {architecture} files")
    try:
        found = describe_gguf(_Header(metadata, tensors), "the GGUF file")
        found = stretched(found, factors, "the GGUF file") if factors else found
    except InputRefused as e:
        raise _refused(f"no GGUF file of {architecture} holds this model: {e.message}") from None
    for part in _PROVEN:
        other = _difference(getattr(model, part), getattr(found, part), part)
        if other:
            where, ours, theirs = other
            raise _refused(f"a GGUF file of {architecture} cannot say that {where} is {_shown(ours)}; it would be read "
                           f"as {_shown(theirs)}")
    if model.context.usable != found.context.usable:
        raise _refused(f"a GGUF file of {architecture} would be read as {found.context.usable:,} positions long, not "
                       f"{model.context.usable:,}")


def _difference(ours: Any, theirs: Any, where: str) -> tuple[str, Any, Any] | None:
    """(where, ours, theirs) of the first difference; floats are equal where float32 keeps the same."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return None if _float32(ours) == _float32(theirs) else (where, ours, theirs)
    if type(ours) is not type(theirs):
        return where, ours, theirs
    if isinstance(ours, tuple) and len(ours) == len(theirs):
        pairs = ((f"{where}.{i}", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True)))
    elif is_dataclass(ours):
        pairs = ((f"{where}.{f.name}", getattr(ours, f.name), getattr(theirs, f.name)) for f in fields(ours))
    else:
        return None if ours == theirs else (where, ours, theirs)
    return next((d for w, a, b in pairs if (d := _difference(a, b, w))), None)


def _shown(value: Any) -> str:
    """A part by its kind, anything else as it is."""
    if is_dataclass(value):
        return str(getattr(value, "kind", type(value).__name__))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _float32(value: float) -> float:
    out: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return out


def _refused(what: str) -> InputRefused:
    return InputRefused("layout-cannot-say", what, help="write another layout, e.g. --to hf")
