"""The house rules, read from the source text: who may import whom, no branching on names, frozen values, sizes."""

from __future__ import annotations

import ast
import re
import shutil
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest

import llamactl
from llamactl import arch
from llamactl.errors import InputRefused

PACKAGE = Path(llamactl.__file__).resolve().parent
FILES = sorted(PACKAGE.rglob("*.py"))
FAMILY_FILES = [f for f in FILES if f.parent.name == "arch" and not f.name.startswith("_")]

# room -> the rooms it may import. Top-level modules are rooms of their own.
MAY = {
    "errors": set(),
    "atomic": {"errors"},
    "spec": {"errors"},
    "arch": {"spec", "errors"},
    "source": {"spec", "atomic", "errors"},
    "analysis": {"spec", "errors"},
    "checkpoint": {"spec", "atomic", "errors"},
    "net": {"checkpoint", "spec", "errors"},
    "tokens": {"checkpoint", "spec", "errors"},
    "verify": {"net", "checkpoint", "analysis", "spec", "errors"},
    "lab": {"verify", "net", "analysis", "spec", "errors"},
    "render": {"analysis", "errors"},
    "api": {"arch", "source", "analysis", "checkpoint", "net", "verify", "spec", "errors"},
    "__init__": {"api", "errors"},
    "__main__": {"__init__", "cli"},
    "cli": {"__init__", "api", "arch", "source", "analysis", "checkpoint", "net", "tokens", "verify", "lab", "render",
            "spec", "atomic", "errors"},
}
# The one way up: a notebook asks a report for its own HTML.
IN_FUNCTION = {("analysis", "render"): "_repr_html_", ("verify", "render"): "_repr_html_"}
TORCH_ROOMS = {"net", "verify", "lab"}

# third party -> the rooms that may import it
THIRD_PARTY = {
    "typer": {"cli"}, "click": {"cli"}, "rich": {"render"}, "torch": TORCH_ROOMS, "numpy": TORCH_ROOMS,
    "safetensors": TORCH_ROOMS, "transformers": TORCH_ROOMS, "llama_cpp": {"net"},
    "huggingface_hub": {"source"}, "yaml": {"source"},
    "xxhash": {"checkpoint"}, "pynvml": {"source"}, "matplotlib": {"render"},
    "gguf": {"net"}, "tokenizers": {"tokens"}, "sentencepiece": {"tokens"}, "jinja2": {"tokens"},
}
IN_FUNCTIONS_ONLY = {"huggingface_hub", "pynvml", "yaml", "transformers", "llama_cpp", "matplotlib", "gguf",
                     "tokenizers", "sentencepiece", "jinja2"}


class Import(NamedTuple):
    """One import. inside: names of the functions around it, outermost first."""

    module: str
    line: int
    inside: tuple[str, ...]


@lru_cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def room(file: Path) -> str:
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else file.stem


def where(file: Path, line: int) -> str:
    return f"{file.relative_to(PACKAGE.parent)}:{line}"


def imports(node: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[Import]:
    """Every import below `node`, by full module name; `from llamactl import x` names llamactl.x."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(a.name, child.lineno, inside) for a in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            if child.module == "llamactl":
                yield from (Import(f"llamactl.{a.name}", child.lineno, inside) for a in child.names)
            else:
                yield Import(str(child.module), child.lineno, inside)
        elif isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            yield from imports(child, (*inside, "TYPE_CHECKING"))  # brings nothing when the program runs
        else:
            functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
            name = (getattr(child, "name", "lambda"),) if isinstance(child, functions) else ()
            yield from imports(child, inside + name)


def target(module: str) -> str:
    """The room that `module` of llamactl is in."""
    name = (module.split(".") + [""])[1]
    return name if name in MAY else "__init__"


def direction(file: Path, i: Import) -> str | None:
    """What is wrong with an import inside the package, None if nothing is."""
    ours, theirs = room(file), target(i.module)
    if ours == theirs:
        return None
    if theirs not in MAY[ours] and IN_FUNCTION.get((ours, theirs), "") not in i.inside:
        return f"{ours} may not import {theirs}"
    if theirs in TORCH_ROOMS and ours not in TORCH_ROOMS and not i.inside:
        return f"{theirs} brings torch: import it inside the function that needs it"
    return None


def stranger(file: Path, i: Import) -> str | None:
    """What is wrong with an import from outside the package, None if nothing is."""
    top = i.module.split(".")[0]
    if top in sys.stdlib_module_names:
        return None
    if room(file) not in THIRD_PARTY.get(top, ()):
        return f"{room(file)} may not import {top}"
    if top in IN_FUNCTIONS_ONLY and not i.inside:
        return f"{top} is slow: import it inside the function that needs it"
    return None


@pytest.mark.parametrize("file", [pytest.param(f, id=str(f.relative_to(PACKAGE))) for f in FILES])
def test_imports(file: Path) -> None:
    assert room(file) in MAY, "a new room: say in MAY what it may import"
    wrong = []
    for i in imports(tree(file)):
        fault = direction(file, i) if i.module.split(".")[0] == "llamactl" else stranger(file, i)
        if fault:
            wrong.append(f"{where(file, i.line)}: {fault}")
    assert wrong == []


@pytest.mark.parametrize(("file", "text", "fault"), [
    ("spec/x.py", "from llamactl.arch import families", "spec may not import arch"),
    ("spec/x.py", "def f():\n from llamactl import arch", "spec may not import arch"),
    ("arch/x.py", "import llamactl.analysis.params", "arch may not import analysis"),
    ("analysis/x.py", "def f():\n import llamactl.checkpoint", "analysis may not import checkpoint"),
    ("analysis/x.py", "from llamactl.render import html", "analysis may not import render"),
    ("analysis/x.py", "def f():\n from llamactl.render import html", "analysis may not import render"),
    ("analysis/x.py", "class R:\n def _repr_html_(self):\n  from llamactl.render import html", None),
    ("cli/x.py", "from llamactl.net import load", "brings torch"),
    ("cli/x.py", "def f():\n from llamactl.net import load", None),
    ("verify/x.py", "from llamactl.net import load", None),
    ("verify/x.py", "from llamactl.cli import app", "verify may not import cli"),
    ("errors.py", "import llamactl.spec.dtype", "errors may not import spec"),
    ("spec/x.py", "import numpy", "spec may not import numpy"),
    ("analysis/x.py", "def f():\n import torch.nn", "analysis may not import torch"),
    ("cli/x.py", "import rich.table", "cli may not import rich"),
    ("render/x.py", "import typer", "render may not import typer"),
    ("render/x.py", "from rich.table import Table", None),
    ("source/x.py", "import huggingface_hub", "inside the function"),
    ("source/x.py", "def f():\n from huggingface_hub import constants", None),
    ("net/x.py", "import torch", None),
    ("tokens/x.py", "import tokenizers", "inside the function"),
    ("tokens/x.py", "if TYPE_CHECKING:\n from tokenizers import Tokenizer", None),
    ("tokens/x.py", "if TYPE_CHECKING:\n import torch", "tokens may not import torch"),
])
def test_the_import_rules_see_what_they_should(file: str, text: str, fault: str | None) -> None:
    path = PACKAGE / file
    (i,) = imports(ast.parse(text))
    found = direction(path, i) if i.module.startswith("llamactl") else stranger(path, i)
    assert found == fault if fault is None else fault in str(found)


# --- law 1: no branch on a model's name


def named(node: ast.AST, names: frozenset[str]) -> bool:
    """Whether a family's name stands in `node` as a string, alone or in a tuple, list, set or dict key."""
    if isinstance(node, ast.Constant):
        return node.value in names
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(named(x, names) for x in node.elts)
    return isinstance(node, ast.Dict) and any(k is not None and named(k, names) for k in node.keys)


def asks_model_type(node: ast.AST) -> bool:
    """Whether `node` is a config's or a model's own model_type."""
    return getattr(node, "attr", getattr(node, "id", None)) == "model_type"


def branches(node: ast.AST, names: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Comparisons, prefix tests, lookups and match cases with a family's name."""
    for n in ast.walk(node):
        if isinstance(n, ast.Compare):
            sides = [n.left, *n.comparators]
            if any(named(s, names) for s in sides) and not any(asks_model_type(s) for s in sides):
                yield n.lineno, "compares with a family's name"
        elif isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute):
            if n.func.attr in ("startswith", "endswith", "removeprefix") and any(named(a, names) for a in n.args):
                yield n.lineno, "tests for a family's name"
        elif isinstance(n, ast.MatchValue) and named(n.value, names):
            yield n.lineno, "matches a family's name"
        elif isinstance(n, ast.Dict) and sum(k is not None and named(k, names) for k in n.keys) > 1:
            yield n.lineno, "looks up by a family's name"


def family_names() -> frozenset[str]:
    return frozenset(arch.families()) | frozenset(arch.families().values())


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_no_branch_on_a_name(file: Path) -> None:
    """A family's file may ask for model_type, which is a config value; nobody else asks anything of the kind."""
    found = [f"{where(file, line)}: {fault}" for line, fault in branches(tree(file), family_names())]
    assert found == []
    if room(file) not in ("arch", "cli"):
        compared = [n for n in ast.walk(tree(file)) if isinstance(n, ast.Compare)]
        assert not any(asks_model_type(s) for n in compared for s in (n.left, *n.comparators))


@pytest.mark.parametrize("text", [
    "if family == 'llama': pass", "if m.family in ('gemma2', 'gemma3'): pass", "if 'llama' != name: pass",
    "if name.startswith('gpt2'): pass", "x = {'llama': 1, 'gemma': 2}[name]", "x = name in {'qwen2': 1}",
    "match family:\n case 'falcon': pass",
])
def test_a_branch_on_a_name_is_seen(text: str) -> None:
    assert list(branches(ast.parse(text), family_names()))


def test_a_question_for_a_config_value_is_none() -> None:
    assert not list(branches(ast.parse("if model.model_type == 'gemma3_text': x = {'llama': 1}"), family_names()))


# --- law 10: frozen values in spec/


def dataclass_options(node: ast.ClassDef) -> set[str] | None:
    """The options of a @dataclass that are set to true, None for another class."""
    for d in node.decorator_list:
        call = d if isinstance(d, ast.Call) else None
        if getattr(call.func if call else d, "id", None) == "dataclass":
            return {str(k.arg) for k in (call.keywords if call else []) if getattr(k.value, "value", None) is True}
    return None


@pytest.mark.parametrize("file", [f for f in FILES if room(f) == "spec"], ids=lambda f: f.stem)
def test_spec_is_frozen_slotted_keyword_only_and_flat(file: Path) -> None:
    for node in ast.walk(tree(file)):
        if not isinstance(node, ast.ClassDef):
            continue
        options = dataclass_options(node)
        assert options is None or options >= {"frozen", "slots", "kw_only"}, f"{where(file, node.lineno)}: {node.name}"
        assert {ast.unparse(b) for b in node.bases} <= {"NamedTuple", "Exception"}, f"{node.name} inherits"


def test_reports_are_frozen_too() -> None:
    """What analysis and verify hand out can be kept and compared."""
    loose = [
        where(f, n.lineno)
        for f in FILES if room(f) in ("analysis", "verify", "lab") for n in ast.walk(tree(f))
        if isinstance(n, ast.ClassDef) and (options := dataclass_options(n)) is not None and "frozen" not in options
    ]
    assert loose == []


# --- law 11 and docstrings


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_size(file: Path) -> None:
    lines = len(file.read_text(encoding="utf-8").splitlines())
    assert lines <= (85 if file in FAMILY_FILES else 350)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_docstrings(file: Path) -> None:
    """Every module, public function and class says what it is. What describe and a layout do is said in arch itself."""
    body = tree(file).body
    assert not body or ast.get_docstring(tree(file))
    contract = {"describe", "HF"} if file in FAMILY_FILES else set()
    silent = [
        f"{where(file, n.lineno)}: {n.name}" for n in body
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not n.name.startswith("_") and n.name not in contract and not ast.get_docstring(n)
    ]
    assert silent == []


# --- families


@pytest.mark.parametrize("file", FAMILY_FILES, ids=lambda f: f.stem)
def test_a_family_file_is_complete(file: Path) -> None:
    module = arch.family(file.stem)
    assert module.MODEL_TYPES
    assert all(arch.families()[t] == file.stem for t in module.MODEL_TYPES)
    assert callable(module.describe)
    assert callable(module.HF) or isinstance(module.HF, tuple)


def test_no_model_type_is_listed_twice() -> None:
    listed = [t for f in FAMILY_FILES for t in arch.family(f.stem).MODEL_TYPES]
    assert len(listed) == len(set(listed)) == len(arch.families())


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of arch/ that families() reads, for a newcomer to add a file to."""
    for file in FAMILY_FILES:
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(arch, "__file__", str(tmp_path / "__init__.py"))
    return tmp_path


def test_a_newcomers_file_is_found(copied: Path) -> None:
    read = arch.families.__wrapped__
    (copied / "_shared.py").write_text("")
    (copied / "notes.txt").write_text("")
    (copied / "foo.py").write_text('MODEL_TYPES = (\n    "foo",\n    "foo_text",\n)\n')
    assert read() == {**arch.families(), "foo": "foo", "foo_text": "foo"}


def test_a_model_type_of_two_files_is_refused(copied: Path) -> None:
    (copied / "foo.py").write_text('MODEL_TYPES = ("foo", "llama")\n')
    with pytest.raises(RuntimeError, match=r"'llama' is listed by arch/llama.py and arch/foo.py"):
        arch.families.__wrapped__()


def test_a_file_without_model_types_is_refused(copied: Path) -> None:
    (copied / "foo.py").write_text("def describe(cfg): ...\n")
    with pytest.raises(RuntimeError, match=r"arch/foo.py has no MODEL_TYPES"):
        arch.families.__wrapped__()


@pytest.mark.parametrize(("word", "near"), [
    ("lama", "llama"), ("LLaMA", "llama"), ("gemma-2", "gemma2"), ("qwen_2", "qwen2"), ("mistral_7b", "mistral"),
    ("gptneox", "gpt_neox"), ("deepseek", "deepseek_v2"),
])
def test_a_near_type_is_named(word: str, near: str) -> None:
    with pytest.raises(InputRefused) as caught:
        arch.describe({"model_type": word}, "config.json")
    listed = re.search(r"nearest known: (.*)$", caught.value.message)
    assert listed
    assert near in listed[1].split(", ")
