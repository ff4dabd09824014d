"""Fixtures that several test files share. Nothing heavy is imported before a test asks for it."""

from __future__ import annotations

import gc
import importlib.util
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent


def load(path: Path) -> ModuleType:
    """The module at `path`; tests/ is no package, so helpers are loaded by where they stand."""
    name = f"llamactl_tests_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="module")  # playwright keeps an event loop running, which no other module should meet
def chromium() -> Iterator[Any]:
    """A browser, where there is one and the extra `browser` is installed."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
    if path is None:
        pytest.skip("no Chromium here")
    with playwright.sync_playwright() as p:
        try:
            browser = p.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        except playwright.Error as e:
            pytest.skip(f"Chromium does not start here: {e.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def make_golden() -> ModuleType:
    """tests/make_golden.py, with transformers kept from talking."""
    module = load(TESTS / "make_golden.py")
    module.transformers.utils.logging.set_verbosity_error()
    module.transformers.utils.logging.disable_progress_bar()
    return module


@pytest.fixture(scope="session")
def content(make_golden: ModuleType) -> ModuleType:
    """tests/arch/content.py: what canonical tensors hold, judged by the transformers module at work."""
    load(TESTS / "arch" / "state_content.py")
    load(TESTS / "arch" / "gemma_content.py")
    return load(TESTS / "arch" / "content.py")


@pytest.fixture(scope="session")
def written(make_golden: ModuleType) -> ModuleType:
    """tests/net/written.py: checkpoints in every layout, written without llamactl's tables."""
    return load(TESTS / "net" / "written.py")


@pytest.fixture(scope="session")
def networks(make_golden: ModuleType) -> ModuleType:
    """tests/net/networks.py: small networks with weights, ours and transformers'."""
    return load(TESTS / "net" / "networks.py")


@pytest.fixture(scope="session")
def within() -> Callable[[float], AbstractContextManager[None]]:
    """`with within(n):` fails when the block takes more CPU time than n readings of a 20,000-entry JSON document do.

    A reading is some 20 ms on a quick machine; it is measured beside every block, so a slow or busy one judges alike.
    """
    document = json.dumps({f"model.layers.{i}.weight": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [i, i + 4]}
                           for i in range(20_000)})

    def reading() -> float:
        begin = time.process_time()
        json.loads(document)
        return time.process_time() - begin

    @contextmanager
    def judge(n: float) -> Iterator[None]:
        gc.collect()
        gc.freeze()  # walking what other tests left is not this block's work
        try:
            unit = min(reading() for _ in range(3))
            begin = time.process_time()
            yield
            spent = time.process_time() - begin
        finally:
            gc.unfreeze()
        assert spent < n * unit, f"{spent / unit:.1f} readings of CPU time, of {n} allowed"

    return judge
