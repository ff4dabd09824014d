"""`--tp N` and torchrun: the text of one process, one voice for every error, and nobody left running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from llamactl.cli.ranks import Seat, launch, seat
from llamactl.errors import UsageError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="--tp needs POSIX")
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored from the start
from llamactl.cli.app import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def says(speaker: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = speaker.write(tmp_path_factory.mktemp("says"), speaker.chain("Abcdefgh", then=(speaker.END,)))
    return path


@pytest.fixture(scope="module")
def endless(speaker: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = speaker.write(tmp_path_factory.mktemp("endless"), speaker.chain("Abcdefgh", then=()))
    return path


def test_two_processes_write_what_one_does_once(run: Any, says: Path) -> None:
    got = run("generate", says, "-p", "A", "--greedy", "--tp", "2", "-v")
    assert (got.code, got.out) == (0, "bcdefgh\n")
    first, second = got.err.splitlines()
    assert re.match(r"2 processes, each on cpu, \d+ threads?; fp32; ", first)
    assert re.search(r"generated 8 tokens at .*\(end token\).* in the largest of 2 processes$", second)


def test_the_json_of_three_processes(run: Any, cli: Any, says: Path) -> None:
    words = ("generate", says, "-p", "A", "--json", "--seed", "3", "--stop", "f", "--logprobs")
    got, alone = run(*words, "--tp", "3"), cli(*words)
    assert (got.code, got.err) == (0, "")
    assert (got.json()["inputs"]["tp"], alone.json()["inputs"]["tp"]) == (3, 1)
    one, several = alone.model, got.model
    for key in ("text", "token_ids", "stop", "sampling", "weights_bytes", "decode_bytes_per_token"):
        assert several[key] == one[key], key
    assert several["logprobs"] == pytest.approx(one["logprobs"], abs=1e-4)
    assert (several["text"], several["stop"]) == ("bcde", "stop")
    assert (several["processes"], one["processes"]) == (3, 1)
    assert several["kv_cache_bytes"] == 3 * one["kv_cache_bytes"]  # one KV head, and each needs it
    assert several["bandwidth_share"] is None


def test_torchruns_processes_join_by_themselves(says: Path, environment: Callable[..., dict[str, str]],
                                                tmp_path: Path) -> None:
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "llamactl", "generate",
            str(says), "--greedy"]
    done = subprocess.run(line, env=environment(tmp_path), cwd=tmp_path, input=b"A", capture_output=True, timeout=120,
                          check=False)
    assert (done.returncode, done.stdout) == (0, b"bcdefgh\n"), done.stderr
    assert done.stderr.count(b"generated 8 tokens") == 1


@pytest.mark.parametrize(("args", "code", "error"), [
    (("--tp", "5"), 2, "tp-range"),
    (("--tp", "2", "--device", "mps"), 4, "no-device"),
    (("--tp", "2", "--tokens", "1,258"), 3, "token-range"),
])
def test_an_error_is_one_line_of_one_process(run: Any, says: Path, args: Sequence[str], code: int, error: str) -> None:
    prompt = () if "--tokens" in args else ("-p", "A")
    got = run("generate", says, *prompt, *args)
    assert (got.code, got.out) == (code, "")
    assert re.fullmatch(rf"error\[{error}\]: [^\n]+\n(help: [^\n]+\n)?", got.err)


def test_a_json_error_is_one_object(run: Any, says: Path) -> None:
    got = run("generate", says, "-p", "A", "--tp", "5", "--json")
    assert (got.code, got.json()["error"]["code"]) == (2, "tp-range")


@pytest.mark.parametrize(("option", "value"), [("--compile", None), ("--quant", "int8")])
def test_what_is_for_one_process(cli: Any, says: Path, option: str, value: str | None) -> None:
    got = cli("generate", says, "-p", "A", "--tp", "2", option, *([value] if value else []))
    assert (got.code, got.err) == (2, f"error[usage]: {option} is for one process, and these are 2\n")


# ---- ends


def children(process: subprocess.Popen[bytes]) -> list[int]:
    return [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def gone(pids: Sequence[int]) -> bool:
    """Whether none of them runs, or none does a moment later: pipes are closed before a process is gone."""
    until = time.monotonic() + 10
    while any(runs(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(runs(pid) for pid in pids)


ABORTS = """
import atexit, os
if "RANK" in os.environ:
    atexit.register(os.abort)
"""


@pytest.fixture
def begun(endless: Path, environment: Callable[..., dict[str, str]], tmp_path: Path) -> Any:
    """A run on two processes that has written something: (launcher, pids of the two)."""
    if not Path("/proc/self/task").exists():
        pytest.skip("no /proc to find the processes in")
    started, ranks = [], []

    def start(path: Path | None = None) -> tuple[subprocess.Popen[bytes], list[int]]:
        line = [sys.executable, "-c", INTERRUPTIBLE, "generate", str(endless), "-p", "A", "--greedy", "-n", "1000000",
                "--tp", "2"]
        env = environment(tmp_path)
        if path is not None:
            env["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [env.get("PYTHONPATH")])])
        process = subprocess.Popen(line, env=env, cwd=tmp_path, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.read(12) == b"bcdefghAbcde"
        found = children(process)
        assert len(found) == 2
        ranks.extend(found)
        return process, found

    yield start
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("sent", "code", "word"), [(signal.SIGINT, 130, b"interrupted"),
                                                    (signal.SIGTERM, 143, b"terminated")])
def test_a_signal_ends_all_with_one_line(begun: Any, sent: signal.Signals, code: int, word: bytes) -> None:
    process, ranks = begun()
    process.send_signal(sent)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (code, b"error[" + word + b"]: " + word + b"\n")
    assert out.endswith(b"\n")
    assert gone(ranks)


def test_what_aborts_after_the_last_word_is_not_reached(begun: Any, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(ABORTS)  # as threads of torch.distributed do at times
    process, _ = begun(tmp_path / "site")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (143, b"error[terminated]: terminated\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_ends_the_others(begun: Any, rank: int) -> None:
    process, ranks = begun()
    os.kill(ranks[rank], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    first, help = err.decode().splitlines()
    assert (process.returncode, first) == (5, f"error[rank-lost]: process {rank} of 2 was ended by SIGKILL")
    assert help.startswith("help: ")
    assert gone(ranks)


def test_a_process_that_hears_nothing_is_ended_too(begun: Any) -> None:
    process, ranks = begun()
    os.kill(ranks[1], signal.SIGSTOP)
    os.kill(ranks[0], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err.count(b"\n")) == (5, 2)
    assert err.startswith(b"error[rank-lost]: process 0 of 2 was ended by SIGKILL\n")
    assert gone(ranks)


def test_nobody_outlives_a_launcher_that_is_killed(begun: Any) -> None:
    process, ranks = begun()
    process.kill()
    _, err = process.communicate(timeout=120)  # the pipes end when both are gone
    assert err == b""
    assert gone(ranks)


def test_a_reader_that_leaves_ends_it_silently(begun: Any) -> None:
    process, ranks = begun()
    process.stdout.close()
    with process.stderr:
        err = process.stderr.read()
    assert (process.wait(timeout=120), err) == (0, b"")
    assert gone(ranks)


# ---- places


def test_a_place_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def at(**words: str) -> Seat | None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LLAMACTL_TP_FOLDER"):
            monkeypatch.delenv(name, raising=False)
        for name, word in words.items():
            monkeypatch.setenv(name, word)
        return seat()

    assert at() is at(RANK="0", WORLD_SIZE="2") is at(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0") is None
    assert at(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2") == Seat(3, 4, 1, 2, None)
    assert at(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LLAMACTL_TP_FOLDER="/x") == Seat(1, 2, 1, 2, "/x")
    for rank, world, local in (("2", "2", "0"), ("-1", "2", "0"), ("0", "2", "2"), ("x", "2", "0"), ("0", "", "0")):
        if world:
            with pytest.raises(UsageError, match="no place among processes: RANK"):
                at(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=local)
    at(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0")
    assert seat(2) is not None
    with pytest.raises(UsageError, match="--tp 3, but this is one of 2 processes already"):
        seat(3)


def test_a_model_folder_cannot_put_modules_into_the_processes(says: Path, tmp_path: Path) -> None:
    """The processes are started from the model's folder, which anybody may have written."""
    (tmp_path / "typer.py").write_text("raise SystemExit('typer.py of the model folder')\n")
    here = str(Path(launch.__code__.co_filename).parents[2])  # known to the launcher alone, as an installed one is
    code = f"import sys; sys.path.append({here!r})\n{INTERRUPTIBLE}"
    done = subprocess.run([sys.executable, "-P", "-c", code, "generate", str(says), "-p", "A", "-q", "--tp", "2"],
                          cwd=tmp_path, capture_output=True, timeout=120, check=False,
                          env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"bcdefgh\n", b"")
