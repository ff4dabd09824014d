"""`llamactl lab` as its users meet it: the list, names, formats, exit codes, files, trained weights."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from llamactl import lab
from llamactl.analysis.experiment import Claim, Outcome, found

NAMES = [c.name for c in lab.cards()]


def run_two(cli: Any, *args: Any) -> Any:
    return cli("lab", "run", "swiglu", "gqa", *args)


# --- the list


def test_the_list(cli: Any) -> None:
    got = cli("lab", "list")
    assert (got.code, got.err) == (0, "")
    assert [line.split()[0] for line in got.out.splitlines()[1:]] == NAMES
    assert "arXiv:2104.09864" in got.out
    assert cli("lab").out == got.out
    assert cli("lab", "list", "-q").out.split() == NAMES
    body = cli("lab", "list", "--json").json()
    assert (body["command"], body["model"], body["inputs"]) == ("lab", None, {"action": "list"})
    assert [x["name"] for x in body["result"]["experiments"]] == NAMES
    Draft202012Validator(cli("schema", "lab").json()).validate(body)


@pytest.mark.parametrize(("args", "said"), [
    (("run",), "try: llamactl lab list"), (("run", "swigul"), "did you mean 'swiglu'?"),
    (("swiglu",), "lab run swiglu"), (("rnu",), "neither list nor run"), (("list", "gqa"), "lab run gqa"),
    (("list", "foo"), "help: try: llamactl lab list\n"), (("list", "Swigul"), "help: try: llamactl lab run swiglu\n"),
    (("runn", "swiglu"), "help: did you mean 'run'?\n"), (("List",), "help: did you mean 'list'?\n"),
    (("all",), "help: try: llamactl lab run all\n"), (("zzz",), "help: try: llamactl lab list\n"),
    (("run", "gqa", "--device", "gpu"), "--device"), (("run", "gqa", "--report", "x.txt"), ".html"),
    (("run", "gqa", "--steps", "0"), "--steps"),
    (("run", "gqa", "--seed", "-1"), "--seed"), (("run", "rope", "--json"), "did you mean"),
])
def test_what_is_not_understood(cli: Any, args: tuple[str, ...], said: str) -> None:
    got = cli("lab", *args)
    assert got.code == 2
    assert len(got.err.splitlines()) <= 2
    assert got.err.startswith("error[")
    assert said in got.err or said in got.out
    if "--json" in args:
        assert got.json()["error"]["exit_code"] == 2
    else:
        assert got.out == ""


# --- a run


def test_json(cli: Any) -> None:
    got = run_two(cli, "--json", "--seed", "3")
    body = got.json()
    assert (got.code, got.err) == (0, "")
    Draft202012Validator(cli("schema", "lab").json()).validate(body)
    assert body["inputs"] == {"action": "run", "names": ["swiglu", "gqa"], "model": [], "text": None, "bytes": False,
                              "seed": 3, "steps": None, "device": "cpu", "threads": None}
    r = body["result"]
    assert (r["verdict"], r["seed"], r["checkpoints"]) == ("holds", 3, [])
    assert r["device"].startswith("cpu, ")
    assert [e["name"] for e in r["experiments"]] == ["swiglu", "gqa"]
    values = {f["what"]: f for e in r["experiments"] for c in e["claims"] for f in c["findings"]}
    assert values["Swish(2)"]["value"] == pytest.approx(1.7616, abs=5e-5)
    assert values["1 KV head, 8,192 tokens in fp16"]["value"] == 134_217_728
    skipped = [f for f in values.values() if f["verdict"] == "skipped"]
    assert {f["note"] for f in skipped} == {"needs trained weights: --model CKPT"}
    assert all(e["seconds"] > 0 for e in r["experiments"])


def test_every_format(cli: Any) -> None:
    plain, md, table = (run_two(cli, "--format", f) for f in ("plain", "md", "table"))
    for got in (plain, md, table):
        assert (got.code, got.err) == (0, "")
        for word in ("1.7616", "11,008", "16,384", "9,280", "134,217,728 bytes", "18,432", "skipped",
                     "arXiv:2305.13245", "needs trained weights", "Swish(x) = x / (1 + e^-x)"):
            assert word.replace("|", "\\|") in got.out, word
    assert plain.out.isascii()
    assert "took" not in plain.out
    assert "took" in run_two(cli, "-v").out
    rows = list(csv.DictReader(io.StringIO(run_two(cli, "--format", "csv").out)))
    by = {(r["what"], r["of"]): r for r in rows}
    assert by["1 KV head", "d 64, 8 heads of 8"]["value"] == "9216"
    assert by["1 KV head", "d 64, 8 heads of 8"]["expected"] == "9216"
    assert {r["verdict"] for r in rows} == {"holds", "skipped"}
    assert run_two(cli, "-q").out == "holds\n"


def test_the_page(cli: Any, tmp_path: Path) -> None:
    args = ("lab", "run", "blocks", "swiglu", "--steps", "2", "--report", "lab.html")
    assert cli(*args).code == 0
    html = (tmp_path / "lab.html").read_text()
    assert html.startswith("<!DOCTYPE html>")
    assert len(re.findall('<polyline class="line', html)) == 2
    for word in ("2017", "2024", "823,808", "1.7616", "block 0: mlp.gate", "HAMLET.",
                 "<span class=\"good\">holds</span>"):
        assert word in html, word
    assert "<script" not in html
    assert "http:" not in html.replace("http-equiv", "")
    assert "https:" not in html
    again = cli(*args)
    assert (again.code, again.out) == (5, "")
    assert again.err.startswith("error[exists]: lab.html: ")
    assert cli(*args, "--force").code == 0
    gone = cli("lab", "run", "swiglu", "--report", "no/such/lab.html")
    assert (gone.code, gone.out) == (5, "")
    assert gone.err.startswith("error[not-written]: no/such: ")


def test_a_claim_that_does_not_hold_is_exit_1(cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from llamactl.lab import swiglu

    bad = "one\x1b[31m</td><script>alert(1)</script>"
    monkeypatch.setattr(swiglu, "run", lambda given: Outcome(claims=(Claim(claim=bad, formula=bad, findings=(
        found("x", 2.0, of="y", expected=1.0), *(found(f"{bad} {n}", float("nan"), of=bad, expected=1.0, note=bad)
                                                 for n in range(3)))),)))
    got = cli("lab", "run", "swiglu", "--report", "r.html")
    assert got.code == 1
    assert got.err.startswith("error[lab]: does not hold here: swiglu: x; swiglu: one\\x1b[31m")
    assert got.err.rstrip().endswith("and 1 more")
    assert "\x1b" not in got.out + got.err
    assert "differs: 4 differ" in got.out
    html = (tmp_path / "r.html").read_text()
    assert "<script" not in html
    assert "\x1b" not in html
    assert '<td class="bad word">differs</td>' in html
    body = cli("lab", "run", "swiglu", "--json").json()
    assert body["result"]["verdict"] == "differs"
    assert body["result"]["experiments"][0]["claims"][0]["findings"][1]["value"] is None


def test_losses_are_the_same_bits_from_run_to_run(cli: Any) -> None:
    args = ("lab", "run", "blocks", "--steps", "2", "--threads", "1", "--json")
    a, b, c = (cli(*args, "--seed", s).json()["result"]["experiments"][0] for s in ("0", "0", "1"))
    assert a["charts"] == b["charts"]
    assert a["passages"] == b["passages"]
    assert a["charts"] != c["charts"]


def test_plain_is_ascii_whatever_a_network_writes(cli: Any) -> None:
    got = cli("lab", "run", "blocks", "--steps", "1")  # after one step: any byte
    assert got.code == 0
    assert got.out.isascii()


def test_another_text(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("The quick brown fox jumps over the lazy dog. " * 500)
    got = cli("lab", "run", "blocks", "--steps", "1", "--text", "t.txt", "--json")
    (e,) = got.json()["result"]["experiments"]
    assert any(f["of"].startswith("t.txt, last tenth") for c in e["claims"] for f in c["findings"])
    (tmp_path / "short.txt").write_text("short")
    # before anything is opened or run
    short = cli("lab", "run", "swiglu", "blocks", "--model", "none", "--text", "short.txt")
    assert (short.code, short.out) == (3, "")
    assert short.err.startswith("error[text-short]: short.txt: 5 bytes")
    idle = cli("lab", "run", "swiglu", "--text", "short.txt")  # which learns nothing of it
    assert (idle.code, idle.out) == (2, "")
    assert "--text is for blocks and for checkpoints" in idle.err
    assert cli("lab", "run", "blocks", "--text", "none.txt").code == 4


# --- trained weights


@pytest.fixture
def trained(tmp_path: Path, folder: Any, tiny: Any, speaker: Any) -> Path:
    """A folder with drawn weights and a tokenizer of printable bytes."""
    import torch
    from safetensors.torch import save_file

    path: Path = folder(name="trained")
    draw = torch.Generator().manual_seed(7)
    save_file({k: torch.randn(shape, generator=draw) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)
               for k, (_, shape) in tiny.tensors(tiny.config).items()}, path / "model.safetensors", {"format": "pt"})
    (path / "tokenizer.json").write_text(json.dumps(speaker.tokenizer(vocab=speaker.alphabet()[32:127])))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("It was the best of times, it was the worst of times, it was the age of wisdom. " * 3)
    return file


def findings(got: Any) -> list[dict[str, Any]]:
    return [f for e in got.json()["result"]["experiments"] for c in e["claims"] for f in c["findings"]]


def test_claims_about_trained_weights_are_measured_on_them(cli: Any, trained: Path, text: Path) -> None:
    got = cli("lab", "run", "gqa", "shift", "rope-identity", "swiglu", "--model", trained, "--text", text, "--json")
    body = got.json()
    assert body["model"]["id"] == "trained"
    assert body["result"]["checkpoints"] == ["trained"]
    assert body["warnings"] == []
    mine = {f["what"]: f for f in findings(got) if f["of"].startswith("trained")}
    assert {"logits less the copy's, largest", "spread in the first layer: median",
            "500 further on: change of the loss"} <= set(mine)
    assert mine["logits less the copy's, largest"]["value"] < 1e-4
    assert mine["500 further on: change of the loss"]["verdict"] == "holds"
    assert mine["spread in the first layer: median"]["verdict"] == "holds"
    # what they are not is skipped, and said
    assert [f["of"] for f in findings(got) if f["note"] == "needs trained weights: --model CKPT"] == [
        "a checkpoint with learned positions"] * 2


def test_without_a_tokenizer_losses_are_not_judged(cli: Any, trained: Path) -> None:
    (trained / "tokenizer.json").unlink()
    got = cli("lab", "run", "swiglu", "gqa", "--model", trained, "--json")
    assert got.code == 0
    assert [w["code"] for w in got.json()["warnings"]] == ["no-tokenizer"]
    mine = [f for f in findings(got) if f["of"] == "trained"]
    assert [f["verdict"] for f in mine] == ["skipped", "holds", "skipped"]
    assert {f["note"] for f in mine if f["verdict"] == "skipped"} == {
        "the tokens are made up, for want of a tokenizer: a loss on them says nothing of the weights"}
    plain = cli("lab", "run", "swiglu", "--model", trained)
    assert plain.err.startswith("warning[no-tokenizer]: trained: ")


def test_a_model_of_bytes(cli: Any, folder: Any, tiny: Any, text: Path) -> None:
    said = {**tiny.config, "vocab_size": 256, "hidden_act": "silu"}
    path = folder(said, name="bytes", tensors=tiny.tensors(said))  # every weight is 0, so every guess is even
    args = ("lab", "run", "gqa", "--model", path, "--text", text, "--json")
    got = cli(*args, "--bytes")
    assert got.json()["warnings"] == []
    loss = next(f for f in findings(got) if f["what"] == "loss")
    assert (loss["of"], loss["value"]) == ("bytes", pytest.approx(5.545, abs=1e-3))
    (warning,) = cli(*args).json()["warnings"]
    assert warning["message"].endswith("; --text cannot be used for it; where they are bytes, --bytes says so")


def test_a_larger_vocabulary_is_never_read_as_bytes(cli: Any, folder: Any, tiny: Any) -> None:
    said = {**tiny.config, "vocab_size": 300}
    path = folder(said, name="bytes", tensors=tiny.tensors(said))
    (warning,) = cli("lab", "run", "gqa", "--model", path, "--bytes", "--json").json()["warnings"]
    assert warning["code"] == "no-tokenizer"
    assert warning["message"].endswith("skipped; --bytes cannot be used for it")


def test_a_checkpoint_given_twice_is_refused(cli: Any, trained: Path, text: Path) -> None:
    got = cli("lab", "run", "gqa", "--model", trained, "--model", f"{trained}/../{trained.name}")
    assert (got.code, got.out) == (2, "")
    assert "the same checkpoint twice" in got.err


def test_weights_that_cannot_read_the_text_are_not_judged(cli: Any, trained: Path, text: Path) -> None:
    """Drawn weights do worse than a guess."""
    got = cli("lab", "run", "swiglu", "gqa", "--model", trained, "--text", text, "--json")
    notes = [f["note"] for f in findings(got) if f["verdict"] == "skipped"]
    assert len(notes) == 2
    assert set(notes) == {"its loss on this text is above that of a guess, ln(vocabulary): either it cannot read these "
                          "tokens, or weights or arithmetic are wrong"}


def test_a_checkpoint_that_is_not_there(cli: Any, tmp_path: Path) -> None:
    for ref, code in ((tmp_path / "none", 4), ("llama-3-8b", 4)):
        got = cli("lab", "run", "gqa", "--model", ref)
        assert (got.code, got.out) == (code, "")
        assert got.err.startswith("error[")


def test_a_model_that_the_network_does_not_run_is_refused_at_once(cli: Any, folder: Any, tiny: Any) -> None:
    golden = Path(__file__).parents[1] / "golden" / "mamba"
    header = json.loads((golden / "header.json").read_text())["tensors"]
    path = folder((golden / "config.json").read_bytes(), tensors={k: ("F32", t["shape"]) for k, t in header.items()})
    got = cli("lab", "run", "all", "--model", path)
    assert (got.code, got.out) == (3, "")
    assert got.err.startswith("error[not-runnable]: model: the network does not compute ")


def test_an_error_says_which_checkpoint_it_is_of(cli: Any, folder: Any, tiny: Any, trained: Path, text: Path) -> None:
    import torch
    from safetensors.torch import save_file

    path: Path = folder(name="broken")
    save_file({k: torch.full(shape, float("nan")) for k, (_, shape) in tiny.tensors(tiny.config).items()},
              path / "model.safetensors", {"format": "pt"})
    for name in ("norm", "gqa", "shift"):
        got = cli("lab", "run", name, "--model", trained, "--model", path, "--text", text)
        assert (got.code, got.out) == (3, "")
        assert "error[not-finite]: broken: " in got.err
    (trained.parent / "empty.txt").write_text("")
    got = cli("lab", "run", "gqa", "--model", trained, "--text", "empty.txt")
    assert got.err.startswith("error[text-short]: trained: the text has ")
    assert got.code == 3


def test_checkpoints_of_one_name_are_told_apart(cli: Any, trained: Path, text: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(trained, tmp_path / name / "glass")
    args = ("lab", "run", "gqa", "--text", text, "--json", "--model", tmp_path / "a" / "glass")
    got = cli(*args, "--model", "b/glass", "--model", trained)
    assert got.json()["result"]["checkpoints"] == ["a/glass", "b/glass", "trained"]
    assert {"a/glass", "b/glass"} <= {f["of"] for f in findings(got)}
    assert cli(*args).json()["result"]["checkpoints"] == ["glass"]


def test_without_torch_it_is_one_line(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamactl.cli import located

    monkeypatch.setattr(located, "find_spec", lambda name: None)
    got = cli("lab", "run", "gqa")
    assert (got.code, got.out) == (4, "")
    assert got.err == ("error[extra-missing]: the lab needs torch, which is not installed\n"
                       "help: pip install 'llamactl[generate]'\n")
    assert cli("lab", "list").code == 0


def test_a_new_file_is_a_new_experiment(cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One file in the folder, and nothing else."""
    room = tmp_path / "room"
    room.mkdir()
    for file in Path(lab.__file__).parent.iterdir():
        if file.is_file():
            shutil.copy(file, room)
    (room / "is_one_one.py").write_text(
        '"""Is one one?\n\nSource: Peano, 1889.\n"""\n'
        "from llamactl.analysis.experiment import Claim, Outcome, found\n"
        "def run(given):\n"
        "    return Outcome(claims=(Claim(claim='1 = 1', formula='x = x', findings=(\n"
        "        found('one', 1, of='one', expected=1),)),))\n")
    monkeypatch.setattr(lab, "__file__", str(room / "__init__.py"))
    monkeypatch.setattr(lab, "__path__", [str(room)])
    lab.cards.cache_clear()
    try:
        assert "is-one-one" in cli("lab", "list").out
        got = cli("lab", "run", "is-one-one", "-q", "--debug")
        assert (got.out, got.err, got.code) == ("holds\n", "", 0)
    finally:
        lab.cards.cache_clear()
