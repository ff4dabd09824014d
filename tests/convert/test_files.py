"""The files that one layout may come in: shards, pickles, prefixes, buffers, Meta's ranks, nanoGPT's checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

State = dict[str, Tensor]
Ref = Callable[[str], Any]


def sharded(state: State, folder: Path, suffix: str, n: int = 3) -> None:
    """n shards and their index, tensors dealt out in turn."""
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    where = {name: f"{stem}-{i % n + 1:05d}-of-{n:05d}.{suffix}" for i, name in enumerate(state)}
    for file in sorted(set(where.values())):
        part = {k: state[k].clone() for k, f in where.items() if f == file}
        save_file(part, folder / file, {"format": "pt"}) if suffix == "safetensors" else torch.save(part, folder / file)
    total = sum(t.nbytes for t in state.values())
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {"total_size": total},
                                                                   "weight_map": where}))


def variants(r: Any) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """(what, writer of the weights) of every spelling of a Hugging Face folder."""
    state, prefix = r.wanted("hf"), "transformer." if "transformer.wte.weight" in r.state else "model."
    bare = {k.removeprefix(prefix): v for k, v in state.items()}
    layer = f"{prefix}h.0.attn." if prefix == "transformer." else "model.layers.0.self_attn."
    buffers = {f"{layer}bias": torch.ones(1, 1, 64, 64, dtype=torch.bool).tril(),
               f"{layer}masked_bias": torch.tensor(-1e4)} if prefix == "transformer." else {
                   f"{layer}rotary_emb.inv_freq": torch.ones(6)}
    table = next(v for k, v in state.items() if k.endswith(("wte.weight", "embed_tokens.weight")))

    def safe(sd: State) -> Callable[[Path], None]:
        return lambda folder: save_file({k: v.clone() for k, v in sd.items()}, folder / "model.safetensors")

    yield "sharded", lambda folder: sharded(state, folder, "safetensors")
    yield "bin", lambda folder: torch.save(state, folder / "pytorch_model.bin")
    yield "bin-sharded", lambda folder: sharded(state, folder, "bin")
    yield "bare", safe(bare)
    yield "bare-sharded", lambda folder: sharded(bare, folder, "safetensors", 2)
    yield "buffers", safe({**state, **buffers})
    if r.tied:
        yield "head-stored", safe({**state, "lm_head.weight": table})
        yield "head-shared", lambda folder: torch.save({**state, "lm_head.weight": table}, folder / "pytorch_model.bin")


SPELLINGS = ("sharded", "bin", "bin-sharded", "bare", "bare-sharded", "buffers", "head-stored", "head-shared")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("name", "target"), [("square", "hf"), ("square", "meta"), ("gpt2", "hf"), ("gpt2", "lesson"),
                                              ("gpt2", "nanogpt"), ("biased", "gguf")])
def test_every_spelling_of_a_hugging_face_folder(reference: Ref, references: Any, converted: Any, tmp_path: Path,
                                                 name: str, target: str, spelling: str) -> None:
    r = reference(name)
    at = tmp_path / "source"
    at.mkdir()
    (at / "config.json").write_text(json.dumps(r.config))
    dict(variants(r))[spelling](at)
    converted(at, tmp_path / "out", "--to", target, "--no-proof")
    found, near = references.held(tmp_path / "out", target), {"rope_freqs.weight": 1e-6}
    assert references.differences(found, r.wanted(target), near=near) == []


def test_every_spelling_is_tried(reference: Ref) -> None:
    assert [s for s, _ in variants(reference("square"))] == list(SPELLINGS)


# --- Meta's ranks


@pytest.mark.parametrize("target", ["hf", "meta", "lesson", "gguf"])
@pytest.mark.parametrize(("n", "axis"), [(2, 0), (2, 1), (4, 0), (4, 1)])
def test_ranks_are_put_together(reference: Ref, references: Any, converted: Any, tmp_path: Path, n: int, axis: int,
                                target: str) -> None:
    """The embedding cut by rows (Llama 3) or by columns (Llama 1 and 2)."""
    r = reference("square")
    (tmp_path / "source").mkdir()
    state = {**r.wanted("meta"), "rope.freqs": torch.ones(3)}
    r.put_meta(tmp_path / "source", references.written.ranks(state, n, axis))
    converted(tmp_path / "source", tmp_path / "out", "--to", target, "--context", 128)
    assert references.differences(references.held(tmp_path / "out", target), r.wanted(target, "meta")) == []


def two_ranks(references: Any, r: Any, axis: int) -> list[State]:
    """As Meta would share out biases, had it any: those behind a sum over the ranks stand whole in each."""
    sd = r.wanted("meta")
    whole = {k: v for k, v in sd.items() if k.endswith((".wo.bias", ".w2.bias"))}
    return [{**state, **whole} for state in references.written.ranks(
        {k: v for k, v in sd.items() if k not in whole}, 2, axis)]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("target", ["hf", "gguf"])
@pytest.mark.parametrize("name", ["halves", "biased"])
def test_ranks_with_grouped_heads(reference: Ref, references: Any, converted: Any, tmp_path: Path, name: str,
                                  target: str, axis: int) -> None:
    """Six query heads and two of K and V, 72 or 120 rows of q in a width of 48; bf16; biases."""
    r = reference(name)
    (tmp_path / "source").mkdir()
    r.put_meta(tmp_path / "source", two_ranks(references, r, axis))
    converted(tmp_path / "source", tmp_path / "out", "--to", target, "--context", r.context)
    found = references.held(tmp_path / "out", target)
    assert references.differences(found, r.wanted(target, "meta"), near={"rope_freqs.weight": 1e-6}) == []


@pytest.mark.parametrize("name", ["halves", "biased"])
def test_ranks_with_grouped_heads_are_written(reference: Ref, references: Any, converted: Any, tmp_path: Path, name: str
                                              ) -> None:
    r = reference(name)
    converted(r.put(tmp_path / "source", "hf"), tmp_path / "out", "--to", "meta", "--ranks", 2)
    got, want = references.ranks(tmp_path / "out"), two_ranks(references, r, 1)
    assert [references.differences(a, b) for a, b in zip(got, want, strict=True)] == [[], []]


def test_unequal_ranks_are_refused(reference: Ref, references: Any, convert: Any, tmp_path: Path) -> None:
    r = reference("halves")
    (tmp_path / "source").mkdir()
    files = two_ranks(references, r, 1)
    for state, part in zip(files, r.wanted("meta")["output.weight"].split([49, 47]), strict=True):
        state["output.weight"] = part.clone()
    r.put_meta(tmp_path / "source", files)
    got = convert(tmp_path / "source", tmp_path / "out", "--to", "hf", "--context", 128)
    assert (got.code, "output.weight" in got.err, (tmp_path / "out").exists()) == (3, True, False)


@pytest.mark.parametrize("source", ["hf", "lesson", "gguf", "meta"])
@pytest.mark.parametrize("n", [2, 4])
def test_ranks_are_written(reference: Ref, references: Any, converted: Any, tmp_path: Path, source: str, n: int
                           ) -> None:
    """Column-parallel matrices by rows, row-parallel ones by columns, as a small vocabulary's table is."""
    r = reference("square")
    at = r.put(tmp_path / "source", source)
    converted(at, tmp_path / "out", "--to", "meta", "--ranks", n, *(["--context", 128] if source == "meta" else []))
    want = references.written.ranks(r.wanted("meta"), n, 1)
    got = references.ranks(tmp_path / "out")
    assert len(got) == n
    assert [references.differences(a, b) for a, b in zip(got, want, strict=True)] == [[]] * n
    converted(tmp_path / "out", tmp_path / "back", "--to", "hf", "--tie")
    assert references.differences(references.held(tmp_path / "back", "hf"), r.wanted("hf")) == []


def test_ranks_into_other_ranks(reference: Ref, references: Any, converted: Any, tmp_path: Path) -> None:
    """Four with the table by rows into two with it by columns."""
    r = reference("square")
    (tmp_path / "source").mkdir()
    r.put_meta(tmp_path / "source", references.written.ranks(r.wanted("meta"), 4, 0))
    converted(tmp_path / "source", tmp_path / "out", "--to", "meta", "--ranks", 2, "--context", 128)
    want = references.written.ranks(r.wanted("meta"), 2, 1)
    assert [references.differences(a, b) for a, b in zip(references.ranks(tmp_path / "out"), want, strict=True)
            ] == [[], []]


@pytest.mark.parametrize(("vocab", "axis"), [(1 << 16, 1), ((1 << 16) + 2, 0)])
def test_a_large_table_is_cut_by_rows(reference: Ref, references: Any, converted: Any, tmp_path: Path, vocab: int,
                                      axis: int) -> None:
    """As Llama 3's code gathers it; its 128k tokens are beyond 65,536, Llama 2's 32k are not."""
    r = reference("one-square")
    at = tmp_path / "source"
    at.mkdir()
    (at / "config.json").write_text(json.dumps({**r.config, "vocab_size": vocab, "dtype": "bfloat16"}))
    big = {n: torch.randn(vocab, 48, generator=torch.Generator().manual_seed(i)).bfloat16()
           for i, n in enumerate(("model.embed_tokens.weight", "lm_head.weight"))}
    state = {k: v.bfloat16() for k, v in r.state.items()} | big
    save_file(state, at / "model.safetensors")
    converted(at, tmp_path / "out", "--to", "meta", "--ranks", 2, "--no-proof")
    whole = references.written.meta(state, 4, 4)
    del whole["rope.freqs"]
    want = references.written.ranks(whole, 2, axis)
    assert [references.differences(a, b) for a, b in zip(references.ranks(tmp_path / "out"), want, strict=True)
            ] == [[], []]


def test_meta_names_in_safetensors(reference: Ref, references: Any, converted: Any, tmp_path: Path) -> None:
    """As Mistral publishes them."""
    r = reference("gqa")
    (tmp_path / "source").mkdir()
    r.put_meta(tmp_path / "source", [])
    save_file(r.wanted("meta"), tmp_path / "source" / "consolidated.safetensors")
    converted(tmp_path / "source", tmp_path / "out", "--to", "hf", "--context", 128)
    assert references.differences(references.held(tmp_path / "out", "hf"), r.wanted("hf")) == []


# --- nanoGPT's files


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
@pytest.mark.parametrize("target", ["hf", "nanogpt", "lesson", "gguf"])
def test_a_compiled_nanogpt(reference: Ref, references: Any, converted: Any, tmp_path: Path, prefix: str, target: str
                            ) -> None:
    r = reference("gpt2")
    (tmp_path / "source").mkdir()
    r.put_nanogpt(tmp_path / "source", {prefix + k: v for k, v in r.wanted("nanogpt").items()})
    converted(tmp_path / "source" / "ckpt.pt", tmp_path / "out", "--to", target, "--no-proof")
    assert references.differences(references.held(tmp_path / "out", target), r.wanted(target)) == []


@pytest.mark.parametrize("target", ["hf", "gguf"])
def test_a_nanogpt_without_biases_gets_zeros(reference: Ref, references: Any, converted: Any, tmp_path: Path,
                                             target: str) -> None:
    """GPT-2 elsewhere has biases: zeros compute the same."""
    r = reference("gpt2")
    (tmp_path / "source").mkdir()
    state = {k: v for k, v in r.wanted("nanogpt").items() if not k.endswith(".bias")}
    r.put_nanogpt(tmp_path / "source", state, bias=False)
    converted(tmp_path / "source", tmp_path / "out", "--to", target)
    want = {k: torch.zeros_like(v) if k.endswith(".bias") else v for k, v in r.wanted(target).items()}
    assert references.differences(references.held(tmp_path / "out", target), want) == []


def test_a_nanogpt_without_biases_stays_so(reference: Ref, references: Any, converted: Any, tmp_path: Path) -> None:
    r = reference("gpt2-exact")
    (tmp_path / "source").mkdir()
    state = {k: v for k, v in r.wanted("nanogpt").items() if not k.endswith(".bias")}
    r.put_nanogpt(tmp_path / "source", state, bias=False)
    converted(tmp_path / "source", tmp_path / "out", "--to", "nanogpt")
    assert references.differences(references.held(tmp_path / "out", "nanogpt"), state) == []


def test_a_nanogpt_has_one_matrix_twice(reference: Ref, converted: Any, tmp_path: Path) -> None:
    """lm_head and wte share their storage, so that training goes on with a tied head."""
    converted(reference("gpt2").put(tmp_path / "source", "hf"), tmp_path / "out", "--to", "nanogpt")
    state = torch.load(tmp_path / "out" / "ckpt.pt", weights_only=True)["model"]
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
