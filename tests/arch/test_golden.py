"""Every golden against the Model that llamactl reads from its config: totals, names, shapes, kinds, caches.

The folders are found by scanning; header.json and logits.json are what transformers made (tests/make_golden.py).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from llamactl import arch
from llamactl.spec.latent import LatentAttention
from llamactl.spec.model import Model
from llamactl.spec.naming import stored_tensors

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NAMES = sorted(p.name for p in GOLDEN.iterdir() if (p / "config.json").exists())
# Types that transformers does not know -> the test file that holds them to their published code and totals.
BY_HAND: dict[str, str] = json.loads((Path(__file__).parent / "by_hand.json").read_text(encoding="utf-8"))


@lru_cache
def read(name: str, file: str) -> Any:
    return json.loads((GOLDEN / name / f"{file}.json").read_text(encoding="utf-8"))


@lru_cache
def model(name: str) -> Model:
    return arch.describe(read(name, "config"), name)


@pytest.mark.parametrize("name", NAMES)
def test_total(name: str) -> None:
    assert model(name).total() == read(name, "header")["total"]


@pytest.mark.parametrize("name", NAMES)
def test_total_by_multiplication_is_the_sum_over_tensors(name: str) -> None:
    tensors = list(model(name).tensors())
    assert model(name).total() == sum(math.prod(t.shape) for t in tensors if t.kind == "param")
    twice = [n for n, count in Counter(t.name for t in tensors).items() if count > 1]
    assert twice == []


@pytest.mark.parametrize("name", NAMES)
def test_stored_names_shapes_and_kinds(name: str) -> None:
    ours = {}
    for s in stored_tensors(model(name), arch.names(model(name))):
        assert s.name not in ours
        kinds = {t.kind for t in s.of}
        assert len(kinds) == 1
        assert math.prod(s.shape) == sum(math.prod(t.shape) for t in s.of)
        ours[s.name] = {"shape": list(s.shape), "kind": kinds.pop()}
    assert ours == read(name, "header")["tensors"]


@pytest.mark.parametrize("name", NAMES)
def test_cache(name: str) -> None:
    """transformers keeps window - 1 tokens of a sliding or chunked layer: the new one stands beside the cache."""
    kept, tokens = read(name, "header")["cache"], read(name, "header")["tokens"]
    assert len(kept) == model(name).n_layers
    for layer, shapes in zip(model(name).layers, kept, strict=True):
        assert layer.state_elements() == sum(math.prod(states) for states in shapes.get("states", ()))
        if not layer.caches():
            assert "k" not in shapes
            continue
        cache = layer.attn.cache()
        length = tokens if cache.window is None else min(tokens, cache.window - 1)
        if isinstance(layer.attn, LatentAttention):  # one latent and one rotated key, shared by all heads
            own = {"indexer": [1, tokens, layer.attn.indexer.head_dim]} if layer.attn.indexer else {}
            assert shapes == {"k": [1, 1, tokens, layer.attn.kv_rank], "v": [1, 1, tokens, layer.attn.qk_rope], **own}
            assert sum(c.elements for c in layer.caches()) == sum(math.prod(x) for x in shapes.values()) // tokens
            assert cache.elements == layer.attn.kv_rank + layer.attn.qk_rope
            assert (cache.kind, cache.window) == ("latent", None)
        else:
            heads = cache.hf_heads or cache.heads
            assert shapes == {"k": [1, heads, length, cache.k_dim], "v": [1, heads, length, cache.v_dim]}
            assert (cache.kind == "full") == (cache.window is None)


def test_windows_differ_between_goldens() -> None:
    """The check above would be idle if no golden had a window, a chunk, a latent or repeated heads."""
    caches = [layer.attn.cache() for name in NAMES for layer in model(name).layers if layer.attn]
    assert {c.kind for c in caches} == {"full", "sliding", "chunked", "latent"}
    assert any(c.hf_heads not in (None, c.heads) for c in caches)


@pytest.mark.parametrize("name", NAMES)
def test_logits_belong_to_the_config(name: str) -> None:
    recorded, tokens, vocab = read(name, "logits"), read(name, "header")["tokens"], model(name).head.vocab
    assert len(recorded["ids"]) == len(recorded["logits"]) == tokens
    assert all(0 <= i < vocab for i in recorded["ids"])
    assert all(len(row) == vocab and all(map(math.isfinite, row)) for row in recorded["logits"])
    assert len({tuple(row) for row in recorded["logits"]}) == tokens
    assert recorded["transformers"] == read(name, "header")["transformers"]


def test_every_family_has_a_golden() -> None:
    """Or a test of its own, where transformers does not know the type; the 2017 block is computed by hand below."""
    by_hand = {arch.families()[t] for t in BY_HAND}
    assert set(arch.families().values()) - {model(n).family for n in NAMES} <= by_hand
    assert {model(n).model_type for n in NAMES} == set(arch.families()) - set(BY_HAND)
    for model_type, file in BY_HAND.items():
        assert f'"{model_type}"' in (Path(__file__).parent / file).read_text(encoding="utf-8")


def test_transformer_by_hand() -> None:
    """Attention Is All You Need, section 3: d = 12, 3 heads, d_ff = 20, 2 layers, 11 tokens."""
    config = {"model_type": "transformer", "hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20,
              "num_hidden_layers": 2, "vocab_size": 11}
    m = arch.describe(config, "by-hand")
    attention = 4 * 12 * 12
    feed_forward = 12 * 20 + 20 + 20 * 12 + 12
    two_layer_norms = 2 * (12 + 12)
    assert m.total() == 11 * 12 + 2 * (attention + feed_forward + two_layer_norms) == 2_404
    block = {
        "self_attn.q_proj.weight": (12, 12), "self_attn.k_proj.weight": (12, 12), "self_attn.v_proj.weight": (12, 12),
        "self_attn.o_proj.weight": (12, 12), "post_attention_layernorm.weight": (12,),
        "post_attention_layernorm.bias": (12,), "mlp.up_proj.weight": (20, 12), "mlp.up_proj.bias": (20,),
        "mlp.down_proj.weight": (12, 20), "mlp.down_proj.bias": (12,), "post_feedforward_layernorm.weight": (12,),
        "post_feedforward_layernorm.bias": (12,),
    }
    named = {f"model.layers.{i}.{k}": shape for i in range(2) for k, shape in block.items()}
    stored = {s.name: s.shape for s in stored_tensors(m, arch.names(m))}
    assert stored == {"model.embed_tokens.weight": (11, 12), **named}
    assert {t.template for t in m.tensors()} == {
        "embed.weight", *(f"layers.{{i}}.attn.{x}.weight" for x in "qkvo"),
        *(f"layers.{{i}}.mlp.{x}.{p}" for x in ("up", "down") for p in ("weight", "bias")),
        *(f"layers.{{i}}.{x}_post_norm.{p}" for x in ("attn", "mlp") for p in ("weight", "bias")),
    }
    layer = m.layers[0]
    assert layer.post_residual
    assert layer.attn_norm is None
    assert layer.mlp_norm is None
    assert m.norm is None
    assert m.embed.scale == pytest.approx(math.sqrt(12))
    assert m.tied
    assert layer.attn.cache().elements == 2 * 12


def test_transformer_base_by_the_papers_table() -> None:
    """Table 3, base: 6 layers, d = 512, d_ff = 2,048, 8 heads; one shared matrix of 37,000 tokens."""
    config = {"model_type": "transformer", "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048,
              "num_hidden_layers": 6, "vocab_size": 37_000}
    block = 4 * 512**2 + (2 * 512 * 2048 + 2048 + 512) + 2 * 2 * 512
    assert arch.describe(config, "base").total() == 37_000 * 512 + 6 * block == 37_846_016
