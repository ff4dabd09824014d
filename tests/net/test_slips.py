"""What wrong ports compute, against the formula in plain torch: norms, masks, KV heads, rotations, branches."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llamactl.errors import InputRefused
from llamactl.net.attention import SelfAttention, Step
from llamactl.net.blocks import RowNorm
from llamactl.net.cache import LayerCache
from llamactl.net.positions import Turn, rotate
from llamactl.net.slips import SlippedAttention, kv_heads
from llamactl.spec.edits import apply
from llamactl.spec.parts import Attention, Norm
from llamactl.spec.slips import Slips
from llamactl.verify.network import Change, Network

T, DIM = 9, 20
PART = Attention(hidden=DIM, n_heads=6, n_kv_heads=2, head_dim=8)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- norms

def rms(x: Tensor, eps: float = 1e-2) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


NORMS = {  # x, weight, bias, eps -> the norm
    "rms-outside": lambda x, w, b, e: x / (x.square().mean(-1, keepdim=True).sqrt() + e) * w,
    "rms-sum": lambda x, w, b, e: x / (x.square().sum(-1, keepdim=True) + e).sqrt() * w,
    "rms-l2": lambda x, w, b, e: x / x.norm(dim=-1, keepdim=True) * w,
    "rms-half": lambda x, w, b, e: rms(x, e).bfloat16().float() * w,
    "rms-bias": lambda x, w, b, e: rms(x, e) * w + b,
    "rms-twice": lambda x, w, b, e: rms(rms(x, e) * w, e) * w,
    "layer-unbiased": lambda x, w, b, e: centred(x) / (x.var(-1, keepdim=True) + e).sqrt() * w + b,
    "layer-outside": lambda x, w, b, e: centred(x) / (x.std(-1, keepdim=True, unbiased=False) + e) * w + b,
    "layer-centred": lambda x, w, b, e: centred(x) * w + b,
    "layer-twice": lambda x, w, b, e: rms(centred(rms(centred(x), e) * w + b), e) * w + b,
}


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("kind", NORMS)
def test_norms(kind: str, offset: bool) -> None:
    with_bias = kind.startswith("layer") or kind == "rms-bias"
    made = RowNorm(Norm(dim=DIM, eps=1e-2, kind=kind, bias=with_bias, offset=offset), dtype=torch.float32, device="cpu")
    x, w, b = noise(3, DIM) * 0.3 + 0.1, 1 + 0.3 * noise(DIM, seed=1), 0.3 * noise(DIM, seed=2)
    made.weight = nn.Parameter(w - 1 if offset else w, requires_grad=False)
    if with_bias:
        made.bias = nn.Parameter(b, requires_grad=False)
    want = NORMS[kind](x, w, b, 1e-2)
    assert torch.allclose(made(x), want, atol=1e-5), kind
    plain = torch.nn.functional.layer_norm(x, (DIM,), w, b, 1e-2) if with_bias else rms(x) * w
    assert not torch.allclose(want, plain, atol=1e-5)


def test_a_norm_without_weights() -> None:
    made = RowNorm(Norm(dim=DIM, eps=1e-2, kind="rms-outside", weight=False), dtype=torch.float32, device="cpu")
    x = noise(2, DIM)
    assert torch.allclose(made(x), NORMS["rms-outside"](x, 1.0, 0.0, 1e-2), atol=1e-6)


# ---- attention

def attention(part: Attention = PART, **slips: Any) -> Any:
    made = SlippedAttention(part, Slips(**slips), dtype=torch.float32, device="cpu")
    for n, p in enumerate(made.parameters()):
        p.copy_(noise(*p.shape, seed=n) / 4)
    return made


def step(**changes: Any) -> Step:
    return Step(0, T, device=torch.device("cpu"), dtype=torch.float32, **changes)


def by_hand(a: Any, x: Tensor, order: list[int], seen: Tensor, scale: float = 8**-0.5) -> Tensor:
    """softmax(q k^T) v, one query head after the other."""
    q, k, v = ((x @ w.weight.T).view(T, -1, 8) for w in (a.q, a.k, a.v))
    heads = []
    for h, kv in enumerate(order):
        scores = (q[:, h] @ k[:, kv].T * scale).masked_fill(~seen, -1e30)
        heads.append(scores.softmax(-1) @ v[:, kv])
    return torch.cat(heads, -1) @ a.o.weight.T  # type: ignore[no-any-return]


CAUSAL = torch.ones(T, T).tril().bool()


@pytest.mark.parametrize(("order", "want"), [("repeat", [0, 0, 0, 1, 1, 1]), ("tile", [0, 1, 0, 1, 0, 1]),
                                             ("reversed", [1, 1, 1, 0, 0, 0]), ("first", [0] * 6),
                                             ("rolled", [1, 1, 1, 0, 0, 0])])
@torch.no_grad()
def test_kv_heads(order: str, want: list[int]) -> None:
    assert kv_heads(order, 6, 2) == want
    a, x = attention(kv_order=order), noise(1, T, DIM)
    assert torch.allclose(a(x, step())[0], by_hand(a, x[0], want, CAUSAL), atol=1e-6)


def test_kv_heads_of_three() -> None:
    assert kv_heads("rolled", 6, 3) == [1, 1, 2, 2, 0, 0]
    assert kv_heads("tile", 6, 3) == [0, 1, 2, 0, 1, 2]
    assert kv_heads("reversed", 6, 3) == [2, 2, 1, 1, 0, 0]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("mask", ["causal", "none", "ahead", "strict", "strict-uniform"])
@torch.no_grad()
def test_masks(mask: str, window: int | None) -> None:
    a, x = attention(replace(PART, window=window), mask=mask), noise(1, T, DIM)
    i, j = torch.arange(T)[:, None], torch.arange(T)[None]
    seen = {"causal": j <= i, "none": (i + j) >= 0, "ahead": j <= i + 1, "strict": (j < i) | ((i == 0) & (j == 0)),
            "strict-uniform": j < i}[mask]
    if window is not None:
        seen = seen & (j > i - window)
    if mask == "strict-uniform":
        seen = seen | (~seen.any(-1, keepdim=True))  # nothing to see: softmax over equal scores
        scores = by_hand(a, x[0], kv_heads("repeat", 6, 2), seen)
        assert torch.allclose(a(x, step())[0, 1:], scores[1:], atol=1e-6)
        v = (x[0] @ a.v.weight.T).view(T, 2, 8).mean(0)
        assert torch.allclose(a(x, step())[0, 0], v[[0, 0, 0, 1, 1, 1]].flatten() @ a.o.weight.T, atol=1e-6)
        return
    assert torch.allclose(a(x, step())[0], by_hand(a, x[0], kv_heads("repeat", 6, 2), seen), atol=1e-6)


@torch.no_grad()
def test_the_right_way_is_the_usual_one() -> None:
    """Softcap, ALiBi, sinks, norms of q and k, clip and window beside a slip that changes nothing."""
    norm = Norm(dim=8, eps=1e-6)
    for part in (PART, replace(PART, softcap=2.0), replace(PART, alibi=True), replace(PART, sinks=True),
                 replace(PART, q_norm=norm, k_norm=norm), replace(PART, clip=0.5), replace(PART, window=3, scale=0.7),
                 replace(PART, window=4, window_kind="chunked"), replace(PART, qkv_bias=True, o_bias=True)):
        a = attention(part)
        usual = SelfAttention(part, dtype=torch.float32, device="cpu")
        usual.load_state_dict(a.state_dict())
        x = noise(1, T, DIM)
        assert torch.allclose(a(x, step()), usual(x, step()), atol=1e-6), part


@torch.no_grad()
def test_a_wrong_port_keeps_nothing() -> None:
    a, x = attention(mask="ahead"), noise(1, T, DIM)
    for kept in ({"step": step(pad=torch.tensor([1]))}, {"step": step(), "cache": LayerCache.__new__(LayerCache)}):
        with pytest.raises(InputRefused):
            a(x, **kept)


# ---- rotations and branches, in a network

@pytest.fixture
def net(networks: ModuleType) -> Network:
    g = networks.golden("llama")
    return Network(g.model, networks.Held(g.tensors), g.ids)


@torch.no_grad()
def test_branches(net: Network) -> None:
    x = net.streams(24)[1]
    opened = net.opened((), 24)
    assert opened is not None
    b: Any = opened.block(1)
    attn = b.attn(b.attn_norm(x), opened.step)
    whole = x + attn
    read, half, normed = b.mlp_norm(whole), b.mlp_norm(x + attn / 2), b.mlp_norm(b.attn_norm(x) + attn)
    gate, up, act = b.mlp.gate(read), b.mlp.up(read), torch.nn.functional.silu
    want = {
        (): whole + b.mlp(read), ("residual=none:mlp",): b.mlp(read), ("residual=normed:mlp",): read + b.mlp(read),
        ("residual=normed:attn",): b.attn_norm(x) + attn + b.mlp(normed), ("residual=none:attn",): attn + b.mlp(
            b.mlp_norm(attn)), ("mlp=gate-only",): whole + b.mlp.down(act(gate)),
        ("mlp=up-only",): whole + b.mlp.down(up), ("mlp=product",): whole + b.mlp.down(act(gate * up)),
        ("mlp=both",): whole + b.mlp.down(act(gate) * act(up)), ("mlp=linear",): whole + b.mlp.down(gate * up),
        ("gate=false",): whole + b.mlp.down(act(up)), ("parallel=true",): whole + b.mlp(b.mlp_norm(x)),
        ("residual_scale=0.5",): x + attn / 2 + b.mlp(half) / 2, ("norm_missing=mlp",): whole + b.mlp(whole),
    }
    got = {texts: net.block([Change(t, 1) for t in texts], 1, x) for texts in want}
    for texts, y in want.items():
        found = got[texts]
        assert found is not None, texts
        assert torch.allclose(found, y, atol=2e-5), texts


@torch.no_grad()
def test_rotations(net: Network) -> None:
    """Which rotations are the same, and that none of them shows at the first token."""
    def said(*texts: str) -> Tensor:
        got = net.logits([Change(t) for t in texts], 24)
        assert got is not None
        return got

    right = said()
    assert torch.allclose(said("rope_on=none"), said("positions=none"), atol=1e-4)
    assert torch.allclose(said("rope_rows=both:half>adjacent", "rope_pairs=adjacent"), right, atol=1e-4)
    for text in ("rope_on=none", "rope_on=q", "rope_direction=both", "rope_direction=k", "rope_pairs=q", "rope_shift=1",
                 "rope_pairs=adjacent", "rope_rows=both:half>adjacent", "rope_table=bf16", "rope_theta=100"):
        got = said(text)
        assert torch.allclose(got[0], right[0], atol=1e-4) or "table" in text, text
        assert not torch.allclose(got, right, atol=1e-4), text
    assert not torch.allclose(said("rope_on=qkv")[5:], right[5:], atol=1e-2)
    assert apply(net.model, "rope_dim=6/12").layers[0].attn.rope.theta == pytest.approx(500000**0.5)  # type: ignore[union-attr]


@torch.no_grad()
def test_changes_of_one_side_and_of_the_rope_add_up_in_any_order(net: Network) -> None:
    def said(*texts: str) -> Tensor:
        got = net.logits([Change(t) for t in texts], 24)
        assert got is not None
        return got

    sides = ("rope_on=q", "rope_on=qkv", "rope_pairs=k", "rope_direction=q", "rope_shift=1")
    for side, rope in product(sides, ("rope_theta=100", "rope_direction=both", "rope_dim=4", "rope_scaling=linear:2")):
        both = said(side, rope)
        assert torch.equal(both, said(rope, side)), (side, rope)
        for alone in (side, rope):
            assert not torch.allclose(both, said(alone), atol=1e-4), (side, rope)
    for one, two in permutations(sides[2:], 2):
        assert torch.equal(said(one, two), said(two, one))
        assert not torch.allclose(said(one, two), said(one), atol=1e-4)
    assert torch.equal(said("rope_on=q", "rope_pairs=k"), said("rope_on=q"))  # k is not rotated, whatever its lanes
    assert torch.equal(said("rope_pairs=q", "rope_pairs=q"), said("rope_pairs=half", "rope_shift=0"))


@torch.no_grad()
def test_heads_read_narrower_rotate_less_on_every_side(net: Network) -> None:
    for text in ("rope_on=qkv", "rope_pairs=q", "rope_dim=12"):
        assert net.logits([Change(text), Change("head_split=2")], 24) is not None
    with pytest.raises(InputRefused, match="cannot rotate 12 of a head's 6"):
        rotate(noise(1, 1, 4, 6), Turn(noise(4, 12), noise(4, 12)), "half")


@torch.no_grad()
def test_a_rotated_value_and_a_shift(net: Network) -> None:
    """One block against q, k and v turned by hand."""
    x = net.streams(24)[1]
    opened = net.opened((), 24)
    assert opened is not None
    b: Any = opened.block(1)
    part = net.model.layers[1].attn
    assert isinstance(part, Attention)
    inverse = 500000.0 ** -(torch.arange(0, 12, 2) / 12)

    def turned(y: Tensor, by: int = 0, sign: float = 1.0) -> Tensor:
        angle = (torch.arange(24) + by)[:, None, None] * inverse * sign
        one, two = y.chunk(2, -1)
        return torch.cat((one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()), -1)

    read = b.attn_norm(x)[0]
    q, k, v = ((read @ w.weight.T).view(24, -1, 12) for w in (b.attn.q, b.attn.k, b.attn.v))

    def done(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = [0, 0, 0, 1, 1, 1]
        scores = torch.einsum("ihd,jhd->hij", q, k[:, kv]) * 12**-0.5
        share = scores.masked_fill(~torch.ones(24, 24).tril().bool(), -1e30).softmax(-1)
        after = x[0] + torch.einsum("hij,jhd->ihd", share, v[:, kv]).flatten(1) @ b.attn.o.weight.T
        return after + b.mlp(b.mlp_norm(after))  # type: ignore[no-any-return]

    want = {"rope_on=qkv": done(turned(q), turned(k), turned(v)), "rope_on=q": done(turned(q), k, v),
            "rope_on=v": done(q, k, turned(v)), "rope_shift=1": done(turned(q, 1), turned(k), v),
            "rope_shift=-2": done(turned(q), turned(k, 2), v), "rope_direction=q": done(turned(q, sign=-1.0), turned(k),
                                                                                        v),
            "rope_direction=both": done(turned(q, sign=-1.0), turned(k, sign=-1.0), v)}
    right = done(turned(q), turned(k), v)
    assert torch.allclose(net.block((), 1, x)[0], right, atol=2e-5)  # type: ignore[index]
    found = {text: net.block([Change(text, 1)], 1, x) for text in want}
    for text, y in want.items():
        got = found[text]
        assert got is not None, text
        assert torch.allclose(got[0], y, atol=2e-5), text
        assert not torch.allclose(got[0], right, atol=1e-3), text
