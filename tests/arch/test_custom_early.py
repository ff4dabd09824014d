"""Types of 2023 and 2024 that transformers does not know, by their published code.

"internlm2": modeling_internlm2.py. "qwen": modeling_qwen.py (Qwen-7B). "baichuan": modeling_baichuan.py (Baichuan2-7B,
-13B). "xverse": modeling_xverse.py, Llama under another name. "chatglm": modeling_chatglm.py of ChatGLM3-6B and
GLM-4-9B. "phi3small": modeling_phi3_small.py of Phi-3-small-8k. Names, shapes and cuts below are written from that
code, totals are those that the makers or the Hub publish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import pytest

from llamactl import arch
from llamactl.errors import InputRefused
from llamactl.spec.model import Model
from llamactl.spec.naming import read, stored_tensors
from llamactl.spec.parts import Attention, BlockSparse, Norm
from llamactl.spec.rope import Rope

INTERNLM2: dict[str, Any] = {
    "model_type": "internlm2", "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 1000000, "rope_scaling": None, "hidden_act": "silu", "bias": False,
    "tie_word_embeddings": False,
}
QWEN: dict[str, Any] = {
    "model_type": "qwen", "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 6,
    "kv_channels": 8, "vocab_size": 97, "seq_length": 64, "max_position_embeddings": 128, "layer_norm_epsilon": 1e-6,
    "rotary_emb_base": 10000, "rotary_pct": 1.0, "no_bias": True, "use_dynamic_ntk": True, "use_logn_attn": True,
    "tie_word_embeddings": False,
}
BAICHUAN: dict[str, Any] = {
    "model_type": "baichuan", "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3,
    "num_attention_heads": 6, "vocab_size": 97, "max_position_embeddings": 128, "model_max_length": 128,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
}
BAICHUAN_13B = {**BAICHUAN, "hidden_size": 5120, "intermediate_size": 13696, "num_hidden_layers": 40,
                "num_attention_heads": 40, "vocab_size": 64000, "max_position_embeddings": None,
                "model_max_length": 4096}
XVERSE: dict[str, Any] = {
    "model_type": "xverse", "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3,
    "num_attention_heads": 6, "vocab_size": 97, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False,
}
CHATGLM: dict[str, Any] = {
    "model_type": "chatglm", "hidden_size": 48, "ffn_hidden_size": 56, "num_layers": 3, "num_attention_heads": 6,
    "kv_channels": 12, "multi_query_attention": True, "multi_query_group_num": 2, "padded_vocab_size": 97,
    "seq_length": 128, "layernorm_epsilon": 1e-5, "add_bias_linear": False, "add_qkv_bias": True, "rmsnorm": True,
    "post_layer_norm": True, "apply_residual_connection_post_layernorm": False, "original_rope": True,
    "tie_word_embeddings": False,
}
GLM4_9B = {**CHATGLM, "hidden_size": 4096, "ffn_hidden_size": 13696, "num_layers": 40, "num_attention_heads": 32,
           "kv_channels": 128, "padded_vocab_size": 151552, "seq_length": 131072, "rope_ratio": 500,
           "layernorm_epsilon": 1.5625e-07}
PHI3SMALL: dict[str, Any] = {
    "model_type": "phi3small", "hidden_size": 48, "ff_intermediate_size": 56, "ff_dim_multiplier": None,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 97,
    "max_position_embeddings": 128, "layer_norm_epsilon": 1e-5, "hidden_act": "gegelu", "gegelu_limit": 20.0,
    "rope_embedding_base": 1000000, "rope_position_scale": 1.0, "dense_attention_every_n_layers": 2,
    "blocksparse_block_size": 4, "blocksparse_num_local_blocks": 2, "blocksparse_vert_stride": 3,
    "blocksparse_homo_head_pattern": False, "mup_use_scaling": True, "mup_attn_multiplier": 1.0,
    "mup_embedding_multiplier": 10.0, "mup_width_multiplier": 8.0,
}
TINY = {c["model_type"]: c for c in (INTERNLM2, QWEN, BAICHUAN, XVERSE, CHATGLM, PHI3SMALL)}


def described(config: dict[str, Any], **changes: Any) -> Model:
    return arch.describe({**config, **changes}, "by-hand")


def stored(config: dict[str, Any], **changes: Any) -> dict[str, tuple[int, ...]]:
    model = described(config, **changes)
    return {s.name: s.shape for s in stored_tensors(model, arch.names(model))}


def attention(model: Model, layer: int = 0) -> Attention:
    attn = model.layers[layer].attn
    assert isinstance(attn, Attention)
    return attn


# --- totals

BIG = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}


@pytest.mark.parametrize(("config", "total"), [
    ({**INTERNLM2, **BIG, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 92544}, 7_737_708_544),
    ({**INTERNLM2, "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 48, "num_attention_heads": 48,
      "num_key_value_heads": 8, "vocab_size": 92544}, 19_861_149_696),
    ({**INTERNLM2, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16,
      "num_key_value_heads": 8, "vocab_size": 92544}, 1_889_110_016),
    ({**QWEN, **BIG, "intermediate_size": 22016, "kv_channels": 128, "vocab_size": 151936}, 7_721_324_544),
    ({**QWEN, "hidden_size": 8192, "intermediate_size": 49152, "num_hidden_layers": 80, "num_attention_heads": 64,
      "kv_channels": 128, "vocab_size": 152064}, 72_287_920_128),
    ({**QWEN, "hidden_size": 5120, "intermediate_size": 27392, "num_hidden_layers": 40, "num_attention_heads": 40,
      "kv_channels": 128, "vocab_size": 152064}, 14_167_290_880),
    ({**QWEN, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 24, "num_attention_heads": 16,
      "kv_channels": 128, "vocab_size": 151936}, 1_836_828_672),
    ({**BAICHUAN, **BIG, "vocab_size": 64000}, 7_000_559_616),
    ({**BAICHUAN, **BIG, "vocab_size": 125696}, 7_505_973_248),
    (BAICHUAN_13B, 13_264_901_120),
    ({**BAICHUAN_13B, "vocab_size": 125696}, 13_896_668_160),
    ({**XVERSE, **BIG, "vocab_size": 100534}, 7_299_846_144),
    ({**CHATGLM, "hidden_size": 4096, "ffn_hidden_size": 13696, "num_layers": 28, "num_attention_heads": 32,
      "kv_channels": 128, "padded_vocab_size": 65024, "seq_length": 8192}, 6_243_584_000),
    (GLM4_9B, 9_399_951_360),
    ({**PHI3SMALL, **BIG, "ff_intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 100352},
     7_392_272_384),
])
def test_totals(config: dict[str, Any], total: int) -> None:
    assert described(config).total() == total


# --- names and shapes

ROTARY = {"transformer.rotary_pos_emb.inv_freq": (3,)}
BLOCKS: dict[str, tuple[str, dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = {
    "internlm2": (
        "model.layers.",
        {"attention.wqkv.weight": (48 + 2 * 16, 48), "attention.wo.weight": (48, 48), "attention_norm.weight": (48,),
         "ffn_norm.weight": (48,), "feed_forward.w1.weight": (56, 48), "feed_forward.w2.weight": (48, 56),
         "feed_forward.w3.weight": (56, 48)},
        {"model.tok_embeddings.weight": (97, 48), "model.norm.weight": (48,), "output.weight": (97, 48)}),
    "qwen": (
        "transformer.h.",
        {"ln_1.weight": (48,), "ln_2.weight": (48,), "attn.c_attn.weight": (144, 48), "attn.c_attn.bias": (144,),
         "attn.c_proj.weight": (48, 48), "mlp.w1.weight": (56, 48), "mlp.w2.weight": (56, 48),
         "mlp.c_proj.weight": (48, 56)},
        {"transformer.wte.weight": (97, 48), "transformer.ln_f.weight": (48,), "lm_head.weight": (97, 48)}),
    "baichuan": (
        "model.layers.",
        {"self_attn.W_pack.weight": (144, 48), "self_attn.o_proj.weight": (48, 48), "input_layernorm.weight": (48,),
         "post_attention_layernorm.weight": (48,), "mlp.gate_proj.weight": (56, 48), "mlp.up_proj.weight": (56, 48),
         "mlp.down_proj.weight": (48, 56)},
        {"model.embed_tokens.weight": (97, 48), "model.norm.weight": (48,), "lm_head.weight": (97, 48)}),
    "xverse": (
        "model.layers.",
        {**{f"self_attn.{x}_proj.weight": (48, 48) for x in "qkvo"}, "input_layernorm.weight": (48,),
         "post_attention_layernorm.weight": (48,), "mlp.gate_proj.weight": (56, 48), "mlp.up_proj.weight": (56, 48),
         "mlp.down_proj.weight": (48, 56)},
        {"model.embed_tokens.weight": (97, 48), "model.norm.weight": (48,), "lm_head.weight": (97, 48)}),
    "chatglm": (
        "transformer.encoder.layers.",
        {"input_layernorm.weight": (48,), "self_attention.query_key_value.weight": (72 + 2 * 24, 48),
         "self_attention.query_key_value.bias": (72 + 2 * 24,), "self_attention.dense.weight": (48, 72),
         "post_attention_layernorm.weight": (48,), "mlp.dense_h_to_4h.weight": (112, 48),
         "mlp.dense_4h_to_h.weight": (48, 56)},
        {"transformer.embedding.word_embeddings.weight": (97, 48), "transformer.output_layer.weight": (97, 48),
         "transformer.encoder.final_layernorm.weight": (48,), **ROTARY}),
    "phi3small": (
        "model.layers.",
        {"self_attn.query_key_value.weight": (48 + 2 * 16, 48), "self_attn.query_key_value.bias": (48 + 2 * 16,),
         "self_attn.dense.weight": (48, 48), "self_attn.dense.bias": (48,), "mlp.up_proj.weight": (112, 48),
         "mlp.up_proj.bias": (112,), "mlp.down_proj.weight": (48, 56), "mlp.down_proj.bias": (48,),
         **{f"{x}_layernorm.{p}": (48,) for x in ("input", "post_attention") for p in ("weight", "bias")}},
        {"model.embed_tokens.weight": (97, 48), "model.final_layernorm.weight": (48,),
         "model.final_layernorm.bias": (48,)}),
}


@pytest.mark.parametrize("model_type", TINY)
def test_names_and_shapes(model_type: str) -> None:
    prefix, block, outer = BLOCKS[model_type]
    n = described(TINY[model_type]).n_layers
    named = {f"{prefix}{i}.{k}": shape for i in range(n) for k, shape in block.items()}
    assert stored(TINY[model_type]) == {**outer, **named}
    buffers = ROTARY if model_type == "chatglm" else {}
    assert described(TINY[model_type]).total() == sum(
        prod(shape) for name, shape in {**outer, **named}.items() if name not in buffers)


@pytest.mark.parametrize(("config", "changes", "more"), [
    (INTERNLM2, {"bias": True}, {f"model.layers.{i}.attention.{x}.bias": (rows,) for i in range(3)
                                 for x, rows in (("wqkv", 80), ("wo", 48))}),
    (QWEN, {"no_bias": False}, {f"transformer.h.{i}.{x}.bias": (rows,) for i in range(3) for x, rows in (
        ("attn.c_proj", 48), ("mlp.w1", 56), ("mlp.w2", 56), ("mlp.c_proj", 48))}),
    (CHATGLM, {"add_bias_linear": True}, {f"transformer.encoder.layers.{i}.{x}.bias": (rows,) for i in range(3)
                                          for x, rows in (("self_attention.dense", 48), ("mlp.dense_h_to_4h", 112),
                                                          ("mlp.dense_4h_to_h", 48))}),
    (PHI3SMALL, {"tie_word_embeddings": False}, {"lm_head.weight": (97, 48)}),
    (PHI3SMALL, {"ff_intermediate_size": None, "ff_dim_multiplier": 4}, None),
])
def test_flags(config: dict[str, Any], changes: dict[str, Any], more: dict[str, tuple[int, ...]] | None) -> None:
    before, after = stored(config), stored(config, **changes)
    if more is None:  # 4 x (48 // 3) x 2 = 128, rounded up to 256
        assert after["model.layers.0.mlp.up_proj.weight"] == (512, 48)
        assert stored(config, **changes, gegelu_pad_to_256=False)["model.layers.0.mlp.up_proj.weight"] == (256, 48)
    else:
        assert after == {**before, **more}


def test_no_bias_at_all_in_chatglm() -> None:
    left = set(stored(CHATGLM)) - set(stored(CHATGLM, add_qkv_bias=False))
    assert left == {f"transformer.encoder.layers.{i}.self_attention.query_key_value.bias" for i in range(3)}


# --- fused rows, cut as the code cuts them


def by_group(rows: Any) -> dict[str, Any]:
    """InternLM2 and Phi-3-small: for each of 2 KV heads its 3 query heads, then k, then v; heads of 8."""
    grouped = rows.reshape(2, 5, 8, *rows.shape[1:])
    return {"q": grouped[:, :3].flatten(0, 2), "k": grouped[:, 3].flatten(0, 1), "v": grouped[:, 4].flatten(0, 1)}


def in_three(rows: Any) -> dict[str, Any]:
    """Qwen: split(hidden_size). Baichuan: unflatten into 3."""
    return dict(zip("qkv", rows.split(48), strict=True))


def chatglm_qkv(rows: Any) -> dict[str, Any]:
    """6 query heads, then 2 for k, then 2 for v, of 12."""
    return dict(zip("qkv", rows.split([72, 24, 24]), strict=True))


def chatglm_swiglu(rows: Any) -> dict[str, Any]:
    """silu(first half) x second half."""
    return dict(zip(("gate", "up"), rows.chunk(2), strict=True))


def gegelu(rows: Any) -> dict[str, Any]:
    """gelu(even rows) x (odd rows + 1)."""
    return {"gate": rows[::2], "up": rows[1::2]}


@pytest.mark.parametrize(("config", "name", "branch", "cut"), [
    ({**INTERNLM2, "bias": True}, "model.layers.1.attention.wqkv", "attn", by_group),
    (QWEN, "transformer.h.1.attn.c_attn", "attn", in_three),
    (BAICHUAN, "model.layers.1.self_attn.W_pack", "attn", in_three),
    ({**CHATGLM, "add_bias_linear": True}, "transformer.encoder.layers.1.self_attention.query_key_value", "attn",
     chatglm_qkv),
    ({**CHATGLM, "add_bias_linear": True}, "transformer.encoder.layers.1.mlp.dense_h_to_4h", "mlp", chatglm_swiglu),
    (PHI3SMALL, "model.layers.1.self_attn.query_key_value", "attn", by_group),
    (PHI3SMALL, "model.layers.1.mlp.up_proj", "mlp", gegelu),
])
def test_fused_rows(config: dict[str, Any], name: str, branch: str, cut: Callable[[Any], dict[str, Any]]) -> None:
    import torch

    model = described(config)
    seen = 0
    for s in stored_tensors(model, arch.names(model)):
        if s.name.rpartition(".")[0] != name:
            continue
        rows = torch.arange(prod(s.shape)).reshape(s.shape)
        kind = s.name.rpartition(".")[2]
        ours, theirs = read(s, rows, model), cut(rows)
        assert ours.keys() == {f"layers.1.{branch}.{x}.{kind}" for x in theirs}
        assert all(torch.equal(ours[f"layers.1.{branch}.{x}.{kind}"], rest) for x, rest in theirs.items())
        seen += 1
    assert seen == (1 if config is BAICHUAN else 2)


@pytest.mark.parametrize(("config", "pairs"), [
    (INTERNLM2, {"mlp.gate": "feed_forward.w1", "mlp.up": "feed_forward.w3", "mlp.down": "feed_forward.w2",
                 "attn_norm": "attention_norm", "mlp_norm": "ffn_norm"}),
    (QWEN, {"mlp.gate": "mlp.w2", "mlp.up": "mlp.w1", "mlp.down": "mlp.c_proj", "attn_norm": "ln_1",
            "mlp_norm": "ln_2", "attn.o": "attn.c_proj"}),
    (CHATGLM, {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}),
    (BAICHUAN, {"mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "attn_norm": "input_layernorm"}),
    (XVERSE, {**{f"attn.{x}": f"self_attn.{x}_proj" for x in "qkvo"}, "mlp.gate": "mlp.gate_proj",
              "mlp.up": "mlp.up_proj", "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}),
    (PHI3SMALL, {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}),
])
def test_which_is_which(config: dict[str, Any], pairs: dict[str, str]) -> None:
    """Tensors of one shape under two names: the code says which is gated, which norm comes first."""
    model = described(config)
    prefix = BLOCKS[config["model_type"]][0]
    ours = {t.name: s.name for s in stored_tensors(model, arch.names(model)) for t in s.of}
    for canonical, theirs in pairs.items():
        assert ours[f"layers.2.{canonical}.weight"] == f"{prefix}2.{theirs}.weight"


# --- components, caches, positions


@pytest.mark.parametrize(("config", "roles"), [
    (INTERNLM2, {"attention.q": 48 * 48, "attention.k": 16 * 48, "attention.v": 16 * 48, "attention.o": 48 * 48,
                 "feed_forward.gate": 56 * 48, "feed_forward.up": 56 * 48, "feed_forward.down": 48 * 56, "norms": 96}),
    (QWEN, {**{f"attention.{x}": 48 * 48 + 48 for x in "qkv"}, "attention.o": 48 * 48, "feed_forward.gate": 56 * 48,
            "feed_forward.up": 56 * 48, "feed_forward.down": 48 * 56, "norms": 96}),
    (CHATGLM, {"attention.q": 72 * 48 + 72, "attention.k": 24 * 48 + 24, "attention.v": 24 * 48 + 24,
               "attention.o": 48 * 72, "feed_forward.gate": 56 * 48, "feed_forward.up": 56 * 48,
               "feed_forward.down": 48 * 56, "norms": 96}),
    (PHI3SMALL, {"attention.q": 48 * 48 + 48, "attention.k": 16 * 48 + 16, "attention.v": 16 * 48 + 16,
                 "attention.o": 48 * 48 + 48, "feed_forward.gate": 56 * 48 + 56, "feed_forward.up": 56 * 48 + 56,
                 "feed_forward.down": 48 * 56 + 48, "norms": 192}),
])
def test_components_of_a_block(config: dict[str, Any], roles: dict[str, int]) -> None:
    found: Counter[str] = Counter()
    for leaf in described(config).layers[0].leaves():
        found[leaf.role] += leaf.elements
    assert found == roles


@pytest.mark.parametrize(("model_type", "elements", "tied"), [
    ("internlm2", 2 * 2 * 8, False), ("qwen", 2 * 6 * 8, False), ("baichuan", 2 * 6 * 8, False),
    ("xverse", 2 * 6 * 8, False), ("chatglm", 2 * 2 * 12, False), ("phi3small", 2 * 2 * 8, True),
])
def test_cache_and_tie(model_type: str, elements: int, tied: bool) -> None:
    """What each layer's code keeps: k and v before they are repeated. Sparse layers keep every token too."""
    model = described({k: v for k, v in TINY[model_type].items() if k != "tie_word_embeddings"})
    assert {c.elements for layer in model.layers for c in layer.caches()} == {elements}
    assert {c.kind for layer in model.layers for c in layer.caches()} == {"full"}
    assert model.tied is tied
    assert described({**TINY[model_type], "tie_word_embeddings": False}).tied is False


def test_internlm2_rope() -> None:
    dynamic = described(INTERNLM2, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert (dynamic.context.trained, dynamic.context.usable) == (128, 256)
    assert attention(described(INTERNLM2)).rope == Rope(dim=8, theta=1e6)


def test_qwen_positions() -> None:
    model = described(QWEN)
    assert attention(model).rope == Rope(dim=8, theta=10000.0)
    assert (model.context.trained, model.context.usable) == (64, 128)
    assert described(QWEN, use_dynamic_ntk=False).context.usable == 64
    assert attention(described(QWEN, rotary_pct=0.5)).rope == Rope(dim=4, theta=10000.0)
    assert attention(described(QWEN, rope_theta=1e6, rotary_emb_base=1000000)).rope == Rope(dim=8, theta=1e6)
    assert [x.what for x in described(QWEN, visual={"layers": 48}).not_counted] == ["visual tower"]


def test_baichuan_positions_and_head() -> None:
    rotates, slopes = described(BAICHUAN), described(BAICHUAN_13B)
    assert attention(rotates).rope == Rope(dim=8, theta=10000.0)
    assert not attention(rotates).alibi
    assert attention(slopes).rope is None
    assert attention(slopes).alibi
    assert (slopes.context.trained, slopes.context.usable) == (4096, 4096)
    assert not rotates.head.unit_rows
    assert described(BAICHUAN, vocab_size=125696).head.unit_rows


def test_chatglm_positions() -> None:
    assert attention(described(CHATGLM)).rope == Rope(dim=6, theta=10000.0, pairs="adjacent")
    assert attention(described(GLM4_9B)).rope == Rope(dim=64, theta=5_000_000.0, pairs="adjacent")
    assert described(CHATGLM, architectures=["ChatGLMModel"]).notes == ()
    assert described(CHATGLM, architectures=["ChatGLMForSequenceClassification"]).notes != ()
    assert [x.what for x in described(CHATGLM, vision_config={"image_size": 1120}).not_counted] == ["vision tower"]


def test_phi3small_scales_and_sparse_layers() -> None:
    """Layers 2, 4, ... are dense; softmax_scale is mup_attn_multiplier / head_dim; logits are divided by 8."""
    model = described(PHI3SMALL)
    pattern = BlockSparse(block=4, local=2, stride=3)
    assert [attention(model, i).sparse for i in range(4)] == [pattern, None, pattern, None]
    assert attention(model).scale == 1 / 8
    assert attention(described(PHI3SMALL, mup_use_scaling=False)).scale is None
    assert (model.embed.scale, model.head.scale) == (10.0, 1 / 8)
    assert model.norm == Norm(dim=48, eps=1e-5, kind="layer", bias=True)
    every = described(PHI3SMALL, dense_attention_every_n_layers=None)
    assert all(attention(every, i).sparse for i in range(4))
    assert model.dropout == 0.1


# --- refusals


@pytest.mark.parametrize(("config", "changes", "code"), [
    (INTERNLM2, {"num_key_value_heads": 4}, "config-heads"), (INTERNLM2, {"head_dim": 16}, "config-unsupported"),
    (QWEN, {"kv_channels": 16}, "config-heads"), (QWEN, {"intermediate_size": 113}, "config-range"),
    (QWEN, {"rotary_pct": 0.1}, "config-rope"), (QWEN, {"kv_channels": None}, "config-type"),
    (BAICHUAN, {"max_position_embeddings": None, "model_max_length": None}, "config-missing"),
    (XVERSE, {"num_experts": 64}, "config-unsupported"), (XVERSE, {"moe_top_k": 6}, "config-unsupported"),
    (CHATGLM, {"position_encoding_2d": True}, "config-unsupported"),
    (CHATGLM, {"inner_hidden_size": 192}, "config-unsupported"),
    (CHATGLM, {"multi_query_attention": False}, "config-unsupported"),
    (CHATGLM, {"multi_query_group_num": 4}, "config-heads"), (CHATGLM, {"rmsnorm": False}, "config-unsupported"),
    (CHATGLM, {"post_layer_norm": False}, "config-unsupported"), (CHATGLM, {"pre_seq_len": 8}, "config-unsupported"),
    (CHATGLM, {"apply_residual_connection_post_layernorm": True}, "config-unsupported"),
    (CHATGLM, {"tie_word_embeddings": True}, "config-unsupported"), (CHATGLM, {"vocab_size": 96}, "config-conflict"),
    (CHATGLM, {"rope_ratio": 4, "seq_length": 32768}, "config-rope"),
    (CHATGLM, {"rope_ratio": 16, "seq_length": 32768}, "config-rope"), (CHATGLM, {"kv_channels": 10}, "config-rope"),
    (PHI3SMALL, {"hidden_act": "silu"}, "config-unsupported"), (PHI3SMALL, {"gegelu_limit": 7.0}, "config-unsupported"),
    (PHI3SMALL, {"rope_scaling": {"type": "su"}}, "config-unsupported"),
    (PHI3SMALL, {"rope_position_scale": 2.0}, "config-unsupported"),
    (PHI3SMALL, {"ff_dim_multiplier": 4}, "config-missing"),
    (PHI3SMALL, {"ff_intermediate_size": None}, "config-missing"),
])
def test_refused(config: dict[str, Any], changes: dict[str, Any], code: str) -> None:
    with pytest.raises(InputRefused) as caught:
        described(config, **changes)
    assert caught.value.code == code


SHAPES = {"hidden_size", "num_hidden_layers", "num_layers", "num_attention_heads", "vocab_size", "padded_vocab_size",
          "intermediate_size", "ffn_hidden_size", "kv_channels", "multi_query_group_num", "multi_query_attention"}


@pytest.mark.parametrize("model_type", TINY)
def test_a_shape_never_has_a_default(model_type: str) -> None:
    for key in SHAPES & TINY[model_type].keys():
        with pytest.raises(InputRefused) as caught:
            described({k: v for k, v in TINY[model_type].items() if k != key})
        assert caught.value.code == "config-missing"
    if "num_key_value_heads" in TINY[model_type]:
        with pytest.raises(InputRefused, match="num_key_value_heads"):
            described({k: v for k, v in TINY[model_type].items() if k != "num_key_value_heads"})


@pytest.mark.parametrize("model_type", TINY)
def test_a_wrong_value_is_refused_or_read_never_a_crash(model_type: str) -> None:
    values: tuple[Any, ...] = (None, True, False, 0, -1, 1, 3, 1 << 40, 0.5, 2.0, 1e300, float("nan"), "", "x", [], [1],
                               {}, {"a": 1}, {"type": "linear"}, {"full_attention": {}})
    added = ("rope_scaling", "head_dim", "visual", "vision_config", "architectures", "rope_ratio")
    refused: list[InputRefused] = []
    for key in (*TINY[model_type], *added):
        for value in values:
            try:
                described(TINY[model_type], **{key: value}).total()
            except InputRefused as e:
                refused.append(e)
    assert len(refused) > 100
    assert all(e.line().isprintable() for e in refused)
