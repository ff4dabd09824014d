"""What several files of this folder start from. sides.py is loaded here, for tests/ is no package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_SPEC = importlib.util.spec_from_file_location("llamactl_tests_sides", Path(__file__).with_name("sides.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
sides: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["llamactl_tests_sides"] = sides
_SPEC.loader.exec_module(sides)


@pytest.fixture(scope="module")
def at(networks: ModuleType) -> Callable[..., Any]:
    """`at(name, n)`: one golden on n tokens, made once."""
    made: dict[Any, Any] = {}

    def get(name: str = "llama", n: int = sides.N) -> Any:
        if (name, n) not in made:
            made[name, n] = sides.At(networks, name, n)
        return made[name, n]

    return get
