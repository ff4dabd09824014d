"""`llamactl check`: what CI sees of a budget that holds, one that does not, and one that is changed on purpose."""

from __future__ import annotations

import copy
import csv
import io
import json
import os
import re
import unicodedata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from jsonschema import Draft202012Validator, ValidationError

GOOD = '''\
# the promise
["meta-llama/Meta-Llama-3-8B"]
params = 8030261248              # published
weights_bytes = {max = "16.1GB"}
kv_cache_bytes = [{ctx = 8192, max = "1.1GB"}]
context = {min = "8k"}
tied = false
'''
BAD = GOOD.replace("8030261248 ", "8_000_000_000 ").replace('"1.1GB"', '"1GB"').replace('"8k"', '"128k"')
EVIL = "x\x1b[31m%\r\n::error::,:<b>\"'&|`[\u202e\ufffe]]>y"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """write(text, name): a budget file in the current folder."""

    def make(text: str, name: str = "budget.toml") -> Path:
        (tmp_path / name).write_bytes(text.encode())
        return tmp_path / name

    return make


def harmless(text: str) -> None:
    assert [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")] == []


# ---- verdicts


def test_a_budget_that_holds(cli: Any, write: Any) -> None:
    write(GOOD)
    got = cli("check", "budget.toml")
    assert (got.code, got.err) == (0, "")
    assert re.search(r"^ok +params += 8,030,261,248 +8,030,261,248 +0$", got.out, re.M)
    assert re.search(r"^ok +weights_bytes \(bfloat16\) +<= 16,100,000,000 B +16,060,522,496 B \(16.06 GB, 14.96 GiB\) "
                     r"+-39,477,504 B$", got.out, re.M)
    assert re.search(r"^limits +5 of 5 hold$", got.out, re.M)
    assert "(source: preset)" in got.out


@pytest.mark.parametrize("format", ["plain", "table", "json", "csv", "md", "github", "junit"])
def test_excess_is_exit_1_with_the_report_on_stdout(cli: Any, write: Any, format: str) -> None:
    write(BAD)
    got = cli("check", "budget.toml", "--format", format, env={"COLUMNS": "200"})
    assert got.code == 1
    assert got.err == "error[budget]: 3 of 5 limits do not hold\n"
    assert re.search(r"8,?030,?261,?248", got.out)
    if format in ("plain", "table", "md"):
        assert got.out.count("FAILS") == 3
        assert "+30,261,248" in got.out
        assert "-122,880" in got.out


def test_every_common_format_of_a_good_budget(cli: Any, write: Any) -> None:
    write(GOOD)
    got = cli("check", "budget.toml", "--format", "csv")
    table = list(csv.DictReader(io.StringIO(got.out)))
    assert table[2] == {"model": "meta-llama/Meta-Llama-3-8B", "name": "kv_cache_bytes", "bound": "max",
                        "options": "ctx=8192 batch=1 dtype=bf16 engine=arch tp=1", "limit": "1100000000",
                        "actual": "1073741824", "delta": "-26258176", "unit": "bytes", "ok": "true", "line": "5"}
    assert cli("check", "budget.toml", "-q").out == "0\n"
    assert "what is counted" in cli("check", "budget.toml", "-v").out
    assert "--update" in cli("check", "--help").out
    write(BAD)
    assert cli("check", "budget.toml", "-q").out == "3\n"
    assert cli("check", "budget.toml", "-q", "--format", "junit").out == "3\n"


def test_the_default_is_the_nearest_pyproject(cli: Any, write: Any, tmp_path: Path) -> None:
    write('[project]\nname = "x"\n[tool.llamactl.budget.gpt2]\nlayers = 12\n', "pyproject.toml")
    (tmp_path / "deep").mkdir()
    assert cli("check").code == 0
    got = cli("check", "--json", cwd=tmp_path / "deep").json()
    assert got["result"]["budget"] == "../pyproject.toml"
    assert got["inputs"]["budget"] is None


def test_yaml_and_relative_models(cli: Any, folder: Any, tiny: Any, tmp_path: Path) -> None:
    folder(name="sub/models/m")
    (tmp_path / "sub" / "b.yaml").write_text(f"./models/m: {{params: {tiny.total}, family: llama}}\nmodels/m: "
                                             "{layers: 2}\n")
    got = cli("check", "sub/b.yaml", "--json")
    assert got.code == 0, got.err
    assert [(m["id"], m["reference"], m["source"]["source"]) for m in got.models] == [
        ("m", "./models/m", "local"), ("m", "models/m", "local")]


def test_one_model_of_several(cli: Any, write: Any) -> None:
    write("[gpt2]\nlayers = 12\n[llama-3-8b]\nlayers = 31\n")
    assert cli("check", "budget.toml").code == 1
    assert cli("check", "budget.toml", "--model", "gpt2").code == 0
    got = cli("check", "budget.toml", "--model", "llama-3-8")
    assert (got.code, got.out) == (2, "")
    assert "no budget for 'llama-3-8'" in got.err
    assert "help: did you mean 'llama-3-8b'?" in got.err


def test_a_fit_on_a_device(cli: Any, write: Any) -> None:
    write('[llama-3-8b.fit]\ngpu = "l4-24gb"\nctx = 8192\nbatch = 1\ntp = 1\nkv_dtype = "fp8"\n')
    (row,) = cli("check", "budget.toml", "--json").model["rows"]
    fit = cli("fit", "llama-3-8b", "--gpu", "l4-24gb", "--ctx", "8192", "--kv-dtype", "fp8", "--json").model
    assert (row["limit"], row["actual"], row["ok"]) == (fit["memory_bytes"], fit["total_bytes"], True)
    write('[llama-3-70b]\nfit = [{gpu = "l4-24gb", ctx = 8192}, {gpu = "h100-80gbx4", ctx = 8192}]\n')
    got = cli("check", "budget.toml")
    assert got.code == 1
    assert re.search(r"^FAILS +fit \(l4-24gb, ctx 8,192, batch 1\) ", got.out, re.M)
    assert re.search(r"^ok +fit \(h100-80gbx4, ctx 8,192, batch 1\) ", got.out, re.M)
    write('[gpt2]\nfit = {gpu = "h10-80gb", ctx = 1}\n')
    got = cli("check", "budget.toml")
    assert (got.code, got.out) == (4, "")
    assert got.err.startswith("error[gpu-not-found]: budget.toml: ")


def test_files_that_must_be_clean(cli: Any, folder: Any, tiny: Any, write: Any) -> None:
    tensors = tiny.tensors(tiny.config)
    folder(tensors=tensors)
    write('["./model"]\ninspect = "clean"\n')
    assert cli("check", "budget.toml").code == 0
    tensors["extra"] = tensors.pop("lm_head.weight")
    folder(tensors=tensors)
    got = cli("check", "budget.toml")
    assert got.code == 1
    assert re.search(r"^FAILS +inspect +. clean +1 missing, 1 unexpected +-$", got.out, re.M)
    write('[gpt2]\ninspect = "clean"\n')
    got = cli("check", "budget.toml")
    assert (got.code, got.out) == (3, "")
    assert got.err.startswith("error[no-folder]: budget.toml: line 2: gpt2 inspect: gpt2 is a preset")


# ---- refusals


@pytest.mark.parametrize(("args", "text", "code", "word", "parts"), [
    (("check",), None, 2, "no-budget", ("no BUDGET given", "help: ", "llamactl check budget.toml")),
    (("check", "none.toml"), None, 4, "not-found", ("none.toml",)),
    (("check", "budget.toml"), "x = [", 3, "budget-syntax", ("budget.toml", "line 1")),
    (("check", "budget.toml"), "[gpt2]\nlayers = 12\nparms = 1\n", 3, "budget-key",
     ("line 3", "did you mean 'params'")),
    (("check", "budget.toml"), "[gpt2]\nlayers = true\n", 3, "budget-type", ("line 2", "gpt2 layers: is true")),
    (("check", "budget.toml"), "[lama-3-8b]\nlayers = 1\n", 4, "hub-offline", ("did you mean preset:llama-3-8b?",)),
    (("check", "budget.toml"), '["./none"]\nlayers = 1\n', 4, "not-found", ("./none",)),
    (("check", "budget.toml"), "[gpt2]\nkv_cache_bytes = {ctx = 1, tp = 5, max = 1}\n", 3, "tp",
     ("line 2", "5 devices")),
    (("check", "budget.toml", "--format", "junt"), GOOD, 2, "usage", ("github, junit", "did you mean 'junit'?")),
    (("params", "gpt2", "--format", "junit"), None, 2, "usage", ("is not one of table, plain, json, csv, md",)),
])
def test_a_failure_is_one_line(cli: Any, write: Any, args: tuple[str, ...], text: str | None, code: int, word: str,
                               parts: tuple[str, ...]) -> None:
    if text is not None:
        write(text)
    got = cli(*args)
    assert (got.code, got.out) == (code, "")
    assert got.err.startswith(f"error[{word}]: ")
    assert len(got.err.splitlines()) <= 2
    for part in parts:
        assert part in got.err


# ---- JSON


def objects(value: Any) -> Any:
    if isinstance(value, dict):
        yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(child)


def test_the_json_follows_its_schema_and_no_other(cli: Any, write: Any) -> None:
    schema = cli("schema", "check").json()
    Draft202012Validator.check_schema(schema)
    check = Draft202012Validator(schema)
    write(BAD + '[gpt2]\nfamily = "llama"\nfit = {gpu = "l4-24gb", ctx = 512}\n')
    got = cli("check", "budget.toml", "--json")
    body = got.json()
    check.validate(body)
    assert (body["schema"], body["command"], body["model"]) == (1, "check", None)
    assert body["result"]["ok"] is False
    assert [body["result"][k] for k in ("limits", "exceeded")] == [7, 4]
    first = body["result"]["models"][0]
    assert (first["family"], first["model_type"]) == ("llama", "llama")
    assert first["rows"][0] == {"name": "params", "options": {}, "bound": "exact", "limit": 8000000000,
                                "actual": 8030261248, "delta": 30261248, "unit": "count", "ok": False, "line": 3,
                                "was": None, "meaning": "all parameters; tied weights once, buffers not"}
    for number in range(len(list(objects(body)))):
        for change in ("more", "less"):
            other = copy.deepcopy(body)
            at = list(objects(other))[number]
            if at is other["inputs"] or any(at is row["options"] for m in other["result"]["models"]
                                            for row in m["rows"]):
                continue
            if change == "more":
                at["surprise"] = 1
            else:
                del at[next(iter(at))]
            with pytest.raises(ValidationError):
                check.validate(other)


def test_the_schema_equals_its_committed_copy(cli: Any) -> None:
    text, file = cli("schema", "check").out, Path(__file__).parent / "schemas" / "check.json"
    if os.environ.get("LLAMACTL_WRITE_SCHEMAS"):
        file.write_text(text, encoding="utf-8")
    assert json.loads(file.read_text(encoding="utf-8")) == json.loads(text)


# ---- GitHub


def test_github_marks_the_line_of_each_limit(cli: Any, write: Any) -> None:
    write(BAD)
    got = cli("check", "budget.toml", "--format", "github")
    lines = got.out.splitlines()
    assert lines[0] == ("::error file=budget.toml,line=3,title=meta-llama/Meta-Llama-3-8B::params is 8,030,261,248, "
                        "the budget says exactly 8,000,000,000 (+30,261,248)")
    assert [re.findall(r",line=(\d+),", x) for x in lines[:3]] == [["3"], ["5"], ["6"]]
    assert lines[3:] == ["2 of 5 limits hold"]
    write(GOOD)
    assert cli("check", "budget.toml", "--format", "github").out == "5 of 5 limits hold\n"


def test_github_is_given_the_path_inside_the_checkout(cli: Any, write: Any, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    path = write(BAD)
    for top, file in ((tmp_path, "budget.toml"), (tmp_path / "sub", str(path).replace(":", "%3A"))):
        got = cli("check", path, "--format", "github", cwd=tmp_path / "sub", env={"GITHUB_WORKSPACE": str(top)})
        assert f"::error file={file},line=3," in got.out


def test_the_summary_is_appended(cli: Any, write: Any, tmp_path: Path) -> None:
    write(BAD)
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    env = {"GITHUB_STEP_SUMMARY": str(summary)}
    cli("check", "budget.toml", "--format", "junit", env=env)
    assert summary.read_text() == "before\n"
    cli("check", "budget.toml", "--format", "github", env=env)
    text = summary.read_text()
    assert text.startswith("before\n**meta-llama/Meta-Llama-3-8B**\n")
    assert "| FAILS | params | = 8,000,000,000 | 8,030,261,248 | +30,261,248 |" in text
    cli("check", "budget.toml", "--format", "github", env=env)
    assert summary.read_text() == text + text.removeprefix("before\n")
    got = cli("check", "budget.toml", "--format", "github", env={"GITHUB_STEP_SUMMARY": str(tmp_path)})
    assert (got.code, got.out) == (5, "")
    assert got.err.startswith("error[summary]: ")


def test_junit_is_xml_with_a_case_a_limit(cli: Any, write: Any) -> None:
    write(BAD)
    root = ElementTree.fromstring(cli("check", "budget.toml", "--format", "junit").out)
    assert (root.tag, root.attrib["tests"], root.attrib["failures"]) == ("testsuites", "5", "3")
    (suite,) = root
    assert (suite.tag, suite.attrib["name"], suite.attrib["failures"]) == (
        "testsuite", "meta-llama/Meta-Llama-3-8B", "3")
    assert [c.tag for c in suite] == ["testcase"] * 5
    assert suite[0].attrib == {"classname": "meta-llama/Meta-Llama-3-8B", "name": "params exact", "file": "budget.toml",
                               "line": "3"}
    assert suite[0][0].attrib["message"].startswith("params is 8,030,261,248, the budget says exactly 8,000,000,000")
    assert [len(c) for c in suite] == [1, 0, 1, 1, 0]


@pytest.mark.parametrize("format", ["plain", "table", "json", "csv", "md", "github", "junit"])
def test_hostile_text_is_escaped(cli: Any, folder: Any, write: Any, tmp_path: Path, format: str) -> None:
    """The name of a model and the words of a limit come from others."""
    folder(name=EVIL.replace("/", ""))
    ref = json.dumps("./" + EVIL, ensure_ascii=True)
    write(f"[{ref}]\nlayers = 3\nfamily = {json.dumps(EVIL, ensure_ascii=True)}\n", "b:,%\u00e9.toml")
    summary = tmp_path / "summary.md"
    got = cli("check", "b:,%\u00e9.toml", "--format", format, env={"GITHUB_STEP_SUMMARY": str(summary)})
    assert got.code == 1, got.err
    harmless(got.out)
    harmless(got.err)
    if format == "junit":
        root = ElementTree.fromstring(got.out)
        assert got.out.isascii()
        name = root[0].attrib["name"]
        assert "\\x1b[31m%\\r\\n::error::,:<b>\"'&|`[" in name
        assert "\\ufffe]]>y" in name
        assert root[0][0].attrib["file"] == "b:,%\u00e9.toml"
        assert "\\x1b[31m" in root[0][1][0].attrib["message"]
    elif format == "github":
        lines = got.out.splitlines()
        assert len(lines) == 3
        assert all(re.fullmatch(r"::error file=b%3A%2C%25\u00e9\.toml,line=\d+,title=[^:,]*::.*", x) for x in lines[:2])
        assert all("%" not in re.sub(r"%(25|3A|2C|0A|0D)", "", x) for x in lines[:2])
        text = summary.read_text()
        harmless(text)
        assert "<b>" not in text
        assert re.search(r"(?<!\\)[`\[]", text) is None
        for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
            assert len({len(re.split(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    elif format == "json":
        assert got.json()["result"]["models"][0]["reference"] == "./" + EVIL


# ---- --update


def test_update_rewrites_the_limits_and_nothing_else(cli: Any, write: Any) -> None:
    path = write(BAD + '[gpt2]\nfamily = "llama"  # no\ntied = {exact = true}\n')
    got = cli("check", "budget.toml", "--update")
    assert got.code == 1
    assert got.err == "budget.toml: 3 limits updated\nerror[budget]: 1 of 7 limits do not hold\n"
    assert path.read_text() == BAD.replace("8_000_000_000", "8_030_261_248").replace('"1GB"', "1073741824") + (
        '[gpt2]\nfamily = "gpt2"  # no\ntied = {exact = true}\n')
    assert re.search(r"^ok +params += 8,030,261,248 +8,030,261,248 +0 +8,000,000,000$", got.out, re.M)
    assert re.search(r"^FAILS +context +>= 131,072 +8,192 +-122,880 +-$", got.out, re.M)
    assert os.listdir(path.parent) == ["budget.toml"]
    before = path.read_bytes()
    got = cli("check", "budget.toml", "--update", "--json")
    assert "budget.toml: 0 limits updated\n" in got.err
    assert path.read_bytes() == before
    assert {row["was"] for m in got.json()["result"]["models"] for row in m["rows"]} == {None}


def test_update_of_one_model_in_yaml_leaves_the_other(cli: Any, write: Any) -> None:
    path = write("# top\ngpt2: {layers: 1}   # a\nllama-3-8b: {layers: 1}   # b\n", "b.yml")
    assert cli("check", "b.yml", "--update", "--model", "llama-3-8b").code == 0
    assert path.read_text() == "# top\ngpt2: {layers: 1}   # a\nllama-3-8b: {layers: 32}   # b\n"


def test_an_update_that_fails_leaves_the_file(cli: Any, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(BAD)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    got = cli("check", "budget.toml", "--update")
    assert (got.code, got.out) == (5, "")
    assert got.err == "error[budget-update]: budget.toml: not updated: No space left on device\n"
    assert path.read_text() == BAD
    assert os.listdir(path.parent) == ["budget.toml"]


def test_without_update_nothing_is_written(cli: Any, write: Any) -> None:
    path = write(BAD)
    before = os.stat(path).st_mtime_ns, os.stat(path).st_ino
    cli("check", "budget.toml")
    assert (os.stat(path).st_mtime_ns, os.stat(path).st_ino) == before


# ---- the hook


def test_the_pre_commit_hook_runs_this_command() -> None:
    import yaml

    (hook,) = yaml.safe_load((Path(__file__).resolve().parents[2] / ".pre-commit-hooks.yaml").read_text())
    assert (hook["id"], hook["entry"], hook["language"]) == ("llamactl-check", "llamactl check", "python")
    assert hook["pass_filenames"] is False
    for name, wanted in (("pyproject.toml", True), ("a/pyproject.toml", True), ("m/config.json", True),
                         ("budget.yaml", True), ("ci/model-budget.toml", True), ("setup.py", False),
                         ("tsconfig.json", False), ("budget.py", False)):
        assert bool(re.search(hook["files"], name)) is wanted
