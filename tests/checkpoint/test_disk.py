"""What lies at a path before its bytes matter: kinds of file, links, and where a link in a model folder may lead."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from llamactl.checkpoint import disk
from llamactl.checkpoint.safetensors import read_header
from llamactl.errors import InputRefused, NotAvailable

EMPTY = struct.pack("<Q", 2) + b"{}"


def refusal(path: str, **options: Any) -> InputRefused:
    with pytest.raises(InputRefused) as caught:
        read_header(path, **options)
    assert path in caught.value.line()
    return caught.value


class TestFiles:
    """What lies at the path, before its bytes matter."""

    def test_absent(self, tmp_path: Path) -> None:
        with pytest.raises(NotAvailable) as caught:
            read_header(tmp_path / "no.safetensors")
        assert caught.value.code == "not-found"

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
    def test_fifo(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "f")
        assert "named pipe" in refusal(str(tmp_path / "f")).message

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
    def test_fifo_that_was_a_file_a_moment_ago(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        os.mkfifo(tmp_path / "f")
        monkeypatch.setattr(disk, "check_regular", lambda path, inside: None)
        assert refusal(str(tmp_path / "f")).code == "not-a-file"

    def test_device_behind_a_link(self, tmp_path: Path) -> None:
        os.symlink("/dev/zero", tmp_path / "f")
        error = refusal(str(tmp_path / "f"), inside=tmp_path)
        assert (error.code, "device" in error.message) == ("not-a-file", True)

    def test_folder(self, tmp_path: Path) -> None:
        assert refusal(str(tmp_path)).code == "not-a-file"

    def test_dangling_link_says_where_it_points(self, tmp_path: Path) -> None:
        os.symlink("../../blobs/gone", tmp_path / "f")
        error = refusal(str(tmp_path / "f"))
        assert (error.code, "../../blobs/gone" in error.message) == ("dangling-link", True)

    def test_link_loop(self, tmp_path: Path) -> None:
        os.symlink("f", tmp_path / "f")
        assert refusal(str(tmp_path / "f")).code == "link-loop"

    def test_permission(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def denied(*_: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", denied)
        (tmp_path / "f").write_bytes(EMPTY)
        assert refusal(str(tmp_path / "f")).code == "io-permission"

    def test_nul_in_the_path(self) -> None:
        with pytest.raises(InputRefused) as caught:
            read_header("a\0b")
        assert caught.value.code == "io-error"


class TestLinks:
    """Where a link in a model folder may lead."""

    @staticmethod
    def link(folder: Path, target: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(EMPTY)
        link = folder / "model.safetensors"
        link.symlink_to(os.path.relpath(target, folder))
        return link

    @pytest.mark.parametrize(
        ("folder", "target"),
        [
            ("m", "m/blobs/aa"),
            ("hub/models--o--n/snapshots/rev", "hub/models--o--n/blobs/aa"),
            ("hub/models--o--n/snapshots/rev/sub", "hub/models--o--n/blobs/aa"),
            ("hub/models--o--n/snapshots/rev", f"hub/blobs/ab/ab{'0' * 62}"),
            ("m", f"hub/models--o--n/blobs/{'ab' * 32}"),
            ("m", f"hub/models--o--n/blobs/{'ab' * 20}"),
        ],
    )
    def test_allowed(self, folder: str, target: str, tmp_path: Path) -> None:
        link = self.link(tmp_path / folder, tmp_path / target)
        assert read_header(link, inside=tmp_path / folder).tensors == ()

    @pytest.mark.parametrize(
        ("folder", "target"),
        [
            ("m", "m2/model.safetensors"),
            ("m", "blobs/aa"),
            ("m", "hub/models--o--n/blobs/aa"),
            ("m", f"hub/models--o--n/snapshots/{'ab' * 32}"),
            ("hub/models--o--n/snapshots/rev", "hub/models--o--n/refs/aa"),
            ("hub/models--o--n/snapshots/rev", "hub/models--o--n/blobs/sub/aa"),
            ("hub/models--o--n/snapshots/rev", "hub/models--o--other/blobs/aa"),
            ("hub/models--o--n/snapshots/rev", f"hub/blobs/cd/ab{'0' * 62}"),
        ],
    )
    def test_outside(self, folder: str, target: str, tmp_path: Path) -> None:
        link = self.link(tmp_path / folder, tmp_path / target)
        assert refusal(str(link), inside=tmp_path / folder).code == "link-outside"
        assert read_header(link).tensors == ()  # a path the user names himself may be any link

    def test_blobs_that_is_itself_a_link_away(self, tmp_path: Path) -> None:
        """A folder that was unpacked from an archive could bring `blobs -> /etc` along."""
        (tmp_path / "etc").mkdir()
        (tmp_path / "etc" / "secret").write_bytes(EMPTY)
        snapshot = tmp_path / "models--o--n" / "snapshots" / "rev"
        snapshot.mkdir(parents=True)
        os.symlink("../etc", tmp_path / "models--o--n" / "blobs")
        os.symlink("../../blobs/secret", snapshot / "model.safetensors")
        assert refusal(str(snapshot / "model.safetensors"), inside=snapshot).code == "link-outside"

    def test_subfolder_that_is_a_link_away(self, tmp_path: Path) -> None:
        (tmp_path / "far").mkdir()
        (tmp_path / "far" / "model.safetensors").write_bytes(EMPTY)
        (tmp_path / "m").mkdir()
        os.symlink("../far", tmp_path / "m" / "sub")
        assert refusal(str(tmp_path / "m/sub/model.safetensors"), inside=tmp_path / "m").code == "link-outside"
