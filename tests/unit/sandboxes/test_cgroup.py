"""Control groups of both versions, on a tree of plain files that behaves like the kernel's."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from agentrl_sandboxes.local import cgroup
from agentrl_sandboxes.local.cgroup import BoxesGroup

LIMITS = {"memory": 100 << 20, "pids": 20}


@dataclass(slots=True)
class FakeTree:
    """The file system of control groups: a new folder is filled with the files it would have."""

    root: Path
    read_only: set[str] = field(default_factory=set)
    """Names of files that refuse to be written in every new group."""

    def make(self, folder: Path) -> None:
        folder.mkdir()
        for name in self._files(folder):
            (folder / name).write_text("")
            if name in self.read_only:
                (folder / name).unlink()
                (folder / name).mkdir()  # opening it to write fails

    def unmake(self, folder: Path) -> None:
        if any(child.is_dir() and child.name not in self.read_only for child in folder.iterdir()):
            raise OSError("not empty")
        shutil.rmtree(folder)

    def _files(self, folder: Path) -> list[str]:
        controller = folder.relative_to(self.root).parts[0]
        if controller == "memory":
            names = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control"]
            return ["cgroup.procs", "tasks", *names]
        if controller == "pids":
            return ["cgroup.procs", "tasks", "pids.max"]
        names = ["cgroup.procs", "cgroup.subtree_control"]
        above = (folder.parent / "cgroup.subtree_control").read_text()
        if "memory" in above:
            names += ["memory.max", "memory.swap.max", "memory.events"]
        return names + (["pids.max"] if "pids" in above else [])


@pytest.fixture
def tree(tmp_path, monkeypatch):
    fake = FakeTree(tmp_path / "cgroup")
    fake.root.mkdir()
    monkeypatch.setattr(cgroup, "_ROOT", fake.root)
    monkeypatch.setattr(cgroup, "_make", fake.make)
    monkeypatch.setattr(cgroup, "_unmake", fake.unmake)
    monkeypatch.setattr(cgroup, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(cgroup, "_REMOVE_S", 0.05)
    return fake


def unified(tree: FakeTree, own: str, controllers: str) -> Path:
    """A machine with version 2 alone, where every group but the last hands controllers down."""
    cgroup._OWN_GROUPS.write_text(f"0::/{own}\n")
    folder = tree.root
    (folder / "cgroup.subtree_control").write_text(controllers)
    for part in own.split("/"):
        folder = folder / part
        tree.make(folder)
        (folder / "cgroup.subtree_control").write_text(controllers)
    (folder / "cgroup.subtree_control").write_text("")  # it holds processes: us
    return folder


def test_version_2_puts_all_boxes_beside_our_own_group_and_each_into_one(tree):
    own = unified(tree, "user.slice/session.scope", "cpu memory pids")
    groups = BoxesGroup(memory_bytes=1 << 30, max_tasks=500)
    groups.add(77)
    (folder,) = own.parent.glob("agentrl-boxes-*")
    assert (folder / "memory.max").read_text() == str(1 << 30)
    assert (folder / "pids.max").read_text() == "500"
    assert (folder / "memory.swap.max").read_text() == "0"
    assert (folder / "cgroup.subtree_control").read_text() == "+memory +pids"
    # A group with groups below it may hold no process.
    assert (folder / "cgroup.procs").read_text() == ""
    assert (folder / "zygote" / "cgroup.procs").read_text() == "77"
    assert groups.enforced() == {"memory": f"cgroup v2: {1 << 30}", "pids": "cgroup v2: 500"}
    assert groups.enforced_per_box() == {"memory": "cgroup v2", "pids": "cgroup v2"}

    box = groups.make_box_group(1, LIMITS)
    (inner,) = box.folders
    assert [(inner / n).read_text() for n in ("memory.max", "pids.max", "memory.swap.max")] == [
        str(100 << 20), "20", "0",
    ]  # fmt: skip
    joins, events = box.open_files()
    assert events is not None
    os.write(joins[0], b"0")
    assert (inner / "cgroup.procs").read_text() == "0"
    for fd in (*joins, events):
        os.close(fd)
    (inner / "cgroup.procs").write_text("")
    (folder / "zygote" / "cgroup.procs").write_text("")
    groups.remove()
    assert not folder.exists()


def test_a_box_group_serves_again_unless_something_was_killed_in_it(tree):
    unified(tree, "a/b", "memory pids")
    groups = BoxesGroup(memory_bytes=1 << 30, max_tasks=500)
    first = groups.make_box_group(1, LIMITS)
    groups.return_box_group(first)
    assert groups.make_box_group(2, LIMITS) is first
    assert groups.make_box_group(3, {**LIMITS, "pids": 21}) is not first
    (first.folders[0] / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert first.oom_kills() == 2
    groups.return_box_group(first)
    assert not first.folders[0].exists()
    assert groups.make_box_group(4, LIMITS) is not first


def test_version_2_that_hands_nothing_down_bounds_all_boxes_together_only(tree):
    own = unified(tree, "a/b", "memory pids")
    tree.read_only = {"cgroup.subtree_control"}
    groups = BoxesGroup(memory_bytes=1 << 30, max_tasks=500)
    groups.add(77)
    (folder,) = own.parent.glob("agentrl-boxes-*")
    assert (folder / "cgroup.procs").read_text() == "77"
    assert set(groups.enforced()) == {"memory", "pids"} and groups.enforced_per_box() == {}
    assert groups.make_box_group(1, LIMITS).open_files() == ([], None)


def test_a_mount_without_controllers_bounds_nothing_and_leaves_nothing(tree):
    own = unified(tree, "a/b", "cpu")
    groups = BoxesGroup(memory_bytes=1 << 30, max_tasks=500)
    groups.add(77)
    assert groups.enforced() == groups.enforced_per_box() == {}
    assert list(own.parent.glob("agentrl-boxes-*")) == []


def test_a_group_that_may_not_be_entered_is_dropped_from_the_report(tree):
    own = unified(tree, "a/b", "memory pids")
    tree.read_only = {"cgroup.procs"}
    groups = BoxesGroup(memory_bytes=1 << 30, max_tasks=500)
    groups.add(77)
    assert groups.enforced() == {} and groups.make_box_group(1, LIMITS).folders == []
    assert list(own.parent.glob("agentrl-boxes-*")) == []


def test_version_1_has_a_group_per_controller(tree):
    cgroup._OWN_GROUPS.write_text("3:pids:/\n2:cpu,memory:/\n1:name=systemd:/\n0::/\n")
    for name in ("memory", "pids"):
        (tree.root / name).mkdir()
    groups = BoxesGroup(memory_bytes=1 << 30, max_tasks=500)
    groups.add(77)
    (memory,) = (tree.root / "memory").glob("agentrl-boxes-*")
    (pids,) = (tree.root / "pids").glob("agentrl-boxes-*")
    assert (memory / "memory.memsw.limit_in_bytes").read_text() == str(1 << 30)
    assert (pids / "cgroup.procs").read_text() == "77"
    box = groups.make_box_group(1, LIMITS)
    assert [path.name for path in box.join_files] == ["tasks", "tasks"]
    assert (memory / "box-1" / "memory.limit_in_bytes").read_text() == str(100 << 20)
    assert (pids / "box-1" / "pids.max").read_text() == "20"
    assert groups.enforced()["memory"].startswith("cgroup v1")


def test_without_the_kernels_list_of_groups_nothing_is_bounded(tree):
    groups = BoxesGroup(memory_bytes=1 << 30, max_tasks=500)
    groups.add(77)
    assert groups.enforced() == {}
