"""The same small models in every layout, as stored tensors: what convert must write, by code that is not llamactl's.

A model is drawn once by transformers; `Reference.wanted` gives its tensors in a layout through tests/net/written.py,
`Reference.put` writes a whole checkpoint of it, and `held` reads what lies on disk with torch, safetensors or gguf.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

written: Any = sys.modules["llamactl_tests_written"]
State = dict[str, Tensor]
A = gguf.MODEL_ARCH
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
NOTHING: Mapping[str, float] = {}
ONE_LAYER = {"num_hidden_layers": 1}


class Case(NamedTuple):
    """One model: a golden with some words changed, and the layouts it has. which, keys: of llama.cpp's converter."""

    golden: str
    changes: Mapping[str, Any]
    layouts: tuple[str, ...]
    which: Any
    keys: str
    dtype: torch.dtype = torch.float32


_LLAMA, _GPT2, _TWO = ("hf", "meta", "lesson", "gguf"), ("hf", "nanogpt", "lesson", "gguf"), ("hf", "gguf")
_SQUARE = {"head_dim": None, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 96}
_BIASED = {"vocab_size": 96, "head_dim": 20, "rope_scaling": LLAMA3, "max_position_embeddings": 16384}
CASES = {
    # six heads of 12 in a width of 48, two of K and V, a head of its own
    "gqa": Case("llama", {}, _LLAMA, A.LLAMA, "llama"),
    # heads of 20, biases everywhere, a tied head, a RoPE stretched as Llama 3.1's
    "biased": Case("llama-bias-tied-llama3", _BIASED, _LLAMA, A.LLAMA, "llama"),
    # q, k, v and o are 48 x 48: nothing but values tells them apart, or from their transposes
    "square": Case("llama", {**_SQUARE, "tie_word_embeddings": True}, _LLAMA, A.LLAMA, "llama"),
    # as gqa, in bfloat16
    "halves": Case("llama", {"num_hidden_layers": 2, "vocab_size": 96}, _LLAMA, A.LLAMA, "llama", torch.bfloat16),
    "gpt2": Case("gpt2", {"n_head": 12}, _GPT2, A.GPT2, "gpt2"),
    "gpt2-exact": Case("gpt2", {"n_head": 12, "activation_function": "gelu"}, _GPT2[:-1], A.GPT2, "gpt2"),
    "gpt2-halves": Case("gpt2", {"n_head": 12, "n_layer": 2}, _GPT2, A.GPT2, "gpt2", torch.float16),
    "qwen2": Case("qwen2", {"use_sliding_window": False}, _TWO, A.QWEN2, "base"),
    "gemma": Case("gemma", {}, _TWO, A.GEMMA, "gemma"),
    "mixtral": Case("mixtral", {}, _TWO, A.LLAMA, "llama"),
    "qwen3_moe": Case("qwen3_moe", {"mlp_only_layers": []}, _TWO, A.QWEN3MOE, "moe"),
    # one layer each, for tests that convert hundreds of times
    "one": Case("llama-bias-tied-llama3", {**_BIASED, **ONE_LAYER, "tie_word_embeddings": False}, _LLAMA, A.LLAMA,
                "llama"),
    "one-square": Case("llama", {**_SQUARE, **ONE_LAYER}, _LLAMA, A.LLAMA, "llama"),
    "one-gpt2": Case("gpt2", {"n_layer": 1}, _GPT2, A.GPT2, "gpt2"),
    "one-gpt2-untied": Case("gpt2", {"n_layer": 1, "tie_word_embeddings": False}, ("hf", "lesson"), A.GPT2, "gpt2"),
    "one-gemma": Case("gemma", ONE_LAYER, _TWO, A.GEMMA, "gemma"),
    "one-qwen2": Case("qwen2", {**ONE_LAYER, "use_sliding_window": False, "max_window_layers": 0,
                                "tie_word_embeddings": False}, _TWO, A.QWEN2, "base"),
    "one-mixtral": Case("mixtral", ONE_LAYER, _TWO, A.LLAMA, "llama"),
    "one-qwen3_moe": Case("qwen3_moe", {**ONE_LAYER, "mlp_only_layers": []}, _TWO, A.QWEN3MOE, "moe"),
}
GGML = {torch.float32: gguf.GGMLQuantizationType.F32, torch.float16: gguf.GGMLQuantizationType.F16,
        torch.bfloat16: gguf.GGMLQuantizationType.BF16}
CONTEXT_KEYS = ("max_position_embeddings", "n_positions")


class Reference:
    """A model of CASES. state: its stored tensors under Hugging Face names."""

    def __init__(self, name: str, folder: Path) -> None:
        self.case = case = CASES[name]
        self.config: dict[str, Any] = written.config_of(case.golden, **case.changes)
        self.config["dtype"] = str(case.dtype).removeprefix("torch.")
        state = written.saved(folder, self.config)
        self.state: State = {k: v.to(case.dtype).contiguous() for k, v in state.items()}
        self.heads = self.config.get("num_attention_heads") or self.config["n_head"]
        self.kv = self.config.get("num_key_value_heads") or self.heads
        self.context = next(self.config[k] for k in CONTEXT_KEYS if k in self.config)
        self._embed = "transformer.wte.weight" if "transformer.wte.weight" in state else "model.embed_tokens.weight"

    @cached_property
    def tied(self) -> bool:
        return "lm_head.weight" not in self.state

    def hf(self, source: str = "hf") -> State:
        """The tensors under Hugging Face names after a conversion from `source`.

        Meta's layout knows no tie. GGUF holds 1 + w of Gemma's norms, rounded once, and again when 1 is taken away.
        """
        if source == "gguf" and self.case.which == A.GEMMA:
            return {k: (w + 1) - 1 if k.endswith("norm.weight") else w for k, w in self.state.items()}
        if source != "meta" or not self.tied:
            return dict(self.state)
        return {**self.state, "lm_head.weight": self.state[self._embed].clone()}

    def wanted(self, layout: str, source: str = "hf") -> State:
        """Every tensor of the model in `layout`, as converted from `source`, without buffers."""
        sd = self.hf(source)
        whole = {**sd, "lm_head.weight": sd.get("lm_head.weight", sd[self._embed])}
        if layout == "hf":
            return sd
        if layout == "meta":
            out = written.meta(whole, self.heads, self.kv)
            del out["rope.freqs"]
        elif layout == "nanogpt":
            out = written.nanogpt(sd)
            del out["transformer.h.0.attn.bias"]
        elif layout == "lesson" and self.case.which == A.GPT2:
            out = {**written.lesson_gpt2({k: v for k, v in sd.items() if k != "lm_head.weight"}),
                   "lm_head.weight": whole["lm_head.weight"]}
        elif layout == "lesson":
            out = written.lesson_llama(whole, self.heads, self.kv)
        else:
            return self._gguf(sd)
        return {k: v.contiguous() for k, v in out.items()}

    def _gguf(self, sd: State) -> State:
        """llama.cpp's converter: vectors and routers in float32, matrices as they are."""
        arrays = written.gguf_arrays(sd, self.config, self.case.which, permuted=self.case.which == A.LLAMA,
                                     plus_one=self.case.which == A.GEMMA)
        precise = ("position_embd.weight", "ffn_gate_inp.weight")
        out = {k: torch.from_numpy(a) if a.ndim == 1 or k.endswith(precise) else torch.from_numpy(a).to(
            self.case.dtype) for k, a in arrays.items()}
        if self.config.get("rope_scaling"):
            out["rope_freqs.weight"] = torch.tensor(rope_factors(self.config))
        return out

    def put(self, folder: Path, layout: str) -> Path:
        """A checkpoint in `layout`, with the buffers that such files have; what to give to convert."""
        folder.mkdir(parents=True)
        if layout == "gguf":
            self.put_gguf(folder / "model.gguf", self.wanted("gguf"))
            return folder / "model.gguf"
        state = self.wanted(layout)
        if layout in ("hf", "lesson"):
            put_json(folder / "config.json", self.config)
            save_file({k: v.clone() for k, v in state.items()}, folder / "model.safetensors", {"format": "pt"})
        elif layout == "meta":
            self.put_meta(folder, [{**state, "rope.freqs": torch.ones(3)}])
        else:
            state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
            self.put_nanogpt(folder, state)
        return folder

    def put_meta(self, folder: Path, files: Sequence[State]) -> None:
        put_json(folder / "params.json", params(self.config))
        for n, state in enumerate(files):
            torch.save(state, folder / f"consolidated.{n:02d}.pth")

    def put_nanogpt(self, folder: Path, state: State, **changes: Any) -> None:
        c = self.config
        args = {"n_layer": c["n_layer"], "n_head": c["n_head"], "n_embd": c["n_embd"], "block_size": c["n_positions"],
                "bias": True, "vocab_size": c["vocab_size"], "dropout": 0.0, **changes}
        exact = c["activation_function"] == "gelu"  # nanoGPT's own, which it does not say
        said = {} if exact else {"hf_config": {k: c[k] for k in ("activation_function", "layer_norm_epsilon")}}
        torch.save({"model": state, "model_args": args, "iter_num": 3, "config": {"compile": True},
                    "best_val_loss": torch.tensor(1.5), **said}, folder / "ckpt.pt")

    def put_gguf(self, path: Path, state: State) -> None:
        raw, types = {}, {}
        for name, t in state.items():
            raw[name] = t.float().numpy()
            if t.dtype != torch.float32:
                types[name] = GGML[t.dtype]
                raw[name] = gguf.quantize(raw[name], types[name])
        keys: Callable[..., None] = getattr(written.ggufs(), self.case.keys)
        written.write_gguf(path, self.case.which, keys, self.config, raw, types)


def put_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data))


def params(config: Mapping[str, Any]) -> dict[str, Any]:
    """Meta's params.json. The width of the feed-forward is 2/3 of 4 dim, times a factor, up to a multiple of 8."""
    assert (config["hidden_size"], config["intermediate_size"]) == (48, 56)
    out = {"dim": 48, "n_layers": config["num_hidden_layers"], "norm_eps": config["rms_norm_eps"],
           "n_heads": config["num_attention_heads"], "n_kv_heads": config["num_key_value_heads"],
           "vocab_size": config["vocab_size"], "multiple_of": 8, "ffn_dim_multiplier": 0.43,
           "rope_theta": config["rope_theta"]}
    out |= {k: config[k] for k in ("head_dim", "attention_bias", "mlp_bias") if k in config}
    return out | ({"use_scaled_rope": True} if config.get("rope_scaling") else {})


def rope_factors(config: Mapping[str, Any]) -> list[float]:
    """rope_freqs.weight of llama.cpp's converter: by how much each pair of a llama3 RoPE is slowed."""
    s = config["rope_scaling"]
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    out = []
    for pair in range(config["head_dim"] // 2):
        turns = s["original_max_position_embeddings"] / (2 * math.pi * config["rope_theta"] ** (
            2 * pair / config["head_dim"]))  # of the pair within the original length
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        out.append(1 / ((1 - blend) / s["factor"] + blend))
    return out


def held(path: Path, layout: str) -> State:
    """Every stored tensor of a folder or file, by no code of llamactl."""
    if layout == "gguf":
        return {t.name: _of_gguf(t) for t in gguf_reader(path).tensors}
    if layout in ("hf", "lesson"):
        out: State = {}
        for file in sorted(path.glob("*.safetensors")):
            more = load_file(file)
            assert out.keys().isdisjoint(more)
            out |= more
        return out
    if layout == "meta":
        (state,) = ranks(path)
        return state
    found: State = torch.load(path / "ckpt.pt", weights_only=True)["model"]
    return found


def ranks(path: Path) -> list[State]:
    """The state dicts of Meta's files, in order."""
    return [torch.load(f, weights_only=True) for f in sorted(path.glob("consolidated.*.pth"))]


def gguf_reader(path: Path) -> Any:
    return gguf.GGUFReader(path / "model.gguf" if path.is_dir() else path)


def _of_gguf(t: Any) -> Tensor:
    shape = [int(n) for n in reversed(t.shape)]
    raw = torch.from_numpy(np.array(t.data))
    kind = next(kind for kind, word in GGML.items() if word == t.tensor_type)
    return raw.view(kind).view(shape)


def differences(got: State, want: State, *, near: Mapping[str, float] = NOTHING) -> list[str]:
    """What is not the same, bit for bit: names, types, shapes, values. near: by how much the named may be off."""
    out = [f"{n} is missing" for n in sorted(want.keys() - got.keys())]
    out += [f"{n} is too much" for n in sorted(got.keys() - want.keys())]
    for n in sorted(want.keys() & got.keys()):
        a, b = got[n], want[n]
        if a.dtype != b.dtype or a.shape != b.shape:
            out.append(f"{n} is {a.dtype} {list(a.shape)}, not {b.dtype} {list(b.shape)}")
        elif not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
            off = float((a.double() - b.double()).abs().max())
            if not off <= near.get(n, 0.0):
                out.append(f"{n} is up to {off:.3g} off")
    return out
