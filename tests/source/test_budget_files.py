"""Budget files: found, read whatever their bytes are, and changed in place at the value alone."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llamactl.errors import InputRefused, LlamactlError, NotAvailable, UsageError
from llamactl.source.budget import MAX_BUDGET_BYTES, find, located, parse, read

HERE = Path(__file__).parent
TOML = (HERE / "promises.toml").read_text(encoding="utf-8")
YAML = (HERE / "promises.yaml").read_text(encoding="utf-8")


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(path, value) of all that is no table and no list."""
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(child, (*at, key))
    else:
        yield at, value


def refused(raw: bytes, name: str) -> InputRefused:
    with pytest.raises(InputRefused) as caught:
        parse(raw, name)
    assert caught.value.exit_code == 3
    return caught.value


# ---- found


def test_the_nearest_pyproject_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert find(None) == os.path.join("..", "..", "pyproject.toml")
    assert set(read(None).tables) == {"meta-llama/Meta-Llama-3-8B", "gpt2"}
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    with pytest.raises(UsageError, match=r"\.\./pyproject\.toml has no \[tool\.llamactl\.budget\]") as caught:
        read(None)
    assert "params = 8030261248" in str(caught.value.help)
    assert read(str(tmp_path)).path == str(tmp_path / "pyproject.toml")


def test_nothing_found_is_a_usage_error_with_an_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    with pytest.raises(UsageError) as caught:
        read(None)
    assert (caught.value.code, caught.value.exit_code) == ("no-budget", 2)
    assert "llamactl check budget.toml" in str(caught.value.help)


def test_a_folder_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", gone)
    with pytest.raises(NotAvailable):
        find(None)


@pytest.mark.parametrize(("name", "error", "code"), [
    ("none.toml", NotAvailable, "not-found"), ("budget.json", InputRefused, "budget-format"),
    ("budget", InputRefused, "budget-format"), ("fifo.toml", InputRefused, "not-a-file"),
    ("big.yaml", InputRefused, "json-too-large"), ("empty.yaml", InputRefused, "budget-empty"),
    ("empty.toml", InputRefused, "budget-empty"), ("dangling.yml", InputRefused, "dangling-link"),
])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, error: type[LlamactlError], code: str) -> None:
    os.mkfifo(tmp_path / "fifo.toml")
    (tmp_path / "big.yaml").write_bytes(b"#" * (MAX_BUDGET_BYTES + 1))
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "dangling.yml").symlink_to(tmp_path / "nowhere")
    with pytest.raises(error) as caught:
        read(str(tmp_path / name))
    assert caught.value.code == code
    assert caught.value.path == str(tmp_path / name)


def test_relative_models_start_at_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("here/gpt2", "here/acme/x", "there/models/m"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", "/home/me")
    budget = "../there/budget.toml"
    assert located("./m", budget) == "../there/./m"
    assert located("models/m", budget) == "../there/models/m"
    assert located("models/m", str(tmp_path / "there/budget.toml")) == f"{tmp_path}/there/models/m"
    assert located("/abs/m", budget) == "/abs/m"
    assert located("~/m", budget) == "/home/me/m"
    assert located("preset:gpt2", budget) == "preset:gpt2"
    assert located("llama-3-8b", budget) == "llama-3-8b"
    assert located("acme/y@main", budget) == "acme/y@main"
    # a folder of the current folder is never what the file means
    assert located("gpt2", budget) == "preset:gpt2"
    assert located("gpt2", budget, hub=True) == "hf://gpt2"
    assert located("acme/x", budget) == "hf://acme/x"
    assert located("gpt2", "budget.toml") == "./gpt2"


# ---- read


@pytest.mark.parametrize(("text", "code", "parts"), [
    ("a = ", "budget-syntax", ("not TOML", "line 1")), ("[a]\nb = 1\nb = 2\n", "budget-syntax", ("line 3",)),
    ("[a]\n[a]\n", "budget-syntax", ("line 2",)), ("x = 1\n\x00", "budget-syntax", ("line 2",)),
    ("x = " + "[" * 70 + "]" * 70, "budget-depth", ("64",)), ("x = " + "[" * 9000 + "]" * 9000, "budget-depth", ()),
    (".".join("a" * 70) + " = 1", "budget-depth", ("64",)), ("x = 1979-99-99", "budget-syntax", ()),
    (" . ".join(['"a"'] * 70) + " = 1", "budget-depth", ()), ("x = " + "9" * 5000, "budget-syntax", ()),
    ("tool = 1", "budget-type", ("tool is not a table",)), ("[tool]\nllamactl = 2", "budget-type", ("tool.llamactl",)),
    ("[[tool.llamactl.budget]]\na = 2", "budget-type", ("tool.llamactl.budget is not a table",)),
    ("\ud800", "budget-encoding", ("line 1",)), ("# x\n\ud800", "budget-encoding", ("line 2",)),
])
def test_malformed_toml(text: str, code: str, parts: tuple[str, ...]) -> None:
    e = refused(text.encode("utf-8", "surrogatepass"), "b.toml")
    assert (e.code, e.path) == (code, "b.toml")
    for part in parts:
        assert part in e.message


@pytest.mark.parametrize(("text", "code", "parts"), [
    ("a: [1", "budget-syntax", ("not YAML", "line 1")), ("a:\n  b: 1\n  b: 2\n", "budget-duplicate", ("line 3", "'b'")),
    ("a: &x 1\nb: *x\n", "budget-anchor", ("line 1",)), ("a: 1\nb: *x\n", "budget-anchor", ("line 2",)),
    ("a: !!python/object:os.system 1", "budget-tag", ("line 1",)), ("a: !!int '1'", "budget-tag", ()),
    ("a: 010", "budget-value", ("'010'", "line 1")), ("a: 1:30", "budget-value", ()), ("a: .nan", "budget-value", ()),
    ("a: 2001-99-99", "budget-value", ()), ("a: 2001-01-01", "budget-value", ()), ("a: 0x10", "budget-value", ()),
    ("a: " + "9" * 5000, "budget-value", ()), ("a: 0b_", "budget-value", ()),
    ("a: 1\n---\nb: 2\n", "budget-syntax", ("line 2", "second document")), ("1: 2", "budget-key", ("line 1", "1")),
    ("? [a]\n: 2", "budget-key", ()), ("a: \"\\UFFFFFFFF\"", "budget-syntax", ()), ("<<: {a: 1}", "budget-value", ()),
    ("%YAML " + "9" * 5000 + ".1\n---\na: 1", "budget-syntax", ()), ("no: 1", "budget-key", ("False",)),
    ("[" * 70 + "]" * 70, "budget-depth", ("64", "line 1")), ("[" * 100_000, "budget-depth", ()),
    ("- " * 50_000, "budget-depth", ()), ("x: 1\n\x00", "budget-syntax", ("line 2",)), ("- a\n", "budget-type", ()),
    ("word", "budget-type", ("not a table",)), ("a: 1\n\ud800", "budget-encoding", ("line 2",)),
    ("tool: {llamactl: 1}", "budget-type", ("tool.llamactl",)), ("a: !\n", "budget-tag", ()),
])
def test_malformed_yaml(text: str, code: str, parts: tuple[str, ...], within: Any) -> None:
    with within(60):
        e = refused(text.encode("utf-8", "surrogatepass"), "b.yaml")
    assert (e.code, e.path) == (code, "b.yaml")
    for part in parts:
        assert part in e.message


@pytest.mark.parametrize("text", [
    ".".join(["a"] * 120_000) + " = 1", '"a".' * 60_000 + "a = 1", "a" * 250_000, '"' * 250_000, "'\"" * 125_000,
    "[" + "a." * 120_000 + "a]", "x = [" + "1," * 120_000 + "]", "a=1\n" * 60_000, "x = '''" + "'" * 200_000,
])
def test_no_toml_takes_long(text: str, within: Any) -> None:
    with within(100):
        refused(text.encode(), "b.toml") if not text.startswith("x = [") else parse(text.encode(), "b.toml")


def test_both_forms_say_the_same() -> None:
    toml, both = parse(TOML.encode(), "pyproject.toml"), parse(YAML.encode(), "b.yml")
    llama, gpt2 = toml.tables["meta-llama/Meta-Llama-3-8B"], toml.tables["gpt2"]
    assert llama["params"] == both.tables["meta-llama/Meta-Llama-3-8B"]["params"] == 8030261248
    assert gpt2["kv_cache_bytes"] == both.tables["gpt2"]["kv_cache_bytes"] == [{"ctx": 1024, "max": 1},
                                                                             {"ctx": 512, "max": 2}]
    assert gpt2["tied"] is both.tables["gpt2"]["tied"] is False
    assert toml.lines()["meta-llama/Meta-Llama-3-8B", "params"] == 6
    assert toml.lines()["gpt2", "kv_cache_bytes", 1, "max"] == 18
    assert both.lines()["meta-llama/Meta-Llama-3-8B", "params"] == 3
    assert both.lines()["gpt2", "kv_cache_bytes", 1, "max"] == 9


def test_a_plain_toml_file_and_a_byte_order_mark() -> None:
    for text in ("[gpt2]\nparams = 1\n", "\ufeff[gpt2]\nparams = 1\n", "[tool.llamactl.budget.gpt2]\nparams = 1\n"):
        file = parse(text.encode(), "b.toml")
        assert file.tables == {"gpt2": {"params": 1}}
        assert file.lines() == {("gpt2", "params"): 2}
    assert parse("\ufeffgpt2: {params: 1}".encode(), "b.yaml").tables == {"gpt2": {"params": 1}}
    assert parse(b"[gpt2]\nparams = 1\n", "pyproject.toml").tables == {}


# ---- spans


TRICKY = [
    TOML, TOML.replace("\n", "\r\n"),
    'a = """x\n"q" \\""" ]}#"""""\nb = \'\'\'\'\'x\'\'\'\'\'\nc = "\\" # no"\nd = \'\\\'\n"e.f" . \'g\'.h= true # c\n',
    'x = [ [1, 2], # ]\n [ "]" , {a.b = 1, "c" = [3]} ,\n], 1979-05-27 07:32:00, -inf ]\ny = {}\nz=[]\nw = 1',
    "[[a]]\nx = 1\n[a.b]\ny = 2\n[[a.c]]\nz = 3\n[[a.c]]\nz = 4\n[[a]]\n[a.b]\ny = 5\n[[a.c]]\nz = 6\n",
    '"\\u00e9" = 1\n[ "a b" . c ]\n"" = 2\n\'d\' .x= 0x1\n',
]


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and repr(a) == repr(b)


@pytest.mark.parametrize("text", TRICKY)
def test_every_toml_value_is_found_where_it_stands(text: str) -> None:
    from llamactl.source.tomlspans import toml_spans

    data, spans = tomllib.loads(text), toml_spans(text)
    assert {at for at, _ in leaves(data)} == set(spans)
    for at, value in leaves(data):
        assert same(tomllib.loads("v = " + text[slice(*spans[at])])["v"], value)


SOUP = st.text(alphabet="[]{}=\"'#.,\n\r ab1-_\\:", max_size=40)
PIECES = st.lists(st.sampled_from(
    ["[a]\n", "[[a]]\n", "[a.b]\n", "[[a.b]]\n", "x = 1\n", "y.z = 'q'\n", "w = [1, {b = 2}, [3]]\n", "# c\n", "\n",
     "v = {a = 1, b.c = [\"]\"]}\n", 's = """a\n"b"""" # x\n', "[\"c d\".e]\n", "t = 1979-05-27 07:32:00\n"]),
    max_size=8).map("".join)


@given(st.one_of(SOUP, PIECES))
def test_any_toml_that_parses_has_its_values_located(text: str) -> None:
    try:
        file = parse(text.encode(), "b.toml")
    except InputRefused:
        return
    assert {at for at, _ in leaves(file.tables)} == set(file.spans)
    for at, value in leaves(file.tables):
        assert same(tomllib.loads("v = " + file.text[slice(*file.spans[at])])["v"], value)


@given(st.dictionaries(st.text(min_size=1, max_size=5), st.recursive(
    st.one_of(st.integers(-10**18, 10**18), st.booleans(), st.text(max_size=8)),
    lambda x: st.one_of(st.lists(x, max_size=3), st.dictionaries(st.text(max_size=4), x, max_size=3)), max_leaves=6)),
    st.booleans())
def test_any_yaml_of_plain_values_is_read_and_located(data: dict[str, Any], flow: bool) -> None:
    if "tool" in data:
        return
    text = yaml.safe_dump(data, default_flow_style=flow, allow_unicode=True)
    file = parse(text.encode(), "b.yaml")
    assert file.tables == yaml.safe_load(text)  # its own writer turns \x85 into a space
    for at, value in leaves(file.tables):
        assert same(yaml.safe_load("v: " + file.text[slice(*file.spans[at])])["v"], value) or "\n" in str(value)


@given(st.one_of(st.binary(max_size=200), st.text(max_size=60).map(str.encode), SOUP.map(str.encode)),
       st.sampled_from(["b.toml", "b.yaml", "pyproject.toml"]))
def test_no_bytes_raise_anything_of_their_own(raw: bytes, name: str) -> None:
    from llamactl.analysis.limits import read_budget

    try:
        file = parse(raw, name)
        for ref, table in file.tables.items():
            read_budget(ref, table, path=name, lines={at[1:]: n for at, n in file.lines().items()})
    except InputRefused as e:
        found = e.path
    else:
        found = name
    assert found == name
