"""Opening beneath a directory without the kernel's help: as in gVisor."""

from __future__ import annotations

import errno
import os

import pytest
from agentrl_sandboxes.supervised.inside import kernel, walk


@pytest.fixture
def root(tmp_path):
    (tmp_path / "secret").write_text("outside")
    work = tmp_path / "work"
    (work / "deep").mkdir(parents=True)
    (work / "deep" / "file").write_text("inside")
    (work / "out").symlink_to("../secret")
    (work / "away").symlink_to("/etc")
    (work / "same").symlink_to("deep/file")
    fd = os.open(work, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("path", ["deep/file", "./deep//file", "deep/./file"])
def test_a_file_beneath_is_opened(root, path):
    with os.fdopen(walk.walk_beneath(root, path, os.O_RDONLY)) as file:
        assert file.read() == "inside"


@pytest.mark.parametrize(
    "path",
    ["../secret", "deep/../../secret", "/etc/passwd", "out", "away/passwd", "same", "absent"]
    + ["deep/file/", "deep/file/x"],
)
def test_what_leads_out_or_is_a_link_is_not(root, path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        walk.walk_beneath(root, path, os.O_RDONLY)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_kernel_that_cannot_is_noticed(root, monkeypatch):
    def cannot(*_: object) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(kernel, "open_beneath", cannot)
    fd = walk.open_beneath(root, "new", os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(fd, b"x")
    os.close(fd)
    with os.fdopen(walk.open_beneath(root, "new", os.O_RDONLY)) as file:
        assert file.read() == "x"
    with pytest.raises(ValueError, match="NUL"):
        walk.walk_beneath(root, "a\0b", os.O_RDONLY)
