"""Folders that must be accepted, warned about or refused: a small set always, the large corpus where it is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def corpus(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generated corpus, with a FIFO, a device link, sparse giants and an unreadable file among it."""
    if not (shared / "badinputs").is_dir():
        pytest.skip("no badinputs beside this checkout")
    path = tmp_path_factory.mktemp("corpus")
    subprocess.run([sys.executable, shared / "badinputs" / "make_badinputs.py", path, "--special"], check=True,
                   capture_output=True, timeout=300)
    return path


@pytest.fixture(scope="module")
def manifest(corpus: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((corpus / "manifest.json").read_text(encoding="utf-8"))
    if os.geteuid() == 0:
        rows = [m for m in rows if m["id"] != "sp-05-unreadable"]  # root reads every file
    return rows


ARGS = {
    "config": (("params", "{dir}"), ("kv-cache", "{dir}", "--ctx", "64")),
    "safetensors": (("params", "{dir}", "--weights"),),
    "index": (("params", "{dir}", "--weights"),),
}
# Judged from the values inside the tensors or from what stands beside the weights: `verify` has these words.
BY_VERIFY = {"verify-nonfinite", "verify-constant", "verify-shape", "verify-missing", "verify-extra"}


@pytest.mark.parametrize("kind", ARGS)
def test_every_verdict_of_the_corpus(cli: Any, corpus: Path, manifest: list[dict[str, Any]], kind: str,
                                     within: Any) -> None:
    """Accept: exit 0. Warn: exit 0 with a note. Reject: exit 3 with the promised code word and the path, at once."""
    rows = [m for m in manifest if m["kind"] == kind]
    assert Counter(m["expect"] for m in rows)["reject"] > 15
    wrong = []
    for m in rows:
        for args in ARGS[kind]:
            with within(60):
                got = cli(*(a.replace("{dir}", str(corpus / m["id"])) for a in args), "--json")
            wrong += [f"{m['id']} {args[0]}: {what}" for what in _judge(m, got)]
    assert wrong == []


def _judge(m: dict[str, Any], got: Any) -> list[str]:
    """What is not as the manifest wants it."""
    if got.code != (3 if m["expect"] == "reject" else 0):
        return [f"exit {got.code}: {got.err.strip()}"]
    body = got.json()
    out = []
    if m["expect"] == "reject":
        error = body["error"]
        # The manifest groups some words by their beginning: st-header is st-header-json, st-header-start, ...
        if not f"{error['code']}-".startswith(f"{m['code']}-"):
            out.append(f"{error['code']} for {m['code']}")
        if m["id"] not in (error["path"] or "") + error["message"]:
            out.append("no path")
    elif m["expect"] == "warn" and m["code"] not in BY_VERIFY and m["code"] not in {
            w["code"] for w in body["warnings"]}:
        out.append(f"no warning {m['code']}, but {[w['code'] for w in body['warnings']]}")
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("kinds", "args"), [(kind, " ".join(args)) for kind, lines in ARGS.items() for args in lines])
@pytest.mark.parametrize("flags", ["", " --json"])
def test_the_corpus_from_outside_the_process(shared: Path, corpus: Path, tmp_path: Path, environment: Any, kinds: str,
                                             args: str, flags: str) -> None:
    """Exit codes, no traceback, one error line, no raw escape, no code run, input unchanged, 5 s and 300 MB."""
    command = f"{sys.executable} -m llamactl {args}{flags}"
    done = subprocess.run(
        [sys.executable, shared / "badinputs" / "run_corpus.py", "--cmd", command, "--dir", corpus, "--kinds", kinds,
         "--warn", "0", "--sec", "5", "--mb", "300"],
        env=environment(tmp_path), capture_output=True, text=True, check=False, timeout=600)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    if os.geteuid() == 0:
        failed = [line for line in failed if "sp-05-unreadable" not in line]
    assert failed == []
    assert "kept every promise" in done.stdout


# ---- a few of each sort, always


GOOD: dict[str, Any] = {
    "unknown-keys": {"some_new_key": {"a": [1, None]}, "_name_or_path": "\u65e5\u672c \U0001f999 [bold]x[/bold]"},
    "no-kv-heads": {"num_key_value_heads": None}, "wide-heads": {"head_dim": 16}, "new-dtype": {"dtype": "bfloat16",
                                                                                             "torch_dtype": None},
}


@pytest.mark.parametrize("name", GOOD)
def test_odd_but_valid_configs_are_accepted_in_silence(cli: Any, folder: Any, tiny: Any, name: str) -> None:
    path = folder({**tiny.config, **GOOD[name]})
    for args in (("params", path), ("kv-cache", path, "--ctx", "64")):
        got = cli(*args, "--json")
        assert got.code == 0
        assert got.json()["warnings"] == []


@pytest.mark.parametrize("change", [lambda b: b"\xef\xbb\xbf" + b, lambda b: b.replace(b", ", b",\r\n"),
                                    lambda b: b"\n\t " + b + b" \n"], ids=["bom", "crlf", "space"])
def test_odd_but_valid_bytes_are_accepted(cli: Any, folder: Any, tiny: Any, change: Any) -> None:
    assert cli("params", folder(change(json.dumps(tiny.config).encode())), "-q").out == f"{tiny.total}\n"


def test_an_integral_float_is_read_with_a_warning(cli: Any, folder: Any, tiny: Any) -> None:
    got = cli("params", folder({**tiny.config, "hidden_size": 64.0}), "--json")
    assert got.model["total"] == tiny.total
    assert [w["code"] for w in got.json()["warnings"]] == ["config-type"]


@pytest.mark.parametrize(("change", "code"), [
    ({"hidden_size": 10**18}, "config-range"), ({"hidden_size": -16}, "config-range"),
    ({"hidden_size": 16.5}, "config-type"), ({"hidden_size": [64]}, "config-type"),
    ({"rope_scaling": "linear"}, "config-type"), ({"num_hidden_layers": 0}, "config-range"),
    ({"model_type": "\ud800"}, "config-model-type"), ({"vocab_size": 10**12}, "config-range"),
    ({"num_attention_heads": 3, "num_key_value_heads": None}, "config-heads"),
    ({"max_position_embeddings": 0}, "config-range"), ({"tie_word_embeddings": "false"}, "config-type"),
])
def test_values_out_of_all_reason_are_refused_at_once(cli: Any, folder: Any, tiny: Any, change: dict[str, Any],
                                                      code: str, within: Any) -> None:
    path = folder({**tiny.config, **change})
    for args in (("params", path), ("kv-cache", path, "--ctx", "64")):
        with within(60):
            got = cli(*args, "--json")
        assert got.code == 3
        assert got.json()["error"]["code"] == code
        assert got.err.count("\n") <= 2


@pytest.mark.parametrize(("data", "code"), [
    (b"", "st-header-short"), (b"\0" * 7, "st-header-short"), (b"\xff" * 16, "st-header-too-large"),
    (b"\x10" + bytes(7) + b"not json at all!", "st-header"), (b"<!DOCTYPE html><html>...", "st-header"),
    (b"PK\x03\x04" + bytes(60), "st-header"),
])
def test_files_that_are_no_weights_are_refused(cli: Any, folder: Any, data: bytes, code: str) -> None:
    path = folder()
    (path / "model.safetensors").write_bytes(data)
    got = cli("params", path, "--weights", "--json")
    assert got.code == 3
    assert got.json()["error"]["code"].startswith(code)
    assert got.json()["error"]["path"].endswith("model.safetensors")


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/model.safetensors", "a\\..\\model.safetensors",
                                   "model\0.safetensors", "model.bin", "..", ""])
def test_an_index_never_leads_out_of_its_folder(cli: Any, folder: Any, tiny: Any, shard: str) -> None:
    path = folder()
    tiny.write(path.parent / "model.safetensors", tiny.tensors(tiny.config))
    index = {"metadata": {}, "weight_map": dict.fromkeys(tiny.tensors(tiny.config), shard)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    got = cli("params", path, "--weights", "--json")
    assert (got.code, got.json()["error"]["code"]) == (3, "index-path")


def test_weights_that_are_no_regular_file_never_block(cli: Any, folder: Any) -> None:
    path = folder()
    os.mkfifo(path / "model.safetensors")
    got = cli("params", path, "--weights", "--json")
    assert (got.code, got.json()["error"]["code"]) == (3, "not-a-file")
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("/dev/zero")
    got = cli("params", path, "--weights", "--json")
    assert got.code == 3
    assert got.json()["error"]["code"] in ("not-a-file", "link-outside")


def test_a_refusal_takes_little_memory(folder: Any, tiny: Any, tmp_path: Path, environment: Any) -> None:
    """A header that claims 100 MB, in a sparse file of 2 GB: refused by its first bytes."""
    path = folder()
    with (path / "model.safetensors").open("wb") as f:
        f.write((100_000_001).to_bytes(8, "little"))
        f.truncate(2_000_000_000)
    # VmHWM and not ru_maxrss, which starts at what pytest held when it forked
    code = ("import re, runpy, sys; sys.argv = ['llamactl', *sys.argv[1:]]\n"
            "try: runpy.run_module('llamactl', run_name='__main__')\n"
            "finally: print(int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) >> 10)")

    def megabytes(*args: str) -> int:
        done = subprocess.run([sys.executable, "-c", code, *args], env=environment(tmp_path), capture_output=True,
                              text=True, check=False, timeout=180)
        return int(done.stdout.splitlines()[-1])

    assert megabytes("params", str(path), "--weights") - megabytes("--version") < 200


# ---- what is converted


PARTS = {"weights-missing", "weights-shape", "weights-unexpected", "gguf-missing"}  # sound files, but no whole model


@pytest.mark.parametrize("kind", ["safetensors", "index", "pickle", "gguf"])
def test_a_conversion_refuses_the_corpus_before_anything_is_written(
        cli: Any, corpus: Path, manifest: list[dict[str, Any]], tmp_path: Path, kind: str, within: Any,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Reject: exit 3 and the path, at once. Sound: a checkpoint, or the word for what is missing to make it one."""
    from llamactl.checkpoint import staging

    begun: list[str] = []
    hold = staging.Claim.hold
    monkeypatch.setattr(staging.Claim, "hold", lambda self: (begun.append(self.folder), hold(self)))
    if kind == "pickle":
        pytest.importorskip("torch")
        import llamactl.net.weights  # noqa: F401  its import is no work on a file
    rows = [m for m in manifest if m["kind"] == kind]
    assert Counter(m["expect"] for m in rows)["reject"] > 10
    wrong = []
    for m in rows:
        begun.clear()
        with within(60):
            got = cli("convert", corpus / m["id"], tmp_path / "out", "--no-proof", "--json")
        error = got.json().get("error", {"code": "", "path": "", "message": ""})
        if m["expect"] == "reject":
            good = got.code == 3 and error["code"] not in PARTS - ({"weights-missing"} if kind == "pickle" else set())
            good = good and m["id"] in (error["path"] or "") + error["message"] and got.err.count("\n") <= 2
        else:
            good = got.code == 0 or (got.code == 3 and error["code"] in PARTS)
        if not good:
            wrong.append(f"{m['id']}: exit {got.code} {error['code']}")
        if got.code and (begun or os.listdir(tmp_path)):
            wrong.append(f"{m['id']}: something was written")
        if not got.code:
            assert (tmp_path / "out" / "model.safetensors").exists()
            shutil.rmtree(tmp_path / "out")
    assert wrong == []


def test_a_conversion_refuses_in_little_memory_and_time(folder: Any, tmp_path: Path, environment: Any) -> None:
    """A header that claims 100 MB, in a sparse file of 2 GB; without torch."""
    path = folder()
    with (path / "model.safetensors").open("wb") as f:
        f.write((100_000_001).to_bytes(8, "little"))
        f.truncate(2_000_000_000)
    code = ("import re, runpy, sys, time; sys.argv = ['llamactl', *sys.argv[1:]]\n"
            "try: runpy.run_module('llamactl', run_name='__main__')\n"
            "finally: print(int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) >> 10, "
            "time.process_time(), 'torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code, "convert", str(path), "out"], env=environment(tmp_path),
                          cwd=tmp_path, capture_output=True, text=True, check=False, timeout=180)
    assert done.stderr.startswith("error[st-header-too-large]: ")
    megabytes, seconds, torch = done.stdout.split()
    assert int(megabytes) < 200
    assert float(seconds) < 1
    assert torch == "False"


@pytest.mark.slow
def test_a_conversion_of_the_corpus_from_outside_the_process(shared: Path, corpus: Path, tmp_path: Path,
                                                             environment: Any) -> None:
    command = f"{sys.executable} -m llamactl convert {{dir}} out --no-proof"
    done = subprocess.run(
        [sys.executable, shared / "badinputs" / "run_corpus.py", "--cmd", command, "--dir", corpus, "--kinds",
         "safetensors,index,pickle,gguf", "--ok", "0,3", "--warn", "0,3", "--sec", "20", "--mb", "900"],
        env=environment(tmp_path), capture_output=True, text=True, check=False, timeout=900)
    assert [line for line in done.stdout.splitlines() if line.startswith("FAIL")] == []
    assert "kept every promise" in done.stdout
