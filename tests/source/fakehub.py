"""A small Hugging Face Hub on 127.0.0.1: the resolve route, its headers and refusals, and a log of every request."""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as it came in; header names in lower case."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass(slots=True, kw_only=True)
class Repo:
    """files: {name: bytes}. facts: headers that take the place of the true ones.

    refusals: {method: (status, headers)}, once `patience` requests were answered. silent: the methods that never are.
    moved_to: the repository's new name. stored_at: the URL of the host that keeps the bytes, as for big files; only of
    the files in `large`, where that is given. no_range: parts of a file are not sent, only whole ones.
    """

    commit: str
    files: dict[str, bytes]
    refs: tuple[str, ...] = ("main",)
    facts: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    patience: int = 0
    moved_to: str | None = None
    stored_at: str | None = None
    large: tuple[str, ...] = ()
    no_range: bool = False


class FakeHub:
    """Use as a context manager; `url` is the HF_ENDPOINT."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.log: list[Request] = []
        self.sent: list[tuple[str, int]] = []  # (path, bytes of the body) of every answer to a GET
        self.closing = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()

    def add(self, repo_id: str, *, commit: str = "a" * 40, files: dict[str, bytes] | None = None, **more: Any) -> Repo:
        """Serve a repository."""
        self.repos[repo_id] = Repo(commit=commit, files={"config.json": b"{}"} if files is None else files, **more)
        return self.repos[repo_id]

    def refuse(self, repo_id: str, status: int, code: str = "", message: str = "", *,
               methods: tuple[str, ...] = ("HEAD", "GET"), **headers: str) -> None:
        """Answer every request for `repo_id` with an error, as the Hub words it."""
        said = {"X-Error-Code": code, "X-Error-Message": message} | {k.replace("_", "-"): v for k, v in headers.items()}
        repo = self.repos.get(repo_id) or self.add(repo_id)
        repo.refusals.update({m: (status, {k: v for k, v in said.items() if v}) for m in methods})

    def asked(self, repo_id: str) -> list[str]:
        """The requests that named `repo_id`, as "METHOD file@revision"."""
        out = []
        for request in self.log:
            hit = RESOLVE.fullmatch(request.path)
            if hit and hit[1] == repo_id:
                out.append(f"{request.method} {hit[3]}@{unquote(hit[2])}")
        return out

    def answer(self, http: BaseHTTPRequestHandler) -> None:
        """Log the request, then do as the Hub does."""
        headers = {k.lower(): v for k, v in http.headers.items()}
        self.log.append(Request(method=http.command, path=http.path, headers=headers))
        hit = RESOLVE.fullmatch(http.path)
        if not hit:
            self.send(http, 404, {"X-Error-Message": "Sorry, we can't find the page you are looking for."})
            return
        repo, revision, name = self.repos.get(hit[1]), unquote(hit[2]), hit[3]
        if repo is None:
            status, text = (404, "Repository not found") if "authorization" in headers else (
                401, "Invalid username or password.")
            self.send(http, status, {"X-Error-Code": "RepoNotFound", "X-Error-Message": text})
        elif http.command in repo.silent:
            self.closing.wait(60)
            http.close_connection = True
        elif http.command in repo.refusals and len(self.asked(hit[1])) > repo.patience:
            self.send(http, *repo.refusals[http.command])
        elif repo.moved_to:
            self.send(http, 307, {"Location": http.path.replace(hit[1], repo.moved_to, 1)})
        elif revision not in (*repo.refs, repo.commit):
            self.send(http, 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
        elif name not in repo.files:
            self.send(http, 404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found",
                                  "X-Repo-Commit": repo.commit})
        else:
            body = repo.files[name]
            facts = {"X-Repo-Commit": repo.commit, "ETag": f'"{hashlib.sha1(body).hexdigest()}"',
                     "X-HF-Warning": "auth; You are sending unauthenticated requests"} | repo.facts
            facts = {k: v for k, v in facts.items() if v}
            away = repo.stored_at and (not repo.large or name in repo.large)
            part = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
            if away:
                facts |= {"X-Linked-Size": str(len(body)), "X-Linked-Etag": facts["ETag"],
                          "Location": f"{repo.stored_at}{http.path}"}
                self.send(http, 302, facts)
            elif part and not repo.no_range and int(part[1]) >= len(body):
                self.send(http, 416, {"Content-Range": f"bytes */{len(body)}"})
            elif part and not repo.no_range:
                begin, end = int(part[1]), min(int(part[2]) + 1, len(body))
                self.send(http, 206, facts | {"Content-Range": f"bytes {begin}-{end - 1}/{len(body)}"}, body[begin:end])
            else:
                self.send(http, 200, facts, body)

    def send(self, http: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        """Write one response; the body only to a GET."""
        http.send_response(status)
        for key, value in headers.items():
            http.send_header(key, value)
        if http.command == "GET" or "gzip" not in (http.headers["Accept-Encoding"] or ""):
            http.send_header("Content-Length", str(len(body)))  # a page made smaller on the way has no length before
        http.end_headers()
        if http.command == "GET":
            self.sent.append((http.path, len(body)))
            http.wfile.write(body)
