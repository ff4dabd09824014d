"""`llamactl verify --selftest` as its users meet it: formats, streams, exit codes, tokens."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import save_file

from llamactl.render import document, render
from llamactl.spec.mistakes import hypotheses
from llamactl.verify import planted, search

EDITS = ("rope_pairs=adjacent", "rope_rows=both:adjacent>half", "window=64", "activation=gelu", "norm_weight=final")


@pytest.fixture
def trained(tmp_path: Path, tiny: Any, speaker: Any) -> Callable[..., Path]:
    """trained(**config): a folder with random weights that are sure of something, and a tokenizer of bytes."""

    def make(**config: Any) -> Path:
        folder = tmp_path / "trained"
        folder.mkdir()
        said = {**tiny.config, **config}
        draw = torch.Generator().manual_seed(7)
        save_file({k: torch.randn(shape, generator=draw) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)
                   for k, (_, shape) in tiny.tensors(said).items()}, folder / "model.safetensors",
                  metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(said))
        (folder / "tokenizer.json").write_text(json.dumps(speaker.tokenizer(vocab=speaker.alphabet()[32:127])))
        return folder

    return make


@pytest.fixture(autouse=True)
def some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few mistakes are known, and the search fits no numbers: each test is a second."""
    def few(model: Any, *, only: Any = lambda t: True) -> Any:
        return [h for h in hypotheses(model, only=only) if h.text in EDITS or only(h.about) and h.text == "window=8"]

    monkeypatch.setattr(planted, "hypotheses", lambda model: [h for h in hypotheses(model) if h.text in EDITS])
    monkeypatch.setattr(search, "hypotheses", few)
    monkeypatch.setattr(search, "fitted", lambda *_, **__: [])


IDS = ",".join(str(7 * n % 95) for n in range(1, 33))


def test_json(cli: Any, trained: Any) -> None:
    got = cli("verify", trained(), "--selftest", "--tokens", IDS, "--json")
    body = got.json()
    assert (got.code, got.err) == (0, "")
    Draft202012Validator(cli("schema", "verify").json()).validate(body)
    assert (body["command"], body["inputs"]["selftest"], body["inputs"]["tokens"]) == ("verify", True, IDS)
    r = body["result"]
    assert "verdict" not in r
    assert (r["tokens"], r["text"], r["check_seconds"]) == (32, "the given ids", 60)
    rows = {(x["edit"], x["scope"]): x for x in r["planted"]}
    assert set(rows) == {(e, "all layers") for e in EDITS[:4]} | {(e, "layer 1") for e in EDITS[:4]} | {
        (EDITS[4], "model")}
    alike = rows[EDITS[0], "all layers"]
    assert (alike["named"], alike["equivalent"], alike["seen"], alike["tokens"]) == ("equivalent", [EDITS[1]], True, 2)
    assert rows["activation=gelu", "layer 1"]["tokens"] == 1
    hidden = {(b["edit"], b["scope"]): b["shows"] for b in r["blind_spots"]}
    assert hidden == dict.fromkeys([("window=64", "all layers"), ("window=64", "layer 1")],
                                   "a text of 65 tokens or more")
    assert r["totals"] == {"planted": 9, "seen": 7, "named": 3, "equivalent": 4, "not_named": 0, "not_finite": 0,
                           "no_op": 2, "cannot_run": 0, "most_tokens": 2}
    assert (r["checked"], r["checked_named"], r["missed"]) == (7, 7, [])


def test_the_answer_in_every_format(cli: Any, trained: Any) -> None:
    args = ("verify", trained(), "--selftest", "--tokens", IDS)
    plain, md, table = (cli(*args, "--format", f) for f in ("plain", "md", "table"))
    for got in (plain, md, table):
        assert (got.code, got.err) == (0, "")
        for word in ("7 of 9 mistakes", "blind spots", "window=64", "a text of 65 tokens or more", "7 named",
                     "rope_pairs=adjacent = rope_rows=both:adjacent"):
            assert word in got.out
    assert plain.out.isascii()
    assert "all layers, layer 1" in plain.out
    assert plain.out.count(EDITS[1]) == 1  # one group for the whole model and for the layer
    assert "all of them" not in plain.out
    long = cli(*args, "-v").out
    assert "all of them" in long
    assert "rotate together" in long or "RoPE turns" in long
    rows = list(csv.DictReader(io.StringIO(cli(*args, "--format", "csv").out)))
    assert [x["named"] for x in rows].count("no-op") == 2
    assert {x["shows"] for x in rows} == {"", "a text of 65 tokens or more"}
    assert next(x for x in rows if x["edit"] == EDITS[0])["equivalent"] == EDITS[1]
    assert cli(*args, "-q").out == "7\n"


def test_the_probe(cli: Any, trained: Any, tmp_path: Path) -> None:
    folder = trained(max_position_embeddings=512)
    r = cli("verify", folder, "--selftest", "--json").json()["result"]
    assert (r["tokens"], r["text"]) == (128, "a passage that comes with llamactl")
    assert r["blind_spots"] == []  # 128 tokens are past a window of 64
    (tmp_path / "a.txt").write_text("It was the best of times, it was the worst of times.")
    r = cli("verify", folder, "--selftest", "--text", tmp_path / "a.txt", "--json").json()["result"]
    assert (r["tokens"], r["text"]) == (52, str(tmp_path / "a.txt"))


def test_a_mistake_that_is_not_found(cli: Any, trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search.Search, "solve", lambda *_, **__: [])
    folder = trained()
    args = ("verify", folder, "--selftest", "--tokens", IDS)
    got = cli(*args)
    assert got.code == 1
    assert got.err.startswith("error[selftest]: 7 of 7 mistakes that have a name were not found, the first of them ")
    assert got.err.count("\n") == 1
    assert "the search found nothing" in got.out
    body = cli(*args, "--json")
    assert (body.code, len(body.json()["result"]["missed"])) == (1, 7)


def test_time_to_search(cli: Any, trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: Any, *_: Any, **__: Any) -> list[Any]:
        self.stopped = True
        return []

    monkeypatch.setattr(search.Search, "solve", late)
    got = cli("verify", trained(), "--selftest", "--tokens", IDS, "--seconds", "5")
    assert got.code == 0
    assert "none of them within 5 s: --seconds gives more time" in got.out


@pytest.mark.parametrize(("args", "code", "said"), [
    (("--tokens", "5"), 2, "error[text-too-short]"), (("--tokens", "5,2000"), 3, "2000"),
    (("--reference", "transformers"), 2, "leave out --reference"), (("--report", "a.html"), 2, "--report"),
    (("--junit", "a.xml"), 2, "--junit"), (("--annotate",), 2, "--annotate"), (("--accept", "gelu"), 2, "--accept"),
    (("--text", "none.txt"), 4, "none.txt"),
])
def test_what_is_refused(cli: Any, trained: Any, args: tuple[str, ...], code: int, said: str) -> None:
    got = cli("verify", trained(), "--selftest", *args)
    assert got.out == ""
    assert said in got.err
    assert got.code == code
    assert got.err.count("error[") == 1


def test_the_view_shows_what_fits_and_the_rest_on_demand() -> None:
    from llamactl.analysis.selftest import Planted, SelftestReport, totals
    from llamactl.analysis.verification import Floor

    rows = [Planted(edit=f"a={n}{side}", scope="model", words="w", named="equivalent", seen=True, max_abs_dlogit=1.0,
                    max_kl=0.5, tokens=3, equivalent=(f"a={n}{'y' if side == 'x' else 'x'}",))
            for n in range(15) for side in "xy"]
    floor = Floor(path="p", max_abs_dlogit=1e-6, max_kl=0.0, times=16.0, backstop=1e-6, limit=1.6e-5)
    r = SelftestReport(id="m", family="llama", text="t", tokens=9, floor=floor, totals=totals(rows),
                       planted=tuple(rows), blind_spots=(), check_seconds=1.0, checked=0, checked_named=0, missed=())
    short, long = (render(document("verify", [r], verbose=v), "plain") for v in (False, True))
    assert "a=11x = a=11y" in short
    assert "a=12x = a=12y" not in short
    assert "and 3 more; -v and --json list them all" in short
    assert "a=14x = a=14y" in long
    assert "more; -v" not in long
    assert "blind spots" not in short
