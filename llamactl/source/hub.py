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
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urljoin, urlsplit

from llamactl.errors import InputRefused, LlamactlError
from llamactl.source.huberrors import ELSEWHERE, REVISIONS, Ask, answered, failed, no_file
from llamactl.spec.jsontext import MAX_JSON_BYTES

T = TypeVar("T")

HTTP_S = 3.0  # seconds to connect, and for each read; a user's HF_HUB_ETAG_TIMEOUT takes its place
SLACK_S = 0.5  # name look-up and a host's further addresses obey no HTTP timeout; a clock stops them this much later
DOWNLOAD_S = 30.0  # huggingface_hub would resume, and sit out a rate limit, for minutes without a word
MAX_REDIRECTS = 5  # a renamed repository takes one

_FALL_BACK = ("hub-unreachable", "hub-server-error", "hub-rate-limited")
LOCK = threading.Lock()  # `quiet` puts back what it found, so two of them must not overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file of a Hub repository on disk.

    commit: the full hash it belongs to. cached: no byte of it was downloaded now. note: why the cached copy was used
    though the Hub was to be asked; else None.
    """

    path: str
    commit: str | None
    cached: bool
    note: str | None = None


def fetch(repo_id: str, revision: str | None, filename: str = "config.json", *, offline: bool = False) -> HubFile:
    """Find `filename` of `repo_id` at `revision` (branch, tag or commit; None: the main branch).

    No request where offline (also by HF_HUB_OFFLINE), or where `revision` is a full commit that the cache holds.
    Where the network fails, the cached copy is the answer, with a note.
    Raises NotAvailable (codes hub-*), InputRefused (json-too-large).
    """
    try:
        with LOCK, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _fetch(repo_id, revision, filename, offline)
    except LlamactlError:
        raise
    except Exception as e:  # a broken HF_* value, or a repo id that no Hub can have
        raise failed(e, Ask(repo_id=repo_id, revision=revision, filename=filename)) from None


def _fetch(repo_id: str, revision: str | None, filename: str, offline: bool) -> HubFile:
    # From the module itself: the package's own lazy names print to stdout when their import fails.
    from huggingface_hub import constants
    from huggingface_hub.file_download import hf_hub_download, hf_hub_url

    scheme, netloc = urlsplit(constants.ENDPOINT)[:2]
    host = (netloc or constants.ENDPOINT).rpartition("@")[2]
    ask = Ask(repo_id=repo_id, revision=revision, filename=filename, host=host, page=f"{scheme}://{host}/{repo_id}")
    if revision is not None and (revision.startswith("/") or ".." in revision):  # would leave the cache's refs folder
        raise ask.refuse("hub-revision-not-found", f"{revision!r} cannot be a revision", REVISIONS)
    offline = offline or constants.HF_HUB_OFFLINE
    local = offline or re.fullmatch(r"[0-9a-f]{40}", revision or "") is not None
    have = _cached(ask, final=local)
    if have is not None and local:
        return have
    if offline:
        switch = "HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "--offline"
        raise ask.refuse("hub-offline", f"offline, and its {filename} is not in the local cache",
                         f"run once without {switch}, or {ELSEWHERE}")

    set_by_user = constants.HF_HUB_ETAG_TIMEOUT != constants.DEFAULT_ETAG_TIMEOUT
    timeout = float(constants.HF_HUB_ETAG_TIMEOUT) if set_by_user else HTTP_S
    url = hf_hub_url(repo_id, filename, revision=revision)
    try:
        with quiet():
            commit, size = _within(timeout + SLACK_S, lambda: _head(url, timeout, ask))
            if have is not None and have.commit == commit:
                return have
            if size > MAX_JSON_BYTES:
                raise InputRefused("json-too-large", f"{filename} has {size:,} bytes; at most {MAX_JSON_BYTES:,} "
                                   "are read", path=ask.ref)
            path = _within(max(DOWNLOAD_S, constants.HF_HUB_DOWNLOAD_TIMEOUT),
                           lambda: hf_hub_download(repo_id, filename, revision=revision, etag_timeout=timeout))
    except Exception as e:
        refusal = failed(e, ask)
        if have is None:
            raise refusal from None
        if refusal.code in _FALL_BACK:
            return replace(have, note=f"{refusal.message}; the cached copy of commit {have.commit} is used")
        refusal.help = f"{refusal.help or ''}; --offline reads the cached copy".removeprefix("; ")
        raise refusal from None
    return replace(_hub_file(path, filename), cached=False)


def _cached(ask: Ask, *, final: bool) -> HubFile | None:
    """The file in the cache. final: nobody else will be asked, so a file known to be missing is an error."""
    from huggingface_hub.file_download import try_to_load_from_cache

    found = try_to_load_from_cache(ask.repo_id, ask.filename, revision=ask.revision)
    if isinstance(found, str):
        return _hub_file(found, ask.filename)
    if found is not None and final:
        raise no_file(ask)
    return None


def _hub_file(path: str, filename: str) -> HubFile:
    """A path in the cache: .../snapshots/COMMIT/FILENAME."""
    return HubFile(path=path, commit=os.path.basename(path[: -len(filename) - 1]), cached=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Without huggingface_hub's log warnings, progress bars and telemetry; on leaving, all is as it was.

    Telemetry goes because its user agent first asks the Hub for a list of coding agents, which is a second request.
    A log level that someone turned down to info or debug stays.
    """
    import logging

    import huggingface_hub.utils
    from huggingface_hub import constants

    bars: Any = huggingface_hub.utils
    logger = logging.getLogger("huggingface_hub")
    level, telemetry, no_bars = logger.level, constants.HF_HUB_DISABLE_TELEMETRY, bars.are_progress_bars_disabled()
    if level >= logging.WARNING:
        logger.setLevel(logging.CRITICAL)
    constants.HF_HUB_DISABLE_TELEMETRY = True
    bars.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        constants.HF_HUB_DISABLE_TELEMETRY = telemetry
        if not no_bars:
            bars.enable_progress_bars()


def _within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`, or TimeoutError.

    Its thread is not waited for then, since a name look-up cannot be stopped. It ends at its next step in Python, so
    that it neither goes on asking nor says anything once `quiet` is over.
    """
    done: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            done.append(call())
        except Exception as e:
            errors.append(e)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not done:
        import ctypes

        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))  # the one that prints nothing
        raise TimeoutError
    return done[0]


def _head(url: str, timeout: float, ask: Ask) -> tuple[str | None, int]:
    """The commit (None: another host knows) and size in bytes (0: not told) of a file, by a request never repeated.

    Not `get_hf_file_metadata`, which some versions repeat for 23 s. Redirects are followed on the same host alone, so
    that the token stays there; for a file kept elsewhere, the redirect itself carries the facts.
    """
    import huggingface_hub.utils

    utils: Any = huggingface_hub.utils
    session = utils.get_session()  # requests before huggingface_hub 1.0, httpx since; they differ in one word
    follow = "follow_redirects" if hasattr(session, "follow_redirects") else "allow_redirects"
    headers = {**utils.build_hf_headers(), "Accept-Encoding": "identity"}
    for _ in range(MAX_REDIRECTS):
        response = session.request("HEAD", url, headers=headers, timeout=timeout, **{follow: False})
        if response.status_code >= 400:
            raise answered(response, ask)
        target = urljoin(url, response.headers.get("Location") or url)
        if response.status_code < 300 or urlsplit(target)[:2] != urlsplit(url)[:2]:
            break
        url = target
    commit, size = response.headers.get("X-Repo-Commit"), response.headers.get("X-Linked-Size")
    if response.status_code < 300:
        size = size or response.headers.get("Content-Length")
        if commit is None:
            raise ask.refuse("hub-error", f"{ask.host} does not answer as a Hub (no X-Repo-Commit header)",
                             "check HF_ENDPOINT and the proxy")
    return commit, int(size) if size and size.isdecimal() else 0


def cached_models() -> list[str]:
    """Ids of the models in the local Hub cache, by name; no request is made."""
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        names = os.listdir(HF_HUB_CACHE)
    except OSError:
        return []
    return sorted(n.removeprefix("models--").replace("--", "/", 1) for n in names if n.startswith("models--"))


class HubSettings(NamedTuple):
    """How huggingface_hub is set up here. token: whether there is one; it is never shown."""

    cache: str
    token: bool
    offline: bool
    endpoint: str


def settings() -> HubSettings:
    """huggingface_hub's own view of its cache, token, mode and endpoint; no request is made."""
    from huggingface_hub import constants, get_token

    return HubSettings(constants.HF_HUB_CACHE, bool(get_token()), constants.HF_HUB_OFFLINE, constants.ENDPOINT)
