"""What the CPU's kernels are given: matrices as they read them fast, wherever keys and values come from."""

from __future__ import annotations

import pytest
import torch

from llamactl.net import kernels
from llamactl.net.kernels import causal_attention


@pytest.mark.parametrize("layout", ["by head", "by token"])
def test_every_product_is_of_a_matrix_without_gaps(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 4, 150, 8)
    k, v = torch.randn(2, 2, 200, 8), torch.randn(2, 2, 200, 8)
    if layout == "by token":  # as the cache keeps them
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    k, v = k[:, :, :150], v[:, :, :150]
    seen: list[bool] = []
    linear = kernels.linear

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(weight.is_contiguous() or weight.t().is_contiguous())
        return linear(x, weight, bias)

    monkeypatch.setattr(kernels, "linear", noted)
    got = causal_attention(q, k, v, 0.3)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    assert (got - want.transpose(1, 2).flatten(2)).abs().max() < 1e-5
    assert seen
    assert all(seen)
