"""`llamactl convert` in this process, and what its outputs are held against."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest


def load(path: Path) -> ModuleType:
    name = f"llamactl_tests_convert_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def references(written: ModuleType) -> ModuleType:
    """tests/convert/references.py: the same models in every layout."""
    pytest.importorskip("gguf")
    return load(Path(__file__).parent / "references.py")


@pytest.fixture(scope="session")
def computed(references: ModuleType) -> ModuleType:
    """tests/convert/computed.py: logits by other code than llamactl's."""
    load(Path(__file__).parent / "handwritten.py")
    return load(Path(__file__).parent / "computed.py")


@pytest.fixture(scope="session")
def reference(references: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """reference(name): a model of references.CASES, made once."""
    done: dict[str, Any] = {}

    def make(name: str) -> Any:
        if name not in done:
            done[name] = references.Reference(name, tmp_path_factory.mktemp(f"drawn-{name}") / "hf")
        return done[name]

    return make


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """What net.values says once a process at its import: pytest forgets it with the test that imported it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        yield


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ended]]:
    """convert(SRC, DST, ...): the command here, with its streams; nothing waits for the disk."""
    from llamactl.cli.app import run

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    for key in ("LLAMACTL_FORMAT", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(key, raising=False)

    def call(*args: str | Path) -> Ended:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(["convert", *map(str, args)])
        return Ended(code, out.getvalue(), err.getvalue())

    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def converted(convert: Callable[..., Ended]) -> Callable[..., None]:
    """The same where it must succeed."""

    def call(*args: str | Path) -> None:
        got = convert(*args)
        assert got.code == 0, got.err

    return call
