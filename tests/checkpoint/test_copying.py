"""Bytes on their way from file to file: by each way the system has, in order, whole; and the digest of what passed."""

from __future__ import annotations

import errno
import gc
import importlib.util
import json
import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from llamactl.checkpoint import copying
from llamactl.checkpoint.copying import BLOCK, MAX_OPEN, Mapped, copy_range, write_all
from llamactl.checkpoint.digest import Digest, digest
from llamactl.checkpoint.folder import read_folder
from llamactl.errors import InputRefused, NotAvailable

DATA = random.Random(0).randbytes(3 * BLOCK + 12_345)
FDS = Path("/proc/self/fd")


@pytest.fixture
def source(tmp_path: Path) -> Iterator[BinaryIO]:
    (tmp_path / "source").write_bytes(DATA)
    with (tmp_path / "source").open("rb") as f:
        yield f


@pytest.fixture
def out(tmp_path: Path) -> Iterator[BinaryIO]:
    with (tmp_path / "out").open("wb", buffering=0) as f:
        yield f


@pytest.fixture
def mapped(tmp_path: Path) -> Mapped:
    (tmp_path / "m").write_bytes(DATA)
    return Mapped({str(tmp_path / "m"): len(DATA)})


def written(out: BinaryIO) -> bytes:
    return Path(out.name).read_bytes()


def fails(number: int) -> Callable[..., int]:
    def call(*args: object, **options: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def only(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave one of the ways to copy."""
    steps = {step.__name__: step for step in copying._STEPS}
    if way != "by hand" and way not in steps:
        pytest.skip(f"no {way} here")
    monkeypatch.setattr(copying, "_STEPS", () if way == "by hand" else (steps[way],))
    monkeypatch.setattr(copying, "_MAP_FROM", 1)
    if way != "by hand":
        monkeypatch.setattr(copying, "_by_hand", _nothing_left)


def _nothing_left(source_fd: int, offset: int, end: int, *rest: object) -> None:
    assert offset == end, f"{end - offset} bytes were left"


WAYS = ["_mapped", "_copy_file_range", "_sendfile", "by hand"]


class TestCopyRange:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(("offset", "count"), [(0, len(DATA)), (1, 4096), (4097, 2 * BLOCK), (8, 0), (77, BLOCK)])
    def test_bytes(self, way: str, offset: int, count: int, source: BinaryIO, out: BinaryIO,
                   monkeypatch: pytest.MonkeyPatch) -> None:
        """Appended at the position of one file, wherever the other one's stands; that one stays where it is."""
        only(way, monkeypatch)
        out.write(b"head")
        source.seek(5)
        before = os.lseek(source.fileno(), 0, os.SEEK_CUR)
        copy_range(source.fileno(), offset, count, out.fileno())
        out.write(b"tail")
        assert written(out) == b"head" + DATA[offset : offset + count] + b"tail"
        assert os.lseek(source.fileno(), 0, os.SEEK_CUR) == before

    @pytest.mark.parametrize("way", WAYS)
    def test_pieces_are_told(self, way: str, source: BinaryIO, out: BinaryIO, monkeypatch: pytest.MonkeyPatch) -> None:
        only(way, monkeypatch)
        monkeypatch.setattr(copying, "CHUNK", 100_000)
        seen: list[int] = []
        copy_range(source.fileno(), 3, len(DATA) - 3, out.fileno(), seen.append)
        assert written(out) == DATA[3:]
        assert sum(seen) == len(DATA) - 3
        assert len(seen) > 7
        assert max(seen) <= 100_000

    @pytest.mark.parametrize("small", [True, False])
    def test_a_map_is_for_what_is_worth_it(self, small: bool, source: BinaryIO, out: BinaryIO,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
        maps: list[int] = []
        real = mmap.mmap

        def mapping(fd: int, length: int, *, offset: int, access: int) -> mmap.mmap:
            maps.append(length)
            return real(fd, length, offset=offset, access=access)

        monkeypatch.setattr(mmap, "mmap", mapping)
        copy_range(source.fileno(), 4096, BLOCK - small, out.fileno())
        assert written(out) == DATA[4096 : 4096 + BLOCK - small]
        assert maps == ([] if small or sys.platform != "linux" else [BLOCK])

    def test_a_map_without_its_pages_is_left(self, source: BinaryIO, out: BinaryIO,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
        """Advice that an older Linux does not know: the kernel's own way follows, nothing was written before."""
        monkeypatch.setattr(copying, "_POPULATE_READ", 9999)
        written_by_us: list[object] = []
        monkeypatch.setattr(os, "write", written_by_us.append)
        if not hasattr(os, "copy_file_range"):
            pytest.skip("no copy_file_range")
        copy_range(source.fileno(), 1, len(DATA) - 1, out.fileno())
        assert written(out) == DATA[1:]
        assert written_by_us == []

    def test_a_write_that_fails_after_others(self, source: BinaryIO, out: BinaryIO,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
        """What was written out of a map is counted; the rest is tried in the next way, once."""
        write, calls = os.write, []

        def failing(fd: int, data: memoryview) -> int:
            calls.append(len(data))
            if len(calls) in (3, 4):
                raise OSError(errno.EIO, "no")
            return write(fd, data[:1000])

        monkeypatch.setattr(os, "write", failing)
        seen: list[int] = []
        copy_range(source.fileno(), 5, len(DATA) - 5, out.fileno(), seen.append)
        assert written(out) == DATA[5:]
        assert sum(seen) == len(DATA) - 5
        if sys.platform == "linux":
            assert seen[0] == 2000
            assert len(calls) == 4

    def test_the_kernel_does_it(self, source: BinaryIO, out: BinaryIO, monkeypatch: pytest.MonkeyPatch) -> None:
        if not copying._STEPS:
            pytest.skip("this system has neither call")
        monkeypatch.setattr(copying, "_by_hand", _nothing_left)
        copy_range(source.fileno(), 0, len(DATA), out.fileno())
        assert written(out) == DATA

    @pytest.mark.parametrize("number", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM,
                                        errno.EBADF, errno.ENOTSOCK, errno.EINTR, errno.EIO])
    @pytest.mark.parametrize("all_of_them", [False, True])
    def test_what_the_system_refuses_is_done_the_next_way(
        self, number: int, all_of_them: bool, source: BinaryIO, out: BinaryIO, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps = (fails(number),) * 3 if all_of_them else (fails(number), *copying._STEPS[1:])
        monkeypatch.setattr(copying, "_STEPS", steps)
        copy_range(source.fileno(), 9, 2 * BLOCK, out.fileno())
        assert written(out) == DATA[9 : 9 + 2 * BLOCK]

    def test_a_way_that_ends_halfway_is_taken_up_where_it_ended(
        self, source: BinaryIO, out: BinaryIO, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Refused, or 0 bytes counted, after a part was copied."""
        def part(then: Callable[[], int]) -> Callable[[int, int, int, int], int]:
            calls: list[int] = []

            def step(source_fd: int, offset: int, count: int, out_fd: int) -> int:
                calls.append(offset)
                return then() if len(calls) > 3 else os.write(out_fd, DATA[offset : offset + min(count, 999)])
            return step

        monkeypatch.setattr(copying, "_STEPS", (part(lambda: 0), part(fails(errno.EXDEV))))
        seen: list[int] = []
        copy_range(source.fileno(), 1, len(DATA) - 1, out.fileno(), seen.append)
        assert written(out) == DATA[1:]
        assert seen[:6] == [999] * 6
        assert sum(seen) == len(DATA) - 1

    @pytest.mark.parametrize("way", [*WAYS, "all"])
    def test_a_source_that_ends_early(self, way: str, source: BinaryIO, out: BinaryIO,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
        if way != "all":
            by_hand = copying._by_hand
            only(way, monkeypatch)
            monkeypatch.setattr(copying, "_by_hand", by_hand)
        with pytest.raises(InputRefused) as caught:
            copy_range(source.fileno(), 10, len(DATA), out.fileno(), path="x.safetensors")
        assert (caught.value.code, caught.value.path) == ("file-changed", "x.safetensors")
        assert f"ends at byte {len(DATA):,}, 10 bytes early" in caught.value.message
        assert caught.value.help

    def test_reading_fails(self, source: BinaryIO, out: BinaryIO, monkeypatch: pytest.MonkeyPatch) -> None:
        only("by hand", monkeypatch)
        monkeypatch.setattr(copying, "_read_at", fails(errno.EIO))
        with pytest.raises(InputRefused, match="not readable at byte 7") as caught:
            copy_range(source.fileno(), 7, 100, out.fileno(), path="x")
        assert (caught.value.code, caught.value.path) == ("io-error", "x")

    def test_without_preadv(self, source: BinaryIO, out: BinaryIO, monkeypatch: pytest.MonkeyPatch) -> None:
        only("by hand", monkeypatch)
        monkeypatch.delattr(os, "preadv", raising=False)
        copy_range(source.fileno(), 3, 2 * BLOCK, out.fileno())
        assert written(out) == DATA[3 : 3 + 2 * BLOCK]

    def test_short_reads(self, source: BinaryIO, out: BinaryIO, monkeypatch: pytest.MonkeyPatch) -> None:
        only("by hand", monkeypatch)
        whole = copying._read_at
        monkeypatch.setattr(copying, "_read_at", lambda fd, at, block: whole(fd, at, block[:70_001]))
        copy_range(source.fileno(), 3, 2 * BLOCK, out.fileno())
        assert written(out) == DATA[3 : 3 + 2 * BLOCK]

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
    def test_a_full_disk_stays_an_oserror(self, number: int, source: BinaryIO, out: BinaryIO,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(copying, "_STEPS", (fails(number),))
        monkeypatch.setattr(os, "write", fails(number))
        with pytest.raises(OSError, match=r"\w") as caught:
            copy_range(source.fileno(), 0, 100, out.fileno())
        assert caught.value.errno == number

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
    def test_a_disk_that_is_full(self, source: BinaryIO) -> None:
        fd = os.open("/dev/full", os.O_WRONLY)
        try:
            with pytest.raises(OSError, match=r"\w") as caught:
                copy_range(source.fileno(), 0, 100, fd)
        finally:
            os.close(fd)
        assert caught.value.errno == errno.ENOSPC

    @pytest.mark.skipif(sys.platform == "win32", reason="POSIX limits and signals")
    def test_a_file_that_may_not_grow(self, source: BinaryIO, tmp_path: Path) -> None:
        """A true limit, whatever way is taken: what fits is written, the rest is EFBIG."""
        code = ("import os, resource, sys; from llamactl.checkpoint.copying import copy_range\n"
                "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
                "s, o = os.open(sys.argv[1], os.O_RDONLY), os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)\n"
                "try: copy_range(s, 0, 400_000, o)\nexcept OSError as e: print(e.errno)\n")
        done = subprocess.run([sys.executable, "-c", code, source.name, str(tmp_path / "o")], capture_output=True,
                              text=True, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
        assert done.stdout == f"{errno.EFBIG}\n"
        assert (tmp_path / "o").read_bytes() == DATA[:50_000]

    @pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
    @pytest.mark.parametrize("way", WAYS)
    def test_signals_do_not_harm(self, way: str, source: BinaryIO, out: BinaryIO,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
        """A handler that returns lets the copy go on; one that raises ends it between two pieces."""
        only(way, monkeypatch)
        monkeypatch.setattr(copying, "CHUNK", 4096)
        caught: list[int] = []
        former = signal.signal(signal.SIGALRM, lambda n, _: caught.append(n))
        signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
        try:
            rounds = 0
            while len(caught) < 5:
                copy_range(source.fileno(), 0, len(DATA), out.fileno())
                rounds += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)
        assert written(out) == DATA * rounds

        def stop(n: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            copy_range(source.fileno(), 0, len(DATA), out.fileno(), stop)


class TestWriteAll:
    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda d: memoryview(d).cast("H")])
    def test_bytes(self, kind: Callable[[bytes], Any], out: BinaryIO) -> None:
        write_all(out.fileno(), kind(DATA[:100_002]))
        write_all(out.fileno(), kind(b""))
        assert written(out) == DATA[:100_002]

    def test_short_writes(self, out: BinaryIO, monkeypatch: pytest.MonkeyPatch) -> None:
        write, asked, seen = os.write, [], []

        def short(fd: int, data: memoryview) -> int:
            asked.append(len(data))
            return write(fd, data[:777])

        monkeypatch.setattr(os, "write", short)
        monkeypatch.setattr(copying, "CHUNK", 5000)
        write_all(out.fileno(), memoryview(DATA[:20_000]).cast("H"), seen.append)
        assert written(out) == DATA[:20_000]
        assert (max(asked), sum(seen), max(seen)) == (5000, 20_000, 777)


class TestWindow:
    @pytest.mark.parametrize("how", ["mapped", "read"])
    @pytest.mark.parametrize(("offset", "nbytes"), [(0, len(DATA)), (0, 1), (4095, 2), (4096, 4096), (8, 2 * BLOCK),
                                                    (len(DATA) - 1, 1), (5, 0), (0, 0), (65_536, 0),
                                                    (len(DATA), 0)])
    def test_bytes(self, offset: int, nbytes: int, how: str, mapped: Mapped, tmp_path: Path,
                   monkeypatch: pytest.MonkeyPatch) -> None:
        if how == "read":
            monkeypatch.setattr(mmap, "mmap", fails(errno.ENODEV))
        with mapped.window(str(tmp_path / "m"), offset, nbytes) as view:
            assert (view.format, view.ndim, view.readonly) == ("B", 1, True)
            assert view == DATA[offset : offset + nbytes]

    def test_only_the_window_is_mapped(self, mapped: Mapped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[int, int]] = []
        real = mmap.mmap

        def mapping(fd: int, length: int, *, offset: int, access: int) -> mmap.mmap:
            calls.append((offset, length))
            return real(fd, length, offset=offset, access=access)

        monkeypatch.setattr(mmap, "mmap", mapping)
        with mapped.window(str(tmp_path / "m"), 2 * BLOCK + 100, 50):
            pass
        at = 2 * BLOCK + 100
        assert calls == [(at - at % mmap.ALLOCATIONGRANULARITY, at % mmap.ALLOCATIONGRANULARITY + 50)]

    @pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="maps are read from /proc")
    def test_the_map_ends_with_the_block_or_with_who_holds_on(self, mapped: Mapped, tmp_path: Path) -> None:
        def maps() -> int:
            return Path("/proc/self/maps").read_text().count(str(tmp_path / "m"))

        with mapped.window(str(tmp_path / "m"), 0, BLOCK) as view:
            assert maps() == 1
        assert maps() == 0
        with pytest.raises(ValueError, match="released"):
            bytes(view)
        with mapped.window(str(tmp_path / "m"), 0, BLOCK) as view:
            kept = view[10:20]
        assert maps() == 1
        assert kept == DATA[10:20]
        del kept, view
        gc.collect()
        assert maps() == 0

    @pytest.mark.parametrize(("offset", "nbytes"), [(-1, 2), (0, -1), (0, len(DATA) + 1), (len(DATA), 1)])
    def test_not_in_the_file(self, offset: int, nbytes: int, mapped: Mapped, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="bytes"), mapped.window(str(tmp_path / "m"), offset, nbytes):
            pass

    def test_cut_short_while_it_is_read_into_memory(self, mapped: Mapped, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mmap, "mmap", fails(errno.ENODEV))
        monkeypatch.setattr(copying, "_read_at", lambda fd, at, block: 0)
        with pytest.raises(InputRefused, match="early") as caught, mapped.window(str(tmp_path / "m"), 0, 9):
            pass
        assert (caught.value.code, caught.value.path) == ("file-changed", str(tmp_path / "m"))


def touch(mapped: Mapped, path: Path, how: str) -> None:
    """Look at the first bytes of a file either way."""
    if how == "window":
        with mapped.window(str(path), 0, 4):
            return
    with (path.parent / "touched").open("wb") as f:
        mapped.copy(str(path), 0, 4, f.fileno(), digest=Digest() if how == "digest" else None)


@pytest.mark.parametrize("how", ["window", "copy", "digest"])
class TestTheFileIsTheOneThatWasRead:
    def refused(self, mapped: Mapped, path: Path, how: str) -> InputRefused:
        with pytest.raises(InputRefused) as caught:
            touch(mapped, path, how)
        assert caught.value.path == str(path)
        assert caught.value.help
        return caught.value

    @pytest.mark.parametrize("opened", [False, True])
    @pytest.mark.parametrize("size", [len(DATA) - 1, len(DATA) + 1, 0])
    def test_size(self, size: int, opened: bool, how: str, mapped: Mapped, tmp_path: Path) -> None:
        if opened:
            touch(mapped, tmp_path / "m", how)
        os.truncate(tmp_path / "m", size)
        error = self.refused(mapped, tmp_path / "m", how)
        assert (error.code, error.message) == (
            "file-changed", f"{size:,} bytes now, {len(DATA):,} when its header was read")

    def test_written_to(self, how: str, mapped: Mapped, tmp_path: Path) -> None:
        touch(mapped, tmp_path / "m", how)
        with (tmp_path / "m").open("r+b") as f:
            f.write(b"other")
        os.utime(tmp_path / "m", ns=(1, 1))
        assert self.refused(mapped, tmp_path / "m", how).code == "file-changed"

    def test_exchanged_while_it_was_closed(self, how: str, mapped: Mapped, tmp_path: Path) -> None:
        touch(mapped, tmp_path / "m", how)
        stamp = (tmp_path / "m").stat().st_mtime_ns
        mapped.close()
        (tmp_path / "new").write_bytes(DATA)
        os.utime(tmp_path / "new", ns=(stamp, stamp))
        os.replace(tmp_path / "new", tmp_path / "m")
        assert self.refused(mapped, tmp_path / "m", how).code == "file-changed"

    def test_closed_and_opened_again(self, how: str, mapped: Mapped, tmp_path: Path) -> None:
        touch(mapped, tmp_path / "m", how)
        mapped.close()
        touch(mapped, tmp_path / "m", how)

    def test_links(self, how: str, tmp_path: Path) -> None:
        (tmp_path / "far").write_bytes(DATA)
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "m").symlink_to(tmp_path / "far")
        path = tmp_path / "in" / "m"
        inside = Mapped({str(path): len(DATA)}, inside=str(tmp_path / "in"))
        assert self.refused(inside, path, how).code == "link-outside"
        touch(Mapped({str(path): len(DATA)}), path, how)

    def test_gone(self, how: str, tmp_path: Path) -> None:
        with pytest.raises(NotAvailable, match="no such file"):
            touch(Mapped({str(tmp_path / "no"): 4}), tmp_path / "no", how)


class TestOpenFiles:
    @pytest.mark.skipif(not FDS.exists(), reason="open files are counted in /proc")
    def test_few_at_a_time_and_none_left(self, tmp_path: Path, out: BinaryIO) -> None:
        paths = [tmp_path / f"{n}" for n in range(3 * MAX_OPEN)]
        for p in paths:
            p.write_bytes(p.name.encode() * 9)
        mapped = Mapped({str(p): p.stat().st_size for p in paths})
        assert self.count(paths) == 0
        expected = b""
        for p in [*paths, *reversed(paths), *paths[:3]]:
            with mapped.window(str(p), 0, 9 * len(p.name)) as view:
                assert view == p.name.encode() * 9
            mapped.copy(str(p), 1, 4, out.fileno())
            expected += (p.name.encode() * 9)[1:5]
            assert 1 <= self.count(paths) <= MAX_OPEN
        assert written(out) == expected
        assert self.count(paths) == MAX_OPEN
        del mapped
        assert self.count(paths) == 0

    def count(self, paths: list[Path]) -> int:
        """How many of these files this process has open."""
        names = {str(p.resolve()) for p in paths}
        return sum(os.readlink(f) in names for f in FDS.iterdir() if f.is_symlink())

    def test_the_least_used_is_closed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        opened: list[str] = []
        real = copying.open_regular

        def opening(path: str, *, inside: str | None) -> tuple[BinaryIO, int]:
            opened.append(Path(path).name)
            return real(path, inside=inside)

        monkeypatch.setattr(copying, "open_regular", opening)
        monkeypatch.setattr(copying, "MAX_OPEN", 2)
        for name in "abc":
            (tmp_path / name).write_bytes(b"1234")
        mapped = Mapped({str(tmp_path / name): 4 for name in "abc"})
        for name in "abacaba":
            touch(mapped, tmp_path / name, "window")
        assert "".join(opened) == "abcb"

    def test_a_view_outlives_its_file(self, mapped: Mapped, tmp_path: Path) -> None:
        with mapped.window(str(tmp_path / "m"), 0, 100) as view:
            mapped.close()
            assert view == DATA[:100]


class TestMappedCopy:
    @pytest.mark.parametrize("how", ["mapped", "read"])
    @pytest.mark.parametrize("digests", [True, False])
    @pytest.mark.parametrize(("offset", "count"), [(0, len(DATA)), (4097, 2 * BLOCK), (8, 0)])
    def test_bytes_and_digest(self, offset: int, count: int, digests: bool, how: str, mapped: Mapped, tmp_path: Path,
                              out: BinaryIO, monkeypatch: pytest.MonkeyPatch) -> None:
        if how == "read":
            monkeypatch.setattr(mmap, "mmap", fails(errno.ENODEV))
        seen: list[int] = []
        state = Digest() if digests else None
        out.write(b"head")
        mapped.copy(str(tmp_path / "m"), offset, count, out.fileno(), seen.append, state)
        out.write(b"tail")
        assert written(out) == b"head" + DATA[offset : offset + count] + b"tail"
        assert sum(seen) == count
        if state is not None:
            assert state.hexdigest() == digest(DATA[offset : offset + count])
            assert all(n <= BLOCK for n in seen)

    def test_an_error_names_the_file(self, mapped: Mapped, tmp_path: Path, out: BinaryIO,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(copying, "_STEPS", ())
        monkeypatch.setattr(copying, "_read_at", lambda *a: 0)
        with pytest.raises(InputRefused) as caught:
            mapped.copy(str(tmp_path / "m"), 0, 9, out.fileno())
        assert caught.value.path == str(tmp_path / "m")


class TestDigest:
    def test_known_values(self) -> None:
        """From the reference implementation: xxhsum -H2 of nothing, of 'abc', and of the bytes 0 to 255."""
        assert digest(b"") == "99aa06d3014798d86001c324468d497f"
        assert digest(b"abc") == "06b05ab6733a618578af5f94892f3950"

    def test_how_it_is_cut_does_not_matter(self) -> None:
        whole = digest(DATA)
        for size in (1000, 65_536, len(DATA)):
            state = Digest()
            for at in range(0, len(DATA), size):
                state.update(memoryview(DATA)[at : at + size])
            assert state.hexdigest() == whole
            assert state.hexdigest() == whole
        assert len(whole) == 32

    def test_one_bit(self) -> None:
        other = bytearray(DATA)
        other[70_000] ^= 1
        assert digest(other) != digest(DATA)
        assert digest(memoryview(other)) != digest(DATA)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="private memory is read from /proc")
def test_private_memory(tmp_path: Path) -> None:
    """64 MB pass in every way; no more than a few blocks are ever held."""
    path = tmp_path / "big"
    with path.open("wb") as f:
        for _ in range(16):
            f.write(DATA[:BLOCK] * 16)
    code = r"""
import os, re, sys
from llamactl.checkpoint import copying
from llamactl.checkpoint.digest import Digest
def private():
    return int(re.search(r"RssAnon:\s+(\d+)", open("/proc/self/status").read())[1]) >> 10
path, size = sys.argv[1], os.path.getsize(sys.argv[1])
before, most = private(), 0
def seen(n):
    global most
    most = max(most, private())
mapped = copying.Mapped({path: size})
out = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
mapped.copy(path, 8, size - 8, out, seen)
mapped.copy(path, 8, size - 8, out, seen, Digest())
with mapped.window(path, 0, size) as view:
    for block in (view[at : at + 4096] for at in range(size - 4096, -1, -4096)):
        seen(len(block))
os.ftruncate(out, 0)
copying._STEPS = ()
mapped.copy(path, 8, size - 8, out, seen)
print(most - before)
"""
    done = subprocess.run([sys.executable, "-c", code, str(path), str(tmp_path / "o")], capture_output=True, text=True,
                          check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert int(done.stdout) <= 8


@pytest.mark.parametrize(("dtype", "shards"), [("bf16", 3), ("fp16", 1), ("fp32", 2)])
def test_a_checkpoint_to_copy(dtype: str, shards: int, tmp_path: Path) -> None:
    """What tests/bench/bigllama.py writes can be read, and holds weights that stay finite in fp16."""
    spec = importlib.util.spec_from_file_location("bigllama", Path(__file__).parents[1] / "bench" / "bigllama.py")
    assert spec is not None
    assert spec.loader is not None
    big = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(big)
    total = big.write(tmp_path, gb=0.02, shards=shards, dtype=dtype)
    weights = read_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert weights.warnings == ()
    assert len(weights.headers) == shards
    assert 0.7 * 2e7 < total == sum(t.nbytes for t in weights.tensors.values()) < 1.3 * 2e7
    kv = config["hidden_size"] * 8 // 32
    assert weights.tensors["model.layers.0.self_attn.k_proj.weight"].shape == (kv, config["hidden_size"])
    with pytest.raises(ValueError, match="1000 shards"):
        big.write(tmp_path / "no", gb=0.02, shards=1000)
    for h in weights.headers:
        raw = np.memmap(h.path, np.uint8, "r", h.data_offset)
        for t in h.tensors:
            data = raw[t.begin : t.end]
            size = np.abs({"BF16": lambda d: (d.view(np.uint16).astype(np.uint32) << 16).view(np.float32),
                           "F16": lambda d: d.view(np.float16).astype(np.float32),
                           "F32": lambda d: d.view(np.float32)}[t.dtype](data))
            if len(t.shape) == 1:
                assert 1 <= size.min() < size.max() < 2, t.name
            else:
                assert size.max() < 0.25, t.name
                assert 0.01 < size.mean() < 0.06, t.name
