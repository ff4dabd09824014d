"""Fixtures that several test files share. Nothing heavy is imported before a test asks for it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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
