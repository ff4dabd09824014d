"""The small vocabularies of tests/tokens/vocabularies.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def small() -> ModuleType:
    """The module; tests/ is no package, so it is loaded by where it stands."""
    spec = importlib.util.spec_from_file_location(
        "llamactl_tests_vocabularies", Path(__file__).with_name("vocabularies.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
