"""What `verify` says on a terminal, in a log and to scripts: every verdict, whatever the numbers and the names are."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from llamactl.analysis.verification import VERDICTS, VerifyReport
from llamactl.render import document, render
from llamactl.render.schema import schema_of
from llamactl.render.verdict import decades, layer_of, number, stretches, times

Named = Callable[[str], VerifyReport]


def shown(r: VerifyReport, format: str = "plain", **options: Any) -> str:
    return render(document("verify", [r], **options), format)


@pytest.mark.parametrize("verdict", VERDICTS)
def test_the_first_line_is_the_verdict_and_why(named: Named, verdict: str) -> None:
    r = named(verdict)
    first = shown(r).splitlines()[0]
    assert first.split(None, 1) == ["verdict", f"{verdict.replace('-', ' ')}: {r.why}"]
    assert document("verify", [r]).primary == (verdict,)


def test_a_why_that_begins_with_the_verdict_is_not_told_twice(named: Named) -> None:
    assert shown(replace(named("same"), why="Same: within arithmetic")).split("\n")[0].split(None, 1)[1] == (
        "Same: within arithmetic")


def test_an_explanation_is_told_in_full(named: Named) -> None:
    lines = [" ".join(line.split()) for line in shown(named("explained")).splitlines()]
    for line in ("explanation 1 of 2", "edit rope-interleaved", "where all layers", "edit gelu", "where layer 7",
                 "what RoPE turns neighbouring lanes instead of the two halves",
                 "cause q and k rows are read in Meta's lane order",
                 "fix permute the rows of q and k by head, biases too",
                 "left with all 3.07e-06 (KL 2e-09 nats), floor 2.94e-05, limit 0.00047",
                 "as good here q-lanes + k-lanes",
                 "first difference layer 3 attention: relative error 0.4, floor 1e-06",
                 "wrong on its own layer 7"):
        assert line in lines


def test_an_edit_that_explains_a_part_is_not_called_an_explanation(named: Named) -> None:
    text = shown(named("partly"))
    assert "\npart of it\n" in text
    assert re.search(r"^what is left +0\.5 ", text, re.M)
    assert "explanation" not in text


@pytest.mark.parametrize("line", [
    "max |dlogit| 8.31, 17,700 x the limit", "limit 0.00047: 16 x the floor, or 5.5e-05 if that is more",
    "floor 2.94e-05 (KL 3.6e-07) by attention by matrices, in fp32", "agreement top-1 35.0%, top-5 61.0%",
    "loss 2.4100 -> 4.5300 nats per token", "columns 49,152 of 49,152 beyond the limit, the first is 0",
    "reference /models/right (checkpoint, family llama, layout hf, bf16)", "candidate port.npy (logits)",
    "probe 1,024 tokens: a passage of English", "tried 152 hypotheses",
    "- eps of the norms within 1e-7: the change is below arithmetic",
])
def test_what_was_measured_and_compared(named: Named, line: str) -> None:
    assert line in [" ".join(x.split()) for x in shown(named("different")).splitlines()]


@pytest.mark.parametrize(("others", "said"), [
    (("layer 7",), "layer 7"), (("layer 4", "layer 5", "layer 6", "layer 9", "head"), "layers 4-6, 9; head"),
    (("layer 4 attention", "layer 5", "head"), "layer 4 attention; layer 5; head"),
    (("layer 4 attention", "layer 5", "layer 8"), "layers 5, 8; layer 4 attention"),
])
def test_other_places_in_few_words(named: Named, others: tuple[str, ...], said: str) -> None:
    place = named("different").first_difference
    assert place is not None
    text = shown(replace(named("different"), first_difference=replace(place, others=others)))
    assert re.search(rf"^wrong on its own +{re.escape(said)}$", text, re.M)


def test_numbers_that_do_not_exist(named: Named) -> None:
    text = " ".join(shown(named("nan"), chart=True, verbose=True).split())
    assert "non-finite 0 and 77 logits" in text
    assert "max |dlogit| - relative error - in the worst token KL max -, mean - nats; at position 0: 0.001" in text
    assert "first difference layer 1: relative error not finite" in text
    assert re.search(r"position 1 !{40} not finite position 2 #+ 0.002", text)
    assert re.search(r"layer 1 !{40} not finite", text)
    assert "layer relative 0 1e-06 1 -" in text


def test_no_nan_and_no_infinity_is_printed(each: tuple[str, VerifyReport]) -> None:
    for options in ({}, {"verbose": True}, {"chart": True, "every": True}):
        assert not re.search(r"\b(nan|inf|None)\b(?!-)", shown(each[1], **options))
        assert not re.search(r"\b(nan|inf|None)\b(?!-)", shown(each[1], "csv", **options))


@pytest.mark.parametrize("format", ["plain", "md", "csv", "table"])
def test_every_report_is_ascii_in_every_format(each: tuple[str, VerifyReport], format: str) -> None:
    text = shown(each[1], format, chart=format == "table").replace("\ufffe", "")
    known = set("\n ─━│┃") if format == "table" else set("\n")
    assert {c for c in text if not (c.isascii() and c.isprintable())} <= known
    assert ("\x1b" in text, "\u202e" in text) == (False, False)


def test_an_enemy_breaks_no_line(named: Named, enemy: str) -> None:
    lines = shown(named("hostile"), verbose=True).splitlines()
    assert sum(line.startswith("::") for line in lines) == 0
    assert any(r"\x1b[31m \u202e ]]> --> %0A ::error::x\r\n::set-output" in line for line in lines)
    assert enemy not in "\n".join(lines)


def test_findings_are_few_until_asked_for(named: Named) -> None:
    text = shown(named("nan"))
    assert text.count("[nan-values]") == 8
    assert "and 4 more; -v and --json list them all" in text
    for option in ("verbose", "every"):
        assert shown(named("nan"), **{option: True}).count("[nan-values]") == 12
    brief = shown(named("different"))
    assert ("[dtype-differs]" in brief, "[zero-rows]" in brief) == (True, False)
    assert re.search(r"^notes +1, with -v$", brief, re.M)
    assert "model.embed.weight: 8 of 49,152 rows are zero [zero-rows]" in shown(named("different"), verbose=True)


def test_the_inventory_is_one_line_a_checkpoint(named: Named) -> None:
    lines = [x for x in shown(named("different")).splitlines() if x.startswith("files ")]
    assert len(lines) == 2
    assert lines[0].split(None, 1)[1] == (
        "/models/port (hf): 272 tensors, 134,515,008 parameters, F32 134,515,008 elements; head tied; norm weights "
        "average 0.0189 to 3.1, median 0.85; no NaN, no Inf")
    assert "head tied; 3 NaN, 1 Inf" in shown(named("nan"))


def test_charts_stand_on_terminals_where_something_is_wrong(named: Named) -> None:
    drawn = shown(named("different"), chart=True)
    assert re.search(r"^position 0 +0$", drawn, re.M)
    assert re.search(r"^position 1-69 +#+ +0\.\d+$", drawn, re.M)
    assert re.search(r"^layer 2-3 +#+ +0\.4$", drawn, re.M)
    bars = [len(x.split()[2]) for x in drawn.splitlines() if x.startswith("position") and "#" in x]
    assert bars == sorted(bars)
    assert max(bars) <= 40
    assert "log scale" not in shown(named("different"))
    assert "log scale" not in shown(named("same"), chart=True)
    assert "log scale" in shown(named("same"), chart=True, verbose=True)
    assert "log scale" not in shown(named("equal"), chart=True, verbose=True)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_terminal_gets_lines_that_fit(named: Named, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    name = named("different" if columns > 60 else "same")
    text = shown(name, "table", chart=True)
    assert max(map(len, text.splitlines())) <= columns
    joined = " ".join(text.split())
    assert " ".join(name.why.split()) in joined


def test_a_long_name_is_never_cut(named: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = "/models/" + "a-long-name/" * 12
    r = named("different")
    assert path in shown(replace(r, inventory=(replace(r.inventory[0], path=path),)), "table", chart=True)


def test_csv_has_a_row_for_each_measure(named: Named) -> None:
    rows = dict(csv.reader(io.StringIO(shown(named("different"), "csv"))))
    assert rows["measure"] == "value"
    assert rows["verdict"] == "different"
    assert (rows["max_abs_dlogit"], rows["tokens"], rows["columns_of"]) == ("8.31", "1024", "49152")
    assert (rows["kl_quarter_1"], rows["first_difference"]) == ("0.0", "layer 3 attention")
    assert float(rows["times_limit"]) == pytest.approx(8.31 / 4.7e-4)
    odd = dict(csv.reader(io.StringIO(shown(named("nan"), "csv"))))
    assert (odd["max_kl"], odd["max_abs_dlogit"], odd["non_finite_second"]) == ("", "", "77")
    stacked = dict(csv.reader(io.StringIO(shown(named("explained"), "csv"))))
    assert stacked["explanations"] == "rope-interleaved + gelu"
    assert [*dict(csv.reader(io.StringIO(shown(named("bare"), "csv"))))] == [
        "measure", "verdict", "why", "explanations", "first_difference"]


def test_json_follows_the_schema_and_has_the_promised_names(each: tuple[str, VerifyReport]) -> None:
    name, r = each
    if name in ("no floor of zero", "hostile"):  # measures hold None where a number is not finite: there is no other
        return
    result = json.loads(json.dumps(r.to_dict(), allow_nan=False))
    schema = schema_of("verify")
    Draft202012Validator.check_schema(schema)
    body = {"schema": 1, "command": "verify", "model": None, "inputs": {}, "result": result, "warnings": []}
    Draft202012Validator(schema).validate(body)
    assert set(result) >= {"verdict", "explanations", "first_difference", "measures", "floor", "inventory"}
    for e in result["explanations"]:
        assert set(e) >= {"edit", "scope", "residual", "equivalent"}
    for path in objects(result):
        changed = json.loads(json.dumps(body))
        at = changed["result"]
        for key in path:
            at = at[key]
        at["surprise"] = 1
        assert not Draft202012Validator(schema).is_valid(changed), path


def objects(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all objects inside a JSON value; of a list, its first."""
    if isinstance(value, dict):
        yield path
    for key, child in value.items() if isinstance(value, dict) else enumerate(value[:1]):
        if isinstance(child, dict | list):
            yield from objects(child, (*path, key))


@pytest.mark.parametrize(("x", "said"), [
    (None, "-"), (float("nan"), "-"), (float("inf"), "not finite"), (1e30, "not finite"), (0.0, "0"),
    (3.07e-6, "3.07e-06"),
])
def test_a_number(x: float | None, said: str) -> None:
    assert number(x) == said


@pytest.mark.parametrize(("x", "said"), [
    (152283.4, "152,000 x"), (0.07, "0.07 x"), (999.4, "999 x"), (1e12, "1e+12 x"),
])
def test_a_multiple(x: float, said: str) -> None:
    assert times(x) == said


@pytest.mark.parametrize(("place", "layer"), [
    ("layer 3 attention", 3), ("layer 12", 12), ("layers 3, 5", None), ("head", None), ("layer", None),
    ("layer \u00b2", None),
])
def test_a_place_in_a_layer(place: str, layer: int | None) -> None:
    assert layer_of(place) == layer


def test_stretches_cover_everything_once_and_keep_the_largest() -> None:
    values = [float(i % 7) for i in range(100)]
    for most, alone in ((16, 1), (16, 0), (200, 1), (1, 0)):
        cut = stretches(values, most, alone)
        assert [i for a, b, _ in cut for i in range(a, b + 1)] == list(range(100))
        assert len(cut) <= max(most, alone + 1)
        assert all(x == max(values[a : b + 1]) for a, b, x in cut)
    assert stretches([], 4, alone=1) == []
    assert [x for _, _, x in stretches([1.0, None, 3.0, 4.0], 2)] == [None, 4.0]


def test_decades_hold_what_is_drawn() -> None:
    assert decades([0.0, 3e-5, 20.0, None]) == (-5, 2)
    assert decades([0.0, None]) == (-1, 0)
    assert decades([1e-30, 1.0]) == (-12, 0)
    assert decades([10.0]) == (0, 1)
