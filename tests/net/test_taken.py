"""Tensors read otherwise than they lie: each way of reading against the line of plain torch that does it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from llamactl.errors import InputRefused
from llamactl.net.taken import Taking, rounded
from llamactl.spec.edits import apply
from llamactl.spec.mistakes import in_layer
from llamactl.spec.taken import Taken, take

H, K, D = 6, 2, 12  # of the golden Llamas


@pytest.fixture
def read(networks: ModuleType) -> Any:
    """read(golden, name, *edits, layer=None): a tensor of layer 1 as the edits leave it."""

    def get(name: str, path: str, *texts: str, layer: int | None = None, at: int = 1) -> Tensor:
        g = networks.golden(name)
        model = g.model
        for text in texts:
            made = apply(model, text) if layer is None else in_layer(model, text, layer)
            assert made is not None
            model = made
        return Taking(networks.Held(g.tensors), model).tensor(path if "." not in path or path.startswith(
            ("embed", "head", "norm", "pos")) else f"layers.{at}.{path}")

    return get


def permuted(w: Tensor, heads: int) -> Tensor:
    """The line of transformers' converter that makes Hugging Face's rows of Meta's."""
    return w.view(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def unpermuted(w: Tensor, heads: int) -> Tensor:
    return w.view(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


@pytest.mark.parametrize("leaf", ["weight", "bias"])
@pytest.mark.parametrize(("order", "formula"), [("adjacent>half", permuted), ("half>adjacent", unpermuted)])
def test_rows(order: str, formula: Any, leaf: str, read: Any) -> None:
    name = "llama-bias-tied-llama3"
    q, k, v = (read(name, f"attn.{x}.{leaf}") for x in "qkv")
    both = [f"rope_rows=both:{order}"]
    assert torch.equal(read(name, f"attn.q.{leaf}", *both), formula(q, H))
    assert torch.equal(read(name, f"attn.k.{leaf}", *both), formula(k, K))
    assert torch.equal(read(name, f"attn.v.{leaf}", *both), v)
    assert torch.equal(read(name, f"attn.k.{leaf}", f"rope_rows=k:{order}:{H}"), formula(k, H))
    assert torch.equal(read(name, f"attn.q.{leaf}", f"rope_rows=k:{order}:{H}"), q)


@pytest.mark.parametrize(("order", "formula"), [("adjacent>half", permuted), ("half>adjacent", unpermuted)])
def test_rows_of_q_with_the_number_of_kv_heads(order: str, formula: Any, read: Any) -> None:
    """The converter's line knows no head_dim: fewer heads are wider ones, and all their rows move."""
    assert torch.equal(read("llama", "attn.q.weight", f"rope_rows=q:{order}:{K}"), formula(read(
        "llama", "attn.q.weight"), K))


def test_one_order_undoes_the_other(read: Any) -> None:
    assert torch.equal(read("llama", "attn.q.weight", "rope_rows=q:adjacent>half", "rope_rows=q:half>adjacent"),
                       read("llama", "attn.q.weight"))


@pytest.mark.parametrize("leaf", ["weight", "bias"])
def test_fused_orders(leaf: str, read: Any) -> None:
    """GPT-2: three parts of one size, and as many groups as heads."""
    q, k, v = (read("gpt2", f"attn.{x}.{leaf}") for x in "qkv")
    whole, size = torch.cat((q, k, v)), len(q)
    heads = whole.view(H, 3, -1, *whole.shape[1:])
    lanes = whole.view(size, 3, *whole.shape[1:])
    mixed = torch.stack((q, k, v), 1)
    want = {"qkv>kqv": dict(zip("kqv", (q, k, v), strict=True)),
            "qkv>vkq": dict(zip("vkq", (q, k, v), strict=True)),
            "qkv>per_head": {x: heads[:, n].reshape(q.shape) for n, x in enumerate("qkv")},
            "qkv>per_lane": {x: lanes[:, n] for n, x in enumerate("qkv")},
            "per_lane>qkv": dict(zip("qkv", mixed.reshape(whole.shape).chunk(3), strict=True)),
            "per_head>qkv": dict(zip("qkv", torch.stack([x.view(H, -1, *x.shape[1:]) for x in (q, k, v)], 1).reshape(
                whole.shape).chunk(3), strict=True))}
    for order, parts in want.items():
        for x, tensor in parts.items():
            assert torch.equal(read("gpt2", f"attn.{x}.{leaf}", f"fused={order}"), tensor), (order, x)


def test_fused_orders_of_grouped_heads(read: Any) -> None:
    """Falcon's order: for each KV head its query heads, then its k, then its v."""
    q, k, v = (read("llama", f"attn.{x}.weight") for x in "qkv")
    whole = torch.cat((q, k, v)).view(K, H // K + 2, D, -1)
    assert torch.equal(read("llama", "attn.q.weight", "fused=qkv>per_head"), whole[:, : H // K].reshape(q.shape))
    assert torch.equal(read("llama", "attn.k.weight", "fused=qkv>per_head"), whole[:, -2].reshape(k.shape))
    assert torch.equal(read("llama", "attn.v.weight", "fused=qkv>per_head"), whole[:, -1].reshape(v.shape))
    kqv = torch.cat((q, k, v))
    assert torch.equal(read("llama", "attn.k.weight", "fused=qkv>kqv"), kqv[: len(k)])
    assert torch.equal(read("llama", "attn.q.weight", "fused=qkv>kqv"), kqv[len(k) : len(k) + len(q)])
    with pytest.raises(InputRefused):
        read("llama", "attn.q.weight", "fused=qkv>per_lane")


def test_fused_gate_and_up(read: Any) -> None:
    gate, up = read("llama", "mlp.gate.weight"), read("llama", "mlp.up.weight")
    whole = torch.cat((gate, up))
    assert torch.equal(read("llama", "mlp.gate.weight", "fused=gu>interleaved"), whole[::2])
    assert torch.equal(read("llama", "mlp.up.weight", "fused=gu>interleaved"), whole[1::2])
    mixed = torch.stack((gate, up), 1).flatten(0, 1)
    assert torch.equal(read("llama", "mlp.gate.weight", "fused=interleaved>gu"), mixed[: len(gate)])


def test_heads(read: Any) -> None:
    q, k, o = (read("llama", f"attn.{x}.weight") for x in "qko")
    split = q.view(H, D, -1)
    assert torch.equal(read("llama", "attn.q.weight", "heads=attn.q:reversed"), split.flip(0).reshape(q.shape))
    assert torch.equal(read("llama", "attn.q.weight", "heads=attn.q:rolled"), split.roll(1, 0).reshape(q.shape))
    assert torch.equal(read("llama", "attn.k.weight", "heads=attn.k:reversed"),
                       k.view(K, D, -1).flip(0).reshape(k.shape))
    assert torch.equal(read("llama", "attn.q.weight", "heads=attn.q:lanes"),
                       q.view(D, H, -1).transpose(0, 1).reshape(q.shape))
    assert torch.equal(read("llama", "attn.o.weight", "heads=attn.o:reversed"),
                       o.view(len(o), H, D).flip(1).reshape(o.shape))


def test_whole_tensors(read: Any) -> None:
    gate, up = read("llama", "mlp.gate.weight"), read("llama", "mlp.up.weight")
    assert torch.equal(read("llama", "mlp.gate.weight", "swapped=mlp.gate,mlp.up"), up)
    assert torch.equal(read("llama", "mlp.up.weight", "swapped=mlp.gate,mlp.up"), gate)
    assert torch.equal(read("llama", "mlp.up.weight", "copied=mlp.up<mlp.gate"), gate)
    assert torch.equal(read("llama", "mlp.gate.weight", "copied=mlp.up<mlp.gate"), gate)
    assert torch.equal(read("gpt2", "attn.o.weight", "transposed=attn.o"), read("gpt2", "attn.o.weight").t())
    assert torch.equal(read("llama", "attn.q.weight", "scaled=attn.q.weight*-1"), -read("llama", "attn.q.weight"))
    assert torch.equal(read("llama", "attn_norm.weight", "norms_swapped=attn,mlp"), read("llama", "mlp_norm.weight"))
    assert not read("llama", "attn.q.weight", "constant=zero:attn.q.weight").any()
    assert (read("llama", "attn_norm.weight", "constant=ones:attn_norm.weight") == 1).all()
    assert torch.equal(read("gpt2", "attn.k.bias", "swapped=attn.k,attn.v"), read("gpt2", "attn.v.bias"))


def test_rows_of_the_vocabulary(read: Any) -> None:
    e, h = read("llama", "embed.weight"), read("llama", "head.weight")
    assert torch.equal(read("llama", "embed.weight", "row_shift=embed:1"), torch.cat((e[1:], e[-1:])))
    assert torch.equal(read("llama", "head.weight", "row_shift=head:-1"), torch.cat((h[:1], h[:-1])))
    assert torch.equal(read("llama", "embed.weight", "row_shift=head:-1"), e)
    tied = read("qwen2", "embed.weight")
    assert torch.equal(read("qwen2", "head.weight", "row_shift=head:1"), torch.cat((tied[1:], tied[-1:])))
    assert torch.equal(read("qwen2", "embed.weight", "row_shift=head:1"), tied)
    p = read("gpt2", "pos_embed.weight")
    assert torch.equal(read("gpt2", "pos_embed.weight", "position_rows=2"), torch.cat((p[2:], p[-1:], p[-1:])))
    assert torch.equal(read("gpt2", "pos_embed.weight", "position_rows=first"), p[:1].expand_as(p))


@pytest.mark.parametrize(("text", "order"), [
    ("missing:1", [0, 2]), ("repeated:0", [0, 0, 1, 2]), ("twice:0", [0, 0, 2]), ("swapped:0,2", [2, 1, 0]),
    ("shifted:1", [1, 2, 0]), ("shifted:-1", [2, 0, 1]), ("clamped:1", [1, 2, 2]), ("clamped:-1", [0, 0, 1]),
    ("reversed", [2, 1, 0]), ("first", [0, 0, 0])])
def test_layers(text: str, order: list[int], read: Any) -> None:
    for n, i in enumerate(order):
        assert torch.equal(read("llama", "attn.q.weight", f"layer_order={text}", at=n),
                           read("llama", "attn.q.weight", at=i))


def test_edits_follow_each_other(read: Any) -> None:
    """Each acts on what those before it left; of one layer alone where it is said so."""
    up = read("llama", "mlp.up.weight")
    twice = ("swapped=mlp.gate,mlp.up", "weights=bf16:mlp.gate.weight")
    assert torch.equal(read("llama", "mlp.gate.weight", *twice), up.bfloat16().float())
    assert torch.equal(read("llama", "mlp.up.weight", *twice), read("llama", "mlp.gate.weight"))
    other = ("weights=bf16:mlp.gate.weight", "swapped=mlp.gate,mlp.up")
    assert torch.equal(read("llama", "mlp.gate.weight", *other), up)
    assert torch.equal(read("llama", "mlp.up.weight", *other), read("llama", "mlp.gate.weight").bfloat16().float())
    assert torch.equal(read("llama", "mlp.gate.weight", "swapped=mlp.gate,mlp.up", layer=1), up)
    assert torch.equal(read("llama", "mlp.gate.weight", "swapped=mlp.gate,mlp.up", layer=2),
                       read("llama", "mlp.gate.weight"))
    moved = read("llama", "mlp.gate.weight", "layer_order=swapped:0,1", "swapped=mlp.gate,mlp.up")
    assert torch.equal(moved, read("llama", "mlp.up.weight", at=0))


def test_rounding() -> None:
    x = torch.tensor([[127.0, 1.4, -0.6, 0.0], [-12.7, 0.04, 0.06, 12.7]])
    assert torch.equal(rounded(x, "int8"), torch.tensor([[127.0, 1.0, -1.0, 0.0], [-12.7, 0.0, 0.1, 12.7]]))
    assert torch.equal(rounded(torch.tensor([7.0, 3.4, -3.6, 0.0]), "int4"), torch.tensor([7.0, 3.0, -4.0, 0.0]))
    assert rounded(torch.tensor([1 + 2**-8, 1 + 2**-7, 3e38]), "bf16").tolist()[:2] == [1.0, 1 + 2**-7]
    assert rounded(torch.tensor([1 + 2**-11, 1 + 2**-10]), "fp16").tolist() == [1.0, 1 + 2**-10]
    assert torch.isinf(rounded(torch.tensor([1e6]), "fp16")).all()
    assert rounded(torch.tensor([1e6, -1e6, 17.0]), "fp8_e4m3").tolist() == [448.0, -448.0, 16.0]
    assert rounded(torch.tensor([1e6, 9.0]), "fp8_e5m2").tolist() == [57344.0, 8.0]
    assert torch.allclose(rounded(torch.tensor([1e3, 500.0, 1.0]), "fp8_e4m3_scaled"), torch.tensor([1e3, 500.0, 1.0]),
                          rtol=0.07)
    assert not rounded(torch.zeros(2, 3), "int8").any()
    assert rounded(torch.ones(2, dtype=torch.bfloat16), "bf16").dtype is torch.float32
    with pytest.raises(InputRefused):
        rounded(x, "fp3")


def test_which_tensors_are_rounded(read: Any) -> None:
    def changed(text: str, path: str) -> bool:
        return not torch.equal(read("llama", path, text), read("llama", path))

    paths = ("attn.q.weight", "mlp.down.weight", "attn_norm.weight", "embed.weight", "head.weight", "norm.weight")
    assert [changed("weights=bf16", p) for p in paths] == [True] * 6
    assert [changed("weights=bf16:linear", p) for p in paths] == [True, True, False, False, False, False]
    assert [changed("weights=bf16:embed.weight", p) for p in paths] == [False, False, False, True, False, False]


def test_what_cannot_be_carried_out(networks: ModuleType) -> None:
    g = networks.golden("llama")

    def read(*new: Taken) -> Tensor:
        return Taking(networks.Held(g.tensors), take(g.model, *new)).tensor("layers.0.attn.q.weight")

    for bad in (Taken("attn.q.weight", "another"), Taken("attn.q.weight", "rows", "half>adjacent", 7),
                Taken("attn.q.weight", "heads", "sideways"), Taken("attn.q.weight", "nothing"),
                Taken("attn.q.weight", "fused", "qkv>what"), Taken("attn.q.weight", "round", "fp3")):
        with pytest.raises(InputRefused) as caught:
            read(bad)
        assert caught.value.code == "edit-tensor"
    assert read(Taken("attn.k.weight", "nothing")) is g.tensors["layers.0.attn.q.weight"]


def test_an_edit_below_an_order_that_leaves_layers_out(networks: ModuleType) -> None:
    """Rows reordered first, a layer left out after: the last layer of before is still read."""
    g = networks.golden("llama")
    model = apply(apply(g.model, "heads=attn.q:reversed"), "layer_order=missing:0")
    taking = Taking(networks.Held(g.tensors), model)
    last = g.model.n_layers - 1
    part = g.model.layers[last].attn
    want = g.tensors[f"layers.{last}.attn.q.weight"].view(part.n_heads, part.head_dim, -1).flip(0).flatten(0, 1)
    assert torch.equal(taking.tensor(f"layers.{last - 1}.attn.q.weight"), want)
