"""The Hub's refusals in llamactl's words: one line that says what is wrong, one that names the way out.

The Hub answers 401 or 403 with `X-Error-Code: GatedRepo` for a gated model, 404 (401 without a token) with RepoNotFound
for a missing or a private one, and puts the difference between "no access yet", "under review" and "a fine-grained
token without the gated permission" into `X-Error-Message` only. No text here ever quotes a token.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from llamactl.errors import LlamactlError, NotAvailable

ELSEWHERE = "give a local folder or a preset"
REVISIONS = "give a branch, a tag or a full commit hash, or leave out @REV"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What was asked for. host, page: the Hub's host and the model's web page, without an endpoint's password."""

    repo_id: str
    revision: str | None
    filename: str
    host: str = "huggingface.co"
    page: str = ""

    @property
    def ref(self) -> str:
        """The reference as a user writes it."""
        return f"{self.repo_id}@{self.revision}" if self.revision else self.repo_id

    def refuse(self, code: str, message: str, help: str) -> NotAvailable:
        """The error that `fetch` raises."""
        return NotAvailable(code, message, path=self.ref, help=help)


def no_file(ask: Ask) -> NotAvailable:
    """The model is there, the file is not."""
    return ask.refuse("hub-file-not-found", f"the repository has no {ask.filename}",
                      "GGUF and adapter repositories have none: give the base model, or a local folder")


def failed(e: Exception, ask: Ask) -> LlamactlError:
    """Anything that huggingface_hub or its HTTP library raised."""
    if type(e).__name__ == "LocalEntryNotFoundError" and isinstance(e.__cause__, Exception):
        e = e.__cause__  # "connection issue or Hub downtime", and why is in the cause
    if isinstance(e, LlamactlError):
        return e
    if getattr(e, "response", None) is not None:
        return answered(e.response, ask)  # type: ignore[attr-defined]
    if isinstance(e, TimeoutError) or type(e).__module__.partition(".")[0] in ("requests", "httpx", "httpx2"):
        return ask.refuse("hub-unreachable", f"the Hub could not be reached: {_reason(e)} ({ask.host})",
                          f"check the network and HF_ENDPOINT, or {ELSEWHERE}")
    if isinstance(e, UnicodeEncodeError):  # of all that goes into a request, only the token is not quoted first
        return ask.refuse("hub-bad-token", "the token holds a character that no token has", "run 'hf auth login'")
    lines = _redact(str(e)).strip().splitlines()
    unwritable = isinstance(e, OSError) and e.filename is not None
    return ask.refuse("hub-error", lines[0] if lines else type(e).__name__,
                      "point HF_HOME to a folder that can be written and has space" if unwritable
                      else f"check the HF_* variables and the reference, or {ELSEWHERE}")


def answered(response: Any, ask: Ask) -> NotAvailable:
    """A response with a status of 400 or more (requests' or httpx's: they agree on what is used here)."""
    status, headers = response.status_code, response.headers
    code, said = headers.get("X-Error-Code") or "", headers.get("X-Error-Message") or ""
    token = (response.request.headers.get("authorization") or "").rpartition(" ")[2]
    if status == 429:
        wait = re.search(r"(?:^|\bt=)(\d+)", headers.get("Retry-After") or headers.get("RateLimit") or "")
        return ask.refuse("hub-rate-limited", "too many requests" + (f"; try again in {wait[1]} s" if wait else ""),
                          f"wait, or run 'hf auth login' for a higher limit, or {ELSEWHERE}")
    if status >= 500:
        return ask.refuse("hub-server-error", f"the Hub answered {status}", f"try again later, or {ELSEWHERE}")
    if status == 401 and token:  # a good token that may not see something is answered 403 or 404
        return ask.refuse("hub-bad-token", "the Hub does not accept the token",
                          "run 'hf auth login', or unset HF_TOKEN: a public model needs none")
    if status == 403 and "fine-grained" in said:  # seen with and without the code GatedRepo
        return ask.refuse("hub-gated-token-scope", "gated, and the fine-grained token may not read gated models",
                          "allow it public gated repos at https://huggingface.co/settings/tokens, or 'hf auth login'")
    if code == "GatedRepo" and not token:
        return ask.refuse("hub-gated-no-token", "gated, and no token was sent",
                          f"ask for access at {ask.page}, then run 'hf auth login', or {ELSEWHERE}")
    if code == "GatedRepo":
        state = ("the request for access is under review" if "awaiting" in said else
                 "the request for access was rejected" if "rejected" in said else "the account has no access yet")
        return ask.refuse("hub-gated-not-approved", f"gated, and {state}",
                          f"ask for access at {ask.page}, or {ELSEWHERE}")
    if code == "RevisionNotFound":
        return ask.refuse("hub-revision-not-found", f"no revision {ask.revision or 'main'!r}", REVISIONS)
    if code == "EntryNotFound":
        return no_file(ask)
    if code == "RepoNotFound" or status in (401, 404):
        check = "check the spelling" if code else "check the spelling and HF_ENDPOINT"  # the Hub itself gives a code
        if token:
            return ask.refuse("hub-not-found", "no such model, or a private one that the token sent may not see",
                              f"{check}, or 'hf auth login' with an account that may see it")
        return ask.refuse("hub-not-found", "no such model, or a private one (no token was sent)",
                          f"{check}; for a private model run 'hf auth login'")
    said = _redact(said.replace(token, "<token>") if token else said)[:200]
    return ask.refuse("hub-error", f"the Hub answered {status}: {said or 'no reason given'}",
                      f"see {ask.page}, or {ELSEWHERE}")


def _reason(e: BaseException) -> str:
    """Why no answer came; never the text of an HTTP library, which may quote the headers."""
    from socket import gaierror
    from ssl import SSLError

    link: BaseException | None = e
    for _ in range(20):  # a chain may be a ring
        if link is None:
            break
        if isinstance(link, gaierror):
            return "the host name is not known"
        if isinstance(link, SSLError):
            return "the TLS certificate was not accepted" if "CERT" in str(link.reason) else "TLS failed"
        if isinstance(link, OSError) and link.errno:
            return os.strerror(link.errno).lower()
        if "Timeout" in type(link).__name__:
            return "no answer in time"
        link = link.__cause__ or link.__context__
    return type(e).__name__


def _redact(text: str) -> str:
    """`text` without what looks like a token or follows the word Bearer."""
    return re.sub(r"(?i)\bbearer\s+\S+|\bhf_\w{8,}|\bapi_org_\w+", "<token>", text)
