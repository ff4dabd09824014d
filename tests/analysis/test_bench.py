"""Samples into rates, shares and ratios: every number by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamactl import arch
from llamactl.analysis.bench import BenchReport, Case, Engine, cases, prompt_flops, spread, step_bytes
from llamactl.analysis.bench import rows as rows_of
from llamactl.spec.model import Model

CONFIG = {"model_type": "llama", "vocab_size": 100, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1000, "rms_norm_eps": 1e-5,
          "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "float32"}
BLOCK = 16 * (16 + 8 + 8 + 16) + 3 * 16 * 24  # q, k, v, o and the feed-forward
NORMS = 2 * 2 * 16 + 16


def described(**changes: Any) -> Model:
    return arch.describe({**CONFIG, **changes}, "test")


def engine(name: str, dtype: str | None = "fp32") -> Engine:
    return Engine(name=name, version="1", dtype=dtype, load_seconds=1.0, first_token_seconds=0.5, private_bytes=7)


def test_the_middle_and_the_ends() -> None:
    s = spread([4.0, 1.0, 2.0])
    assert (s.median, s.min, s.max) == (2.0, 1.0, 4.0)
    assert spread([1.0, 2.0]).median == 1.5


def test_bytes_of_a_step() -> None:
    """Weights but for the embedding, whose rows are looked up; the tied head; the cache up to the middle token."""
    case = Case(phase="decode", tokens=30, batch=3, new=8)
    weights = 2 * BLOCK + 100 * 16 + NORMS
    cache = 3 * 2 * (2 * 2 * 4) * 34  # 3 sequences, 2 layers, k and v of 2 heads x 4, of 34 tokens
    assert step_bytes(described(), "fp32", case) == 4 * (weights + cache)
    assert step_bytes(described(), "bf16", case) == 2 * (weights + cache)


def test_bytes_of_a_step_with_matrices_in_8_bits() -> None:
    rows = 16 + 8 + 8 + 16 + 24 + 24 + 16  # one scale each
    other = 100 * 16 + NORMS + 2 * (2 * 2 * 4) * 34 + 2 * rows
    case = Case(phase="decode", tokens=30, batch=1, new=8)
    assert step_bytes(described(), "bf16", case, int8=True) == 2 * BLOCK + 2 * other
    (row,) = rows_of(described(), "bf16", [(case, {"llamactl": [1.0]})], [engine("llamactl", "int8")], 1e6, 1e9,
                     int8=True)
    assert row.step_bytes == 2 * BLOCK + 2 * other
    mixture = described(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    assert step_bytes(mixture, "bf16", case, int8=True) is not None
    several = Case(phase="decode", tokens=30, batch=2, new=8)
    assert step_bytes(mixture, "bf16", several, int8=True) is None
    assert step_bytes(mixture, "bf16", several) is not None


def test_operations_of_prompts_count_the_last_logits_alone() -> None:
    case = Case(phase="prefill", tokens=10, batch=3)
    pairs = 10 * 11 // 2
    one = 2 * (2 * 10 * BLOCK + 2 * 2 * 16 * pairs) + 2 * 100 * 16
    assert prompt_flops(described(), case) == 3 * one


def test_operations_that_are_not_counted_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamactl.analysis import bench
    from llamactl.errors import InputRefused

    def refused(*_: Any, **__: Any) -> None:
        raise InputRefused("flops-unsupported", "x")

    monkeypatch.setattr(bench, "flops", refused)
    case = Case(phase="prefill", tokens=10, batch=1)
    assert prompt_flops(described(), case) is None
    (row,) = rows_of(described(), "fp32", [(case, {"llamactl": [1.0]})], [engine("llamactl")], 1e9, 1e9)
    assert (row.flops, row.share, row.tokens_per_second.median) == (None, None, 10.0)


def test_rows_of_new_tokens() -> None:
    model, case = described(), Case(phase="decode", tokens=30, batch=2, new=8)
    timed = [(case, {"llamactl": [1.0, 2.0, 4.0], "b": [3.0, 2.0, 2.0]})]
    ours, theirs = rows_of(model, "fp32", timed, [engine("llamactl"), engine("b")], 1e6, 1e9)
    assert (ours.phase, ours.tokens, ours.batch, ours.new, ours.engine) == ("decode", 30, 2, 8, "llamactl")
    assert ours.seconds == (1.0, 2.0, 4.0)
    assert (ours.tokens_per_second.min, ours.tokens_per_second.median, ours.tokens_per_second.max) == (4.0, 8.0, 16.0)
    assert ours.step_bytes == step_bytes(model, "fp32", case)
    assert ours.flops is None
    assert ours.share == pytest.approx(4 * ours.step_bytes / 1e6)  # 4 steps a second, of 2 tokens each
    assert ours.ratio is None
    assert theirs.ratio == spread([3.0, 1.0, 0.5])  # round by round: not 8 / 8, which the medians would give
    assert theirs.tokens_per_second.median == 8.0


def test_rows_of_prompts() -> None:
    model, case = described(), Case(phase="prefill", tokens=50, batch=2)
    (row,) = rows_of(model, "fp32", [(case, {"llamactl": [0.5]})], [engine("llamactl")], 1e6, 1e9)
    assert row.tokens_per_second.median == 200.0
    assert row.flops == prompt_flops(model, case)
    assert row.share == pytest.approx(row.flops / 0.5 / 1e9)
    assert (row.new, row.step_bytes) == (0, None)


def test_a_rival_in_another_dtype_has_no_share_and_one_without_samples_no_row() -> None:
    case = Case(phase="decode", tokens=30, batch=1, new=8)
    timed = [(case, {"llamactl": [1.0], "b": [1.0]}), (case, {"llamactl": [1.0]})]
    got = rows_of(described(), "fp32", timed, [engine("llamactl"), engine("b", "q4_0")], 1e6, 1e9)
    assert [r.engine for r in got] == ["llamactl", "b", "llamactl"]
    assert (got[1].share, got[1].step_bytes) == (None, None)
    assert got[0].share is not None
    unknown = rows_of(described(), "fp32", timed, [engine("llamactl"), engine("b", None)], None, None)
    assert {r.share for r in unknown} == {None}
    assert unknown[0].step_bytes is not None


@pytest.mark.parametrize(("context", "prompts", "after", "new"), [
    (8192, [512, 2048], [32, 512], 64), (1000, [512], [32, 512], 64), (128, [128], [32], 64), (90, [90], [26], 64),
    (40, [40], [1], 39), (1, [1], [1], 1),
])
def test_default_lengths_stay_inside_the_context(context: int, prompts: list[int], after: list[int], new: int) -> None:
    got = cases(described(max_position_embeddings=context), (), (), None, (1, 8))
    assert [(c.phase, c.tokens, c.batch, c.new) for c in got] == [
        *(("prefill", n, b, 0) for b in (1, 8) for n in prompts),
        *(("decode", n, b, new) for b in (1, 8) for n in after)]
    assert context < 2 or max(c.length for c in got) <= context


def test_lengths_asked_for_are_taken_as_they_are() -> None:
    got = cases(described(), (5000, 3), (9,), 7, (2,))
    assert [(c.tokens, c.length, c.made) for c in got] == [(5000, 5000, 10000), (3, 3, 6), (9, 16, 14)]


def test_the_report_is_json_and_html() -> None:
    case = Case(phase="decode", tokens=30, batch=1, new=8)
    engines = (engine("llamactl"), engine("b"))
    made = rows_of(described(), "fp32", [(case, {"llamactl": [1.0], "b": [2.0]})], engines, 1e6, None)
    report = BenchReport(id="<m>", family="llama", model_type="llama", device="cpu", device_name="cpu", dtype="fp32",
                         quant=None, quant_quality=None,
                         threads=1, compiled=False, packed=False, repeat=1, weights_bytes=5,
                         bandwidth_bytes_per_second=1e6, matmul_flops_per_second=None, first_token_prompt=30,
                         engines=engines, rows=made)
    body = json.loads(json.dumps(report.to_dict()))
    assert body["rows"][1]["ratio"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert body["engines"][0]["private_bytes"] == 7
    page = report._repr_html_()
    assert "&lt;m&gt;" in page
    assert "2.00x" in page
