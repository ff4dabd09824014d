"""Headers by Range, with each HTTP library that huggingface_hub has had, and what may go wrong between two answers."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import llamactl

ROOT = str(Path(llamactl.__file__).parents[1])
TOKEN = "hf_SECRETsecretSECRET"
HEADER = json.dumps({"a": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
FILE = struct.pack("<Q", len(HEADER)) + HEADER + bytes(4000)
DRIVER = r"""
import json, sys
job = json.loads(sys.argv[1])
import huggingface_hub.utils
if job["library"] == "requests":
    import requests
    session = requests.Session()
    session.trust_env = False
    huggingface_hub.utils.get_session = lambda: session
from llamactl.errors import LlamactlError
from llamactl.source.hubweights import fetch_headers, fetch_index
try:
    got = fetch_headers("org/m", None, job["names"], offline=job.get("offline", False))
    out = [[h.name, h.file_bytes, h.head.hex()] for h in got]
except LlamactlError as e:
    out = {"line": e.line(), "help": e.help}
print(json.dumps(out))
"""


@pytest.fixture
def hub(fakehub: ModuleType) -> Iterator[Any]:
    with fakehub.FakeHub() as server:
        yield server


@pytest.fixture(params=["own", "requests"])
def heads(request: pytest.FixtureRequest, hub: Any, tmp_path: Path) -> Any:
    """heads(*names): fetch_headers in a fresh process."""
    if request.param == "requests":
        pytest.importorskip("requests")

    def call(*names: str, **job: Any) -> Any:
        env = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
        env |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "PYTHONPATH": ROOT}
        job |= {"library": request.param, "names": names}
        done = subprocess.run([sys.executable, "-c", DRIVER, json.dumps(job)], env=env, capture_output=True, text=True,
                              timeout=180)
        assert done.returncode == 0, done.stderr
        assert not done.stderr, done.stderr
        assert TOKEN not in done.stdout
        return json.loads(done.stdout)

    return call


def test_two_requests_for_each_file_and_not_a_byte_of_data(heads: Any, hub: Any) -> None:
    hub.add("org/m", files={"a.safetensors": FILE, "b.safetensors": FILE})
    got = heads("b.safetensors", "a.safetensors")
    head = FILE[: 8 + len(HEADER)].hex()
    assert got == [["b.safetensors", len(FILE), head], ["a.safetensors", len(FILE), head]]
    ranges = sorted(r.headers["range"] for r in hub.log)
    assert ranges == sorted(["bytes=0-7", f"bytes=8-{7 + len(HEADER)}"] * 2)
    assert all(r.headers["authorization"] == f"Bearer {TOKEN}" for r in hub.log)


def test_bytes_kept_elsewhere_are_fetched_without_the_token(heads: Any, hub: Any, fakehub: ModuleType) -> None:
    with fakehub.FakeHub() as storage:
        hub.add("org/m", files={"a.safetensors": FILE}, stored_at=storage.url)
        storage.add("org/m", files={"a.safetensors": FILE})
        assert heads("a.safetensors")[0][1] == len(FILE)
    assert [r.headers.get("authorization") for r in storage.log] == [None, None]
    assert len(hub.asked("org/m")) == 1  # the second part comes from where the first was


def test_a_renamed_repository_is_followed_with_the_token(heads: Any, hub: Any) -> None:
    hub.add("org/m", moved_to="org/new")
    hub.add("org/new", files={"a.safetensors": FILE})
    assert heads("a.safetensors")[0][1] == len(FILE)
    assert all("authorization" in r.headers for r in hub.log)


@pytest.mark.parametrize(("data", "head"), [
    (b"", b""), (b"\x01\x02", b"\x01\x02"), (struct.pack("<Q", 0) + b"x" * 9, bytes(8)),
    (struct.pack("<Q", 1 << 63) + b"{}", struct.pack("<Q", 1 << 63)),
    (struct.pack("<Q", 100_000_001) + b"{}", struct.pack("<Q", 100_000_001)),
    (struct.pack("<Q", 3) + b"{}", struct.pack("<Q", 3))])
def test_a_length_that_cannot_be_is_not_followed(heads: Any, hub: Any, data: bytes, head: bytes) -> None:
    """The reader of headers refuses what is left, in its own words."""
    hub.add("org/m", files={"a.safetensors": data})
    assert heads("a.safetensors") == [["a.safetensors", len(data), head.hex()]]


@pytest.mark.parametrize(("status", "code", "word"), [
    (403, "GatedRepo", "hub-gated-not-approved"), (404, "EntryNotFound", "hub-file-not-found"),
    (401, "", "hub-bad-token"), (429, "", "hub-rate-limited"), (503, "", "hub-server-error")])
def test_refusals(heads: Any, hub: Any, status: int, code: str, word: str) -> None:
    hub.refuse("org/m", status, code, f"no {TOKEN}")
    assert heads("a.safetensors")["line"].startswith(f"error[{word}]: org/m: ")


def test_a_server_without_ranges_is_asked_once_and_its_file_is_not_read(heads: Any, hub: Any) -> None:
    hub.add("org/m", files={"a.safetensors": FILE + bytes(1 << 22)}, no_range=True)
    assert "error[hub-no-range]" in heads("a.safetensors")["line"]
    assert len(hub.log) == 1


def test_offline_asks_nobody(heads: Any, hub: Any) -> None:
    assert "error[hub-offline]" in heads("a.safetensors", offline=True)["line"]
    assert hub.log == []


def test_importing_the_reader_imports_no_hub_library() -> None:
    code = "import sys, llamactl.source.hubweights; print([m for m in sys.modules if m.startswith(('hugg', 'http.c'))])"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True,
                          text=True, check=True)
    assert done.stdout.strip() == "[]"
