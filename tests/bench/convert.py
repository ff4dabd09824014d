"""Time `llamactl convert` on a big checkpoint against `cp` + `sync` in the same run, and print the ratios.

    python tests/bench/convert.py FOLDER [--gb 1.7] [--rounds 3]

FOLDER takes the checkpoint (written once) and every output. Each round times cp and then each conversion; of both the
least is taken, wall time and CPU time of the whole process, Python's start included. None of these imports torch; the
cast to fp16 takes numpy. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
import bigllama  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ("--no-proof", "--no-digest")
# what is timed -> (its options, how many times cp it may take)
RUNS: dict[str, tuple[tuple[str, ...], float]] = {
    "rename, reshard": (("--shard-size", "300MB", *PLAIN), 1.3),
    "the same with digests": (("--shard-size", "300MB", "--no-proof"), 2.0),
    "q/k permuted (--to lesson)": (("--to", "lesson", *PLAIN), 2.0),
    "bf16 -> fp16": (("--dtype", "fp16", *PLAIN), 4.0),
    "--to gguf": (("--to", "gguf", *PLAIN), 2.0),
    "--to meta": (("--to", "meta", *PLAIN), 4.0),
}


class Used(NamedTuple):
    """What one process took: seconds of wall and CPU time, and the peak of its anonymous memory in bytes."""

    wall: float
    cpu: float
    anon: int = 0


def used(*command: str, watch: bool = False) -> Used:
    """Run one process to its end. watch: its memory too, which takes a look every few milliseconds."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    pid = os.posix_spawn(shutil.which(command[0]) or command[0], list(command), env, file_actions=[
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0), (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)])
    anon = 0
    while watch:
        status = Path(f"/proc/{pid}/status").read_text()
        found = re.search(r"RssAnon:\s+(\d+) kB", status)
        if found is None:  # it has ended
            break
        anon = max(anon, 1024 * int(found[1]))
        time.sleep(0.004)
    _, status, took = os.wait4(pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"{' '.join(command)} failed")
    return Used(time.monotonic() - start, took.ru_utime + took.ru_stime, anon)


def fresh(out: Path) -> None:
    """No output, and nothing left to be written to the disk."""
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run(["sync"], check=True)


def convert(source: Path, out: Path, *options: str, watch: bool = False) -> Used:
    """One conversion."""
    fresh(out)
    return used(sys.executable, "-m", "llamactl", "convert", str(source), str(out), *options, watch=watch)


def least(runs: list[Used]) -> Used:
    """The least of each."""
    return Used(min(r.wall for r in runs), min(r.cpu for r in runs), max(r.anon for r in runs))


def measure(folder: Path, rounds: int) -> tuple[Used, dict[str, Used]]:
    """(cp + sync, {what: used}) of the checkpoint in `folder`/source."""
    source, out = folder / "source", folder / "out"
    taken: dict[str, list[Used]] = {"cp": [], **{name: [] for name in RUNS}}
    for _ in range(rounds):
        fresh(out)
        taken["cp"].append(used("sh", "-c", f"cp -r '{source}' '{out}' && sync"))
        for name, (options, _) in RUNS.items():
            taken[name].append(convert(source, out, *options))
    fresh(out)
    return least(taken.pop("cp")), {name: least(runs) for name, runs in taken.items()}


def main(args: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=1.7)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args(args)
    source = asked.folder / "source"
    if not source.exists():
        bigllama.write(source, gb=asked.gb)
    size = sum(f.stat().st_size for f in source.iterdir())
    cp, runs = measure(asked.folder, asked.rounds)
    print(f"{size / 1e9:.2f} GB of bf16 in {len(list(source.glob('*.safetensors')))} files; least of {asked.rounds} "
          f"rounds; cp + sync: {cp.wall:.2f} s, {cp.cpu:.2f} s of CPU")
    print(f"{'':28}{'wall / cp':>10}{'CPU / cp':>10}{'peak anonymous':>16}")
    for name, (options, _) in RUNS.items():
        r = runs[name]
        anon = convert(source, asked.folder / "out", *options, watch=True).anon
        print(f"{name:28}{r.wall / cp.wall:10.2f}{r.cpu / cp.cpu:10.2f}{anon / 1e6:13.0f} MB")
    fresh(asked.folder / "out")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
