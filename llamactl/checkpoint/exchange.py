"""The names beside a target: whose they are, what dead runs left there, and how new takes the place of old.

    .NAME.llamactl-PID-RANDOM         a run's own folder; after an exchange, the old content on its way out
    .NAME.llamactl-PID-RANDOM.lock    made before the folder, removed after it, locked as long as the run lives
    .NAME.llamactl-old-PID-RANDOM     the old content, where two folders cannot change places in one step
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache

try:
    import fcntl
except ImportError:  # a system without it: see _dead
    fcntl = None  # type: ignore[assignment]

MANIFEST = "llamactl-manifest.json"
BESIDE = f".{MANIFEST}"  # a single file's manifest is called NAME + this
FORMER = ".former-manifest"  # in the staging folder: what had that name before

_NOREPLACE, _EXCHANGE = 1, 2
_NOT_HERE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV}  # EXDEV: overlayfs
_IN_THE_WAY = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}
_TRIES = 100


class Claim:
    """One run's names beside `target`: folder, aside, lock. hold makes the folder, release gives everything up."""

    def __init__(self, target: str, key: str = "") -> None:
        self.target = target
        self._fd = -1
        self._name(key or f"{os.getpid()}-{os.urandom(8).hex()}")

    def _name(self, key: str) -> None:
        parent, name = os.path.split(self.target)
        self.folder = os.path.join(parent, f".{name}.llamactl-{key}")
        self.aside = os.path.join(parent, f".{name}.llamactl-old-{key}")
        self.lock = f"{self.folder}.lock"

    def hold(self) -> None:
        """Make the lock, then the folder, with the permissions any new folder gets. Raises OSError."""
        for _ in range(_TRIES):
            if self._lock():
                os.mkdir(self.folder, 0o777)
                return
            self._name(f"{os.getpid()}-{os.urandom(8).hex()}")
        raise OSError(errno.EBUSY, "no name beside it could be had", self.lock)

    def _lock(self) -> bool:
        """Whether the lock is ours: between its making and its locking another run may have cleared it away."""
        try:
            self._fd = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
        except FileExistsError:
            return False
        os.write(self._fd, f"{_host()} {os.getpid()}".encode())
        with suppress(FileNotFoundError):  # None: what is written in the file has to do
            if lock(self._fd) is not False and os.path.samestat(os.fstat(self._fd), os.lstat(self.lock)):
                return True
        self._unlock()
        return False

    def release(self) -> bool:
        """Remove all that is left under our names; False if something would not go. May be called again."""
        with suppress(OSError):
            self._put_back()
        gone = remove(self.folder) and not os.path.lexists(self.aside)
        self._unlock()
        return gone

    def _put_back(self) -> None:
        """An old content that is still aside goes back, unless another run has filled its place. Raises OSError."""
        if os.path.lexists(self.aside):
            try:
                put_new(self.aside, self.target)
            except FileExistsError:
                remove(self.aside)

    def _unlock(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                os.unlink(self.lock)
            os.close(self._fd)
            self._fd = -1

    def clear(self) -> None:
        """After the end of a run that could not release: put back the old content it had in hand, remove the rest."""
        flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
        with suppress(FileNotFoundError):  # no lock: it goes last, so nobody is at work under these names
            self._fd = os.open(self.lock, flags)
        try:
            if self._fd >= 0 and not (_ours(os.fstat(self._fd)) and _dead(self._fd)):
                return
            left = [p for p in (self.folder, self.aside) if os.path.lexists(p)]
            if self._fd < 0 and not all(_ours(os.lstat(p)) for p in left):
                return
            self._put_back()
            undo_manifest(self.folder, self.target)
            remove(self.folder)
            self._unlock()
        finally:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def clear(target: str) -> None:
    """Clear away what dead runs for this very target left; never what a live one uses. Never fails."""
    parent, name = os.path.split(target)
    pattern = re.compile(re.escape(f".{name}.llamactl-") + r"(?:old-)?([0-9]+-[0-9a-f]{16})(?:\.lock)?")
    with suppress(OSError):
        for key in sorted({m[1] for n in os.listdir(parent) if (m := pattern.fullmatch(n))}):
            with suppress(OSError):
                Claim(target, key).clear()


def remove(folder: str) -> bool:
    """Remove a folder and all in it, no link followed; False if it is still there."""
    shutil.rmtree(folder, ignore_errors=True)
    return not os.path.lexists(folder)


def put_new(new: str, target: str) -> None:
    """Rename a folder or a file to a name that must be free. Raises FileExistsError, OSError."""
    try:
        if _renameat2(new, target, _NOREPLACE):
            return
        if os.path.isdir(new):
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
            os.rename(new, target)  # a folder made since then stops it, an empty one excepted: nothing is lost
            return
        try:
            os.link(new, target)
        except FileExistsError:
            raise
        except OSError:  # no links here: hold the name with an empty file, then replace that
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            try:
                os.replace(new, target)
            except OSError:
                os.unlink(target)
                raise
        else:
            os.unlink(new)
    except OSError as e:
        if e.errno in _IN_THE_WAY and os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        raise


def link_new(new: str, target: str) -> None:
    """A second name, that must be free, for a file; the only one where there are no links. Raises FileExistsError."""
    try:
        os.link(new, target)
    except FileExistsError:
        raise
    except OSError:
        put_new(new, target)


def undo_manifest(folder: str, target: str) -> None:
    """A file's manifest is published before the file. If that is still in `folder`, take the manifest back.

    Known by being one file under two names: where there are no links it stays. Raises OSError.
    """
    waiting = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    own, beside = os.path.join(folder, MANIFEST), target + BESIDE
    models = [os.path.join(folder, n) for n in waiting - {MANIFEST, FORMER}]
    if not models or (os.path.exists(target) and any(os.path.samefile(m, target) for m in models)):
        return
    if MANIFEST in waiting and os.path.lexists(beside) and os.path.samefile(own, beside):
        os.unlink(beside)
    if FORMER in waiting and not os.path.lexists(beside):
        put_new(os.path.join(folder, FORMER), beside)


def put_over(new: str, target: str, aside: str) -> None:
    """Rename a folder to a name that another may have; that other is then at `new`, whole.

    aside: a free name, in use for a moment where two folders cannot change places in one step.
    Raises FileExistsError when other runs were faster again and again, OSError; the old content is then in its place,
    or aside, from where release puts it back.
    """
    for _ in range(_TRIES):
        os.lstat(new)
        with suppress(FileExistsError, FileNotFoundError):  # another run was faster: look again
            if not os.path.lexists(target):
                return put_new(new, target)
            if _renameat2(new, target, _EXCHANGE):
                return None
            os.rename(target, aside)
            try:
                put_new(new, target)
            except FileExistsError:
                remove(aside)  # what is there now is newer than it
            else:
                with suppress(OSError):
                    os.rename(aside, new)  # a name that says: to be removed
                return None
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)


def _renameat2(old: str, new: str, flag: int) -> bool:
    """Linux's rename with a condition; False where the system or the file system has none. Raises OSError."""
    call = _system_call()
    if call is None:
        return False
    number = call(old, new, flag)
    if number in _NOT_HERE:
        return False
    if number:
        raise OSError(number, os.strerror(number), old, None, new)
    return True


@lru_cache
def _system_call() -> Callable[[str, str, int], int] | None:
    """renameat2 of the C library (glibc 2.28), which gives its errno back."""
    if sys.platform != "linux":
        return None
    try:
        import ctypes

        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (ImportError, OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    here = -100  # AT_FDCWD; the paths are absolute anyway

    def call(old: str, new: str, flag: int) -> int:
        failed = function(here, os.fsencode(old), here, os.fsencode(new), flag)
        return ctypes.get_errno() if failed else 0

    return call


def lock(fd: int) -> bool | None:
    """Lock a file until it is closed. False: another holds it. None: no locks on this system or file system."""
    try:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except OSError:
        pass
    return None


def _ours(info: os.stat_result) -> bool:
    """A file or folder, no link, of this very user."""
    kind = stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode)
    return kind and (not hasattr(os, "getuid") or info.st_uid == os.getuid())


def _dead(fd: int) -> bool:
    """Whether the run that made this lock has ended. Without locks: as far as its process id tells; else no."""
    held = lock(fd)
    if held is not None:
        return held
    host, _, pid = os.read(fd, 4096).decode(errors="replace").rpartition(" ")
    if os.name != "posix" or host != _host() or not re.fullmatch("[0-9]{1,9}", pid):
        return False
    try:
        os.kill(int(pid), 0)
    except OSError as e:
        return isinstance(e, ProcessLookupError)
    return False


def _host() -> str:
    return os.uname().nodename if hasattr(os, "uname") else ""


def flush(folder: str) -> None:
    """Have the file system of `folder` begin to write, all files at once, as `sync` would; fsync then only confirms.

    Nothing where the system cannot (syncfs is Linux's); errors are left to fsync.
    """
    import ctypes

    with suppress(OSError, AttributeError, TypeError):
        function = ctypes.CDLL(None).syncfs
        fd = os.open(folder, os.O_RDONLY)
        try:
            function(fd)
        finally:
            os.close(fd)
