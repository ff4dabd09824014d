"""The Hub reader against a fake Hub. Every fetch runs in a process of its own, as HF_* is read at import."""

from __future__ import annotations

import json
import os
import pty
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import llamactl
from llamactl.source import hub as reader

ROOT = str(Path(llamactl.__file__).parents[1])
TOKEN = "hf_SECRETsecretSECRET"
OLD, NEW = "a" * 40, "b" * 40

DRIVER = r"""
import json, logging, os, socket, sys, threading, time
job = json.loads(sys.argv[1])
class NoSocket(socket.socket):
    def __init__(self, *a, **k): raise AssertionError("a socket was opened")
def no_name(*a, **k): raise socket.gaierror(-2, "Name or service not known")
def slow_name(*a, **k): time.sleep(60)
def boom(*a, **k): raise AssertionError("a name was looked up")
if job.get("no_socket"): socket.socket, socket.getaddrinfo, socket.create_connection = NoSocket, boom, boom
if job.get("dns"): socket.getaddrinfo = {"none": no_name, "slow": slow_name}[job["dns"]]
from llamactl.errors import LlamactlError
from llamactl.source import hub
out = []
if "download_s" in job: hub.DOWNLOAD_S = job["download_s"]
if not job.get("cold"):
    import huggingface_hub, huggingface_hub.file_download
    from huggingface_hub import constants, utils
    def state(): return [logging.getLogger("huggingface_hub").level, constants.HF_HUB_DISABLE_TELEMETRY,
                         utils.are_progress_bars_disabled()]
    before = state()
for call in job["calls"]:
    start = time.monotonic()
    try:
        file = hub.fetch(*call, offline=bool(job.get("offline")))
        result = {"path": file.path, "commit": file.commit, "cached": file.cached, "note": file.note}
    except LlamactlError as e:
        result = {"line": e.line(), **e.to_dict()}
    out.append({**result, "seconds": time.monotonic() - start})
if not job.get("cold"): assert state() == before, (before, state())
time.sleep(job.get("linger", 0))
if job.get("linger"): assert threading.active_count() == 1, threading.enumerate()
print(json.dumps(out))
"""


class World:
    """A home folder, an endpoint, and `fetch` in a fresh process."""

    def __init__(self, home: Path, endpoint: str, **env: str) -> None:
        self.cache = home / "hf" / "hub"
        clean = {k: v for k, v in os.environ.items()
                 if not k.startswith(("HF_", "HUGGING")) and not k.lower().endswith("_proxy")}
        self.env = {**clean, "HOME": str(home), "HF_HOME": str(home / "hf"), "HF_ENDPOINT": endpoint,
                    "PYTHONPATH": ROOT, "PYTHONWARNINGS": "default", **env}

    def fetch(self, *calls: list[str | None], stderr: int | None = None, **job: Any) -> list[dict[str, Any]]:
        """The result or the error of each call; nothing may stand on stderr."""
        done = subprocess.run([sys.executable, "-c", DRIVER, json.dumps({"calls": calls, **job})], env=self.env,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE if stderr is None else stderr,
                              text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        assert not done.stderr, done.stderr
        return json.loads(done.stdout)

    def one(self, repo: str, revision: str | None = None, **job: Any) -> dict[str, Any]:
        return self.fetch([repo, revision], **job)[0]

    def prepare(self, repo: str, commit: str, body: bytes = b'{"old": 1}', refs: tuple[str, ...] = ("main",)) -> Path:
        """Put a file into the cache as huggingface_hub lays it out."""
        base = self.cache / f"models--{repo.replace('/', '--')}"
        snapshot = base / "snapshots" / commit / "config.json"
        for folder in (base / "blobs", base / "refs", snapshot.parent):
            folder.mkdir(parents=True, exist_ok=True)
        blob = base / "blobs" / f"blob-{commit[:6]}"
        blob.write_bytes(body)
        snapshot.symlink_to(os.path.relpath(blob, snapshot.parent))
        for ref in refs:
            (base / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
            (base / "refs" / ref).write_text(commit)
        return snapshot


@pytest.fixture
def hub(fakehub: ModuleType) -> Iterator[Any]:
    with fakehub.FakeHub() as server:
        yield server


@pytest.fixture
def world(hub: Any, tmp_path: Path) -> World:
    return World(tmp_path, hub.url)


# ---- what is read, and what is asked for

def test_importing_the_reader_imports_no_hub_library() -> None:
    code = "import sys, llamactl.source.hub; print([m for m in sys.modules if m.startswith(('hugg', 'http', 'requ'))])"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True,
                          text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_the_one_file_is_asked_for_and_a_second_look_downloads_nothing(hub: Any, world: World) -> None:
    hub.add("org/m", commit=NEW, files={"config.json": b'{"new": 1}', "model.safetensors": b"x" * 100})
    first = world.one("org/m")
    assert Path(first["path"]).read_bytes() == b'{"new": 1}'
    assert (first["commit"], first["cached"], first["note"]) == (NEW, False, None)
    assert {r.path for r in hub.log} == {"/org/m/resolve/main/config.json"}
    assert [r.method for r in hub.log].count("GET") == 1
    hub.log.clear()
    second = world.one("org/m")
    assert (second["path"], second["cached"], second["note"]) == (first["path"], True, None)
    assert hub.asked("org/m") == ["HEAD config.json@main"]
    assert world.one("org/m", offline=True, no_socket=True)["path"] == first["path"]


def test_a_moved_branch_is_downloaded_anew(hub: Any, world: World) -> None:
    hub.add("org/m", commit=NEW, files={"config.json": b'{"new": 1}'})
    world.prepare("org/m", OLD)
    got = world.one("org/m")
    assert (got["commit"], got["cached"]) == (NEW, False)
    assert Path(got["path"]).read_bytes() == b'{"new": 1}'


def test_a_renamed_model_is_followed(hub: Any, world: World) -> None:
    hub.add("org/m", commit=NEW)
    hub.add("old/m", moved_to="org/m")
    assert world.one("old/m")["commit"] == NEW
    hub.log.clear()
    assert world.one("old/m")["cached"]
    assert (hub.asked("old/m"), hub.asked("org/m")) == (["HEAD config.json@main"], ["HEAD config.json@main"])


def test_the_token_stays_on_the_hubs_host(hub: Any, world: World, fakehub: ModuleType) -> None:
    world.env["HF_TOKEN"] = TOKEN
    with fakehub.FakeHub() as storage:
        hub.add("org/m", commit=NEW, stored_at=storage.url)
        storage.add("org/m", commit=NEW)
        got = world.one("org/m")
    assert (got["commit"], Path(got["path"]).read_bytes()) == (NEW, b"{}")
    assert storage.asked("org/m") == ["GET config.json@main"]
    assert "authorization" not in storage.log[0].headers
    assert "authorization" in hub.log[0].headers


def test_branch_and_tag_names_with_a_slash(hub: Any, world: World) -> None:
    hub.add("org/m", commit=NEW, refs=("main", "refs/pr/1"))
    assert world.one("org/m", "refs/pr/1")["commit"] == NEW
    assert world.one("org/m", "refs/pr/1", offline=True, no_socket=True)["commit"] == NEW


@pytest.mark.parametrize("revision", ["../../../elsewhere", "/etc/passwd", "a..b"])
def test_a_revision_cannot_leave_the_cache(hub: Any, world: World, revision: str) -> None:
    assert world.one("org/m", revision)["code"] == "hub-revision-not-found"
    assert hub.log == []


def test_a_commit_in_the_cache_needs_no_request(hub: Any, world: World) -> None:
    path = world.prepare("org/m", OLD, refs=())
    got = world.one("org/m", OLD, no_socket=True)
    assert got | {"seconds": 0} == {"path": str(path), "commit": OLD, "cached": True, "note": None, "seconds": 0}
    assert hub.log == []


def test_a_commit_not_in_the_cache_is_downloaded(hub: Any, world: World) -> None:
    hub.add("org/m", commit=NEW)
    assert world.one("org/m", NEW)["cached"] is False
    assert world.one("org/m", NEW, no_socket=True)["cached"] is True


@pytest.mark.parametrize("by", ["argument", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_reads_refs_and_opens_no_socket(hub: Any, world: World, by: str) -> None:
    main = world.prepare("org/m", OLD)
    world.prepare("org/n", NEW, refs=("v1.0",))
    if by != "argument":
        world.env[by] = "1"
    got, tag, no_branch, none = world.fetch(["org/m", None], ["org/n", "v1.0"], ["org/n", None], ["org/none", None],
                                            offline=by == "argument", no_socket=True)
    assert (got["path"], got["commit"], got["cached"]) == (str(main), OLD, True)
    assert tag["commit"] == NEW
    assert no_branch["code"] == none["code"] == "hub-offline"
    assert none["exit_code"] == 4
    assert none["line"].startswith("error[hub-offline]: org/none: offline, and its config.json is not in")
    assert ("--offline" if by == "argument" else "HF_HUB_OFFLINE") in none["help"]
    assert "preset" in none["help"]
    assert hub.log == []


def test_a_file_known_to_be_missing_is_missing_offline_too(hub: Any, world: World) -> None:
    mark = world.cache / "models--org--m" / ".no_exist" / OLD / "config.json"
    mark.parent.mkdir(parents=True)
    mark.touch()
    assert world.one("org/m", OLD, no_socket=True)["code"] == "hub-file-not-found"
    hub.add("org/m", commit=NEW)
    assert world.one("org/m")["commit"] == NEW


def test_the_cache_folder_is_huggingface_hubs(hub: Any, world: World, tmp_path: Path) -> None:
    hub.add("org/m")
    world.env["HF_HUB_CACHE"] = str(tmp_path / "elsewhere")
    assert world.one("org/m")["path"].startswith(str(tmp_path / "elsewhere"))


def test_nothing_on_a_terminals_stderr(hub: Any, world: World) -> None:
    hub.add("org/m", files={"config.json": b" " * 5_000_000})
    ours, theirs = pty.openpty()
    try:
        assert world.one("org/m", stderr=theirs)["cached"] is False
        os.set_blocking(ours, False)
        with pytest.raises(BlockingIOError):
            print(os.read(ours, 1000))
    finally:
        os.close(ours)
        os.close(theirs)


# ---- refusals

GATED = "Access to model org/m is restricted"
REFUSALS: dict[str, tuple[int, str, str, dict[str, str]]] = {
    "gated-401": (401, "GatedRepo", f"{GATED}. You must have access to it and be authenticated to access it. Please "
                  "log in.", {}),
    "gated-403": (403, "GatedRepo", f"{GATED} and you are not in the authorized list.", {}),
    "gated-pending": (403, "GatedRepo", "Your request to access model org/m is awaiting a review from the repo "
                      "authors.", {}),
    "gated-rejected": (403, "GatedRepo", "Your request to access model org/m has been rejected by the repo's authors.",
                       {}),
    "scope": (403, "", "Please enable access to public gated repositories in your fine-grained token settings to view "
              "this repository.", {}),
    "scope-coded": (403, "GatedRepo", "Please enable access to public gated repositories in your fine-grained token "
                    "settings to view this repository.", {}),
    "bad-token": (401, "", "Invalid credentials in Authorization header", {}),
    "bad-token-coded": (401, "RepoNotFound", "Invalid username or password.", {}),
    "unavailable": (503, "", "", {}),
    "broken": (500, "", "Internal Error", {}),
    "limited": (429, "", "", {"Retry_After": "77"}),
    "limited-draft": (429, "", "", {"RateLimit": '"resolvers";r=0;t=55'}),
    "disabled": (403, "", "Access to this resource is disabled.", {}),
    "echo": (418, "", f"teapot {TOKEN} Bearer abc \x1b[31m", {}),
    "plain-404": (404, "", "", {}),
}
NO_TOKEN = {
    "gated-401": ("hub-gated-no-token", "no token", "hf auth login"),
    "nothing": ("hub-not-found", "private one (no token was sent)", "hf auth login"),
    "plain-404": ("hub-not-found", "no such model", "spelling and HF_ENDPOINT"),
    "unavailable": ("hub-server-error", "the Hub answered 503", "preset"),
    "broken": ("hub-server-error", "the Hub answered 500", "local folder"),
    "limited": ("hub-rate-limited", "77 s", "hf auth login"),
    "limited-draft": ("hub-rate-limited", "55 s", "wait"),
    "norev": ("hub-revision-not-found", "no revision 'v9'", "leave out"),
    "nofile": ("hub-file-not-found", "no config.json", "base model"),
    "nohub": ("hub-error", "does not answer as a Hub", "HF_ENDPOINT"),
    "disabled": ("hub-error", "403: Access to this resource is disabled.", "local folder"),
}
WITH_TOKEN = {
    "gated-403": ("hub-gated-not-approved", "no access yet", "ask for access at http://127.0.0.1"),
    "gated-pending": ("hub-gated-not-approved", "under review", "preset"),
    "gated-rejected": ("hub-gated-not-approved", "rejected", "preset"),
    "scope": ("hub-gated-token-scope", "fine-grained token", "settings/tokens"),
    "scope-coded": ("hub-gated-token-scope", "fine-grained token", "hf auth login"),
    "bad-token": ("hub-bad-token", "does not accept the token", "unset HF_TOKEN"),
    "bad-token-coded": ("hub-bad-token", "does not accept the token", "hf auth login"),
    "nothing": ("hub-not-found", "the token sent may not see", "hf auth login"),
    "unavailable": ("hub-server-error", "503", "preset"),
    "echo": ("hub-error", "teapot <token> <token>", "preset"),
}


@pytest.fixture(scope="module")
def refusals(fakehub: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], dict[str, Any]]:
    """{(case, with a token): the error}, all asked in two processes."""
    out: dict[tuple[str, bool], dict[str, Any]] = {}
    with fakehub.FakeHub() as server:
        for name, (status, code, message, headers) in REFUSALS.items():
            server.refuse(f"org/{name}", status, code, message, **headers)
        server.add("org/norev")
        server.add("org/nofile", files={"README.md": b"x"})
        server.add("org/nohub", facts={"X-Repo-Commit": ""})
        for table, token in ((NO_TOKEN, None), (WITH_TOKEN, TOKEN)):
            world = World(tmp_path_factory.mktemp("home"), server.url, **({"HF_TOKEN": token} if token else {}))
            calls = [[f"org/{name}", "v9" if name == "norev" else None] for name in table]
            got = world.fetch(*calls)
            out.update({(name, token is not None): result for name, result in zip(table, got, strict=True)})
        for request in server.log:
            assert request.path.endswith("/config.json")
            assert request.headers.get("authorization") in (None, f"Bearer {TOKEN}")
        assert any("authorization" in r.headers for r in server.log)
        for name in ("unavailable", "limited", "gated-401"):
            assert len(server.asked(f"org/{name}")) <= 2, "a refusal is not asked for again (once a process)"
    return out


CASES = [(k, False, *v) for k, v in NO_TOKEN.items()] + [(k, True, *v) for k, v in WITH_TOKEN.items()]


@pytest.mark.parametrize(("case", "token", "code", "message", "help"), CASES)
def test_each_refusal_has_its_code_and_its_way_out(refusals: dict[tuple[str, bool], dict[str, Any]], case: str,
                                                   token: bool, code: str, message: str, help: str) -> None:
    got = refusals[case, token]
    assert (got["code"], got["exit_code"]) == (code, 4)
    assert message in got["line"]
    assert got["line"].startswith(f"error[{code}]: org/{case}")
    assert help in got["help"]
    assert "\n" not in got["line"] + got["help"]
    assert max(len(got["line"]), len(got["help"])) < 160
    assert "SECRET" not in json.dumps(got)
    assert "\x1b" not in got["line"]
    assert got["seconds"] < 20, "and not the minute that a stuck request takes"


@pytest.mark.parametrize("token", ["s3cr3t-SECRET", "hf_SECRET SECRET", "hf_SECR\u20acT", "SECR\u20acT"])
def test_a_token_of_any_form_is_never_quoted(hub: Any, world: World, token: str) -> None:
    world.env["HF_TOKEN"] = token
    hub.refuse("org/m", 418, message=f"you sent {token.encode('ascii', 'replace').decode()}")
    got = world.one("org/m")
    assert (got["code"], got["exit_code"]) == ("hub-error" if token.isascii() else "hub-bad-token", 4)
    assert not re.search("s3cr3t|SECR", json.dumps(got))


def test_an_endpoints_password_is_never_quoted(hub: Any, tmp_path: Path) -> None:
    world = World(tmp_path, hub.url.replace("//", "//user:SECRET@"))
    hub.refuse("org/m", 403, "GatedRepo", GATED)
    hub.refuse("org/s", 503)
    assert "SECRET" not in json.dumps(world.fetch(["org/m", None], ["org/s", None], ["org/none", None]))


def test_a_file_above_the_cap_is_refused_before_it_is_fetched(hub: Any, world: World) -> None:
    hub.add("org/said", facts={"X-Linked-Size": "64000001"})
    hub.add("org/real", files={"config.json": b" " * 64_000_001})
    for got, repo in zip(world.fetch(["org/said", None], ["org/real", None]), ("org/said", "org/real"), strict=True):
        assert (got["code"], got["exit_code"]) == ("json-too-large", 3)
        assert "64,000,001" in got["line"]
        assert hub.asked(repo) == ["HEAD config.json@main"]


def test_a_hub_that_fails_halfway_is_named_for_what_it_said(hub: Any, world: World) -> None:
    """huggingface_hub wraps this in "cannot find the requested files in the local cache"."""
    hub.add("org/m", refusals={"HEAD": (501, {})}, patience=1)
    assert world.one("org/m")["code"] == "hub-server-error"
    assert len(hub.log) > 1


def test_what_nobody_foresaw_is_one_line_too(hub: Any, world: World, tmp_path: Path) -> None:
    hub.add("org/m")
    assert world.one("org--x/m")["code"] == "hub-error"
    (tmp_path / "file").write_text("")
    world.env["HF_HUB_CACHE"] = str(tmp_path / "file" / "hub")
    got = world.one("org/m")
    assert got["code"] == "hub-error"
    assert "HF_HOME" in got["help"]
    for endpoint in ("models", "http://[x", "http://localhost:99999"):
        got = World(tmp_path, endpoint).one("org/m", cold=True)
        assert got["code"] in ("hub-error", "hub-unreachable")
        assert "HF_" in got["help"]
    world.env["HF_HUB_ETAG_TIMEOUT"] = "soon"
    got = world.one("org/m", cold=True)
    assert got["code"] == "hub-error"
    assert "'soon'" in got["line"]


# ---- no network

@pytest.fixture(scope="module")
def dead(fakehub: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One try at each kind of endpoint that does not answer, all at once: two of them take seconds."""
    with fakehub.FakeHub() as server, socket.socket() as full, socket.socket() as closed:
        server.add("org/m", silent=("HEAD",))
        closed.bind(("127.0.0.1", 0))
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fill = [socket.socket() for _ in range(8)]  # a full backlog drops the next SYN: a connect that never ends
        for s in fill:
            s.setblocking(False)
            s.connect_ex(full.getsockname())
        jobs: dict[str, tuple[str, dict[str, Any]]] = {
            "refused": (f"http://127.0.0.1:{closed.getsockname()[1]}", {}),
            "connect": (f"http://127.0.0.1:{full.getsockname()[1]}", {}),
            "silent": (server.url, {}),
            "no-dns": ("http://hub.invalid", {"dns": "none"}),
            "slow-dns": ("http://hub.invalid", {"dns": "slow"}),
        }
        home = tmp_path_factory.mktemp("dead")
        with ThreadPoolExecutor(len(jobs)) as pool:
            tries = {k: pool.submit(World(home / k, url).one, "org/m", **job) for k, (url, job) in jobs.items()}
            out = {k: t.result() for k, t in tries.items()}
        for s in fill:
            s.close()
    return out


@pytest.mark.parametrize(("kind", "why"), [
    ("refused", "connection refused"), ("connect", "no answer in time"), ("silent", "no answer in time"),
    ("no-dns", "the host name is not known"), ("slow-dns", "no answer in time")])
def test_a_dead_endpoint_is_reported(dead: dict[str, dict[str, Any]], kind: str, why: str) -> None:
    got = dead[kind]
    assert got["code"] == "hub-unreachable"
    assert re.fullmatch(rf"error\[hub-unreachable\]: org/m: the Hub could not be reached: {why} \(\S+\)", got["line"])
    assert "HF_ENDPOINT" in got["help"]
    assert got["seconds"] < 20, "and not the minute that a stuck request takes"


def test_the_bounds_leave_room_under_five_seconds() -> None:
    assert reader.HTTP_S + reader.SLACK_S <= 4


def test_without_a_network_the_cached_copy_answers_and_says_so(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        world = World(tmp_path, f"http://127.0.0.1:{closed.getsockname()[1]}")
        path = world.prepare("org/m", OLD)
        got = world.one("org/m")
    assert (got["path"], got["commit"], got["cached"]) == (str(path), OLD, True)
    assert "could not be reached: connection refused" in got["note"]
    assert OLD in got["note"]


def test_a_failing_hub_lets_the_cached_copy_answer_but_a_refusal_does_not(hub: Any, world: World) -> None:
    for name, refusal in {"s": (503,), "l": (429,), "g": (403, "GatedRepo", GATED)}.items():
        world.prepare(f"org/{name}", OLD)
        hub.refuse(f"org/{name}", *refusal)
    world.env["HF_TOKEN"] = TOKEN
    server, limited, gated = world.fetch(["org/s", None], ["org/l", None], ["org/g", None])
    assert server["cached"]
    assert server["note"].startswith("the Hub answered 503; the cached copy")
    assert limited["note"].startswith("too many requests")
    assert gated["code"] == "hub-gated-not-approved"
    assert gated["help"].endswith("--offline reads the cached copy")


def test_a_download_that_stalls_ends(hub: Any, world: World) -> None:
    """huggingface_hub alone would wait a minute for each of these."""
    hub.add("org/stall", silent=("GET",))
    hub.add("org/limit").refusals["GET"] = (429, {"Retry-After": "60"})
    hub.add("org/fail").refusals["GET"] = (503, {})
    world.prepare("org/stall", "c" * 40)
    world.env["HF_HUB_DOWNLOAD_TIMEOUT"] = "1"
    stall, limit, fail = world.fetch(["org/stall", None], ["org/limit", None], ["org/fail", None], download_s=1)
    assert "no answer in time" in stall["note"]
    assert limit["code"] in ("hub-unreachable", "hub-rate-limited")
    assert fail["code"] in ("hub-unreachable", "hub-server-error")  # huggingface_hub 0.36 asks again and again
    assert stall["seconds"] < 30
    assert limit["seconds"] < 30


def test_a_download_given_up_goes_on_neither_asking_nor_speaking(hub: Any, world: World) -> None:
    """huggingface_hub warns on stderr at its second try, 3 s after the first byte did not come."""
    hub.add("org/stall", silent=("GET",))
    world.prepare("org/stall", "c" * 40)
    world.env["HF_HUB_DOWNLOAD_TIMEOUT"] = "1"
    assert "no answer in time" in world.one("org/stall", download_s=1.6, linger=2.5)["note"]
    assert [r.method for r in hub.log].count("GET") == 1


def test_a_longer_timeout_of_the_user_is_kept(hub: Any, world: World) -> None:
    hub.add("org/m", silent=("HEAD",))
    world.env["HF_HUB_ETAG_TIMEOUT"] = "5"
    assert world.one("org/m")["seconds"] > 4.9, "not the three seconds of our own"
