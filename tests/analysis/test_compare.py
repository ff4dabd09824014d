"""compare tells the lineage in words; evolve arrives at the second model exactly."""

from __future__ import annotations

import pytest

from llamactl import load
from llamactl.analysis.compare import compare, evolve
from llamactl.analysis.kvcache import kv_cache
from llamactl.analysis.params import params
from llamactl.source import presets
from llamactl.spec.edits import EDITS, apply
from llamactl.spec.features import RARE, diff, features
from llamactl.spec.path import path


def test_from_gpt2_to_llama_3() -> None:
    a, b = load("gpt2").model, load("meta-llama/Meta-Llama-3-8B").model
    assert dict(features(a)) == {
        "positions": "learned table of 1,024, added at the input",
        "norm": "LayerNorm (scale and shift) before each branch",
        "feed-forward": "2 matrices, GELU (tanh form), 3,072 = 4 x hidden",
        "attention": "MHA, 12 heads of 64", "biases": "on every matrix", "head": "tied to the embedding",
        "dropout": "0.1", "layers": "12", "hidden": "768", "vocabulary": "50,257", "context": "1,024",
        "factors": "none", "beside the decoder": "nothing",
    }
    assert dict(features(b)) == {
        "positions": "RoPE, base 500,000", "norm": "RMSNorm (scale) before each branch",
        "feed-forward": "3 matrices, SwiGLU, 14,336 = 3.5 x hidden",
        "attention": "GQA, 32 query heads share 8 KV heads of 128", "biases": "none", "head": "untied",
        "dropout": "none", "layers": "32", "hidden": "4,096", "vocabulary": "128,256", "context": "8,192",
        "factors": "none", "beside the decoder": "nothing",
    }
    assert [c.name for c in diff(a, b)] == [n for n in dict(features(a)) if n not in RARE]
    assert diff(a, a) == ()


@pytest.mark.parametrize(("name", "feature", "text"), [
    ("gemma-3-4b", "norm", "RMSNorm (1 + scale) before and after each branch"),
    ("transformer-base", "norm", "LayerNorm (scale and shift) after each sum"),
    ("transformer-base", "positions", "fixed sinusoids, added at the input"),
    ("transformer-base", "biases", "feed-forward"),
    ("olmo-2-7b", "norm", "RMSNorm (scale) after each branch"),
    ("phi-2", "norm", "LayerNorm (scale and shift) once, before both branches"),
    ("falcon-40b", "norm", "LayerNorm (scale and shift) before each of two branches side by side"),
    ("phi-2", "positions", "RoPE, base 10,000, 32 of 80 dimensions"),
    ("phi-2", "biases", "on every matrix; head"),
    ("falcon-7b", "attention", "MQA, 71 query heads share 1 KV head of 64"),
    ("qwen2.5-7b", "biases", "q, k, v"),
    ("deepseek-v3", "attention", "MLA, 128 heads over a latent of 512 + 64, scores x 0.135234"),
    ("gemma-2-27b", "head", "tied to the embedding, logits capped at 30"),
    ("gemma-2-27b", "factors", "embedding x 67.8823"),
    ("gemma-3-4b", "beside the decoder", "vision, projector"),
    ("llama-3-8b", "factors", "none"),
    ("smollm3-3b", "positions", "RoPE, base 5,000,000 on 27 of 36 layers"),
    ("mixtral-8x7b", "feed-forward", "2 of 8 experts: 3 matrices, SwiGLU, 14,336 = 3.5 x hidden"),
    ("llama-3.1-8b", "positions", "RoPE, base 500,000, llama3 x8"),
])
def test_what_a_model_is_called(name: str, feature: str, text: str) -> None:
    assert dict(features(load(name).model))[feature] == text


def test_same_and_ratios() -> None:
    pairs = [(n, load(n).model) for n in ("llama-3-8b", "llama-3-8b")]
    assert compare(pairs).same
    report = compare([(n, load(n).model) for n in ("gpt2", "llama-3-8b")])
    assert not report.same
    assert report.models[1].total_ratio == 8_030_261_248 / 124_439_808
    assert report.models[1].kv_ratio == 65_536 / 18_432
    assert report.models[1].kv_bytes_per_token_bf16 == 131_072


@pytest.mark.parametrize(("a", "b"), [
    ("gpt2", "llama-3-8b"), ("llama-3-8b", "gpt2"), ("transformer-base", "gpt2"), ("llama-2-7b", "mixtral-8x7b"),
    ("gpt2", "gemma-2-9b"), ("llama-3-8b", "deepseek-v3"), ("falcon-7b", "llama-7b"), ("gpt2", "gpt2-xl"),
    ("smollm2-135m", "qwen3-8b"), ("gpt-oss-20b", "phi-2"),
])
def test_the_path_arrives(a: str, b: str) -> None:
    """The last step counts and caches as the goal does, and every named edit on the way is one that --set takes."""
    start, goal = load(a).model, load(b).model
    report = evolve(start, goal, start=a, goal=b)
    last = report.steps[-1]
    cache = kv_cache(goal, 1, dtype="bf16")
    assert last.total == goal.total()
    assert last.kv_elements_per_token == cache.elements_per_token_full + cache.elements_per_token_windowed
    assert last.ffn_share_blocks == params(goal).ffn_share_blocks
    model = start
    for step in path(start, goal):
        for edit in step.edits:
            model = apply(model, edit)
        if step.edits:
            assert model.total() == step.model.total()
    assert sum(not s.edits for s in report.steps) <= 2


def test_gpt2_to_llama_needs_no_unnamed_step() -> None:
    steps = path(load("gpt2").model, load("llama-3-8b").model)
    assert all(s.edits for s in steps)
    assert diff(steps[-1].model, load("llama-3-8b").model) == ()


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "mixtral-8x7b", "gemma-2-2b", "falcon-40b"])
def test_an_edit_to_what_is_there_changes_nothing(name: str) -> None:
    model = load(name).model
    a = model.layers[0].attn
    assert a is not None
    same = [f"vocab={model.embed.vocab}", f"tie={model.tied}", f"hidden={model.hidden}", f"n_layers={model.n_layers}",
            f"n_heads={a.n_heads}", f"n_kv_heads={a.n_kv_heads}", f"head_dim={a.head_dim}"]  # type: ignore[union-attr]
    for text in same:
        assert apply(model, text).total() == model.total(), text


def test_edits_have_one_name_each() -> None:
    words = [w for e in EDITS for w in (e.name, *e.words)] + [f for e in EDITS for f, _ in e.flags]
    assert len(set(words)) == len(words) - 3  # "tie", "gate" and "biases" are both a key and a bare word


def test_every_preset_can_be_told() -> None:
    for name in presets.names():
        assert all(f.text for f in features(load(f"preset:{name}").model)), name
