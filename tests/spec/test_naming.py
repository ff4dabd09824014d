"""The layout operations on small tensors of counted values, against reshapes written as the original code has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from llamactl.spec.latent import LatentAttention
from llamactl.spec.model import Context, Layer, Model
from llamactl.spec.naming import (
    Fused,
    Offset,
    RopePairs,
    Rule,
    Stored,
    Transposed,
    read,
    read_expert,
    rule,
    stored_tensors,
)
from llamactl.spec.parts import MLP, Attention, Embedding, Head, MoE, Norm
from llamactl.spec.rope import Rope

L = "layers.{i}."
QKV = tuple(f"{L}attn.{x}.weight" for x in "qkv")
EXPERT = f"{L}mlp.experts.{{e}}."


def counted(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def model(attn: Any, mlp: Any = None) -> Model:
    """One block of `attn` and `mlp` without norms."""
    mlp = mlp or MLP(hidden=attn.hidden, ffn=3, activation="silu")
    return Model(family="llama", model_type="llama", hidden=attn.hidden, embed=Embedding(vocab=2, dim=attn.hidden),
                 layers=(Layer(attn=attn, mlp=mlp),), norm=None, head=Head(vocab=2, hidden=attn.hidden, tied=True),
                 tied_why="", context=Context(trained=None, usable=None, why=""))


def attention(n_heads: int = 6, n_kv: int = 2, head_dim: int = 4, hidden: int = 5) -> Attention:
    return Attention(hidden=hidden, n_heads=n_heads, n_kv_heads=n_kv, head_dim=head_dim)


def plain(m: Model, *given: Rule) -> Iterator[Rule]:
    """`given`, and each tensor that they leave out under its own name."""
    taken = {t for r in given for t in r.of}
    yield from given
    yield from (rule(t, t) for t in dict.fromkeys(t.template for t in m.tensors()) if t not in taken)


def one(m: Model, r: Rule) -> Stored:
    """The single stored tensor that `r` makes of `m`."""
    (stored,) = [s for s in stored_tensors(m, plain(m, r)) if s.rule == r]
    return stored


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)


def test_fused_concat_as_gpt2_splits() -> None:
    """GPT-2: c_attn(x).split(split_size): one third after the other."""
    m = model(attention(n_kv=6))
    s = one(m, rule("c_attn", *QKV, ops=(Fused(),)))
    assert s.shape == (72, 5)
    x = counted(72, 5)
    assert same(read(s, x, m), {f"layers.0.attn.{n}.weight": part for n, part in zip("qkv", x.split(24), strict=True)})


def test_fused_concat_with_grouped_heads_as_phi3_slices() -> None:
    """Phi-3: qkv[..., :query_pos], then num_key_value_heads x head_dim each."""
    m = model(attention())
    s = one(m, rule("qkv_proj", *QKV, ops=(Fused(),)))
    assert s.shape == (40, 5)
    x = counted(40, 5)
    assert same(read(s, x, m), {"layers.0.attn.q.weight": x[:24], "layers.0.attn.k.weight": x[24:32],
                                "layers.0.attn.v.weight": x[32:]})


def test_fused_per_head_as_gpt_neox_views() -> None:
    """GPT-NeoX: view(num_heads, 3 x head_size).chunk(3): [q k v] of head 0, then of head 1, ..."""
    m = model(attention(n_kv=6))
    s = one(m, rule("query_key_value", *QKV, ops=(Fused(order="per_group"),), groups="heads"))
    x = counted(72, 5)
    parts = x.view(6, 3 * 4, 5).chunk(3, dim=1)
    assert same(read(s, x, m), {f"layers.0.attn.{n}.weight": p.reshape(24, 5)
                                for n, p in zip("qkv", parts, strict=True)})


def test_fused_per_group_as_falcon_views() -> None:
    """Falcon's new decoder: view(-1, num_heads // num_kv_heads + 2, head_dim): all but two are queries."""
    m = model(attention())
    s = one(m, rule("query_key_value", *QKV, ops=(Fused(order="per_group"),)))
    assert s.shape == (40, 5)
    x = counted(40, 5)
    qkv = x.view(2, 6 // 2 + 2, 4, 5)
    assert same(read(s, x, m), {
        "layers.0.attn.q.weight": qkv[:, :-2].reshape(24, 5), "layers.0.attn.k.weight": qkv[:, -2].reshape(8, 5),
        "layers.0.attn.v.weight": qkv[:, -1].reshape(8, 5),
    })


def test_fused_per_group_with_one_kv_head_as_falcon_7b_views() -> None:
    """Falcon 7B: view(num_heads + 2, head_dim): the last two are k and v."""
    m = model(attention(n_kv=1))
    x = counted(32, 5)
    qkv = x.view(6 + 2, 4, 5)
    assert same(read(one(m, rule("query_key_value", *QKV, ops=(Fused(order="per_group"),))), x, m), {
        "layers.0.attn.q.weight": qkv[:-2].reshape(24, 5), "layers.0.attn.k.weight": qkv[-2],
        "layers.0.attn.v.weight": qkv[-1],
    })


def test_groups_are_the_latent_heads() -> None:
    """DeepSeek: kv_b_proj(x).view(heads, nope + v).split: [k_nope v] per head."""
    m = model(LatentAttention(hidden=5, n_heads=3, q_rank=None, kv_rank=7, qk_nope=4, qk_rope=2, v_dim=6, eps=1e-6))
    s = one(m, rule("kv_b_proj", f"{L}attn.k_b.weight", f"{L}attn.v_b.weight", ops=(Fused(order="per_group"),)))
    assert s.shape == (30, 7)
    x = counted(30, 7)
    k, v = x.view(3, 10, 7).split((4, 6), dim=1)
    assert same(read(s, x, m), {"layers.0.attn.k_b.weight": k.reshape(12, 7),
                                "layers.0.attn.v_b.weight": v.reshape(18, 7)})


def test_transposed_as_conv1d_multiplies() -> None:
    """GPT-2's Conv1D: x @ weight, weight (in, out)."""
    m = model(attention())
    s = one(m, rule("c_fc", f"{L}mlp.up.weight", ops=(Transposed(),)))
    assert s.shape == (5, 3)
    x, row = counted(5, 3), torch.tensor([1, 2, 3, 4, 5])
    (got,) = read(s, x, m).values()
    assert got.shape == (3, 5)
    assert torch.equal(torch.nn.functional.linear(row, got), row @ x)


def test_fused_then_transposed_as_gpt2_stores() -> None:
    m = model(attention(n_kv=6))
    s = one(m, rule("c_attn", *QKV, ops=(Fused(), Transposed())))
    assert s.shape == (5, 72)
    x, row = counted(5, 72), torch.tensor([1, 2, 3, 4, 5])
    got = read(s, x, m)
    for name, part in zip("qkv", (row @ x).split(24), strict=True):
        assert torch.equal(torch.nn.functional.linear(row, got[f"layers.0.attn.{name}.weight"]), part)


def mixture(bias: bool = False) -> Model:
    expert = MLP(hidden=5, ffn=3, activation="silu", bias=bias)
    return model(attention(), MoE(hidden=5, n_experts=4, top_k=2, expert=expert))


def test_stacked_experts_as_llama4_multiplies() -> None:
    """Llama 4: bmm(x, gate_up[e]).chunk(2): (experts, in, 2 x out), gate before up."""
    m = mixture()
    s = one(m, rule("gate_up_proj", f"{EXPERT}gate.weight", f"{EXPERT}up.weight", ops=(Fused(), Transposed()),
                    stacked=True))
    assert (s.name, s.shape) == ("gate_up_proj", (4, 5, 6))
    x, row = counted(4, 5, 6), torch.tensor([1, 2, 3, 4, 5])
    got = read(s, x, m)
    assert len(got) == 8
    for e in range(4):
        gate, up = (row @ x[e]).chunk(2)
        assert torch.equal(torch.nn.functional.linear(row, got[f"layers.0.mlp.experts.{e}.gate.weight"]), gate)
        assert torch.equal(torch.nn.functional.linear(row, got[f"layers.0.mlp.experts.{e}.up.weight"]), up)


def test_stacked_interleaved_experts_as_gpt_oss_slices() -> None:
    """gpt-oss: gate_up[..., ::2] and gate_up[..., 1::2], weight and bias."""
    m = mixture(bias=True)
    weight = one(m, rule("gate_up_proj", f"{EXPERT}gate.weight", f"{EXPERT}up.weight",
                         ops=(Fused(order="interleaved"), Transposed()), stacked=True))
    bias = one(m, rule("gate_up_proj_bias", f"{EXPERT}gate.bias", f"{EXPERT}up.bias", ops=(Fused(order="interleaved"),),
                       stacked=True))
    assert (weight.shape, bias.shape) == ((4, 5, 6), (4, 6))
    x, b, row = counted(4, 5, 6), counted(4, 6), torch.tensor([1, 2, 3, 4, 5])
    got = {**read(weight, x, m), **read(bias, b, m)}
    for e in range(4):
        gate_up = row @ x[e] + b[e]
        for name, want in (("gate", gate_up[::2]), ("up", gate_up[1::2])):
            at = f"layers.0.mlp.experts.{e}.{name}"
            assert torch.equal(torch.nn.functional.linear(row, got[f"{at}.weight"], got[f"{at}.bias"]), want)


def test_experts_one_by_one_and_layers_are_counted_into_the_name() -> None:
    m = mixture()
    names = [s.name for s in stored_tensors(m, plain(m, rule("h.{i}.e.{e}.w1", f"{EXPERT}gate.weight")))
             if s.rule.stored.startswith("h.")]
    assert names == [f"h.0.e.{e}.w1" for e in range(4)]


def test_the_order_of_a_rule_wins_over_the_order_of_the_model() -> None:
    m = model(attention())
    s = one(m, rule("vkq", *reversed(QKV), ops=(Fused(),)))
    x = counted(40, 5)
    got = read(s, x, m)
    assert torch.equal(got["layers.0.attn.v.weight"], x[:8])
    assert torch.equal(got["layers.0.attn.q.weight"], x[16:])


def test_a_table_must_be_complete() -> None:
    m = model(attention())
    with pytest.raises(KeyError, match="attn.q.weight"):
        list(stored_tensors(m, [r for r in plain(m) if r.of != QKV[:1]]))


def test_every_canonical_tensor_is_stored_once() -> None:
    m = mixture()
    names = [t.name for s in stored_tensors(m, plain(m)) for t in s.of]
    assert sorted(names) == sorted(t.name for t in m.tensors())


def test_a_norm_for_each_head_has_one_name_each() -> None:
    """StableLM's q_layernorm.norms.{e}."""
    norm = Norm(dim=4, eps=1e-5, kind="layer", heads=2)
    attn = Attention(hidden=5, n_heads=6, n_kv_heads=2, head_dim=4, k_norm=norm)
    m = model(attn)
    r = rule("norms.{e}.weight", f"{L}attn.k_norm.{{e}}.weight")
    assert [s.name for s in stored_tensors(m, plain(m, r)) if s.rule == r] == ["norms.0.weight", "norms.1.weight"]


@pytest.mark.parametrize(("x", "groups", "n"), [("q", "heads", 6), ("k", "kv_heads", 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_rope_pairs_as_metas_script_permutes(x: str, groups: str, n: int, bias: bool) -> None:
    """HF -> Meta undone: view(n, d/2, 2, in).transpose(1, 2) brings neighbours (2j, 2j + 1) to (j, j + d/2)."""
    attn = Attention(hidden=5, n_heads=6, n_kv_heads=2, head_dim=8, rope=Rope(dim=8, theta=1e4), qkv_bias=True)
    m, kind = model(attn), "bias" if bias else "weight"
    s = one(m, rule("w", f"{L}attn.{x}.{kind}", ops=(RopePairs(),), groups=groups))
    array = counted(*s.shape)
    (got,) = read(s, array, m).values()
    assert torch.equal(got, array.view(n, 4, 2, *s.shape[1:]).transpose(1, 2).reshape(s.shape))
    canonical = got.view(n, 2, 4, *s.shape[1:]).transpose(1, 2).reshape(s.shape)  # Meta's own direction
    assert torch.equal(canonical, array)


def test_rope_pairs_of_a_part_of_a_head() -> None:
    """Of 8 rows 4 rotate: (0 1)(2 3) become (0 2)(1 3), and the other four stay."""
    m = model(Attention(hidden=5, n_heads=2, n_kv_heads=2, head_dim=8, rope=Rope(dim=4, theta=1e4)))
    s = one(m, rule("w", f"{L}attn.q.weight", ops=(RopePairs(),), groups="heads"))
    (got,) = read(s, counted(16, 5), m).values()
    assert (got[:, 0] // 5).tolist() == [0, 2, 1, 3, 4, 5, 6, 7, 8, 10, 9, 11, 12, 13, 14, 15]


def test_rope_pairs_that_are_the_models_own_change_nothing() -> None:
    m = model(Attention(hidden=5, n_heads=2, n_kv_heads=2, head_dim=8, rope=Rope(dim=8, theta=1e4, pairs="adjacent")))
    s = one(m, rule("w", f"{L}attn.q.weight", ops=(RopePairs(),), groups="heads"))
    array = counted(16, 5)
    assert next(iter(read(s, array, m).values())) is array
    back = one(m, rule("w", f"{L}attn.q.weight", ops=(RopePairs(pairs="half"),), groups="heads"))
    (got,) = read(back, array, m).values()
    assert (got[:8, 0] // 5).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_offset() -> None:
    norm = Norm(dim=3, eps=1e-6, offset=True)
    m = model(Attention(hidden=5, n_heads=1, n_kv_heads=1, head_dim=3, q_norm=norm))
    s = one(m, rule("n", f"{L}attn.q_norm.weight", ops=(Offset(),)))
    assert next(iter(read(s, torch.tensor([1.0, 2.0, 0.5]), m).values())).tolist() == [0.0, 1.0, -0.5]


def test_one_expert_alone() -> None:
    m = mixture()
    s = one(m, rule("gate_up_proj", f"{EXPERT}gate.weight", f"{EXPERT}up.weight",
                    ops=(Fused(order="interleaved"), Transposed()), stacked=True))
    x = counted(4, 5, 6)
    whole = read(s, x, m)
    for e in range(4):
        assert same(read_expert(s, e, x[e], m), {n: t for n, t in whole.items() if f"experts.{e}." in n})
