"""The page of `explore` in a browser: every control gives exactly what the command line prints, and nothing leaks."""

from __future__ import annotations

import json
import math
import random
import shlex
from pathlib import Path
from typing import Any

import pytest

from llamactl.api import load
from llamactl.cli.exploring import made

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
PAIRS = ["gpt2", "gpt2 llama-3-8b", "gpt2 mixtral-8x7b", "gpt2 gemma-2-9b", "gpt2 deepseek-v3", "llama-3-8b gpt2"]


def numbers(page: Any) -> dict[str, dict[str, str]]:
    """Column -> name -> exact value of the table of costs."""
    cells = page.eval_on_selector_all("#numbers td", "e => e.map(x => [x.dataset.column, x.dataset.name, "
                                                     "x.dataset.exact, x.innerText])")
    out: dict[str, dict[str, str]] = {}
    for column, name, exact, shown in cells:
        out.setdefault(column, {})[name] = exact
        if exact.isdigit():  # what is read is what is held
            assert f"{int(exact):,}" in shown
    return out


def costs(cli: Any, params: str, cache: str) -> dict[str, Any]:
    """What two command lines print, under the page's names."""
    p, c = cli(*shlex.split(params)[1:], "--json").model, cli(*shlex.split(cache)[1:], "--json").model
    (at,) = c["at"]
    out = {"total": p["total"], "ffn_share_blocks": p["ffn_share_blocks"], "weights_bytes": p["weights_bytes"],
           "elements_per_token": c["elements_per_token_full"] + c["elements_per_token_windowed"],
           "bytes_per_token": c["bytes_per_token"], "kv_cache_bytes": at["kv_cache_bytes"],
           "full_heads_bytes": at["full_heads_bytes"],
           "full_heads_ratio": at["full_heads_bytes"] / at["kv_cache_bytes"],
           "together": p["weights_bytes"] + at["kv_cache_bytes"] + at["state_bytes"]}
    return out | ({"active": p["active"]["all"]} if p["active"] else {})


def same(found: dict[str, str], said: dict[str, Any]) -> None:
    """The page's column against the command line: integers digit by digit, floats bit by bit."""
    assert {k: None if v == "" else float(v) if isinstance(said[k], float) else int(v)
            for k, v in found.items() if k in said} == said


def agrees(page: Any, cli: Any) -> list[str]:
    """The column of what is set now equals what the page's own commands print; the commands."""
    commands = page.text_content("#command").split("\n")
    same(numbers(page)["now"], costs(cli, *commands))
    return commands


def slide(page: Any, selector: str, value: int) -> None:
    page.eval_on_selector(selector, "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", value)


@pytest.mark.parametrize("models", PAIRS)
def test_each_control_gives_what_the_command_line_prints(opened: Any, cli: Any, models: str) -> None:
    page = opened(models)
    names = models.split()
    ctx, dtype, kept = (page.input_value(s) for s in ("#ctx", "#kv-dtype", "#weights-dtype"))
    for column, name in zip(("start", "goal"), names, strict=False):
        same(numbers(page)[column], costs(cli, f"llamactl params {name} --dtype {kept}",
                                          f"llamactl kv-cache {name} --ctx {ctx} --dtype {dtype}"))
    agrees(page, cli)
    for box in page.query_selector_all("#switches input"):
        before = numbers(page)["now"], page.text_content("#command")
        box.click()
        agrees(page, cli)
        assert (numbers(page)["now"], page.text_content("#command")) != before, box.get_attribute("id")
        box.click()
        if page.query_selector("#switch-goal:not(:checked)"):
            page.check("#switch-goal")  # taking a part back took the rest back, too
        assert (numbers(page)["now"], page.text_content("#command")) == before, box.get_attribute("id")
    for side in ("#all-off", "#all-on") if len(names) > 1 else (None,):
        if side:
            page.click(side)
        agrees(page, cli)
        for n in range(int(page.get_attribute("#kv-heads", "max")) + 1 if page.is_enabled("#kv-heads") else 0):
            slide(page, "#kv-heads", n)
            _, cache = agrees(page, cli)
            heads = {g["heads"] for g in cli(*shlex.split(cache)[1:], "--json").model["groups"]}
            assert page.text_content("#kv-heads-said").split()[0] == str(*heads)
    for dtype in page.eval_on_selector_all("#kv-dtype option", "e => e.map(x => x.value)"):
        page.select_option("#kv-dtype", dtype)
        assert f"--dtype {dtype}" in agrees(page, cli)[1]
    for dtype in page.eval_on_selector_all("#weights-dtype option", "e => e.map(x => x.value)"):
        page.select_option("#weights-dtype", dtype)
        assert f"--dtype {dtype}" in agrees(page, cli)[0]
    for ctx, batch in ((1, 1), (4097, 3), (131_072, 1), (999_983, 64)):
        page.fill("#ctx", str(ctx))
        page.fill("#batch", str(batch))
        page.press("#batch", "Enter")
        assert f"--ctx {ctx} --batch {batch} " in agrees(page, cli)[1]
    slide(page, "#ctx-slider", 15)
    slide(page, "#batch-slider", 4)
    assert "--ctx 32768 --batch 16 " in agrees(page, cli)[1]


def test_switches_in_any_mixture_give_what_the_command_line_prints(opened: Any, cli: Any) -> None:
    page, chance = opened("gpt2 llama-3-8b"), random.Random(7)
    boxes = page.query_selector_all("#switches input")
    seen = set()
    for _ in range(40):
        chance.choice(boxes).click()
        slide(page, "#kv-heads", chance.randrange(6))
        agrees(page, cli)
        seen.add(numbers(page)["now"]["total"])
    assert len(seen) > 20


def test_why_the_cache_is_smaller_and_the_feed_forward_larger_can_be_read_off(opened: Any) -> None:
    page = opened("gpt2 llama-3-8b")
    cache, feed = page.eval_on_selector_all("#read li", "e => e.map(x => x.innerText)")
    assert cache == ("Cache: 32 query heads read 8 KV heads, so 65,536 elements a token are kept instead of 262,144: "
                     "4x fewer.")
    assert feed == ("Feed-forward: matrices: 3 x 4,096 x 14,336 = 176,160,768; 176,160,768 of the 218,112,000 "
                    "parameters of a block, beside 41,943,040 of attention: 80.8%.")
    page.click("#all-off")
    assert page.inner_text("#read li:last-child") == (
        "Feed-forward: matrices: 2 x 768 x 3,072 = 4,718,592, biases: 3,840; 4,722,432 of the 7,087,872 parameters of "
        "a block, beside 2,362,368 of attention: 66.6%.")
    page.click("#all-on")
    taken = {r.split("\t")[0]: r.split("\t")[1:] for r in page.inner_text("#without").split("\n") if "without" in r}
    assert taken["llama-3-8b without: KV heads"] == ["8,835,567,616", "72.4%", "524,288 B", "4,294,967,296 B"]
    assert taken["llama-3-8b without: gate and activation"][1] == "73.7%"
    page.click("text=llama-3-8b without: KV heads")
    assert page.text_content("#command").startswith("llamactl params gpt2 --set hidden=4096 --set n_heads=32 ")
    assert not page.is_checked("#switch-kv")
    assert numbers(page)["now"]["kv_cache_bytes"] == "4294967296"


def test_kv_heads_keep_their_proportion_at_another_size(opened: Any, cli: Any) -> None:
    page = opened("gpt2 llama-3-8b")
    page.click("#all-off")
    for n, before, after in ((0, "1 KV head, 12 of 12", "1 KV head, 32 of 32"),
                             (3, "4 KV heads, 3 of 12", "16 KV heads, 2"),
                             (5, "12 KV heads, one for each", "32 KV heads, one for each")):
        slide(page, "#kv-heads", n)
        assert page.text_content("#kv-heads-said").startswith(before)
        page.click("#switch-size")
        assert page.text_content("#kv-heads-said").startswith(after)
        agrees(page, cli)
        page.click("#switch-size")


def test_the_ladder_walks_one_edit_at_a_time(opened: Any, cli: Any) -> None:
    """Each row, chosen, is the model that its numbers are of; the last is the goal."""
    page = opened("gpt2 llama-3-8b")
    rows = page.eval_on_selector_all("#ladder tbody tr", "e => e.map(x => [...x.querySelectorAll('td')].map(y => "
                                                         "y.dataset.exact))")
    assert len(rows) == 10
    for n, (total, share, each, whole) in enumerate(rows):
        page.click(f"#ladder tbody tr:nth-child({n + 1}) button")
        agrees(page, cli)
        now = numbers(page)["now"]
        assert (total, share, each, whole) == (now["total"], now["ffn_share_blocks"], now["bytes_per_token"],
                                               now["kv_cache_bytes"])
        assert page.get_attribute(f"#ladder tbody tr:nth-child({n + 1})", "class") == "here"
    assert numbers(page)["now"] == numbers(page)["goal"]


def test_a_part_tells_what_it_is_and_costs(opened: Any, cli: Any) -> None:
    page = opened("gpt2 llama-3-8b")
    kinds = page.eval_on_selector_all("#blocks [data-column=now] button.kind", "e => e.map(x => x.dataset.part)")
    assert kinds == ["attn_norm", "rotation", "attn", "mlp_norm", "mlp", "norm", "head"]
    page.click("#blocks [data-column=now] button[data-part=mlp]")
    start, now = page.eval_on_selector_all("#part .explained", "e => e.map(x => x.innerText)")
    assert "2 x 768 x 3,072 = 4,718,592" in start
    assert "3 x 4,096 x 14,336 = 176,160,768" in now
    assert "W_down (act(W_gate x) * W_up x)" in now
    page.click("#blocks [data-column=now] button[data-part=rotation]")
    assert page.inner_text("#part .explained[data-column=start]") == "gpt2: nothing stands here"
    total = 0
    for key in page.eval_on_selector_all("#blocks [data-column=now] button.part", "e => e.map(x => x.dataset.part)"):
        page.click(f"#blocks [data-column=now] button[data-part={key}]")
        said = page.inner_text("#part .explained[data-column=now]")
        line = next(x for x in said.split("\n") if x.startswith("parameters: "))
        total += int(line.split(" a block, ")[-1].removeprefix("parameters: ").split(" ")[0].replace(",", ""))
    assert total == 8_030_261_248
    page.click("#switch-positions")
    assert "gpt2: Learned positions" in select(page, "pos_embed")


@pytest.mark.parametrize(("name", "inside"), [("transformer-base", False), ("gemma-2-9b", True)])
def test_a_norm_stands_where_it_acts(opened: Any, name: str, inside: bool) -> None:
    """The block of 2017 norms the sum, after the plus; Gemma 2 the branch, before it."""
    page = opened(name)
    found = page.eval_on_selector_all("#blocks button[data-part$=post_norm]", "e => e.map(x => !!x.closest('.branch'))")
    assert found == [inside, inside]


def test_the_drawing_is_there_in_words(opened: Any, cli: Any) -> None:
    page = opened("gpt2 gemma-2-9b")
    page.click("text=The same in words")
    said = cli("compare", "gpt2", "gemma-2-9b", "--json").models
    shown = page.eval_on_selector_all("#features td", "e => e.map(x => [x.dataset.column, x.dataset.name, "
                                                      "x.innerText])")
    for column, model in (("start", said[0]), ("now", said[1]), ("goal", said[1])):
        assert {name: text for which, name, text in shown if which == column} == model["features"]


def select(page: Any, part: str) -> str:
    page.click(f"#blocks button[data-part={part}]")
    return str(page.inner_text("#part"))


def test_components_and_groups_are_the_command_lines(opened: Any, cli: Any) -> None:
    page = opened("gpt2 gemma-2-9b", "#ctx=8192&kv=bf16&w=bf16")
    c = cli("params", "gemma-2-9b", "--json").model["components"]
    shown = dict(page.eval_on_selector_all("#bars-table td[data-column=now]", "e => e.map(x => [x.dataset.name, "
                                                                              "x.dataset.exact])"))
    assert {k: int(v) for k, v in shown.items()} == {
        "token embedding": c["token_embedding"], "positions": 0, "attention": c["attention"]["total"],
        "feed-forward": c["feed_forward"]["total"], "norms": c["norms"]}
    kv = cli("kv-cache", "gemma-2-9b", "--ctx", "8192", "--dtype", "bf16", "--json").model
    cells = page.eval_on_selector_all("#groups td[data-name=group_bytes]", "e => e.map(x => x.dataset.exact)")
    assert [int(x) for x in cells] == kv["at"][0]["group_bytes"]
    assert "sliding 4,096, 21 layers" in page.inner_text("#groups")


def test_devices_are_full_where_weights_and_cache_are(opened: Any, cli: Any) -> None:
    page = opened("gpt2 gemma-2-9b", "#ctx=8192&kv=bf16&w=bf16")
    page.click("text=Devices, and the context that fills them")
    rows = dict(page.eval_on_selector_all("#devices td[data-name=reach]", "e => e.map(x => [x.dataset.column, "
                                                                          "x.dataset.exact])"))
    weights = cli("params", "gemma-2-9b", "--dtype", "bf16", "--json").model["weights_bytes"]
    for name, memory in (("rtx-4090-24gb", 24564 << 20), ("h100-80gb", 81559 << 20)):
        most = int(rows[name])
        at = cli("kv-cache", "gemma-2-9b", "--sweep", f"ctx={most},{most + 1}", "--dtype", "bf16", "--json").model["at"]
        below, above = (weights + x["kv_cache_bytes"] for x in at)
        assert below <= memory < above


def rope_numbers(page: Any) -> dict[str, str]:
    return dict(page.eval_on_selector_all("#rope-numbers td", "e => e.map(x => [x.dataset.name, x.dataset.exact])"))


def test_a_pairs_share_of_the_score_depends_on_the_distance_alone(opened: Any, cli: Any) -> None:
    page = opened("gpt2 llama-3-8b")
    (rotation,) = cli("rope", "llama-3-8b", "--json").model["rotations"]
    for pair in (0, 7, 31, 63):
        slide(page, "#pair", pair)
        frequency = rotation["pairs"][pair]["stretched_frequency"]
        seen = []
        for q, k, shift in ((10, 3, 0), (1010, 1003, 0), (10, 3, 1000), (10, 4, 0), (5, 5, 8000)):
            for box, n in (("#q-exact", q), ("#k-exact", k), ("#shift-exact", shift)):
                page.fill(box, str(n))
                page.press(box, "Enter")
            found = rope_numbers(page)
            assert float(found["frequency"]) == frequency
            assert float(found["share"]) == pytest.approx(math.cos((q - k) * frequency), abs=1e-11)
            assert float(found["wavelength"]) == rotation["pairs"][pair]["stretched_wavelength"]
            seen.append(float(found["share"]))
        assert seen[0] == pytest.approx(seen[1], abs=1e-11) == pytest.approx(seen[2], abs=1e-11)
        assert abs(seen[0] - seen[3]) > 1e-12
        assert seen[4] == pytest.approx(1, abs=1e-11)


def test_every_scheme_turns_as_the_command_line_says(opened: Any, cli: Any) -> None:
    page = opened("llama-3-8b")
    names = page.eval_on_selector_all("#way option", "e => e.map(x => x.textContent)")
    assert len(names) == 1 + 5 * 6
    slide(page, "#pair", 40)
    for n, name in enumerate(names):
        page.select_option("#way", str(n))
        method, _, target = name.partition(", at ")
        asked = [] if not target else ["--target-ctx", target.split()[0]]
        asked += [] if method.startswith("as configured") else ["--method", method]
        (said,) = cli("rope", "llama-3-8b", *asked, "--json").model["rotations"]
        found = rope_numbers(page)
        assert float(found["frequency"]) == said["pairs"][40]["stretched_frequency"]
        assert int(found["unseen"]) == said["unseen"]
        assert found["kind"] == said["pairs"][40]["kind"][0]
    every = page.eval_on_selector_all("#waves-table td[data-name=after]", "e => e.map(x => Number(x.dataset.exact))")
    assert every == [p["stretched_wavelength"] for p in said["pairs"]]


def test_the_key_is_dragged_and_a_pair_is_picked(opened: Any) -> None:
    page = opened("gpt2 llama-3-8b")
    page.locator("#score").scroll_into_view_if_needed()
    box = page.locator("#score svg").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.3, middle)
    page.mouse.down()
    first = page.input_value("#k-exact")
    page.mouse.move(box["x"] + box["width"] * 0.7, middle, steps=5)
    page.mouse.up()
    second = page.input_value("#k-exact")
    assert int(first) < int(second)
    assert float(rope_numbers(page)["share"]) == pytest.approx(math.cos(10 - int(second)), abs=1e-12)
    page.mouse.move(box["x"] + box["width"] * 0.2, middle)
    assert page.input_value("#k-exact") == second
    page.locator("#waves").scroll_into_view_if_needed()
    box = page.locator("#waves svg").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 3, box["y"] + 40)
    assert page.input_value("#pair") == "63"


def test_the_keyboard_reaches_and_moves_everything(opened: Any) -> None:
    page = opened("gpt2 llama-3-8b")
    wanted = set(page.eval_on_selector_all("main button, main input, main select, main summary, main pre",
                                           "e => e.filter(x => x.getClientRects().length).map((x, i) => "
                                           "(x.dataset.n = i, String(i)))"))
    reached = set()
    for _ in range(len(wanted) + 5):
        page.keyboard.press("Tab")
        n = page.evaluate("document.activeElement?.dataset.n ?? null")
        if n is not None:
            reached.add(n)
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert reached == wanted
    page.focus("#switch-norm")
    page.keyboard.press("Space")
    assert not page.is_checked("#switch-norm")
    page.focus("#kv-heads")
    page.keyboard.press("Home")
    assert page.text_content("#kv-heads-said").startswith("1 KV head,")
    page.keyboard.press("ArrowRight")
    assert page.text_content("#kv-heads-said").startswith("2 KV heads,")
    page.focus("#blocks [data-column=now] button[data-part=mlp]")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.dataset.part") == "mlp"
    assert "Gated feed-forward" in page.inner_text("#part")


def test_a_view_is_in_its_address(opened: Any, pages: Any) -> None:
    page = opened("gpt2 llama-3-8b")
    page.click("#switch-gate")
    slide(page, "#kv-heads", 2)
    page.fill("#ctx", "12345")
    page.press("#ctx", "Enter")
    page.select_option("#kv-dtype", "q8_0")
    page.click("#blocks button[data-part=mlp]")
    slide(page, "#pair", 9)
    page.select_option("#way", "3")
    page.uncheck("#loaded")
    text = "main"
    seen, address = page.inner_text(text), page.evaluate("location.hash")
    again = opened("gpt2 llama-3-8b", address)
    assert again.inner_text(text) == seen
    assert again.evaluate("location.hash") == address
    page.evaluate("location.hash = '#ctx=77'")
    page.wait_for_function("document.getElementById('ctx').value === '77'")
    assert page.is_checked("#switch-gate")


@pytest.mark.parametrize("address", [
    "#on=nothing.such&share=7&ctx=-1&batch=1e9&kv=<b>&w=zz&part=__proto__&turn=99&way=99&pair=1e3&q=x&k=&shift=NaN",
    "#%E0%A4%A", "#on=goal&share=999999999999999999", "#ctx=99999999999999999999&batch=0",
])
def test_an_address_that_nobody_wrote_changes_nothing_it_may_not(opened: Any, cli: Any, address: str) -> None:
    page = opened("gpt2 llama-3-8b", address)
    agrees(page, cli)
    assert page.evaluate("document.querySelectorAll('main b').length") == 0


def test_a_page_that_was_changed_says_so(chromium: Any, pages: Any, tmp_path: Path) -> None:
    """A number that is not llamactl's own is found when the page opens."""
    text = Path(pages("gpt2 llama-3-8b").removeprefix("file://")).read_text()
    assert text.count('"hidden=4096"')
    head, data, tail = text.partition('id="data">')[0], text.partition('id="data">')[2].partition("</script>")[0], ""
    body = json.loads(data)
    table = body["worlds"][0]["cache"]["values"]
    for groups in table.values():
        groups[0]["bytes"]["bf16"] += 1
    tail = text.partition('id="data">')[2].partition("</script>")[2]
    (tmp_path / "x.html").write_text(f'{head}id="data">{json.dumps(body)}</script>{tail}')
    page = chromium.new_page()
    page.goto((tmp_path / "x.html").as_uri())
    assert page.evaluate("document.documentElement.dataset.ready") == "no"
    assert "do not trust this page" in page.inner_text("#proof")
    page.close()


def test_an_odd_number_of_weights_fills_whole_blocks(chromium: Any, tmp_path: Path) -> None:
    """Two weights in int4 share a byte, and the last one of an odd number has one to itself."""
    odd = load("gpt2", edits=["hidden=767"])
    assert odd.model.total() % 2 == 1
    (tmp_path / "x.html").write_bytes(made([odd])[1])
    page = chromium.new_page()
    page.goto((tmp_path / "x.html").as_uri() + "#w=int4")
    assert page.evaluate("document.documentElement.dataset.ready") == "yes"
    assert numbers(page)["now"]["weights_bytes"] == str(odd.model.total() // 2 + 1)
    page.close()


@pytest.mark.parametrize("models", ["gpt2 llama-3-8b", "gpt2 deepseek-v3", "gemma-3-4b"])
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_is_wider_than_the_screen(opened: Any, models: str, width: int) -> None:
    page = opened(models, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_both_colour_schemes_can_be_read(opened: Any) -> None:
    """Every text has a contrast of 4.5 or more with what is behind it (WCAG 2.2, 1.4.3)."""
    seen = []
    for scheme in ("light", "dark"):
        page = opened("gpt2 llama-3-8b", color_scheme=scheme)
        assert page.evaluate(CONTRAST) == [], scheme
        seen.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert seen[0] != seen[1]


CONTRAST = """() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92
    : ((v + 0.055) / 1.055) ** 2.4).reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; }
    return [255, 255, 255]; };
  return [...document.querySelectorAll('main *')].filter((e) => !e.closest('svg') && e.getClientRects().length
    && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())).map((e) => {
      const a = light(parse(getComputedStyle(e).color)), b = light(behind(e));
      return [e.tagName + '.' + e.className + ' ' + e.textContent.slice(0, 30),
        (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]; }).filter(([, ratio]) => ratio < 4.5); }"""


def test_what_is_printed_is_the_answer(opened: Any) -> None:
    page = opened("gpt2 llama-3-8b")
    page.emulate_media(media="print", color_scheme="dark")
    assert not page.is_visible("#switches")
    assert page.is_visible("#numbers")
    assert page.is_visible("#devices")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf().startswith(b"%PDF")


def test_every_picture_and_control_has_words(opened: Any) -> None:
    page = opened("gpt2 deepseek-v3")
    pictures = page.eval_on_selector_all("svg, [role=img]", """e => e.map((x) => x.getAttribute('role') === 'img' &&
        (x.getAttribute('aria-label') || (x.getAttribute('aria-labelledby') ?? '').split(' ').map((i) =>
        document.getElementById(i)?.textContent).join(' ')).length > 5)""")
    assert len(pictures) >= 7
    assert all(pictures)
    nameless = page.eval_on_selector_all("main input, main select, main button", """e => e.filter((x) =>
        !(x.labels?.length || x.getAttribute('aria-label') || x.textContent.trim())).map((x) => x.id)""")
    assert nameless == ["all-on"] if page.is_hidden("#all-on") else nameless == []
    doubled = page.evaluate("[...document.querySelectorAll('[id]')].map((x) => x.id).filter((x, i, all) => "
                            "all.indexOf(x) !== i)")
    assert doubled == []


def test_no_name_becomes_markup(chromium: Any, tmp_path: Path) -> None:
    """A folder may be called anything; its name is text on the page and in its commands."""
    folder = tmp_path / "a<img src=x onerror=alert(1)> '$(x)' \u202e&amp;"
    folder.mkdir()
    source = load("llama-3-8b")
    assert source.source.config
    (folder / "config.json").write_text(json.dumps(dict(source.source.config)))
    path = tmp_path / "x.html"
    path.write_bytes(made([load("gpt2"), load(str(folder))])[1])
    page = chromium.new_page()
    wrong: list[str] = []
    page.on("dialog", lambda d: (wrong.append("dialog"), d.dismiss()))
    page.on("console", lambda m: wrong.append(m.text))
    page.goto(path.as_uri())
    assert page.evaluate("document.querySelectorAll('main img').length") == 0
    assert "a<img src=x onerror=alert(1)> '$(x)' \\u202e&amp;" in page.inner_text("h1")
    assert wrong == []
    page.close()
