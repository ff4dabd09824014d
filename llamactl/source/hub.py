"""The Hugging Face Hub: one file of one repository, from the local cache or by one download.

huggingface_hub owns every HF_* setting, the token, the cache and the transfer. It is imported inside the functions
that use it, because that import costs more time than most commands take.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

from llamactl.errors import InputRefused, LlamactlError, NotAvailable
from llamactl.spec.jsontext import MAX_JSON_BYTES

T = TypeVar("T")

HTTP_S = 3.0  # seconds to connect, and for each read; a user's HF_HUB_ETAG_TIMEOUT takes its place
SLACK_S = 1.0  # name look-up and a host's second address obey no HTTP timeout, so the clock stops them
DOWNLOAD_S = 30.0  # huggingface_hub would resume, and wait out a rate limit, for minutes without a word
MAX_REDIRECTS = 5  # a renamed repository takes one

_FALL_BACK = ("hub-unreachable", "hub-server-error", "hub-rate-limited")
_ELSE = "or give a local folder or a preset"
_LOCK = threading.Lock()  # `_quiet` puts back what it found, so two of them may not overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file of a Hub repository on disk.

    commit: the full hash it belongs to. cached: no byte of it was downloaded now. note: why a copy that may be old
    was used, None if the Hub was asked or the revision is a commit.
    """

    path: str
    commit: str | None
    cached: bool
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ask:
    """What was asked for, in the words of the messages. page: the repository's web page."""

    repo_id: str
    revision: str | None
    filename: str
    host: str
    page: str

    def refuse(self, code: str, message: str, help: str) -> NotAvailable:
        return NotAvailable(code, message, path=_ref(self.repo_id, self.revision), help=help)


def fetch(repo_id: str, revision: str | None, filename: str = "config.json", *, offline: bool = False) -> HubFile:
    """Find `filename` of `repo_id` at `revision` (branch, tag or commit; None: the main branch).

    No request where offline (also by HF_HUB_OFFLINE) or where `revision` is a full commit that the cache holds.
    Where the network fails, the cached copy is the answer, with a note.
    Raises NotAvailable (codes hub-*), InputRefused (json-too-large).
    """
    try:
        with _LOCK, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _fetch(repo_id, revision, filename, offline)
    except LlamactlError:
        raise
    except Exception as e:  # a broken HF_* value, a cache that cannot be written, a repo id no Hub can have
        raise NotAvailable("hub-error", _first_line(e), path=_ref(repo_id, revision), help=_remedy(e)) from None


def _fetch(repo_id: str, revision: str | None, filename: str, offline: bool) -> HubFile:
    from huggingface_hub import constants, hf_hub_download, hf_hub_url

    scheme, netloc = urlsplit(constants.ENDPOINT)[:2]
    host = netloc.rpartition("@")[2]  # an endpoint's user and password stay out of messages
    ask = _Ask(repo_id=repo_id, revision=revision, filename=filename, host=host,
               page=f"{scheme}://{host}/{repo_id}")
    if revision is not None and (revision.startswith("/") or ".." in revision):  # would leave the cache's refs/
        raise ask.refuse("hub-revision-not-found", f"{revision!r} cannot be a revision", _REVISIONS)
    offline = offline or constants.HF_HUB_OFFLINE
    pinned = re.fullmatch(r"[0-9a-f]{40}", revision or "") is not None
    have = _cached(ask, sure=offline or pinned)
    if have is not None and (offline or pinned):
        return have
    if offline:
        switch = "HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "--offline"
        raise ask.refuse("hub-offline", f"offline, and its {filename} is not in the local cache",
                         f"run once without {switch}, {_ELSE}")

    set_by_user = constants.HF_HUB_ETAG_TIMEOUT != constants.DEFAULT_ETAG_TIMEOUT
    timeout = float(constants.HF_HUB_ETAG_TIMEOUT) if set_by_user else HTTP_S
    url = hf_hub_url(repo_id, filename, revision=revision)
    try:
        with _quiet():
            commit, size = _within(timeout + SLACK_S, lambda: _head(url, timeout, ask))
            if have is not None and have.commit == commit:
                return have
            if size > MAX_JSON_BYTES:
                raise InputRefused("json-too-large", f"{filename} has {size:,} bytes; at most {MAX_JSON_BYTES:,} "
                                   "are read", path=_ref(repo_id, revision))
            path = _within(max(DOWNLOAD_S, constants.HF_HUB_DOWNLOAD_TIMEOUT),
                           lambda: hf_hub_download(repo_id, filename, revision=revision, etag_timeout=timeout))
    except Exception as e:
        refusal = _refusal(e, ask)
        if have is None:
            raise refusal from None
        if refusal.code in _FALL_BACK:
            return replace(have, note=f"{refusal.message}; the cached copy of commit {have.commit} is used")
        refusal.help = f"{refusal.help}; --offline reads the cached copy"
        raise refusal from None
    return replace(_hub_file(path, filename), cached=False)


def _cached(ask: _Ask, *, sure: bool) -> HubFile | None:
    """The file as the cache has it. sure: what the cache knows to be missing is missing, and an error."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(ask.repo_id, ask.filename, revision=ask.revision)
    if isinstance(found, str):
        return _hub_file(found, ask.filename)
    if found is not None and sure:
        raise _no_file(ask)
    return None


def _hub_file(path: str, filename: str) -> HubFile:
    """A path of the cache, which reads snapshots/COMMIT/FILENAME."""
    return HubFile(path=path, commit=os.path.basename(path[: -len(filename) - 1]), cached=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """huggingface_hub without its logger's warnings, its bars and its telemetry, as it was before on leaving.

    Telemetry matters because its user agent first asks the Hub for a list of coding agents: a second request.
    Someone who turned the log level down to debug or info keeps it.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        logging,
    )

    level, telemetry, no_bars = logging.get_verbosity(), constants.HF_HUB_DISABLE_TELEMETRY, are_progress_bars_disabled()
    if level >= logging.WARNING:
        logging.set_verbosity(logging.CRITICAL)
    constants.HF_HUB_DISABLE_TELEMETRY = True
    disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        constants.HF_HUB_DISABLE_TELEMETRY = telemetry
        if not no_bars:
            enable_progress_bars()


def _within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`, or TimeoutError after `seconds`; the thread is then left behind, as DNS cannot be stopped."""
    done: list[T] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            done.append(call())
        except Exception as e:
            failed.append(e)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return done[0]


def _head(url: str, timeout: float, ask: _Ask) -> tuple[str | None, int]:
    """The commit and the size in bytes (0: not told) of the file at `url`, by one request that is never retried.

    Not `get_hf_file_metadata`: some versions repeat it for 23 s. Only redirects on the same host are followed, so the
    token stays there; a file kept elsewhere has its facts in the redirect's own headers.
    """
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    session: Any = get_session()  # requests before huggingface_hub 1.0, httpx since; the two differ in one word
    follow = "follow_redirects" if hasattr(session, "follow_redirects") else "allow_redirects"
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    for _ in range(MAX_REDIRECTS):
        response = session.request("HEAD", url, headers=headers, timeout=timeout, **{follow: False})
        hf_raise_for_status(response)
        target = urljoin(url, response.headers.get("Location") or url)
        if not 300 <= response.status_code < 400 or urlsplit(target)[:2] != urlsplit(url)[:2]:
            break
        url = target
    commit, size = response.headers.get("X-Repo-Commit"), response.headers.get("X-Linked-Size")
    if response.status_code < 300:
        size = size or response.headers.get("Content-Length")
        if commit is None:
            raise ask.refuse("hub-error", f"{ask.host} does not answer as a Hub (no X-Repo-Commit header)",
                             "check HF_ENDPOINT and the proxy")
    return commit, int(size) if size and size.isdecimal() else 0


_REVISIONS = "give a branch, a tag or a full commit hash, or leave out @REV"


def _no_file(ask: _Ask) -> NotAvailable:
    return ask.refuse("hub-file-not-found", f"the repository has no {ask.filename}",
                      "a GGUF or adapter repository has none: give its base model, or a local folder")


def _refusal(e: Exception, ask: _Ask) -> LlamactlError:
    """What went wrong, as one line and the way out."""
    if type(e).__name__ == "LocalEntryNotFoundError" and isinstance(e.__cause__, Exception):
        e = e.__cause__
    if isinstance(e, LlamactlError):
        return e
    response = getattr(e, "response", None)
    if response is not None:
        return _answered(response, ask)
    if isinstance(e, TimeoutError) or type(e).__module__.partition(".")[0] in ("requests", "httpx", "httpx2"):
        return ask.refuse("hub-unreachable", f"the Hub could not be reached: {_reason(e)} ({ask.host})",
                          f"check the network and HF_ENDPOINT, {_ELSE}")
    return ask.refuse("hub-error", _first_line(e), _remedy(e))


def _answered(response: Any, ask: _Ask) -> NotAvailable:
    """The Hub's refusal by its status and its X-Error-Code and X-Error-Message headers."""
    status, headers = response.status_code, response.headers
    code, said = headers.get("X-Error-Code") or "", (headers.get("X-Error-Message") or "").lower()
    token = "authorization" in response.request.headers
    if status == 429:
        wait = re.search(r"(?:^|\bt=)(\d+)", headers.get("Retry-After") or headers.get("RateLimit") or "")
        return ask.refuse("hub-rate-limited", "too many requests" + (f"; try again in {wait[1]} s" if wait else ""),
                          f"wait, or run 'hf auth login' for a higher limit, {_ELSE}")
    if status >= 500:
        return ask.refuse("hub-server-error", f"the Hub answered {status}", f"try again later, {_ELSE}")
    if status == 401 and token:  # a token that is good but not enough is answered 403 or 404
        return ask.refuse("hub-bad-token", "the Hub does not accept the token",
                          "run 'hf auth login', or unset HF_TOKEN: a public model needs none")
    if status == 403 and "fine-grained" in said:  # comes with or without the code GatedRepo
        return ask.refuse("hub-gated-token-scope", "gated, and the fine-grained token may not read gated models",
                          "allow it 'public gated repos' at https://huggingface.co/settings/tokens, or 'hf auth login'")
    if code == "GatedRepo" and not token:
        return ask.refuse("hub-gated-no-token", "gated, and no token was sent",
                          f"ask for access at {ask.page}, then run 'hf auth login'; {_ELSE[3:]}")
    if code == "GatedRepo":
        state = ("the request for access is still under review" if "awaiting" in said else
                 "the request for access was rejected" if "rejected" in said else "the account has no access yet")
        return ask.refuse("hub-gated-not-approved", f"gated, and {state}",
                          f"ask for access at {ask.page}, {_ELSE}")
    if code == "RevisionNotFound":
        return ask.refuse("hub-revision-not-found", f"no revision {ask.revision or 'main'!r}", _REVISIONS)
    if code == "EntryNotFound":
        return _no_file(ask)
    if code == "RepoNotFound" or status in (401, 404):
        if token:
            return ask.refuse("hub-not-found", "no such model, or a private one that the token sent cannot see",
                              "check the spelling, or 'hf auth login' with an account that can see it")
        return ask.refuse("hub-not-found", "no such model, or a private one (no token was sent)",
                          "check the spelling; for a private model run 'hf auth login'")
    return ask.refuse("hub-error", f"the Hub answered {status}: {_redact(said) or 'no reason given'}",
                      f"see {ask.page}, {_ELSE}")


def _reason(e: BaseException) -> str:
    """Why no answer came; never the text of an HTTP library, which may quote the headers."""
    from socket import gaierror
    from ssl import SSLError

    link: BaseException | None = e
    for _ in range(20):
        if link is None:
            break
        if isinstance(link, gaierror):
            return "the host name is not known"
        if isinstance(link, SSLError):
            return "the TLS certificate was not accepted" if "CERT" in str(link.reason) else "TLS failed"
        if isinstance(link, OSError) and link.errno:
            return os.strerror(link.errno).lower()
        if "Timeout" in type(link).__name__:
            return str(link) if link is e and type(e) is TimeoutError else "no answer in time"
        link = link.__cause__ or link.__context__
    return type(e).__name__


def _remedy(e: Exception) -> str:
    """The help for an error of huggingface_hub that has no code here."""
    if isinstance(e, OSError) and e.filename is not None:
        return "point HF_HOME to a folder that can be written and has space"
    return f"check the HF_* variables and the reference, {_ELSE}"


def _first_line(e: Exception) -> str:
    lines = _redact(str(e)).strip().splitlines()
    return lines[0] if lines else type(e).__name__


def _redact(text: str) -> str:
    """`text` without anything that is, or follows the mark of, a token."""
    return re.sub(r"(?i)\bbearer\s+\S+|\bhf_\w{4,}|\bapi_org_\w+", "<token>", text)


def _ref(repo_id: str, revision: str | None) -> str:
    return f"{repo_id}@{revision}" if revision else repo_id
