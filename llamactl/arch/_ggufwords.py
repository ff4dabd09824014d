"""GGUF metadata in config.json's words, so that a family describes a GGUF file with the describe it already has.

Keys and rules: docs/gguf.md of ggml, and what llama.cpp's converter writes and its loader reads. What the metadata
leaves to the tensors (tied head, biases, vocabulary) is taken from their names and shapes; a family's own `from_gguf`
adds what is its alone. No shape has a default here either.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from llamactl.errors import InputRefused
from llamactl.spec.config import COUNT, LAYERS, POSITIONS, WIDTH, Config


class TensorInfo(Protocol):
    """One tensor by header. dims: row length first. type: GGML's name, e.g. Q4_1."""

    @property
    def name(self) -> str: ...
    @property
    def dims(self) -> tuple[int, ...]: ...
    @property
    def type(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def elements(self) -> int: ...


class Header(Protocol):
    """What is needed of a GGUF header (checkpoint.gguf.GgufHeader is one). notes: (code, message)."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Sequence[TensorInfo]: ...
    @property
    def notes(self) -> tuple[tuple[str, str], ...]: ...


# metadata key -> (config words, lowest, highest). Both tables are read the other way by _ggufout, key by key.
INTEGERS: dict[str, tuple[tuple[str, ...], int, int]] = {
    "block_count": (("num_hidden_layers",), 1, LAYERS),
    "context_length": (("max_position_embeddings",), 1, POSITIONS),
    "embedding_length": (("hidden_size",), 1, WIDTH),
    "attention.head_count": (("num_attention_heads",), 1, COUNT),
    "attention.head_count_kv": (("num_key_value_heads",), 1, COUNT),
    "feed_forward_length": (("intermediate_size", "n_inner", "ffn_hidden_size"), 1, WIDTH),
    "attention.kv_lora_rank": (("kv_lora_rank",), 1, WIDTH),
    "expert_count": (("num_local_experts", "num_experts", "n_routed_experts"), 0, COUNT),
    "expert_used_count": (("num_experts_per_tok",), 0, COUNT),
    "expert_shared_count": (("n_shared_experts",), 0, COUNT),
    "expert_feed_forward_length": (("moe_intermediate_size",), 1, WIDTH),
    "expert_shared_feed_forward_length": (("shared_expert_intermediate_size",), 1, WIDTH),
    "leading_dense_block_count": (("first_k_dense_replace",), 0, LAYERS),
    "interleave_moe_layer_step": (("interleave_moe_layer_step",), 1, LAYERS),
}
NUMBERS = {
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "attention.clamp_kqv": ("clip_qkv",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "rope.freq_base_swa": ("rope_local_base_freq",),
}
_REQUIRED = ("block_count", "context_length", "embedding_length", "attention.head_count")
_ELSEWHERE = {"attention.key_length": ("head_dim",), "attention.sliding_window": ("sliding_window",),
              "attention.sliding_window_pattern": ("layer_types",), "rope.freq_base": ("rope_theta",),
              "rope.dimension_count": ("partial_rotary_factor",), "rope.scaling.factor": ("rope_scaling.factor",),
              "expert_weights_norm": ("norm_topk_prob",), "expert_weights_scale": ("routed_scaling_factor",),
              "expert_gating_func": ("scoring_func",), "expert_group_count": ("n_group",),
              "expert_group_used_count": ("topk_group",)}
_KEY_OF = {word: key for table in (NUMBERS, {k: v[0] for k, v in INTEGERS.items()}, _ELSEWHERE)
           for key, words in table.items() for word in words}
_WORD = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in sorted(_KEY_OF, key=len, reverse=True)))


class Metadata(Config):
    """The `<architecture>.*` keys of a GGUF file without their prefix, and which tensors stand beside them.

    kinds: the tensor names without `blk.N.`. Errors carry the whole key; their codes begin with gguf-.
    """

    def __init__(self, header: Header, architecture: str, path: str) -> None:
        start = f"{architecture}."
        super().__init__({key.removeprefix(start): _plain(value) for key, value in header.metadata.items()
                          if key.startswith(start)}, path, prefix=start)
        self.architecture = architecture
        self.tensors = {t.name: t for t in header.tensors}
        self.kinds = {re.sub(r"^blk\.\d+\.", "", name) for name in self.tensors}
        tokens = header.metadata.get("tokenizer.ggml.tokens")
        self.tokens: int | None = len(tokens) if isinstance(tokens, tuple) else getattr(tokens, "length", None)

    def refuse(self, code: str, message: str, help: str | None = None) -> InputRefused:
        return super().refuse(code.replace("config-", "gguf-"), message, help)

    def holds(self, *kinds: str) -> bool:
        """Whether any block, or the file itself, has a tensor of one of these names."""
        return not self.kinds.isdisjoint(kinds)

    def says(self, word: str) -> bool:
        """Whether the metadata has this key, not zero, or the file such a tensor."""
        return self.holds(word) or bool(self.data.get(word))

    def each(self, key: str, *, lo: int = 1, hi: int = WIDTH, **default: Any) -> Any:
        """An integer that may be written once for all layers or once for each; layers that differ are refused."""
        value = self.data.get(key)
        if isinstance(value, tuple):
            n = self.integer("block_count", hi=LAYERS)
            if len(value) != n:
                raise self.refuse("gguf-layers", f"{self.prefix}{key} has {len(value):,} values for {n:,} layers")
            if any(v != value[0] for v in value):
                few = ", ".join(str(v) for v in dict.fromkeys(value[:1000]))
                raise self.refuse("gguf-layers", f"{self.prefix}{key} differs between layers: {few[:80]}",
                                  "no family here is built so, and one number for all would be wrong")
            self.data[key] = value[0]
        return self.integer(key, lo=lo, hi=hi, **default)

    def translated(self, text: str) -> str:
        """`text` with config.json's words replaced by the metadata keys they were read from."""
        return _WORD.sub(lambda m: self.prefix + _KEY_OF[m[0]], text)


def common(meta: Metadata) -> dict[str, Any]:
    """The config words that mean the same in every architecture."""
    out: dict[str, Any] = {"torch_dtype": "float16"}  # llama.cpp's cache default; the weights are as stored
    required = {*_REQUIRED, *(() if "expert_feed_forward_length" in meta.data else ("feed_forward_length",))}
    for key, (words, lo, hi) in INTEGERS.items():
        value = meta.each(key, lo=lo, hi=hi, **({} if key in required else {"default": None}))
        if value is not None:
            out |= dict.fromkeys(words, value)
    for key, words in NUMBERS.items():
        number = meta.number(key, default=None)
        if number is not None:
            out |= dict.fromkeys(words, number)
    if "rms_norm_eps" not in out and "layer_norm_eps" not in out:
        raise meta.refuse("gguf-missing", f"{meta.prefix}attention.layer_norm_rms_epsilon is missing")
    out.setdefault("num_key_value_heads", out["num_attention_heads"])  # docs/gguf.md: absent means no grouping
    out["rope_theta"] = meta.number("rope.freq_base", default=10000.0, lo=1e-6)  # llama.cpp's, whatever the family's
    out["rope_scaling"] = _scaling(meta)
    out |= _latent(meta) if "kv_lora_rank" in out else _head(meta, out["hidden_size"], out["num_attention_heads"])
    out |= _windows(meta, out["num_hidden_layers"])
    bias = meta.holds("attn_q.bias", "attn_qkv.bias", "attn_kv_a_mqa.bias")
    out |= {"attention_bias": bias, "qkv_bias": bias, "mlp_bias": meta.holds("ffn_up.bias"),
            "tie_word_embeddings": not meta.holds("output.weight"), "vocab_size": _vocab(meta)}
    if "use_parallel_residual" in meta.data:
        out["use_parallel_residual"] = meta.flag("use_parallel_residual", default=True)
    return out


def _head(meta: Metadata, hidden: int, heads: int) -> dict[str, Any]:
    """head_dim, and the share of it that rotates; absent means hidden / heads, and all of it, as llama.cpp has it."""
    dim = meta.each("attention.key_length", default=None)
    if dim is None:
        if hidden % heads:
            raise meta.refuse("gguf-missing", f"{meta.prefix}attention.key_length is missing, and an embedding_length "
                              f"of {hidden:,} is not divisible by {heads} heads")
        dim = hidden // heads
    value = meta.each("attention.value_length", default=dim)
    if value != dim:
        raise meta.refuse("gguf-unsupported", f"{meta.prefix}attention.key_length is {dim}, its value_length {value}")
    rotated = meta.integer("rope.dimension_count", default=dim, hi=dim)
    factor = rotated / dim
    if int(dim * factor) != rotated:  # the family multiplies again and cuts
        factor = math.nextafter(factor, 2.0)
    return {"head_dim": dim, "partial_rotary_factor": factor}


def _latent(meta: Metadata) -> dict[str, Any]:
    """MLA: newer files give the heads' own widths in *_mla keys, and compressed ones where older files gave those."""
    turned = meta.integer("rope.dimension_count")
    mla = ".%s_length_mla" if "attention.key_length_mla" in meta.data else ".%s_length"
    key, value = (meta.integer("attention" + mla % x) for x in ("key", "value"))
    if key <= turned:
        raise meta.refuse("gguf-range", f"{meta.prefix}attention{mla % 'key'} is {key}, of which {turned} rotate")
    return {"qk_rope_head_dim": turned, "qk_nope_head_dim": key - turned, "v_head_dim": value,
            "q_lora_rank": meta.integer("attention.q_lora_rank", default=None)}


def routing(meta: Metadata) -> dict[str, Any]:
    """How DeepSeek's experts are chosen. Groups and scale that a file leaves out stay unknown: null, not a default."""
    func = meta.integer("expert_gating_func", lo=0, hi=COUNT, default=None)
    return {
        "norm_topk_prob": meta.flag("expert_weights_norm", default=False),
        "routed_scaling_factor": meta.number("expert_weights_scale", default=None),
        "scoring_func": None if func is None else {1: "softmax", 2: "sigmoid"}.get(func, str(func)),
        "n_group": meta.integer("expert_group_count", hi=COUNT, default=None),
        "topk_group": meta.integer("expert_group_used_count", hi=COUNT, default=None),
    }


def _windows(meta: Metadata, n_layers: int) -> dict[str, Any]:
    """The window (0 means none) and which layers have it: every one but each `period`-th, or a flag for each."""
    if "attention.sliding_window" not in meta.data:
        return {}
    out: dict[str, Any] = {"sliding_window": meta.each("attention.sliding_window", lo=0, hi=POSITIONS) or None}
    pattern = meta.get("attention.sliding_window_pattern", default=None)
    if pattern is None or out["sliding_window"] is None:
        return out
    if isinstance(pattern, tuple):
        if len(pattern) != n_layers or not all(flag in (0, 1) for flag in pattern):
            raise meta.refuse("gguf-layers", f"{meta.prefix}attention.sliding_window_pattern has {len(pattern):,} "
                              f"values for {n_layers:,} layers; a flag for each is needed")
        slides = [bool(flag) for flag in pattern]
    else:
        period = meta.integer("attention.sliding_window_pattern", lo=0, hi=LAYERS)
        slides = [period == 0 or i % period < period - 1 for i in range(n_layers)]
    return out | {"layer_types": ["sliding_attention" if s else "full_attention" for s in slides]}


def _scaling(meta: Metadata) -> dict[str, Any] | None:
    """rope.scaling.* as rope_scaling. longrope's and llama3's factors are tensors, not metadata, and are not read."""
    kind = meta.expect("rope.scaling.type", allowed=("none", "linear", "yarn", "longrope"), default="linear")
    factor = meta.number("rope.scaling.factor", "rope.scale_linear", default=None)
    if kind in ("none", "longrope") or not factor:  # llama.cpp: no factor, or 0, stretches nothing
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    out = {
        "rope_type": "yarn", "factor": factor,
        "original_max_position_embeddings": meta.integer("rope.scaling.original_context_length", hi=POSITIONS),
        "beta_fast": meta.number("rope.scaling.yarn_beta_fast", default=None),
        "beta_slow": meta.number("rope.scaling.yarn_beta_slow", default=None),
        "attention_factor": meta.number("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor", default=None),
    }
    tenth = meta.number("rope.scaling.yarn_log_multiplier", default=None)
    if tenth and "attention.kv_lora_rank" in meta.data:  # 0.1 x mscale_all_dim, which is mscale too in every release
        out |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * tenth, 6))
    return {word: value for word, value in out.items() if value is not None}


def _vocab(meta: Metadata) -> int:
    """Rows of the token table; of a file without it, what the metadata says."""
    table = meta.tensors.get("token_embd.weight")
    if table is not None and len(table.dims) == 2:
        return table.dims[1]
    if "vocab_size" in meta.data or meta.tokens is None:
        size: int = meta.integer("vocab_size", hi=1 << 28)
        return size
    return meta.tokens


def _plain(value: Any) -> Any:
    """A float32 as the shortest decimal that is the same float32: 1e-05, not 9.99999974e-06."""
    if not isinstance(value, float) or not math.isfinite(value) or abs(value) > 3.4e38:
        return value
    same = struct.pack("<f", value)
    if struct.unpack("<f", same)[0] != value:
        return value
    shorter = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((x for x in shorter if abs(x) < 3.4e38 and struct.pack("<f", x) == same), value)
