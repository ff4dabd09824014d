"""Writing one file: the old one or the new one, whole, whatever stops the program."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress

from llamactl.errors import OutputError

Data = bytes | Iterable[bytes | memoryview]  # whole, or block by block


def create(path: str, data: Data, *, force: bool = False) -> None:
    """Write a file that nobody had, or with `force` one in its place. Raises OutputError (exit 5)."""
    if os.path.isdir(path):
        raise OutputError("is-a-folder", "is a folder", path=path)
    if os.path.lexists(path) and not force:
        raise OutputError("exists", "is there already", path=path, help="--force replaces it")
    try:
        put(path, data, 0o666 & ~_umask())
    except OSError as e:
        raise OutputError("not-written", f"could not be written: {e.strerror or e}", path=path) from None


def put(path: str, data: Data, mode: int, last_look: Callable[[], None] = lambda: None) -> None:
    """A whole new file beside `path`, synced, then one rename. A link keeps pointing at the file it names.

    mode: its permissions. last_look: called between the two; what it raises leaves all as it was. Raises OSError.
    """
    path = os.path.realpath(path)
    folder = os.path.dirname(path)
    if os.path.lexists(path) and not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(None, "not a regular file")
    fd, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(fd, "wb") as f:
            f.writelines((data,) if isinstance(data, bytes) else data)
            f.flush()
            os.chmod(temporary, mode)
            os.fsync(f.fileno())
        last_look()
        os.replace(temporary, path)
        temporary = ""
    finally:  # whatever stopped it, Ctrl-C included
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)
    _sync(folder)


def _sync(folder: str) -> None:
    """Have the rename itself on disk, where folders can be opened at all."""
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
