"""A GGUF file's Model: metadata in config.json's words, the family's own describe, and a count of the file's tensors.

A family file says which `general.architecture` it answers to (GGUF), what tells it from a sibling of the same name
(GGUF_WITH: a metadata key that is not zero, or a tensor), and what the common words lack (from_gguf). The description
must then account for every element that the file holds, block by block; otherwise it is refused.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import Any

from llamactl import arch
from llamactl.arch._ggufwords import Header, Metadata, common
from llamactl.errors import InputRefused
from llamactl.spec.config import POSITIONS
from llamactl.spec.model import Model, NotCounted
from llamactl.spec.parts import Attention

_HOW = {"torch_dtype": "llama.cpp's default for the cache", **dict.fromkeys(
    ("tie_word_embeddings", "vocab_size", "attention_bias", "mlp_bias"), "the file's tensors")}
_BLOCK = re.compile(r"blk\.(\d{1,5})\.")
# Tensors that are no weights of a description: kind -> why.
BESIDE = {
    "rope_freqs.weight": "frequency factors of a stretched RoPE, not read",
    "rope_factors_long.weight": "frequency factors of a stretched RoPE, not read",
    "rope_factors_short.weight": "frequency factors of a stretched RoPE, not read",
    "attn_rot_embd.weight": "inverse frequencies of the RoPE, computed from its base",
}


def describe_gguf(header: Header, where: str) -> Model:
    """The Model that a GGUF file holds, exactly, or a refusal.

    header: of the whole file, or of all parts of a split one. where: its path in errors. Raises InputRefused:
    gguf-type (no language model), gguf-architecture, gguf-missing, gguf-range, gguf-layers, gguf-unsupported,
    gguf-split, gguf-mismatch (metadata and tensors disagree).
    """
    meta = Metadata(header, _architecture(header.metadata, where), where)
    config = _config(meta)
    try:
        model = arch.describe(config, where)
    except InputRefused as e:
        raise meta.refuse(e.code, meta.translated(e.message), e.help and meta.translated(e.help)) from None
    _same_heads(meta, model, config)
    model = _worded(meta, model, header)
    whole = _whole(header, meta)
    if whole is not None:
        return replace(model, notes=(*model.notes, whole))
    beside, model = _beside(meta, model)
    _balance(meta, model, beside)
    by_type: Counter[str] = Counter()
    for t in header.tensors:
        by_type[t.type] += t.nbytes
    return replace(model, stored_bytes=sum(by_type.values()),
                   stored_as=" + ".join(name for name, _ in by_type.most_common()))


def config_of_gguf(header: Header, where: str) -> dict[str, Any]:
    """The metadata in config.json's words, with every alias that some family reads: what describe_gguf describes."""
    return _config(Metadata(header, _architecture(header.metadata, where), where))


def _config(meta: Metadata) -> dict[str, Any]:
    family = _family(meta)
    config = {"model_type": family.MODEL_TYPES[0], **common(meta)}
    return config | family.from_gguf(meta) if hasattr(family, "from_gguf") else config


def _architecture(metadata: Mapping[str, Any], where: str) -> str:
    """general.architecture of a file that holds a language model."""
    name, kind = metadata.get("general.architecture"), metadata.get("general.type", "model")
    if name == "clip" or kind in ("mmproj", "clip-vision"):
        raise InputRefused("gguf-type", "a vision or audio tower with its projector (mmproj), not a language model",
                           path=where, help="give the .gguf of the model it stands beside")
    if kind == "adapter":
        raise InputRefused("gguf-type", "an adapter (LoRA), not a model", path=where,
                           help="give the .gguf of its base model")
    if kind != "model":
        raise InputRefused("gguf-type", f"general.type is {kind!r}, not a model", path=where)
    if isinstance(name, str):
        return name
    if metadata.get("split.no"):
        raise InputRefused("gguf-split", "one part of a split model; the first part describes it", path=where,
                           help="give the part that ends in -00001-of-NNNNN.gguf, all parts in one folder")
    wrong = "is missing" if name is None else f"is {str(name)[:40]!r}, not a name"
    raise InputRefused("gguf-architecture", f"general.architecture {wrong}, so the model is not known; known: "
                       f"{', '.join(sorted(architectures()))}", path=where)


@lru_cache
def architectures() -> Mapping[str, tuple[str, ...]]:
    """{general.architecture: family files that answer to it}, read from their text without importing them."""
    import ast

    folder = os.path.dirname(__file__)
    out: dict[str, tuple[str, ...]] = {}
    for file in sorted(os.listdir(folder)):
        if file.endswith(".py") and not file.startswith("_"):
            with open(os.path.join(folder, file), encoding="utf-8") as f:
                listed = re.search(r"^GGUF = (\(.*?\))$", f.read(), re.M | re.S)
            for name in ast.literal_eval(listed[1]) if listed else ():
                out[name] = (*out.get(name, ()), file[:-3])
    return out


def _family(meta: Metadata) -> ModuleType:
    """The family of the architecture: a sibling whose GGUF_WITH the file meets, else the one without."""
    name = meta.architecture
    if name not in architectures():
        from difflib import get_close_matches

        known = sorted(architectures())
        near = get_close_matches(name, known, 4, 0.5) or get_close_matches(name, known, 3, 0.0)
        raise meta.refuse("gguf-architecture", f"general.architecture {name[:60]!r} is not supported; nearest known: "
                          f"{', '.join(near)}", "another architecture's numbers would be a guess, so none are given")
    modules = [arch.family(file) for file in architectures()[name]]
    special = [m for m in modules if hasattr(m, "GGUF_WITH") and meta.says(m.GGUF_WITH)]
    found = special or [m for m in modules if not hasattr(m, "GGUF_WITH")]
    if len(found) != 1:
        both = " and ".join(f"{meta.prefix}{m.GGUF_WITH}" for m in found)
        raise meta.refuse("gguf-unsupported", f"{both} in one file: no family here is built so")
    return found[0]


def _same_heads(meta: Metadata, model: Model, config: Mapping[str, Any]) -> None:
    """Head width and rotation, which the tensors' sizes do not show, are what the metadata says."""
    for layer, _ in model.distinct_layers():
        attn = layer.attn
        if not isinstance(attn, Attention):
            continue
        if "head_dim" not in config:
            raise meta.refuse("gguf-unsupported", f"{meta.prefix}attention.kv_lora_rank is there, but this family has "
                              "no latent attention")
        rotated = int(config["head_dim"] * config["partial_rotary_factor"])
        for key, said, built in (("attention.key_length", config["head_dim"], attn.head_dim),
                                 ("rope.dimension_count", rotated, attn.rope.dim if attn.rope else rotated)):
            if said != built:
                raise meta.refuse("gguf-unsupported", f"{meta.prefix}{key} is {said}, but this family has {built}")


def _worded(meta: Metadata, model: Model, header: Header) -> Model:
    """`model` with the words of its notes and reads those of the metadata, and its trained context."""
    own = meta.holds("output.weight")
    why = ("the file has no output.weight" if not own else "in this architecture output.weight is a copy of the token "
           "embedding" if model.tied else "the file holds an output.weight of its own")
    context = replace(model.context, why=meta.translated(model.context.why))
    original = meta.integer("rope.scaling.original_context_length", hi=POSITIONS, default=None)
    if original and context.trained and context.trained == context.usable and original < context.trained:
        context = replace(context, trained=original,
                          why=f"{meta.prefix}context_length, stretched from rope.scaling.original_context_length")
    return replace(
        model, tied_why=why, context=context,
        notes=(*header.notes, *meta.warnings, *((code, meta.translated(text)) for code, text in model.notes)),
        reads=tuple((meta.translated(key), value, _HOW.get(key) or ("GGUF metadata" if how == "config" else
                     meta.translated(how))) for key, value, how in model.reads),
    )


def _whole(header: Header, meta: Metadata) -> tuple[str, str] | None:
    """None where all tensors are here, else the warning that they are not.

    A part alone shows whether the head is tied only if it holds the head, and biases only if it passes block 0.
    """
    count, total = (header.metadata.get(f"split.{key}", 0) for key in ("count", "tensors.count"))
    if not isinstance(count, int) or count < 2 or total == len(header.tensors):
        return None
    found = f"{len(header.tensors):,} of {total} tensors" if isinstance(total, int) else "not all tensors"
    if not meta.holds("output.weight") or not any(name.startswith("blk.1.") for name in meta.tensors):
        raise meta.refuse("gguf-split", f"{found} are here, so what the model is made of cannot be told",
                          f"put all {count:,} parts in one folder under the names they came with")
    return ("gguf-split", f"{found} are here: the numbers are those of the metadata, not checked against the file, and "
            "weights are costed in float16")


def _beside(meta: Metadata, model: Model) -> tuple[set[str], Model]:
    """Names of the tensors that are no weights of the description; the Model lists them as not counted."""
    elements: Counter[tuple[str, str]] = Counter()
    names: set[str] = set()
    table, copy = meta.tensors.get("token_embd.weight"), meta.tensors.get("output.weight")
    if model.tied and copy and table and copy.dims == table.dims:
        names.add(copy.name)
        elements[copy.name, "a copy of the tied token embedding"] = copy.elements
    for name, t in meta.tensors.items():
        kind = _BLOCK.sub("", name)
        why = BESIDE.get(kind)
        if kind.endswith((".scale", ".input_scale")):
            kind, why = "scales", "scales of quantised tensors"
        if why:
            names.add(name)
            elements[kind, why] += t.elements
    left_out = tuple(NotCounted(what=what, params=n, why=why) for (what, why), n in elements.items())
    return names, replace(model, not_counted=(*model.not_counted, *left_out))


def _balance(meta: Metadata, model: Model, beside: set[str]) -> None:
    """Every block, and all else together, holds as many elements as described (stored buffers on both sides)."""
    held: Counter[int] = Counter()
    for name, t in meta.tensors.items():
        if name not in beside:
            block = _BLOCK.match(name)
            held[int(block[1]) if block else -1] += t.elements
    sizes = {layer: sum(leaf.elements for leaf in layer.leaves()) for layer, _ in model.distinct_layers()}
    described = {-1: sum(leaf.elements for leaf in model.outer_leaves()),
                 **{i: sizes[layer] for i, layer in enumerate(model.layers)}}
    if described == held:
        return
    first = min(i for i in described.keys() | held.keys() if described.get(i, 0) != held[i])
    where = f"block {first}" if first >= 0 else "embedding, final norm and head"
    raise meta.refuse(
        "gguf-mismatch", f"the metadata describes {sum(described.values()):,} parameters, the file holds "
        f"{sum(held.values()):,}; {where}: {described.get(first, 0):,} against {held[first]:,}",
        "the file is cut, edited or of another architecture than it says; no number can be trusted")
