"""What a command does not need it does not import: these are the seconds that start-up would cost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEAVY = {"torch", "transformers", "numpy", "pydantic", "huggingface_hub", "safetensors", "requests", "httpx", "sympy"}
PROBE = """
import sys
sys.argv = ["llamactl", *sys.argv[1:]]
from llamactl.__main__ import main
code = main()
print(*sorted({m.partition(".")[0] for m in sys.modules}), *sorted(m for m in sys.modules if m.startswith("llamactl.")),
      file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture
def modules(tmp_path: Path, environment: Any) -> Any:
    """modules(*args): what stands in sys.modules when a command is done."""

    def call(*args: str, code: int = 0, **env: str) -> set[str]:
        done = subprocess.run([sys.executable, "-c", PROBE, *args], env=environment(tmp_path, env), cwd=tmp_path,
                              capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == code, done.stderr
        return set(done.stderr.splitlines()[-1].split())

    return call


@pytest.mark.parametrize("flags", [(), ("--json",), ("--format", "csv"), ("--format", "md"), ("-q",), ("-v",)],
                         ids=lambda f: "-".join(f) or "plain")
@pytest.mark.parametrize("args", [("params", "llama-3-8b"), ("params", "model"), ("kv-cache", "llama-3-8b"),
                                  ("kv-cache", "model"), ("params", "deepseek-v3"), ("kv-cache", "gemma-3-27b")],
                         ids="-".join)
def test_an_analysis_imports_nothing_heavy(modules: Any, folder: Any, args: tuple[str, ...],
                                           flags: tuple[str, ...]) -> None:
    folder()
    found = modules(*args, *flags)
    assert found & (HEAVY | {"rich", "yaml"}) == set()
    assert "llamactl.api" in found


@pytest.mark.parametrize("args", [("presets", "--json"), ("presets", "show", "llama-3-8b"), ("schema", "params"),
                                  ("version",), ("--help",), ("params", "--help"), ("generate", "--help"),
                                  ("bench", "--help"), ("ablate", "--help"),
                                  ("lab", "list"), ("lab", "list", "--json"), ("lab", "--help"),
                                  ("params", "model", "--weights"),
                                  ("params", "model", "--set", "kv_heads=1"), ("convert", "--help"),
                                  ("convert", "model", "out", "--dry-run", "--json"),
                                  *(("convert", "model", "out", "--no-proof", "--no-tokenizer", *more) for more in (
                                      ("--to", "hf"), ("--shard-size", "50kB"), ("--to", "lesson"), ("--to", "meta"),
                                      ("--to", "gguf"), ("--to", "gguf", "--dtype", "bf16"),
                                      ("--kv-heads", "8"), ("--vocab-pad-to", "128")))], ids="-".join)
def test_the_other_commands_import_nothing_heavy(modules: Any, folder: Any, tiny: Any, args: tuple[str, ...]) -> None:
    folder(tensors=tiny.tensors(tiny.config, "BF16" if "bf16" in args else "F32"))
    assert modules(*args) & (HEAVY | {"rich"}) == set()


@pytest.mark.parametrize("args", [("params", "./none"), ("parms",), ("params", "llama-3-8b", "--formt", "csv"),
                                  ("params", "llama-3-8b", "--dtype", "bf15"), ("generate",),
                                  ("generate", "llama-3-8b", "--top-p", "7"),
                                  ("bench", "x", "--against", "y"), ("ablate",),
                                  ("lab", "run"), ("lab", "run", "x"), ("lab", "run", "gqa", "--device", "x"),
                                  ("ablate", "x", "--tokens", "1"), ("convert",), ("convert", "./none", "out"),
                                  ("convert", "llama-3-8b", "out", "--to", "x")], ids="-".join)
def test_a_failure_imports_nothing_heavy(modules: Any, args: tuple[str, ...]) -> None:
    assert modules(*args, code=4 if "./none" in args else 2) & (HEAVY | {"rich"}) == set()


def test_only_a_table_imports_rich(modules: Any) -> None:
    found = modules("params", "llama-3-8b", "--format", "table")
    assert "rich" in found
    assert found & HEAVY == set()


def test_the_version_imports_nothing(modules: Any) -> None:
    found = modules("--version")
    assert found & (HEAVY | {"rich", "typer", "click", "yaml", "json"}) == set()
    assert {m for m in found if m.startswith("llamactl.")} == {"llamactl.__main__"}


def test_a_command_imports_only_itself(modules: Any) -> None:
    found = {m for m in modules("params", "llama-3-8b") if m.startswith("llamactl.")}
    assert "llamactl.cli.params" in found
    for other in ("llamactl.cli.kvcache", "llamactl.cli.presets", "llamactl.analysis.kvcache", "llamactl.arch.mixtral",
                  "llamactl.source.hub", "llamactl.checkpoint.safetensors", "llamactl.render.table"):
        assert other not in found
    assert not [m for m in modules("--help") if m.startswith(("llamactl.arch", "llamactl.analysis", "llamactl.source"))]


def test_the_api_imports_nothing_heavy(tmp_path: Path, environment: Any) -> None:
    code = ("import sys, llamactl; n = llamactl.kv_cache('llama-3-8b', 131072).at[0].kv_cache_bytes; "
            "llamactl.params('gpt2')._repr_html_(); print(n, *{m.partition('.')[0] for m in sys.modules})")
    done = subprocess.run([sys.executable, "-c", code], env=environment(tmp_path), cwd=tmp_path, capture_output=True,
                          text=True, timeout=180, check=True)
    number, *found = done.stdout.split()
    assert number == "17179869184"
    assert set(found) & (HEAVY | {"rich", "typer", "yaml"}) == set()
