"""What each layout is made of on disk: the model it holds, its config, its weight files and what goes beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llamactl import arch
from llamactl.cli.located import Located
from llamactl.cli.targetfiles import by_layers, head, ranks
from llamactl.errors import InputRefused, UsageError
from llamactl.spec.model import Model

if TYPE_CHECKING:
    from llamactl.checkpoint.plan import Planner
    from llamactl.checkpoint.weightfiles import WeightFile

Notes = tuple[tuple[str, str], ...]
NO_TOKENIZER = ("tokenizer.ggml.model", "STRING", "none")
LAYOUTS = ("hf", "meta", "nanogpt", "lesson", "gguf")
GPT2_END = 50256
WORDS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the command line asks for. dtype: BF16, F16, F32 or Q8_0; None keeps what is there."""

    layout: str
    dtype: str | None = None
    shard_bytes: int | None = None
    kv_heads: int | None = None
    tied: bool | None = None
    vocab: int | None = None
    ranks: int = 1
    context: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model in the layout it is to be written in. texts: files by name, made here. beside: files by name to copy.

    files: the planner's tensors -> weight files.
    """

    model: Model
    layout: str
    files: Callable[[Planner], list[WeightFile]]
    texts: Mapping[str, bytes] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    notes: Notes = ()


def target(at: Located, model: Model, wanted: Wanted, dtype: str, *, tokenizer: bool = True) -> Target:
    """The target of a conversion. model: the source's with the asked-for changes. dtype: of most weights as written.

    tokenizer: carried along. Raises InputRefused layout-unknown, layout-cannot-say; UsageError.
    """
    if wanted.layout in ("meta", "nanogpt", "lesson") and not hasattr(arch.family(model.family), wanted.layout.upper()):
        raise InputRefused("layout-unknown", f"there is no {wanted.layout} layout for {model.family}",
                           help=f"it can be written as {', '.join(_layouts(model))}")
    if wanted.ranks > 1 and wanted.layout != "meta":
        raise UsageError("usage", "--ranks belongs to --to meta")
    if wanted.shard_bytes is not None and wanted.layout not in ("hf", "lesson"):
        raise UsageError("usage", f"--shard-size is for safetensors; {wanted.layout} has its own files")
    return _MAKE[wanted.layout](at, model, wanted, dtype, tokenizer)


def _layouts(model: Model) -> list[str]:
    """The layouts that the model's family has names for."""
    family = arch.family(model.family)
    return [x for x in LAYOUTS if hasattr(family, "GGUF_NAMES" if x == "gguf" else x.upper()) or x == "hf"]


def _hf(at: Located, model: Model, wanted: Wanted, dtype: str, tokenizer: bool) -> Target:
    from llamactl.arch._out import hf_model
    from llamactl.checkpoint.stwrite import names, shards

    if at.layout not in ("hf", "lesson"):
        model = hf_model(model)
    config = hf_words(at, model, wanted, dtype)

    def files(planner: Planner) -> list[WeightFile]:
        from llamactl.checkpoint.weightfiles import WeightFile

        outputs = by_layers(planner)
        if wanted.layout == "lesson" and model.tied:  # a module whose head is tied asks for it by name all the same
            of_head, table = head(planner)
            outputs.append(replace(next(o for o in outputs if o.name == table), name=of_head))
        parts = shards(outputs, wanted.shard_bytes)
        return [WeightFile(name=n, kind="safetensors", outputs=tuple(p))
                for n, p in zip(names(len(parts)), parts, strict=True)]

    made, beside, notes = _along(at, tokenizer)
    if at.layout == "meta" and model.context.usable is None:
        notes += (("context-unknown", "params.json says no context length, so config.json has none, and transformers "
                   "takes 2,048: --context N writes it"),)
    return Target(model=model, layout=wanted.layout, files=files, texts={"config.json": _json(config), **made},
                  beside=beside, notes=notes)


def hf_words(at: Located, model: Model, wanted: Wanted, dtype: str) -> dict[str, Any]:
    """The config.json of `model`, which is the source's with the asked-for changes."""
    from llamactl.arch._out import changed_config, hf_config

    if at.layout in ("hf", "lesson"):
        said = arch.describe(at.config, at.source.path or "config.json")  # its head may turn out to be untied
        return changed_config(at.config, said, n_kv_heads=wanted.kv_heads, vocab=wanted.vocab,
                              tied=model.tied if model.tied != said.tied else None,
                              dtype=WORDS.get(wanted.dtype or ""))
    extra = _special_ids(at) if at.layout == "meta" else {}
    if at.layout == "nanogpt" and model.embed.vocab <= GPT2_END:  # transformers' own default would lie outside
        extra = {word: at.config.get(word) for word in ("bos_token_id", "eos_token_id")}
    config = hf_config(at.config, _unchanged(at), dtype=WORDS[dtype], extra=extra)
    if at.model == model or model == _unchanged(at):
        return config
    return changed_config(config, arch.describe(config, "config.json"), n_kv_heads=wanted.kv_heads, vocab=wanted.vocab,
                          tied=model.tied if model.tied != at.model.tied else None)


def _special_ids(at: Located) -> dict[str, Any]:
    """bos_token_id and eos_token_id, which params.json leaves to the tokenizer beside it."""
    from llamactl.errors import LlamactlError
    from llamactl.tokens import end_tokens, open_tokenizer

    try:
        tokenizer = open_tokenizer(at.folder, vocab=at.model.embed.vocab)
        first, ends = tokenizer.encode(""), sorted(end_tokens(at.folder, tokenizer))
    except LlamactlError:  # no tokenizer, or none that is read: then transformers' defaults hold
        return {}
    ids: dict[str, Any] = {"bos_token_id": first[0]} if first else {}
    return ids | ({"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {})


def _unchanged(at: Located) -> Model:
    from llamactl.arch._out import hf_model

    return hf_model(at.model)


def _meta(at: Located, model: Model, wanted: Wanted, dtype: str, tokenizer: bool) -> Target:
    from llamactl.arch._outmeta import meta_params
    from llamactl.spec.changes import set_tie

    params, notes = meta_params(model, context=False)  # Meta's code stops at keys it does not know; see the manifest
    model = set_tie(model, False)

    def files(planner: Planner) -> list[WeightFile]:
        from llamactl.checkpoint.weightfiles import WeightFile

        return [WeightFile(name=f"consolidated.{n:02d}.pth", kind="torch", outputs=tuple(outputs))
                for n, outputs in enumerate(ranks(planner, wanted.ranks))]

    made, beside, more = _along(at, tokenizer)
    return Target(model=model, layout="meta", files=files, texts={"params.json": _json(params), **made}, beside=beside,
                  notes=(*notes, *more))


def _nanogpt(at: Located, model: Model, wanted: Wanted, dtype: str, tokenizer: bool) -> Target:
    from llamactl.arch._outmeta import nanogpt_args

    made = nanogpt_args(model, at.config)

    def files(planner: Planner) -> list[WeightFile]:
        from llamactl.checkpoint.weightfiles import WeightFile

        beside = {"model_args": made.model_args, "iter_num": 0, "config": {}, "hf_config": made.hf_config}
        return [WeightFile(name="ckpt.pt", kind="torch", outputs=tuple(by_layers(planner)), under="model",
                           beside=beside, again=dict([head(planner)]))]

    texts, beside, notes = _along(at, tokenizer)
    return Target(model=model, layout="nanogpt", files=files, texts=texts, beside=beside,
                  notes=(*made.notes, *notes))


def _gguf(at: Located, model: Model, wanted: Wanted, dtype: str, tokenizer: bool) -> Target:
    from llamactl.arch._ggufout import gguf_fields, rope_factors
    from llamactl.arch._ggufrope import TENSOR
    from llamactl.checkpoint.ggufwrite import Field

    if at.layout == "nanogpt":
        model = _unchanged(at) if model == at.model else model
    if model.context.usable is None and at.layout == "meta":
        raise InputRefused("context-unknown", "params.json says no context length, and GGUF needs one", path=at.path,
                           help="add --context N: 2048 for Llama 1, 4096 for Llama 2, 8192 for Llama 3")
    types = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
    config = at.config if at.layout != "gguf" else {}
    fields = [Field(*f) for f in gguf_fields(model, config, name=at.source.id, file_type=types[wanted.dtype or dtype])]
    words, notes = _gguf_words(at, model) if tokenizer else ([Field(*NO_TOKENIZER)], ())
    fields += words

    def files(planner: Planner) -> list[WeightFile]:
        import struct

        from llamactl.checkpoint.plan import given
        from llamactl.checkpoint.weightfiles import WeightFile

        outputs = by_layers(planner)
        if (factors := rope_factors(model)) is not None:
            data = struct.pack(f"<{len(factors)}f", *factors)
            outputs.append(given(TENSOR, "F32", (len(factors),), data, "frequency factors of the stretched RoPE"))
        return [WeightFile(name="model.gguf", kind="gguf", outputs=tuple(outputs), fields=fields)]

    return Target(model=model, layout="gguf", files=files, notes=notes)


def _gguf_words(at: Located, model: Model) -> tuple[list[Any], Notes]:
    """The tokenizer's fields: from the source's folder, or as the source's GGUF file has them."""
    from llamactl.checkpoint.ggufwrite import Field

    if at.layout == "gguf":
        from llamactl.checkpoint.ggufarrays import tokenizer_fields

        return [Field(*f) for f in tokenizer_fields(at.path)], ()
    from llamactl.tokens.togguf import gguf_tokenizer

    said: list[str] = []
    try:
        found = gguf_tokenizer(at.folder, model.embed.vocab, said)
    except InputRefused as e:
        return [Field(*NO_TOKENIZER)], (_untold(e),)
    notes = tuple(("tokenizer", text) for text in said)
    if len(found) < 2:
        notes = (("tokenizer-none", "no tokenizer beside the weights: the file is written without one"),)
    return [Field(*f) for f in found], notes


def _along(at: Located, tokenizer: bool) -> tuple[dict[str, bytes], dict[str, str], Notes]:
    """(files made, files to copy, notes): tokenizer, generation_config, README and licence of the source."""
    if not tokenizer:
        return {}, {}, ()
    if at.layout == "gguf":
        from llamactl.tokens.fromgguf import hf_tokenizer

        try:
            made = hf_tokenizer(at.path)
        except InputRefused as e:
            return {}, {}, (_untold(e),)
        notes: Notes = () if made else (("tokenizer-none", "the GGUF file holds no tokenizer: none is written"),)
        return dict(made or {}), {}, notes
    from llamactl.checkpoint.beside import carried

    return {}, {n: os.path.join(at.folder, n) for n in carried(at.folder)}, ()


def _untold(e: InputRefused) -> tuple[str, str]:
    """The warning that the weights go without a tokenizer."""
    return ("tokenizer-refused", f"the tokenizer is left out, for the other layout cannot say it: {e.message}")


def _json(data: Mapping[str, Any]) -> bytes:
    try:
        return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half a surrogate pair in some string: it stays the escape that it was
        return (json.dumps(data, indent=2) + "\n").encode()


_MAKE: dict[str, Callable[[Located, Model, Wanted, str, bool], Target]] = {
    "hf": _hf, "lesson": _hf, "meta": _meta, "nanogpt": _nanogpt, "gguf": _gguf}
