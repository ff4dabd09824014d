"""Opening files that nobody vouches for: regular files only, and links only to where a model's links may lead."""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import BinaryIO

from llamactl.errors import InputRefused, LlamactlError, NotAvailable

# Where the Hub cache really keeps a file: models--ORG--NAME/blobs/ETAG, or the store that all its repositories share.
_HUB_BLOB = re.compile(
    r"/(?:(?:models|datasets|spaces)--[^/]+/blobs/(?:[0-9a-f]{40}|[0-9a-f]{64})|blobs/([0-9a-f]{2})/\1[0-9a-f]{62})"
)


def open_regular(path: str, *, inside: str | None = None) -> tuple[BinaryIO, int]:
    """The opened regular file at `path` and its size in bytes.

    inside: the model folder; a link then may lead only into it or to a blob of the Hub cache (code link-outside).
    Other codes: not-found (NotAvailable), not-a-file, dangling-link, link-loop, io-permission, io-error.
    """
    check_regular(path, inside=inside)
    # The file may have been exchanged since: a FIFO must not block the open, and what was opened is looked at again.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        fd = os.open(path, flags)
        info = os.fstat(fd)
    except OSError as e:
        raise unreadable(path, e) from None
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise _not_a_file(path, info.st_mode)
    return os.fdopen(fd, "rb"), info.st_size


def check_regular(path: str, *, inside: str | None = None) -> None:
    """Refuse what `open_regular` refuses, without opening anything."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as e:
        raise unreadable(path, e) from None
    if not stat.S_ISREG(mode):
        raise _not_a_file(path, mode)
    if inside is not None and not _may_lead_to(os.path.realpath(path), inside):
        raise InputRefused(
            "link-outside",
            f"a link to {os.path.realpath(path)}, outside the model folder and no file of the Hub cache",
            path=path,
            help="put the file itself into the folder",
        )


def unreadable(path: str, e: Exception) -> LlamactlError:
    """The error for a path that the system does not let us look at; a broken link says where it points."""
    if isinstance(e, OSError) and e.errno in (errno.ENOENT, errno.ENOTDIR):
        if os.path.islink(path):
            return InputRefused(
                "dangling-link",
                f"a link to nothing: it points to {os.readlink(path)}",
                path=path,
                help="download the file again, or repair the link",
            )
        return NotAvailable("not-found", "no such file", path=path)
    if isinstance(e, OSError) and e.errno == errno.ELOOP:
        return InputRefused("link-loop", "a link that leads back to itself", path=path,
                            help="download the file again")
    if isinstance(e, PermissionError):
        return InputRefused("io-permission", "not readable: permission denied", path=path,
                            help="give yourself the right to read it")
    return InputRefused("io-error", f"not readable: {getattr(e, 'strerror', None) or e}", path=path)


def looks_like(head: bytes) -> tuple[str | None, str, str] | None:
    """What a file that is no weights file really is: (code of its own or None, what, what to do); None if unknown.

    head: the first bytes of the file, 512 are enough.
    """
    if head.startswith(b"version https://git-lfs"):
        return "lfs-pointer", "a Git LFS pointer, not the weights", "run 'git lfs pull'"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return None, "a web page (HTML or XML), not weights", "download the file again; the page may be a login page"
    for magic, what in _MAGIC.items():
        if head.startswith(magic):
            return None, f"{what}, not what its name says", "it is not read under this name"
    if len(head) >= 8 and not any(head):
        return None, "it starts with zeros: the download stopped early", "download the file again"
    return None


_MAGIC = {
    b"PK\x03\x04": "a zip archive (perhaps a PyTorch pickle)",
    b"GGUF": "a GGUF file",
    b"\x1f\x8b": "a gzip archive",
    b"\x89HDF": "an HDF5 file",
    b"\x00\x05\x16\x07": "an AppleDouble sidecar of macOS",
    **{bytes([0x80, v]): "a Python pickle" for v in (2, 3, 4, 5)},
}


def _not_a_file(path: str, mode: int) -> InputRefused:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
             stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    kind = kinds.get(stat.S_IFMT(mode), "something else")
    return InputRefused("not-a-file", f"{kind}, not a regular file", path=path, help="name a file on disk")


def _may_lead_to(real: str, folder: str) -> bool:
    """Whether a model in `folder` may open the file `real`; both sides are compared with all links resolved."""
    folder = os.path.realpath(folder)
    if real.startswith(os.path.join(folder, "")):
        return True
    head, name = os.path.split(folder)
    while name:  # a snapshot's own blobs: REPO/snapshots/REV[/sub] -> REPO/blobs/ANY
        if os.path.basename(head) == "snapshots":
            return os.path.dirname(real) == os.path.join(os.path.dirname(head), "blobs") or _is_hub_blob(real)
        head, name = os.path.split(head)
    return _is_hub_blob(real)


def _is_hub_blob(real: str) -> bool:
    tail = "/".join(["", *real.replace(os.sep, "/").split("/")[-3:]])
    return _HUB_BLOB.fullmatch(tail) is not None
