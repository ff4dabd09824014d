"""Networks by hand, one for each layout, that load its own names strictly: whether what was written computes the model.

Meta's rotates neighbouring pairs as complex numbers, the lesson's pair by pair, nanoGPT's has one c_attn; a GGUF file
becomes a Hugging Face folder again by its own metadata, and transformers computes it. No code of llamactl is used.

shapes: T tokens, H heads, D head_dim
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

references: Any = sys.modules["llamactl_tests_convert_references"]
State = dict[str, Tensor]


def logits(path: Path, layout: str, reference: Any, ids: Tensor) -> Tensor:
    """float32 logits (T, vocab) of a checkpoint. reference: the model it should be, for what its layout leaves open."""
    with torch.no_grad():
        if layout == "hf":
            return by_transformers(path, ids)
        if layout == "gguf":
            return by_gguf(path, reference, ids)
        if layout == "meta":
            net = MetaLlama(json.loads((path / "params.json").read_text()))
            state = torch.load(path / "consolidated.00.pth", weights_only=True)
        elif layout == "nanogpt":
            data = torch.load(path / "ckpt.pt", weights_only=True)
            net, state = NanoGPT(data["model_args"], data["hf_config"]["activation_function"]), data["model"]
        else:
            config = json.loads((path / "config.json").read_text())
            net = LessonGPT2(config) if "n_embd" in config else LessonLlama(config)
            state = load_file(path / "model.safetensors")
        net.load_state_dict(state)
        out: Tensor = net.float().eval()(ids)
        return out


def by_transformers(folder: Path, ids: Tensor) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    out: Tensor = model.eval()(ids[None], use_cache=False).logits[0]
    return out


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(T, H, D) each, K and V with fewer heads -> (T, H * D)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).flatten(1)


def frequencies(dim: int, theta: float, factor: float | None) -> Tensor:
    """(D / 2,) radians a position; factor: of Llama 3.1's stretching, with its 1, 4 and 8192."""
    w = theta ** (-torch.arange(0, dim, 2).double() / dim)
    if factor:
        blend = ((8192 * w / (2 * math.pi) - 1) / (4 - 1)).clamp(0, 1)
        w = blend * w + (1 - blend) * w / factor
    return w


class RMS(nn.Module):
    """x / rms(x), times the parameter `name`."""

    def __init__(self, width: int, eps: float, name: str = "weight") -> None:
        super().__init__()
        self.eps, self.name = eps, name
        self.register_parameter(name, nn.Parameter(torch.ones(width)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * getattr(self, self.name)
        return out


class MetaAttention(nn.Module):
    def __init__(self, p: Mapping[str, Any], dim: int) -> None:
        super().__init__()
        biased = p.get("attention_bias", False)
        self.dim = dim
        self.wq = nn.Linear(p["dim"], p["n_heads"] * dim, biased)
        self.wk = nn.Linear(p["dim"], p["n_kv_heads"] * dim, biased)
        self.wv = nn.Linear(p["dim"], p["n_kv_heads"] * dim, biased)
        self.wo = nn.Linear(p["n_heads"] * dim, p["dim"], biased)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        def rotated(y: Tensor) -> Tensor:
            pairs = torch.view_as_complex(y.view(len(x), -1, self.dim // 2, 2))
            return torch.view_as_real(pairs * turns[:, None]).flatten(2)

        v = self.wv(x).view(len(x), -1, self.dim)
        out: Tensor = self.wo(causal(rotated(self.wq(x)), rotated(self.wk(x)), v))
        return out


class MetaFeedForward(nn.Module):
    def __init__(self, p: Mapping[str, Any]) -> None:
        super().__init__()
        width = int(p.get("ffn_dim_multiplier", 1) * int(2 * 4 * p["dim"] / 3))
        width = p["multiple_of"] * math.ceil(width / p["multiple_of"])
        biased = p.get("mlp_bias", False)
        self.w1, self.w3 = nn.Linear(p["dim"], width, biased), nn.Linear(p["dim"], width, biased)
        self.w2 = nn.Linear(width, p["dim"], biased)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class MetaBlock(nn.Module):
    def __init__(self, p: Mapping[str, Any], dim: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = MetaAttention(p, dim), MetaFeedForward(p)
        self.attention_norm, self.ffn_norm = RMS(p["dim"], p["norm_eps"]), RMS(p["dim"], p["norm_eps"])

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class MetaLlama(nn.Module):
    """params.json -> Llama in Meta's names."""

    def __init__(self, p: Mapping[str, Any]) -> None:
        super().__init__()
        dim = p.get("head_dim", p["dim"] // p["n_heads"])
        factor = p.get("rope_scaling_factor", 8.0) if p.get("use_scaled_rope") else None
        self.turning = frequencies(dim, p["rope_theta"], factor)
        self.tok_embeddings = nn.Embedding(p["vocab_size"], p["dim"])
        self.layers = nn.ModuleList(MetaBlock(p, dim) for _ in range(p["n_layers"]))
        self.norm = RMS(p["dim"], p["norm_eps"])
        self.output = nn.Linear(p["dim"], p["vocab_size"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(len(ids)).double(), self.turning)
        turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, turns)
        out: Tensor = self.output(self.norm(x))
        return out


class Grouped(nn.Module):
    """The lesson's attention: every pair of neighbours turned by its angle."""

    def __init__(self, c: Mapping[str, Any], dim: int) -> None:
        super().__init__()
        biased = c.get("attention_bias", False)
        width, self.heads, self.kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
        self.wq = nn.Linear(width, self.heads * dim, biased)
        self.wk, self.wv = nn.Linear(width, self.kv * dim, biased), nn.Linear(width, self.kv * dim, biased)
        self.wo = nn.Linear(self.heads * dim, width, biased)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def turned(y: Tensor, n: int) -> Tensor:
            y = y.view(len(x), n, -1)
            even, odd, out = y[..., 0::2], y[..., 1::2], torch.empty_like(y)
            out[..., 0::2] = even * cos[:, None] - odd * sin[:, None]
            out[..., 1::2] = even * sin[:, None] + odd * cos[:, None]
            return out

        q, k, v = turned(self.wq(x), self.heads), turned(self.wk(x), self.kv), self.wv(x).view(len(x), self.kv, -1)
        out: Tensor = self.wo(causal(q, k, v))
        return out


class SwiGLU(nn.Module):
    """w1 gates, w2 is what it gates, w3 projects back."""

    def __init__(self, width: int, ffn: int, biased: bool) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, ffn, biased), nn.Linear(width, ffn, biased)
        self.w3 = nn.Linear(ffn, width, biased)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w3(F.silu(self.w1(x)) * self.w2(x))
        return out


class LessonLlama(nn.Module):
    """config.json -> Llama as a lesson names it."""

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = c["hidden_size"], c["rms_norm_eps"]
        dim = c.get("head_dim") or width // c["num_attention_heads"]
        self.turning = frequencies(dim, c["rope_theta"], (c.get("rope_scaling") or {}).get("factor"))
        self.wte = nn.Embedding(c["vocab_size"], width)
        self.blocks = nn.ModuleList(nn.ModuleDict({
            "gqa": Grouped(c, dim), "ff": SwiGLU(width, c["intermediate_size"], c.get("mlp_bias", False)),
            "rms_1": RMS(width, eps, "gamma"), "rms_2": RMS(width, eps, "gamma")})
            for _ in range(c["num_hidden_layers"]))
        self.norm = RMS(width, eps, "gamma")
        self.lm_head = nn.Linear(width, c["vocab_size"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(len(ids)).double(), self.turning)
        cos, sin = angles.cos().float(), angles.sin().float()
        x = self.wte(ids)
        for block in self.blocks:
            x = x + block["gqa"](block["rms_1"](x), cos, sin)
            x = x + block["ff"](block["rms_2"](x))
        out: Tensor = self.lm_head(self.norm(x))
        return out


class NanoGPT(nn.Module):
    """model_args -> GPT-2 as nanoGPT names it, with the GELU that is said beside them."""

    def __init__(self, a: Mapping[str, Any], gelu: str) -> None:
        super().__init__()
        width, self.heads = a["n_embd"], a["n_head"]
        self.gelu = {"gelu": nn.GELU(), "gelu_new": nn.GELU("tanh")}[gelu]
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(a["vocab_size"], width), "wpe": nn.Embedding(a["block_size"], width),
            "h": nn.ModuleList(nn.ModuleDict({
                "ln_1": nn.LayerNorm(width), "ln_2": nn.LayerNorm(width),
                "attn": nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)}),
                "mlp": nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)}),
            }) for _ in range(a["n_layer"])), "ln_f": nn.LayerNorm(width)})
        self.lm_head = nn.Linear(width, a["vocab_size"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        t: Any = self.transformer
        x = t["wte"](ids) + t["wpe"].weight[: len(ids)]
        for h in t["h"]:
            q, k, v = (y.view(len(ids), self.heads, -1) for y in h["attn"]["c_attn"](h["ln_1"](x)).split(
                x.shape[1], dim=1))
            x = x + h["attn"]["c_proj"](causal(q, k, v))
            x = x + h["mlp"]["c_proj"](self.gelu(h["mlp"]["c_fc"](h["ln_2"](x))))
        out: Tensor = self.lm_head(t["ln_f"](x))
        return out


class LessonGPT2(nn.Module):
    """config.json -> GPT-2 as a lesson names it: separate wq, wk and wv."""

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        width, self.heads = c["n_embd"], c["n_head"]
        self.gelu = {"gelu": nn.GELU(), "gelu_new": nn.GELU("tanh")}[c["activation_function"]]
        self.wte, self.wpe = nn.Embedding(c["vocab_size"], width), nn.Embedding(c["n_positions"], width)
        self.blocks = nn.ModuleList(nn.ModuleDict({
            "ln_1": nn.LayerNorm(width), "ln_2": nn.LayerNorm(width),
            "attn": nn.ModuleDict({f"w{x}": nn.Linear(width, width) for x in "qkvo"}),
            "mlp": nn.ModuleDict({"w1": nn.Linear(width, 4 * width), "w2": nn.Linear(4 * width, width)}),
        }) for _ in range(c["n_layer"]))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, c["vocab_size"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: len(ids)]
        for b in self.blocks:
            a, y = b["attn"], b["ln_1"](x)
            q, k, v = (a[f"w{n}"](y).view(len(ids), self.heads, -1) for n in "qkv")
            x = x + a["wo"](causal(q, k, v))
            x = x + b["mlp"]["w2"](self.gelu(b["mlp"]["w1"](b["ln_2"](x))))
        out: Tensor = self.lm_head(self.norm(x))
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
            "intermediate_size": field("feed_forward_length"), "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
            "rope_theta": field("rope.freq_base", 10000.0), "max_position_embeddings": field("context_length"),
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
