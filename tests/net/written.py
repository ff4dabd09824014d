"""Checkpoints in every layout, written from a transformers model by code that shares nothing with llamactl's tables.

The reorderings are written as the original converters have them: Meta's view(n, 2, d/2, in).transpose(1, 2),
llama.cpp's reshape(n, 2, rows/n/2, in).swapaxes(1, 2), nanoGPT's and the lesson's names one by one.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

TESTS = Path(__file__).resolve().parents[1]
GOLDEN = TESTS / "golden"
State = dict[str, Tensor]
make_golden: Any = sys.modules["llamactl_tests_make_golden"]


def config_of(golden: str, **changes: Any) -> dict[str, Any]:
    """The golden's config with some words changed, None taking one out."""
    data = {**json.loads((GOLDEN / golden / "config.json").read_text()), **changes}
    return {k: v for k, v in data.items() if v is not None}


def saved(folder: Path, config: Mapping[str, Any], **how: Any) -> State:
    """Write the transformers model of `config` to `folder`; its state as stored."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    make_golden.build(folder).save_pretrained(folder, **how)
    (folder / "config.json").write_text(json.dumps(config))
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def golden_logits(golden: str) -> tuple[Tensor, Tensor]:
    """(ids (1, T), fp32 logits (T, vocab)) of a golden, from transformers."""
    data = json.loads((GOLDEN / golden / "logits.json").read_text())
    return torch.tensor([data["ids"]]), torch.tensor(data["logits"])


def neighbours(w: Tensor, n: int) -> Tensor:
    """HF's rows of n heads -> neighbouring pairs, as Meta's conversion script undoes it."""
    rows, *rest = w.shape
    return w.view(n, 2, rows // n // 2, *rest).transpose(1, 2).reshape(rows, *rest)


def meta(sd: State, heads: int, kv: int) -> State:
    """A Llama state dict in Meta's names."""
    names = {"self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
             "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
             "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
             "post_attention_layernorm": "ffn_norm"}
    outer = {"model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight",
             "lm_head.weight": "output.weight"}
    return {**dict(renamed(sd, names, outer, "layers.", heads, kv)), "rope.freqs": torch.ones(3)}


def lesson_llama(sd: State, heads: int, kv: int) -> State:
    names = {"self_attn.q_proj": "gqa.wq", "self_attn.k_proj": "gqa.wk", "self_attn.v_proj": "gqa.wv",
             "self_attn.o_proj": "gqa.wo", "mlp.gate_proj": "ff.w1", "mlp.up_proj": "ff.w2", "mlp.down_proj": "ff.w3",
             "input_layernorm.weight": "rms_1.gamma", "post_attention_layernorm.weight": "rms_2.gamma"}
    outer = {"model.embed_tokens.weight": "wte.weight", "model.norm.weight": "norm.gamma",
             "lm_head.weight": "lm_head.weight"}
    return dict(renamed(sd, names, outer, "blocks.", heads, kv))


def renamed(sd: State, names: Mapping[str, str], outer: Mapping[str, str], blocks: str, heads: int, kv: int
            ) -> Iterator[tuple[str, Tensor]]:
    for name, w in sd.items():
        if ".q_proj." in name or ".k_proj." in name:
            w = neighbours(w, heads if ".q_proj." in name else kv)
        new = outer.get(name, name.replace("model.layers.", blocks))
        for old, short in names.items():
            new = new.replace(old, short)
        yield new, w.contiguous()


def nanogpt(sd: State, *, prefix: str = "", bias: bool = True) -> State:
    """A GPT-2 state dict as nanoGPT has it: Linear weights (out, in), a mask, the head stored beside the table."""
    out = {}
    for name, w in sd.items():
        if name.endswith(".bias") and not bias:
            continue
        turned = re.search(r"(c_attn|c_proj|c_fc)\.weight$", name)
        out[prefix + name] = w.t().contiguous() if turned else w
    out[f"{prefix}lm_head.weight"] = out[f"{prefix}transformer.wte.weight"]
    out[f"{prefix}transformer.h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    return out


def lesson_gpt2(sd: State) -> State:
    out = {"lm_head.weight": sd["transformer.wte.weight"]}
    for name, w in sd.items():
        name = name.removeprefix("transformer.").replace("h.", "blocks.", 1) if ".h." in name else name.removeprefix(
            "transformer.").replace("ln_f", "norm")
        if ".c_attn." in name:
            parts = (w.t() if w.dim() == 2 else w).chunk(3)
            out |= {name.replace("c_attn", f"w{x}"): part.contiguous() for x, part in zip("qkv", parts, strict=True)}
            continue
        w = w.t().contiguous() if re.search(r"(c_proj|c_fc)\.weight$", name) else w
        out[name.replace("attn.c_proj", "attn.wo").replace("c_fc", "w1").replace("mlp.c_proj", "mlp.w2")] = w
    return out


def ranks(sd: State, n: int, embed_axis: int) -> list[State]:
    """Meta's tensor-parallel files: column-parallel matrices cut along 0, row-parallel ones along 1, norms whole."""
    out: list[State] = [{} for _ in range(n)]
    for name, w in sd.items():
        axis = None if "norm" in name or name == "rope.freqs" else (
            embed_axis if name.startswith("tok_") else 1 if re.search(r"\.(wo|w2)\.", name) else 0)
        parts = [w] * n if axis is None else list(w.chunk(n, axis))
        for state, part in zip(out, parts, strict=True):
            state[name] = part.clone()
    return out


def ggufs() -> ModuleType:
    """tests/arch/ggufs.py: the converter's keys."""
    path = TESTS / "arch" / "ggufs.py"
    if "llamactl_tests_ggufs" not in sys.modules:
        spec = importlib.util.spec_from_file_location("llamactl_tests_ggufs", path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["llamactl_tests_ggufs"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["llamactl_tests_ggufs"]


def gguf_arrays(sd: State, config: Mapping[str, Any], which: Any, *, permuted: bool, plus_one: bool
                ) -> dict[str, np.ndarray[Any, Any]]:
    """{GGUF name: float32 array}, as modify_tensors of llama.cpp's converters makes them."""
    import gguf

    heads = config.get("num_attention_heads") or config["n_head"]
    kv = config.get("num_key_value_heads") or heads
    names = gguf.get_tensor_name_map(which, config.get("num_hidden_layers") or config["n_layer"])
    stacks: dict[str, dict[int, np.ndarray[Any, Any]]] = {}
    out: dict[str, np.ndarray[Any, Any]] = {}

    def put(name: str, a: np.ndarray[Any, Any]) -> None:
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        assert found not in out
        out[found] = np.ascontiguousarray(a)

    for name, w in sd.items():
        a: np.ndarray[Any, Any] = w.float().numpy()
        if permuted and re.search(r"[qk]_proj\.(weight|bias)$", name):
            n = heads if ".q_proj" in name else kv
            a = a.reshape(n, 2, a.shape[0] // n // 2, *a.shape[1:]).swapaxes(1, 2).reshape(a.shape)
        if plus_one and name.endswith("norm.weight"):
            a = a + np.float32(1)
        if re.match(r"transformer\.h\..*c_(attn|fc|proj)\.weight$", name):
            a = a.T
        if "query_key_value" in name:  # [q k v] of each head -> all q, all k, all v
            rest = a.shape[1:]
            a = a.reshape(heads, 3, a.shape[0] // heads // 3, *rest).swapaxes(0, 1).reshape(-1, *rest)
        if (one := re.fullmatch(r"(.*\.)experts\.(\d+)\.(\w+)\.weight", name)) is not None:
            mixtral = "block_sparse_moe." in name
            stem = one[1].replace("model.", "").replace("block_sparse_moe.", "feed_forward.") if mixtral else one[1]
            stacks.setdefault(f"{stem}experts.{one[3]}.weight", {})[int(one[2])] = a
            continue
        if name.endswith(("gate_up_proj", "down_proj")) and a.ndim == 3:
            a = a.swapaxes(1, 2)
        if "gate_up_proj" in name and "experts" in name:
            kind = "bias" if name.endswith("_bias") else "weight"
            for x, half in (("gate", a[:, ::2]), ("up", a[:, 1::2])):
                put(re.sub(r"gate_up_proj.*", f"{x}_proj.{kind}", name), half)
            continue
        name = name.replace("down_proj_bias", "down_proj.bias")
        put(f"{name}.weight" if name.endswith(("down_proj", "sinks")) else name, a)
    for name, stack in stacks.items():
        put(name, np.stack([stack[e] for e in sorted(stack)]))
    return out


def write_gguf(path: Path, which: Any, keys: Any, config: Mapping[str, Any], arrays: Mapping[str, Any],
               types: Mapping[str, Any] | None = None) -> Path:
    """A GGUF file. types: name -> GGML type of arrays that are raw blocks or halves already."""
    import gguf

    w = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[which])
    w.add_type(gguf.GGUFType.MODEL)
    keys(w, dict(config))
    w.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    for name, a in arrays.items():
        w.add_tensor(name, a, raw_dtype=(types or {}).get(name))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
