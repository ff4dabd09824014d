"""params.json of Meta's layout and the model_args of nanoGPT's, written from a Model and read back before use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from llamactl import arch
from llamactl.arch._meta import FACTOR, SCALED, from_params
from llamactl.arch._nanogpt import EPSILON, from_model_args
from llamactl.arch._out import NOTHING, cannot_say, check
from llamactl.errors import InputRefused
from llamactl.spec.changes import set_tie
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import MLP, Attention, ffn_width
from llamactl.spec.rope import Rope

Notes = tuple[tuple[str, str], ...]
_HELP = "convert to hf, which can say it"
# Keys of ours that Meta's code does not have, and what it does with such a model.
_STRANGE = {
    "max_position_embeddings": "the length is not used there",
    "head_dim": "its heads are dim / n_heads wide, so these weights do not fit it",
    "rope_scaling_factor": f"it always stretches by {FACTOR:g}, so long texts come out wrong",
    "attention_bias": "it leaves these biases out without a word",
    "mlp_bias": "it leaves these biases out without a word",
}


class NanoGPT(NamedTuple):
    """model_args of a nanoGPT checkpoint, and hf_config: what they cannot say, kept beside them for llamactl."""

    model_args: dict[str, Any]
    hf_config: dict[str, Any]
    notes: Notes


def meta_params(model: Model, *, context: bool = True, path: str = "params.json") -> tuple[dict[str, Any], Notes]:
    """(params.json, warnings) of a Llama model, in Meta's own keys as far as those reach.

    The head is a matrix of its own in this layout: a tied model is written with a copy. context=False leaves out the
    length, which only llamactl reads. Raises InputRefused layout-unknown, layout-cannot-say.
    """
    _has(model, "META", "meta")
    layer, attn, ff = _block(model, path)
    if layer.attn_norm is None or attn.rope is None:
        raise cannot_say("params.json", "a Llama block has RoPE and norms before its branches", path, _HELP)
    out: dict[str, Any] = {
        "dim": model.hidden, "n_layers": model.n_layers, "n_heads": attn.n_heads, "n_kv_heads": attn.n_kv_heads,
        "vocab_size": model.embed.vocab, **_ffn(model.hidden, ff.ffn, path), "norm_eps": layer.attn_norm.eps,
        "rope_theta": attn.rope.theta, **_scaled(attn.rope, path),
    }
    if attn.head_dim * attn.n_heads != model.hidden:
        out["head_dim"] = attn.head_dim
    out |= {key: True for key, on in (("attention_bias", attn.qkv_bias), ("mlp_bias", ff.bias)) if on}
    if context and model.context.usable:
        out["max_position_embeddings"] = model.context.usable
    check(set_tie(model, False), from_params(out, path), path, "params.json", context=context, help=_HELP)
    return out, tuple(_notes(model, out))


def _notes(model: Model, out: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Which keys Meta's own code does not know, and the head that is written twice."""
    strange = [key for key in _STRANGE if key in out]
    if strange:
        yield ("meta-keys", "Meta's own code does not know " + "; ".join(f"{key}: {_STRANGE[key]}" for key in strange)
               + " (its Llama 2 and 3 repositories stop at an unknown key, llama-models passes over it)")
    if model.tied:
        yield ("meta-head", "the layout has no word for a tied head: output.weight is a copy of the token embedding")


def _ffn(dim: int, ffn: int, path: str) -> dict[str, Any]:
    """multiple_of, and the shortest ffn_dim_multiplier with which Meta's rule gives this width."""
    powers = [1 << n for n in (*range(8, 24), *range(7, -1, -1)) if ffn % (1 << n) == 0]
    for multiple in powers:
        if ffn_width(dim, multiple, None) == ffn:
            return {"multiple_of": multiple}
    base = int(2 * (4 * dim) / 3)
    for digits in range(1, 10):
        for multiple in powers:
            least = math.ceil((ffn - multiple + 1) / base * 10**digits)
            for tenths in (least, least + 1):
                if ffn_width(dim, multiple, (times := tenths / 10**digits)) == ffn and times <= 1e3:
                    return {"multiple_of": multiple, "ffn_dim_multiplier": times}
    raise cannot_say("params.json", f"no multiplier makes a feed-forward of {ffn:,} from a width of {dim:,}", path,
                     _HELP)


def _scaled(rope: Rope, path: str) -> dict[str, Any]:
    """use_scaled_rope, which stands for the llama3 scheme with Meta's constants; its factor where it is not 8."""
    scaling = rope.scaling
    if scaling is None:
        return {}
    constants = {"rope_type": scaling.kind, "low_freq_factor": scaling.low_freq_factor,
                 "high_freq_factor": scaling.high_freq_factor, "original_max_position_embeddings": scaling.original}
    if constants != SCALED:
        has, knows = (", ".join(f"{key} {value}" for key, value in words.items() if value is not None)
                      for words in (constants, SCALED))
        raise cannot_say("params.json", f"its RoPE has {has}; Meta's one stretched RoPE has {knows}", path, _HELP)
    return {"use_scaled_rope": True} | ({} if scaling.factor == FACTOR else {"rope_scaling_factor": scaling.factor})


def nanogpt_args(model: Model, config: Mapping[str, Any] = NOTHING, *, path: str = "ckpt.pt") -> NanoGPT:
    """What a nanoGPT checkpoint says of a GPT-2 model beside its weights.

    config: of the source, for its bos and eos ids. hf_config belongs into the checkpoint under that key: the form of
    the GELU is in no model_args. Raises InputRefused layout-unknown, layout-cannot-say.
    """
    _has(model, "NANOGPT", "nanogpt")
    layer, attn, ff = _block(model, path)
    if layer.attn_norm is None or layer.attn_norm.eps != EPSILON:
        eps = layer.attn_norm.eps if layer.attn_norm else None
        raise cannot_say("nanoGPT", f"its layer_norm_epsilon is {eps}, nanoGPT's always {EPSILON:g}", path, _HELP)
    if not model.tied:
        raise cannot_say("nanoGPT", "it has a head of its own, nanoGPT's is always the token embedding", path,
                         "--tie, where the two matrices are equal; or convert to hf")
    args = {"n_layer": model.n_layers, "n_head": attn.n_heads, "n_embd": model.hidden,
            "block_size": model.context.usable, "bias": attn.qkv_bias, "vocab_size": model.embed.vocab, "dropout": 0.0}
    forms = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
    if ff.activation not in forms:
        raise cannot_say("nanoGPT", f"its activation is {ff.activation}, nanoGPT's always GELU", path, _HELP)
    said = {"model_type": model.model_type, "activation_function": forms[ff.activation], "layer_norm_epsilon": EPSILON,
            **{key: config[key] for key in ("bos_token_id", "eos_token_id") if config.get(key) is not None}}
    check(model, from_model_args(args, path, said), path, "nanoGPT", help=_HELP)
    notes = () if ff.activation == "gelu" else ((
        "nanogpt-gelu", "nanoGPT computes the exact GELU, this model was trained with the tanh form: logits there "
        "differ by about 1e-3; llamactl reads the right form back from hf_config in the file"),)
    return NanoGPT(args, said, notes)


def _has(model: Model, table: str, layout: str) -> None:
    if not hasattr(arch.family(model.family), table):
        raise InputRefused("layout-unknown", f"the {layout} names of {model.family} tensors are not known", help=_HELP)


def _block(model: Model, path: str) -> tuple[Layer, Attention, MLP]:
    """The first block with its two branches, which the check holds all others to."""
    layer = model.layers[0]
    if not isinstance(layer.attn, Attention) or not isinstance(layer.mlp, MLP):
        raise cannot_say("this layout", "it has dense blocks with attention only", path, _HELP)
    return layer, layer.attn, layer.mlp
