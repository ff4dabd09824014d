"""GGUF files made from goldens as llama.cpp's converter makes them: its keys by architecture, its names, its merging.

Names come from the gguf package's own table (gguf.get_tensor_name_map), keys from its writer, so that neither is taken
from llamactl. Sources: conversion/*.py of llama.cpp (set_gguf_parameters, modify_tensors). Tensors are zeros.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH as A

from llamactl import arch
from llamactl.spec.model import Model
from llamactl.spec.naming import stored_tensors

Config = dict[str, Any]
Shape = tuple[int, ...]
Keys = Callable[[gguf.GGUFWriter, Config], None]


def first(c: Config, *keys: str) -> Any:
    return next((c[k] for k in keys if c.get(k) is not None), None)


def base(w: gguf.GGUFWriter, c: Config) -> None:
    """TextModel.set_gguf_parameters."""
    w.add_block_count(c["num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    if c.get("num_key_value_heads") is not None:
        w.add_head_count_kv(c["num_key_value_heads"])
    scaling = c.get("rope_scaling") or {}
    kind = first(scaling, "rope_type", "type")
    if kind in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType(kind))
        w.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        w.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        w.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
        w.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
    if c.get("rope_theta") is not None:
        w.add_rope_freq_base(c["rope_theta"])
    if c.get("rope_local_base_freq") is not None:
        w.add_rope_freq_base_swa(c["rope_local_base_freq"])
    if c.get("rms_norm_eps") is not None:
        w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    if (eps := first(c, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")) is not None:
        w.add_layer_norm_eps(eps)
    if (n := first(c, "num_local_experts", "num_experts")) is not None:
        w.add_expert_count(n)
    if c.get("num_experts_per_tok") is not None:
        w.add_expert_used_count(c["num_experts_per_tok"])
    if c.get("head_dim") is not None:
        w.add_key_length(c["head_dim"])
        w.add_value_length(c["head_dim"])


def llama(w: gguf.GGUFWriter, c: Config) -> None:
    base(w, c)
    w.add_vocab_size(c["vocab_size"])
    w.add_rope_dimension_count(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])


def llama_window(w: gguf.GGUFWriter, c: Config) -> None:
    llama(w, c)
    w.add_sliding_window(c["sliding_window"])


def llama4(w: gguf.GGUFWriter, c: Config) -> None:
    llama(w, {**c, "intermediate_size": c["intermediate_size_mlp"]})
    w.add_interleave_moe_layer_step(c["interleave_moe_layer_step"])
    w.add_expert_feed_forward_length(c["intermediate_size"])


def moe(w: gguf.GGUFWriter, c: Config) -> None:
    base(w, c)
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in c:
        w.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])


def gpt_oss(w: gguf.GGUFWriter, c: Config) -> None:
    base(w, c)
    w.add_sliding_window(c["sliding_window"])
    w.add_expert_feed_forward_length(c["intermediate_size"])


def deepseek(w: gguf.GGUFWriter, c: Config) -> None:
    """Since the MLA rewrite: one KV head of the latent's width, the heads' own widths in *_mla."""
    base(w, {**c, "num_key_value_heads": 1})
    w.add_key_length(c["kv_lora_rank"] + c["qk_rope_head_dim"])
    w.add_value_length(c["kv_lora_rank"])
    w.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    w.add_value_length_mla(c["v_head_dim"])
    _deepseek(w, c)


def deepseek_old(w: gguf.GGUFWriter, c: Config) -> None:
    base(w, c)
    w.add_key_length(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    w.add_value_length(c["v_head_dim"])
    _deepseek(w, c)


def _deepseek(w: gguf.GGUFWriter, c: Config) -> None:
    w.add_leading_dense_block_count(c["first_k_dense_replace"])
    w.add_vocab_size(c["vocab_size"])
    if c["q_lora_rank"] is not None:
        w.add_q_lora_rank(c["q_lora_rank"])
    w.add_kv_lora_rank(c["kv_lora_rank"])
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_expert_count(c["n_routed_experts"])
    w.add_expert_shared_count(c["n_shared_experts"])
    w.add_expert_weights_scale(c["routed_scaling_factor"])
    w.add_expert_weights_norm(c["norm_topk_prob"])
    w.add_expert_gating_func(gguf.ExpertGatingFuncType["SIGMOID" if c["topk_method"] == "noaux_tc" else "SOFTMAX"])
    w.add_expert_group_count(c["n_group"])
    w.add_expert_group_used_count(c["topk_group"])
    w.add_rope_dimension_count(c["qk_rope_head_dim"])
    if c.get("rope_scaling"):
        w.add_rope_scaling_yarn_log_mul(0.1 * c["rope_scaling"]["mscale_all_dim"])


def gemma(w: gguf.GGUFWriter, c: Config) -> None:
    """GemmaModel and Gemma2Model write neither rope.freq_base nor vocab_size."""
    base(w, {**c, "rope_theta": None})
    if "sliding_window" in c:
        w.add_sliding_window(c["sliding_window"])
        w.add_attn_logit_softcapping(c["attn_logit_softcapping"])
        w.add_final_logit_softcapping(c["final_logit_softcapping"])


def gemma3(w: gguf.GGUFWriter, c: Config) -> None:
    base(w, c)
    w.add_sliding_window(c["sliding_window"])


def gpt2(w: gguf.GGUFWriter, c: Config) -> None:
    w.add_block_count(c["n_layer"])
    w.add_context_length(c["n_positions"])
    w.add_embedding_length(c["n_embd"])
    w.add_feed_forward_length(4 * c["n_embd"])
    w.add_head_count(c["n_head"])
    w.add_layer_norm_eps(c["layer_norm_epsilon"])


def gpt_neox(w: gguf.GGUFWriter, c: Config) -> None:
    base(w, {**c, "num_key_value_heads": None})
    w.add_rope_dimension_count(int(c["rotary_pct"] * (c["hidden_size"] // c["num_attention_heads"])))
    w.add_parallel_residual(c["use_parallel_residual"])


def falcon(w: gguf.GGUFWriter, c: Config) -> None:
    """Whatever ffn_hidden_size, alibi, parallel_attn and multi_query say."""
    w.add_context_length(2048)
    w.add_tensor_data_layout("jploski")
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(4 * c["hidden_size"])
    w.add_block_count(c["num_hidden_layers"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c.get("num_kv_heads", 1))
    w.add_layer_norm_eps(c["layer_norm_epsilon"])


def phi2(w: gguf.GGUFWriter, c: Config) -> None:
    heads = c["num_attention_heads"]
    base(w, {**c, "intermediate_size": 4 * c["hidden_size"], "num_key_value_heads": heads, "rope_theta": None})
    w.add_rope_dimension_count(int(c["partial_rotary_factor"] * c["hidden_size"]) // heads)


def phi3(w: gguf.GGUFWriter, c: Config) -> None:
    base(w, {**c, "rope_scaling": None})
    w.add_rope_scaling_orig_ctx_len(c["original_max_position_embeddings"])
    w.add_rope_dimension_count(int(c["partial_rotary_factor"] * c["hidden_size"]) // c["num_attention_heads"])
    w.add_sliding_window(c["sliding_window"] or 0)


def olmo2(w: gguf.GGUFWriter, c: Config) -> None:
    base(w, c)
    if "sliding_window" in c:
        w.add_sliding_window(c["sliding_window"])
        w.add_sliding_window_pattern([(i + 1) % 4 != 0 for i in range(c["num_hidden_layers"])])


def stablelm(w: gguf.GGUFWriter, c: Config) -> None:
    base(w, c)
    w.add_rope_dimension_count(int(c["partial_rotary_factor"] * (c["hidden_size"] // c["num_attention_heads"])))
    w.add_parallel_residual(True)  # whatever the config's class would say


def tensors(model: Model, which: A, *, split_kv_b: bool = True) -> dict[str, Shape]:
    """{GGUF name: shape in torch's order} of what the converter writes for the Hugging Face checkpoint of `model`."""
    names = gguf.get_tensor_name_map(which, model.n_layers)
    merged: dict[str, list[Shape]] = {}
    for s in stored_tensors(model, arch.names(model)):
        for name, shape in _modified(s.name.removeprefix("language_model."), s.shape, model, split_kv_b):
            merged.setdefault(name, []).append(shape)
    out: dict[str, Shape] = {}
    for name, shapes in merged.items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        assert found not in out
        assert len(set(shapes)) == 1
        out[found] = shapes[0] if len(shapes) == 1 else (len(shapes), *shapes[0])
    return out


def _modified(name: str, shape: Shape, model: Model, split_kv_b: bool) -> list[tuple[str, Shape]]:
    """modify_tensors of the converters; experts and norms of one name are stacked by the caller."""
    if re.match(r"vision_|multi_modal", name):
        return []
    if found := re.fullmatch(r"model\.(layers\.\d+\.)block_sparse_moe\.experts\.\d+\.(w\d\.weight)", name):
        return [(f"{found[1]}feed_forward.experts.{found[2]}", shape)]
    if ".experts." in name and "gate_up_proj" in name:
        *lead, inner = shape
        kind = "bias" if name.endswith("_bias") else "weight"
        half = (*lead, inner // 2) if kind == "bias" else (lead[0], inner // 2, lead[1])
        stem = name[: name.index("gate_up_proj")]
        return [(f"{stem}{x}_proj.{kind}", half) for x in ("gate", "up")]
    if re.search(r"\.experts\.down_proj(_bias)?$", name):
        swapped = shape if name.endswith("_bias") else (shape[0], shape[2], shape[1])
        return [(name.replace("_bias", ".bias") if name.endswith("_bias") else f"{name}.weight", swapped)]
    if name.endswith("kv_b_proj.weight") and split_kv_b:
        a: Any = model.layers[0].attn
        return [(name.replace("kv_b", "k_b"), (a.n_heads, a.kv_rank, a.qk_nope)),
                (name.replace("kv_b", "v_b"), (a.n_heads, a.v_dim, a.kv_rank))]
    name = re.sub(r"\.(experts|norms)\.\d+\.", lambda m: f".{m[1]}." if m[1] == "experts" else ".", name)
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    return [(f"{name}.weight" if name.endswith("sinks") else name, shape)]


def write(path: Path, which: A, keys: Keys, config: Config, names: dict[str, Shape], *, tokens: bool = True,
          metadata: Callable[[gguf.GGUFWriter], None] | None = None) -> Path:
    """A GGUF file. metadata: further pairs. Matrices are F16, vectors F32, as --outtype f16 has it."""
    w = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[which])
    w.add_type(gguf.GGUFType.MODEL)
    keys(w, config)
    if tokens:
        w.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    if metadata:
        metadata(w)
    save(w, names)
    return path


def save(w: gguf.GGUFWriter, names: dict[str, Shape]) -> None:
    for name, shape in names.items():
        w.add_tensor(name, np.zeros(shape, np.float16 if len(shape) > 1 else np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
