"""The command line as its users meet it: as a process, in this process (fast), and on a terminal."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import llamactl

_SPEC = importlib.util.spec_from_file_location("llamactl_tests_checkpoints", Path(__file__).with_name("checkpoints.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
sys.modules["llamactl_tests_checkpoints"] = importlib.util.module_from_spec(_SPEC)  # tests/ is no package
_SPEC.loader.exec_module(sys.modules["llamactl_tests_checkpoints"])

PACKAGE = Path(llamactl.__file__).resolve().parents[1]
NOT_INHERITED = ("LLAMACTL_", "HF_", "HUGGING", "TRANSFORMERS_", "XDG_", "LC_", "PYTHON", "_LLAMACTL")
COLOURS = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "CLICOLOR", "TERM", "COLUMNS", "LINES", "TTY_COMPATIBLE",
           "TTY_INTERACTIVE", "COLORTERM", "LANG", "LANGUAGE")
TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 101, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "float32",
}
# 2 x 101 x 64 + 2 x (q 64x64 + k and v 16x64 each + o 64x64 + 3 x 96x64 + 2 x 64) + 64
TINY_TOTAL = 2 * 101 * 64 + 2 * (2 * 64 * 64 + 2 * 16 * 64 + 3 * 96 * 64 + 2 * 64) + 64
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "I8": 1}


@dataclass(frozen=True)
class Result:
    """How one command line ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """stdout as JSON; NaN and Infinity, which JSON does not have, fail."""
        return json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} in the JSON"))

    @property
    def models(self) -> list[dict[str, Any]]:
        """result.models of an answer."""
        assert self.code == 0, self.err
        found: list[dict[str, Any]] = self.json()["result"]["models"]
        return found

    @property
    def model(self) -> dict[str, Any]:
        """The only model of an answer."""
        (one,) = self.models
        return one


Run = Callable[..., Result]


def clean_environment(home: Path, extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """An environment without anybody's settings, in which the network is off and the caches are empty."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(NOT_INHERITED) and k not in COLOURS}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home / "hf"), "HOME": str(home), "LANG": "C.UTF-8",
            "PYTHONPATH": str(PACKAGE), "PYTHONDONTWRITEBYTECODE": "1"}
    for key, value in (extra or {}).items():
        if value is None:
            env.pop(key, None)
        else:
            env[key] = value
    return env


@pytest.fixture
def environment() -> Callable[..., dict[str, str]]:
    """clean_environment, for tests that start processes themselves."""
    return clean_environment


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run(*args, env=..., cwd=...): `python -m llamactl ARGS` as a process of its own."""

    def call(*args: str | bytes | Path, env: Mapping[str, str | None] | None = None, cwd: Path | None = None,
             decode: str = "utf-8", stdout: Any = subprocess.PIPE) -> Result:
        done = subprocess.run([sys.executable, "-m", "llamactl", *args], env=clean_environment(tmp_path, env),
                              cwd=cwd or tmp_path, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE,
                              timeout=180, check=False)
        return Result(done.returncode, (done.stdout or b"").decode(decode), done.stderr.decode(decode))

    return call


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """cli(*args, env=..., cwd=...): the same in this process, a hundred times faster."""
    from llamactl.cli.app import run as run_here

    before = signal.getsignal(signal.SIGTERM)

    def stuck(*_: object) -> None:
        pytest.fail("it hangs")

    def call(*args: str | Path, env: Mapping[str, str | None] | None = None, cwd: Path | None = None) -> Result:
        with monkeypatch.context() as m:
            clean = clean_environment(tmp_path, env)
            for key in set(os.environ) - set(clean):
                m.delenv(key)
            for key, value in clean.items():
                m.setenv(key, value)
            if (constants := sys.modules.get("huggingface_hub.constants")) is not None:  # read once, at import
                m.setattr(constants, "HF_HUB_OFFLINE", clean.get("HF_HUB_OFFLINE") == "1")
            m.chdir(cwd or tmp_path)
            capsys.readouterr()
            others = signal.signal(signal.SIGALRM, stuck)
            signal.setitimer(signal.ITIMER_REAL, 120)
            try:
                code = run_here([str(a) for a in args])
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, others)
        done = capsys.readouterr()
        return Result(code, done.out, done.err)

    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def terminal(tmp_path: Path) -> Run:
    """terminal(*args, env=..., columns=120): the same with stdout on a terminal; stderr stays a pipe."""

    def call(*args: str | Path, env: Mapping[str, str | None] | None = None, columns: int = 120) -> Result:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "llamactl", *args], cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=theirs,
            stderr=subprocess.PIPE, env=clean_environment(tmp_path, {"TERM": "xterm-256color", **(env or {})}))
        os.close(theirs)
        out = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux says EIO when the last writer is gone
                break
            if not part:
                break
            out += part
        os.close(ours)
        _, err = process.communicate(timeout=180)
        return Result(process.returncode, out.decode().replace("\r\n", "\n"), err.decode())

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """folder(config, name): a model folder with that config.json; given tensors, with a model.safetensors too."""

    def make(config: Mapping[str, Any] | bytes | None = None, name: str = "model", *,
             tensors: Mapping[str, tuple[str, Sequence[int]]] | None = None) -> Path:
        path = tmp_path / name
        path.mkdir(parents=True, exist_ok=True)
        data = config if isinstance(config, bytes) else json.dumps(dict(TINY if config is None else config)).encode()
        (path / "config.json").write_bytes(data)
        if tensors is not None:
            safetensors(path / "model.safetensors", tensors)
        return path

    return make


def safetensors(path: Path, tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Any = None) -> None:
    """A valid file of those (dtype, shape)s; its data are a hole, so that size costs no disk."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + end)


def llama_tensors(config: Mapping[str, Any], dtype: str = "F32") -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names and shapes of an untied Llama checkpoint, written down here without asking llamactl."""
    h, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = h // config["num_attention_heads"] * config["num_key_value_heads"]
    out: dict[str, tuple[str, tuple[int, ...]]] = {"model.embed_tokens.weight": (dtype, (v, h))}
    for i in range(config["num_hidden_layers"]):
        block = {"self_attn.q_proj": (h, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
                 "self_attn.o_proj": (h, h), "mlp.gate_proj": (f, h), "mlp.up_proj": (f, h), "mlp.down_proj": (h, f),
                 "input_layernorm": (h,), "post_attention_layernorm": (h,)}
        out |= {f"model.layers.{i}.{name}.weight": (dtype, shape) for name, shape in block.items()}
    return out | {"model.norm.weight": (dtype, (h,)), "lm_head.weight": (dtype, (v, h))}


class Tiny:
    """The small Llama of many tests: its config, its total, its tensors, and a writer of weight files."""

    config = TINY
    total = TINY_TOTAL
    tensors = staticmethod(llama_tensors)
    write = staticmethod(safetensors)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of inputs that stands beside a checkout, where there is one."""
    for place in (PACKAGE / "shared", PACKAGE.parent / "shared"):
        if place.is_dir():
            return place
    pytest.skip("no shared/ beside this checkout")


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    return Tiny


@pytest.fixture(scope="session")
def speaker() -> ModuleType:
    """tests/cli/speaker.py: models that say what a test wants."""
    spec = importlib.util.spec_from_file_location("llamactl_tests_speaker", Path(__file__).parent / "speaker.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
