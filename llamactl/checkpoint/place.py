"""A target: where it lies, and all that may speak against writing there. Nothing is made or changed here."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress

from llamactl.checkpoint.exchange import BESIDE, MANIFEST
from llamactl.errors import OutputError, UsageError

_MARKS = {"config.json", "params.json", "ckpt.pt", MANIFEST}
_MARK_ENDINGS = (".safetensors", ".pth", ".bin", ".gguf")


class Place:
    """A target as it was named (`shown`) and as it lies on disk (`path`), and all that may speak against it."""

    def __init__(self, target: str, single: str | None) -> None:
        self.shown, self.single = target, single
        parent, name = os.path.split(target.rstrip(os.sep) or os.sep)
        if name in ("", ".", ".."):
            parent, name = os.path.split(os.path.realpath(target))
        self.parent = os.path.realpath(parent or os.curdir)
        self.path = os.path.join(self.parent, name)

    def check_sources(self, sources: Sequence[str]) -> None:
        """The input is never written: not itself, not inside it, and nothing that holds it is replaced."""
        own = {self.path, os.path.realpath(self.path), _identity(self.path)}
        around = {x for p in _upwards(self.parent) for x in (p, _identity(p))}
        for source in map(os.path.realpath, sources):
            if source in own or (_identity(source) or source) in own:
                raise OutputError("output-is-input", "is the input itself, which is never written", path=self.shown,
                                  help="name another place")
            if source in around or (_identity(source) or source) in around:
                raise UsageError("output-inside", f"lies inside the input {source}", path=self.shown,
                                 help="name a place outside it")
            if any((_identity(p) or p) in own for p in _upwards(os.path.dirname(source))):
                raise OutputError("output-holds-input", f"holds the input {source}, which is never touched",
                                  path=self.shown, help="name another place")

    def check_free(self, force: bool) -> None:
        """Refuse a target that is there; with `force`, one that is no checkpoint. Raises OutputError, OSError."""
        if not os.path.isdir(self.parent):
            what = "is not a folder" if os.path.lexists(self.parent) else "no such folder"
            raise OutputError("output-parent", f"{what}: {self.parent}", path=self.shown, help="make it first")
        self._check_one(self.path, self.shown, force)
        if self.single:
            self._check_one(self.path + BESIDE, self.shown + BESIDE, force)

    def _check_one(self, path: str, shown: str, force: bool) -> None:
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISLNK(mode):
            raise OutputError("output-exists", "is a symbolic link, which is never replaced", path=shown,
                              help="name what it leads to, or remove it")
        if os.path.ismount(path):
            raise OutputError("output-exists", "is a mount point, which is never replaced", path=shown,
                              help="name a place inside it")
        foreign = self._foreign(path, mode)
        if not force:
            raise OutputError("output-exists", "is there already", path=shown,
                              help="name another place" if foreign else "--force replaces it")
        if foreign:
            raise OutputError("output-foreign", f"is {foreign}, so it is not replaced", path=shown,
                              help="name another place")

    def _foreign(self, path: str, mode: int) -> str | None:
        """What something is that no earlier run can have written."""
        if self.single:
            return None if stat.S_ISREG(mode) else "no regular file"
        if not stat.S_ISDIR(mode):
            return "no folder"
        return None if _is_checkpoint(os.listdir(path)) else "not a checkpoint"

    def check_space(self, need: int) -> None:
        """Refuse what cannot fit, with both numbers."""
        disk = shutil.disk_usage(self.parent)
        if disk.total and disk.free < need:  # some network file systems say 0 of 0
            raise OutputError("no-space", f"{need:,} bytes will be written, {disk.free:,} are free", path=self.shown,
                              help="make room, or name a place on another disk")


def _is_checkpoint(names: Sequence[str]) -> bool:
    return not names or any(n in _MARKS or n.endswith(_MARK_ENDINGS) for n in names)


def _identity(path: str) -> tuple[int, int] | None:
    with suppress(OSError):
        info = os.stat(path)
        return info.st_dev, info.st_ino
    return None


def _upwards(path: str) -> list[str]:
    """A folder and all around it, innermost first."""
    found = [path]
    while (up := os.path.dirname(found[-1])) != found[-1]:
        found.append(up)
    return found
