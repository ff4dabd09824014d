"""Bytes from file to file about as fast as cp: out of a map of no more than one tensor, or inside the kernel.

Reading that fails is InputRefused; what is left as OSError is writing, for the writer's `with` to explain.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, TypeAlias

from llamactl.checkpoint.disk import open_regular
from llamactl.errors import InputRefused

if TYPE_CHECKING:
    from llamactl.checkpoint.digest import Digest

Buffer: TypeAlias = bytes | bytearray | memoryview
Seen: TypeAlias = Callable[[int], None]

CHUNK = 64 << 20  # bytes for one call to the system: between two of them Ctrl-C and the progress come through
BLOCK = 256 << 10  # bytes handled in user space at once: they stay in the cache between reading and writing
MAX_OPEN = 8

_MAP_FROM = BLOCK  # bytes: less than that is not worth a map
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14; older ones refuse it


def copy_range(source_fd: int, offset: int, count: int, out_fd: int, seen: Seen | None = None, *,
               path: str | None = None) -> None:
    """Append bytes offset .. offset + count - 1 of a file to another at its position.

    seen: told the bytes of each piece, CHUNK at most. path: the source's name in errors.
    Errors: InputRefused file-changed where the source ends early, io-error; OSError from writing.
    """
    end = offset + count
    for step in _STEPS:
        while offset < end:
            try:
                n = step(source_fd, offset, min(end - offset, CHUNK), out_fd)
            except (OSError, ValueError):
                break  # not with these two files; or a true failure, which the copy by hand tells apart
            if n == 0:
                break  # nothing for this way; some file systems, too, count 0 where they mean that they cannot
            offset += n
            if seen is not None:
                seen(n)
    _by_hand(source_fd, offset, end, out_fd, seen, path)


def _mapped(source_fd: int, offset: int, count: int, out_fd: int) -> int:
    """Write out of a map whose pages are all there. Beats copy_file_range, which fills its pages in smaller steps, and
    more so where source and target lie differently in their pages. A file that shrinks meanwhile is EFAULT, not SIGBUS.
    """
    if count < _MAP_FROM:
        return 0
    region, begin = _map(source_fd, offset, count)
    done = 0
    with _seen_through(region, begin) as view:
        region.madvise(_POPULATE_READ)
        with suppress(OSError):  # it comes again once what was written is counted
            while done < count:
                done += os.write(out_fd, view[done : done + BLOCK])
    return done


def _map(fd: int, offset: int, nbytes: int) -> tuple[mmap.mmap, int]:
    """A read-only map of these bytes and of what precedes them in their page; the bytes of that."""
    begin = offset % mmap.ALLOCATIONGRANULARITY
    return mmap.mmap(fd, begin + nbytes, access=mmap.ACCESS_READ, offset=offset - begin), begin


@contextmanager
def _seen_through(region: mmap.mmap, begin: int) -> Iterator[memoryview]:
    """The map's bytes from `begin` on; the map is closed in the end."""
    whole = memoryview(region)
    view = whole[begin:]
    try:
        yield view
    finally:
        with suppress(BufferError):  # someone holds on to a part: the map goes with the last of them
            view.release()
            whole.release()
            region.close()


def _copy_file_range(source_fd: int, offset: int, count: int, out_fd: int) -> int:
    return os.copy_file_range(source_fd, out_fd, count, offset)


def _sendfile(source_fd: int, offset: int, count: int, out_fd: int) -> int:
    return os.sendfile(out_fd, source_fd, offset, count)


_STEPS: tuple[Callable[[int, int, int, int], int], ...] = tuple(step for step, here in (
    (_mapped, sys.platform == "linux"), (_copy_file_range, hasattr(os, "copy_file_range")),
    (_sendfile, hasattr(os, "sendfile"))) if here)


def _by_hand(source_fd: int, offset: int, end: int, out_fd: int, seen: Seen | None, path: str | None) -> None:
    for block in _read(source_fd, offset, end, path):
        write_all(out_fd, block, seen)


def _read(fd: int, offset: int, end: int, path: str | None) -> Iterator[memoryview]:
    """The bytes in blocks, each good until the next is asked for."""
    buffer = memoryview(bytearray(min(end - offset, BLOCK)))
    while offset < end:
        block = buffer[: min(end - offset, BLOCK)]
        try:
            n = _read_at(fd, offset, block)
        except OSError as e:
            raise InputRefused("io-error", f"not readable at byte {offset:,}: {e.strerror or e}", path=path,
                               help="check the disk, or download the file again") from None
        if n == 0:
            raise _changed(f"it ends at byte {offset:,}, {end - offset:,} bytes early", path)
        yield block[:n]
        offset += n


def _read_at(fd: int, offset: int, block: memoryview) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [block], offset)
    os.lseek(fd, offset, os.SEEK_SET)
    data = os.read(fd, len(block))
    block[: len(data)] = data
    return len(data)


def write_all(fd: int, buffer: Buffer, seen: Seen | None = None) -> None:
    """Write a whole contiguous buffer at the file's position. seen: as for copy_range. Raises OSError."""
    rest = memoryview(buffer).cast("B")
    while rest:
        n = os.write(fd, rest[:CHUNK])
        rest = rest[n:]
        if seen is not None:
            seen(n)


class Mapped:
    """Files whose headers were read before, opened when they are needed, MAX_OPEN of them at a time. For one thread.

    Every access looks at the file again: another size than its header was read with, another file under the name, or
    one written to since the first access is InputRefused file-changed. Other errors: those of disk.open_regular.
    """

    def __init__(self, sizes: Mapping[str, int], *, inside: str | None = None) -> None:
        """sizes: {path: bytes of the whole file when its header was read}. inside: as for disk.open_regular."""
        self._sizes, self._inside = dict(sizes), inside
        self._fds: dict[str, int] = {}  # the one used last comes last
        self._first: dict[str, tuple[int, int, int]] = {}

    @contextmanager
    def window(self, path: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        """`nbytes` from byte `offset` on, read-only: only these are mapped, and only until the `with` ends.

        Where a file cannot be mapped, they are read into memory. What still refers to the view keeps its map alive.
        """
        fd = self._open(path, offset, nbytes)
        if not nbytes:
            yield memoryview(b"")
            return
        try:
            region, begin = _map(fd, offset, nbytes)
        except (OSError, ValueError):  # a file system without maps, or no address space left
            region, begin = None, 0
        with nullcontext(_held(fd, offset, nbytes, path)) if region is None else _seen_through(region, begin) as view:
            yield view

    def copy(self, path: str, offset: int, nbytes: int, out_fd: int, seen: Seen | None = None,
             digest: Digest | None = None) -> None:
        """Append `nbytes` from byte `offset` on to another file; see copy_range. digest: takes them in as they pass."""
        if digest is None:
            copy_range(self._open(path, offset, nbytes), offset, nbytes, out_fd, seen, path=path)
            return
        with self.window(path, offset, nbytes) as view:
            for at in range(0, nbytes, BLOCK):  # hashed, it is in the cache for the write: a copy and a hash cost more
                block = view[at : at + BLOCK]
                digest.update(block)
                write_all(out_fd, block, seen)
                block.release()

    def close(self) -> None:
        """Close the files; they are opened again where they are needed."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def _open(self, path: str, offset: int, nbytes: int) -> int:
        """The file's descriptor, once it is known to be the one that was read before."""
        size = self._sizes[path]
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise ValueError(f"{path}: bytes {offset:,} .. {offset + nbytes:,} of {size:,}")
        fd = self._fds.pop(path, None)
        if fd is None:
            file, _ = open_regular(path, inside=self._inside)
            with file:
                fd = os.dup(file.fileno())  # an fd of our own can wait for __del__ without a ResourceWarning
        self._fds[path] = fd
        if len(self._fds) > MAX_OPEN:
            os.close(self._fds.pop(next(iter(self._fds))))
        now = os.fstat(fd)
        if now.st_size != size:
            raise _changed(f"{now.st_size:,} bytes now, {size:,} when its header was read", path)
        stamp = (now.st_dev, now.st_ino, now.st_mtime_ns)
        if self._first.setdefault(path, stamp) != stamp:
            raise _changed("written to or exchanged while it was read", path)
        return fd


def _held(fd: int, offset: int, nbytes: int, path: str) -> memoryview:
    data = bytearray(nbytes)
    at = 0
    for block in _read(fd, offset, offset + nbytes, path):
        data[at : at + len(block)] = block
        at += len(block)
    return memoryview(data).toreadonly()


def _changed(what: str, path: str | None) -> InputRefused:
    return InputRefused("file-changed", what, path=path, help="wait until the file is written, then run again")
