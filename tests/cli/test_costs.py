"""flops, fit, compare, evolve, rope and doctor as commands: exit codes, errors, and the numbers in every format."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

A10G = ("fit", "llama-3-8b", "--gpu", "a10g")


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_fit_says_yes_and_no_with_its_exit_code(cli: Any) -> None:
    good, bad = cli(*A10G, "--ctx", "8k", "--json"), cli(*A10G, "--ctx", "64k", "--json")
    assert (good.code, bad.code) == (0, 1)
    yes, no = good.json()["result"]["models"][0], bad.json()["result"]["models"][0]
    assert (yes["fits"], no["fits"]) == (True, False)
    for at in (yes, no):
        parts = [at[f"{k}_bytes"] for k in ("weights", "kv_cache", "state", "activations", "overhead")]
        assert sum(parts) == at["total_bytes"] == at["memory_bytes"] - at["free_bytes"]
    assert yes["max_ctx"] == no["max_ctx"]
    assert "does-not-fit" in bad.err
    assert [w["code"] for w in bad.json()["warnings"]] == ["context-exceeded"]


def test_the_longest_context_fits_and_one_more_does_not(cli: Any) -> None:
    longest = cli(*A10G, "--json").json()["result"]["models"][0]["max_ctx"]
    assert cli(*A10G, "--ctx", str(longest)).code == 0
    assert cli(*A10G, "--ctx", str(longest + 1)).code == 1
    most = cli(*A10G, "--ctx", "4k", "--json").json()["result"]["models"][0]["max_batch"]
    assert cli(*A10G, "--ctx", "4k", "--batch", str(most)).code == 0
    assert cli(*A10G, "--ctx", "4k", "--batch", str(most + 1)).code == 1


@pytest.mark.parametrize(("args", "code", "word", "part"), [
    (("fit", "llama-3-8b", "--gpu", "h10"), 4, "gpu-not-found", "h100-80gb"),
    (("fit", "llama-3-8b", "--gpu", "h100-80gbx0"), 4, "gpu-not-found", "h100-80gb"),
    (("fit", "llama-3-70b", "--gpu", "h100-80gbx2", "--tp", "3"), 2, "tp", "no multiple of 3"),
    (("fit", "falcon-7b", "--gpu", "l4"), 2, "no-ctx", "--ctx"),
    (("flops", "gpt2", "--phase", "train"), 2, "phase", "prefill nor decode"),
    (("flops", "gpt2", "--ctx", "0"), 2, None, "0"),
    (("kv-cache", "gpt2", "--ctx", "512,768"), 2, "usage", "write --ctx 512768 or --ctx 512 --ctx 768"),
    (("compare", "gpt2"), 2, "usage", "two models"),
    (("evolve", "gpt2"), 2, "usage", "TO"),
    (("rope", "llama-3-8b", "--target-ctx", "32k", "--method", "magic"), 2, None, "magic"),
    (("rope", "llama-3-8b", "--method", "yarn"), 2, None, "--target-ctx"),
])
def test_mistakes(cli: Any, args: tuple[str, ...], code: int, word: str | None, part: str) -> None:
    got = cli(*args)
    assert (got.code, got.out) == (code, ""), got.err
    assert got.err.startswith(f"error[{word}]: " if word else "error[")
    assert part in got.err
    assert "Traceback" not in got.err
    body = cli(*args, "--json")
    assert (body.code, body.json()["error"]["exit_code"]) == (code, code)


def test_compare_tells_ci_what_differs(cli: Any) -> None:
    assert cli("compare", "gpt2", "gpt2", "--fail-on-diff").code == 0
    different = cli("compare", "gpt2", "llama-3-8b", "--fail-on-diff")
    assert different.code == 1
    assert "error[diff]" in different.err
    assert different.out == cli("compare", "gpt2", "llama-3-8b").out
    assert cli("compare", "gpt2", "llama-3-8b").code == 0


def test_compare_shows_what_few_models_have_where_one_has_it(cli: Any) -> None:
    few = cli("compare", "gpt2", "llama-3-8b").out
    assert "factors" not in few
    assert "beside the decoder" not in few
    assert "dropout" in cli("compare", "llama-2-7b", "llama-3-8b").out  # neither has any, and that is worth a row
    many = cli("compare", "gpt2", "gemma-3-4b").out
    assert "factors: none -> embedding x 50.5964" in many
    assert "beside the decoder: nothing -> vision, projector" in many
    assert "factors" in cli("compare", "gemma-2b", "gemma-2b").out  # both alike have one


def test_evolve_ends_where_compare_says(cli: Any) -> None:
    steps = rows(cli("evolve", "gpt2", "llama-3-8b", "--format", "csv").out)
    assert (steps[0]["total"], steps[-1]["total"]) == ("124439808", "8030261248")
    assert cli("evolve", "gpt2", "llama-3-8b", "-q").out == "8030261248\n"
    for step in steps[1:]:
        assert step["edits"], "every step is an edit that --set knows"
    edits = [e for step in steps[1:] for e in step["edits"].split(" ")]
    applied = cli("params", "gpt2", *(word for e in edits for word in ("--set", e)), "-q")
    assert applied.out == "8030261248\n", "and the edits together are the way there"


def test_flops_add_up_in_every_format(cli: Any) -> None:
    args = ("flops", "mixtral-8x7b", "--ctx", "512")
    got = cli(*args, "--json").json()["result"]["models"][0]
    assert sum(got["parts"].values()) == got["total"] == int(cli(*args, "-q").out)
    assert {r["part"]: int(r["flops"]) for r in rows(cli(*args, "--format", "csv").out)}.items() >= got["parts"].items()
    for format in ("plain", "md"):
        assert f"{got['total']:,}" in cli(*args, "--format", format).out


def test_rope_lists_every_pair(cli: Any) -> None:
    args = ("rope", "llama-3.1-8b")
    listed = rows(cli(*args, "--format", "csv").out)
    pairs = cli(*args, "--json").json()["result"]["models"][0]["rotations"][0]["pairs"]
    assert [int(r["pair"]) for r in listed] == [p["j"] for p in pairs] == list(range(64))
    assert [float(r["frequency"]) for r in listed] == [p["frequency"] for p in pairs]


def test_doctor_finds_nothing_wrong_here(cli: Any) -> None:
    got = cli("doctor", "--json")
    assert got.code == 0, got.err
    assert json.loads(got.out)["command"] == "doctor"


@pytest.mark.parametrize(("text", "lengths"), [
    ("131,072", [131072]), ("512,1024", [512, 1024]), ("1k,2k", [1024, 2048]), ("512,76", [512, 76]),
    ("1,024,000", [1024000])])
def test_commas_in_a_context(cli: Any, text: str, lengths: list[int]) -> None:
    got = cli("kv-cache", "llama-3-8b", "--ctx", text, "--json")
    assert [a["ctx"] for a in got.json()["result"]["models"][0]["at"]] == lengths


def test_the_api_says_what_the_commands_say(cli: Any) -> None:
    import llamactl

    def told(*args: str) -> Any:
        return cli(*args, "--json").json()["result"]

    def same(report: Any, printed: dict[str, Any]) -> None:
        body = json.loads(json.dumps(report.to_dict()))
        body.pop("notes", None)
        assert body.items() <= printed.items()

    model = llamactl.load("llama-3-8b")
    same(llamactl.flops(model, 512, phase="decode", batch=2),
         told("flops", "llama-3-8b", "--ctx", "512", "--phase", "decode", "--batch", "2")["models"][0])
    same(llamactl.fit("llama-3-8b", "h100-80gbx2", 8192, kv="q8_0"),
         told("fit", "llama-3-8b", "--gpu", "h100-80gbx2", "--ctx", "8k", "--kv-dtype", "q8_0")["models"][0])
    same(llamactl.rope(model, target=32768, method="yarn"),
         told("rope", "llama-3-8b", "--target-ctx", "32k", "--method", "yarn")["models"][0])
    printed = told("compare", "gpt2", "llama-3-8b")
    assert [d.feature for d in llamactl.compare("gpt2", model).differences] == [
        d["feature"] for d in printed["differences"]]
    same(llamactl.evolve("gpt2", model), told("evolve", "gpt2", "llama-3-8b"))
