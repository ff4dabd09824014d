"""Every way through attention, and the CPU's own kernels, against a reference of one query and one head at a time."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llamactl.errors import InputRefused
from llamactl.net import kernels
from llamactl.net.attention import SelfAttention, Step
from llamactl.net.blocks import RowNorm
from llamactl.net.positions import alibi_slopes
from llamactl.spec.parts import Attention, BlockSparse, Norm

D = 16


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sees(part: Attention, q: int, k: int, pad: int) -> bool:
    """Whether the token at q sees the one at k in a row with `pad` tokens of padding."""
    if k < pad or k > q:
        return False
    if part.window is None:
        return True
    if part.window_kind == "chunked":
        return (q - pad) // part.window == (k - pad) // part.window
    return q - k < part.window


def slope(head: int, heads: int) -> float:
    """ALiBi's, as its paper says it: a geometric row for 2^n heads, then every other one of twice as many."""
    power = 2 ** math.floor(math.log2(heads))
    if head < power:
        return float((2 ** (-8 / power)) ** (head + 1))
    return float((2 ** (-4 / power)) ** (2 * (head - power) + 1))


def naive(part: Attention, q: Tensor, k: Tensor, v: Tensor, start: int, pad: list[int], sinks: Tensor | None) -> Tensor:
    """(B, H, T, D), (B, K, S, D) -> (B, T, H x D) in fp64; rows of padding are left zero."""
    b, heads, t, d = q.shape
    out = torch.zeros(b, t, heads, d, dtype=torch.float64)
    scale = part.scale if part.scale is not None else 1 / math.sqrt(part.head_dim)
    for row, h, i in itertools.product(range(b), range(heads), range(t)):
        at = start + i
        if at < pad[row]:
            continue
        group = h * part.n_kv_heads // heads
        keys = [s for s in range(k.shape[2]) if sees(part, at, s, pad[row])]
        scores = torch.stack([q[row, h, i].double() @ k[row, group, s].double() for s in keys]) * scale
        if part.softcap is not None:
            scores = part.softcap * torch.tanh(scores / part.softcap)
        if part.alibi:
            steps = torch.tensor([float(s - at) for s in keys], dtype=torch.float64)
            scores = scores + steps * slope(h, heads) * (scale if part.alibi_scaled else 1)
        top = torch.exp(scores)
        whole = top.sum() + (0 if sinks is None else torch.exp(sinks[h].double()))
        out[row, i, h] = sum((top[n] / whole * v[row, group, s].double() for n, s in enumerate(keys)), out[row, i, h])
    return out.flatten(2)


def attention(part: Attention, dtype: torch.dtype = torch.float32) -> SelfAttention:
    out = SelfAttention(part, dtype=dtype, device="cpu")
    if out.sinks is not None:
        out.sinks = nn.Parameter(noise(part.n_heads, seed=9).to(dtype), requires_grad=False)
    return out


def worst(part: Attention, t: int, start: int, pad: list[int] | None, b: int = 2, dtype: torch.dtype = torch.float32
          ) -> float:
    """How far `attend` is from the reference."""
    module = attention(part, dtype)
    s = start + t
    size = 2 if dtype == torch.float32 else 1  # large scores are coarse in bf16
    q = noise(b, part.n_heads, t, part.head_dim, seed=1, dtype=dtype) * size
    k = noise(b, part.n_kv_heads, s, part.head_dim, seed=2, dtype=dtype) * size
    v = noise(b, part.n_kv_heads, s, part.head_dim, seed=3, dtype=dtype)
    step = Step(start, t, device=torch.device("cpu"), dtype=dtype, pad=None if pad is None else torch.tensor(pad))
    got = module.attend(q, k, v, step)
    assert got.shape == (b, t, part.n_heads * part.head_dim)
    assert got.dtype == dtype
    assert torch.isfinite(got).all()
    want = naive(part, q, k, v, start, pad or [0] * b, module.sinks)
    keep = torch.tensor([[start + i >= (pad or [0] * b)[row] for i in range(t)] for row in range(b)])
    return float((got.double() - want).abs()[keep].max())


BASE = Attention(hidden=48, n_heads=6, n_kv_heads=2, head_dim=D)
PARTS: dict[str, Attention] = {
    "gqa": BASE, "mha": replace(BASE, n_kv_heads=6), "mqa": replace(BASE, n_kv_heads=1),
    "window": replace(BASE, window=5), "chunked": replace(BASE, window=5, window_kind="chunked"),
    "scale": replace(BASE, scale=0.7), "softcap": replace(BASE, softcap=2.0),
    "softcap and window": replace(BASE, softcap=2.0, window=4, scale=0.5), "sinks": replace(BASE, sinks=True),
    "sinks and window": replace(BASE, sinks=True, window=4), "alibi": replace(BASE, alibi=True),
    "scaled alibi": replace(BASE, alibi=True, alibi_scaled=True, n_kv_heads=6),
    "alibi and a scale": replace(BASE, alibi=True, scale=0.7),
    "scaled alibi and a scale": replace(BASE, alibi=True, alibi_scaled=True, scale=0.7),
    "alibi and window": replace(BASE, alibi=True, window=4), "a wide window": replace(BASE, window=99),
    "a window one short": replace(BASE, window=8), "a window just wide enough": replace(BASE, window=9),
}


@pytest.mark.parametrize(("t", "start"), [(1, 0), (1, 13), (9, 0), (7, 6), (3, 11)])
@pytest.mark.parametrize("pad", [None, [0, 4]], ids=["", "padded"])
@pytest.mark.parametrize("kind", PARTS)
def test_every_way(kind: str, pad: list[int] | None, t: int, start: int) -> None:
    if pad and start + t <= max(pad):
        pad = [0, start + t - 1]
    assert worst(PARTS[kind], t, start, pad) < 1e-5


@pytest.mark.parametrize("kind", ["gqa", "softcap", "sinks", "alibi", "window"])
@pytest.mark.parametrize(("t", "start"), [(1, 9), (8, 0), (5, 4)])
def test_bf16(kind: str, t: int, start: int) -> None:
    assert worst(PARTS[kind], t, start, None, dtype=torch.bfloat16) < 0.03


@pytest.mark.parametrize("kind", ["gqa", "mha", "mqa", "scale", "a wide window"])
@pytest.mark.parametrize(("t", "start"), [(63, 0), (64, 0), (65, 0), (97, 0), (64, 3), (130, 70)])
def test_longer_prompts(kind: str, t: int, start: int) -> None:
    """From 64 tokens on the CPU takes its own kernel, for the later pieces of a prompt too."""
    assert worst(PARTS[kind], t, start, None, b=1) < 4e-5


def test_a_long_prompt_takes_the_kernel_where_nothing_else_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        calls.append(q.shape[2])
        return torch.zeros(q.shape[0], q.shape[2], q.shape[1] * q.shape[3])

    monkeypatch.setattr(kernels, "causal_attention", noted)
    monkeypatch.setattr(kernels, "onednn", lambda: True)
    x: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    for part, step in ((BASE, Step(0, 64, **x)), (PARTS["a wide window"], Step(0, 70, **x)),
                       (BASE, Step(0, 63, **x)), (BASE, Step(2, 64, **x)), (PARTS["window"], Step(0, 64, **x)),
                       (PARTS["softcap"], Step(0, 64, **x)), (PARTS["alibi"], Step(0, 64, **x)),
                       (BASE, Step(0, 64, pad=torch.tensor([1]), **x))):
        k = noise(1, 2, step.end, D)
        attention(part).attend(noise(1, 6, step.length, D), k, k, step)
    assert calls == [64, 70, 64]


@pytest.mark.parametrize(("heads", "kv"), [(6, 2), (4, 4), (5, 1)])
@pytest.mark.parametrize(("t", "start"), [(1, 0), (128, 0), (129, 0), (300, 0), (40, 200), (260, 31)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_plain_attention(dtype: torch.dtype, t: int, start: int, heads: int, kv: int) -> None:
    """In bf16 as near to the truth as softmax of bf16 scores can be, which is what models are trained with."""
    s = start + t
    q, k, v = (noise(2, n, m, D, seed=i, dtype=dtype) * 2 for i, (n, m) in enumerate(((heads, t), (kv, s), (kv, s))))
    got = kernels.causal_attention(q, k, v, 0.3)
    full = [x.repeat_interleave(heads // kv, 1) for x in (k, v)]
    later = torch.arange(s)[None] > torch.arange(start, s)[:, None]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        share = (q * 0.3 @ k.mT).masked_fill(later, float("-inf")).softmax(-1)
        return (share @ v).transpose(1, 2).flatten(2).double()

    want = plain(q.double(), *(x.double() for x in full))
    assert got.dtype == dtype
    rough = (plain(q, *full) - want).abs()
    assert (got.double() - want).abs().mean() < 1.2 * rough.mean() + 1e-7
    assert (got.double() - want).abs().max() < 2 * rough.max() + 1e-5


def test_the_kernel_takes_any_block() -> None:
    q, k, v = noise(1, 4, 50, D), noise(1, 2, 60, D, seed=1), noise(1, 2, 60, D, seed=2)
    want = kernels.causal_attention(q, k, v, 0.25, 128)
    for block in (1, 7, 16, 50):
        assert (kernels.causal_attention(q, k, v, 0.25, block) - want).abs().max() < 1e-6


@pytest.mark.parametrize("in_hardware", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 24), (24,), (1, 2, 24), (2, 1, 24), (5, 24)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(biased: bool, shape: tuple[int, ...], dtype: torch.dtype, in_hardware: bool,
                monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever multiplies on this CPU or another, it is x W^T + b."""
    monkeypatch.setattr(kernels, "bf16_in_hardware", lambda: in_hardware)
    x, w = noise(*shape, dtype=dtype), noise(7, 24, seed=1, dtype=dtype)
    bias = noise(7, seed=2, dtype=dtype) if biased else None
    got = kernels.linear(x, w, bias)
    want = x.double() @ w.double().T + (0 if bias is None else bias.double())
    assert got.shape == want.shape
    assert got.dtype == dtype
    assert (got.double() - want).abs().max() < (1e-5 if dtype == torch.float32 else 0.1)


def test_alibi_slopes() -> None:
    for heads in (1, 2, 3, 6, 8, 12, 16, 25, 40, 112):
        assert alibi_slopes(heads) == pytest.approx([slope(h, heads) for h in range(heads)], rel=1e-12)
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]


# --- the projections around the scores, one field each


def projected(part: Attention, x: Tensor) -> Tensor:
    """Attention of x with drawn weights, step by step; one head at a time, no cache, no rotation."""
    m = filled(part)
    hd, heads, kv = part.head_dim, part.n_heads, part.n_kv_heads

    def linear(name: str) -> Tensor:
        w = m.get_parameter(f"{name}.weight")
        bias = m.state_dict().get(f"{name}.bias")
        y: Tensor = x @ w.T
        return y if bias is None else y + bias

    def normed(y: Tensor, norm: RowNorm | None) -> Tensor:
        if norm is None:
            return y
        rows = y.unflatten(-1, (-1, norm.part.dim))
        rows = rows / (rows.square().mean(-1, keepdim=True) + norm.part.eps).sqrt()
        weight = norm.weight
        if norm.part.heads:
            weight = torch.stack([norm.get_parameter(f"{e}.weight") for e in range(norm.part.heads)])
        return (rows if weight is None else rows * weight).flatten(-2)

    q, k = linear("q"), linear("k")
    v = k if part.v_from_k else linear("v")
    if part.clip is not None:
        q, k, v = (y.clip(-part.clip, part.clip) for y in (q, k, v))
    q, k, v = normed(q, m.q_norm), normed(k, m.k_norm), normed(v, m.v_norm)
    if part.q_growth is not None:
        beta, places, first = part.q_growth
        grown = [1 + beta * math.log(1 + (i + first) // places) for i in range(x.shape[1])]
        q = q * torch.tensor(grown)[:, None]
    out = naive(part, *(y.unflatten(-1, (n, hd)).transpose(1, 2) for y, n in ((q, heads), (k, kv), (v, kv))), 0,
                [0] * len(x), m.sinks).float()
    if part.gated:
        out = out * torch.sigmoid(linear("gate"))
    y = out @ m.o.weight.T
    return y if m.o.bias is None else y + m.o.bias


def filled(part: Attention) -> SelfAttention:
    m = SelfAttention(part, dtype=torch.float32, device="cpu")
    for name, p in sorted(m.named_parameters()):
        p.copy_(noise(*p.shape, seed=sum(name.encode())) * (1.2 / p.shape[-1] ** 0.5 if p.dim() > 1 else 0.4))
    return m


ROW, WHOLE = Norm(dim=D, eps=1e-5), Norm(dim=6 * D, eps=1e-5)


@pytest.mark.parametrize("part", [
    BASE, replace(BASE, qkv_bias=True), replace(BASE, o_bias=True), replace(BASE, gated=True, qkv_bias=True),
    replace(BASE, clip=0.4), replace(BASE, clip=0.4, q_norm=ROW, k_norm=ROW), replace(BASE, q_norm=ROW, k_norm=ROW),
    replace(BASE, q_norm=WHOLE, k_norm=replace(WHOLE, dim=2 * D)), replace(BASE, v_norm=replace(ROW, weight=False)),
    replace(BASE, q_norm=replace(ROW, heads=6), k_norm=replace(ROW, heads=2)),
    replace(BASE, n_kv_heads=1, q_norm=replace(ROW, heads=6), k_norm=replace(ROW, heads=1)),
    replace(BASE, v_from_k=True), replace(BASE, v_from_k=True, k_norm=ROW), replace(BASE, q_growth=(0.5, 3, 0)),
    replace(BASE, q_growth=(0.5, 3, 1)), replace(BASE, n_kv_heads=6, sinks=True, o_bias=True),
], ids=str)
def test_projections(part: Attention) -> None:
    x = noise(2, 9, 48, seed=5)
    step = Step(0, 9, device=x.device, dtype=x.dtype)
    assert (filled(part)(x, step) - projected(part, x)).abs().max() < 1e-5


@pytest.mark.parametrize(("part", "word"), [
    (replace(BASE, cross=True), "cross-attention"), (replace(BASE, shares_kv=True), "another layer's K and V"),
    (replace(BASE, sparse=BlockSparse(block=4, local=2, stride=2)), "block-sparse"),
], ids=["cross", "shared", "sparse"])
def test_what_is_not_computed_is_refused(part: Attention, word: str) -> None:
    with pytest.raises(InputRefused, match=word) as caught:
        SelfAttention(part, dtype=torch.float32)
    assert caught.value.code == "not-runnable"


@pytest.mark.parametrize("kind", ["gqa", "window", "chunked"])
def test_every_token_sees_a_key(kind: str) -> None:
    """Also one of padding: a row of scores without any is no number in some kernels."""
    step = Step(2, 7, device=torch.device("cpu"), dtype=torch.float32, pad=torch.tensor([0, 5]))
    mask = step.mask(PARTS[kind])
    assert mask is not None
    assert mask.any(-1).all()


def test_masks_are_made_once() -> None:
    step = Step(0, 9, device=torch.device("cpu"), dtype=torch.float32)
    assert step.mask(BASE) is step.mask(PARTS["softcap"])
    assert step.mask(PARTS["window"]) is not step.mask(PARTS["chunked"])
