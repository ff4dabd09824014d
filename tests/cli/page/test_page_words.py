"""What a page of `explore` says: formulas as the model has them, and no sentence that another model makes false."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llamactl.api import load
from llamactl.cli.exploring import made
from llamactl.errors import InputRefused

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
GOLDEN = Path(__file__).resolve().parents[2] / "golden"
HYBRID = str(GOLDEN / "nemotron_h")


def chosen(page: Any, part: str) -> str:
    page.click(f"#blocks button[data-part={part}]")
    return str(page.inner_text("#part"))


def test_formulas_stand_as_this_model_has_them(opened: Any) -> None:
    page = opened("gemma-2-27b")
    assert "softmax(50 tanh(0.0833333 q k^T / 50)) v; query head h reads KV head h // share" in chosen(page, "attn")
    assert "x = 67.8823 E[token]" in chosen(page, "embed")
    assert "logits = 30 tanh(E x / 30)" in chosen(page, "head")
    assert "softmax([q k^T / sqrt(d_head), sink])[:-1] v;" in chosen(opened("gpt-oss-20b"), "attn")


@pytest.mark.parametrize(("name", "own"), [("gpt2", {"learned"}), ("llama-4-scout", {"rope", "moe"}),
                                           ("deepseek-v3", {"mla"}), ("transformer-base", {"sinusoidal"})])
def test_no_part_has_a_gap_in_its_formula(opened: Any, name: str, own: set[str]) -> None:
    page = opened(name)
    kinds = page.evaluate("""() => Object.keys(JSON.parse(document.getElementById("data").textContent).texts)""")
    assert own <= set(kinds)
    for part in page.eval_on_selector_all("#blocks button", "e => e.map(x => x.dataset.part)"):
        assert "{}" not in chosen(page, part)
        assert "undefined" not in page.inner_text("#part")


@pytest.mark.parametrize("width", [1280, 360])
def test_branches_side_by_side_are_drawn_so(opened: Any, width: int) -> None:
    """On a phone below each other, and said to be at once. One norm for both stands before both."""
    for name, shared in (("falcon-7b", True), ("falcon-40b", False), ("phi-2", True)):
        page = opened(name, viewport={"width": width, "height": 900})
        assert page.locator(".branch .two").count() == 1
        assert page.locator(".two button[data-part=attn_norm]").count() == (0 if shared else 1)
        assert page.is_visible("text=beside it, on the same input") == (width == 360)
        said = chosen(page, "attn_norm")
        assert ("before both" in said) == shared
        assert ("before attention" in said) != shared
    page = opened("llama-3-8b", viewport={"width": width, "height": 900})
    assert page.locator(".two").count() == 0
    assert "before attention" in chosen(page, "attn_norm")


def test_windows_are_told_where_bytes_are(opened: Any) -> None:
    page = opened("phi-3-mini-4k", "#ctx=4096&kv=bf16")
    assert page.inner_text("#read li:first-child") == (
        "Cache at 4k tokens: every query head keeps its own K and V; 32 of 32 layers keep 2,047 tokens at most.")
    page = opened("gemma-2-27b")
    assert "188,416 elements a token, until windows are full" in chosen(page, "attn")
    assert "until windows are full" not in chosen(opened("llama-3-8b"), "attn")


def test_angles_of_a_stretched_model_are_those_of_unstretched_training(opened: Any) -> None:
    page = opened("llama-3.1-8b")
    assert "Pairs that go further than in unstretched training" in page.inner_text("#rope-numbers")
    assert "Crosses: pairs that go further than they did in unstretched training." in page.inner_text("#waves-said")
    assert "unstretched 8,192" in page.inner_text("#waves")
    assert "6 blended" in page.inner_text("#waves-said")
    page.select_option("#way", label="ntk, at 16k tokens")
    assert "62 slowed less, 1 slowed" in page.inner_text("#waves-said")
    page = opened("llama-3-8b")
    assert "Crosses: pairs that go further than they did in training." in page.inner_text("#waves-said")
    assert "trained 8,192" in page.inner_text("#waves")


def test_a_state_is_kept_with_the_weights_or_without(opened: Any, cli: Any) -> None:
    page = opened(HYBRID, "#ctx=1000&batch=8&kv=bf16&loaded=0")
    at = cli("kv-cache", HYBRID, "--ctx", "1000", "--batch", "8", "--dtype", "bf16", "--json").model["at"][0]
    assert at["state_bytes"] > 0
    assert f"At 1,000 tokens: {at['kv_cache_bytes'] + at['state_bytes']:,} bytes," in page.inner_text("#cache-said")
    assert "Weights, cache and state" in page.inner_text("#numbers")
    assert "Weights and cache" in opened("gpt2").inner_text("#numbers")


def test_what_the_commands_warn_of_stands_on_the_page(opened: Any) -> None:
    page = opened(str(GOLDEN / "mllama"))
    (words,) = [w for code, w in load(str(GOLDEN / "mllama")).model.notes if code == "picture-cache"]
    assert f"mllama: {words}." in page.inner_text("#warnings")
    assert "K and V of pictures" in chosen(page, "attn")


def test_ten_parts_have_ten_looks(opened: Any) -> None:
    page = opened("gpt2")
    looks = page.evaluate("""() => [...Array(10).keys()].map((n) => {
      const e = document.createElement("i"); e.className = `key c${n}`; document.body.append(e);
      const s = getComputedStyle(e); return s.backgroundColor + s.backgroundImage; })""")
    assert len(set(looks)) == 10


def test_a_ratio_is_rounded_once(opened: Any, cli: Any) -> None:
    where = ("--ctx", "915131523", "--batch", "44297", "--dtype", "q8_0")
    page = opened("llama-4-scout", "#ctx=915131523&batch=44297&kv=q8_0")
    at = cli("kv-cache", "llama-4-scout", *where, "--json").model["at"][0]
    shown = page.get_attribute("#numbers td[data-name=full_heads_ratio][data-column=now]", "data-exact")
    assert float(shown) == at["full_heads_bytes"] / at["kv_cache_bytes"] == 5.0


def test_bases_with_a_fraction_and_weights_in_fp64(opened: Any, tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "llama" / "config.json").read_text())
    config.update(rope_theta=10000.12345, torch_dtype="float64", dtype="float64")
    config.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = opened(str(tmp_path))
    assert "base 10,000.12345" in page.inner_text("#turn")


def test_more_parameters_than_a_page_can_count_are_refused() -> None:
    huge = [f"{k}={1 << 20}" for k in ("vocab", "ffn")] + ["n_layers=4096", "hidden=1048576"]
    with pytest.raises(InputRefused) as e:
        made([load("llama-3-8b", edits=huge)])
    assert e.value.code == "too-large"
    assert "9,007,199,254,740,991" in e.value.line()


def test_one_model_has_its_drawing_and_its_part_beside_each_other(opened: Any) -> None:
    page = opened("llama-3-8b", viewport={"width": 1280, "height": 900})
    drawn, part = (page.locator(x).bounding_box() for x in ("#blocks", "#part"))
    assert part["x"] > drawn["x"] + drawn["width"] - 1
    narrow = opened("llama-3-8b", viewport={"width": 360, "height": 900})
    drawn, part = (narrow.locator(x).bounding_box() for x in ("#blocks", "#part"))
    assert drawn["width"] > 300
    assert part["y"] > drawn["y"]
