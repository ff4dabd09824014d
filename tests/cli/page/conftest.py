"""Pages of `explore` in a real browser. They need Chromium and the extra `browser`; without either their tests skip."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from llamactl.api import load
from llamactl.cli.exploring import made


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """pages("gpt2 llama-3-8b"): the address of that page as a file, written once."""
    folder, known = tmp_path_factory.mktemp("pages"), {}

    def written(models: str) -> str:
        if models not in known:
            known[models] = folder / f"{len(known)}.html"
            known[models].write_bytes(made([load(m, offline=True) for m in models.split()])[1])
        return str(known[models].as_uri())

    return written


@pytest.fixture
def opened(chromium: Any, pages: Any) -> Iterator[Any]:
    """opened(models, hash="", **context): the page with the network off; what it complains of or asks for fails."""
    contexts, wrong = [], []

    def open_(models: str, address: str = "", **options: Any) -> Any:
        contexts.append(chromium.new_context(offline=True, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda m: wrong.append(f"console: {m.text}"))
        page.on("pageerror", lambda e: wrong.append(f"error: {e}"))
        page.on("request", lambda r: wrong.append(r.url) if not r.url.startswith("file:") else None)
        page.goto(pages(models) + address)
        assert page.evaluate("document.documentElement.dataset.ready") == "yes"
        return page

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []
