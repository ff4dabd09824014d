"""The numbers of a comparison: against PyTorch's own formulas, whatever the logits hold, in blocks of any height."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from llamactl.analysis.verification import Measures
from llamactl.net import divergence
from llamactl.verify.measure import common, gap, measure, measure_top

T, V = 11, 50


def pair() -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    a = 3 * torch.randn(T, V, generator=made)
    return a, a + 0.5 * torch.randn(T, V, generator=made), torch.randint(0, V, (T,), generator=made)


def whole(m: Measures) -> dict[str, object]:
    """Every number; and a JSON reader takes them, NaN or infinity being none."""
    data = asdict(m)
    json.dumps(data, allow_nan=False)
    return data


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_numbers(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "BLOCK_BYTES", 8 * V * rows)
    a, b, ids = pair()
    got = measure(a, b, ids, 0.75)
    x, y = a.double(), b.double()
    kl = F.kl_div(y.log_softmax(-1), x.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    centred = [t - t.mean(-1, keepdim=True) for t in (x - y, x)]
    relative = torch.linalg.vector_norm(centred[0], dim=-1) / torch.linalg.vector_norm(centred[1], dim=-1)
    five = [set(t.topk(5).indices.tolist()) for t in (*x, *y)]
    shared = [len(p & q) / 5 for p, q in zip(five[:T], five[T:], strict=True)]
    beyond = (x - y).abs().amax(0) > 0.75
    assert got.tokens == T
    assert got.kl_by_position == pytest.approx(kl.tolist(), rel=1e-10)
    assert (got.max_kl, got.mean_kl) == pytest.approx((float(kl.max()), float(kl.mean())), rel=1e-10)
    assert got.kl_position_0 == got.kl_by_position[0]
    quarters = [kl[0:2], kl[2:5], kl[5:8], kl[8:11]]
    assert got.kl_by_quarter == pytest.approx([float(q.mean()) for q in quarters], rel=1e-10)
    assert got.max_abs_dlogit == float((x - y).abs().max())
    assert got.max_relative == pytest.approx(float(relative.max()), rel=1e-10)
    assert got.top1_agreement == pytest.approx(float((x.argmax(-1) == y.argmax(-1)).double().mean()))
    assert got.top5_agreement == pytest.approx(math.fsum(shared) / T)
    assert 0 < got.top1_agreement < 1 > got.top5_agreement > 0
    assert (got.columns, got.columns_of) == (int(beyond.sum()), V)
    assert 0 < got.columns < V
    assert got.first_column == int(beyond.nonzero()[0])
    assert got.loss_first == pytest.approx(float(F.cross_entropy(x[:-1], ids[1:])), rel=1e-10)
    assert got.loss_second == pytest.approx(float(F.cross_entropy(y[:-1], ids[1:])), rel=1e-10)
    assert got.non_finite == (0, 0)
    whole(got)


def test_the_same_logits() -> None:
    a, _, ids = pair()
    got = measure(a, a.clone(), ids, 0.0)
    assert (got.max_kl, got.mean_kl, got.max_abs_dlogit, got.max_relative) == (0, 0, 0, 0)
    assert (got.top1_agreement, got.top5_agreement, got.columns, got.first_column) == (1, 1, 0, None)
    assert got.loss_first == got.loss_second


def test_a_constant_on_a_row_changes_no_chance() -> None:
    a, _, ids = pair()
    got = measure(a, a + 2.0, ids, 1.0)
    assert got.max_kl is not None
    assert got.max_relative is not None
    assert got.max_kl < 1e-12
    assert got.max_relative < 1e-6
    assert got.max_abs_dlogit == pytest.approx(2, rel=1e-5)


def test_one_column_is_named() -> None:
    a, _, ids = pair()
    b = a.clone()
    b[4, 17] += 0.25
    assert (measure(a, b, ids, 0.2).columns, measure(a, b, ids, 0.2).first_column) == (1, 17)
    assert measure(a, b, ids, 0.3).columns == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one entry of either: nothing that depends on it is a number, and the entry is beyond every limit."""
    monkeypatch.setattr(divergence, "BLOCK_BYTES", 8 * V * 4)
    a, b, ids = pair()
    near = a.clone()
    near[5, 20] = value
    for first, second, odd in ((a, near, (0, 1)), (near, a, (1, 0)), (near, near, (1, 1))):
        got = measure(first, second, ids, 1e9)
        assert got.non_finite == odd
        for name in ("max_kl", "mean_kl", "max_abs_dlogit", "max_relative", "top1_agreement", "top5_agreement"):
            assert getattr(got, name) is None, name
        assert [n for n, x in enumerate(got.kl_by_position) if x is None] == [5]
        assert [x is None for x in got.kl_by_quarter] == [False, False, True, False]
        assert got.kl_position_0 == 0
        assert (got.columns, got.first_column) == (1, 20)
        whole(got)
        assert gap(first, second) == math.inf
    assert measure(torch.full_like(a, value), b, ids, 1.0).non_finite == (T * V, 0)
    assert measure(torch.full_like(a, value), b, ids, 1.0).loss_first is None


@pytest.mark.parametrize("size", [1e30, 1e200, 1.7e308])
def test_huge_logits(size: float) -> None:
    a, b, ids = pair()
    a, b = (size * (t.double() / t.abs().max()) for t in (a, b))
    got = measure(a, b, ids, 1.0)
    whole(got)
    assert got.non_finite == (0, 0)
    assert got.columns == V
    assert got.top1_agreement is not None
    assert measure(a, -a, ids, 1.0).columns == V
    whole(measure(a, -a, ids, 1.0))
    assert measure(a, a, ids, 1.0).max_abs_dlogit == 0


def test_rows_without_any_size() -> None:
    flat, _, ids = pair()
    flat = torch.zeros_like(flat)
    assert measure(flat, flat, ids, 0.0).max_relative == 0
    assert measure(flat, torch.eye(T, V), ids, 0.0).max_relative is None


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_short_texts(tokens: int) -> None:
    a, b, ids = pair()
    got = measure(a[:tokens], b[:tokens], ids[:tokens].tolist(), 0.0)
    assert len(got.kl_by_position) == got.tokens == tokens
    assert sum(x is not None for x in got.kl_by_quarter) == tokens
    assert (got.loss_first is None) == (tokens == 1)
    whole(got)


def test_losses_that_do_not_exist() -> None:
    a, b, ids = pair()
    assert measure(a, b, None, 0.0).loss_first is None
    far = ids.clone()
    far[3] = V
    assert measure(a, b, far, 0.0).loss_second is None
    with pytest.raises(ValueError, match="ids are"):
        measure(a, b, ids[:-1], 0.0)


def test_small_vocabularies_and_other_dtypes() -> None:
    a, b, ids = pair()
    got = measure(a[:, :3], b[:, :3], ids % 3, 0.0)
    assert got.top5_agreement == 1  # all three
    half = measure(a.half(), a, ids, 0.0)
    assert half.max_abs_dlogit == float((a.half().double() - a.double()).abs().max()) > 0


def test_shapes_that_do_not_compare() -> None:
    a, b, ids = pair()
    for one, other in ((a, b[:, :-1]), (a, b[:-1]), (a[None], b[None]), (a[:0], b[:0])):
        with pytest.raises(ValueError, match="logits are"):
            measure(one, other, None, 0.0)
    with pytest.raises(ValueError, match="logits are"):
        gap(a, b[:-1])
    for values, at in ((a[:, :3], ids), (a, torch.zeros(T, 3, dtype=torch.long)), (a[:4], a[:4].long())):
        with pytest.raises(ValueError, match="values"):
            measure_top(values, at, b, ids, 0.0)
    with pytest.raises(ValueError, match=r"columns 0\.\.50 of 50"):
        measure_top(a[:, :2], torch.tensor([[0, V]] * T), b, ids, 0.0)


def test_gap() -> None:
    a, b, _ = pair()
    assert gap(a, b) == float((a.double() - b.double()).abs().max()) == gap(b, a)
    assert gap(a, a) == 0
    b[0, 0] = math.nan  # in the first block, with others after it
    assert gap(a, b) == math.inf


def test_vocabularies_that_differ() -> None:
    a, b, _ = pair()
    assert common(a, b)[2] is None
    x, y, said = common(a, b[:, :40])
    assert torch.equal(x, a[:, :40])
    assert torch.equal(y, b[:, :40])
    assert said == ("the first has 50 vocabulary entries, the second 40: entries 40 to 49 of the first are compared "
                    "with nothing")
    x, y, said = common(a[:, :49], b)
    assert x.shape == y.shape == (T, 49)
    assert said is not None
    assert "entries 49 to 49 of the second" in said


@pytest.mark.parametrize("rows", [2, 1000])
def test_of_the_first_the_largest_alone_are_known(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "BLOCK_BYTES", 8 * V * rows)
    a, b, ids = pair()
    top = a.topk(8)
    shuffled = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    got = measure_top(top.values[:, shuffled], top.indices[:, shuffled], b, ids, 0.5)
    full = measure(a, b, ids, 0.5)
    d = (top.values.double() - b.gather(1, top.indices).double()).abs()
    assert got.max_abs_dlogit == float(d.max())
    assert got.columns == len(set(top.indices[d > 0.5].tolist())) > 0
    assert got.first_column == min(top.indices[d > 0.5].tolist())
    assert (got.top1_agreement, got.top5_agreement) == (full.top1_agreement, full.top5_agreement)
    assert (got.loss_first, got.loss_second) == (None, pytest.approx(full.loss_second, rel=1e-12))
    assert got.max_kl is got.mean_kl is got.kl_position_0 is got.max_relative is None
    assert got.kl_by_position == (None,) * T
    assert measure_top(top.values[:, :4], top.indices[:, :4], b, ids, 0.5).top5_agreement is None
    assert {f.name for f in fields(got)} == set(whole(got))
    b[2, int(top.indices[2, 0])] = math.nan
    odd = measure_top(top.values, top.indices, b, ids, 1e9)
    assert (odd.columns, odd.first_column) == (1, int(top.indices[2, 0]))
    assert odd.max_abs_dlogit is odd.top1_agreement is None
    assert odd.non_finite == (0, 1)
    whole(odd)
