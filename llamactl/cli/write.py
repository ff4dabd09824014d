"""Writing one file: absent or complete, never over another one unless asked."""

from __future__ import annotations

import contextlib
import os
import tempfile

from llamactl.errors import OutputError


def write_file(path: str, data: bytes, *, force: bool = False) -> None:
    """Write `data` beside `path` and rename it there once it is whole. Raises OutputError (exit 5)."""
    if os.path.lexists(path) and not force:
        raise OutputError("exists", "is there already", path=path, help="--force replaces it")
    if os.path.isdir(path):
        raise OutputError("is-a-folder", "is a folder", path=path)
    folder = os.path.dirname(os.path.abspath(path))
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=".llamactl-", dir=folder)
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = None
    except OSError as e:
        raise OutputError("not-written", f"could not be written: {e.strerror}", path=path) from None
    finally:  # whatever stopped it, Ctrl-C included
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
