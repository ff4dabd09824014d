"""Several processes for one command: torchrun's, or our own with --tp N. They speak with one voice.

The launcher starts N processes of the same command line, in sessions of their own, so that a Ctrl-C reaches the
launcher alone. It tells rank 0, whose line and exit code are the command's, and ends whoever is left. A pipe that
nobody writes to tells the processes when the launcher itself is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import typer

from llamactl.cli.failures import Terminated
from llamactl.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_TERMINATED, NotAvailable, OutputError, UsageError

if TYPE_CHECKING:
    from llamactl.net.group import Group

GRACE_S = 5.0  # for processes to end by themselves, once one has
_FOLDER, _LIFELINE = "LLAMACTL_TP_FOLDER", "LLAMACTL_TP_LIFELINE"
_MEET = "meet"
_PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_RUN = """
import sys
sys.path[:] = {path!r}
from llamactl.__main__ import main
from llamactl.cli.ranks import run
run(main)
"""


class Seat(NamedTuple):
    """This process's place. local: among those on this machine. folder: of our own launcher, None under torchrun."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    folder: str | None


def seat(tp: int | None = None) -> Seat | None:
    """The place that torchrun or our launcher gave this process, None for a process alone.

    tp: what the command line asks for. Raises UsageError (ranks) where the places contradict it or each other.
    """
    words = [os.environ.get(name, "") for name in _PLACES]
    if "" in words:
        return None
    try:
        rank, world, local_rank = (int(w) for w in words)
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        good = 0 <= rank < world and 0 <= local_rank < local_world <= world
    except ValueError:
        good = False
    if not good:
        said = ", ".join(f"{name} {word!r}" for name, word in zip(_PLACES, words, strict=True))
        raise UsageError("ranks", f"no place among processes: {said}", help="start with torchrun, or unset these")
    if tp not in (None, world):
        raise UsageError("ranks", f"--tp {tp}, but this is one of {world} processes already",
                         help="give --tp without torchrun, or torchrun without --tp")
    return None if world == 1 else Seat(rank, world, local_rank, local_world, os.environ.get(_FOLDER))


@contextmanager
def entered(place: Seat | None, device: str) -> Iterator[Group | None]:
    """This process among the others, met and ready; None for a process alone.

    Of an error inside, the first process that meets one speaks, and the others end silently.
    Raises NotAvailable (no-device, rank-join).
    """
    if place is None:
        yield None
        return
    _mind_the_launcher()
    group = None
    try:
        from llamactl.cli.located import need_torch

        need_torch()
        from llamactl.net.device import use_threads
        from llamactl.net.group import join, own_device

        use_threads(_threads(place.local_world))
        own = own_device(device, place.local_rank, place.local_world)
        file = None if place.folder is None else os.path.join(place.folder, _MEET)
        group = join(place.rank, place.world, own, file=file, alone=place.local_world == place.world)
        yield group
        group.leave()
    except GeneratorExit:
        raise
    except BaseException as e:
        for word in (signal.SIGINT, signal.SIGTERM):  # it is ending already; what comes now is the launcher's haste
            signal.signal(word, signal.SIG_IGN)
        if getattr(e, "code", None) == "rank-lost":
            time.sleep(0.5)  # whoever knows why speaks first
        if _speaks(place, group):
            raise
        code = EXIT_INTERRUPTED if isinstance(e, KeyboardInterrupt) else getattr(e, "exit_code", EXIT_BUG)
        raise typer.Exit(code) from None


def _speaks(place: Seat, group: Group | None) -> bool:
    if place.folder is not None:
        return _claimed(place.folder)
    return place.rank == 0 if group is None else group.speaks()


def _claimed(folder: str) -> bool:
    """Whether nobody before had something to say of a failure."""
    try:
        os.close(os.open(os.path.join(folder, "said"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError:
        return False
    return True


def _mind_the_launcher() -> None:
    """End this process when its launcher is gone, however that went."""
    from threading import Thread

    end = os.environ.pop(_LIFELINE, None)
    if end is None:
        return

    def wait() -> None:
        with suppress(OSError):
            os.read(int(end), 1)  # nobody writes: it returns when the other end is closed
        os._exit(EXIT_TERMINATED)

    Thread(target=wait, daemon=True).start()


def launch(n: int) -> int:
    """Run this command line as n processes of this machine; its exit code.

    Raises OutputError (rank-lost) for a process that was ended from outside, NotAvailable (no-tp) off POSIX.
    """
    if os.name != "posix":
        raise NotAvailable("no-tp", "--tp starts processes on Linux and macOS only",
                           help=f"torchrun --nproc-per-node {n} -m llamactl ...")
    children: list[subprocess.Popen[bytes]] = []
    lifeline, ours = os.pipe()
    with tempfile.TemporaryDirectory(prefix="llamactl-") as folder:
        try:
            for rank in range(n):
                children.append(_start(rank, n, folder, lifeline))
            return _watched(children, folder)
        except (KeyboardInterrupt, Terminated) as e:
            if os.path.exists(os.path.join(folder, _MEET)):  # before that, nothing was written that wants an end
                children[0].send_signal(signal.SIGINT if isinstance(e, KeyboardInterrupt) else signal.SIGTERM)
                _wait(children[:1], GRACE_S)
                if (children[0].returncode or 0) > 0:
                    raise typer.Exit(children[0].returncode) from None
            raise
        finally:
            _end(children)
            os.close(lifeline)
            os.close(ours)


def run(main: Callable[[], int]) -> NoReturn:
    """`main`, the command line, as one of launch's processes.

    It ends without Python's and C++'s cleaning up: threads of torch.distributed that still wait for another process
    can abort there, after the command's last word.
    """
    code = EXIT_BUG
    try:
        code = main()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(code)


def _start(rank: int, n: int, folder: str, lifeline: int) -> subprocess.Popen[bytes]:
    places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    env = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": str(_threads(n)), **os.environ, **places,
           _FOLDER: folder, _LIFELINE: str(lifeline)}
    # The path as it is here: -c alone would put the current folder first, which may be a model's.
    line = [sys.executable, "-P", "-c", _RUN.format(path=sys.path), *sys.argv[1:]]
    return subprocess.Popen(line, env=env, stdin=subprocess.DEVNULL if rank else None, pass_fds=(lifeline,),
                            start_new_session=True)


def _threads(n: int) -> int:
    """CPU threads for each of n processes that share this machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // n)


def _watched(children: Sequence[subprocess.Popen[bytes]], folder: str) -> int:
    """Wait for rank 0, or for the first that fails; the command's exit code."""
    while True:
        codes = [child.poll() for child in children]
        if codes[0] == 0:
            _wait(children, GRACE_S)
            return 0
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            break
        time.sleep(0.02)
    code = codes[failed] or 0
    if code > 0:
        _wait(children, GRACE_S)
        return code
    speaks = _claimed(folder)
    _wait(children, GRACE_S)
    said = f"process {failed} of {len(children)} was ended by {signal.Signals(-code).name}"
    if speaks:
        raise OutputError("rank-lost", said, help="often the system's memory ran out: try a smaller --tp or --max-new")
    return OutputError.exit_code


def _wait(children: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until all have ended, or so many seconds."""
    until = time.monotonic() + seconds
    while any(child.poll() is None for child in children) and time.monotonic() < until:
        time.sleep(0.02)


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Leave none running: they hold nothing that wants to be put away."""
    for child in children:
        if child.poll() is None:
            child.kill()
    for child in children:
        child.wait()
