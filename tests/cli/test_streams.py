"""stdout carries the answer and nothing else; every stream, terminal and code page gets what it can bear."""

from __future__ import annotations

import csv
import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

ANSWERS = {
    "params": ("params", "llama-3-8b"),
    "params-moe": ("params", "mixtral-8x7b", "gpt2", "--by", "layer"),
    "kv-cache": ("kv-cache", "llama-3-8b", "--ctx", "8192"),
    "kv-cache-sweep": ("kv-cache", "gemma-2-9b", "--sweep", "ctx=1k..8k,batch=1,8"),
    "compare": ("compare", "gpt2", "llama-3-8b"),
    "evolve": ("evolve", "gpt2", "llama-3-8b"),
    "rope": ("rope", "llama-3.1-8b"),
    "explore": ("explore", "gpt2", "-o", "page.html", "--force"),
    "flops": ("flops", "mixtral-8x7b", "--ctx", "4096"),
    "fit": ("fit", "llama-3-8b", "--gpu", "h100-80gb", "--ctx", "8192"),
    "doctor": ("doctor",),
    "presets-show": ("presets", "show", "llama-3-8b"),
    "schema": ("schema", "params"),
    "version": ("version",),
}
FAILURES = {
    "params": ("params", "./none"),
    "kv-cache": ("kv-cache", "llama-3-8b", "--ctx", "many"),
    "presets": ("presets", "show", "nothing-like-it"),
    "convert": ("convert", "./none", "out"),
    "convert-layout": ("convert", "./none", "out", "--to", "onnx"),
    "schema": ("schema", "nothing"),
    "version": ("version", "--colour"),
    "command": ("parms", "x"),
    "option": ("params", "--nothing-like-it"),
}
FORMATS = ("plain", "table", "json", "csv", "md")
ERROR = Draft202012Validator(json.loads((Path(__file__).parent / "schemas" / "error.json").read_text()))
RED = "\x1b[31m"
BIDI = "\u202e"


def with_format(args: tuple[str, ...], format: str) -> tuple[str, ...]:
    """schema has one format only."""
    return args if args[0] == "schema" else (*args, "--format", format)


# ---- the answer


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_all_there_is(cli: Any, name: str, format: str) -> None:
    got = cli(*with_format(ANSWERS[name], format))
    assert (got.code, got.err) == (0, "")
    assert got.out.endswith("\n")
    assert "Traceback" not in got.out
    if format == "json":
        assert got.json()["$schema" if name == "schema" else "schema"]
    elif format == "csv" and name != "schema":
        rows = list(csv.reader(io.StringIO(got.out)))
        assert len(rows) > 1
        assert {len(r) for r in rows} == {len(rows[0])}
    elif format == "md" and name != "schema":
        tables = [line for line in got.out.splitlines() if line.startswith("|")]
        assert any(set(line) <= set("|-: ") for line in tables)


def test_the_list_of_presets_is_an_answer_too(cli: Any) -> None:
    got = cli("presets", "--format", "csv")
    assert (got.code, got.err) == (0, "")
    assert "llama-3-8b,8030261248," in got.out


@pytest.mark.parametrize(("args", "said"), [
    (("params", "llama-3-8b"), "8030261248\n"),
    (("params", "llama-3-8b", "--json"), "8030261248\n"),
    (("params", "llama-3-8b", "gpt2"), "8030261248\n124439808\n"),
    (("kv-cache", "llama-3-8b", "--ctx", "131072"), "17179869184\n"),
    (("kv-cache", "llama-3-8b", "--ctx", "1024,2048"), "134217728\n268435456\n"),
    (("presets", "show", "meta-llama/Meta-Llama-3-8B"), "llama-3-8b\n"),
])
@pytest.mark.parametrize("flag", ["-q", "--quiet"])
def test_quiet_is_the_exact_value_alone(cli: Any, args: tuple[str, ...], said: str, flag: str) -> None:
    assert cli(*args, flag).out == said


def test_quiet_version_is_a_version(cli: Any) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", cli("version", "-q").out)


@pytest.mark.parametrize("args", [("params", "mixtral-8x7b"), ("kv-cache", "mixtral-8x7b")])
def test_verbose_says_where_numbers_come_from(cli: Any, args: tuple[str, ...]) -> None:
    got = cli(*args, "-v").out
    assert "where the numbers of mixtral-8x7b come from" in got
    assert re.search(r"^num_key_value_heads +8 +config$", got, re.M)
    assert "where the numbers" not in cli(*args).out


def test_sizes_are_exact_and_in_both_units(cli: Any) -> None:
    """8,030,261,248 x 2 bytes: 16.06 x 10^9 and 14.96 x 2^30, never one under the other's name."""
    assert "16,060,522,496 B (16.06 GB, 14.96 GiB)" in cli("params", "llama-3-8b").out
    assert "17,179,869,184 B (17.18 GB, 16.00 GiB)" in cli("kv-cache", "llama-3-8b", "--ctx", "128k").out


# ---- failures and warnings


@pytest.mark.parametrize("format", [None, *FORMATS])
@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_command_leaves_stdout_empty_or_one_error_object(cli: Any, name: str, format: str | None) -> None:
    args = FAILURES[name] if format is None else (*FAILURES[name], f"--format={format}")
    got = cli(*args)
    assert got.code in (2, 4)
    assert len(re.findall(r"^error\[[a-z-]+\]: ", got.err, re.M)) == 1
    if format != "json":
        assert got.out == ""
        return
    body = got.json()
    ERROR.validate(body)
    assert body["error"]["exit_code"] == got.code
    assert got.err.startswith(f"error[{body['error']['code']}]: ")


@pytest.mark.parametrize(("env", "args", "json_"), [
    ("json", (), True), ("json", ("--format", "plain"), False), ("json", ("--format=md",), False),
    ("plain", ("--json",), True), (None, ("--format", "json"), True), (None, (), False),
])
def test_a_failure_is_json_where_the_answer_would_be(cli: Any, env: str | None, args: tuple[str, ...],
                                                     json_: bool) -> None:
    got = cli("params", "./none", *args, env={"LLAMACTL_FORMAT": env})
    assert bool(got.out) is json_


def test_a_warning_stands_on_stderr_or_in_the_json(cli: Any) -> None:
    args = ("kv-cache", "llama-3-8b", "--ctx", "16k")
    for format in ("plain", "csv", "md", "table"):
        got = cli(*args, "--format", format)
        assert got.code == 0
        assert got.err.startswith("warning[context-exceeded]: 16,384 tokens is past the 8,192 positions")
        assert got.err.count("\n") == 1
        assert "warning" not in got.out
    quiet = cli(*args, "-q")
    assert (quiet.out, quiet.err.count("\n")) == ("2147483648\n", 1)
    got = cli(*args, "--json")
    assert got.err == ""
    (said,) = got.json()["warnings"]
    assert said["code"] == "context-exceeded"


@pytest.mark.parametrize("args", [("params", "./none"), ("params", "gpt2", "--dtype", "x"), ("parms",)])
def test_a_traceback_only_for_debug(cli: Any, args: tuple[str, ...]) -> None:
    assert "Traceback" not in cli(*args).err
    got = cli(*args, "--debug")
    assert "Traceback (most recent call last)" in got.err
    assert got.out == ""


# ---- what nobody foresaw


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make the loading of models end in the given exception."""
    import llamactl.api

    def set_(error: BaseException) -> None:
        def load(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(llamactl.api, "load", load)

    return set_


@pytest.mark.parametrize(("error", "code", "word"), [
    (RuntimeError(f"two\nlines {RED}"), 70, "bug"), (RecursionError("deep"), 70, "bug"), (OSError(2, "odd"), 70, "bug"),
    (AssertionError(), 70, "bug"), (MemoryError(), 5, "memory"), (KeyboardInterrupt(), 130, "interrupted"),
])
def test_every_end_has_its_code_and_one_line(cli: Any, broken: Any, error: BaseException, code: int, word: str) -> None:
    broken(error)
    got = cli("params", "gpt2")
    assert (got.code, got.out) == (code, "")
    assert got.err.startswith(f"error[{word}]: ")
    assert got.err.count("\n") == 1
    assert "\x1b" not in got.err
    assert ("please report" in got.err) is (code == 70)
    got = cli("params", "gpt2", "--json")
    assert got.code == code
    ERROR.validate(got.json())
    assert (got.json()["error"]["code"], got.json()["error"]["exit_code"]) == (word, code)


def test_an_interruption_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    from llamactl.__main__ import main

    class Loading:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "llamactl.cli.app", Loading())  # type: ignore[misc]
    monkeypatch.setattr(sys, "argv", ["llamactl", "params", "gpt2"])
    before = gc.get_threshold()
    try:
        assert main() == 130
    finally:
        gc.set_threshold(*before)
    assert capsys.readouterr() == ("", "error[interrupted]: interrupted\n")


def test_a_bug_shows_its_traceback_to_debug(cli: Any, broken: Any) -> None:
    broken(RuntimeError("inner"))
    assert "Traceback" not in cli("params", "gpt2").err
    assert "RuntimeError: inner" in cli("params", "gpt2", "--debug").err.partition("Traceback")[2]


SLOW = """
import signal, sys, time, llamactl.api as room
from llamactl.cli.app import run
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored from the start
def load(*_, **__):
    print("ready", file=sys.stderr, flush=True)
    time.sleep(60)
room.load = load
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(("sent", "code", "word"), [(signal.SIGINT, 130, "interrupted"),
                                                    (signal.SIGTERM, 143, "terminated")])
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_signal_ends_it_with_one_line(tmp_path: Path, environment: Any, sent: signal.Signals, code: int, word: str,
                                        flags: tuple[str, ...]) -> None:
    process = subprocess.Popen([sys.executable, "-c", SLOW, "params", "gpt2", *flags], env=environment(tmp_path),
                               cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    process.send_signal(sent)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code
    assert err == f"error[{word}]: {word}\n"
    if flags:
        ERROR.validate(json.loads(out))
    else:
        assert out == ""


# ---- pipes and files


BIG = ("kv-cache", "llama-3-8b", "--format", "csv", "--sweep",
       "ctx=1..1g,batch=1,2,3,4,5,6,7,8,dtype=bf16,fp32,fp8,q8_0,q4_0")


@pytest.mark.parametrize("args", [("--version",), ("--help",), ("params", "--help"), *ANSWERS.values(), BIG,
                                  ("params", "gpt2", "--format", "table")])
def test_a_reader_that_is_gone_is_no_error(run: Any, args: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        got = run(*args, stdout=writer)
    finally:
        os.close(writer)
    assert got.code == 0
    assert re.fullmatch(r"(warning\[context-exceeded\]: .*\n)?", got.err)


def test_a_reader_that_leaves_after_one_line_is_no_error(tmp_path: Path, environment: Any) -> None:
    process = subprocess.Popen([sys.executable, "-m", "llamactl", *BIG], env=environment(tmp_path), cwd=tmp_path,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith(b"model,ctx,batch,")
    process.stdout.close()
    with process.stderr:
        err = process.stderr.read()
    assert process.wait(timeout=120) == 0
    assert re.fullmatch(rb"warning\[context-exceeded\]: .*\n", err)


def test_head_in_a_shell(tmp_path: Path, environment: Any) -> None:
    command = f"{{ {sys.executable} -m llamactl schema kv-cache; echo code $? >&2; }} | head -c 10"
    done = subprocess.run(["sh", "-c", command], env=environment(tmp_path), cwd=tmp_path, capture_output=True,
                          text=True, timeout=180, check=False)
    assert (len(done.stdout), done.stderr) == (10, "code 0\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the kernel has no /dev/full")
@pytest.mark.parametrize("args", [("params", "gpt2"), ("params", "gpt2", "--json"), ("--version",), ("--help",)])
def test_an_answer_that_finds_no_space_is_not_written(run: Any, args: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        got = run(*args, stdout=full)
    assert got.code == 5
    assert re.fullmatch(r"error\[stdout\]: the answer could not be written: No space left on device\n", got.err)


def test_closed_streams(tmp_path: Path, environment: Any) -> None:
    def shell(redirect: str) -> tuple[int, str, str]:
        done = subprocess.run(["sh", "-c", f"{sys.executable} -m llamactl params {redirect}"], cwd=tmp_path, text=True,
                              env=environment(tmp_path), capture_output=True, timeout=180, check=False)
        return done.returncode, done.stdout, done.stderr

    assert shell("gpt2 -q >&-") == (5, "", "error[stdout]: standard output is closed\n")
    assert shell("gpt2 -q 2>&-") == (0, "124439808\n", "")
    assert shell("./none 2>&-") == (4, "", "")


# ---- formats and terminals


@pytest.mark.parametrize(("env", "args", "starts"), [
    (None, (), "llama-3-8b (family"), ("json", (), "{"), ("csv", (), "model,component,params"),
    ("md", (), "**llama-3-8b"), ("json", ("--format", "csv"), "model,component"), ("csv", ("--json",), "{"),
    ("csv", ("--format", "plain"), "llama-3-8b (family"),
])
def test_the_option_goes_before_the_variable(cli: Any, env: str | None, args: tuple[str, ...], starts: str) -> None:
    assert cli("params", "llama-3-8b", *args, env={"LLAMACTL_FORMAT": env}).out.startswith(starts)


def test_a_terminal_gets_a_table_and_a_pipe_plain_text(terminal: Any, run: Any) -> None:
    drawn, piped = terminal("params", "gpt2"), run("params", "gpt2")
    assert (drawn.code, drawn.err, piped.code) == (0, "", 0)
    assert "\u2500\u2500\u2500" in drawn.out
    assert piped.out.isascii()
    assert "\u2500" not in terminal("params", "gpt2", env={"LLAMACTL_FORMAT": "plain"}).out
    assert terminal("params", "gpt2", "-q").out == "124439808\n"


@pytest.mark.parametrize("args", [a for n, a in ANSWERS.items() if n != "schema"], ids=[n for n in ANSWERS
                                                                                     if n != "schema"])
def test_plain_does_not_know_the_width(cli: Any, args: tuple[str, ...]) -> None:
    narrow, wide = (cli(*args, "--format", "plain", env={"COLUMNS": n}).out for n in ("20", "300"))
    assert narrow == wide
    assert "\u2026" not in narrow


@pytest.mark.parametrize("columns", ["1", "20", "40", "60", "80", "100", "160"])
@pytest.mark.parametrize("args", [("params", "deepseek-v3", "mixtral-8x7b"), ("params", "gemma-3-27b"),
                                  ("kv-cache", "gemma-2-9b", "--ctx", "1k..8k")])
def test_a_table_keeps_every_number_whole(cli: Any, args: tuple[str, ...], columns: str) -> None:
    got = cli(*args, "--format", "table", env={"COLUMNS": columns}).out
    wanted = [f"{m['total']:,}" for m in cli(*args, "--json").models if "total" in m]
    wanted += [f"{a['kv_cache_bytes']:,}" for m in cli(*args, "--json").models for a in m.get("at", ())]
    assert wanted
    assert set(wanted) <= set(re.findall(r"\d[\d,]*\d", got))
    assert "\u2026" not in got
    plain = cli(*args, "--format", "plain").out.rstrip("\n")  # under it, a table of contexts has a chart
    assert max(map(len, got.splitlines())) <= int(columns) or got.startswith(plain)


def test_a_narrow_terminal_keeps_every_number_whole(terminal: Any) -> None:
    for got in (terminal("params", "llama-3-8b", columns=30), terminal("params", "llama-3-8b", env={"COLUMNS": "30"})):
        assert "8,030,261,248" in got.out
        assert "\u2026" not in got.out


@pytest.mark.parametrize(("env", "args", "coloured"), [
    ({}, (), True), ({"NO_COLOR": "1"}, (), False), ({"NO_COLOR": ""}, (), True), ({"TERM": "dumb"}, (), False),
    ({}, ("--color", "never"), False), ({"NO_COLOR": "1"}, ("--color", "always"), True),
    ({"FORCE_COLOR": "1"}, ("--color", "never"), False), ({}, ("--format", "plain"), False),
    ({}, ("--format", "json"), False), ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, (), False),
])
def test_escapes_on_a_terminal_only_where_wanted(terminal: Any, env: dict[str, str], args: tuple[str, ...],
                                                 coloured: bool) -> None:
    got = terminal("params", "gpt2", *args, env=env)
    assert got.code == 0
    assert "124,439,808" in got.out or "124439808" in got.out
    assert ("\x1b" in got.out) is coloured


@pytest.mark.parametrize(("env", "args", "coloured"), [
    ({}, (), False), ({"FORCE_COLOR": "1"}, (), True), ({"CLICOLOR_FORCE": "1"}, (), True),
    ({"CLICOLOR_FORCE": "0"}, (), False), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, (), False),
    ({}, ("--color", "always"), True), ({"FORCE_COLOR": "1"}, ("--color=never",), False),
])
def test_escapes_in_a_pipe_only_where_forced(cli: Any, env: dict[str, str], args: tuple[str, ...],
                                             coloured: bool) -> None:
    got = cli("params", "gpt2", "--format", "table", *args, env={"TERM": "xterm", "COLUMNS": "120", **env})
    assert ("\x1b" in got.out) is coloured
    for format in ("plain", "csv", "md", "json"):
        assert "\x1b" not in cli("params", "gpt2", "--format", format, *args, env=env).out


@pytest.mark.parametrize("args", [("--help",), ("params", "--help"), ("params", "./none"), ("parms",),
                                  ("convert", "gpt2", "out")])
def test_help_and_errors_send_no_escapes(terminal: Any, args: tuple[str, ...]) -> None:
    got = terminal(*args, env={"FORCE_COLOR": "1"})
    assert "\x1b" not in got.out + got.err


# ---- code pages


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("args", [
    ("--help",), ("params", "--help"), ("kv-cache", "--help"), ("presets", "--help"), ("schema", "--help"),
    ("convert", "--help"),
    ("version", "--help"), *(with_format(a, "table") for a in ANSWERS.values()), ("params", "./n\u00f6\u4e2d"),
    ("params", "./n\u00f6\u4e2d", "--json"),
], ids=lambda a: "-".join(a).encode("ascii", "replace").decode() if isinstance(a, tuple) else a)
def test_a_narrow_code_page_never_crashes(run: Any, args: tuple[str, ...], encoding: str) -> None:
    got = run(*args, env={"LANG": "C", "PYTHONIOENCODING": encoding, "COLUMNS": "300"}, decode=encoding)
    assert got.code == (4 if "./n\u00f6\u4e2d" in args else 0)
    assert "UnicodeEncodeError" not in got.err
    assert len(got.out) + len(got.err) > 40
    assert "\\u25" not in got.out, "lines drawn in characters that the stream lacks"
    if args[0] == "kv-cache" and "--ctx" in args:
        assert "1,073,741,824" in got.out


@pytest.mark.parametrize("format", FORMATS)
def test_a_narrow_locale_reads_any_folder_and_config(run: Any, folder: Any, tiny: Any, format: str) -> None:
    text = json.dumps(tiny.config | {"_name_or_path": "mod\u00e8les/\u65e5\u672c\u8a9e", "comment": "\U0001f999"},
                      ensure_ascii=False)
    path = folder(text.encode(), "m\u00f6del \u4e2d & x")
    env = {"LC_ALL": "C", "LANG": None, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for ref, cwd in ((os.fsencode(path), None), (b".", path)):
        got = run(b"params", ref, b"--format", format.encode(), env=env, decode="ascii", cwd=cwd)
        assert (got.code, got.err) == (0, "")
        assert (f"{tiny.total:,}" if format in ("plain", "table", "md") else str(tiny.total)) in got.out


# ---- text that others wrote


EVIL = f"```e{RED}|<b>*[bold red]{BIDI}x`\n\u200by"
HOSTILE = {
    "model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "architectures": [EVIL + "[/red]"], "quantization_config": {"quant_method": EVIL + "[/red]"},
}


def assert_harmless(text: str) -> None:
    """No control, format or surrogate character but line ends; box drawing and the like may stand."""
    found = [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")]
    assert found == []


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("args", [
    ("params",), ("params", "-v"), ("params", "gpt2"), ("params", "--tree"), ("params", "--by", "layer"),
    ("params", "gpt2", "--tree"), ("params", "gpt2", "--by", "layer"), ("kv-cache",), ("kv-cache", "-v"),
    ("kv-cache", "gpt2"),
])
def test_hostile_names_are_escaped(cli: Any, folder: Any, args: tuple[str, ...], format: str) -> None:
    path = folder(HOSTILE, EVIL)
    got = cli(args[0], path, *args[1:], "--format", format, env={"COLUMNS": "400"})
    assert got.code == 0
    assert_harmless(got.out)
    assert_harmless(got.err)
    if format == "json":
        assert got.models[0]["id"] == EVIL
        return
    assert "warning[architecture-head]: " in got.err
    assert "[/red]" in got.err
    if format == "csv":
        assert {len(r) for r in csv.reader(io.StringIO(got.out))} == {len(got.out.split("\n")[0].split(","))}
    elif format == "md":
        for block in re.findall(r"(?:^\|.*\n)+", got.out, re.M):
            cells = {len(re.split(r"(?<!\\)\|", line)) for line in block.splitlines()}
            assert len(cells) == 1
        text = re.sub(r"^(```+)text\n.*?\n\1\n", "", got.out, flags=re.M | re.S)
        assert "<b>" not in text
        assert re.search(r"(?<!\\)[`\[]", text) is None
    else:
        assert "[bold red]" in got.out
        if args in (("params",), ("params", "-v"), ("params", "gpt2")):
            assert ("\u2500" in got.out) is (format == "table")


def test_hostile_names_are_escaped_in_html(folder: Any) -> None:
    from llamactl import kv_cache, load, params
    from llamactl.render import html

    loaded = load(str(folder(HOSTILE, EVIL + "<script>&\"'")))
    for text in (params(loaded)._repr_html_(), kv_cache(loaded, 8192)._repr_html_(),
                 html("params", [params(loaded), params("gpt2")])):
        assert_harmless(text)
        assert "<b>*" not in text
        assert "<script>" not in text
        assert "&lt;script&gt;&amp;" in text


@pytest.mark.parametrize(("change", "code"), [
    ({"model_type": EVIL + "[/red]"}, "config-model-type"),
    ({"model_type": EVIL, "auto_map": {}}, "config-remote-code"),
    ({"activation_function": EVIL}, "config-activation"), ({"torch_dtype": EVIL}, "config-dtype"),
    ({"n_embd": EVIL}, "config-type"), ({"n_head": {EVIL: 1}}, "config-type"),
])
@pytest.mark.parametrize("flags", [(), ("--json",), ("--debug",)])
def test_hostile_values_are_escaped_in_errors(cli: Any, folder: Any, change: dict[str, Any], code: str,
                                              flags: tuple[str, ...]) -> None:
    got = cli("params", folder({**HOSTILE, **change}, EVIL), *flags)
    assert got.code == 3
    assert_harmless(got.out)
    assert_harmless(got.err)
    assert got.err.startswith(f"error[{code}]: ")
    if flags == ("--json",):
        ERROR.validate(got.json())
        assert_harmless(got.json()["error"]["message"] + got.json()["error"]["path"])


def test_hostile_tensor_names_are_escaped(cli: Any, folder: Any, tiny: Any) -> None:
    path = folder(tensors={**tiny.tensors(tiny.config), EVIL: ("F32", (1,))})
    (said,) = cli("params", path, "--weights", "--json").json()["warnings"]
    assert_harmless(said["message"])
    got = cli("params", path, "--weights")
    assert got.code == 0
    assert_harmless(got.out + got.err)
    assert "warning[weights-unexpected]: 1 tensor not part of this model: ```e\\x1b[31m|" in got.err


@pytest.mark.parametrize("args", [(EVIL,), ("params", EVIL), ("params", "gpt2", EVIL), ("params", "--" + EVIL),
                                  ("kv-cache", "gpt2", "--ctx", EVIL), ("params", "gpt2", "--set", EVIL),
                                  ("params", "gpt2", "--dtype", EVIL), ("presets", "show", EVIL), ("schema", EVIL),
                                  ("params", "gpt2", "--format", EVIL), ("kv-cache", "gpt2", "--engine", EVIL),
                                  ("convert", "gpt2", EVIL), ("convert", "./" + EVIL, "out"),
                                  ("convert", "gpt2", "out", "--to", EVIL)])
def test_hostile_arguments_are_escaped(cli: Any, args: tuple[str, ...]) -> None:
    got = cli(*args, "--offline") if args[0] == "params" else cli(*args)
    assert got.code in (2, 4)
    assert got.out == ""
    assert_harmless(got.err)
    assert got.err.count("error[") == 1


def test_no_json_holds_a_number_that_json_lacks(cli: Any) -> None:
    """Over every preset: Result.json() fails on NaN and Infinity."""
    from llamactl.source import presets

    names = presets.names()
    assert len(names) > 60
    assert len(cli("params", *names, "--json").models) == len(names)
    assert len(cli("kv-cache", *names, "--ctx", "512", "--json").models) == len(names)
