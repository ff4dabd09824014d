"""The parts' own arithmetic against formulas written out by hand."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import pytest

from llamactl import arch
from llamactl.spec.latent import LatentAttention
from llamactl.spec.model import Model, layer_params
from llamactl.spec.parts import (
    MLP,
    Attention,
    Embedding,
    Head,
    LearnedPositions,
    MoE,
    Norm,
    SinusoidalPositions,
)


def count(part: Any, kind: str = "param") -> int:
    return sum(leaf.elements for leaf in part.leaves() if leaf.kind == kind)


def roles(part: Any) -> Counter[str]:
    out: Counter[str] = Counter()
    for leaf in part.leaves():
        out[leaf.role] += leaf.elements
    return out


# --- attention


def test_attention_shrinks_with_its_kv_heads() -> None:
    """d = 64, 8 heads of 8: q and o stay d^2 each, k and v go with the KV heads."""
    counts = [count(Attention(hidden=64, n_heads=8, n_kv_heads=n, head_dim=8)) for n in (8, 4, 2, 1)]
    assert counts == [2 * 64 * 64 + 2 * 64 * n * 8 for n in (8, 4, 2, 1)]
    assert (counts[0], counts[-1]) == (16_384, 9_216)


def test_attention_with_a_biased_output() -> None:
    counts = [count(Attention(hidden=64, n_heads=8, n_kv_heads=n, head_dim=8, o_bias=True)) for n in (8, 1)]
    assert counts == [16_448, 9_280]


def test_attention_biases_norms_and_sinks() -> None:
    attn = Attention(hidden=10, n_heads=6, n_kv_heads=2, head_dim=4, qkv_bias=True, o_bias=True, sinks=True,
                     q_norm=Norm(dim=4, eps=1e-6), k_norm=Norm(dim=8, eps=1e-6, kind="layer", bias=True))
    assert roles(attn) == {
        "attention.q": 24 * 10 + 24, "attention.k": 8 * 10 + 8, "attention.v": 8 * 10 + 8, "attention.o": 10 * 24 + 10,
        "norms": 4 + 2 * 8, "attention.other": 6,
    }


def test_linear_weights_are_out_in() -> None:
    shapes = {x.path: x.shape for x in Attention(hidden=10, n_heads=6, n_kv_heads=2, head_dim=4).leaves()}
    assert shapes == {"q.weight": (24, 10), "k.weight": (8, 10), "v.weight": (8, 10), "o.weight": (10, 24)}


def test_cache_of_grouped_heads() -> None:
    cache = Attention(hidden=64, n_heads=8, n_kv_heads=2, head_dim=8, window=16).cache()
    assert (cache.kind, cache.heads, cache.k_dim, cache.v_dim, cache.window) == ("sliding", 2, 8, 8, 16)
    assert cache.elements == 2 * 2 * 8
    assert Attention(hidden=64, n_heads=8, n_kv_heads=8, head_dim=8).cache().kind == "full"
    chunked = Attention(hidden=64, n_heads=8, n_kv_heads=2, head_dim=8, window=16, window_kind="chunked").cache()
    assert chunked.kind == "chunked"


def latent(q_rank: int | None, bias: bool = False) -> LatentAttention:
    """DeepSeek-V3's attention."""
    return LatentAttention(hidden=7168, n_heads=128, q_rank=q_rank, kv_rank=512, qk_nope=128, qk_rope=64, v_dim=128,
                           eps=1e-6, bias=bias)


def test_latent_attention_of_deepseek_v3() -> None:
    kv = 7168 * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    o = 128 * 128 * 7168
    factored = 7168 * 1536 + 1536 + 1536 * 128 * (128 + 64)
    assert count(latent(1536)) == factored + kv + o
    assert count(latent(None)) == 7168 * 128 * (128 + 64) + kv + o
    assert count(latent(1536, bias=True)) - count(latent(1536)) == 1536 + (512 + 64) + 7168
    assert latent(1536).cache().elements == 512 + 64


def test_expanded_latent_cache_of_deepseek_v3() -> None:
    """128 heads of 192 for k and 128 for v, in each of 61 layers, two bytes each; compressed 70,272."""
    assert 61 * latent(1536).cache().elements * 2 == 70_272
    assert 61 * latent(1536).cache().expand().elements * 2 == 4_997_120


# --- feed-forward


def test_swiglu_sizing() -> None:
    """Two matrices of 4d hold 8 d^2; three of 8d/3 hold the same."""
    d = 576
    assert count(MLP(hidden=d, ffn=4 * d, activation="gelu", gated=False)) == 8 * d * d
    assert count(MLP(hidden=d, ffn=8 * d // 3, activation="silu")) == 8 * d * d
    assert 8 * d // 3 == 1536
    llama = 256 * -(-(8 * 4096 // 3) // 256)
    assert llama == 11_008
    assert count(MLP(hidden=4096, ffn=llama, activation="silu")) == 3 * 4096 * 11_008 == 135_266_304


def test_mlp_biases() -> None:
    gated = MLP(hidden=10, ffn=7, activation="silu", bias=True)
    assert roles(gated) == {"feed_forward.gate": 77, "feed_forward.up": 77, "feed_forward.down": 80}
    assert count(MLP(hidden=10, ffn=7, activation="gelu", gated=False, bias=True)) == 77 + 80


def test_mixture() -> None:
    moe = MoE(hidden=10, n_experts=4, top_k=2, expert=MLP(hidden=10, ffn=7, activation="silu"),
              shared=MLP(hidden=10, ffn=14, activation="silu"), shared_gate=True, router_bias=True,
              correction_bias=True)
    assert roles(moe) == {
        "feed_forward.router": 4 * 10 + 4 + 4, "feed_forward.routed_experts": 4 * 3 * 70,
        "feed_forward.shared_experts": 3 * 140 + 10,
    }
    assert count(moe) == 44 + 840 + 430
    assert count(moe, "buffer") == 4


def test_experts_are_counted_by_multiplication() -> None:
    """A billion experts cost nothing to count."""
    moe = MoE(hidden=8, n_experts=10**9, top_k=2, expert=MLP(hidden=8, ffn=4, activation="silu"))
    assert count(moe) == 10**9 * (8 + 3 * 32)
    assert len(moe.leaves()) == 4


# --- norms and the outer parts


def test_rms_norm_has_d_and_layer_norm_2d() -> None:
    def size(norm: Norm) -> int:
        return sum(leaf.elements for leaf in norm.leaves("norm"))

    assert size(Norm(dim=64, eps=1e-6)) == 64
    assert size(Norm(dim=64, eps=1e-6, offset=True)) == 64
    assert size(Norm(dim=64, eps=1e-5, kind="layer", bias=True)) == 128
    assert size(Norm(dim=64, eps=1e-5, kind="layer")) == 64
    assert size(Norm(dim=64, eps=1e-5, kind="layer", weight=False)) == 0
    assert size(Norm(dim=8, eps=1e-5, kind="layer", heads=6)) == 48


def test_embedding_head_and_positions() -> None:
    assert count(Embedding(vocab=50, dim=8)) == 400
    assert count(Head(vocab=50, hidden=8, tied=False)) == 400
    assert count(Head(vocab=50, hidden=8, tied=True)) == 0
    assert count(Head(vocab=50, hidden=8, tied=True, bias=True)) == 50
    assert count(LearnedPositions(rows=16, dim=8)) == 128
    assert count(SinusoidalPositions(dim=8)) == 0


# --- whole models


def llama_3_8b(**changes: Any) -> Model:
    return arch.describe({
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
        **changes,
    }, "config.json")


def test_llama_3_8b_block() -> None:
    (layer, n), = llama_3_8b().distinct_layers()
    assert n == 32
    assert layer_params(layer) == 218_112_000
    assert count(layer.mlp) == 176_160_768 == 3 * 4096 * 14336
    assert count(layer.attn) == 2 * 4096 * 4096 + 2 * 4096 * 1024
    assert round(count(layer.mlp) / layer_params(layer), 3) == 0.808


def test_llama_3_8b() -> None:
    assert llama_3_8b().total() == 32 * 218_112_000 + 2 * 128256 * 4096 + 4096 == 8_030_261_248
    assert llama_3_8b(tie_word_embeddings=True).total() == 7_504_924_672
    assert sum(layer.attn.cache().elements for layer in llama_3_8b().layers) == 65_536


def test_gpt2_small_by_component() -> None:
    model = arch.describe({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
                           "n_positions": 1024}, "config.json")
    assert model.total() == 124_439_808
    assert 12 * count(model.layers[0].attn) == 28_348_416
    assert 12 * count(model.layers[0].mlp) == 56_669_184
    norms = sum(leaf.elements for leaf in model.outer_leaves() if leaf.role == "norms")
    norms += 12 * sum(leaf.elements for leaf in model.layers[0].leaves() if leaf.role == "norms")
    assert norms == 38_400
    assert sum(layer.attn.cache().elements for layer in model.layers) == 18_432


def test_smollm2_kv_heads() -> None:
    """Duplicating each KV head gives an MHA model of 147,786,048 parameters; the cache triples."""
    config = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
              "num_attention_heads": 9, "vocab_size": 49152, "tie_word_embeddings": True}
    gqa = arch.describe({**config, "num_key_value_heads": 3}, "config.json")
    mha = arch.describe({**config, "num_key_value_heads": 9}, "config.json")
    assert (gqa.total(), mha.total()) == (134_515_008, 147_786_048)
    caches = [sum(layer.attn.cache().elements for layer in m.layers) for m in (gqa, mha)]
    assert caches == [11_520, 34_560]
    assert gqa.layers[0].attn.cache().expand().elements * 30 == 34_560


def deepseek_v3(**changes: Any) -> Model:
    return arch.describe({
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "tie_word_embeddings": False, **changes,
    }, "config.json")


def test_deepseek_v3_buffers_and_what_is_not_counted() -> None:
    model = deepseek_v3(num_nextn_predict_layers=1)
    assert model.total() == 671_026_404_352
    assert sum(prod(t.shape) for t in model.tensors() if t.kind == "buffer") == 58 * 256 == 14_848
    (mtp,) = model.not_counted
    assert mtp.params == 11_610_068_224
    assert deepseek_v3().not_counted == ()
    assert deepseek_v3(num_nextn_predict_layers=2).not_counted[0].params == 2 * 11_610_068_224
    assert len(model.distinct_layers()) == 2


def test_shared_experts_multiply_one_experts_width() -> None:
    mlp = deepseek_v3(n_shared_experts=2).layers[-1].mlp
    assert isinstance(mlp, MoE)
    assert mlp.shared == MLP(hidden=7168, ffn=2 * 2048, activation="silu")
    for none in (0, None):
        mlp = deepseek_v3(n_shared_experts=none).layers[-1].mlp
        assert isinstance(mlp, MoE)
        assert mlp.shared is None


@pytest.mark.parametrize(("kv", "total"), [(True, 1), (False, 12)])
def test_falcon_kv_heads_by_flags(kv: bool, total: int) -> None:
    config = {"model_type": "falcon", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 12,
              "vocab_size": 50, "num_kv_heads": 3, "num_key_value_heads": 5}
    assert arch.describe({**config, "multi_query": kv}, "c").layers[0].attn.cache().heads == total
    new = arch.describe({**config, "multi_query": kv, "new_decoder_architecture": True}, "c").layers[0].attn.cache()
    assert (new.heads, new.hf_heads) == (3, 12)


def test_falcon_40b_cache() -> None:
    """60 layers of 8 KV heads of 64; transformers repeats them to 128 before caching."""
    model = arch.describe({"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "vocab_size": 65024,
                           "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True}, "c")
    caches = [layer.attn.cache() for layer in model.layers]
    assert sum(c.elements for c in caches) == 61_440
    assert sum((c.hf_heads or 0) * (c.k_dim + c.v_dim) for c in caches) == 983_040
