"""Norms, gates, shared heads and positions without a checkpoint: every value that is claimed of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llamactl.analysis.experiment import Experiment
from llamactl.lab import gqa, norm, shift, swiglu
from llamactl.net.blocks import RowNorm
from llamactl.net.cache import Cache
from llamactl.render.lab import cells

# --- norm


def test_rmsnorm_has_half_the_parameters(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("norm")
    assert pick(e, "RMSNorm", "llama-3-8b: d 4,096").value == 4_096
    assert pick(e, "LayerNorm", "llama-3-8b, norm=layer: d 4,096").value == 8_192
    assert pick(e, "LayerNorm", "gpt2: d 768").value == 1_536


def test_correlation_of_the_two_norms(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("norm")
    for dim, value, room in ((64, 1 - 1 / 128, 3e-4), (512, 0.9990, 5e-5), (4_096, 1 - 1 / 8_192, 2e-5)):
        f = pick(e, f"centred rows, d {dim:,}")
        assert f.value == pytest.approx(value, abs=room)
        assert (f.expected, f.verdict) == (1 - 1 / (2 * dim), "holds")
        assert f.tolerance < 0.2 * (1 - f.expected)
        assert (f.samples, f.of) == (8, f"8 x {(1 << 20) // dim:,} drawn rows")
    moved = pick(e, "each row moved by its own N(0, 1), d 512")
    assert 0.7 < moved.value < 0.9
    assert moved.verdict == "holds"


def test_every_form_is_timed_on_one_thread(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("norm")
    for form in ("RMSNorm, fused", "RMSNorm, written out", "LayerNorm, fused", "LayerNorm, written out"):
        f = pick(e, f"{form}: median", "512 x 576, cpu, 1 thread")
        assert (f.unit, f.verdict) == ("us", "measured")
        assert f.lowest <= f.value <= f.highest
    for kind in ("RMSNorm", "LayerNorm"):
        same = pick(e, f"{kind}: fused less written out", "512 x 4,096")
        assert same.value < 1e-5
    assert e.verdict == "holds"


def test_nothing_is_claimed_of_times_and_what_is_slower_is_said(done: Callable[..., Experiment]) -> None:
    claim = done("norm").claims[-1]
    assert claim.claim.startswith("what the kernels take here")
    assert {f.verdict for f in claim.findings if f.unit} == {"measured"}
    took = {"RMSNorm, fused": [4.0, 4.0, 4.0, 4.1, 9.0], "RMSNorm, written out": [1.9, 2.0, 2.0, 2.0, 9.0],
            "LayerNorm, fused": [1.0] * 5, "LayerNorm, written out": [4.0] * 5}
    by = {f.what: (f.value, f.note) for f in norm._ratios(took, "x", "cpu")}
    assert by == {"RMSNorm / LayerNorm, fused": (4.0, norm.STEPPED), "RMSNorm / LayerNorm, written out": (0.5, None),
                  "RMSNorm: fused / written out": (2.0, "the fused one takes longer here"),
                  "LayerNorm: fused / written out": (0.25, None)}
    assert {w for w in by if any(f.what == w for f in claim.findings)} == set(by)
    (gpu, *_) = norm._ratios(took, "x", "cuda")
    assert gpu.note == "RMSNorm takes longer here"
    # other work on the machine may have made it
    noise = took | {"RMSNorm, fused": [0.9, 1.0, 2.1, 3.0, 4.0], "RMSNorm, written out": [1.0, 1.5, 2.0, 2.0, 2.0]}
    assert {f.what: f.note for f in norm._ratios(noise, "x", "cpu")}["RMSNorm: fused / written out"] is None
    assert all((f.samples or 0) >= norm.LEAST for f in claim.findings if f.what.endswith(": median"))


def test_nothing_is_claimed_of_a_mean_and_a_random_row_stands_beside(done: Callable[..., Experiment], pick: Any,
                                                                     drawn: Any) -> None:
    c = drawn("learned")
    e = done("norm", checkpoints=(c,))
    middle, norm_, row = (pick(e, f"|mean| / RMS: the {w}", c.id) for w in (
        "median norm", "norm with the largest median", "largest single row"))
    assert {f.verdict for f in (middle, norm_, row)} == {"measured"}
    assert middle.note == "a random row of that width: 0.12; on made-up tokens"
    assert "; a random row of that width: 0.12; on made-up tokens" in norm_.note
    read = c.ablated().norms
    assert row.value == max(x.worst for x in read.norms)
    assert row.value > norm_.value >= middle.value
    assert row.note.startswith("read by layers.") or row.note.startswith("read by norm")
    same = pick(e, "LayerNorm without a bias for RMSNorm", c.id)
    assert (same.verdict, same.note) == ("skipped", "it has no RMSNorm")


def test_threads_are_timed_apart_and_left_as_they_were(setting: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        asked = {f.of for f in norm._times(setting()) if f.unit == "us"}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert {"512 x 576, cpu, 1 thread", "512 x 576, cpu, 2 threads", "512 x 4,096, cpu, 2 threads"} <= asked


def test_a_norm_that_is_the_other_one_is_seen(done: Callable[..., Experiment], pick: Any,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowNorm, "_norm", lambda self, x, gain, bias: torch.nn.functional.layer_norm(
        x, (self.part.dim,), gain, bias, self.part.eps))
    e = done("norm", seed=1)
    assert pick(e, "centred rows, d 512").verdict == "differs"
    assert pick(e, "RMSNorm: fused less written out", "512 x 576").verdict == "differs"


# --- swiglu


def test_swish_at_two_points(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("swiglu")
    assert round(pick(e, "Swish(2)").value, 4) == 1.7616
    assert round(pick(e, "Swish(-2)").value, 4) == -0.2384


def test_widths_in_use_are_derived(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("swiglu")
    assert pick(e, "8d/3", "smollm2-135m: d 576").value == 1_536
    assert pick(e, "8d/3", "llama-2-7b: d 4,096").value == 11_008
    assert pick(e, "8d/3", "llama-65b").value == 22_016
    assert pick(e, "three matrices of 8d/3 less two of 4d").value == 0
    (grid,) = e.grids
    by = {r[0]: r for r in grid.rows}
    assert by["smollm2-135m"][4:] == (2_654_208, 2_654_208, 1.0)
    assert by["llama-3-8b"][-1] == 1.3125
    assert next(r for r in cells(grid) if r[0] == "llama-2-7b")[2] == "10,922.67"  # not a whole number
    assert pick(e, "loss under GELU, and without the gate").verdict == "skipped"
    assert e.verdict == "holds"


def test_another_activation_or_rounding_is_seen(done: Callable[..., Experiment], pick: Any,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(swiglu.ACTIVATIONS, "silu", torch.nn.functional.gelu)
    monkeypatch.setattr(swiglu, "DERIVED", (("llama-2-7b", 1),))
    e = done("swiglu", seed=1)
    assert [pick(e, w).verdict for w in ("Swish(2)", "Swish(-2)", "8d/3")] == ["differs"] * 3
    assert pick(e, "8d/3").value == 10_922


def test_widths_are_derived_as_params_json_derives_them(done: Callable[..., Experiment],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    from llamactl.arch import _meta

    assert swiglu.ffn_width is _meta.ffn_width
    monkeypatch.setattr(swiglu, "ffn_width", lambda dim, multiple: 7)
    assert [f.value for f in done("swiglu", seed=1).claims[2].findings][:-1] == [7] * len(swiglu.DERIVED)


def test_no_more_is_said_of_the_gate_than_is_judged(done: Callable[..., Experiment]) -> None:
    claim = done("swiglu").claims[-1].claim  # judged by a ratio of 1
    assert claim == "trained weights miss their gate more than the shape of its curve"


# --- gqa


def test_as_many_kv_heads_as_heads_is_multi_head_attention(done: Callable[..., Experiment], pick: Any) -> None:
    f = pick(done("gqa"), "output less torch.nn.MultiheadAttention's")
    assert f.value < 1e-5  # another CPU's kernels may sum in another order, and the report says so
    assert (f.value == 0) is (f.verdict == "holds")


def test_copied_kv_heads_give_the_same_bits(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("gqa")
    f = pick(e, "logits less the copy's", "drawn weights, 8 heads on 2 KV heads")
    assert (f.value == 0) is (f.verdict == "holds")
    assert f.value < 1e-5
    assert "102,720 parameters for 90,432" in f.note


def test_attention_shrinks_as_kv_heads_go(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("gqa")
    found = {f.what: f.value for c in e.claims for f in c.findings if f.of == "d 64, 8 heads of 8"}
    assert found == {"8 KV heads": 16_384, "8 KV heads, biased output": 16_448, "1 KV head": 9_216,
                     "1 KV head, biased output": 9_280}
    assert next(c.formula for c in e.claims if c.claim == "attention shrinks as KV heads go") == (
        "2 d n_q D + 2 d n_kv D (+ d with a biased output projection)")  # 2 x 64 x 64 + 2 x 64 x 8 + 64 = 9,280
    (grid,) = e.grids
    assert [r[1] for r in grid.rows] == [16_384, 12_288, 10_240, 9_216]


def test_cache_sizes_are_read_off_cache_tensors(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("gqa")
    assert pick(e, "elements a token", "gpt2").value == 18_432
    assert {f.of: f.value for c in e.claims for f in c.findings if f.what == "elements a token"} == {
        "gpt2": 18_432, "smollm2-135m": 11_520, "smollm2-135m, n_kv_heads=9": 34_560}
    for heads, value in (("32 KV heads", 4 << 30), ("8 KV heads", 1 << 30), ("1 KV head", 128 << 20)):
        f = pick(e, f"{heads}, 8,192", "llama-3-8b")
        assert (f.value, f.unit, f.verdict, f.note) == (value, "bytes", "holds", None)
    written = pick(e, "written by 48 tokens, of each")
    assert written.value == written.expected == 2 * 2 * 2 * 8


def test_a_cache_of_another_size_is_seen(done: Callable[..., Experiment], pick: Any, monkeypatch: pytest.MonkeyPatch
                                         ) -> None:
    class Wide(Cache):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for layer in self.layers:
                if layer is not None and layer.k.shape[1] > 1:
                    layer.v = torch.cat((layer.v, layer.v), -1)

    monkeypatch.setattr(gqa, "Cache", Wide)
    monkeypatch.setattr(gqa, "_written", lambda given: gqa.skipped("x", "y"))
    e = done("gqa", seed=1)
    assert pick(e, "elements a token", "gpt2").verdict == "differs"
    assert "`kv-cache` says 18,432" in pick(e, "elements a token", "gpt2").note
    assert pick(e, "32 KV heads, 8,192").verdict == "differs"


def test_other_heads_are_seen(done: Callable[..., Experiment], pick: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V heads in another order: the same sums of nothing else."""
    right = gqa.SelfAttention.attend
    monkeypatch.setattr(gqa.SelfAttention, "attend", lambda self, q, k, v, step: right(self, q, k.flip(1), v, step))
    assert pick(done("gqa", seed=2), "output less torch.nn.MultiheadAttention's").verdict == "differs"


# --- shift


def test_rope_does_not_care_where_a_text_stands_and_a_table_does(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("shift")
    rope, table = "drawn weights, llama-3-8b's block", "drawn weights, gpt2's block"
    for by in ("500", "5,000"):
        loss, logit = (pick(e, f"{by} further on: {w}", rope) for w in ("change of the loss", "largest change"))
        assert 0 <= loss.value < 1e-5
        assert 0 < logit.value < 4e-3
        assert (loss.verdict, logit.verdict) == ("holds", "holds")
        assert pick(e, f"{by} further on: largest change", table).value > 1
    of_table = [f for c in e.claims for f in c.findings if f.of.startswith(table)]
    assert [f.what.split()[0] for f in of_table] == ["500", "5,000"]  # as asked, not by what they change
    assert all(f.unit != "nats per token" and f.verdict == "holds" for f in of_table)  # drawn weights cannot read
    assert "the logits move" in e.claims[1].claim
    assert [f.verdict for c in e.claims for f in c.findings if f.of.startswith("a checkpoint")] == ["skipped"] * 2
    assert e.verdict == "holds"


def test_a_shift_that_moves_something_is_seen(done: Callable[..., Experiment], pick: Any,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """With another base while shifted, and with a table that is one row again and again."""
    from dataclasses import replace

    from llamactl.spec.changes import set_theta
    from llamactl.verify import ablate

    right = ablate.moved
    monkeypatch.setattr(ablate, "moved", lambda model, by: right(set_theta(model, 1e4), by) if not model.positions
                        else right(replace(model, positions=None), 0))
    e = done("shift", seed=1)
    assert pick(e, "500 further on: change of the loss", "drawn weights, llama").verdict == "differs"
    monkeypatch.setattr(ablate, "moved", lambda model, by: right(model, 0))
    same = done("shift", seed=2)
    assert pick(same, "500 further on: largest change", "drawn weights, gpt2").verdict == "differs"
    assert shift.MOVED > 2 * shift.LOGITS


@pytest.mark.parametrize(("kind", "why"), [
    ("alibi", "positions enter its scores by distance: ALiBi"),
    ("sinusoidal", "its positions are fixed sinusoids, added at the input: neither RoPE nor learned"),
    ("none", "no part of it tells positions: neither RoPE nor a table"),
])
@pytest.mark.parametrize("name", ["shift", "rope-identity"])
def test_positions_of_another_kind_are_neither_rope_nor_learned(
        done: Callable[..., Experiment], drawn: Any, name: str, kind: str, why: str) -> None:
    e = done(name, checkpoints=(drawn(kind),))
    all_ = [f for c in e.claims for f in c.findings]
    assert [(f.verdict, f.note) for f in all_ if f.of.startswith(kind)] == [("skipped", why)]
    assert [f.of for f in all_ if f.of.startswith("a checkpoint")] == ["a checkpoint with RoPE",
                                                                       "a checkpoint with learned positions"]


def test_a_checkpoint_stands_under_its_own_kind_of_positions(done: Callable[..., Experiment], drawn: Any) -> None:
    both = drawn("rope"), drawn("learned")
    assert [c.positions for c in both] == ["RoPE", "learned positions"]
    e = done("shift", checkpoints=both)
    under = [[f for f in c.findings if f.of.startswith(("rope", "learned"))] for c in e.claims]
    assert [{f.of.split(",")[0] for f in x} for x in under] == [{"rope"}, {"learned"}]
    assert not any(f.verdict == "skipped" and f.of.startswith("a checkpoint") for c in e.claims for f in c.findings)
    assert [f.what for f in under[1] if f.unit] == []  # made-up tokens: no word on the loss


def test_what_a_table_does_to_the_loss_is_measured_where_the_text_is_read(setting: Any) -> None:
    from llamactl.analysis.ablation import Ablation

    row = Ablation(edit="shift=500", change=0.25, standard_error=0.05, max_abs_dlogit=3.0)
    loss, logit = shift._row(row, "x", True, True)
    assert (loss.value, loss.verdict, loss.note) == (0.25, "measured", "standard error 0.05")
    assert (logit.value, logit.verdict) == (3.0, "holds")
