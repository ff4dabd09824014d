"""Budgets read and judged: every key, every bound, and no value taken for something it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llamactl.analysis.budget import check_report, judge, updated, updates
from llamactl.analysis.limits import KEYS, Budget, read_budget
from llamactl.api import load
from llamactl.errors import InputRefused, NotAvailable, UsageError
from llamactl.spec.quantities import size, tokens

TOTAL, EMBEDDING = 8030261248, 128256 * 4096
MIXTRAL = 46702792704
MIXTRAL_ACTIVE, MIXTRAL_EMBEDDING = 12879925248, 32000 * 4096


def budget(table: Any, **lines: int) -> Budget:
    return read_budget("m", table, path="b.toml", lines={tuple(k.split("__")): n for k, n in lines.items()})


def rows(table: Any, model: str = "llama-3-8b", **probes: Any) -> list[Any]:
    return list(judge(budget(table), load(f"preset:{model}").model, probes=probes).rows)


def row(table: Any, model: str = "llama-3-8b", **probes: Any) -> Any:
    (one,) = rows(table, model, **probes)
    return one


# ---- judged


@pytest.mark.parametrize(("model", "table", "actual"), [
    ("llama-3-8b", {"params": 1}, TOTAL), ("llama-3-8b", {"text_params": 1}, TOTAL),
    ("gemma-3-4b", {"params": 1}, 4300079472), ("gemma-3-4b", {"text_params": 1}, 3880263168),
    ("mixtral-8x7b", {"active_params": 1}, MIXTRAL_ACTIVE - MIXTRAL_EMBEDDING),
    ("mixtral-8x7b", {"active_params": {"exact": 1, "convention": "all"}}, MIXTRAL_ACTIVE),
    ("mixtral-8x7b", {"active_params": {"max": 1, "convention": "minus_embedding_and_head"}},
     MIXTRAL_ACTIVE - 2 * MIXTRAL_EMBEDDING),
    ("llama-3-8b", {"active_params": {"exact": 1, "convention": "all"}}, TOTAL),
    ("llama-3-8b", {"active_params": 1}, TOTAL - EMBEDDING),
    ("llama-3-8b", {"active_params": {"min": 1, "convention": "minus_embedding_and_head"}}, TOTAL - 2 * EMBEDDING),
    ("gpt2", {"active_params": {"min": 1, "convention": "minus_embedding_and_head"}}, 124439808 - 50257 * 768),
    ("llama-3-8b", {"weights_bytes": 1}, 2 * TOTAL), ("gpt2", {"weights_bytes": 1}, 4 * 124439808),
    ("llama-3-8b", {"weights_bytes": {"max": 1, "dtype": "int8"}}, TOTAL),
    ("llama-3-8b", {"weights_bytes": {"max": 1, "dtype": "q4_0"}}, TOTAL // 32 * 18),
    ("llama-3-8b", {"kv_cache_bytes": {"ctx": 8192, "exact": 1}}, 1 << 30),
    ("llama-3-8b", {"kv_cache_bytes": {"ctx": "128k", "exact": 1}}, 1 << 34),
    ("llama-3-8b", {"kv_cache_bytes": {"ctx": 8192, "batch": 8, "dtype": "fp32", "tp": 4, "max": 1}}, 1 << 32),
    ("llama-3-8b", {"kv_cache_bytes": {"ctx": 1, "engine": "vllm", "min": 1}}, 16 << 17),
    ("llama-3-8b", {"kv_cache_bytes": {"ctx": 8192, "dtype": "q8_0", "engine": "llama.cpp", "max": 1}},
     (34 << 30) // 64),
    ("llama-3-8b", {"kv_bytes_per_token": 1}, 131072), ("gemma-2-9b", {"kv_bytes_per_token": 1}, 42 * 2 * 8 * 256 * 4),
    ("llama-3-8b", {"kv_bytes_per_token": {"max": 1, "dtype": "fp8", "tp": 8}}, 8192),
    ("llama-3-8b", {"context": {"min": 1}}, 8192), ("llama-3-8b", {"tied": True}, False),
    ("gpt2", {"tied": True}, True),
    ("llama-3-8b", {"layers": 1}, 32), ("llama-3-8b", {"vocab": 1}, 128256), ("gpt2", {"family": "llama"}, "gpt2"),
])
def test_every_key(model: str, table: dict[str, Any], actual: Any) -> None:
    one = row(table, model)
    assert one.actual == actual
    assert type(one.actual) is type(actual)
    limit = one.limit
    assert one.ok is {"exact": actual == limit, "max": actual == limit, "min": True}[one.bound]
    assert one.delta == (None if isinstance(actual, bool | str) else actual - limit)
    assert one.unit == KEYS[one.name].unit


def test_the_keys_tested_are_all_keys() -> None:
    (mark,) = (m for m in test_every_key.pytestmark if m.name == "parametrize")
    tested = {key for _, table, _ in mark.args[1] for key in table}
    assert tested == set(KEYS) - {"fit", "inspect"}


@pytest.mark.parametrize(("bound", "limit", "ok"), [
    ("exact", TOTAL, True), ("exact", TOTAL - 1, False), ("exact", TOTAL + 1, False), ("max", TOTAL, True),
    ("max", TOTAL - 1, False), ("max", TOTAL + 1, True), ("min", TOTAL, True), ("min", TOTAL + 1, False),
    ("min", TOTAL - 1, True),
])
def test_a_bound_holds_to_the_last_unit(bound: str, limit: int, ok: bool) -> None:
    one = row({"params": {bound: limit}})
    assert (one.ok, one.delta, one.bound) == (ok, TOTAL - limit, bound)


def test_several_limits_of_one_key() -> None:
    found = rows({"params": {"max": TOTAL, "min": TOTAL},
                  "kv_cache_bytes": [{"ctx": 1, "max": 1}, {"ctx": 2, "max": 1 << 18, "min": 0}],
                  "weights_bytes": [{"dtype": "int8", "max": 1}, 7]})
    assert [(r.name, r.bound, r.ok) for r in found] == [
        ("params", "max", True), ("params", "min", True), ("kv_cache_bytes", "max", False),
        ("kv_cache_bytes", "max", True), ("kv_cache_bytes", "min", True), ("weights_bytes", "max", False),
        ("weights_bytes", "exact", False)]
    assert found[3].options == {"ctx": 2, "batch": 1, "dtype": "bf16", "engine": "arch", "tp": 1}
    assert found[5].options == {"dtype": "int8"}


def test_a_model_without_a_limit_of_its_own_has_any_context() -> None:
    model = load("preset:llama-3-8b").model
    free = replace(model, context=replace(model.context, usable=None))
    for bound, ok in (("min", True), ("max", False), ("exact", False)):
        (one,) = judge(budget({"context": {bound: 4096}}), free).rows
        assert (one.ok, one.actual, one.delta) == (ok, None, None)


def test_warnings_come_along() -> None:
    check = judge(budget({"params": 8030261248.0, "kv_cache_bytes": {"ctx": 16384, "max": 1}}),
                  load("preset:llama-3-8b").model)
    assert [code for code, _ in check.notes] == ["budget-type", "context-exceeded"]
    assert check.rows[0].ok
    silent = replace(load("preset:gpt2").model, dtype=None)
    assert [code for code, _ in judge(budget({"weights_bytes": {"max": 1}}), silent).notes] == ["dtype-absent"]


def test_probes_judge_what_needs_files_and_devices() -> None:
    table = {"fit": {"gpu": "h100-80gb", "ctx": "8k"}, "inspect": "clean"}
    found = rows(table, fit=lambda limit: (80, limit.options["ctx"]), inspect=lambda _: ("clean", "2 missing"))
    assert [(r.limit, r.actual, r.delta, r.ok) for r in found] == [(80, 8192, 8112, False),
                                                                  ("clean", "2 missing", None, False)]
    assert found[0].options == {"gpu": "h100-80gb", "ctx": 8192, "batch": 1}
    for key, value in table.items():
        with pytest.raises(InputRefused, match=f"cannot judge {key}") as caught:
            row({key: value})
        assert (caught.value.code, caught.value.path) == ("budget-unsupported", "b.toml")


def test_a_device_nobody_knows_names_the_budget() -> None:
    def probe(limit: Any) -> Any:
        raise NotAvailable("gpu-not-found", "no GPU")

    with pytest.raises(NotAvailable) as caught:
        row({"fit": {"gpu": "x", "ctx": 1}}, fit=probe)
    assert caught.value.path == "b.toml"


@pytest.mark.parametrize(("table", "code", "part"), [
    ({"kv_cache_bytes": {"ctx": 1, "tp": 5, "max": 1}}, "tp", "5 devices"),
    ({"kv_cache_bytes": {"ctx": 1, "engine": "vllm", "dtype": "q8_0", "max": 1}}, "dtype", "q8_0"),
    ({"kv_bytes_per_token": {"tp": 5, "max": 1}}, "tp", "5 devices"),
])
def test_what_this_model_cannot_be_asked(table: dict[str, Any], code: str, part: str) -> None:
    with pytest.raises(InputRefused, match=part) as caught:
        row(table)
    assert (caught.value.code, caught.value.path, caught.value.exit_code) == (code, "b.toml", 3)


# ---- read


@pytest.mark.parametrize(("table", "code", "parts"), [
    ({"parms": 1}, "budget-key", ("m parms", "did you mean 'params'?")), ({"zzz": 1}, "budget-key", ("known: params",)),
    ({"kv_cache": 1}, "budget-key", ("kv_cache_bytes",)), ({}, "budget-empty", ("asks nothing",)),
    (3, "budget-type", ("m: is 3",)), ([], "budget-type", ("list",)), (None, "budget-type", ("null",)),
    ({"params": {"mx": 1}}, "budget-key", ("m params.mx", "did you mean 'max'?")),
    ({"params": {"dtype": "bf16"}}, "budget-key", ("params.dtype",)), ({"params": {}}, "budget-empty", ("exact",)),
    ({"params": {"exact": 1, "max": 2}}, "budget-conflict", ("stands alone",)),
    ({"params": {"min": 2, "max": 1}}, "budget-conflict", ("min 2 is above max 1",)),
    ({"params": True}, "budget-type", ("true",)), ({"params": "1"}, "budget-type", ("'1'",)),
    ({"params": 16.5}, "budget-type", ("16.5",)), ({"params": None}, "budget-type", ("null",)),
    ({"params": float("nan")}, "budget-type", ("nan",)), ({"params": float("inf")}, "budget-type", ("inf",)),
    ({"params": 1e300}, "budget-range", ("far",)), ({"params": -1}, "budget-range", ("-1",)),
    ({"params": 10**18 + 1}, "budget-range", ("1,000,000,000,000,000,001",)),
    ({"params": 16**9999}, "budget-range", ()),
    ({"family": 16**9999}, "budget-type", ("huge",)), ({"params": [1]}, "budget-type", ("takes one limit",)),
    ({"params": {"max": [1]}}, "budget-type", ("params.max", "a list of 1")), ({"layers": "32"}, "budget-type", ()),
    ({"params": "8GB"}, "budget-type", ()), ({"weights_bytes": "16.1"}, "budget-value", ("16.1GB", "15GiB")),
    ({"weights_bytes": {"max": "16G"}}, "budget-value", ("weights_bytes.max", "GiB (2^30)")),
    ({"weights_bytes": {"max": "16Gb"}}, "budget-value", ()), ({"weights_bytes": {"max": "-1GB"}}, "budget-value", ()),
    ({"weights_bytes": {"max": "9999999TB"}}, "budget-range", ()),
    ({"weights_bytes": {"exact": "14.96GiB"}}, "budget-value", ("whole number of bytes",)),
    ({"weights_bytes": {"max": 1, "dtype": "bf15"}}, "budget-value", ("'bf15'", "did you mean 'bf16'?")),
    ({"weights_bytes": {"max": 1, "dtype": 16}}, "budget-type", ("weights_bytes.dtype",)),
    ({"weights_bytes": []}, "budget-empty", ("empty list",)), ({"weights_bytes": [[1]]}, "budget-type", ()),
    ({"kv_cache_bytes": 5}, "budget-option", ("needs ctx", "ctx = 8192")),
    ({"kv_cache_bytes": {"max": 1}}, "budget-option", ("needs ctx",)),
    ({"kv_cache_bytes": [{"ctx": 1, "max": 1}, {"ctx": 1}]}, "budget-empty", ("kv_cache_bytes.1",)),
    ({"kv_cache_bytes": {"ctx": 0, "max": 1}}, "budget-range", ("kv_cache_bytes.ctx",)),
    ({"kv_cache_bytes": {"ctx": "many", "max": 1}}, "budget-value", ("128k",)),
    ({"kv_cache_bytes": {"ctx": "4096g", "max": 1}}, "budget-range", ()),
    ({"kv_cache_bytes": {"ctx": 1, "batch": 0, "max": 1}}, "budget-range", ("batch",)),
    ({"kv_cache_bytes": {"ctx": 1, "batch": "two", "max": 1}}, "budget-type", ("batch",)),
    ({"kv_cache_bytes": {"ctx": 1, "tp": 9999, "max": 1}}, "budget-range", ("4,096",)),
    ({"kv_cache_bytes": {"ctx": 1, "engine": "vlm", "max": 1}}, "budget-value", ("did you mean 'vllm'?",)),
    ({"active_params": {"max": 1, "convention": "al"}}, "budget-value", ("minus_input_embedding", "'all'")),
    ({"context": {"min": "8x"}}, "budget-value", ("128k",)), ({"tied": 1}, "budget-type", ("true or false",)),
    ({"tied": {"max": True}}, "budget-key", ("tied.max",)), ({"family": ""}, "budget-type", ()),
    ({"family": {"exact": 5}}, "budget-type", ("family.exact",)), ({"family": "x" * 201}, "budget-type", ()),
    ({"fit": "h100"}, "budget-option", ("needs gpu and ctx", "h100-80gb")),
    ({"fit": {"gpu": "x"}}, "budget-option", ()),
    ({"fit": {"gpu": "x", "ctx": 1, "max": 1}}, "budget-key", ("fit.max",)),
    ({"fit": {"gpu": "x", "ctx": 1, "kv_dtype": "x"}}, "budget-value", ("fit.kv_dtype",)),
    ({"inspect": "clen"}, "budget-value", ("did you mean 'clean'?",)), ({"inspect": True}, "budget-type", ()),
])
def test_what_is_no_budget(table: Any, code: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(InputRefused) as caught:
        budget(table)
    e = caught.value
    assert (e.code, e.path, e.exit_code) == (code, "b.toml", 3)
    for part in parts:
        assert part in f"{e.message} {e.help}"


def test_the_line_is_named_where_it_is_known() -> None:
    for table, line in (({"params": "x"}, 4), ({"weights_bytes": {"max": "x"}}, 5), ({"weights_bytes": {}}, 5),
                        ({"parms": 1}, None), (3, 4)):
        with pytest.raises(InputRefused) as caught:
            budget(table, params=4, weights_bytes__max=5)
        assert caught.value.message.startswith(f"line {line}: m" if line else "m parms: ")
    (limit,) = budget({"fit": {"gpu": "x", "ctx": 1}}, fit__gpu=9, fit__ctx=10).limits
    assert limit.line == 9


@pytest.mark.parametrize(("text", "floor", "ceil"), [
    ("16.1GB", 16100000000, 16100000000), ("15GiB", 15 << 30, 15 << 30), ("512 B", 512, 512), ("1kB", 1000, 1000),
    ("1KB", 1000, 1000), ("1KiB", 1024, 1024), ("1.5MiB", 3 << 19, 3 << 19), ("2MB", 2000000, 2000000),
    ("1TB", 10**12, 10**12), ("1TiB", 1 << 40, 1 << 40),
    ("14.96GiB", 1496 * 2**30 // 100, 1496 * 2**30 // 100 + 1), ("0.1B", 0, 1),
])
def test_sizes_keep_ten_and_two_apart(text: str, floor: int, ceil: int) -> None:
    found = size(text)
    assert found is not None
    assert (found.floor, found.ceil) == (floor, ceil)
    bounds = {b: budget({"weights_bytes": {b: text}}).limits[0].value for b in ("max", "min")}
    assert bounds == {"max": floor, "min": ceil}


@pytest.mark.parametrize("text", ["", "16", "16G", "16gb", "16Gb", "1e9B", "GB", "1.GB", ".5GB", "1,000B", "1 0GB",
                                  "\u0661GB", "9" * 5000 + "GB", "1iB", "16GBs"])
def test_what_is_no_size(text: str) -> None:
    assert size(text) is None


def test_token_counts() -> None:
    assert [tokens(t) for t in ("8192", "8,192", "8_192", "128k", "128K", "128ki", "1m", "1g")] == [
        8192, 8192, 8192, 131072, 131072, 131072, 1 << 20, 1 << 30]
    assert [tokens(t) for t in ("", "k", "1.5k", "-1", "1t", "\u0661", "9" * 5000)] == [None] * 7


# ---- updated


def test_updates_are_exact_values_and_exceeded_maxima() -> None:
    b = budget({
        "params": 1, "text_params": {"max": 2, "min": 1}, "layers": 32, "vocab": {"max": 10**6}, "tied": True,
        "family": "gpt2", "context": {"min": 10**6}, "weights_bytes": [{"max": "1GB"}, {"max": "1TB"}],
        "fit": {"gpu": "x", "ctx": 1}, "inspect": "clean"})
    probes = {"fit": lambda _: (1, 2), "inspect": lambda _: ("clean", "dirty")}
    check = judge(b, load("preset:llama-3-8b").model, probes=probes)
    assert updates(b, check) == {
        ("params",): TOTAL, ("text_params", "max"): TOTAL, ("tied",): False, ("family",): "llama",
        ("weights_bytes", 0, "max"): 2 * TOTAL}
    after = updated(b, check)
    assert [(r.name, r.bound) for r in after.rows if not r.ok] == [("context", "min"), ("fit", "max"),
                                                                  ("inspect", "exact")]
    assert {r.name: (r.limit, r.was, r.delta) for r in after.rows if r.was is not None} == {
        "params": (TOTAL, 1, 0), "text_params": (TOTAL, 2, 0), "tied": (False, True, None),
        "family": ("llama", "gpt2", None), "weights_bytes": (2 * TOTAL, 10**9, 0)}
    assert not after.ok


def test_the_report_sums_up() -> None:
    model = load("preset:llama-3-8b").model
    good, bad = judge(budget({"layers": 32}), model), judge(budget({"layers": 31, "vocab": 1}), model, id="x")
    assert (good.ok, bad.ok) == (True, False)
    report = check_report("b.toml", [good, bad])
    assert (report.ok, report.limits, report.exceeded) == (False, 3, 2)
    assert check_report("b.toml", [good]).ok
    body = report.to_dict()
    assert [m["id"] for m in body["models"]] == ["llama", "x"]
    assert "notes" not in body["models"][0]
    assert "FAILS" in report._repr_html_()


def test_a_usage_error_of_a_probe_is_the_files_fault() -> None:
    def probe(limit: Any) -> Any:
        raise UsageError("tp", "no")

    with pytest.raises(InputRefused, match="m fit: no"):
        row({"fit": {"gpu": "x", "ctx": 1}}, fit=probe)
