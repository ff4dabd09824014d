"""Matrices in 8 bits: how far they are from what they were, which they are, and what they take."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from llamactl.analysis.flops import elements_read
from llamactl.analysis.generation import weights_bytes
from llamactl.cli.options import Access
from llamactl.cli.runnable import Opened, open_model
from llamactl.errors import UsageError
from llamactl.net.decoder import Decoder, build
from llamactl.net.int8 import FEW, Int8Linear, assign_int8, divergence, rounded
from llamactl.spec.int8 import in_int8

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
CPU = torch.device("cpu")
NAMES = ("llama", "gpt2", "mixtral", "qwen2_moe", "deepseek_v3", "gemma2")


@pytest.fixture(scope="module", params=NAMES)
def opened(request: pytest.FixtureRequest, make_golden: Any, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    folder = tmp_path_factory.mktemp(request.param)
    make_golden.build(GOLDEN / request.param).save_pretrained(folder)
    return open_model(str(folder), Access(offline=True, hub=False))


class Rounded:
    """Weights that went through 8 bits and back."""

    def __init__(self, opened: Opened) -> None:
        self.weights = opened.weights
        self.chosen = {t.name for t in opened.model.tensors() if t.i >= 0 and in_int8(t.name, t.shape, t.role)}

    def tensor(self, name: str) -> Tensor:
        value: Tensor = self.weights.tensor(name)
        if name not in self.chosen:
            return value
        rows, scale = rounded(value)
        return rows.float() * scale[:, None]


def made(opened: Opened) -> Decoder:
    network = build(opened.model)
    assign_int8(network, opened.weights, dtype=torch.bfloat16, device=CPU)
    return network


def stored(network: Decoder) -> int:
    return sum(p.nbytes for p in network.parameters())


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("tokens", [1, FEW, FEW + 1])
@torch.inference_mode()
def test_the_network_is_the_one_of_rounded_weights(opened: Opened, tokens: int) -> None:
    """In fp32 with weights that went through 8 bits; bf16 alone is as far from fp32 as this is allowed to be, twice."""
    ids = torch.arange(1, tokens + 1)[None]
    exact, plain = build(opened.model), build(opened.model)
    exact.assign(Rounded(opened), dtype=torch.float32, device=CPU)
    wanted = exact(ids)
    plain.assign(Rounded(opened), dtype=torch.bfloat16, device=CPU)
    assert distance(made(opened)(ids), wanted) < 2 * distance(plain(ids), wanted) + 0.01


def test_every_matrix_of_the_layers_but_those_that_stay(opened: Opened) -> None:
    network = made(opened)
    found = {f"{name}.weight" for name, m in network.named_modules() if isinstance(m, Int8Linear)}
    two = {t.name for t in opened.model.tensors() if t.i >= 0 and len(t.shape) == 2 and t.kind == "param"}
    stay = ("mlp.router.weight", "mlp.shared_gate.weight", "attn.k_b.weight", "attn.v_b.weight", "attn.kv_a.weight")
    assert two - found == {name for name in two if name.endswith(stay)}
    assert len(found) >= 4 * opened.model.n_layers
    assert all(p.dtype != torch.int8 for n, p in network.named_parameters() if n.startswith(("embed", "head", "norm")))


def test_bytes_are_counted_as_they_are_held(opened: Opened) -> None:
    plain = build(opened.model, dtype=torch.bfloat16, device=CPU)
    assert stored(plain) == weights_bytes(opened.model, "bf16")
    assert stored(made(opened)) == weights_bytes(opened.model, "bf16", int8=True) < stored(plain)


def test_what_a_token_reads_is_what_it_multiplies(opened: Opened) -> None:
    """Of the experts those chosen, of the table one row, of a tied head the table after all."""
    read, _ = elements_read(opened.model, 1, 1, 1)
    buffers = sum(t.shape[0] for t in opened.model.tensors() if t.kind == "buffer")
    assert weights_bytes(opened.model, "bf16", read=True) == 2 * (read - buffers)
    assert weights_bytes(opened.model, "bf16", read=True, int8=True) < 1.5 * read


def test_rounding_is_to_the_nearest_of_255_steps() -> None:
    w = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    w[3] = 0
    w[4] *= 1e-20
    rows, scale = rounded(w)
    assert rows.dtype == torch.int8
    assert rows.abs().amax(1).tolist() == [0 if i == 3 else 127 for i in range(20)]
    assert bool(((rows * scale[:, None] - w).abs() <= 0.5001 * scale[:, None]).all())


def test_a_few_rows_and_many_give_the_same() -> None:
    g = torch.Generator().manual_seed(1)
    w, x = torch.randn(48, 64, generator=g), torch.randn(FEW + 1, 64, generator=g).bfloat16()
    m = Int8Linear(w, torch.ones(48, dtype=torch.bfloat16), torch.bfloat16)
    many = m(x)
    few = torch.cat([m(x[:1]), m(x[None, 1:])[0]])
    assert distance(few.float(), many.float()) < 0.01
    assert distance(many.float(), x.float() @ w.T + 1) < 0.02


def test_no_shape_reads_past_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that fill the kernel's strides go through it, others never do, and all are right."""
    kernel, calls = torch._weight_int8pack_mm, []

    def watched(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        calls.append(tuple(w.shape))
        return kernel(x, w, s)

    monkeypatch.setattr(torch, "_weight_int8pack_mm", watched)
    g = torch.Generator().manual_seed(2)
    for out in (1, 4, 6, 36, 64):
        for in_ in (4, 16, 31, 32, 48, 64, 96):
            w, x = torch.randn(out, in_, generator=g), torch.randn(3, in_, generator=g).bfloat16()
            found = Int8Linear(w, None, torch.bfloat16)(x).float()
            assert distance(found, x.float() @ w.T) < 0.03
    assert set(calls) == {(out, in_) for out in (4, 36, 64) for in_ in (32, 64, 96)}


def test_a_cpu_takes_bf16_alone(opened: Opened) -> None:
    with pytest.raises(UsageError, match="--quant int8 computes in bf16 on a CPU"):
        assign_int8(build(opened.model), opened.weights, dtype=torch.float32, device=CPU)


@torch.inference_mode()
def test_what_it_changes_is_measured(networks: ModuleType) -> None:
    """KL(before || int8) by its definition, and 0 for a network in which nothing was rounded."""
    golden = networks.golden("llama")
    ids = golden.ids[0].tolist()
    held = networks.Held(golden.tensors)
    net = build(golden.model, dtype=torch.bfloat16)
    assign_int8(net, held, dtype=torch.bfloat16, device=torch.device("cpu"))
    got = divergence(net, held, ids)
    plain = networks.network(golden.model, golden.tensors, torch.bfloat16)
    p, q = plain(golden.ids)[0].double().softmax(-1), net(golden.ids)[0].double().softmax(-1)
    kl = (p * (p / q).log()).sum(-1)
    assert got.positions == len(ids)
    assert abs(got.mean_kl - float(kl.mean())) < 1e-5
    assert abs(got.max_kl - float(kl.max())) < 1e-5
    assert 0 < got.mean_kl < got.max_kl
    assert got.top1_agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert divergence(net, held, ids, most=5).positions == 5
    assert divergence(plain, held, ids).max_kl == 0
