"""fit: what a device holds, the exact inverses, and the bundled devices."""

from __future__ import annotations

import pytest

from llamactl import load
from llamactl.analysis.fit import activations, fit, largest, sharded_bytes
from llamactl.analysis.kvcache import kv_cache
from llamactl.errors import NotAvailable, UsageError
from llamactl.source.gpus import every, find
from llamactl.spec.dtype import DTYPES

BF16 = DTYPES["bf16"]


def test_llama_on_one_device_is_the_sum_of_its_parts() -> None:
    device, _ = find("l4-24gb")
    model = load("llama-3-8b").model
    r = fit(model, device, 1, 8192)
    assert r.weights_bytes == 16_060_522_496
    assert r.kv_cache_bytes == 1 << 30
    assert r.overhead_bytes == 1 << 30
    assert r.activations_bytes == 2 * 2048 * (2 * 4096 + 2 * 14336) + 4 * 128256
    assert r.total_bytes == r.weights_bytes + r.kv_cache_bytes + r.activations_bytes + r.overhead_bytes
    assert r.fits
    assert r.free_bytes == 23034 * 2**20 - r.total_bytes


@pytest.mark.parametrize(("name", "gpu"), [("llama-3-8b", "l4-24gb"), ("gemma-2-9b", "a100-80gb"),
                                           ("mistral-7b-v0.1", "l4-24gb"), ("gpt-oss-20b", "h100-80gb")])
def test_the_limits_are_exact(name: str, gpu: str) -> None:
    """One token or one sequence more no longer fits; the limit itself does."""
    device, _ = find(gpu)
    model = load(name).model
    r = fit(model, device, 1, 8192, weights="bf16", kv="bf16")
    assert fit(model, device, 1, r.max_ctx, weights="bf16", kv="bf16").fits
    if name != "mistral-7b-v0.1":  # every layer slides, so no context is too long
        assert not fit(model, device, 1, r.max_ctx + 1, weights="bf16", kv="bf16").fits
    assert fit(model, device, 1, 8192, batch=r.max_batch, weights="bf16", kv="bf16").fits
    assert not fit(model, device, 1, 8192, batch=r.max_batch + 1, weights="bf16", kv="bf16").fits


def test_what_does_not_fit_at_all_has_no_limits() -> None:
    device, _ = find("l4-24gb")
    r = fit(load("llama-3-70b").model, device, 1, 8192)
    assert (r.fits, r.max_ctx, r.max_batch) == (False, 0, 0)
    assert r.free_bytes < 0


def test_tensor_parallel_cuts_matrices_and_repeats_norms_and_kv_heads() -> None:
    model = load("llama-3-8b").model
    whole, norms = 8_030_261_248, 266_240
    assert sharded_bytes(model, BF16, 1) == 2 * whole
    assert sharded_bytes(model, BF16, 8) == 2 * ((whole - norms) // 8 + norms)
    kv = 32 * 2 * 1024 * 4096  # over 16 devices each still holds one whole head of 8: an eighth, not a sixteenth
    assert sharded_bytes(model, BF16, 16) == 2 * ((whole - norms - kv) // 16 + kv // 8 + norms)
    device, devices = find("h100-80gbx8")
    r = fit(model, device, devices, 131072)
    assert r.kv_cache_bytes == kv_cache(model, 131072, tp=8).at[0].kv_cache_bytes == (16 << 30) // 8


def test_copies_share_the_batch() -> None:
    device, devices = find("l4-24gbx4")
    model = load("llama-3-8b").model
    r = fit(model, device, devices, 8192, batch=4, tp=1)
    assert r.kv_cache_bytes == 1 << 30
    assert r.max_batch == 4 * fit(model, device, 1, 8192).max_batch
    with pytest.raises(UsageError):
        fit(model, device, devices, 8192, tp=3)


def test_decode_is_bound_by_the_bytes_it_reads() -> None:
    device, _ = find("h100-80gb")
    r = fit(load("llama-3-8b").model, device, 1, 8192)
    read = 16_060_522_496 - 2 * 128256 * 4096 + (1 << 30)
    assert r.decode_bound == "memory bandwidth"
    assert r.decode_tokens_per_s == pytest.approx(3350e9 / read, rel=1e-3)
    assert r.prefill_bound == "arithmetic"


def test_largest_finds_the_last_that_fits() -> None:
    for limit in (1, 2, 3, 7, 8, 1000, 2**31 + 5):
        assert largest(lambda n, limit=limit: n <= limit) == limit
    assert largest(lambda n: False) == 0
    assert largest(lambda n: True) == 2**32


def test_quantised_weights_leave_activations_in_bf16() -> None:
    model = load("llama-3-8b").model
    assert activations(model, 10, 1, DTYPES["int4"], 1) == activations(model, 10, 1, BF16, 1)


def test_devices_have_sane_values() -> None:
    for name, g in every().items():
        assert 20 << 30 < g.memory_bytes < 1 << 40, name
        assert g.bandwidth, name
        assert 1e11 < g.bandwidth < 2e13, name
        assert all(1e12 < r < 1e16 for r in g.rates.values()), name


def test_names_of_devices() -> None:
    assert find("H100-80GBx4")[1] == 4
    assert find("h200")[0].name == "h200-141gb"
    for wrong in ("h1000", "h100", "h100-80gbx0"):
        with pytest.raises(NotAvailable):
            find(wrong)
