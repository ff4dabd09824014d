"""Help that can be copied, completion that stays offline, and the list of commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from llamactl.cli.app import COMMANDS

EXIT_CODES = ("0 done", "1 the check failed", "2 usage", "3 input refused", "4 not available", "5 output not written",
              "70 a bug in llamactl", "130 interrupted", "143 terminated")


def words(text: str) -> str:
    """Text without its line breaks."""
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_the_example_in_the_help_runs(cli: Any, tmp_path: Path, folder: Any, tiny: Any, speaker: Any,
                                      command: str | None) -> None:
    path = folder(name="my-model", tensors=tiny.tensors(tiny.config))
    (path / "tokenizer.json").write_text(json.dumps(speaker.tokenizer(vocab=speaker.alphabet()[32:127])))
    shutil.copy(Path(__file__).parents[1] / "budgets" / "budget.toml", tmp_path)
    help = cli(*([command] if command else []), "--help")
    assert (help.code, help.err) == (0, "")
    example = re.search(r"^ *Example: llamactl (.*(?:\n +\S.*)*)$", help.out, re.M)
    assert example, help.out
    args = shlex.split(words(example[1]))
    assert command is None or args[0] == command
    got = cli(*args)
    assert got.code == 0
    speeds = r"(prompt \d+ tokens? at .*\n)?" if command == "generate" else ""
    assert re.fullmatch(rf"(warning\[context-exceeded\]: .*\n)?{speeds}", got.err)
    assert got.out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_of_commands_says_what_each_says_itself(cli: Any, command: str) -> None:
    line = COMMANDS[command][1]
    usage, own, *_ = cli(command, "--help").out.split("\n\n")
    assert usage.startswith(f"Usage: llamactl {command} ")
    assert words(own).strip() == line
    assert words(f"{command} {line}") in words(cli("--help").out)


def test_help_tells_the_exit_codes(cli: Any) -> None:
    text = words(cli("--help").out)
    for code in EXIT_CODES:
        assert code in text


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [(), *((c,) for c in COMMANDS)])
def test_help_under_both_names(cli: Any, command: tuple[str, ...], flag: str) -> None:
    got = cli(*command, flag)
    assert (got.code, got.err) == (0, "")
    assert got.out.startswith("Usage: llamactl")


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_help_fits_the_terminal(cli: Any, columns: str) -> None:
    out = cli("--help", env={"COLUMNS": columns}).out
    assert max(map(len, out.splitlines())) <= max(int(columns), 80)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"schema"}))
def test_every_command_has_the_common_options(cli: Any, command: str) -> None:
    text = cli(command, "--help").out
    options = {"--format", "--json", "-q, --quiet", "-v, --verbose", "--color", "--debug"}
    if command not in ("presets", "doctor", "version"):
        options |= {"--offline", "--hub"}
    assert {o for o in options if o not in text} == set()


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version(run: Any, cli: Any, flag: str) -> None:
    import llamactl

    assert (run(flag).out, cli(flag).out) == (f"llamactl {llamactl.__version__}\n",) * 2
    assert cli("version").out.startswith("llamactl ")
    found = cli("version", "--json").json()["result"]
    assert found["llamactl"] == llamactl.__version__
    assert {"typer", "rich", "huggingface_hub", "torch"} <= set(found["libraries"])
    assert found["python"].startswith("3.")


# ---- completion


NO_SOCKETS = """
import socket

def refuse(*args, **kwargs):
    raise AssertionError("a socket was opened")

socket.socket.__init__ = socket.create_connection = socket.getaddrinfo = refuse
"""


@pytest.fixture
def no_sockets(tmp_path: Path) -> dict[str, str | None]:
    """An environment in which opening a socket ends a Python process with an error."""
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard" / "sitecustomize.py").write_text(NO_SOCKETS)
    package = Path(__file__).resolve().parents[2]
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "guard"), str(package)]), "HF_HUB_OFFLINE": None}


def complete(run: Any, env: dict[str, str | None], line: str) -> list[str]:
    """What bash would offer for the last word of `line`."""
    n = len(line.split()) - (0 if line.endswith(" ") else 1)
    got = run(env={**env, "_LLAMACTL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(n)})
    assert (got.code, got.err) == (0, "")
    found: list[str] = got.out.split()
    return found


def test_completion_offers_commands_presets_and_cached_models(run: Any, no_sockets: dict[str, str | None],
                                                              tmp_path: Path) -> None:
    (tmp_path / "hf" / "hub" / "models--acme--tiny--x").mkdir(parents=True)
    (tmp_path / "hf" / "hub" / "datasets--acme--text").mkdir()
    assert complete(run, no_sockets, "llamactl kv") == ["kv-cache"]
    assert complete(run, no_sockets, "llamactl params llama-3-") == ["llama-3-70b", "llama-3-8b"]
    assert complete(run, no_sockets, "llamactl kv-cache gpt2 llama-3-8") == ["llama-3-8b"]
    assert complete(run, no_sockets, "llamactl params acme") == ["acme/tiny--x"]
    assert "meta-llama/Meta-Llama-3-8B" in complete(run, no_sockets, "llamactl params meta-llama/")
    assert "--dtype" in complete(run, no_sockets, "llamactl params --d")
    assert complete(run, no_sockets, "llamactl presets show gpt2-x") == ["gpt2-xl"]


def test_completion_takes_any_case() -> None:
    from llamactl.cli.options import complete_model

    assert complete_model("LLAMA-3-") == complete_model("llama-3-") == ["llama-3-70b", "llama-3-8b"]
    assert "meta-llama/Meta-Llama-3-8B" in complete_model("meta-llama/meta")
    assert complete_model("no-such-thing") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_switched_on(run: Any, no_sockets: dict[str, str | None], shell: str) -> None:
    got = run(env={**no_sockets, "_LLAMACTL_COMPLETE": f"source_{shell}"})
    assert (got.code, got.err) == (0, "")
    assert "_LLAMACTL_COMPLETE=complete_" in got.out


def test_the_guard_against_sockets_guards(run: Any, no_sockets: dict[str, str | None]) -> None:
    got = run("params", "acme/none", env={**no_sockets, "HF_ENDPOINT": "http://127.0.0.1:9"})
    assert got.code != 0
    assert "a socket was opened" in got.err


@pytest.mark.parametrize("args", [("params", "llama-3-8b"), ("kv-cache", "meta-llama/Meta-Llama-3-8B"), ("presets",),
                                  ("version",), ("schema", "params"), ("params", ".")])
def test_answers_that_need_no_network_open_no_socket(run: Any, folder: Any, no_sockets: dict[str, str | None],
                                                     args: tuple[str, ...]) -> None:
    got = run(*args, env=no_sockets, cwd=folder())
    assert (got.code, got.err) == (0, "")


@pytest.mark.parametrize("ref", ["acme/none", "acme/none@main", "lama-3-8b", "hf://acme/none"])
@pytest.mark.parametrize("command", ["params", "kv-cache"])
def test_offline_opens_no_socket(run: Any, no_sockets: dict[str, str | None], command: str, ref: str) -> None:
    got = run(command, ref, "--offline", env=no_sockets)
    assert got.code == 4
    assert got.err.startswith("error[hub-offline]: ")
