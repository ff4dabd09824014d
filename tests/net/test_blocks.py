"""Feed-forwards and norms against their formulas, in fp64 and one step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from llamactl.errors import InputRefused
from llamactl.net.blocks import ACTIVATIONS, FeedForward, RowNorm
from llamactl.spec import config
from llamactl.spec.parts import MLP, Norm


def noise(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size


def filled(module: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Drawn parameters put into `module`; the same in fp64."""
    out = {}
    for name, p in list(module.named_parameters()):
        value = noise(*p.shape, seed=sum(name.encode()), size=0.6 if p.dim() > 1 else 0.4).to(dtype)
        owner = module.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(value, requires_grad=False))
        out[name] = value.double()
    return out


ERF = 1 / math.sqrt(2)
FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x * ERF)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp_min(0), "relu2": lambda x: x.clamp_min(0) ** 2,
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "tanh": lambda x: 1 - 2 / (torch.exp(2 * x) + 1), "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
}


def test_every_activation_of_a_config_is_computed() -> None:
    assert set(config.ACTIVATIONS.values()) <= set(ACTIVATIONS)
    assert set(FORMULAS) == set(ACTIVATIONS)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", FORMULAS)
def test_feed_forward(activation: str, gated: bool, bias: bool) -> None:
    part = FeedForward(MLP(hidden=12, ffn=20, activation=activation, gated=gated, bias=bias), dtype=torch.float32)
    held, x, act = filled(part), noise(2, 5, 12, seed=9), FORMULAS[activation]

    def linear(name: str, y: Tensor) -> Tensor:
        return y @ held[f"{name}.weight"].T + (held[f"{name}.bias"] if bias else 0)

    inner = act(linear("gate", x.double())) * linear("up", x.double()) if gated else act(linear("up", x.double()))
    assert (part(x).double() - linear("down", inner)).abs().max() < 3e-5


@pytest.mark.parametrize(("limit", "alpha"), [(1.5, 1.702), (0.5, 0.7)])
def test_a_clamped_feed_forward(limit: float, alpha: float) -> None:
    """gpt-oss: the gate is cut from above alone, the other branch on both sides, and one is added to it."""
    said = MLP(hidden=12, ffn=20, activation="swigluoai", bias=True, limit=limit, alpha=alpha)
    part = FeedForward(said, dtype=torch.float32)
    held, x = filled(part), noise(7, 12, seed=9).double()
    gate, up = (x @ held[f"{n}.weight"].T + held[f"{n}.bias"] for n in ("gate", "up"))
    assert gate.max() > limit > 0 > -limit > gate.min()
    assert up.max() > limit > 0 > -limit > up.min()
    gate, up = torch.where(gate > limit, limit, gate), torch.where(up.abs() > limit, up.sign() * limit, up)
    inner = gate / (1 + torch.exp(-alpha * gate)) * (up + 1)
    want = inner @ held["down.weight"].T + held["down.bias"]
    assert (part(x.float()).double() - want).abs().max() < 3e-5


@pytest.mark.parametrize("part", [
    MLP(hidden=8, ffn=8, activation="gegelu"), MLP(hidden=8, ffn=8, activation="swigluoai"),
    MLP(hidden=8, ffn=8, activation="swigluoai", gated=False, limit=7.0, alpha=1.7),
], ids=["unknown", "without its limits", "without a gate"])
def test_other_activations_are_refused(part: MLP) -> None:
    with pytest.raises(InputRefused, match=f"the activation '{part.activation}'") as caught:
        FeedForward(part, dtype=torch.float32)
    assert caught.value.code == "not-runnable"


NORMS = [Norm(dim=16, eps=1e-2), Norm(dim=16, eps=1e-2, offset=True), Norm(dim=16, eps=1e-2, weight=False),
         Norm(dim=16, eps=1e-2, kind="layer", bias=True), Norm(dim=16, eps=1e-2, kind="layer"),
         Norm(dim=16, eps=1e-2, kind="layer", weight=False), Norm(dim=16, eps=1e-2, kind="layer", offset=True),
         Norm(dim=16, eps=1e-2, kind="layer", offset=True, bias=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 16), (1, 1, 16), (1, 4, 3, 16)])
@pytest.mark.parametrize("part", NORMS, ids=str)
def test_norms(part: Norm, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Also of one row, which takes another way. In bf16 no more is lost than by rounding what comes out."""
    module = RowNorm(part, dtype=dtype)
    held, x = filled(module, dtype), (noise(*shape, seed=4, size=0.3) + 0.2).to(dtype)
    wide = x.double()
    if part.kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    want = wide / (wide.square().mean(-1, keepdim=True) + part.eps).sqrt()
    if part.weight:
        want = want * (held["weight"] + (1 if part.offset else 0))
    if part.bias:
        want = want + held["bias"]
    for _ in range(2):  # what is kept from the first time
        got = module(x)
        assert got.shape == x.shape
        assert got.dtype == dtype
        assert ((got.double() - want).abs() <= 1e-5 + (0 if dtype == torch.float32 else 2**-7) * want.abs()).all()


@pytest.mark.parametrize("shape", [(2, 3), (1, 1)])
def test_a_norm_of_each_head(shape: tuple[int, int]) -> None:
    module = RowNorm(Norm(dim=8, eps=1e-2, kind="layer", heads=3), dtype=torch.float32)
    held, x = filled(module), noise(*shape, 3, 8, seed=4)
    wide = x.double() - x.double().mean(-1, keepdim=True)
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-2).sqrt()
    want = want * torch.stack([held[f"{e}.weight"] for e in range(3)])
    assert (module(x).double() - want).abs().max() < 1e-5
