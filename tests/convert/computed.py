"""The logits of a checkpoint in any layout, computed without llamactl.

Hugging Face's by transformers; Meta's, nanoGPT's and the lesson's by networks written by hand; a GGUF file becomes a
Hugging Face folder again by its own metadata, llama.cpp's changes to the tensors undone one by one.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

references: Any = sys.modules["llamactl_tests_convert_references"]
nets: Any = sys.modules["llamactl_tests_convert_handwritten"]
State = dict[str, Tensor]


def logits(path: Path, layout: str, reference: Any, ids: Tensor) -> Tensor:
    """float32 logits (T, vocab) of a checkpoint. reference: the model it should be, for what its layout leaves open."""
    with torch.no_grad():
        if layout == "hf":
            return by_transformers(path, ids)
        if layout == "gguf":
            return by_gguf(path, reference, ids)
        if layout == "meta":
            net: nn.Module = nets.MetaLlama(json.loads((path / "params.json").read_text()))
            state = torch.load(path / "consolidated.00.pth", weights_only=True)
        elif layout == "nanogpt":
            data = torch.load(path / "ckpt.pt", weights_only=True)
            net, state = nets.NanoGPT(data["model_args"], data["hf_config"]["activation_function"]), data["model"]
        else:
            config = json.loads((path / "config.json").read_text())
            net = (nets.LessonGPT2 if "n_embd" in config else nets.LessonLlama)(config)
            state = load_file(path / "model.safetensors")
        net.load_state_dict(state)
        out: Tensor = net.float().eval()(ids)
        return out


def by_transformers(folder: Path, ids: Tensor) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    out: Tensor = model.eval()(ids[None], use_cache=False).logits[0]
    return out


def by_gguf(path: Path, reference: Any, ids: Tensor) -> Tensor:
    """A GGUF file back in transformers, by llama.cpp's reading of its metadata."""
    reader = references.gguf_reader(path)
    folder = (path if path.is_dir() else path.parent) / "back"
    folder.mkdir()
    state, factors = from_gguf(reader, reference)
    (folder / "config.json").write_text(json.dumps(words(reader, reference.config["model_type"], state)))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                                   attn_implementation="eager")
    if factors is not None:
        model.model.rotary_emb.inv_freq /= factors
    out: Tensor = model.eval()(ids[None], use_cache=False).logits[0]
    return out


def words(reader: Any, model_type: str, state: State) -> dict[str, Any]:
    """config.json out of GGUF metadata."""
    arch = reader.get_field("general.architecture").contents()

    def field(key: str, default: Any = None) -> Any:
        found = reader.get_field(f"{arch}.{key}")
        return default if found is None else found.contents()

    table = next(t for n, t in state.items() if n.endswith(("wte.weight", "embed_tokens.weight")))
    out = {"model_type": model_type, "vocab_size": len(table), "tie_word_embeddings": "lm_head.weight" not in state}
    if arch == "gpt2":
        return out | {"n_layer": field("block_count"), "n_head": field("attention.head_count"),
                      "n_embd": field("embedding_length"), "n_positions": field("context_length"),
                      "n_inner": field("feed_forward_length"), "activation_function": "gelu_new",
                      "layer_norm_epsilon": field("attention.layer_norm_epsilon")}
    names = " ".join(state)
    out |= {"num_hidden_layers": field("block_count"), "num_attention_heads": field("attention.head_count"),
            "num_key_value_heads": field("attention.head_count_kv"), "hidden_size": field("embedding_length"),
            "head_dim": field("attention.key_length", field("embedding_length") // field("attention.head_count")),
            "intermediate_size": field("feed_forward_length"), "max_position_embeddings": field("context_length"),
            "rms_norm_eps": field("attention.layer_norm_rms_epsilon"), "rope_theta": field("rope.freq_base", 10000.0),
            "attention_bias": "q_proj.bias" in names, "mlp_bias": "gate_proj.bias" in names}
    if field("expert_count"):
        out |= {"num_experts": field("expert_count"), "num_local_experts": field("expert_count"),
                "num_experts_per_tok": field("expert_used_count"), "norm_topk_prob": True,
                "moe_intermediate_size": field("expert_feed_forward_length")}
    return out


def from_gguf(reader: Any, reference: Any) -> tuple[State, Tensor | None]:
    """(tensors under Hugging Face names, factors of the RoPE): llama.cpp's changes undone one by one."""
    case, held = reference.case, {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()).view(
        [int(n) for n in reversed(t.shape)]) for t in reader.tensors}
    factors = held.pop("rope_freqs.weight", None)
    known = gguf.get_tensor_name_map(case.which, 8)
    out: State = {}
    for name in reference.hf("meta"):
        stem = re.sub(r"^model\.(.*)block_sparse_moe\.experts\.\d+\.", r"\1feed_forward.experts.", name)
        stem = re.sub(r"\.experts\.\d+\.", ".experts.", stem)
        found = known.get_name(stem, try_suffixes=(".weight", ".bias"))
        if found not in held:
            assert name == "lm_head.weight"
            continue
        w = held[found]
        if expert := re.search(r"\.experts\.(\d+)\.", name):
            w = w[int(expert[1])]
        if case.which == gguf.MODEL_ARCH.LLAMA and re.search(r"[qk]_proj\.", name):
            heads = reference.heads if ".q_proj." in name else reference.kv
            w = w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)
        if case.which == gguf.MODEL_ARCH.GEMMA and name.endswith("norm.weight"):
            w = w - 1
        if re.search(r"\.h\..*c_(attn|proj|fc)\.weight$", name):
            w = w.t()
        out[name] = w.contiguous()
    return out, factors
