"""Regenerate README.md's console blocks from the program, with cog.

    python tests/readme.py            # rewrite README.md
    python tests/readme.py --check    # exit 1 if a block is out of date
"""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def console(*commands: str, lines: int | None = None) -> None:
    """Print a console block: each command as typed, one after another in the same folder, and what it prints on both
    streams. lines: cut after so many.
    """
    print("```console")
    with tempfile.TemporaryDirectory() as tmp:
        for command in commands:
            print(f"$ {command}")
            out = run(command, Path(tmp)).splitlines()
            print("\n".join(out[:lines]))
            if lines is not None and len(out) > lines:
                print("...")
    print("```")


def picture(command: str, file: str, alt: str) -> None:
    """Print a command that draws `file`, and the picture. It is drawn anew only when README.md is rewritten:

    its bytes depend on the version of matplotlib, its content on the numbers that the tests hold.
    """
    name = Path(file).name
    if not os.environ.get("README_CHECK"):
        with tempfile.TemporaryDirectory() as tmp:
            out = run(f"{command} --plot {name}", Path(tmp))
            assert (Path(tmp) / name).is_file(), out
            shutil.copyfile(Path(tmp) / name, ROOT / file)
    print(f"```console\n$ {command} --plot {name}\n```\n\n![{alt}]({file})")


def screenshot(command: str, file: str, alt: str, *, address: str = "", scheme: str = "light", at: str = "body",
               height: int = 900) -> None:
    """Print `file`, a picture of the page that `command` writes, from the element `at` on. As with `picture`, it is
    drawn anew only when README.md is rewritten; it needs the extra `browser` and Chromium.
    """
    if not os.environ.get("README_CHECK"):
        from playwright.sync_api import sync_playwright

        with tempfile.TemporaryDirectory() as tmp, sync_playwright() as p:
            out = run(command, Path(tmp))
            (page_file,) = Path(tmp).glob("*.html")
            chromium = shutil.which("chromium") or shutil.which("chromium-browser")
            browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": height}, color_scheme=scheme)
            page.goto(page_file.as_uri() + address)
            assert page.evaluate("document.documentElement.dataset.ready") == "yes", out
            page.eval_on_selector(at, "e => e.scrollIntoView()")
            page.screenshot(path=ROOT / file)
            browser.close()
    assert (ROOT / file).is_file(), file
    print(f"![{alt}]({file})")


TERMINAL = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font: {char_height}px/{line_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono",
monospace; }} {styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


def terminal(command: str, file: str, alt: str, *, columns: int = 100) -> None:
    """Print `file`, a picture of what `command` shows on a terminal; drawn anew only when README.md is rewritten."""
    if not os.environ.get("README_CHECK"):
        from rich.console import Console
        from rich.text import Text

        with tempfile.TemporaryDirectory() as tmp:
            out = run(command, Path(tmp), NO_COLOR=None, COLUMNS=str(columns), FORCE_COLOR="1", TERM="xterm-256color",
                      LLAMACTL_FORMAT="table")
        console_ = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
        console_.print(Text(f"$ {command}"), Text.from_ansi(out), sep="\n", soft_wrap=False)
        console_.save_svg(str(ROOT / file), title=command, code_format=TERMINAL, unique_id="t")
    assert (ROOT / file).is_file(), file
    print(f"![{alt}]({file})")


def run(command: str, tmp: Path, **more: str | None) -> str:
    """The command's output, run offline in `tmp`, beside the test model `my-model` and the tests' budgets; where it is
    named, beside `small`, whose weights are drawn at random, too. more: of the environment, None to leave out.
    """
    words = shlex.split(command)
    assert words[0] == "llamactl"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMACTL_", "HF_", "COLUMNS", "FORCE_COLOR"))}
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "100"}
    if not (tmp / "my-model").exists():
        (tmp / "my-model").mkdir()
        shutil.copy(ROOT / "tests/golden/llama/config.json", tmp / "my-model")
        weights(tmp / "my-model/model.safetensors", "tests/golden/llama/header.json")
        shutil.copytree(ROOT / "tests/budgets", tmp, dirs_exist_ok=True)
    if "small" in words and not (tmp / "small").exists():
        small(tmp / "small")
    env["HF_HOME"] = str(tmp / "hf")
    env = {k: v for k, v in (env | more).items() if v is not None}
    return subprocess.run([sys.executable, "-m", "llamactl", *words[1:]], stdout=subprocess.PIPE, text=True,
                          stderr=subprocess.STDOUT, cwd=tmp, env=env, check=False).stdout


def small(folder: Path) -> None:
    """A small Llama with the same random values everywhere."""
    spec = importlib.util.spec_from_file_location("llamactl_tests_checkpoints", ROOT / "tests/cli/checkpoints.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    made.llama(folder, "F32")


def weights(path: Path, header: str) -> None:
    """A float32 safetensors file with a golden's names and shapes; its data are a hole."""
    entries: dict[str, object] = {}
    end = 0
    for name, t in json.loads((ROOT / header).read_text(encoding="utf-8"))["tensors"].items():
        begin, end = end, end + 4 * math.prod(t["shape"])
        entries[name] = {"dtype": "F32", "shape": t["shape"], "data_offsets": [begin, end]}
    head = json.dumps(entries).encode()
    with path.open("wb") as f:
        f.write(len(head).to_bytes(8, "little") + head)
        f.truncate(8 + len(head) + end)


def listing(file: str) -> None:
    """Print a file below tests/ as a block of its own kind."""
    print(f"```{Path(file).suffix[1:]}\n{(ROOT / 'tests' / file).read_text(encoding='utf-8')}```")


def measured(name: str) -> None:
    """Print what a run of tests/bench/record.py left: times differ from run to run, so they are not made anew here."""
    print(f"```console\n{(ROOT / 'tests/bench/measured' / name).read_text(encoding='utf-8').rstrip()}\n```")


def families() -> None:
    """Print the table of families: file, model types, a preset of it, and whether the network runs it."""
    from llamactl import arch
    from llamactl.source import presets

    by_family: dict[str, list[str]] = {}
    for model_type, name in arch.families().items():
        by_family.setdefault(name, []).append(f"`{model_type}`")
    example: dict[str, str] = {}
    for name in presets.names():
        family = arch.families()[presets.load(name).config["model_type"]]
        example.setdefault(family, name)
    run = runnable()
    print("| family | model types | a preset | generate |")
    print("| --- | --- | --- | --- |")
    for name, types in sorted(by_family.items()):
        print(f"| {name} | {', '.join(types)} | {example.get(name, '')} | {'yes' if name in run else ''} |")


def runnable() -> set[str]:
    """Families of which a test holds logits: those whose golden builds, and those that are held to a sibling."""
    from llamactl import arch
    from llamactl.errors import InputRefused
    from llamactl.net.decoder import build

    out = set()
    for file in sorted((ROOT / "tests/golden").glob("*/config.json")):
        model = arch.describe(json.loads(file.read_text(encoding="utf-8")), str(file))
        try:
            build(model)
        except InputRefused:
            continue
        out.add(model.family)
    siblings = (ROOT / "tests/net/test_siblings.py").read_text(encoding="utf-8")
    held = set(re.findall(r'^    "(\w+)[^"]*": \(', siblings, re.M)) & set(arch.families().values())
    return out | held | {"nemotron_nas", "transformer"}  # held in test_siblings.py and test_block2017.py


def main(args: list[str]) -> int:
    """Run cog over README.md."""
    check = args == ["--check"]
    flags = ["--check", "--diff"] if check else ["-r"]
    return subprocess.run([sys.executable, "-m", "cogapp", "-P", "-I", str(ROOT / "tests"), "-I", str(ROOT), *flags,
                           str(ROOT / "README.md")], check=False,
                          env=os.environ | {"README_CHECK": "1" if check else ""}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
