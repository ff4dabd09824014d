"""Where `convert` writes: a whole folder beside the target, synced, then renamed once.

Whatever stops the program, the target is absent, the old one, or the new one, complete. A single file is published with
its manifest, which comes first: a complete model always has one. Nothing of the input is ever touched.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO

from llamactl.checkpoint.exchange import (
    BESIDE,
    FORMER,
    MANIFEST,
    Claim,
    clear,
    flush,
    link_new,
    lock,
    put_new,
    put_over,
    undo_manifest,
)
from llamactl.checkpoint.place import Place
from llamactl.errors import LlamactlError, OutputError

_BUFFER_BYTES = 1 << 17


class Staging:
    """The folder that is being written. `path` is where its files lie until they are published.

    warnings: (code, message) of what went wrong after the output was in place; complete when `stage` has ended.
    """

    def __init__(self, place: Place, need: int, force: bool) -> None:
        self.warnings: list[tuple[str, str]] = []
        self._place, self._need, self._force = place, need, force
        self._claim = Claim(place.path)
        self._names: list[str] = []
        self._open: list[BinaryIO] = []
        self._published = False

    @property
    def path(self) -> str:
        return self._claim.folder

    def create(self, name: str) -> BinaryIO:
        """A new file under a plain file name. Buffered: flush before its descriptor is used. Raises OSError."""
        if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
            raise ValueError(f"not a plain file name: {name!r}")
        if self._place.single and name not in (self._place.single, MANIFEST):
            raise ValueError(f"only {self._place.single} and its manifest are published, not {name!r}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        file = os.fdopen(os.open(os.path.join(self.path, name), flags, 0o666), "wb", buffering=_BUFFER_BYTES)
        self._names.append(name)
        self._open = [f for f in self._open if not f.closed] + [file]
        return file

    def publish(self) -> None:
        """Have everything on disk, then put it in its place. Raises OSError, OutputError output-exists."""
        single = self._place.single
        if self._published or not self._names or (single and set(self._names) != {single, MANIFEST}):
            raise ValueError(f"nothing to publish: {self._names}")
        for file in self._open:
            file.close()
        flush(self.path)
        for name in sorted(self._names, key=_rank):
            _sync_file(os.path.join(self.path, name))
        _sync_folder(self.path)
        self._place.check_free(self._force)  # it may have changed in all this time
        try:
            with undisturbed():
                if single:
                    self._publish_file(os.path.join(self.path, single), os.path.join(self.path, MANIFEST))
                elif self._force:
                    put_over(self.path, self._place.path, self._claim.aside)
                else:
                    put_new(self.path, self._place.path)
                self._published = True
                self._sync_parent()
        except FileExistsError:
            raise OutputError("output-exists", "another run or another program made it in the meantime",
                              path=self._place.shown, help="--force replaces it") from None

    def _publish_file(self, model: str, manifest: str) -> None:
        """The manifest, then the model. Where that fails, or the run ends in between, undo_manifest undoes it."""
        target, beside = self._place.path, self._place.path + BESIDE
        with _turn(self._place.parent):
            self._put_file(model, manifest, target, beside)

    def _put_file(self, model: str, manifest: str, target: str, beside: str) -> None:
        if self._force and os.path.lexists(beside):
            os.replace(beside, os.path.join(self.path, FORMER))
        placed = False
        try:
            link_new(manifest, beside)
            placed = True
            self._sync_parent()
            if self._force:
                os.replace(model, target)
            else:
                put_new(model, target)
        except OSError:
            if placed:
                os.unlink(beside)
            undo_manifest(self.path, target)
            raise

    def _sync_parent(self) -> None:
        try:
            _sync_folder(os.path.dirname(self._place.path))
        except OSError as e:  # it is in place, and stays so unless the machine stops now
            message = f"{self._place.shown}: written, but perhaps not yet safely on disk: {e.strerror}"
            self.warnings.append(("not-synced", message))

    def _leave(self) -> None:
        for file in self._open:
            with suppress(OSError):
                file.close()
        if not self._claim.release():
            self.warnings.append(("not-removed", f"could not be removed: {self.path}"))

    def _explain(self, e: MemoryError | OSError) -> OutputError | None:
        """The error for what the system refused; None if it was no matter of the output."""
        if isinstance(e, MemoryError):
            return OutputError("memory", "out of memory", path=self._place.shown)
        name = os.fsdecode(e.filename) if isinstance(e.filename, str | bytes) else ""
        ours = (self._place.path, self._place.path + BESIDE, self._claim.lock, self._claim.aside, self.path)
        if isinstance(e, BrokenPipeError) or (name and name not in ours and os.path.dirname(name) != self.path):
            return None
        sizes = [0]
        with suppress(OSError):
            sizes += [os.lstat(os.path.join(self.path, n)).st_size for n in self._names]
        return _refused(e, self._shown(name), f" after {sum(sizes):,} of {self._need:,} bytes",
                        f" after {max(sizes):,} bytes")

    def _shown(self, path: str | None) -> str:
        """A path as the user knows it: nobody asked for the staging folder."""
        inside = path is not None and path.startswith(os.path.join(self.path, ""))
        if not inside or self._place.single:
            return self._place.shown
        return os.path.join(self._place.shown, os.path.basename(path or ""))


@contextmanager
def stage(target: str, *, sources: Sequence[str], need: int, force: bool = False,
          single: str | None = None) -> Iterator[Staging]:
    """A folder to write into, that becomes `target` when it is published and vanishes in every other case.

    target: a folder to be made; with `single`, the name in the staging folder of the one model file, that file itself,
    and its manifest TARGET.llamactl-manifest.json. sources: input files and folders. need: bytes that will be written.
    force: an old checkpoint is replaced.
    Errors: UsageError output-inside; OutputError output-…, no-space, file-too-large, memory, not-written.
    """
    with writing(target):
        place = Place(target, single)
        place.check_sources(sources)
        clear(place.path)
        place.check_free(force)
        place.check_space(need)
    staging = Staging(place, need, force)
    try:
        try:
            with undisturbed():
                staging._claim.hold()
            yield staging
        except (MemoryError, OSError) as e:
            error = staging._explain(e)
            if error is None:
                raise
            raise error from None
        except LlamactlError as e:
            if e.path is not None and e.path.startswith(staging.path):
                e.path = staging._shown(e.path)
            raise
        finally:
            with undisturbed():
                staging._leave()
    except BaseException:  # a signal may have come just before it could be held back
        with undisturbed():
            staging._leave()
        raise


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Whatever the system refuses inside becomes one OutputError that names `path`."""
    try:
        yield
    except MemoryError:
        raise OutputError("memory", "out of memory", path=path) from None
    except BrokenPipeError:
        raise
    except OSError as e:
        raise _refused(e, path) from None


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM inside wait for the end. Their handlers are exchanged: a mask would leave other threads."""
    late: list[int] = []
    former = {}
    if threading.current_thread() is threading.main_thread():  # handlers run there only, and are set there only
        former = {n: h for n in (signal.SIGINT, signal.SIGTERM) if (h := signal.getsignal(n)) is not None}
    try:
        for number in former:
            signal.signal(number, lambda n, _: late.append(n))
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        for n in dict.fromkeys(late):
            signal.raise_signal(n)


def _refused(e: OSError, path: str, whole: str = "", longest: str = "") -> OutputError:
    """What the system said, in one line. whole, longest: how far the output and its longest file had come."""
    said = e.strerror or str(e)
    code, message, help = {
        errno.ENOSPC: ("no-space", f"no space left on the disk{whole}", "make room, or name a place on another disk"),
        errno.EDQUOT: ("no-space", f"your disk quota is used up{whole}", "make room, or name a place on another disk"),
        errno.EFBIG: ("file-too-large", f"the file may not grow further{longest}",
                      "the file system or 'ulimit -f' sets the limit"),
        errno.EROFS: ("output-read-only", "lies on a read-only file system", "name a place on another disk"),
        errno.EACCES: ("output-denied", f"may not be written: {said}", "name a place where you may write"),
        errno.EPERM: ("output-denied", f"may not be written: {said}", "name a place where you may write"),
        errno.ENOMEM: ("memory", "out of memory", None),
    }.get(e.errno or 0, ("not-written", f"could not be written: {said}", None))
    return OutputError(code, message, path=path, help=help)


def _rank(name: str) -> int:
    """The order of syncing: weights, then what speaks of them, the manifest last."""
    return 2 if name == MANIFEST else int(name.endswith(".json"))


@contextmanager
def _turn(folder: str) -> Iterator[None]:
    """One run at a time puts two names into a folder, where folders can be locked. Nobody waits for more than 5 s."""
    fd = -1
    try:
        with suppress(OSError):
            fd = os.open(folder, os.O_RDONLY)
            for _ in range(100):
                if lock(fd) is not False:
                    break
                time.sleep(0.05)
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _sync_folder(folder: str) -> None:
    """Have the names in a folder on disk, where folders can be opened and synced at all. Raises OSError."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


def _sync_file(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
