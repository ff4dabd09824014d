"""Runs of the staging folder that are killed, interrupted or meet: `stagingruns.py JOB MODE FOLDER` prints JSON.

A program of its own, because it forks; test_staging.py also takes its checkpoints and its run from here.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from llamactl.checkpoint import exchange, staging
from llamactl.checkpoint.staging import stage
from llamactl.errors import LlamactlError

MANIFEST = exchange.MANIFEST
MODULES = [f"llamactl.checkpoint.{n}" for n in ("exchange", "place", "staging")]
NEW = {"model.safetensors": b"new" * 50_000, "config.json": b"{}", MANIFEST: b"new manifest"}
OLD = {"model.safetensors": b"old", "config.json": b"{}"}


def write(target: Path, *, force: bool = False, single: bool = False, sources: tuple[Path, ...] = (), need: int = 0,
          before: Callable[[], None] = lambda: None, publish: bool = True) -> staging.Staging:
    """One run. before: called when all is written and nothing published."""
    with stage(str(target), sources=[str(s) for s in sources], need=need, force=force,
               single="model.safetensors" if single else None) as s:
        for name, data in NEW.items():
            if not single or name != "config.json":
                with s.create(name) as f:
                    f.write(data)
        before()
        if publish:
            s.publish()
    return s


def make(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def tree(folder: Path) -> dict[str, bytes | str]:
    """All that lies in a folder, hidden names too."""
    found: dict[str, bytes | str] = {}
    for p in sorted(folder.rglob("*")):
        found[str(p.relative_to(folder))] = os.readlink(p) if p.is_symlink() else "" if p.is_dir() else p.read_bytes()
    return found


def within(name: str, files: dict[str, bytes]) -> dict[str, bytes | str]:
    return {name: "", **{f"{name}/{n}": data for n, data in files.items()}}


def as_file(data: bytes, manifest: bytes) -> dict[str, bytes | str]:
    return {"o": data, f"o.{MANIFEST}": manifest}


NEW_FILE = as_file(NEW["model.safetensors"], NEW[MANIFEST])
OLD_FILE = as_file(b"old", b"old manifest")


def put(folder: Path, files: dict[str, bytes | str]) -> None:
    for name, data in files.items():
        (folder / name).mkdir() if isinstance(data, str) else (folder / name).write_bytes(data)


def outcome(parent: Path, single: bool) -> str:
    """What a user finds under the target's name."""
    shown = {n: d for n, d in tree(parent).items() if not n.startswith(".")}
    if shown == (NEW_FILE if single else within("o", NEW)):
        return "new"
    return "old" if shown == (OLD_FILE if single else within("o", OLD)) else "absent" if not shown else "PARTIAL"


def child(work: Callable[[], object]) -> int:
    """A process that does it; its exit code is that of the program."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            work()
            code = 0
        except LlamactlError as e:
            code = e.exit_code
        finally:
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_before_step(n: int) -> None:
    """Have this process kill itself before its n-th change of the file system, counted from 1."""
    left = n

    def step(event: str, arguments: Any) -> None:
        nonlocal left
        changes = ("os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "fcntl.flock", "renameat2")
        if event in changes or (event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    real = exchange._renameat2

    def renameat2(*how: Any) -> bool:
        step("renameat2", ())
        return real(*how)

    exchange._renameat2 = renameat2
    sys.addaudithook(step)


def interrupt_at_line(n: int) -> Any:
    """A trace function: Ctrl-C at the n-th line that runs in the three modules, counted from 1."""
    left = n

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_globals.get("__name__") not in MODULES:
            return None
        left -= event == "line"
        if left == 0 and event == "line":
            signal.raise_signal(signal.SIGINT)
        return trace

    return trace


class Runs:
    """The jobs of one mode in one folder. wrong: what must not be, in words; count: how often a run ended how."""

    def __init__(self, mode: str, parent: Path) -> None:
        self.parent, self.target = parent, parent / "o"
        self.single, self.force, self.plain = mode.startswith("file"), "force" in mode, "plain" in mode
        self.old = (OLD_FILE if self.single else within("o", OLD)) if self.force else {}
        self.new = NEW_FILE if self.single else within("o", NEW)
        self.wrong: list[str] = []
        self.count = {"old": 0, "absent": 0, "new": 0, "PARTIAL": 0}

    def run(self, kill_before: int = 0) -> None:
        if kill_before:
            kill_before_step(kill_before)
        write(self.target, force=self.force, single=self.single)

    def prepare(self) -> None:
        for p in self.parent.iterdir():
            shutil.rmtree(p) if p.is_dir() else p.unlink()
        put(self.parent, self.old)

    def judge(self, what: str, *, killed: bool) -> None:
        found = outcome(self.parent, self.single)
        self.count[found] += 1
        # Killed between two renames a run may leave neither, or a manifest alone: the next one knows.
        between = killed and (self.single or (self.force and self.plain))
        if found != "new" and found != ("old" if self.force else "absent") and not between:
            self.wrong.append(f"{what}: {found}, {sorted(tree(self.parent))}")
        if not killed and any(n.startswith(".") for n in tree(self.parent)):
            self.wrong.append(f"{what}: left {sorted(tree(self.parent))}")
        exchange.clear(str(self.target))
        if tree(self.parent) != (self.new if found == "new" else self.old):
            self.wrong.append(f"{what}: {found}, cleared to {sorted(tree(self.parent))}")
        if killed and found != "new":
            self.run()
            if tree(self.parent) != self.new:
                self.wrong.append(f"{what}: the next run left {sorted(tree(self.parent))}")

    def kills(self) -> dict[str, Any]:
        """A run is killed before each of its steps in turn."""
        at, code = 1, -9
        while code == -9:
            self.prepare()
            code = ended(child(partial(self.run, kill_before=at)))
            self.judge(f"killed before step {at} ({code})", killed=code == -9)
            at += 1
        return {"wrong": self.wrong, "steps": at - 1, "code": code, **self.count}

    def kills_by_luck(self) -> dict[str, Any]:
        """Thirty runs are killed from outside, somewhere."""
        start = time.perf_counter()
        for _ in range(3):
            self.prepare()
            ended(child(self.run))
        usual = (time.perf_counter() - start) / 3
        for n in range(30):
            self.prepare()
            pid = child(self.run)
            time.sleep(random.uniform(0, usual * 1.1))
            os.kill(pid, signal.SIGKILL)
            ended(pid)
            self.judge(f"killed by luck {n}", killed=True)
        return {"wrong": self.wrong, **self.count}

    def interrupts(self) -> dict[str, Any]:
        """Ctrl-C at each line in turn."""
        at, stopped = 1, True
        while stopped:
            self.prepare()
            sys.settrace(interrupt_at_line(at))
            try:
                self.run()
                stopped = False
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                self.wrong.append(f"interrupted at line {at}: another handler")
            self.judge(f"interrupted at line {at}", killed=False)
            at += 1
        return {"wrong": self.wrong, "steps": at - 1, **self.count}

    def two(self) -> dict[str, Any]:
        """Two runs at once, ten times; in every second round they meet before either publishes."""
        codes = []
        for n in range(10):
            self.prepare()
            ends = [os.pipe(), os.pipe()]

            def meet(me: int, ends: list[tuple[int, int]]) -> None:
                os.write(ends[me][1], b"x")
                os.read(ends[1 - me][0], 1)

            pids = [child(partial(write, self.target, force=self.force, single=self.single,
                                  before=partial(meet, me, ends) if n % 2 else lambda: None)) for me in (0, 1)]
            codes.append(sorted(map(ended, pids)))
            for fd in sum(ends, ()):
                os.close(fd)
            if tree(self.parent) != self.new:
                self.wrong.append(f"round {n}: {sorted(tree(self.parent))}")
        return {"wrong": self.wrong, "codes": codes}

    def once(self) -> dict[str, Any]:
        code = ""
        try:
            self.run()
        except LlamactlError as e:
            code = e.code
        return {"code": code, "left": os.listdir(self.parent)}


def main(job: str, mode: str, folder: str) -> dict[str, Any]:
    runs = Runs(mode, Path(folder))
    if runs.plain:
        exchange._system_call = lambda: None  # type: ignore[assignment]
    if job in ("kills", "interrupts"):
        os.fsync = lambda fd: None  # a kill is no power cut, and there are many
    if job == "limit":
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        job = "once"
    if job == "nobody":
        for p in [*runs.parent.parents][:-1]:
            p.chmod(p.stat().st_mode | 0o011)
        runs.parent.chmod(0o755)
        os.setuid(65534)
        job = "once"
    return getattr(runs, job)()  # type: ignore[no-any-return]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    print(json.dumps(main(*sys.argv[1:])))
