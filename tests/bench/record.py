"""Run the commands whose times README.md shows, and keep what they print in tests/bench/measured/.

    python tests/bench/record.py FOLDER

FOLDER holds SmolLM2-135M-Instruct in bf16 as `smollm2` and in fp32 as `smollm2-fp32`, each beside a .gguf of the same
weights and name, and port.npz (tests/bench/port.py smollm2-fp32); llama-cpp-python and transformers are installed.
Nothing else should run on the machine.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

OUT = Path(__file__).parent / "measured"
CASES = "--prompt-tokens 2048 --decode-after 32,512 --new 32 --batch 1 --repeat 5"
FEWER = "--prompt-tokens 512 --decode-after 32,512 --new 32 --batch 1 --repeat 5"
RIVALS = "--against transformers --against llama.cpp"
RUNS = {
    "generate": ("llamactl generate smollm2.gguf --chat --prompt 'What is the capital of France?' --greedy",
                 "llamactl generate smollm2.gguf --prompt 'Once upon a time' --max-new 40 --seed 7 --stop .",
                 "llamactl generate smollm2.gguf --chat --prompt 'Name a colour.' --greedy --quant int8 --max-new 24"),
    "bench": (f"llamactl bench smollm2-fp32 {CASES} --threads 1 {RIVALS} --gguf smollm2-fp32.gguf",
              f"llamactl bench smollm2 {CASES} --threads 1 {RIVALS} --gguf smollm2.gguf"),
    "bench-fast": (f"llamactl bench smollm2 {FEWER} --threads 1 {RIVALS} --gguf smollm2.gguf --pack",
                   f"llamactl bench smollm2 {FEWER} --threads 1 {RIVALS} --gguf smollm2.gguf --compile",
                   f"llamactl bench smollm2-fp32 {FEWER} --threads 1 {RIVALS} --gguf smollm2-fp32.gguf --compile"),
    "bench-two": (f"llamactl bench smollm2-fp32 {CASES} --threads 2 {RIVALS} --gguf smollm2-fp32.gguf",
                  f"llamactl bench smollm2 {CASES} --threads 2 {RIVALS} --gguf smollm2.gguf"),
    "verify": ("llamactl verify smollm2-fp32", "llamactl verify smollm2-fp32 --candidate port.npz"),
    "ablate": ("llamactl ablate smollm2-fp32",),
    "lab-gqa": ("llamactl lab run gqa --model smollm2-fp32",),
    "lab-blocks": ("llamactl lab run blocks --threads 1",),
}
ANSWERS = (0, 1)  # 1: a verdict that is no pass


def cpu() -> str:
    """The CPU as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), platform.processor())


def main(args: list[str]) -> int:
    """Record the runs named after FOLDER, or all."""
    if not args:
        print(__doc__)
        return 2
    OUT.mkdir(exist_ok=True)
    env = os.environ | {"NO_COLOR": "1", "COLUMNS": "120", "HF_HUB_OFFLINE": "1"}
    for name in args[1:] or RUNS:
        text = ""
        for command in RUNS[name]:
            words = [sys.executable, "-m", *shlex.split(command)]
            done = subprocess.run(words, cwd=args[0], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  text=True, check=False)
            if done.returncode not in ANSWERS:
                raise SystemExit(f"{command}: exit {done.returncode}\n{done.stdout}")
            text += f"$ {command}\n{done.stdout.rstrip()}\n"
        (OUT / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{name}: recorded on {cpu()}, {os.cpu_count()} cores")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
