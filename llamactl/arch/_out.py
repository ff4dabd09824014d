"""config.json written: one that was read with some facts changed, and one for a model that came from another layout.

Nothing is taken on trust: what is written is described again, and must be the model that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from typing import Any

from llamactl import arch
from llamactl.errors import InputRefused, UsageError
from llamactl.spec.changes import each_layer, set_biases, set_kv_heads, set_tie, set_vocab
from llamactl.spec.dtype import TORCH_NAMES, find_dtype
from llamactl.spec.model import Context, Layer, Model
from llamactl.spec.parts import Attention, Norm

# The words that configs have for one fact each, at the key that describe read and beside it.
_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
_KV = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "kv_n_heads", "multi_query_group_num")
_ONE_KV = ("multi_query", "multi_query_attention")  # flags: one KV head, or as many as query heads
_VOCAB = ("vocab_size", "padded_vocab_size", "embedding_size")
_TIED = ("tie_word_embeddings", "tie_embedding")
_DTYPE = ("torch_dtype", "dtype")
# Written also where the config is silent: the family's own default, which other readers may not share.
_ACTIVATION = ("hidden_act", "hidden_activation", "activation_function", "activation")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
NOTHING: Mapping[str, Any] = {}
HELP = "leave the change out, or the model in the layout that it has"


def changed_config(config: Mapping[str, Any], model: Model, *, n_kv_heads: int | None = None, vocab: int | None = None,
                   tied: bool | None = None, dtype: str | None = None, path: str = "config.json") -> dict[str, Any]:
    """A copy of `config`, which describes `model`, with exactly these facts changed; order and other keys are kept.

    Of dtype and dropout the config is right where the two differ: a model from GGUF has its own.
    vocab: rows of the embedding and the head. dtype: bfloat16, float16 or float32. path: the config's name in errors.
    Raises InputRefused layout-cannot-say where this family's config has no word for it, UsageError edit where the
    model has no meaning for it.
    """
    what = f"a config.json of {model.family}"
    out = deepcopy(dict(config))
    check(model, out, path, what)
    model = want = arch.describe(out, path)
    reads = model.reads
    text = next(key[: -len(_last(key))] for key, _, _ in reads if _last(key) in _HIDDEN)
    if n_kv_heads is not None:
        want = set_kv_heads(want, n_kv_heads)
        if want != model:
            _set_kv(out, [key for key, _, _ in reads if key.startswith(text)], want, n_kv_heads)
    if vocab is not None and vocab != model.embed.vocab:
        want = set_vocab(want, vocab)
        read = [_last(key) for key, _, _ in reads if key.startswith(text) and _last(key) in _VOCAB]
        for node in _chain(out, text):
            own = read[0] if read and node is _object(out, text) else None
            _respell(node, own, _VOCAB, vocab, was=model.embed.vocab)
    if tied is not None and tied != model.tied:
        want = set_tie(want, tied)
        for node in _chain(out, text):
            _respell(node, _TIED[0] if node in (out, _object(out, text)) else None, _TIED, tied)
    if dtype is not None and TORCH_NAMES.get(model.dtype or "") != (word := _torch_name(dtype)):
        want = replace(want, dtype=next(name for name, named in TORCH_NAMES.items() if named == word))
        sections = [v for v in out.values() if isinstance(v, dict)]  # towers name theirs beside the decoder's
        for node in (out, *sections):
            _respell(node, None, _DTYPE, word)
        if not any(node.get(key) for node in (out, *sections) for key in _DTYPE):
            out[_DTYPE[0]] = word
    check(want, out, path, what, exact=True)
    return out


def hf_config(config: Mapping[str, Any], model: Model, *, dtype: str | None = None, extra: Mapping[str, Any] = NOTHING,
              path: str = "config.json") -> dict[str, Any]:
    """The config.json, in transformers' words, of a model that came from params.json, nanoGPT or GGUF.

    config: those in config.json's words (from_params, from_model_args, config_of_gguf), aliases and all: what describe
    reads of it is kept, in the family's own words. model: what it describes, also with a RoPE that tensors stretch.
    dtype: of the weights as written, e.g. bfloat16. extra: bos_token_id and the like, as they are to stand there.
    Raises InputRefused layout-cannot-say where the result would describe another model; see `hf_model`.
    """
    family = arch.family(model.family)
    source = dict(config)
    if hasattr(family, "NANOGPT"):
        source.pop("bias", None)  # nanoGPT's word; transformers' class has none and always builds biases
    kept: dict[str, Any] = {"model_type": model.model_type}
    for key, value, how in arch.describe(source, path).reads:
        if how == "config":
            top = key.split(".")[0]
            kept[top] = source[top]
        elif key in _ACTIVATION:
            kept[key] = value
    own = getattr(family, "HF_WORDS", NOTHING)
    out: dict[str, Any] = {"architectures": [hf_class(model)], **{own.get(k, k): v for k, v in kept.items()}}
    out["tie_word_embeddings"] = model.tied
    for word in _DTYPE:
        out.pop(word, None)
    if named := _torch_name(dtype) if dtype else TORCH_NAMES.get(model.dtype or ""):
        out["torch_dtype"] = named
    out = _with_nulls(out, [k for k, v in source.items() if v is None], path)
    if (scaling := llama3(model)) and "rope_scaling" not in out:
        out["rope_scaling"] = scaling
    out |= {word: source[word] for word in _TOKENS if source.get(word) is not None}
    out |= extra
    check(model, out, path, f"a config.json of {model.family}")
    return out


def _with_nulls(out: dict[str, Any], keys: list[str], path: str) -> dict[str, Any]:
    """`out` with those of `keys` as null whose absence would mean something else: a family's default, or a refusal."""
    out = {**out, **dict.fromkeys(keys)}
    said = _plain(arch.describe(out, path))
    for key in keys:
        less = {k: v for k, v in out.items() if k != key}
        with suppress(InputRefused):
            if _plain(arch.describe(less, path)) == said:
                out = less
    return out


def hf_class(model: Model) -> str:
    """The name of transformers' causal language model: HF_CLASS of the family, else its model type in capitals."""
    named: str | None = getattr(arch.family(model.family), "HF_CLASS", None)
    words = model.model_type.removesuffix("_text").split("_")
    return named or "".join(word[:1].upper() + word[1:] for word in words) + "ForCausalLM"


def hf_model(model: Model) -> Model:
    """The Model that transformers builds for `model`: a nanoGPT without biases gets them, and they are zeros."""
    if not hasattr(arch.family(model.family), "NANOGPT"):
        return model

    def norm(old: Norm | None) -> Norm | None:
        return old and replace(old, bias=True)

    def one(layer: Layer) -> Layer:
        return replace(layer, attn_norm=norm(layer.attn_norm), mlp_norm=norm(layer.mlp_norm))

    return replace(each_layer(set_biases(model, True), one), norm=norm(model.norm))


def llama3(model: Model) -> dict[str, Any] | None:
    """rope_scaling of Llama 3.1's scheme where a layer of `model` has it."""
    for layer, _ in model.distinct_layers():
        scaling = layer.attn.rope.scaling if isinstance(layer.attn, Attention) and layer.attn.rope else None
        if scaling and scaling.low_freq_factor is not None:
            return {"rope_type": scaling.kind, "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
                    "high_freq_factor": scaling.high_freq_factor,
                    "original_max_position_embeddings": scaling.original}
    return None


def check(want: Model, config: dict[str, Any], path: str, what: str, *, exact: bool = False, context: bool = True,
          help: str = HELP) -> None:
    """Refuse (layout-cannot-say) unless `config` describes `want`, up to the words that explain it.

    what: the layout in words. exact: also its dtype, dropout, trained positions and what is not counted. context=False:
    whatever the length.
    """
    try:
        got = arch.describe(config, path)
    except InputRefused as e:
        raise cannot_say(what, e.message, path, help) from None
    if want.context.usable is None and not exact or not context:
        got = replace(got, context=want.context)
    found = difference(_plain(want, exact), _plain(got, exact))
    if found:
        raise cannot_say(what, found, path, help)


def cannot_say(what: str, detail: str, path: str, help: str) -> InputRefused:
    """The refusal of a model that a layout has no words for."""
    return InputRefused("layout-cannot-say", f"{what} cannot say this model: {detail}", path=path, help=help)


def difference(want: object, got: object, where: str = "") -> str | None:
    """The first part in which two values differ, with both values; None where they are equal."""
    if want == got:
        return None
    pairs: Iterable[tuple[str, object, object]] = ()
    if is_dataclass(want) and type(want) is type(got):
        pairs = ((f"{where}.{f.name}".lstrip("."), getattr(want, f.name), getattr(got, f.name)) for f in fields(want)
                 if f.compare)
    elif isinstance(want, tuple) and isinstance(got, tuple) and len(want) == len(got):
        pairs = ((f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(want, got, strict=True)))
    for name, a, b in pairs:
        if found := difference(a, b, name):
            return found
    return f"{where} is {_short(want)} and would be read as {_short(got)}"


def _short(value: object) -> str:
    if isinstance(value, tuple) and len(value) > 8:
        return f"a list of {len(value):,}"
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _plain(model: Model, exact: bool = False) -> Model:
    """`model` without the words that explain it; unless `exact`, also without what another layout does not keep."""
    context = replace(model.context, why="")
    out = replace(model, notes=(), reads=(), tied_why="", context=context)
    if exact:
        return out
    return replace(out, context=Context(trained=None, usable=context.usable, why=""), dtype=None, dropout=0.0,
                   not_counted=(), stored_bytes=None, stored_as=None)


def _torch_name(dtype: str) -> str:
    """bfloat16 for bf16 and the like."""
    found = find_dtype(dtype)
    if found is None or found.name not in TORCH_NAMES:
        raise UsageError("dtype", f"{dtype} is no dtype of a checkpoint; known: {', '.join(TORCH_NAMES.values())}")
    return TORCH_NAMES[found.name]


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _object(data: dict[str, Any], key: str) -> dict[str, Any]:
    """The object that holds the dotted `key` ("" and "text_config." name objects themselves)."""
    for word in key.split(".")[:-1]:
        data = data[word]
    return data


def _chain(data: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
    """The objects from the whole config down to `prefix`."""
    words = prefix.split(".")[:-1]
    return [_object(data, "".join(f"{w}." for w in words[:n])) for n in range(len(words) + 1)]


def _respell(node: dict[str, Any], key: str | None, words: tuple[str, ...], value: object, was: object = None) -> None:
    """Put `value` under `key`, and under every other of `words` that is there (and, if given, holds `was`)."""
    for word in words:
        said = node.get(word)
        if word == key or (said is not None and was in (None, said)):
            node[word] = value


def _set_kv(out: dict[str, Any], keys: list[str], want: Model, n: int) -> None:
    """n KV heads under the word that describe read, or by the flag that stands for it; none leaves `out` as it is."""
    numbers = [key for key in keys if _last(key) in _KV]
    for key in numbers:
        _respell(_object(out, key), _last(key), _KV, n)
    heads = {layer.attn.n_heads for layer, _ in want.distinct_layers() if isinstance(layer.attn, Attention)}
    if not numbers and (n == 1 or heads == {n}):
        for key in (key for key in keys if _last(key) in _ONE_KV):
            _object(out, key)[_last(key)] = n == 1
