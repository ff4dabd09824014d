"""Every pair of layouts: what is written is what an independent writer writes, comes back, and computes the same."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

State = dict[str, Tensor]
Ref = Callable[[str], Any]
LAYOUTS = {
    **dict.fromkeys(("gqa", "biased", "square", "halves"), ("hf", "meta", "lesson", "gguf")),
    **dict.fromkeys(("gpt2", "gpt2-halves"), ("hf", "nanogpt", "lesson", "gguf")),
    "gpt2-exact": ("hf", "nanogpt", "lesson"),
    **dict.fromkeys(("qwen2", "gemma", "mixtral", "qwen3_moe"), ("hf", "gguf"))}
PAIRS = [(name, *pair) for name, layouts in LAYOUTS.items() for pair in product(layouts, repeat=2)]
IDS = torch.tensor([7 * i * i % 89 + 3 for i in range(48)])


@pytest.fixture(scope="module")
def original(reference: Ref, computed: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tensor]:
    """original(name): logits of the model as transformers made it."""
    done: dict[str, Tensor] = {}

    def logits(name: str) -> Tensor:
        if name not in done:
            folder = reference(name).put(tmp_path_factory.mktemp("original") / name, "hf")
            with torch.no_grad():
                done[name] = computed.by_transformers(folder, IDS)
        return done[name]

    return logits


def off(a: Tensor, b: Tensor) -> float:
    """The largest difference, in parts of the largest value."""
    assert a.shape == b.shape
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize(("name", "source", "target"), PAIRS)
def test_every_pair(reference: Ref, references: Any, computed: Any, converted: Any, original: Callable[[str], Tensor],
                    tmp_path: Path, name: str, source: str, target: str) -> None:
    """Bits as another writer has them, logits as another network has them, and the bits of the source on the way back.
    """
    r = reference(name)
    at = r.put(tmp_path / "source", source)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    context = ["--context", r.context] if source == "meta" else []
    converted(at, tmp_path / "out", "--to", target, *context)
    assert {p: p.read_bytes() for p in before} == before
    found = references.held(tmp_path / "out", target)
    near = dict.fromkeys(["rope_freqs.weight"], 1e-6)  # computed, not carried
    assert references.differences(found, r.wanted(target, source), near=near) == []
    assert off(computed.logits(tmp_path / "out", target, r, IDS), original(name)) < 1e-5
    shutil.rmtree(tmp_path / "out" / "back", ignore_errors=True)  # of the GGUF file in transformers
    tie = ["--tie"] if r.tied and target == "meta" != source else []
    converted(tmp_path / "out", tmp_path / "back", "--to", source, "--no-proof", *tie)
    by = "gguf" if "gguf" in (source, target) else "hf"
    assert references.differences(references.held(tmp_path / "back", source), r.wanted(source, by), near=near) == []


def test_the_pairs_are_all_there(references: Any) -> None:
    assert {n: c.layouts for n, c in references.CASES.items() if not n.startswith("one")} == LAYOUTS


@pytest.mark.parametrize(("name", "changes", "target", "code"), [
    ("gpt2", {}, "meta", "layout-unknown"), ("gqa", {}, "nanogpt", "layout-unknown"),
    ("qwen2", {}, "meta", "layout-unknown"), ("qwen2", {}, "lesson", "layout-unknown"),
    ("mixtral", {}, "nanogpt", "layout-unknown"), ("gpt2-exact", {}, "gguf", "layout-cannot-say"),
    ("biased", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "meta", "layout-cannot-say"),
    ("gpt2", {"layer_norm_epsilon": 1e-6}, "nanogpt", "layout-cannot-say"),
    ("gpt2", {"activation_function": "relu"}, "nanogpt", "layout-cannot-say"),
    ("qwen2", {"use_sliding_window": True}, "gguf", "layout-cannot-say"),
    ("one-gpt2-untied", {}, "gguf", "layout-cannot-say"), ("one-gpt2-untied", {}, "nanogpt", "layout-cannot-say")])
def test_what_a_layout_cannot_hold_is_refused(reference: Ref, convert: Any, tmp_path: Path, name: str,
                                              changes: dict[str, Any], target: str, code: str) -> None:
    r = reference(name)
    at = r.put(tmp_path / "source", "hf")
    (at / "config.json").write_text(json.dumps({**r.config, **changes}))
    got = convert(at, tmp_path / "out", "--to", target)
    assert (got.code, got.out) == (3, "")
    assert f"error[{code}]: " in got.err
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


# --- GGUF's types, and llama.cpp itself


def test_q8_0_is_what_the_gguf_package_makes(reference: Ref, references: Any, converted: Any, tmp_path: Path) -> None:
    """Blocks of 32: matrices whose rows have none, 48 wide, are halves. And unpacked again as that package does it."""
    import gguf

    r, kind = reference("gqa"), gguf.GGMLQuantizationType
    converted(r.put(tmp_path / "source", "hf"), tmp_path / "out", "--to", "gguf", "--dtype", "q8_0", "--no-proof")
    read = {t.name: t for t in references.gguf_reader(tmp_path / "out").tensors}
    want = r.wanted("gguf")
    assert read.keys() == want.keys()
    for name, t in read.items():
        made = kind.F32 if want[name].dim() == 1 else kind.F16 if want[name].shape[1] % 32 else kind.Q8_0
        assert (name, t.tensor_type) == (name, made)
        assert t.data.tobytes() == gguf.quantize(want[name].numpy(), made).tobytes(), name


def test_q8_0_with_whole_blocks(converted: Any, references: Any, reference: Ref, tmp_path: Path) -> None:
    import gguf

    r, kind = reference("one-gpt2"), gguf.GGMLQuantizationType
    converted(r.put(tmp_path / "source", "hf"), tmp_path / "out", "--to", "gguf", "--dtype", "q8_0", "--no-proof")
    reader = references.gguf_reader(tmp_path / "out")
    read = {t.name: t for t in reader.tensors}
    down = read["blk.0.ffn_down.weight"]  # 192 wide, transposed on the way
    assert down.tensor_type == kind.Q8_0
    assert down.data.tobytes() == gguf.quantize(r.wanted("gguf")[down.name].numpy(), kind.Q8_0).tobytes()
    converted(tmp_path / "out", tmp_path / "back", "--to", "hf", "--no-proof")
    back = references.held(tmp_path / "back", "hf")["transformer.h.0.mlp.c_proj.weight"]
    want = torch.from_numpy(gguf.dequantize(down.data, kind.Q8_0).copy()).view(48, 192)
    assert torch.equal(back.t(), want)


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama_cpp is not installed")
@pytest.mark.parametrize("name", [n for n, layouts in LAYOUTS.items() if "gguf" in layouts])
def test_llama_cpp_computes_the_same(reference: Ref, converted: Any, original: Callable[[str], Tensor], tmp_path: Path,
                                     name: str) -> None:
    import llama_cpp

    source = "meta" if name in ("square", "biased") else "hf"
    converted(reference(name).put(tmp_path / "source", source), tmp_path / "m.gguf", "--to", "gguf",
         *(["--context", reference(name).context] if source == "meta" else []))
    llm = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=64, n_batch=64, n_threads=1, logits_all=True, verbose=False,
                          type_k=0, type_v=0, flash_attn=False)
    try:
        llm.eval(IDS.tolist())
        theirs = torch.from_numpy(llm.scores[: len(IDS)].copy())
    finally:
        llm.close()
    # its GELU comes from a table of halves, and a product of halves and float32 is taken in halves
    assert off(theirs, original(name)) < {"halves": 2e-2, "gpt2-halves": 5e-3}.get(name, 1e-3)
