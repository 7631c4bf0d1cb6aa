"""What ``data.train`` names is read only where reading it comes to an end."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from agentrl.data.source import read_source
from agentrl.errors import DataError


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to(path.with_name("pipe"))


def make_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (make_pipe, "a pipe"),
        (make_link_to_pipe, "a pipe"),
        (make_link_to_device, "a device"),
        (make_socket, "a socket"),
        (Path.mkdir, "a directory"),
    ],
)
def test_what_is_no_regular_file_is_refused_and_not_read(
    tmp_path: Path, suffix: str, make, kind: str
) -> None:
    path = tmp_path / f"x{suffix}"
    make(path)
    sources = [str(tmp_path / f"*{suffix}")]
    if kind != "a directory":  # a directory that is named is one that ``datasets`` has saved
        sources.append(str(path))
    for source in sources:
        with pytest.raises(DataError, match=f"data.val: .*x{suffix}' is {kind}, not a regular"):
            read_source(source, split="val")


def test_a_link_to_a_file_is_as_good_as_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"prompt": "p"}')
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "a")
    (table,) = read_source(str(link), split="train")
    assert table.rows == [{"prompt": "p"}]
