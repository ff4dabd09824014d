"""Headers of safetensors files on the Hub, by HTTP Range: 8 bytes, then exactly the header, never a byte of a weight.

huggingface_hub's own parse_safetensors_file_metadata asks for the first 100 kB and keeps neither the size of the file
nor a repeated key; what is fetched here goes through the checks that a local file goes through.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

from llamactl.errors import LlamactlError, NotAvailable
from llamactl.source.hub import LOCK, MAX_REDIRECTS, fetch, quiet
from llamactl.source.huberrors import Ask, answered, failed

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own cap; a longer one is left to the reader, which refuses it
READ_S = 30.0  # for a header of many megabytes; the connection has hub.HTTP_S
THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteHeader:
    """The beginning of a file on the Hub: its length and its header. file_bytes: the size of the whole file."""

    name: str
    file_bytes: int
    head: bytes


def fetch_index(repo_id: str, revision: str | None, *, offline: bool = False) -> str | None:
    """The path of the repository's index on this disk (its folder is the snapshot), None if it has none.

    Raises NotAvailable (codes hub-*), as hub.fetch does.
    """
    try:
        return fetch(repo_id, revision, INDEX, offline=offline).path
    except NotAvailable as e:
        if e.code == "hub-file-not-found":
            return None
        raise


def fetch_headers(repo_id: str, revision: str | None, names: Sequence[str], *, offline: bool = False
                  ) -> list[RemoteHeader]:
    """The headers of the files `names` of a repository, in their order.

    Raises NotAvailable (codes hub-*): those of hub.fetch, and hub-no-range where the server sends whole files only.
    """
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).netloc.rpartition("@")[2]
    scheme = urlsplit(constants.ENDPOINT).scheme
    asks = [Ask(repo_id=repo_id, revision=revision, filename=n, host=host, page=f"{scheme}://{host}/{repo_id}")
            for n in names]
    if offline or constants.HF_HUB_OFFLINE:
        switch = "HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "--offline"
        raise asks[0].refuse("hub-offline", "offline, and weight headers are read from the network",
                             f"run without {switch}, or give the folder of a downloaded model")
    with LOCK, warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        with ThreadPoolExecutor(min(THREADS, len(names))) as pool:
            return list(pool.map(_header, asks))


def _header(ask: Ask) -> RemoteHeader:
    import huggingface_hub.utils
    from huggingface_hub.file_download import hf_hub_url

    utils: Any = huggingface_hub.utils
    try:
        headers = {**utils.build_hf_headers(), "Accept-Encoding": "identity"}
        url = hf_hub_url(ask.repo_id, ask.filename, revision=ask.revision)
        url, headers, size, head = _range(url, headers, 0, 8, ask)
        n = int.from_bytes(head, "little")
        if len(head) == 8 and 0 < n <= min(MAX_HEADER_BYTES, size - 8):
            head += _range(url, headers, 8, n, ask)[3]
        return RemoteHeader(name=ask.filename, file_bytes=size, head=head)
    except LlamactlError:
        raise
    except Exception as e:
        raise failed(e, ask) from None


def _range(url: str, headers: dict[str, str], begin: int, count: int, ask: Ask
           ) -> tuple[str, dict[str, str], int, bytes]:
    """`count` bytes from `begin`: (where they were, the headers that went there, the file's size, the bytes).

    Redirects are followed by hand: to another host, where the Hub keeps its large files, the token does not go.
    """
    for _ in range(MAX_REDIRECTS):
        asked = {**headers, "Range": f"bytes={begin}-{begin + count - 1}"}
        with _get(url, asked) as response:
            if response.status_code >= 400 and response.status_code != 416:
                raise answered(response, ask)
            if response.status_code in (301, 302, 303, 307, 308):
                target = urljoin(url, response.headers.get("Location") or url)
                if urlsplit(target)[:2] != urlsplit(url)[:2]:
                    headers = {k: v for k, v in headers.items() if k.lower() not in ("authorization", "cookie")}
                url = target
                continue
            told = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d+)", response.headers.get("Content-Range") or "")
            if response.status_code == 416 and told:  # shorter than what was asked for
                return url, headers, int(told[1]), b""
            if response.status_code != 206 or not told:
                raise ask.refuse("hub-no-range", f"{urlsplit(url).hostname} does not send parts of a file (status "
                                 f"{response.status_code})", "download the model and inspect its folder")
            return url, headers, int(told[1]), _read(response, count)
    raise ask.refuse("hub-error", f"more than {MAX_REDIRECTS} redirects", "try again later")


@contextmanager
def _get(url: str, headers: dict[str, str]) -> Iterator[Any]:
    """A response whose body was not read yet. requests before huggingface_hub 1.0, httpx since."""
    import huggingface_hub.utils
    from huggingface_hub import constants

    utils: Any = huggingface_hub.utils
    session: Any = utils.get_session()
    timeout = max(READ_S, constants.HF_HUB_DOWNLOAD_TIMEOUT)
    if hasattr(session, "follow_redirects"):
        with session.stream("GET", url, headers=headers, timeout=timeout, follow_redirects=False) as response:
            yield response
    else:
        with session.get(url, headers=headers, timeout=timeout, stream=True, allow_redirects=False) as response:
            yield response


def _read(response: Any, count: int) -> bytes:
    """At most `count` bytes of the body, whatever the server goes on to send."""
    chunks = response.iter_bytes() if hasattr(response, "iter_bytes") else response.iter_content(1 << 16)
    parts, got = [], 0
    for chunk in chunks:
        parts.append(chunk)
        got += len(chunk)
        if got >= count:
            break
    return b"".join(parts)[:count]
