"""The page of `explore` as text: what it may load, what it holds, and that no name gets out of its place."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from base64 import b64encode
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path

import pytest

from llamactl.analysis.explore import explore
from llamactl.analysis.outline import outline
from llamactl.analysis.params import params
from llamactl.api import load
from llamactl.render.explore import SCRIPTS, page
from llamactl.render.parts import PARTS
from llamactl.source import presets

FOLDER = Path(str(files("llamactl.render") / "page"))


def made(a: str = "gpt2", b: str | None = "llama-3-8b", **names: str) -> str:
    report = explore(load(a).model, load(b).model if b else None, start=names.get("start", a),
                     goal=names.get("goal", b))
    return page(report, [{"name": "x", "title": "X", "memory_bytes": 1 << 34}])


@pytest.fixture(scope="module")
def text() -> str:
    return made()


def test_nothing_is_loaded_from_anywhere(text: str) -> None:
    """The policy allows the page's own style and its one script, by digest; no tag names a place to load from."""
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy
    assert policy[1] == ("default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
                         f"script-src 'sha256-{digest}'")
    assert not re.search(r"<(link|img|iframe|object|embed|audio|video|source|base|form)\b", text)
    assert not re.search(r"\b(src|href|action|srcset)=", text)
    assert set(re.findall(r"https?://[^\"\s]*", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|eval|Function|innerHTML|outerHTML|"
                         r"insertAdjacentHTML|document\.write|import)\b", script)


def test_it_is_small() -> None:
    assert len(made("gpt2", "llama-3-8b")) < 400_000
    assert len(made("gemma-3-27b", "llama-4-maverick")) < 1_500_000


def test_a_name_cannot_leave_its_place() -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&\"'"
    text = made(start=hostile, goal="<!--")
    assert text.count("<script") == 2
    assert "<img" not in text
    assert "<!--" not in text
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert data
    assert json.loads(data[1])["start"]["id"] == hostile


def test_the_same_models_make_the_same_page() -> None:
    assert made() == made()


def test_every_kind_of_part_is_explained() -> None:
    seen = {p.kind for n in presets.names() for p in outline(load(f"preset:{n}").model).parts.values()}
    assert seen <= set(PARTS)
    assert all(title and words for title, _, words in PARTS.values())


def test_every_file_of_the_page_is_in_it(text: str) -> None:
    assert {f.stem for f in FOLDER.glob("*.js")} == set(SCRIPTS)
    for file in (*FOLDER.glob("*.js"), *FOLDER.glob("*.css")):
        assert file.read_text(encoding="utf-8") in text
        lines = file.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 350
        assert max(map(len, lines)) <= 130, file.name


def test_every_component_stands_in_one_row() -> None:
    """The rows of "where the parameters live" are all leaves of `params`' components, each once."""
    rows = (FOLDER / "charts.js").read_text(encoding="utf-8").partition("COMPONENTS = [")[2].partition("];")[0]
    named = [n for row in re.findall(r"\[\"[a-z -]+\", \[([^\]]*)\]\]", rows) for n in re.findall(r"\"([^\"]+)\"", row)]
    parts = params(load("gpt2").model).components
    leaves = [f"{name}.{k}" if k else name for name, value in asdict(parts).items()
              for k in (value if isinstance(value, dict) else ("",)) if k != "total"]
    assert sorted(named) == sorted(leaves)


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
def test_the_program_is_valid_javascript(text: str, tmp_path: Path) -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (tmp_path / "page.js").write_text(script, encoding="utf-8")
    done = subprocess.run(["node", "--check", str(tmp_path / "page.js")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_number_that_is_none_is_refused() -> None:
    """JSON has no NaN, and a page no number that is none."""
    report = explore(load("gpt2").model, None, start="gpt2")
    (proof, *_) = report.proofs
    broken = replace(report, proofs=(replace(proof, ffn_share_blocks=float("nan")),))
    with pytest.raises(ValueError, match="JSON"):
        page(broken, [])
