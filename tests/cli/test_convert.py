"""`llamactl convert`: what it says where, what it refuses, where it reads from and where it never writes."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

made: Any = sys.modules["llamactl_tests_checkpoints"]  # loaded by conftest.py

FORMATS = ("plain", "table", "json", "csv", "md")
MANIFEST = "llamactl-manifest.json"
EVIL = "```e\x1b[31m|<b>*[bold red]\u202ex`\n\u200by"
ERROR = Draft202012Validator(json.loads((Path(__file__).parent / "schemas" / "error.json").read_text()))
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from llamactl.__main__ import main; sys.exit(main())"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, speaker: Any) -> Path:
    """A small Llama with everything that stands beside weights."""
    folder: Path = tmp_path_factory.mktemp("source") / "tiny"
    made.llama(folder)
    (folder / "tokenizer.json").write_text(json.dumps(speaker.tokenizer(vocab=speaker.alphabet()[32:127])))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "README.md").write_text("# tiny\n")
    (folder / "LICENSE").write_text("as you like\n")
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("source") / "small-gpt2"
    made.gpt2(folder)
    return folder


def failed(got: Any, code: int, word: str, *parts: str) -> None:
    """One error line, at most one line of help, nothing on stdout."""
    assert (got.code, got.out) == (code, ""), got.err
    assert re.fullmatch(rf"error\[(?:{word})\]: [^\n]*\S\n(help: [^\n]*\S\n)?", got.err), got.err
    for part in parts:
        assert part in got.err


def harmless(text: str) -> bool:
    """No control, format or surrogate character but line ends."""
    return not [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")]


# ---- the answer


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("flags", [("--no-proof",), ("--dry-run",), ("--dry-run", "-v"), ()], ids="-".join)
def test_an_answer_is_all_there_is(cli: Any, model: Path, tmp_path: Path, flags: tuple[str, ...], format: str) -> None:
    got = cli("convert", model, tmp_path / "out", *flags, "--format", format, env={"COLUMNS": "200"})
    assert (got.code, got.err) == (0, "")
    assert got.out.endswith("\n")
    assert "\x1b" not in got.out
    if format == "json":
        assert (got.json()["command"], got.json()["warnings"]) == ("convert", [])
    elif format == "csv":
        rows = list(csv.reader(io.StringIO(got.out)))
        assert len(rows) == 22
        assert {len(r) for r in rows} == {len(rows[0])}
        assert rows[0][:6] == ["tensor", "file", "dtype", "shape", "how", "nbytes"]
        assert sum(int(r[5]) for r in rows[1:]) == 2 * 72000
    else:
        assert "72,000" in got.out
        assert got.out.isascii() is (format != "table")
        if format == "md":
            for block in re.findall(r"(?:^\|.*\n)+", got.out, re.M):
                assert len({len(re.split(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_quiet_is_the_bytes_alone(cli: Any, model: Path, tmp_path: Path) -> None:
    for n, flags in enumerate((("-q",), ("--quiet", "--json"), ("-q", "--dry-run"))):
        got = cli("convert", model, tmp_path / f"out{n}", "--no-proof", *flags)
        assert (got.code, got.err) == (0, "")
        files = {f.name: f.stat().st_size for f in (tmp_path / "out0").iterdir()}
        assert got.out == f"{sum(files.values()) - files[MANIFEST]}\n"


def test_verbose_and_the_dry_run_tell_every_tensor(cli: Any, model: Path, tmp_path: Path) -> None:
    row = r"^model\.layers\.1\.mlp\.down_proj\.weight +model\.safetensors +BF16 +64x96 "
    for n, (flags, told) in enumerate(((("-v",), True), (("--dry-run",), True), ((), False))):
        got = cli("convert", model, tmp_path / f"out{n}", "--no-proof", *flags)
        assert (re.search(row, got.out, re.M) is not None) is told


def test_the_answer_is_true(cli: Any, model: Path, tmp_path: Path) -> None:
    """Files, bytes, tensors and their sources, against what lies there and against the source's own header."""
    body = cli("convert", model, tmp_path / "out", "--to", "meta", "--json").json()
    r = body["result"]
    assert body["model"] == {"source": "local", "id": "tiny", "revision": None, "path": str(model / "config.json")}
    assert {k: r[k] for k in ("id", "path", "dry_run", "source_layout", "target_layout", "family", "parameters",
                              "digest")} == {
        "id": "tiny", "path": str(tmp_path / "out"), "dry_run": False, "source_layout": "hf", "target_layout": "meta",
        "family": "llama", "parameters": 72000, "digest": "xxh3_128"}
    files = {f["name"]: f["nbytes"] for f in r["files"]}
    assert files | {MANIFEST: (tmp_path / "out" / MANIFEST).stat().st_size} == {
        f.name: f.stat().st_size for f in (tmp_path / "out").iterdir()}
    assert r["total_bytes"] == sum(files.values())
    source = made.read(model)
    assert sorted(s for t in r["tensors"] for s in t["sources"]) == sorted(source)
    assert {t["file"] for t in r["tensors"]} == {"consolidated.00.pth"}
    for t in r["tensors"]:
        (origin,) = (source[s] for s in t["sources"])
        assert (t["dtype"], tuple(t["shape"]), t["nbytes"]) == (origin.dtype, origin.shape, len(origin.data))
        assert (t["how"] == "copy") is not bool(re.search(r"attention\.w[qk]\.", t["name"]))
        assert bool(t["ops"]) is (t["how"] != "copy")
    assert r["copied_bytes"] == sum(t["nbytes"] for t in r["tensors"] if t["how"] == "copy")
    assert (r["proof"]["exact"], r["proof"]["rounded"], r["proof"]["changed"]) == (21, 0, 0)
    assert r["proof"]["logits"] == {"tokens": 64, "max_abs_dlogit": 0.0, "max_kl": 0.0, "top1_agreement": 1.0,
                                    "loss_source": None, "loss_output": None}


def test_the_inputs_say_what_was_asked(cli: Any, model: Path, tmp_path: Path) -> None:
    args = ("--to", "lesson", "--dtype", "fp16", "--shard-size", "100kB", "--kv-heads", "4", "--untie",
            "--vocab-pad-to", "128", "--no-tokenizer", "--no-digest", "--dry-run")
    inputs = cli("convert", model, tmp_path / "out", *args, "--json").json()["inputs"]
    assert inputs == inputs | {"to": "lesson", "dtype": "F16", "shard_bytes": 100_000, "kv_heads": 4, "tie": False,
                               "vocab_pad_to": 128, "ranks": 1, "context": None, "allow_overflow": False,
                               "tokenizer": False, "dry_run": True, "proof": True, "digest": False}


@pytest.mark.parametrize("to", ["hf", "meta", "lesson", "gguf"])
def test_the_dry_run_is_the_plan_and_writes_nothing(cli: Any, model: Path, tmp_path: Path, to: str) -> None:
    (tmp_path / "beside").write_bytes(b"")
    before, source = sorted(os.listdir(tmp_path)), made.tree(model)
    plan = cli("convert", model, tmp_path / "out", "--to", to, "--dry-run", "--json").json()
    assert sorted(os.listdir(tmp_path)) == before
    done = cli("convert", model, tmp_path / "out", "--to", to, "--no-proof", "--json").json()
    for t in done["result"]["tensors"]:
        assert re.fullmatch(r"[0-9a-f]{32}", t["digest"])
        t["digest"] = None
    assert plan["result"] == {**done["result"], "dry_run": True, "digest": None}
    assert made.tree(model) == source


def test_an_output_that_was_not_checked_says_so(cli: Any, model: Path, tmp_path: Path) -> None:
    got = cli("convert", model, tmp_path / "a", "--no-proof", "--no-digest")
    assert re.search(r"^proof +none: --no-proof$", got.out, re.M)
    body = cli("convert", model, tmp_path / "b", "--no-proof", "--no-digest", "--json").json()
    assert (body["result"]["proof"], body["result"]["digest"]) == (None, None)
    manifest = json.loads((tmp_path / "a" / MANIFEST).read_text())
    assert (manifest["proof"], manifest["digest"]) == (None, None)
    assert {t["digest"] for t in manifest["tensors"]} == {None}
    checked = cli("convert", model, tmp_path / "c").out
    assert re.search(r"^read back +21 tensors the source's bit for bit$", checked, re.M)
    assert re.search(r"^logits +identical on 64 tokens in fp32$", checked, re.M)
    assert json.loads((tmp_path / "c" / MANIFEST).read_text())["proof"]["exact"] == 21


def test_a_warning_stands_on_stderr_or_in_the_json(cli: Any, tmp_path: Path) -> None:
    made.llama(tmp_path / "bare")
    args = ("convert", tmp_path / "bare", tmp_path / "out", "--to", "gguf", "--dry-run")
    for format in ("plain", "csv", "md", "table"):
        got = cli(*args, "--format", format)
        assert got.code == 0
        assert re.fullmatch(r"warning\[tokenizer-none\]: [^\n]+\n", got.err)
        assert "warning[" not in got.out
    assert cli(*args, "-q").err.count("\n") == 1
    got = cli(*args, "--json")
    assert got.err == ""
    assert [w["code"] for w in got.json()["warnings"]] == ["tokenizer-none"]


def test_every_answer_follows_the_schema(cli: Any, model: Path, gpt2: Path, tmp_path: Path) -> None:
    check = Draft202012Validator(cli("schema", "convert").json())
    (tmp_path / "t.txt").write_text("some words to measure a loss on")
    for n, args in enumerate((
            (model, "--dry-run"), (model, "--no-proof"), (model, "--no-proof", "--no-digest"), (model, "--to", "meta"),
            (model, "--to", "gguf", "--dtype", "q8_0"), (gpt2, "--to", "nanogpt"), (gpt2, "--to", "lesson"),
            (model, "--kv-heads", "1", "--text", str(tmp_path / "t.txt")))):
        body = cli("convert", args[0], tmp_path / f"out{n}", *args[1:], "--json")
        assert body.code == 0
        check.validate(body.json())


@pytest.mark.parametrize("columns", ["1", "20", "60", "160"])
def test_a_table_keeps_every_number_whole(cli: Any, model: Path, tmp_path: Path, columns: str) -> None:
    args = ("convert", model, tmp_path / "out", "--dry-run")
    got = cli(*args, "--format", "table", env={"COLUMNS": columns}).out
    r = cli(*args, "--json").json()["result"]
    wanted = {f"{n:,}" for n in (r["parameters"], r["total_bytes"], *(f["nbytes"] for f in r["files"]))}
    assert wanted <= set(re.findall(r"\d[\d,]*", got))
    assert "\u2026" not in got
    narrow, wide = (cli(*args, "--format", "plain", env={"COLUMNS": n}).out for n in ("20", "300"))
    assert narrow == wide


def test_the_variable_chooses_the_format(cli: Any, model: Path, tmp_path: Path) -> None:
    args = ("convert", model, tmp_path / "out", "--dry-run")
    assert cli(*args, env={"LLAMACTL_FORMAT": "csv"}).out.startswith("tensor,file,")
    assert cli(*args, "--json", env={"LLAMACTL_FORMAT": "csv"}).out.startswith("{")


# ---- streams as processes have them


def test_a_terminal_gets_a_table_with_colours_only_where_wanted(terminal: Any, model: Path, tmp_path: Path) -> None:
    args = ("convert", model, tmp_path / "out", "--dry-run")
    drawn, plain = terminal(*args, columns=200), terminal(*args, env={"NO_COLOR": "1"}, columns=200)
    assert (drawn.code, drawn.err, plain.code, plain.err) == (0, "", 0, "")
    assert ("\u2500" in drawn.out, "\x1b" in drawn.out) == (True, True)
    assert ("\u2500" in plain.out, "\x1b" in plain.out) == (True, False)


def test_a_reader_that_is_gone_is_no_error_and_the_output_is_there(run: Any, model: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        got = run("convert", model, tmp_path / "out", "--no-proof", stdout=writer)
    finally:
        os.close(writer)
    assert (got.code, got.err) == (0, "")
    assert made.read(tmp_path / "out") == made.read(model)


NARROW = {"LC_ALL": "C", "LANG": None, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("env", [{}, NARROW], ids=["stream", "locale"])
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_narrow_code_page_never_crashes(run: Any, model: Path, tmp_path: Path, encoding: str,
                                          env: dict[str, str | None]) -> None:
    folder = tmp_path / "m\u00f6del \u4e2d"
    folder.mkdir()
    for f in model.iterdir():
        (folder / f.name).write_bytes(f.read_bytes())
    got = run(b"convert", os.fsencode(folder), os.fsencode(tmp_path / "\u00e4us\u6587"), b"--format", b"table",
              b"--no-proof", env={**env, "PYTHONIOENCODING": encoding, "COLUMNS": "300"}, decode=encoding)
    assert (got.code, got.err) == (0, "")
    assert "72,000" in got.out
    assert made.read(tmp_path / "\u00e4us\u6587") == made.read(model)


def test_half_characters_do_no_harm(cli: Any, tmp_path: Path) -> None:
    """JSON may hold half of a character, and a file's name any bytes."""
    made.llama(tmp_path / "a", _name_or_path="\ud83e")
    assert cli("convert", tmp_path / "a", tmp_path / "b", "--no-proof").code == 0
    assert json.loads((tmp_path / "b" / "config.json").read_text())["_name_or_path"] == "\ud83e"
    (tmp_path / os.fsdecode(b"\xff")).symlink_to("a")
    assert cli("convert", tmp_path / os.fsdecode(b"\xff"), tmp_path / "c", "--no-proof").code == 0


@pytest.mark.parametrize(("format", "quiet", "env", "term", "on"), [
    ("table", False, {}, True, True), ("plain", False, {}, True, True), ("plain", False, {}, False, False),
    ("json", False, {}, True, False), ("table", True, {}, True, False), ("table", False, {"CI": "1"}, True, False),
    ("table", False, {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}, True, False),
    ("table", False, {"TERM": "dumb"}, True, False)])
def test_progress_is_for_people_who_wait(monkeypatch: pytest.MonkeyPatch, format: str, quiet: bool,
                                         env: dict[str, str], term: bool, on: bool) -> None:
    """Only on a terminal, only after half a second; bytes done and to do, rate, time left; then the line is empty."""
    from llamactl.cli import progress
    from llamactl.cli.options import Output

    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return term

    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    for key in ("CI", "HF_HUB_DISABLE_PROGRESS_BARS", "TERM"):
        monkeypatch.delenv(key, raising=False)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.Progress(Output(format, quiet, False, None), "writing", 4_000_000_000) as seen:
        for second in (0.1, 0.4, 0.49):
            clock[0] = second
            seen(100_000_000)
        assert stream.getvalue() == ""
        clock[0] = 2.0
        seen(1_700_000_000)
        said = stream.getvalue()
    if on:
        assert said == "\r\x1b[Kwriting: 2.00 of 4.00 GB, 1.00 GB/s, 2 s left"
        assert stream.getvalue() == said + "\r\x1b[K"
    else:
        assert stream.getvalue() == ""


def test_nothing_about_progress_in_a_pipe(run: Any, model: Path, tmp_path: Path) -> None:
    got = run("convert", model, tmp_path / "out", "--no-proof", env={"FORCE_COLOR": "1"})
    assert (got.code, got.err) == (0, "")


# ---- text that others wrote


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("flags", [("--no-proof",), ("--dry-run",)], ids="-".join)
def test_hostile_names_of_files_and_folders_are_escaped(cli: Any, tmp_path: Path, flags: tuple[str, ...], format: str
                                                        ) -> None:
    evil = EVIL.replace("<b>", "")
    folder = tmp_path / evil
    made.llama(folder, architectures=[evil + "[/red]"])
    (folder / f"LICENSE-{evil}.txt").write_text("x")
    got = cli("convert", folder, tmp_path / f"out-{evil}", *flags, "--format", format, env={"COLUMNS": "400"})
    assert got.code == 0
    assert harmless(got.out + got.err)
    assert "LICENSE-" in got.out or format == "csv"
    if format == "json":
        assert got.json()["result"]["path"].endswith(evil)
    elif format == "csv":
        assert len({len(r) for r in csv.reader(io.StringIO(got.out))}) == 1
    else:
        assert "[bold red]" in got.out.replace("\\[", "[")


@pytest.mark.parametrize("flags", [(), ("--json",), ("--debug",)])
def test_hostile_tensor_names_are_escaped(cli: Any, tmp_path: Path, flags: tuple[str, ...]) -> None:
    made.llama(tmp_path / "m", change={EVIL: made.Tensor("F32", (1,), bytes(4))})
    got = cli("convert", tmp_path / "m", tmp_path / "out", *flags)
    assert got.code == 3
    assert harmless(got.out + got.err)
    assert got.err.startswith("error[weights-unexpected]: ")
    assert "```e\\x1b[31m|" in got.err
    if flags == ("--json",):
        ERROR.validate(got.json())
        assert harmless(got.json()["error"]["message"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("args", [("--to", EVIL), ("--dtype", EVIL), ("--shard-size", EVIL), ("--" + EVIL,),
                                  ("--text", EVIL), ("--ranks", EVIL)])
def test_hostile_arguments_are_escaped(cli: Any, model: Path, tmp_path: Path, args: tuple[str, ...]) -> None:
    got = cli("convert", model, tmp_path / "out", *args)
    assert got.code in (2, 3, 4)
    assert got.out == ""
    assert harmless(got.err)
    assert got.err.count("error[") == 1


# ---- command lines that say too little, too much or nonsense


@pytest.mark.parametrize(("args", "word", "parts"), [
    (("--to", "nanogtp"), "usage", ("'nanogtp' is not one of hf, meta, nanogpt, lesson, gguf", "mean nanogpt?")),
    (("--to", "metta"), "usage", ("did you mean meta?",)), (("--to", "HF"), "usage", ("is not one of hf",)),
    (("--to", "onnx"), "usage", ("'onnx' is not one of hf",)),
    (("--dtype", "bf15"), "usage", ("'bf15' is not one of bf16, fp16, fp32, q8_0",)),
    (("--dtype", "q8_0"), "usage", ("q8_0 is a GGUF type", "--to gguf")),
    (("--shard-size", "5"), "usage", ("'5' is no size", "5GB")),
    (("--shard-size", "5Gb"), "usage", ("'5Gb' is no size",)), (("--shard-size", "0GB"), "usage", ("no size",)),
    (("--shard-size", "-5GB"), "usage", ("no size",)), (("--shard-size", "lots"), "usage", ("no size",)),
    (("--to", "meta", "--shard-size", "5GB"), "usage", ("--shard-size is for safetensors",)),
    (("--to", "gguf", "--shard-size", "5GB"), "usage", ("--shard-size is for safetensors",)),
    (("--ranks", "2"), "usage", ("--ranks belongs to --to meta",)), (("--ranks", "0"), "usage", ("--ranks",)),
    (("--to", "meta", "--ranks", "100"), "usage", ("--ranks",)),
    (("--kv-heads", "0"), "usage", ("--kv-heads",)), (("--kv-heads", "x"), "usage", ("--kv-heads", "'x'")),
    (("--kv-heads", "3"), "edit", ("8 heads cannot share 3 KV heads",)),
    (("--vocab-pad-to", "100"), "usage", ("--vocab-pad-to 100: the model has 112 rows",)),
    (("--context", "4096"), "usage", ("--context is for Meta's params.json",)),
    (("--text", "x", "--no-proof"), "usage", ("--text is measured by the proof",)),
    (("--shard", "5GB"), "usage", ("no such option --shard", "did you mean --shard-size?")),
    (("--dryrun",), "usage", ("did you mean --dry-run?",)), (("--format", "jsn"), "usage", ("did you mean 'json'?",)),
    (("more",), "usage", ("more",)),
], ids=lambda x: "-".join(x) if isinstance(x, tuple) else x)
def test_a_wrong_command_line(cli: Any, model: Path, tmp_path: Path, args: tuple[str, ...], word: str,
                              parts: tuple[str, ...]) -> None:
    for flags in ((), ("--dry-run",)):
        failed(cli("convert", model, tmp_path / "out", *args, *flags), 2, word, *parts)
    assert os.listdir(tmp_path) == []


def test_a_wrong_type_names_its_neighbour(cli: Any, model: Path, tmp_path: Path) -> None:
    failed(cli("convert", model, tmp_path / "out", "--dtype", "bf15"), 2, "usage", "did you mean")


@pytest.mark.parametrize("args", [(), ("{model}",)])
def test_two_arguments_are_needed(cli: Any, model: Path, args: tuple[str, ...]) -> None:
    failed(cli("convert", *(a.format(model=model) for a in args)), 2, "usage", "missing argument", "convert --help")


def test_every_failure_is_one_object_for_json(cli: Any, model: Path, tmp_path: Path) -> None:
    for args, code in (((model, tmp_path / "out", "--to", "x"), 2), ((tmp_path / "none", tmp_path / "out"), 4),
                       ((model, tmp_path), 5), ((model, model / "inside"), 2)):
        got = cli("convert", *args, "--json")
        body = got.json()
        ERROR.validate(body)
        assert (got.code, body["error"]["exit_code"], body["command"]) == (code, code, "convert")
        assert "Traceback" not in got.err
        assert "Traceback (most recent call last)" in cli("convert", *args, "--debug").err


# ---- where a model comes from


@pytest.mark.parametrize("ref", ["./none", "/abs/none", "none/config.json", "none.gguf", "model.safetensors", "C:\\x"])
def test_a_source_that_is_not_there(cli: Any, tmp_path: Path, ref: str) -> None:
    failed(cli("convert", ref, "out"), 4, "not-found", "no such file or folder", ref)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("ref", ["gpt2", "llama-3-8b", "preset:gpt2", "meta-llama/Meta-Llama-3-8B"])
def test_a_preset_has_no_weights(cli: Any, tmp_path: Path, ref: str) -> None:
    failed(cli("convert", ref, "out"), 4, "weights-not-found", "description without weights", "help: ")
    assert os.listdir(tmp_path) == []


def test_a_folder_without_weights(cli: Any, tmp_path: Path) -> None:
    made.llama(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    failed(cli("convert", tmp_path / "m", "out"), 3, "no-weights", "no .safetensors file")
    (tmp_path / "m" / "config.json").unlink()
    failed(cli("convert", tmp_path / "m", "out"), 3, "no-model")
    assert os.listdir(tmp_path) == ["m"]


def test_weights_named_by_themselves(cli: Any, model: Path, tmp_path: Path) -> None:
    assert cli("convert", model / "model.safetensors", "out", "--no-proof").code == 0
    assert made.read(tmp_path / "out") == made.read(model)


def test_the_current_folder_and_the_home(cli: Any, model: Path, tmp_path: Path) -> None:
    assert cli("convert", ".", tmp_path / "a", "--no-proof", cwd=model).code == 0
    assert cli("convert", tmp_path / "a/", "~/b/", "--no-proof").code == 0
    assert made.read(tmp_path / "a") == made.read(tmp_path / "b") == made.read(model)


@pytest.mark.parametrize("to", ["hf", "lesson", "meta", "gguf"])
def test_what_was_written_is_a_source_by_its_plain_name(cli: Any, model: Path, tmp_path: Path, to: str) -> None:
    assert cli("convert", model, "first", "--to", to, "--no-proof").code == 0
    got = cli("convert", "first", "second", "--no-proof")
    assert got.code == 0, got.err
    again = made.read(tmp_path / "second")
    assert {n: again[n].data for n in again} == {n: t.data for n, t in made.read(model).items()}


def test_a_file_beside_the_weights_that_leads_elsewhere_is_refused(cli: Any, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "m")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "m" / "NOTICE").symlink_to(tmp_path / "secret")
    for flags in ((), ("--dry-run",)):
        failed(cli("convert", tmp_path / "m", "out", *flags), 3, "link-outside", "NOTICE")
    (tmp_path / "m" / "NOTICE").unlink()
    os.mkfifo(tmp_path / "m" / "NOTICE")
    for flags in ((), ("--dry-run",)):
        failed(cli("convert", tmp_path / "m", "out", *flags), 3, "not-a-file", "NOTICE")
    assert sorted(os.listdir(tmp_path)) == ["m", "secret"]


@pytest.fixture
def cached(model: Path, tmp_path: Path) -> tuple[Path, str]:
    """A Hub cache that holds acme/tiny as huggingface_hub keeps it: links into blobs."""
    import hashlib

    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "cache" / "models--acme--tiny"
    for name in ("blobs", "refs", f"snapshots/{commit}"):
        (repo / name).mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    for file in model.iterdir():
        data = file.read_bytes()
        blob = repo / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (repo / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{blob.name}")
    return tmp_path / "cache", commit


@pytest.mark.parametrize("ref", ["acme/tiny", "hf://acme/tiny", "acme/tiny@main"])
def test_a_model_in_the_hub_cache(cli: Any, model: Path, cached: tuple[Path, str], tmp_path: Path, ref: str,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    cache, commit = cached
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    got = cli("convert", ref, "out", "--no-proof", "--json", env={"HF_HUB_CACHE": str(cache)})
    assert (got.code, got.err) == (0, "")
    assert {k: got.json()["model"][k] for k in ("source", "id", "revision")} == {
        "source": "hub", "id": "acme/tiny", "revision": commit}
    assert made.read(tmp_path / "out") == made.read(model)
    assert not (tmp_path / "out" / "model.safetensors").is_symlink()
    assert (tmp_path / "out" / "README.md").read_text() == "# tiny\n"
    source = json.loads((tmp_path / "out" / MANIFEST).read_text())["source"]
    assert (source["source"], source["id"], source["revision"]) == ("hub", "acme/tiny", commit)
    inside = cache / "models--acme--tiny" / "snapshots" / commit / "out"
    failed(cli("convert", ref, inside, "--no-proof", env={"HF_HUB_CACHE": str(cache)}), 2, "output-inside")


def test_a_cached_config_without_weights(cli: Any, cached: tuple[Path, str], tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    cache, commit = cached
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    (cache / "models--acme--tiny" / "snapshots" / commit / "model.safetensors").unlink()
    got = cli("convert", "acme/tiny", "out", env={"HF_HUB_CACHE": str(cache)})
    failed(got, 4, "weights-not-found", "acme/tiny", "not in the local cache", "help: run: hf download acme/tiny")


def test_a_name_that_is_nothing_known_opens_no_socket(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    failed(cli("convert", "acme/none", "out", "--offline"), 4, "hub-offline", "acme/none")


# ---- where it writes


FORCED = [(), ("--force",)]


@pytest.mark.parametrize("flags", FORCED, ids=["plain", "force"])
def test_the_input_is_never_written(cli: Any, model: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    folder = tmp_path / "around" / "m"
    folder.parent.mkdir()
    folder.mkdir()
    for f in model.iterdir():
        (folder / f.name).write_bytes(f.read_bytes())
    (tmp_path / "link").symlink_to(folder)
    before = made.tree(tmp_path)
    for target in (folder, f"{folder}/", folder / ".", tmp_path / "link" / ".." / "m"):
        failed(cli("convert", folder, target, *flags), 5, "output-is-input", "help: ")
    for target in (folder / "sub", folder / "a" / ".." / "sub", tmp_path / "link" / "sub"):
        failed(cli("convert", folder, target, *flags), 2, "output-inside", "help: name a place outside it")
    failed(cli("convert", folder, folder.parent, *flags), 5, "output-holds-input|output-exists")
    failed(cli("convert", folder / "model.safetensors", folder, *flags), 5, "output-is-input|output-holds-input")
    assert made.tree(tmp_path) == before


def test_an_output_that_is_there_is_kept(cli: Any, model: Path, tmp_path: Path) -> None:
    for name in ("empty", "foreign", "checkpoint"):
        (tmp_path / name).mkdir()
    (tmp_path / "foreign" / "mine.txt").write_text("mine")
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "link").symlink_to("checkpoint")
    before = made.tree(tmp_path)
    for name in ("empty", "foreign", "checkpoint", "file", "dangling", "link"):
        failed(cli("convert", model, tmp_path / name), 5, "output-exists", name, "help: ")
    for name, word in (("foreign", "output-foreign"), ("file", "output-foreign"), ("dangling", "output-exists"),
                       ("link", "output-exists")):
        failed(cli("convert", model, tmp_path / name, "--force"), 5, word, name, "help: ")
    assert made.tree(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == sorted(("empty", "foreign", "checkpoint", "file", "dangling", "link"))


@pytest.mark.parametrize("flag", ["--force", "--overwrite"])
def test_an_old_checkpoint_is_replaced_where_it_is_asked_for(cli: Any, model: Path, tmp_path: Path, flag: str) -> None:
    out = tmp_path / "out"
    assert cli("convert", model, out, "--to", "meta", "--no-proof").code == 0
    assert cli("convert", model, out, flag, "--no-proof").code == 0
    assert sorted(f.name for f in out.iterdir()) == sorted([*(f.name for f in model.iterdir()), MANIFEST])
    (tmp_path / "empty").mkdir()
    assert cli("convert", model, tmp_path / "empty", flag, "--no-proof").code == 0
    assert sorted(os.listdir(tmp_path)) == ["empty", "out"]


def test_a_forced_run_that_fails_leaves_the_old_checkpoint(cli: Any, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli("convert", model, out, "--no-proof").code == 0
    before = made.tree(tmp_path)
    made.llama(tmp_path / "bad", change={"lm_head.weight": None})
    failed(cli("convert", tmp_path / "bad", out, "--force"), 3, "weights-missing", "lm_head.weight")
    assert made.tree(out) == {k.removeprefix("out/"): v for k, v in before.items()}


def test_a_parent_that_is_not_there(cli: Any, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in ("a/out", "file/out"):
        failed(cli("convert", model, tmp_path / target), 5, "output-parent", "make it first", target.split("/")[0])
    assert os.listdir(tmp_path) == ["file"]


def test_a_single_gguf_file(cli: Any, model: Path, tmp_path: Path) -> None:
    assert cli("convert", model, "x.gguf", "--to", "gguf", "--no-proof").code == 0
    assert cli("convert", model, "folder", "--to", "gguf", "--no-proof").code == 0
    assert sorted(os.listdir(tmp_path)) == [f".x.gguf.{MANIFEST}", "folder", "x.gguf"] or sorted(
        os.listdir(tmp_path)) == ["folder", "x.gguf", f"x.gguf.{MANIFEST}"]
    assert (tmp_path / "x.gguf").read_bytes()[:4] == b"GGUF"
    assert (tmp_path / "x.gguf").stat().st_size == (tmp_path / "folder" / "model.gguf").stat().st_size
    failed(cli("convert", model, "x.gguf", "--to", "gguf"), 5, "output-exists", "--force replaces it")
    assert cli("convert", model, "x.gguf", "--to", "gguf", "--force", "--no-proof").code == 0
    failed(cli("convert", tmp_path / "x.gguf", "x.gguf", "--to", "gguf", "--force"), 5, "output-is-input")


def test_places_are_judged_before_anything_is_read_for_long(cli: Any, model: Path, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    from llamactl.cli import converting

    def late(*_: object, **__: object) -> None:
        pytest.fail("it was planned first")

    monkeypatch.setattr(converting, "plan", late)
    (tmp_path / "there").mkdir()
    for target, code in ((tmp_path / "there", 5), (model / "sub", 2), (tmp_path / "no" / "out", 5), (model, 5)):
        assert cli("convert", model, target).code == code


def test_nothing_is_written_before_the_plan_stands(cli: Any, model: Path, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused is refused before the staging folder is made."""
    from llamactl.checkpoint import staging

    def early(*_: object, **__: object) -> None:
        pytest.fail("something was written first")

    monkeypatch.setattr(staging.Claim, "hold", early)
    bad = {"missing": {"lm_head.weight": None}, "stray": {"x": made.Tensor("F32", (1,), bytes(4))},
           "shape": {"lm_head.weight": made.noise("BF16", (100, 64), 1)},
           "dtype": {"model.norm.weight": made.Tensor("F16", (64,), bytes(128))}}
    for name, change in bad.items():
        tensors = made.llama(tmp_path / name, change=change)
        assert tensors
    for name, word in (("missing", "weights-missing"), ("stray", "weights-unexpected"), ("shape", "weights-shape")):
        failed(cli("convert", tmp_path / name, "out"), 3, word)
    over = {"model.layers.1.mlp.up_proj.weight": made.Tensor("BF16", (96, 64), made.pack("BF16", [1e30] * 96 * 64))}
    made.llama(tmp_path / "over", change=over)
    failed(cli("convert", tmp_path / "over", "out", "--dtype", "fp16"), 3, "convert-overflow",
           "model.layers.1.mlp.up_proj.weight")
    failed(cli("convert", model, "out", "--to", "nanogpt"), 3, "layout-unknown", "no nanogpt layout for llama")
    failed(cli("convert", model, "out", "--to", "meta", "--ranks", "3"), 2, "ranks")
    assert not (tmp_path / "out").exists()


def test_a_missing_tensor_and_a_stray_one_are_told_with_their_names(cli: Any, tmp_path: Path) -> None:
    gone = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.k_proj.weight"]
    made.llama(tmp_path / "m", change=dict.fromkeys(gone))
    failed(cli("convert", tmp_path / "m", "out"), 3, "weights-missing", "2 tensors", *gone)
    more = {f"extra.{n}": made.Tensor("F32", (1,), bytes(4)) for n in range(3)}
    made.llama(tmp_path / "n", change=more)
    failed(cli("convert", tmp_path / "n", "out"), 3, "weights-unexpected", "3 stored tensors", *more)


# ---- without torch


TORCHLESS = [("hf", ("--to", "hf")), ("reshard", ("--shard-size", "50kB")), ("lesson", ("--to", "lesson")),
             ("meta", ("--to", "meta")), ("gguf", ("--to", "gguf")), ("ranks", ("--to", "meta", "--ranks", "2"))]


@pytest.fixture
def torchless(tmp_path: Path, environment: Any) -> Callable[..., Any]:
    """torchless(*args): the command where torch is not installed at all."""

    def call(*args: str | Path) -> Any:
        done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, "convert", *args], env=environment(tmp_path),
                              cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        return type("Result", (), {"code": done.returncode, "out": done.stdout, "err": done.stderr})

    return call


@pytest.mark.parametrize("args", [t[1] for t in TORCHLESS], ids=[t[0] for t in TORCHLESS])
def test_moves_without_torch_write_the_same(torchless: Any, cli: Any, model: Path, tmp_path: Path,
                                            args: tuple[str, ...]) -> None:
    got = torchless(model, "out", *args, "--no-proof")
    assert (got.code, got.err) == (0, "")
    assert cli("convert", model, "with", *args, "--no-proof").code == 0
    assert made.tree(tmp_path / "out") == made.tree(tmp_path / "with")


@pytest.mark.parametrize("to", ["hf", "lesson", "meta", "gguf"])
def test_a_proof_without_torch_says_what_it_left_out(torchless: Any, model: Path, tmp_path: Path,
                                                     to: str) -> None:
    got = torchless(model, "out", "--to", to)
    assert (got.code, got.err) == (0, "")
    assert "torch is not installed" in got.out
    assert "torch is not installed" in json.dumps(json.loads((tmp_path / "out" / MANIFEST).read_text())["proof"])


@pytest.mark.parametrize("args", [("g", "--to", "nanogpt"), ("g", "--to", "nanogpt", "--no-proof"),
                                  ("m", "--dtype", "fp16"), ("m", "--to", "gguf", "--dtype", "q8_0", "--no-proof"),
                                  ("m", "--kv-heads", "1")], ids="-".join)
def test_what_needs_torch_says_so_in_one_line(torchless: Any, model: Path, gpt2: Path, tmp_path: Path,
                                              args: tuple[str, ...]) -> None:
    before = sorted(os.listdir(tmp_path))
    got = torchless(gpt2 if args[0] == "g" else model, "out", *args[1:])
    failed(got, 4, "extra-missing", "needs torch, which is not installed", "help: pip install 'llamactl[")
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "ckpt.pt"])
@pytest.mark.parametrize("data", [b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n",
                                  b"PK\x03\x04", b"\x80\x02}q\x00."], ids=["lfs", "cut", "raw"])
def test_a_file_that_is_no_torch_file_is_refused_before_torch_is_imported(torchless: Any, model: Path, tmp_path: Path,
                                                                          name: str, data: bytes) -> None:
    (folder := tmp_path / "bad").mkdir()
    (folder / name).write_bytes(data)
    if name == "pytorch_model.bin":
        shutil.copy(model / "config.json", folder)
    if name == "consolidated.00.pth":
        params = {"dim": 64, "n_layers": 2, "n_heads": 8, "vocab_size": 101, "multiple_of": 32}
        (folder / "params.json").write_text(json.dumps(params))
    failed(torchless(folder, "out"), 3, "lfs-pointer|pickle-format")


@pytest.mark.parametrize(("args", "words"), [((), "is empty"), (("x.gguf",), "name of a GGUF file"),
                                             (("out", "--text", "t.txt", "--dry-run"), "leave --dry-run out")])
def test_a_target_that_cannot_be_meant(cli: Any, model: Path, args: tuple[str, ...], words: str) -> None:
    failed(cli("convert", model, *(args or ("",))), 2, "usage", words)
