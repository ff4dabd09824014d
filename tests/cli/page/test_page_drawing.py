"""What a page of `explore` draws and says: the walk to the goal, hybrids, pictures true to scale, phones and paper."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from llamactl.analysis.params import params
from llamactl.api import load
from llamactl.render.units import scaled

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
GOLDEN = Path(__file__).resolve().parents[2] / "golden"
HYBRID, RECURRENT = str(GOLDEN / "nemotron_h"), str(GOLDEN / "mamba")


def cells(page: Any, column: str) -> dict[str, str]:
    """Exact values of the table of costs."""
    return dict(page.eval_on_selector_all(f"#numbers td[data-column={column}]",
                                          "e => e.map(x => [x.dataset.name, x.dataset.exact])"))


@pytest.mark.parametrize("models", ["gpt2 llama-3-70b", "gpt2 tinyllama-1.1b", "gpt2 falcon-40b", "gpt2 gemma-2b",
                                    "gpt2 qwen2.5-0.5b", "llama-3-70b gpt2", "deepseek-v3 llama-3-8b",
                                    "llama-3-8b deepseek-v3", "falcon-7b gemma-2b"])
def test_every_switch_in_turn_leads_to_the_goal(opened: Any, models: str) -> None:
    """Also where the heads of one size cannot be shared as those of the other are."""
    page = opened(models)
    page.click("#all-off")
    boxes = page.query_selector_all("#switches input")
    for n, box in enumerate(boxes):
        box.click()
        assert [x.is_checked() for x in boxes] == [i <= n for i in range(len(boxes))]
    assert cells(page, "now") == cells(page, "goal")
    last = page.eval_on_selector("#ladder tbody tr:last-child", "e => [...e.querySelectorAll('td')].map(x => "
                                                               "x.dataset.exact)")
    goal = cells(page, "goal")
    assert last == [goal["total"], goal["ffn_share_blocks"], goal["bytes_per_token"], goal["kv_cache_bytes"]]


def test_the_switch_for_kv_heads_says_what_it_puts_in(opened: Any) -> None:
    page = opened("gpt2 falcon-40b")
    assert page.inner_text("#switch-kv-words").endswith("→ 16 query heads share a KV head")
    page.click("#all-off")
    page.click("#switch-kv")
    said = page.inner_text("#switch-kv-words")
    assert said.endswith("; at this size, of 12 heads, all 12 query heads share a KV head")
    assert page.text_content("#kv-heads-said").startswith("1 KV head, 12 of 12")
    page.click("#switch-size")
    assert page.text_content("#kv-heads-said").startswith("8 KV heads, 16 of 128")
    page.click("#switch-kv")
    assert page.text_content("#kv-heads-said").startswith("128 KV heads, one for each")
    rest = page.inner_text("#switch-goal-words")
    assert rest.startswith("only with every edit: norm: LayerNorm (scale and shift) before each branch → ")
    assert "before each of two branches side by side; context: 1,024 →" in rest


def test_a_step_that_changes_nothing_yet_is_told_with_the_next(opened: Any) -> None:
    """8 heads that are shared by twos cannot be shared by threes: the goal's sharing comes with its size."""
    page = opened("gemma-3-4b smollm2-135m")
    page.click("#all-off")
    rows = page.eval_on_selector_all("#ladder tbody th", "e => e.map(x => x.innerText)")
    assert "+ KV heads" not in rows
    assert any(row.startswith("+ KV heads, ") for row in rows)
    for n in range(1, len(rows) + 1):
        page.click(f"#ladder tbody tr:nth-child({n}) button")
        assert page.eval_on_selector_all("#ladder tr.here", "e => e.length") == 1
    assert cells(page, "now") == cells(page, "goal")


def test_printing_leaves_the_folds_as_they_were(opened: Any) -> None:
    page = opened("gpt2 llama-3-8b")
    page.click("text=Devices, and the context that fills them")
    before = page.eval_on_selector_all("details", "e => e.map(x => x.open)")
    assert sorted(set(before)) == [False, True]
    page.pdf()
    page.wait_for_function("document.querySelectorAll('details[open]').length === 1")
    assert page.eval_on_selector_all("details", "e => e.map(x => x.open)") == before


def test_what_is_typed_outlives_a_turn_of_the_screen(opened: Any) -> None:
    page = opened("gpt2", viewport={"width": 800, "height": 600})
    page.focus("#ctx")
    page.keyboard.type("9")
    typed = page.input_value("#ctx")
    page.set_viewport_size({"width": 600, "height": 800})
    page.wait_for_timeout(200)
    assert page.input_value("#ctx") == typed
    page.keyboard.press("Enter")
    assert page.input_value("#ctx") == typed


def test_a_model_and_itself_have_nothing_to_switch(opened: Any) -> None:
    page = opened("gpt2 gpt2")
    assert page.is_hidden("#edits")
    assert opened(str(GOLDEN / "mllama")).is_hidden("#edits")  # its head has other rows than its table
    assert page.inner_text("#rope-none").count("gpt2: turns nothing") == 1


def test_a_cache_that_does_not_grow_evenly_has_no_bytes_a_token(opened: Any, cli: Any) -> None:
    page = opened("gemma-2-9b", "#ctx=8192&kv=bf16")
    assert cli("kv-cache", "gemma-2-9b", "--ctx", "8192", "--dtype", "bf16", "--json").model["bytes_per_token"] is None
    assert cells(page, "now")["bytes_per_token"] == ""
    assert "not even: windows are full" in page.inner_text("#numbers")
    assert "172,032 until windows are full" in " ".join(page.inner_text("#numbers").split())
    assert page.inner_text("#read li:first-child") == (
        "Cache at 8k tokens: 2x fewer bytes than if every query head kept its own K and V; 21 of 42 layers keep 4,096 "
        "tokens at most.")
    assert cells(page, "now")["full_heads_ratio"] == "2"
    page.fill("#ctx", "4096")
    page.press("#ctx", "Enter")
    even = cli("kv-cache", "gemma-2-9b", "--ctx", "4096", "--dtype", "bf16", "--json").model["bytes_per_token"]
    assert cells(page, "now")["bytes_per_token"] == str(even)
    assert page.inner_text("#read li:first-child").endswith("fewer.")


def test_sizes_are_rounded_as_the_command_line_rounds(opened: Any) -> None:
    """70,272 B is 68.625 KiB: the nearest two are as near, and both print the even one."""
    page = opened("deepseek-v3", "#kv=bf16")
    shown = page.inner_text("#numbers td[data-name=bytes_per_token][data-column=now]")
    assert scaled(70_272) == "70.27 kB, 68.62 KiB"
    assert shown.split() == f"70,272 B {scaled(70_272)}".split()
    for ctx, batch in ((2**30, 65536), (2**20 + 7, 513), (12_345, 1)):
        for box, n in (("#ctx", ctx), ("#batch", batch)):
            page.fill(box, str(n))
        page.press("#batch", "Enter")
        n = int(cells(page, "now")["kv_cache_bytes"])
        assert scaled(n) in page.inner_text("#numbers td[data-name=kv_cache_bytes][data-column=now]")


def test_what_is_typed_goes_to_the_nearest_number_that_can_be(opened: Any) -> None:
    page = opened("gpt2")
    for typed, kept in (("0", 1), ("-5", 1), ("2.6", 3), ("1e3", 1000), ("99999999999999999", 2**30), ("", 2**30)):
        page.fill("#ctx", typed)
        page.press("#ctx", "Enter")
        assert page.input_value("#ctx") == str(kept), typed


def test_edits_that_nobody_knows_leave_the_view(opened: Any) -> None:
    for address, total in (("#on=xx", "8030261248"), ("#on=norm.xx", "8030261248"), ("#on=", "124439808")):
        assert cells(opened("gpt2 llama-3-8b", address), "now")["total"] == total


# ---- the drawing


def test_a_hybrids_parts_stand_in_branches_of_their_own(opened: Any) -> None:
    page = opened(HYBRID)
    assert page.eval_on_selector_all(".branch", "e => e.map(x => [...x.querySelectorAll('.part')].map(y => "
                                                "y.dataset.part))") == [["attn_norm", "state", "attn"],
                                                                        ["mlp_norm", "mlp"]]
    page.click("#blocks button[data-part=state]")
    said = page.inner_text("#part")
    assert "Recurrent mixer" in said
    assert "at any context" in said
    assert "cache at" not in said
    page.click("#blocks button[data-part=attn]")
    assert "cache at" in page.inner_text("#part")


def test_a_block_of_one_branch_has_one(opened: Any) -> None:
    page = opened(RECURRENT)
    assert page.eval_on_selector_all("#blocks .branch, #blocks .sum", "e => e.map(x => x.className)") == [
        "branch", "sum stream"]
    assert page.is_disabled("#kv-heads")
    assert cells(page, "now")["kv_cache_bytes"] == "0"


def test_experts_that_run_are_those_of_the_command_line(opened: Any) -> None:
    page = opened("deepseek-v3")
    page.click("#blocks button[data-part=mlp]")
    assert "run for a token: 8 of 256 experts and what stands beside them, 398,196,736" in page.inner_text("#part")
    found = params(load("deepseek-v3").model)
    assert found.active is not None
    assert cells(page, "now")["active"] == str(found.active.all)


def test_another_curve_is_another_kind(opened: Any) -> None:
    """GPT-2's GELU is the tanh form, Falcon's the exact one; another width alone is another size."""
    page = opened("gpt2 falcon-40b")
    assert "another kind" in page.inner_text("#blocks [data-column=now] button[data-part=mlp]")
    assert "another size" in page.inner_text("#blocks [data-column=now] button[data-part=embed]")


@pytest.mark.parametrize("height", [900, 740])
def test_what_a_part_is_stands_in_sight(opened: Any, height: int) -> None:
    page = opened("gpt2 llama-3-8b", viewport={"width": 390 if height == 740 else 1280, "height": height})
    assert page.evaluate("getComputedStyle(document.getElementById('part-section')).position") == "static"
    for part in ("embed", "attn", "mlp"):
        page.click(f"#blocks [data-column=now] button[data-part={part}]")
        box = page.locator("#part-section").bounding_box()
        assert 0 <= box["y"] < height - 100
        own = page.locator("#part .explained[data-column=now]").bounding_box()  # not the other's, above it on a phone
        assert box["y"] <= own["y"] < box["y"] + 90
        assert page.locator(f"#blocks [data-column=now] button[data-part={part}]").bounding_box()["y"] < box["y"]


# ---- pictures


WORDS_OUT = """e => e.flatMap((svg) => [...svg.querySelectorAll('text')].filter((t) => { const b = t.getBBox(),
  v = svg.viewBox.baseVal; return b.x < -0.5 || b.x + b.width > v.width + 0.5 || b.y < -0.5
    || b.y + b.height > v.height + 0.5; }).map((t) => t.textContent))"""


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("address", ["", "#ctx=16777216&batch=1024", "#ctx=8300", "#pair=60&q=100000&k=3&way=5",
                                     "#ctx=1"])
def test_words_in_pictures_can_be_read(opened: Any, width: int, address: str) -> None:
    """As large as they are written, and within the picture."""
    page = opened("gpt2 llama-3-8b", address, viewport={"width": width, "height": 800})
    assert page.eval_on_selector_all("figure svg", WORDS_OUT) == []
    scales = page.eval_on_selector_all("figure svg", "e => e.map(x => x.getBoundingClientRect().width / "
                                                     "x.viewBox.baseVal.width)")
    assert len(scales) == 3
    assert all(0.93 < x < 1.07 for x in scales)


def test_bars_are_as_long_as_their_numbers(opened: Any) -> None:
    for width in (360, 1280):
        page = opened("llama-3-8b", viewport={"width": width, "height": 800})
        pieces = page.eval_on_selector_all("#bars > div:last-child .piece", "e => e.map(x => [x.title, x."
                                           "getBoundingClientRect().width / x.parentElement.clientWidth])")
        for title, share in pieces:
            n = int(title.rpartition(": ")[2].replace(",", ""))
            assert share == pytest.approx(n / 8_030_261_248, abs=0.002), title
        assert page.eval_on_selector_all(".piece > span", "e => e.filter(x => x.getBoundingClientRect().right > x."
                                         "parentElement.getBoundingClientRect().right).map(x => x.textContent)") == []


def test_turns_too_quick_to_draw_are_not_drawn_as_slow_ones(opened: Any) -> None:
    page = opened("llama-3-8b", "#q=100000&k=5&pair=0")
    assert page.query_selector("#score polyline") is None
    assert page.query_selector("#score polygon.held")
    assert "too often" in page.inner_text("#score-said")
    page = opened("llama-3-8b", "#q=10&k=5&pair=0")
    assert page.query_selector("#score polygon.held") is None
    points = page.get_attribute("#score polyline", "points").split(" ")
    heights = [float(p.split(",")[1]) for p in points]
    tops = sum(a > b < c for a, b, c in zip(heights, heights[1:], heights[2:], strict=False))  # y runs downwards
    assert abs(tops - 51 / (2 * math.pi)) <= 1
    assert page.inner_text("#score-said") == ""


def test_slow_pairs_are_seen_as_far_as_the_model_reads(opened: Any) -> None:
    page = opened("llama-3-8b", "#pair=50&q=0")
    assert int(page.get_attribute("#k", "max")) == 8192
    page = opened("llama-3-8b", "#pair=50&q=0&way=1")
    assert int(page.get_attribute("#k", "max")) == 16384


def test_a_scale_stays_while_a_thumb_is_moved(opened: Any) -> None:
    page = opened("llama-3-8b", "#pair=0&q=10&k=100000")
    for k in (90_000, 40_000, 10):
        page.eval_on_selector("#k", "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", k)
        assert (page.get_attribute("#k", "max"), page.input_value("#k-exact")) == ("100000", str(k))
    page.fill("#k-exact", "3")
    page.press("#k-exact", "Enter")
    assert page.get_attribute("#k", "max") == "51"


def test_only_the_first_button_moves_the_key(opened: Any) -> None:
    page = opened("llama-3-8b")
    page.locator("#score").scroll_into_view_if_needed()
    box = page.locator("#score svg").bounding_box()
    before = page.input_value("#k-exact")
    page.mouse.click(box["x"] + box["width"] * 0.8, box["y"] + 50, button="right")
    assert page.input_value("#k-exact") == before
    page.mouse.click(box["x"] + box["width"] * 0.8, box["y"] + 50)
    assert page.input_value("#k-exact") != before


def test_a_models_own_scheme_is_named(opened: Any) -> None:
    assert opened("llama-3.1-8b").inner_text("#way option >> nth=0") == "as configured (llama3)"
    assert opened("llama-3-8b").inner_text("#way option >> nth=0") == "as configured"


def test_devices_say_what_fills_them(opened: Any) -> None:
    page = opened("llama-3-8b")
    page.click("text=Devices, and the context that fills them")
    assert "Full at, tokens, with the weights" in page.inner_text("#devices")
    page.uncheck("#loaded")
    assert "Full at, tokens, without the weights" in page.inner_text("#devices")


@pytest.mark.parametrize("models", ["gpt2 llama-3-8b", "gemma-3-27b"])
def test_nothing_is_cut_off_on_paper(opened: Any, models: str) -> None:
    page = opened(models, viewport={"width": 718, "height": 1000})  # A4 between its margins, at 96 to the inch
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.scrollWidth") <= 718
    wide = "e => e.filter(x => x.scrollWidth > x.clientWidth).map(x => x.id)"
    assert page.eval_on_selector_all(".scroll", wide) == []
    assert "base" in page.inner_text("#waves-said")
