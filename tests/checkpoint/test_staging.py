"""llamactl.checkpoint.staging: the target is absent, the old one or the new one, whole, and nothing lies beside it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import llamactl
from llamactl.checkpoint import exchange, place, staging
from llamactl.checkpoint.staging import stage, undisturbed, writing
from llamactl.errors import InputRefused, LlamactlError, OutputError, UsageError

PROGRAM = Path(__file__).with_name("stagingruns.py")
_spec = importlib.util.spec_from_file_location("llamactl_tests_stagingruns", PROGRAM)
assert _spec is not None
assert _spec.loader is not None
runs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(runs)
MANIFEST, NEW, OLD, NEW_FILE, OLD_FILE = runs.MANIFEST, runs.NEW, runs.OLD, runs.NEW_FILE, runs.OLD_FILE
write, make, put, tree, within = runs.write, runs.make, runs.put, runs.tree, runs.within


def raising(error: BaseException) -> Callable[..., Any]:
    def f(*_: object, **__: object) -> None:
        raise error

    return f


def refused(target: Path, code: str, **how: Any) -> LlamactlError:
    """The error of a run that must not change anything beside its target."""
    before = tree(target.parent) if target.parent.is_dir() else None
    with pytest.raises(LlamactlError) as caught:
        write(target, **how)
    assert caught.value.code == code, caught.value.line()
    assert caught.value.path is None or ".llamactl-" not in caught.value.path.replace(f".{MANIFEST}", "")
    assert caught.value.exit_code == (2 if code == "output-inside" else 5)
    assert (tree(target.parent) if target.parent.is_dir() else None) == before
    return caught.value


@pytest.fixture(params=["renameat2", "refused", "plain"])
def renames(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With Linux's conditional renames, on a file system that has none, and on another system."""
    if request.param == "plain":
        monkeypatch.setattr(exchange, "_system_call", lambda: None)
    elif request.param == "refused":
        monkeypatch.setattr(exchange, "_system_call", lambda: lambda old, new, flag: errno.EINVAL)
    elif exchange._system_call() is None:
        pytest.skip("no renameat2 here")
    return str(request.param)


# --- a run that goes well


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
@pytest.mark.parametrize("single", [False, True])
def test_a_run_leaves_its_output_and_nothing_else(tmp_path: Path, umask: int, single: bool) -> None:
    before = os.umask(umask)
    try:
        s = write(tmp_path / "o", single=single)
    finally:
        os.umask(before)
    assert tree(tmp_path) == (NEW_FILE if single else within("o", NEW))
    for p in tmp_path.rglob("*"):
        assert stat.S_IMODE(p.stat().st_mode) == (0o777 if p.is_dir() else 0o666) & ~umask
    assert s.warnings == []
    assert not os.path.exists(s.path)


@pytest.mark.parametrize(("target", "parent"), [("o", ""), ("link/o", "real"), ("real/o///", "real"),
                                                ("./link/../o", ""), ("link/sub/../o", "real")])
def test_the_staging_folder_stands_beside_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str,
                                                     parent: str) -> None:
    make(make(tmp_path / "real", {}) / "sub", {})
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    with stage(target, sources=[], need=0) as s:
        assert Path(s.path).parent == tmp_path / parent
        assert Path(s.path).name.startswith(f".o.llamactl-{os.getpid()}-")
        s.create("config.json").close()
        monkeypatch.chdir("/")  # no matter: the place was settled before
        s.publish()
    assert tree(tmp_path / parent / "o") == {"config.json": b""}


def test_what_is_still_open_is_written_too(tmp_path: Path) -> None:
    with stage(str(tmp_path / "o"), sources=[], need=0) as s:
        s.create("a.bin").write(b"abc")
        s.publish()
        assert (tmp_path / "o" / "a.bin").read_bytes() == b"abc"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a\0b"])
def test_only_plain_names_are_created(tmp_path: Path, name: str) -> None:
    with stage(str(tmp_path / "o"), sources=[], need=0) as s, pytest.raises(ValueError, match="plain"):
        s.create(name)


def test_a_name_is_created_once(tmp_path: Path) -> None:
    def twice() -> None:
        with stage(str(tmp_path / "o"), sources=[], need=0) as s:
            s.create("a.bin").close()
            s.create("a.bin")

    with pytest.raises(OutputError) as caught:
        twice()
    assert (caught.value.code, caught.value.path) == ("not-written", str(tmp_path / "o" / "a.bin"))
    assert tree(tmp_path) == {}


def test_a_single_file_has_its_manifest_and_no_more(tmp_path: Path) -> None:
    with stage(str(tmp_path / "o"), sources=[], need=0, single="m.gguf") as s:
        with pytest.raises(ValueError, match="manifest"):
            s.create("config.json")
        s.create("m.gguf").close()
        with pytest.raises(ValueError, match="nothing to publish"):
            s.publish()
    assert tree(tmp_path) == {}


def test_nothing_is_published_twice_or_empty(tmp_path: Path) -> None:
    with stage(str(tmp_path / "o"), sources=[], need=0) as s:
        with pytest.raises(ValueError, match="nothing to publish"):
            s.publish()
        s.create("a.bin").close()
        s.publish()
        with pytest.raises(ValueError, match="nothing to publish"):
            s.publish()


@pytest.mark.parametrize("single", [False, True])
def test_all_is_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, single: bool) -> None:
    said: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        said.append("staging" if name.startswith(".o.") else "parent" if name == tmp_path.name else name)
        said.append("there" if (tmp_path / "o").exists() else "not yet")
        real(fd)

    monkeypatch.setattr("os.fsync", fsync)
    with stage(str(tmp_path / "o"), sources=[], need=0, single="model.safetensors" if single else None) as s:
        for name in [MANIFEST, "model.safetensors.index.json", "config.json", "model.safetensors", "b.safetensors"]:
            if not single or name in ("model.safetensors", MANIFEST):
                s.create(name).close()
        s.publish()
    if single:
        assert said[::2] == ["model.safetensors", MANIFEST, "staging", "parent", "parent"]
    else:
        assert said[::2] == ["model.safetensors", "b.safetensors", "model.safetensors.index.json", "config.json",
                             MANIFEST, "staging", "parent"]
    assert said[1::2] == ["not yet"] * (len(said) // 2 - 1) + ["there"]


# --- what is refused before anything is made


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["itself", "a link to it", "its file", "a hard link"])
def test_the_input_is_never_the_output(tmp_path: Path, kind: str, force: bool) -> None:
    source = make(tmp_path / "in", OLD)
    target, single = source, False
    if kind == "a link to it":
        target = tmp_path / "link"
        target.symlink_to("in")
    elif kind != "itself":
        source, single = source / "model.safetensors", True
        target = source if kind == "its file" else tmp_path / "hard"
        if kind == "a hard link":
            os.link(source, target)
    error = refused(target, "output-is-input", sources=(source,), force=force, single=single)
    assert isinstance(error, OutputError)


@pytest.mark.parametrize("target", ["in/o", "in/sub/o", "link/o", "in/missing/o", "sub/o"])
def test_nothing_is_written_into_the_input(tmp_path: Path, target: str) -> None:
    source = make(tmp_path / "in", OLD)
    make(source / "sub", {})
    (tmp_path / "link").symlink_to("in")
    (tmp_path / "sub").symlink_to("in/sub")
    assert isinstance(refused(tmp_path / target, "output-inside", sources=(source,), force=True), UsageError)


def test_a_name_that_begins_like_the_input_is_another(tmp_path: Path) -> None:
    source = make(tmp_path / "in", OLD)
    write(tmp_path / "in2", sources=(source, source / "config.json"))
    assert tree(tmp_path) == {**within("in", OLD), **within("in2", NEW)}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("source", ["out/in", "out/in/model.safetensors", "link"])
def test_what_holds_the_input_is_not_replaced(tmp_path: Path, source: str, force: bool) -> None:
    make(make(tmp_path / "out", OLD) / "in", OLD)
    (tmp_path / "link").symlink_to("out/in")
    refused(tmp_path / "out", "output-holds-input", sources=(tmp_path / source,), force=force)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("kind", ["file", "folder", "empty folder", "checkpoint", "link", "dangling link"])
def test_what_is_there_stays(tmp_path: Path, kind: str, single: bool) -> None:
    target = tmp_path / "o"
    put(tmp_path, {"elsewhere": ""})
    {"file": lambda: target.write_bytes(b"x"), "folder": lambda: make(target, {"notes.txt": b"x"}),
     "empty folder": target.mkdir, "checkpoint": lambda: make(target, OLD),
     "link": lambda: target.symlink_to("elsewhere"), "dangling link": lambda: target.symlink_to("nothing")}[kind]()
    replaceable = kind == "file" if single else kind in ("empty folder", "checkpoint")
    error = refused(target, "output-exists", single=single)
    assert ("--force" in str(error.help)) == replaceable
    if "link" in kind:
        refused(target, "output-exists", single=single, force=True)
    elif not replaceable:
        refused(target, "output-foreign", single=single, force=True)
    else:
        write(target, single=single, force=True)
        assert tree(tmp_path) == {"elsewhere": "", **(NEW_FILE if single else within("o", NEW))}


@pytest.mark.parametrize("single", [False, True])
def test_a_pipe_is_not_replaced(tmp_path: Path, single: bool) -> None:
    os.mkfifo(tmp_path / "o")
    for force, code in ((False, "output-exists"), (True, "output-foreign")):
        with pytest.raises(OutputError) as caught:
            write(tmp_path / "o", force=force, single=single)
        assert caught.value.code == code
    assert os.listdir(tmp_path) == ["o"]
    assert (tmp_path / "o").is_fifo()


@pytest.mark.parametrize("mark", ["config.json", "params.json", "x.safetensors", "x.pth", "x.bin", "ckpt.pt", "x.gguf",
                                  MANIFEST])
def test_a_checkpoint_is_known_by_its_files(tmp_path: Path, mark: str) -> None:
    make(tmp_path / "o", {mark: b"", "notes.txt": b""})
    write(tmp_path / "o", force=True)
    assert tree(tmp_path) == within("o", NEW)
    make(make(tmp_path / "p", {"notes.txt": b""}) / "deeper", {mark: b""})
    refused(tmp_path / "p", "output-foreign", force=True)


def test_a_manifest_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / f"o.{MANIFEST}").write_bytes(b"someone's")
    error = refused(tmp_path / "o", "output-exists", single=True)
    assert error.path == str(tmp_path / f"o.{MANIFEST}")


def test_the_parent_must_be_there(tmp_path: Path) -> None:
    put(tmp_path, {"file": b""})
    assert "no such folder" in refused(tmp_path / "none" / "o", "output-parent").message
    assert "not a folder" in refused(tmp_path / "file" / "o", "output-parent").message
    assert tree(tmp_path) == {"file": b""}


@pytest.mark.parametrize("target", ["/", "/.", "."])
def test_no_odd_name_is_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.chdir(make(tmp_path / "in", {"notes.txt": b""}))
    for force in (False, True):
        with pytest.raises(OutputError, match="output|there|point|not a checkpoint"):
            write(Path(target), force=force)


def test_the_current_folder_is_a_target_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make(tmp_path / "in", OLD))
    write(Path("."), force=True)
    assert tree(tmp_path) == within("in", NEW)


def test_a_link_is_one_with_a_slash_too(tmp_path: Path) -> None:
    make(tmp_path / "real", OLD)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OutputError, match="symbolic link"), stage(f"{tmp_path}/link/", sources=[], need=0, force=True):
        pass


def test_a_mount_point_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "o", OLD)
    monkeypatch.setattr("os.path.ismount", lambda path: path == str(tmp_path / "o"))
    assert "mount point" in refused(tmp_path / "o", "output-exists", force=True).message


def test_a_name_too_long_is_one_line(tmp_path: Path) -> None:
    for length in (240, 300):  # the first is too long for the staging folder alone
        assert "too long" in refused(tmp_path / ("x" * length), "not-written").message


def test_what_cannot_fit_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(place.shutil, "disk_usage", lambda p: usage(5000, 2000, 3000))
    assert "3,001 bytes will be written, 3,000 are free" in refused(tmp_path / "o", "no-space", need=3001).message
    write(tmp_path / "o", need=3000)
    monkeypatch.setattr(place.shutil, "disk_usage", lambda p: usage(0, 0, 0))  # one that does not say
    write(tmp_path / "p", need=3000)


@pytest.mark.parametrize("call", ["open", "mkdir"])
@pytest.mark.parametrize(("number", "code"), [(errno.EROFS, "output-read-only"), (errno.EACCES, "output-denied"),
                                              (errno.EPERM, "output-denied"), (errno.ENOSPC, "no-space")])
def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int,
                                      code: str) -> None:
    real = getattr(os, call)

    def denied(path: Any, *how: Any, **more: Any) -> Any:
        if ".o.llamactl-" in str(path) and (call == "mkdir" or str(path).endswith(".lock")):
            raise OSError(number, os.strerror(number), path)
        return real(path, *how, **more)

    monkeypatch.setattr(exchange.os, call, denied)
    assert refused(tmp_path / "o", code).path == str(tmp_path / "o")


# --- a run that goes wrong


@pytest.mark.parametrize("error", [None, ValueError("x"), KeyboardInterrupt(), SystemExit(), BaseException("SIGTERM"),
                                   GeneratorExit()])
@pytest.mark.parametrize("force", [False, True])
def test_a_run_that_does_not_publish_leaves_nothing(tmp_path: Path, error: BaseException | None, force: bool) -> None:
    if force:
        make(tmp_path / "o", OLD)
    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        write(tmp_path / "o", force=force, publish=False, before=raising(error) if error else lambda: None)
    assert tree(tmp_path) == (within("o", OLD) if force else {})


def test_no_file_stays_open(tmp_path: Path) -> None:
    files = []

    def stopped() -> None:
        with stage(str(tmp_path / "o"), sources=[], need=0) as s:
            files.append(s.create("a.bin"))
            raise ValueError

    with pytest.raises(ValueError, match="^$"):
        stopped()
    assert files[0].closed


@pytest.mark.parametrize(("number", "code", "word"), [
    (errno.ENOSPC, "no-space", "150,014 of 200,000 bytes"), (errno.EDQUOT, "no-space", "quota"),
    (errno.EFBIG, "file-too-large", "150,000 bytes"), (errno.EROFS, "output-read-only", "read-only"),
    (errno.EACCES, "output-denied", "Permission"), (errno.EPERM, "output-denied", "not permitted"),
    (errno.EIO, "not-written", "Input/output"), (errno.EMFILE, "not-written", "Too many open files"),
    (errno.ENOMEM, "memory", "out of memory"),
])
def test_what_the_system_refuses_is_one_error(tmp_path: Path, number: int, code: str, word: str) -> None:
    nameless = refused(tmp_path / "o", code, need=200_000, before=raising(OSError(number, os.strerror(number))))
    assert word in nameless.message
    assert nameless.path == str(tmp_path / "o")
    with pytest.raises(OutputError) as caught, stage(str(tmp_path / "o"), sources=[], need=0) as s:
        raise OSError(number, os.strerror(number), os.path.join(s.path, "a.bin"))
    assert caught.value.path == str(tmp_path / "o" / "a.bin")
    with pytest.raises(OutputError) as caught, writing("x"):
        raise OSError(number, os.strerror(number))
    assert (caught.value.code, caught.value.path) == (code, "x")


def test_errors_that_are_not_of_the_output_pass(tmp_path: Path) -> None:
    source = make(tmp_path / "in", OLD)
    for error in (OSError(errno.EIO, "x", str(source / "config.json")), BrokenPipeError(errno.EPIPE, "x")):
        with pytest.raises(OSError, match="x") as caught:
            write(tmp_path / "o", before=raising(error))
        assert caught.value is error
    with pytest.raises(BrokenPipeError), writing("x"):
        raise BrokenPipeError(errno.EPIPE, "x")
    assert tree(tmp_path) == within("in", OLD)


def test_out_of_memory_is_one_error(tmp_path: Path) -> None:
    refused(tmp_path / "o", "memory", before=raising(MemoryError()))
    with pytest.raises(OutputError, match="out of memory"), writing("x"):
        raise MemoryError


def test_no_error_names_the_staging_folder(tmp_path: Path) -> None:
    for single in (False, True):
        with pytest.raises(InputRefused) as caught, stage(str(tmp_path / "o"), sources=[], need=0,
                                                          single="m.gguf" if single else None) as s:
            raise InputRefused("x", "x", path=os.path.join(s.path, "m.gguf"))
        assert caught.value.path == str(tmp_path / "o" if single else tmp_path / "o" / "m.gguf")


@pytest.mark.parametrize("failing", range(4))
def test_a_failing_sync_is_a_failing_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    calls = iter(range(99))
    monkeypatch.setattr("os.fsync", lambda fd: raising(OSError(errno.EIO, "Input/output error"))()
                        if next(calls) == failing else None)
    refused(tmp_path / "o", "not-written")


def test_once_in_place_a_failing_sync_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(99))
    monkeypatch.setattr("os.fsync", lambda fd: raising(OSError(errno.EIO, "Input/output error"))()
                        if next(calls) == 4 else None)
    assert [code for code, _ in write(tmp_path / "o").warnings] == ["not-synced"]
    assert tree(tmp_path) == within("o", NEW)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_folders_that_cannot_be_synced_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real = os.fsync
    monkeypatch.setattr("os.fsync", lambda fd: raising(OSError(number, "x"))()
                        if stat.S_ISDIR(os.fstat(fd).st_mode) else real(fd))
    assert write(tmp_path / "o").warnings == []


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as a terminal gives it: in the background of a shell it is ignored."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("published", [False, True])
def test_signals_while_cleaning_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: bool) -> None:
    real = shutil.rmtree
    make(tmp_path / "o", OLD)

    def slow(*how: Any, **more: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        real(*how, **more)

    monkeypatch.setattr("shutil.rmtree", slow)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "o", force=True, publish=published)
    assert tree(tmp_path) == within("o", NEW if published else OLD)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_just_before_the_cleaning_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(99))
    real = undisturbed

    def late() -> Any:
        if next(calls) == 1:  # the first holds the names, the second cleans
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(staging, "undisturbed", late)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "o", publish=False)
    assert tree(tmp_path) == {}


# --- another was there first


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("kind", ["file", "folder", "empty folder", "dangling link"])
def test_what_appears_in_the_meantime_stays(tmp_path: Path, renames: str, monkeypatch: pytest.MonkeyPatch, kind: str,
                                            single: bool) -> None:
    target = tmp_path / "o"
    appear = {"file": lambda: target.write_bytes(b"x"), "folder": lambda: make(target, OLD),
              "empty folder": target.mkdir, "dangling link": lambda: target.symlink_to("nothing")}[kind]
    with pytest.raises(OutputError) as caught:
        write(target, single=single, before=appear)
    assert caught.value.code == "output-exists"
    # after the last look, too
    shutil.rmtree(target, ignore_errors=True)
    target.unlink(missing_ok=True)
    monkeypatch.setattr(place.Place, "check_free", lambda self, force: None)
    with pytest.raises(OutputError) as caught:
        write(target, single=single, before=appear)
    assert caught.value.code == "output-exists"
    assert set(tree(tmp_path)) == {"o", *(f"o/{n}" for n in OLD if kind == "folder")}


def test_a_manifest_that_appears_in_the_meantime_stays(tmp_path: Path, renames: str,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place.Place, "check_free", lambda self, force: None)
    with pytest.raises(OutputError) as caught:
        write(tmp_path / "o", single=True, before=lambda: put(tmp_path, {f"o.{MANIFEST}": b"someone's"}))
    assert caught.value.code == "output-exists"
    assert tree(tmp_path) == {f"o.{MANIFEST}": b"someone's"}


def test_no_stranger_is_replaced_by_force(tmp_path: Path, renames: str) -> None:
    make(tmp_path / "o", OLD)

    def exchanged() -> None:
        shutil.rmtree(tmp_path / "o")
        make(tmp_path / "o", {"notes.txt": b"x"})

    with pytest.raises(OutputError) as caught:
        write(tmp_path / "o", force=True, before=exchanged)
    assert caught.value.code == "output-foreign"
    assert tree(tmp_path) == within("o", {"notes.txt": b"x"})


# --- force


@pytest.mark.parametrize("old", [None, OLD, {}])
def test_force_puts_the_new_in_the_place_of_the_old(tmp_path: Path, renames: str, old: dict[str, bytes] | None) -> None:
    if old is not None:
        make(tmp_path / "o", old)
    assert write(tmp_path / "o", force=True).warnings == []
    assert tree(tmp_path) == within("o", NEW)


@pytest.mark.parametrize("old", [{}, OLD_FILE, {"o": b"old"}, {f"o.{MANIFEST}": b"old manifest"}])
def test_force_replaces_a_file(tmp_path: Path, renames: str, old: dict[str, bytes | str]) -> None:
    put(tmp_path, old)
    assert write(tmp_path / "o", force=True, single=True).warnings == []
    assert tree(tmp_path) == NEW_FILE


def test_no_step_of_an_exchange_shows_less_than_one_checkpoint(tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    if exchange._system_call() is None:
        pytest.skip("no renameat2 here")
    make(tmp_path / "o", OLD)
    monkeypatch.setattr("os.rename", raising(AssertionError("not in one step")))
    write(tmp_path / "o", force=True)
    assert tree(tmp_path) == within("o", NEW)


@pytest.mark.parametrize("failures", [1, 2])  # the second: of putting the old back at once
def test_the_old_comes_back_when_the_new_cannot_be_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       failures: int) -> None:
    make(tmp_path / "o", OLD)
    monkeypatch.setattr(exchange, "_system_call", lambda: None)
    real = os.rename
    calls = iter(range(99))
    monkeypatch.setattr("os.rename", lambda a, b: raising(OSError(errno.EIO, "Input/output error", a))()
                        if 1 <= next(calls) <= failures else real(a, b))
    refused(tmp_path / "o", "not-written", force=True)


def test_an_old_that_cannot_be_put_back_is_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "o", OLD)
    monkeypatch.setattr(exchange, "_system_call", lambda: None)
    real = os.rename
    calls = iter(range(99))
    monkeypatch.setattr("os.rename", lambda a, b: real(a, b) if next(calls) == 0
                        else raising(OSError(errno.EIO, "Input/output error", a))())
    with pytest.raises(OutputError):
        write(tmp_path / "o", force=True)
    monkeypatch.setattr("os.rename", real)
    (left,) = tmp_path.iterdir()
    assert tree(left) == OLD
    exchange.clear(str(tmp_path / "o"))  # what the next run does
    assert tree(tmp_path) == within("o", OLD)


def test_an_old_that_cannot_be_removed_is_a_warning(tmp_path: Path, renames: str,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "o", OLD)
    real = shutil.rmtree
    monkeypatch.setattr("shutil.rmtree", lambda *how, **more: None)
    assert [code for code, _ in write(tmp_path / "o", force=True).warnings] == ["not-removed"]
    assert tree(tmp_path / "o") == NEW
    monkeypatch.setattr("shutil.rmtree", real)
    shutil.rmtree(tmp_path / "o")
    write(tmp_path / "o")  # and it is not taken for an old content that wants its place back
    assert tree(tmp_path) == within("o", NEW)


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("force", [False, True])
def test_a_file_that_cannot_be_put_leaves_the_old_and_its_manifest(tmp_path: Path, renames: str, force: bool,
                                                                   links: bool,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    if force:
        put(tmp_path, OLD_FILE)
    error = OSError(errno.EIO, "Input/output error")
    real = os.replace
    if not links:
        monkeypatch.setattr("os.link", raising(OSError(errno.EPERM, "no links")))
    monkeypatch.setattr(staging, "put_new", raising(error))
    monkeypatch.setattr("os.replace", lambda a, b: raising(error)() if str(b).endswith("/o") else real(a, b))
    refused(tmp_path / "o", "not-written", single=True, force=force)


def test_a_file_is_published_where_there_are_no_links(tmp_path: Path, renames: str,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.link", raising(OSError(errno.EPERM, "no links")))
    write(tmp_path / "o", single=True)
    assert tree(tmp_path) == NEW_FILE
    refused(tmp_path / "o", "output-exists", single=True)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_name_that_is_taken_is_one_error(tmp_path: Path, renames: str, monkeypatch: pytest.MonkeyPatch,
                                           kind: str) -> None:
    """The last look is passed by: what the system itself says must do."""
    put(tmp_path, {"a": b"new", "b": b"new"}) if kind == "file" else [make(tmp_path / n, OLD) for n in "ab"]
    before, real = tree(tmp_path), os.path.lexists
    looks = iter([False])
    monkeypatch.setattr("os.path.lexists", lambda p: next(looks, None) is not False and real(p))
    if renames == "renameat2" or kind == "file":
        next(looks)  # where nobody looks first
    with pytest.raises(FileExistsError):
        exchange.put_new(str(tmp_path / "a"), str(tmp_path / "b"))
    assert tree(tmp_path) == before
    exchange.put_new(str(tmp_path / "a"), str(tmp_path / "c"))
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]


def test_a_run_that_is_faster_is_replaced_in_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_system_call", lambda: None)
    make(tmp_path / "o", OLD)
    real = os.rename
    others = iter(range(3))

    def rename(old: str, new: str) -> None:
        real(old, new)
        if "llamactl-old" in new and next(others, None) is not None:
            make(tmp_path / "o", {"config.json": b"another's"})

    monkeypatch.setattr("os.rename", rename)
    assert write(tmp_path / "o", force=True).warnings == []
    assert tree(tmp_path) == within("o", NEW)


@pytest.mark.parametrize("how", ["held", "no locks"])
def test_a_file_waits_for_its_turn_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setattr(staging, "lock", lambda fd: False)
    if how == "no locks":
        monkeypatch.setattr("fcntl.flock", raising(OSError(errno.ENOLCK, "no locks")))
        monkeypatch.setattr(staging, "lock", exchange.lock)
    write(tmp_path / "o", single=True)
    assert tree(tmp_path) == NEW_FILE
    assert 0 < sum(waits) < 10 if how == "held" else not waits


def test_a_file_never_replaces_another_where_there_are_no_links(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_system_call", lambda: None)
    monkeypatch.setattr("os.link", raising(OSError(errno.EPERM, "no links")))
    put(tmp_path, {"new": b"new", "o": b"old"})
    with pytest.raises(FileExistsError):
        exchange.put_new(str(tmp_path / "new"), str(tmp_path / "o"))
    monkeypatch.setattr("os.replace", raising(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        exchange.put_new(str(tmp_path / "new"), str(tmp_path / "p"))
    assert tree(tmp_path) == {"new": b"new", "o": b"old"}


# --- what dead runs left


KEY = f"{2**22 + 7}-0123456789abcdef"  # no process has this number


def left_over(parent: Path, key: str = KEY, lock: str | None = "host 1", name: str = "o") -> None:
    make(parent / f".{name}.llamactl-{key}", NEW)
    if lock is not None:
        (parent / f".{name}.llamactl-{key}.lock").write_text(lock)


def test_what_a_dead_run_left_is_cleared(tmp_path: Path) -> None:
    left_over(tmp_path)
    left_over(tmp_path, "5-fedcba9876543210", lock=None)
    put(tmp_path, {".o.llamactl-6-fedcba9876543210.lock": b""})
    write(tmp_path / "o")
    assert tree(tmp_path) == within("o", NEW)


def test_it_is_cleared_even_if_the_run_is_refused_for_space(tmp_path: Path) -> None:
    left_over(tmp_path)
    with pytest.raises(OutputError):
        write(tmp_path / "o", need=1 << 60)
    assert tree(tmp_path) == {}


def test_only_what_is_surely_ours_is_cleared(tmp_path: Path) -> None:
    left_over(tmp_path, name="o2")
    left_over(tmp_path, name="x.o")
    left_over(tmp_path, "5-ABCDEF0123456789")
    left_over(tmp_path, "5-0123456789abcdef0")
    left_over(tmp_path, "x5-0123456789abcdef")
    (tmp_path / ".o.llamactl-5-0123456789abcdef").symlink_to(".o2.llamactl-" + KEY)
    put(tmp_path, {".o.llamactl-7-0123456789abcdef": b"a file"})
    before = tree(tmp_path)
    write(tmp_path / "o")
    assert tree(tmp_path) == {**before, **within("o", NEW)}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_what_another_user_left_stays(tmp_path: Path) -> None:
    left_over(tmp_path, lock=None)
    left_over(tmp_path, "5-0123456789abcdef")
    os.chown(tmp_path / f".o.llamactl-{KEY}", 12345, -1)
    os.chown(tmp_path / ".o.llamactl-5-0123456789abcdef.lock", 12345, -1)
    before = tree(tmp_path)
    write(tmp_path / "o")
    assert tree(tmp_path) == {**before, **within("o", NEW)}


def test_a_live_run_is_left_alone(tmp_path: Path) -> None:
    with stage(str(tmp_path / "o"), sources=[], need=0) as first:
        first.create("config.json").close()
        write(tmp_path / "o")
        assert os.path.exists(os.path.join(first.path, "config.json"))
        with pytest.raises(OutputError) as caught:
            first.publish()
    assert caught.value.code == "output-exists"
    assert tree(tmp_path) == within("o", NEW)


@pytest.mark.parametrize(("lock", "stays"), [
    (f"{exchange._host()} {os.getpid()}", True), (f"{exchange._host()} {KEY.split('-')[0]}", False),
    (f"other {KEY.split('-')[0]}", True), ("", True), ("x", True), (f"{exchange._host()} 99999999999999", True),
], ids=["alive", "dead", "elsewhere", "empty", "odd", "beyond"])
@pytest.mark.parametrize("without", ["locks", "fcntl"])
def test_without_locks_the_process_id_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: str, stays: bool,
                                            without: str) -> None:
    if without == "locks":
        monkeypatch.setattr("fcntl.flock", raising(OSError(errno.ENOLCK, "no locks")))
    else:
        monkeypatch.setattr(exchange, "fcntl", None)
    left_over(tmp_path, lock=lock)
    write(tmp_path / "o")
    assert set(os.listdir(tmp_path)) == {"o", *([f".o.llamactl-{KEY}", f".o.llamactl-{KEY}.lock"] if stays else [])}
    with stage(str(tmp_path / "p"), sources=[], need=0) as first:
        write(tmp_path / "p")
        assert os.path.exists(first.path)


@pytest.mark.parametrize("how", ["removed", "held"])
def test_a_lock_that_is_cleared_away_at_birth_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                            how: str) -> None:
    real = fcntl.flock
    seen: list[str] = []

    def flock(fd: int, what: int) -> None:
        seen.append(os.readlink(f"/proc/self/fd/{fd}"))
        if len(seen) == 1 and how == "held":
            raise BlockingIOError
        if len(seen) == 1:
            os.unlink(seen[0])
        real(fd, what)

    monkeypatch.setattr("fcntl.flock", flock)
    with stage(str(tmp_path / "o"), sources=[], need=0) as s:
        assert len(set(seen)) == 2
        assert os.path.exists(s.path + ".lock")
    assert tree(tmp_path) == {}


def test_two_runs_never_share_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = iter([b"a" * 8, b"a" * 8, b"b" * 8])
    monkeypatch.setattr("os.urandom", lambda n: next(dice))
    with stage(str(tmp_path / "o"), sources=[], need=0) as first, stage(str(tmp_path / "o"), sources=[], need=0) as s:
        assert first.path != s.path
        assert len(os.listdir(tmp_path)) == 4
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("lock", [None, "host 1"])
def test_an_old_content_that_was_in_hand_goes_back(tmp_path: Path, renames: str, lock: str | None) -> None:
    left_over(tmp_path, lock=lock)
    make(tmp_path / f".o.llamactl-old-{KEY}", OLD)
    with pytest.raises(OutputError) as caught:
        write(tmp_path / "o")
    assert caught.value.code == "output-exists"
    assert tree(tmp_path) == within("o", OLD)


def test_an_old_content_whose_place_is_taken_goes(tmp_path: Path, renames: str) -> None:
    left_over(tmp_path)
    make(tmp_path / f".o.llamactl-old-{KEY}", OLD)
    make(tmp_path / "o", {"config.json": b"newer"})
    with pytest.raises(OutputError):
        write(tmp_path / "o")
    assert tree(tmp_path) == within("o", {"config.json": b"newer"})


# --- processes


def run_program(job: str, mode: str, folder: Path, before: tuple[str, ...] = ()) -> dict[str, Any]:
    """What stagingruns.py says of one job."""
    env = {**os.environ, "PYTHONPATH": str(Path(llamactl.__file__).parent.parent)}
    done = subprocess.run([*before, sys.executable, "-B", str(PROGRAM), job, mode, str(folder)], capture_output=True,
                          text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout)
    return said


MODES = ["folder", "folder force", "folder force plain", "folder plain", "file", "file force", "file plain"]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_killed_before_any_step(tmp_path: Path, mode: str) -> None:
    said = run_program("kills", mode, tmp_path)
    assert said["wrong"] == []
    assert said["code"] == 0
    assert said["steps"] >= 10
    assert said["new"] >= 2
    assert said["old" if "force" in mode else "absent"] >= 6


@pytest.mark.parametrize("mode", MODES)
def test_a_run_interrupted_at_any_line(tmp_path: Path, mode: str) -> None:
    said = run_program("interrupts", mode, tmp_path)
    assert said["wrong"] == []
    assert said["new"] > 30
    assert said["old" if "force" in mode else "absent"] > 100


def test_runs_killed_by_luck(tmp_path: Path) -> None:
    said = run_program("kills_by_luck", "folder", tmp_path)
    assert said["wrong"] == []
    assert said["absent"] + said["new"] == 30


@pytest.mark.parametrize("mode", MODES)
def test_two_at_once_exactly_one_wins(tmp_path: Path, mode: str) -> None:
    said = run_program("two", mode, tmp_path)
    assert said == {"wrong": [], "codes": [[0, 0 if "force" in mode else 5]] * 10}


def test_a_file_size_limit(tmp_path: Path) -> None:
    assert run_program("limit", "folder", tmp_path) == {"code": "file-too-large", "left": []}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    assert run_program("nobody", "folder", tmp_path) == {"code": "output-denied", "left": []}


@pytest.mark.parametrize(("options", "code"), [("ro", "output-read-only"), ("size=60k", "no-space")])
def test_a_real_file_system(tmp_path: Path, options: str, code: str) -> None:
    enter = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {options} none "$0" && exec "$@"', str(tmp_path))
    able = os.getuid() == 0 and shutil.which("unshare") is not None
    if not able or subprocess.run([*enter, "true"], capture_output=True).returncode:
        pytest.skip("no mounts here")
    assert run_program("once", "folder", tmp_path, before=enter) == {"code": code, "left": []}
