"""Control groups on a fake tree: what decides is the control file, not the mount."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from agentrl_sandboxes.local import cgroup


class Tree:
    """A directory tree in which a new group gets the control files its parent's version has."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.files: dict[Path, list[str]] = {}
        self._mkdir = Path.mkdir
        self._rmdir = Path.rmdir
        monkeypatch.setattr(cgroup, "_ROOT", root)
        monkeypatch.setattr(Path, "mkdir", lambda p, **kw: self.make(p, **kw))
        monkeypatch.setattr(Path, "rmdir", lambda p: self.remove(p))

    def make(self, path: Path, **options: bool) -> None:
        self._mkdir(path, **options)
        for name in self.files.get(path.parent, []):
            (path / name).write_text("max")

    def remove(self, path: Path) -> None:
        for file in path.iterdir():
            file.unlink()
        self._rmdir(path)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    return Tree(tmp_path, monkeypatch)


def set_own_groups(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    read = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda p, *a, **k: text if str(p) == "/proc/self/cgroup" else read(p, *a, **k),
    )


def test_version_1_uses_one_group_per_controller(tree, monkeypatch):
    for name, file in (("memory", "memory.limit_in_bytes"), ("pids", "pids.max")):
        folder = tree.root / name / "mine"
        os.makedirs(folder)
        tree.files[folder] = [file, "cgroup.procs"]
    set_own_groups(monkeypatch, "4:memory:/mine\n3:pids:/mine\n0::/\n")
    group = cgroup.BoxesGroup(memory_bytes=1000, max_tasks=10)
    assert group.enforced() == {"memory": "cgroup v1: 1000", "pids": "cgroup v1: 10"}
    group.add(42)
    assert [p.read_text() for p in sorted(tree.root.glob("*/mine/agentrl-*/cgroup.procs"))] == [
        "42",
        "42",
    ]
    group.remove()
    assert not list(tree.root.glob("**/agentrl-*"))


def test_version_2_uses_one_group_for_both(tree, monkeypatch):
    folder = tree.root / "user.slice"
    folder.mkdir()
    tree.files[folder] = ["memory.max", "pids.max", "cgroup.procs"]
    set_own_groups(monkeypatch, "0::/user.slice\n")
    group = cgroup.BoxesGroup(memory_bytes=1000, max_tasks=10)
    assert group.enforced() == {"memory": "cgroup v2: 1000", "pids": "cgroup v2: 10"}
    assert len(list(folder.glob("agentrl-*"))) == 1


def test_a_mount_without_controllers_enforces_nothing_and_leaves_nothing(tree, monkeypatch):
    set_own_groups(monkeypatch, "0::/\n")
    group = cgroup.BoxesGroup(memory_bytes=1000, max_tasks=10)
    assert group.enforced() == {}
    assert not list(tree.root.iterdir())


def test_groups_of_dead_owners_are_swept_and_of_living_ones_kept(tree, monkeypatch):
    dead, living = tree.root / "agentrl-boxes-999999999-1", tree.root / "agentrl-boxes-1-1"
    dead.mkdir()
    living.mkdir()
    set_own_groups(monkeypatch, "0::/\n")
    cgroup.BoxesGroup(memory_bytes=1000, max_tasks=10)
    assert (dead.exists(), living.exists()) == (False, True)
