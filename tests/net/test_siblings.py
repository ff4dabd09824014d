"""Families that transformers does not have: their published code computes what a sibling there computes.

Each is given its sibling's weights, and must give the sibling's logits. Checked by reading: modeling_internlm2.py,
modeling_xverse.py, modeling_mimo.py, modeling_baichuan.py of 7B and 13B, olmo/model.py, modeling_qwen.py,
modeling_chatglm.py, modeling_decilm.py. What their code does beyond that is refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from llamactl import arch
from llamactl.errors import InputRefused
from llamactl.net.cache import Cache
from llamactl.net.decoder import build
from llamactl.net.generate import check_ids, positions
from llamactl.net.positions import alibi_slopes

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
BASE: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 6,
                        "vocab_size": 97, "max_position_embeddings": 128, "hidden_act": "silu",
                        "tie_word_embeddings": False}
RMS = {"rms_norm_eps": 1e-5}
CHATGLM: dict[str, Any] = {
    "model_type": "chatglm", "hidden_size": 48, "ffn_hidden_size": 56, "num_layers": 3, "num_attention_heads": 6,
    "kv_channels": 12, "multi_query_attention": True, "multi_query_group_num": 2, "padded_vocab_size": 97,
    "seq_length": 128, "layernorm_epsilon": 1e-5, "add_bias_linear": False, "add_qkv_bias": True, "rmsnorm": True,
    "post_layer_norm": True, "apply_residual_connection_post_layernorm": False, "tie_word_embeddings": False}
QWEN = {**BASE, "model_type": "qwen", "intermediate_size": 112, "kv_channels": 8, "seq_length": 30, "no_bias": True,
        "layer_norm_epsilon": 1e-6, "rotary_emb_base": 10000, "rotary_pct": 1.0, "use_dynamic_ntk": True,
        "use_logn_attn": True}
OLMO = {"model_type": "hf_olmo", "d_model": 48, "n_heads": 6, "n_layers": 3, "mlp_hidden_size": 112, "vocab_size": 90,
        "embedding_size": 97, "weight_tying": False, "max_sequence_length": 128, "rope": True, "include_bias": False,
        "layer_norm_with_affine": False, "layer_norm_type": "default", "activation_type": "swiglu"}
LLAMA = {**BASE, **RMS, "model_type": "llama", "rope_theta": 10000.0}
DYNAMIC = {"type": "dynamic", "factor": 2.0}

# a family's config -> the config of its sibling
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "internlm2": ({**BASE, **RMS, "model_type": "internlm2", "num_key_value_heads": 2, "bias": False,
                   "rope_theta": 1000000}, {**LLAMA, "num_key_value_heads": 2, "rope_theta": 1000000.0}),
    "internlm2 with biases": (
        {**BASE, **RMS, "model_type": "internlm2", "num_key_value_heads": 2, "bias": True, "rope_theta": 10000},
        {**LLAMA, "num_key_value_heads": 2, "attention_bias": True}),
    "internlm2, dynamic": (
        {**BASE, **RMS, "model_type": "internlm2", "num_key_value_heads": 2, "bias": False, "rope_theta": 10000,
         "max_position_embeddings": 16, "rope_scaling": DYNAMIC},
        {**LLAMA, "num_key_value_heads": 2, "max_position_embeddings": 16, "rope_scaling": DYNAMIC}),
    "xverse": ({**BASE, **RMS, "model_type": "xverse"}, LLAMA),
    "baichuan 7B": ({**BASE, **RMS, "model_type": "baichuan"}, LLAMA),
    "mimo": ({**BASE, **RMS, "model_type": "mimo", "num_key_value_heads": 2, "head_dim": 12, "rope_theta": 640000,
              "attention_bias": True, "use_sliding_window": False, "num_nextn_predict_layers": 1},
             {**BASE, **RMS, "model_type": "qwen2", "num_key_value_heads": 2, "head_dim": 12, "rope_theta": 640000.0,
              "use_sliding_window": False}),
    "hf_olmo": (OLMO, {**BASE, "model_type": "olmo", "rope_theta": 10000.0}),
    "hf_olmo, clipped and grouped": ({**OLMO, "n_kv_heads": 2, "clip_qkv": 0.7}, {
        **BASE, "model_type": "olmo", "num_key_value_heads": 2, "clip_qkv": 0.7, "rope_theta": 10000.0}),
    "qwen": (QWEN, {**BASE, "model_type": "qwen2", "num_key_value_heads": 6, "rms_norm_eps": 1e-6,
                    "rope_theta": 10000.0, "use_sliding_window": False}),
    "chatglm": (CHATGLM, {**BASE, "model_type": "glm", "num_key_value_heads": 2, "head_dim": 12, "rms_norm_eps": 1e-5,
                          "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "attention_bias": True,
                          "pad_token_id": 0}),
    "chatglm, another base": ({**CHATGLM, "rope_ratio": 500, "seq_length": 131072}, {
        **BASE, "model_type": "glm", "num_key_value_heads": 2, "head_dim": 12, "rms_norm_eps": 1e-5,
        "rope_theta": 5000000.0, "partial_rotary_factor": 0.5, "attention_bias": True, "pad_token_id": 0}),
}
# Model types that no golden shows, and where they are shown.
ELSEWHERE = {"transformer": "test_block2017.py", "phi3small": "test_phi3small_is_refused",
             "nemotron-nas": "test_thinned_blocks"}


def ids_of(length: int, batch: int = 1) -> Tensor:
    return torch.randint(1, 90, (batch, length), generator=torch.Generator().manual_seed(3))


def test_every_family_has_a_golden_or_a_sibling() -> None:
    shown = {arch.families()[a["model_type"]] for a, _ in PAIRS.values()}
    shown |= {arch.families()[t] for t in ELSEWHERE}
    shown |= {arch.families()[t] for p in GOLDEN.iterdir() if (t := p.name.partition("-")[0]) in arch.families()}
    assert set(arch.families().values()) - shown == set()


@pytest.mark.parametrize("which", PAIRS)
def test_a_sibling_gives_the_same(which: str, networks: ModuleType) -> None:
    said, sibling = PAIRS[which]
    hf = networks.theirs(sibling)
    model = arch.describe(said, which)
    held = networks.canonical(arch.describe(sibling, which), networks.stored(hf))
    net = networks.network(model, held)
    assert {t.name for t in model.tensors()} - set(held) <= {"rotary.inv_freq"}
    ids = ids_of(30)
    want = networks.logits(hf, ids)
    assert networks.off(net(ids), want) < networks.CLOSE
    assert networks.off(networks.pieces(net, ids, [11, *range(20, 30)]), want) < networks.CLOSE


def test_baichuan2_scales_the_rows_of_the_head(networks: ModuleType) -> None:
    said = {**BASE, **RMS, "model_type": "baichuan", "vocab_size": 125_696, "num_hidden_layers": 1}
    sibling = {**LLAMA, "vocab_size": 125_696, "num_hidden_layers": 1}
    hf: Any = networks.theirs(sibling)
    net = networks.network(arch.describe(said, "x"), networks.canonical(arch.describe(sibling, "x"),
                                                                        networks.stored(hf)))
    head = hf.lm_head.weight
    head.data = head.data / head.data.square().sum(1, keepdim=True).sqrt()
    ids = ids_of(8)
    assert networks.off(net(ids), networks.logits(hf, ids)) < networks.CLOSE


@pytest.mark.parametrize("heads", [6, 8, 3])
def test_baichuan_13b_has_alibi_instead(heads: int, networks: ModuleType) -> None:
    said = {**BASE, **RMS, "model_type": "baichuan", "num_attention_heads": heads, "model_max_length": 128}
    del said["max_position_embeddings"]
    sibling = {**LLAMA, "num_attention_heads": heads, "num_key_value_heads": heads}
    hf = networks.theirs(sibling)
    held = networks.canonical(arch.describe(sibling, "x"), networks.stored(hf))
    ids, at = ids_of(20), torch.arange(20)
    bias = torch.tensor(alibi_slopes(heads))[:, None, None] * at.expand(20, 20)  # of the key alone, as its code has it
    net = networks.network(arch.describe(said, "x"), held)
    want = networks.led(hf, ids, bias=bias)
    assert networks.off(net(ids), want) < networks.CLOSE
    assert networks.off(networks.pieces(net, ids, range(7, 20)), want) < networks.CLOSE


# --- Qwen 1 past the length it was trained at


def test_qwen_ends_where_more_would_be_computed(networks: ModuleType) -> None:
    """Past seq_length its code grows the base and scales q, by rules that are not described: refused, not guessed."""
    model = arch.describe(QWEN, "x")
    assert positions(model) == 30
    net = networks.network(model, networks.drawn(model))
    cache = Cache(model, 1, 64, dtype=torch.float32)
    net(ids_of(30), cache)
    for given in ((ids_of(1), cache), (ids_of(31),)):
        with pytest.raises(InputRefused, match="31 tokens; past 30 this model's attention computes what is not") as e:
            net(*given)
        assert e.value.code == "too-long"
    with pytest.raises(InputRefused, match="the prompt is 31 tokens; this model's described attention ends at 30"):
        check_ids(model, [1] * 31)
    check_ids(model, [1] * 30)


@pytest.mark.parametrize(("changes", "end"), [
    ({"use_dynamic_ntk": False}, 30), ({"use_logn_attn": False}, 30),
    ({"use_logn_attn": False, "use_dynamic_ntk": False}, None), ({"use_logn_attn": ..., "use_dynamic_ntk": ...}, 30),
    ({"seq_length": ...}, 0),
])
def test_which_words_of_qwen_end_it(changes: dict[str, Any], end: int | None) -> None:
    said = {k: v for k, v in {**QWEN, **changes}.items() if v is not ...}
    assert positions(arch.describe(said, "x")) == end


# --- Llama-Nemotron: blocks without attention, without a feed-forward, of their own widths


def nas(*blocks: tuple[int | None, float | None]) -> dict[str, Any]:
    """Blocks of (query heads in a group, ffn_mult); None for none."""
    return {**BASE, **RMS, "model_type": "nemotron-nas", "num_hidden_layers": len(blocks), "rope_theta": 500000.0,
            "block_configs": [
                {"attention": {"no_op": group is None, "n_heads_in_group": group},
                 "ffn": {"no_op": mult is None, "ffn_mult": mult}} for group, mult in blocks]}


def test_thinned_blocks(networks: ModuleType) -> None:
    """As a Llama with what is missing set to zero, widths filled with zeros, and KV heads copied."""
    said = nas((3, 5.25), (None, 8.1), (1, None), (6, 1.0), (None, None))
    model = arch.describe(said, "x")
    held = networks.drawn(model)
    full = {**LLAMA, "num_hidden_layers": 5, "intermediate_size": 512, "rope_theta": 500000.0}
    wide = arch.describe(full, "x")
    state = {t.name: torch.zeros(t.shape) for t in wide.tensors()}
    for name, w in held.items():
        whole = state[name]
        if ".attn.k." in name or ".attn.v." in name:
            w = w.unflatten(0, (-1, 8)).repeat_interleave(48 // len(w), 0).flatten(0, 1)
        whole[tuple(slice(n) for n in w.shape)] = w
    hf: Any = networks.theirs(full)
    by_name = dict(hf.named_parameters())
    for name, w in state.items():
        by_name[theirs_of(name)].data = w
    net = networks.network(model, held)
    ids = ids_of(24)
    want = networks.logits(hf, ids)
    assert networks.off(net(ids), want) < networks.CLOSE
    assert networks.off(networks.pieces(net, ids, [9, *range(15, 24)]), want) < networks.CLOSE
    cache = Cache(model, 2, 10, dtype=torch.float32)
    assert [None if x is None else x.k.shape[1] for x in cache.layers] == [2, None, 6, 1, None]


def theirs_of(name: str) -> str:
    """A canonical name as transformers' Llama has it."""
    outer = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
             "head.weight": "lm_head.weight"}
    if name in outer:
        return outer[name]
    _, i, part = name.split(".", 2)
    part = part.replace("attn_norm", "input_layernorm").replace("mlp_norm", "post_attention_layernorm")
    for branch, long in (("attn", "self_attn"), ("mlp", "mlp")):
        if part.startswith(f"{branch}."):
            _, which, leaf = part.split(".")
            part = f"{long}.{which}_proj.{leaf}"
    return f"model.layers.{i}.{part}"


@pytest.mark.parametrize("branch", ["attention", "ffn"])
def test_a_matrix_in_the_place_of_a_branch_is_refused(branch: str) -> None:
    said = nas((3, 5.25), (3, 5.25))
    said["block_configs"][1][branch] = {"no_op": False, "replace_with_linear": True}
    with pytest.raises(InputRefused, match=r"the tensor '(attn|mlp)\.linear\.weight'") as caught:
        build(arch.describe(said, "x"))
    assert caught.value.code == "not-runnable"


# --- Phi-3-small


PHI3SMALL: dict[str, Any] = {
    "model_type": "phi3small", "hidden_size": 48, "ff_intermediate_size": 56, "ff_dim_multiplier": None,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 97,
    "max_position_embeddings": 128, "dense_attention_every_n_layers": 2}


@pytest.mark.parametrize(("every", "word"), [(2, "block-sparse attention"), (1, "the activation 'gegelu'")])
def test_phi3small_is_refused(every: int, word: str) -> None:
    model = arch.describe({**PHI3SMALL, "dense_attention_every_n_layers": every}, "x")
    with pytest.raises(InputRefused, match=word) as caught:
        build(model)
    assert caught.value.code == "not-runnable"


# --- tensors outside the blocks


def test_a_stored_buffer_that_nothing_reads_is_no_part_of_the_network(networks: ModuleType) -> None:
    """ChatGLM's inv_freq: its code takes only the dtype from it, and computes the frequencies anew."""
    model = arch.describe(CHATGLM, "x")
    held = networks.drawn(model)
    net = networks.network(model, held)
    named = {n for n, _ in (*net.named_parameters(), *net.named_buffers())}
    assert {t.name for t in model.tensors()} - named == {"rotary.inv_freq"}
    held["rotary.inv_freq"] = held["rotary.inv_freq"] * 0
    assert torch.equal(networks.network(model, held)(ids_of(9)), net(ids_of(9)))
    trained = replace(model, extra=tuple(x._replace(kind="param") for x in model.extra))
    with pytest.raises(InputRefused, match=r"the tensor 'rotary\.inv_freq'"):
        build(trained)
