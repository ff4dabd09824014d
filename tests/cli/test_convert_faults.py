"""`llamactl convert` when it is killed, interrupted, starved or raced: the output is whole or not there at all.

One process imports everything once and forks a child for each run, so that what is killed is the work and not the
start of an interpreter. A run can be held at a call until the test lets it go on.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork") or not hasattr(signal, "SIGKILL"), reason="needs fork")
RUNS = 20
SLOW_RUNS = 60

DRIVER = """
import importlib, json, os, resource, signal, sys, time
from llamactl.cli.app import run

if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)
for warm in json.loads(sys.argv[1]):
    assert run(warm) == 0, warm
answers = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

def hold(word, room):
    module, name, number, when = word
    owner = importlib.import_module(module)
    *path, attribute = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    real, calls = getattr(owner, attribute), [0]
    def wait():
        open(os.path.join(room, "held"), "w").close()
        begin = time.monotonic()
        while not os.path.exists(os.path.join(room, "go")) and time.monotonic() - begin < 60:
            time.sleep(0.005)
    def held(*args, **kwargs):
        calls[0] += 1
        if when == "before" and calls[0] == number:
            wait()
        out = real(*args, **kwargs)
        if when == "after" and calls[0] == number:
            wait()
        return out
    setattr(owner, attribute, held)

def child(job):
    err = os.open(job["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(err, 2)
    if job.get("hold"):
        hold(job["hold"], job["room"])
    for kind, limit in job.get("limits", {}).items():
        if kind == "RLIMIT_AS":  # on top of what the imports have taken
            limit += int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(getattr(resource, kind), (limit, limit))
    if "user" in job:
        os.setegid(job["user"])
        os.seteuid(job["user"])
    return run(job["args"])

os.write(answers, b"ready\\n")
for line in sys.stdin:
    job = json.loads(line)
    if "wait" in job:
        answer = os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1])
    else:
        answer = os.fork()
        if not answer:
            code = 99
            try:
                code = child(job)
            finally:
                os._exit(code)
    os.write(answers, b"%d\\n" % answer)
"""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"llamactl_tests_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


made: Any = load(Path(__file__).with_name("checkpoints.py"))


class Ended(NamedTuple):
    code: int
    err: str


class Running:
    """A run that was started."""

    def __init__(self, driver: Driver, job: dict[str, Any]) -> None:
        self.driver, self.job, self.pid = driver, job, driver.ask(job)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> Ended:
        code, err = self.driver.ask({"wait": self.pid}), Path(self.job["stderr"])
        return Ended(code, err.read_text() if err.exists() else "")  # it may have been killed before it opened it

    def until_held(self) -> None:
        begin = time.monotonic()
        while not os.path.exists(os.path.join(self.job["room"], "held")):
            assert time.monotonic() - begin < 30, "it never came there"
            time.sleep(0.002)

    def go_on(self) -> Ended:
        Path(self.job["room"], "go").touch()
        return self.wait()


class Driver:
    """The process whose children are the runs."""

    def __init__(self, process: subprocess.Popen[str], place: Path) -> None:
        self.process, self.place, self.count = process, place, 0

    def ask(self, job: dict[str, Any]) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, *args: str | Path, **more: Any) -> Running:
        """hold: (module, name, which call, before|after). limits: of resource. user: whose rights it has."""
        self.count += 1
        room = self.place / f"run{self.count}"
        room.mkdir()
        return Running(self, {"args": ["convert", *map(str, args)], "stderr": str(room / "stderr"), "room": str(room),
                              **more})

    def run(self, *args: str | Path, **more: Any) -> Ended:
        return self.start(*args, **more).wait()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 MB in two shards."""
    folder: Path = tmp_path_factory.mktemp("source") / "m"
    load(Path(__file__).parents[1] / "bench" / "bigllama.py").write(folder, gb=0.012, shards=2)
    return folder


@pytest.fixture(scope="module")
def driver(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    from llamactl import __file__ as package

    place = tmp_path_factory.mktemp("driver")
    made.llama(place / "tiny")
    warm = [["convert", str(place / "tiny"), str(place / f"warm-{to}"), "--to", to, "--no-proof"]
            for to in ("hf", "meta", "gguf")]
    warm.append(["convert", str(place / "tiny"), str(place / "warm-hf"), "--force", "--no-proof", "--json"])
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMACTL_", "PYTHON"))}
    env |= {"PYTHONPATH": str(Path(package).parents[1]), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen([sys.executable, "-c", DRIVER, json.dumps(warm)], stdin=subprocess.PIPE, env=env,
                          stdout=subprocess.PIPE, text=True, cwd=place) as process:
        assert process.stdout is not None
        line = ""
        while line != "ready\n":  # the warm runs answer first
            line = process.stdout.readline()
            assert line or process.poll() is None
        yield Driver(process, place)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="module")
def good(driver: Driver, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """good(*flags): the files of an undisturbed run, and how long it took."""
    known: dict[tuple[str, ...], tuple[dict[str, bytes], float]] = {}

    def of(*flags: str) -> tuple[dict[str, bytes], float]:
        if flags not in known:
            out = tmp_path_factory.mktemp("good") / "o"
            begin = time.monotonic()
            assert driver.run(source, out, "--no-proof", *flags) == (0, "")
            known[flags] = (made.tree(out), time.monotonic() - begin)
        return known[flags]

    return of


@pytest.fixture(autouse=True)
def untouched(source: Path) -> Iterator[None]:
    """The input, in every test."""
    before = made.tree(source)
    yield
    assert made.tree(source) == before


EMIT = ("llamactl.checkpoint.emit", "Emitter.write", 9, "before")
FIRST = ("llamactl.checkpoint.emit", "Emitter.write", 1, "before")
SYNC = ("llamactl.checkpoint.staging", "_sync_file", 2, "before")
TELL = ("llamactl.cli.publishing", "manifest", 1, "before")
PUT = ("llamactl.checkpoint.staging", "put_new", 1, "before")
DONE = ("llamactl.checkpoint.staging", "put_new", 1, "after")
OVER = ("llamactl.checkpoint.staging", "put_over", 1, "before")
OVER_DONE = ("llamactl.checkpoint.staging", "put_over", 1, "after")


# ---- killed


@pytest.mark.parametrize("flags", [(), ("--to", "meta"), ("--to", "gguf", "--no-tokenizer", "--no-digest")],
                         ids=lambda f: "".join(f) or "hf")
def test_killed_at_any_moment_it_leaves_nothing_partial(driver: Driver, source: Path, good: Any, tmp_path: Path,
                                                        flags: tuple[str, ...]) -> None:
    draw = random.Random(7)
    whole, seconds = good(*flags)
    out = tmp_path / "o"
    killed = 0
    for _ in range(RUNS // 2 if flags else RUNS):
        running = driver.start(source, out, "--no-proof", *flags)
        time.sleep(draw.uniform(0, 1.1 * seconds))
        running.send(signal.SIGKILL)
        killed += running.wait().code == -signal.SIGKILL
        assert made.tree(out) in (None, whole)
        again = ("--force",) if out.exists() else ()
        assert driver.run(source, out, "--no-proof", *flags, *again) == (0, "")
        assert made.tree(out) == whole
        assert os.listdir(tmp_path) == ["o"]
        shutil.rmtree(out)
    assert killed


@pytest.mark.parametrize(("hold", "there"), [(EMIT, False), (TELL, False), (SYNC, False), (PUT, False), (DONE, True)],
                         ids=["emit", "manifest", "sync", "put", "done"])
def test_killed_at_every_step(driver: Driver, source: Path, good: Any, tmp_path: Path, hold: Any, there: bool) -> None:
    running = driver.start(source, tmp_path / "o", "--no-proof", hold=hold)
    running.until_held()
    running.send(signal.SIGKILL)
    assert running.wait().code == -signal.SIGKILL
    assert made.tree(tmp_path / "o") == (good()[0] if there else None)
    assert len(os.listdir(tmp_path)) >= 1 + there  # what it had begun, which the next run takes away
    again = ("--force",) if there else ()
    assert driver.run(source, tmp_path / "o", "--no-proof", *again) == (0, "")
    assert made.tree(tmp_path / "o") == good()[0]
    assert os.listdir(tmp_path) == ["o"]


@pytest.mark.parametrize("hold", [EMIT, SYNC, OVER, OVER_DONE], ids=["emit", "sync", "put", "done"])
def test_killed_while_it_replaces_the_old_or_the_new_is_there(driver: Driver, source: Path, good: Any, tmp_path: Path,
                                                              hold: Any) -> None:
    old, new = good("--to", "meta")[0], good()[0]
    assert driver.run(source, tmp_path / "o", "--no-proof", "--to", "meta").code == 0
    running = driver.start(source, tmp_path / "o", "--no-proof", "--force", hold=hold)
    running.until_held()
    running.send(signal.SIGKILL)
    running.wait()
    assert made.tree(tmp_path / "o") == (new if hold is OVER_DONE else old)
    assert driver.run(source, tmp_path / "o", "--no-proof", "--force") == (0, "")
    assert made.tree(tmp_path / "o") == new
    assert os.listdir(tmp_path) == ["o"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--no-proof",)], ids=["proof", "no-proof"])
def test_a_whole_process_killed_at_any_moment(environment: Any, source: Path, tmp_path: Path, flags: tuple[str, ...]
                                              ) -> None:
    """The interpreter's start and the proof are in it too."""
    def start(out: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "llamactl", "convert", source, out, *flags], cwd=tmp_path,
                                env=environment(tmp_path / "home"), stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL)

    draw = random.Random(7)
    (tmp_path / "home").mkdir()
    begin = time.monotonic()
    assert start(tmp_path / "ref").wait() == 0
    seconds, whole, out = time.monotonic() - begin, made.tree(tmp_path / "ref"), tmp_path / "o"
    for _ in range(SLOW_RUNS):
        process = start(out)
        time.sleep(draw.uniform(0, 1.1 * seconds))
        process.kill()
        process.wait()
        assert made.tree(out) in (None, whole)
        if not out.exists():
            assert start(out).wait() == 0
            assert made.tree(out) == whole
            assert sorted(os.listdir(tmp_path)) == ["home", "o", "ref"]
        shutil.rmtree(out)


# ---- interrupted


@pytest.mark.parametrize(("sent", "code", "word"), [(signal.SIGINT, 130, "interrupted"),
                                                    (signal.SIGTERM, 143, "terminated")])
@pytest.mark.parametrize("hold", [EMIT, TELL, SYNC], ids=["emit", "manifest", "sync"])
def test_a_signal_ends_it_and_nothing_is_left(driver: Driver, source: Path, tmp_path: Path, sent: int, code: int,
                                              word: str, hold: Any) -> None:
    running = driver.start(source, tmp_path / "o", "--no-proof", hold=hold)
    running.until_held()
    assert os.listdir(tmp_path)
    running.send(sent)
    assert running.wait() == (code, f"error[{word}]: {word}\n")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("flags", [(), ("--force",)], ids=["new", "over"])
def test_a_signal_at_the_last_step_waits_for_its_end(driver: Driver, source: Path, good: Any, tmp_path: Path, sent: int,
                                                     code: int, flags: tuple[str, ...]) -> None:
    if flags:
        assert driver.run(source, tmp_path / "o", "--no-proof", "--to", "meta").code == 0
    running = driver.start(source, tmp_path / "o", "--no-proof", *flags, hold=OVER if flags else PUT)
    running.until_held()
    running.send(sent)
    time.sleep(0.05)
    assert running.go_on().code == code
    assert made.tree(tmp_path / "o") == good()[0]
    assert os.listdir(tmp_path) == ["o"]


def test_a_signal_leaves_the_old_checkpoint(driver: Driver, source: Path, good: Any, tmp_path: Path) -> None:
    assert driver.run(source, tmp_path / "o", "--no-proof", "--to", "meta").code == 0
    running = driver.start(source, tmp_path / "o", "--no-proof", "--force", hold=EMIT)
    running.until_held()
    running.send(signal.SIGTERM)
    assert running.wait().code == 143
    assert made.tree(tmp_path / "o") == good("--to", "meta")[0]
    assert os.listdir(tmp_path) == ["o"]


# ---- starved


def one_line(ended: Ended, code: str) -> None:
    lines = ended.err.splitlines()
    assert ended.code == 5, ended
    assert lines[0].startswith(f"error[{code}]: ")
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("help: "))


@pytest.mark.parametrize("flags", [(), ("--to", "meta"), ("--to", "gguf"), ("--to", "lesson", "--no-digest")],
                         ids=lambda f: "".join(f) or "hf")
def test_a_limit_on_the_size_of_a_file(driver: Driver, source: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    ended = driver.run(source, tmp_path / "o", "--no-proof", *flags, limits={"RLIMIT_FSIZE": 3 << 20})
    one_line(ended, "file-too-large")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("flags", [(), ("--to", "meta"), ("--to", "gguf", "--no-tokenizer"), ("--no-digest",)],
                         ids=lambda f: "".join(f) or "hf")
def test_a_limit_on_memory(driver: Driver, source: Path, good: Any, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """From next to nothing to enough: it fails in one line, or it is whole."""
    codes = set()
    for more in (0, 1 << 20, 4 << 20, 512 << 20):
        ended = driver.run(source, tmp_path / "o", "--no-proof", *flags, limits={"RLIMIT_AS": more})
        codes.add(ended.code)
        if ended.code:
            one_line(ended, "memory")
            assert os.listdir(tmp_path) == []
        else:
            assert made.tree(tmp_path / "o") == good(*flags)[0]
            assert os.listdir(tmp_path) == ["o"]
            shutil.rmtree(tmp_path / "o")
    assert ended.code == 0
    assert codes <= {0, 5}


@pytest.mark.parametrize("megabytes", [30, 60])
def test_a_limit_on_the_memory_of_a_process(environment: Any, source: Path, tmp_path: Path, megabytes: int) -> None:
    """Too little for the interpreter's own start may end it earlier; nothing is left in any case."""
    def starve() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))

    (tmp_path / "home").mkdir()
    done = subprocess.run([sys.executable, "-m", "llamactl", "convert", source, tmp_path / "o", "--no-proof"],
                          env=environment(tmp_path / "home"), capture_output=True, text=True, preexec_fn=starve,
                          check=False, timeout=180)
    assert done.returncode != 0 or made.read(tmp_path / "o")
    assert sorted(os.listdir(tmp_path)) == (["home"] if done.returncode else ["home", "o"])
    assert done.stdout == "" or not done.returncode


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Any]:
    """small_disk(options): a tmpfs; only root may mount one."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str) -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("no right to mount a file system")
        return place

    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root mounts a file system")
    yield mount
    subprocess.run(["umount", place], capture_output=True, check=False)


def test_a_disk_that_is_too_small_is_seen_first(driver: Driver, source: Path, tmp_path: Path, small_disk: Any) -> None:
    disk = small_disk("size=4m")
    ended = driver.run(source, disk / "o", "--no-proof", hold=EMIT)  # it never comes there
    one_line(ended, "no-space")
    assert "will be written" in ended.err
    assert "are free" in ended.err
    assert os.listdir(disk) == []


@pytest.mark.parametrize("flags", [(), ("--to", "meta"), ("--to", "lesson", "--no-digest")],
                         ids=lambda f: "".join(f) or "hf")
def test_a_disk_that_fills_up_on_the_way(driver: Driver, source: Path, small_disk: Any, flags: tuple[str, ...]) -> None:
    disk = small_disk("size=24m")
    hold = EMIT if "meta" not in flags else ("llamactl.checkpoint.emit", "Emitter.blocks", 9, "before")
    running = driver.start(source, disk / "o", "--no-proof", *flags, hold=hold)
    running.until_held()
    with (disk / "ballast").open("wb") as f:
        free = shutil.disk_usage(disk).free
        f.write(bytes(free - (64 << 10)))
    one_line(running.go_on(), "no-space")
    assert os.listdir(disk) == ["ballast"]


def test_a_read_only_disk(driver: Driver, source: Path, small_disk: Any) -> None:
    ended = driver.run(source, small_disk("ro") / "o", "--no-proof")
    one_line(ended, "output-read-only")


def test_a_folder_where_others_may_not_write(driver: Driver, source: Path) -> None:
    place = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    try:
        shutil.copytree(source, place / "m")
        (place / "mine").mkdir()
        for folder in (place, place / "m"):
            folder.chmod(0o755)
        (place / "mine").chmod(0o555)
        more = {"user": 65534} if os.geteuid() == 0 else {}
        one_line(driver.run(place / "m", place / "mine" / "o", "--no-proof", **more), "output-denied")
        assert os.listdir(place / "mine") == []
    finally:
        shutil.rmtree(place)


# ---- raced


@pytest.mark.parametrize("flags", [(), ("--to", "gguf", "--no-tokenizer")], ids=["hf", "gguf"])
def test_of_two_at_once_exactly_one_wins(driver: Driver, source: Path, good: Any, tmp_path: Path, flags: tuple[str, ...]
                                         ) -> None:
    for _ in range(4):
        two = [driver.start(source, tmp_path / "o", "--no-proof", *flags) for _ in range(2)]
        ended = [r.wait() for r in two]
        assert sorted(e.code for e in ended) == [0, 5]
        one_line(max(ended), "output-exists")
        assert made.tree(tmp_path / "o") == good(*flags)[0]
        assert os.listdir(tmp_path) == ["o"]
        shutil.rmtree(tmp_path / "o")


def test_two_that_replace_leave_one_whole(driver: Driver, source: Path, good: Any, tmp_path: Path) -> None:
    wholes = (good()[0], good("--to", "meta")[0])
    assert driver.run(source, tmp_path / "o", "--no-proof").code == 0
    for _ in range(4):
        two = [driver.start(source, tmp_path / "o", "--no-proof", "--force", *f) for f in ((), ("--to", "meta"))]
        assert [r.wait() for r in two] == [(0, "")] * 2
        assert made.tree(tmp_path / "o") in wholes
        assert os.listdir(tmp_path) == ["o"]


def test_an_output_that_appears_meanwhile_is_kept(driver: Driver, source: Path, tmp_path: Path) -> None:
    for hold in (TELL, PUT):
        running = driver.start(source, tmp_path / "o", "--no-proof", hold=hold)
        running.until_held()
        (tmp_path / "o").mkdir()
        (tmp_path / "o" / "mine.txt").write_text("mine")
        one_line(running.go_on(), "output-exists")
        assert made.tree(tmp_path) == {"o/mine.txt": b"mine"}
        shutil.rmtree(tmp_path / "o")
    for make in (Path.mkdir, Path.touch):  # an empty folder would give way to a plain rename
        running = driver.start(source, tmp_path / "o", "--no-proof", hold=PUT)
        running.until_held()
        make(tmp_path / "o")
        one_line(running.go_on(), "output-exists")
        assert os.listdir(tmp_path) == ["o"]
        (tmp_path / "o").rmdir() if (tmp_path / "o").is_dir() else (tmp_path / "o").unlink()


def test_a_foreign_folder_that_appears_meanwhile_is_not_replaced_by_force(driver: Driver, source: Path, tmp_path: Path
                                                                          ) -> None:
    running = driver.start(source, tmp_path / "o", "--no-proof", "--force", hold=TELL)
    running.until_held()
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "mine.txt").write_text("mine")
    one_line(running.go_on(), "output-foreign")
    assert made.tree(tmp_path) == {"o/mine.txt": b"mine"}


def test_another_runs_staging_is_left_alone(driver: Driver, source: Path, good: Any, tmp_path: Path) -> None:
    """Alive it is nobody's to clear; and folders that only look like one are not touched."""
    (tmp_path / ".o.llamactl-mine").mkdir()
    (tmp_path / ".o.llamactl-mine" / "x").write_text("mine")
    first = driver.start(source, tmp_path / "o", "--no-proof", hold=TELL)
    first.until_held()
    assert driver.run(source, tmp_path / "other", "--no-proof") == (0, "")
    second = driver.run(source, tmp_path / "o", "--no-proof")
    assert second == (0, "")
    one_line(first.go_on(), "output-exists")
    assert made.tree(tmp_path / "o") == made.tree(tmp_path / "other") == good()[0]
    assert sorted(os.listdir(tmp_path)) == [".o.llamactl-mine", "o", "other"]


@pytest.mark.parametrize(("change", "hold"), [("shorter", EMIT), ("longer", EMIT), ("other", EMIT), ("gone", EMIT),
                                              ("shorter", FIRST), ("longer", FIRST)])
def test_a_source_that_changes_meanwhile_is_refused(driver: Driver, source: Path, tmp_path: Path, change: str,
                                                    hold: Any) -> None:
    """hold: when some of it has been read, or only the headers."""
    shutil.copytree(source, tmp_path / "m")
    running = driver.start(tmp_path / "m", tmp_path / "o", "--no-proof", hold=hold)
    running.until_held()
    for path in (tmp_path / "m").glob("*.safetensors"):
        if change == "gone":
            path.rename(path.with_suffix(".moved"))
            continue
        with path.open("r+b") as f:
            if change == "other":
                f.seek(5_000_000)
                f.write(b"x" * 100)
            else:
                f.truncate(path.stat().st_size + (1 if change == "longer" else -1000))
    ended = running.go_on()
    assert ended.code in ((0, 3, 4) if change == "gone" else (3,)), ended  # what is open can be read to its end
    if ended.code:
        assert ended.err.startswith("error[file-changed]: " if change != "gone" else "error[not-found]: ")
        assert os.listdir(tmp_path) == ["m"]
    else:
        assert sorted(os.listdir(tmp_path)) == ["m", "o"]


def test_a_library_that_finds_no_room_is_no_bug(cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from llamactl.cli import converting

    def locate(*_: Any, **__: Any) -> Any:
        raise ImportError("libtorch_cpu.so: failed to map segment from shared object")

    monkeypatch.setattr(converting, "locate", locate)
    got = cli("convert", tmp_path, tmp_path / "out")
    assert (got.code, got.out, got.err) == (5, "", "error[memory]: out of memory\n")
