# SPDX-License-Identifier: Apache-2.0
"""Tests the mount check of the watcher, which looks for containers that bypass their limits. The watcher reads the
kernel's mount lists of containers and must find mounts that a tenant (a user of a container) made at the paths of this
project's files. A container has these files below /dev/vgpu: the library, and a folder for each share (a part of a
GPU). The list of preloaded libraries is in /etc.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doubles.proc import CONTAINER
from doubles.watched import MIB, Watched
from vgpu_plugin.watch import mounts
from vgpu_plugin.watch import watcher as watch
from vgpu_plugin.watch.mounts import Mount, Place, parse, place_of
from vgpu_plugin.watch.processes import Processes
from vgpu_plugin.watch.rule import FOREIGN, NO_SLOT

LINES = rb"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:5 / /dev rw - tmpfs tmpfs rw
31 30 0:25 /a\040b\134c/ro /dev/vgpu/0 ro,nosuid master:3 - tmpfs tmpfs rw
no line of this kind
32 x 0:25 / /dev/x rw - tmpfs tmpfs rw
33 31 0:50 /ledger//deleted /dev/vgpu/0/ledger rw - tmpfs vgpu rw
"""


def test_lines_of_the_kernel_are_read():
    assert parse(LINES).rows == (
        Mount(22, 1, "8:1", "/", "/"),
        Mount(30, 22, "0:5", "/", "/dev"),
        Mount(31, 30, "0:25", "/a b\\c/ro", "/dev/vgpu/0"),
        Mount(33, 31, "0:50", "/ledger//deleted", "/dev/vgpu/0/ledger"),
    )


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xff\xfe 1 2", b"1 2 3 4", LINES[:70], bytes(range(256)) * 8])
def test_invalid_lines_are_skipped(data):
    assert len(parse(data).rows) <= 1


def test_mount_list_is_read_completely():
    """The list is longer than what the kernel returns for one read, as on a host with many containers."""
    data = mounts.read("/proc/self/mountinfo")
    assert data == Path("/proc/self/mountinfo").read_bytes()
    assert data.endswith(b"\n")
    root = parse(data).seen_at("/")
    assert root is not None
    assert root.point == "/"


def table(*rows: tuple[int, int, str, str, str]) -> mounts.Table:
    return mounts.Table(tuple(Mount(*row) for row in rows))


ROOT, DEV = (1, 0, "0:9", "/", "/"), (2, 1, "0:5", "/", "/dev")
# columns: the case; mounts in addition to those at / and /dev; a path; expected number of the mount to which the path
# leads
SEEN: list[tuple[str, list[tuple[int, int, str, str, str]], str, int]] = [
    ("no mount at the path", [], "/dev/vgpu/0", 2),
    ("a mount at the path", [(3, 2, "0:7", "/x", "/dev/vgpu/0")], "/dev/vgpu/0", 3),
    ("a path below a mount", [(3, 2, "0:7", "/x", "/dev/vgpu/0")], "/dev/vgpu/0/limits", 3),
    ("a path that only starts like the mount's path", [(3, 2, "0:7", "/x", "/dev/vgpu/0")], "/dev/vgpu/01", 2),
    ("a later mount covers an earlier one", [(3, 1, "0:7", "/x", "/a"), (4, 3, "0:8", "/", "/a")], "/a", 4),
    (
        "a later mount over a parent folder hides the mount",
        [(3, 1, "0:7", "/x", "/b/a"), (4, 1, "0:8", "/", "/b")],
        "/b/a",
        4,
    ),
    (
        "a mount below a mounted parent folder is visible",
        [(4, 1, "0:8", "/", "/b"), (3, 4, "0:7", "/x", "/b/a")],
        "/b/a",
        3,
    ),
    ("a root over the root", [(3, 1, "0:7", "/", "/")], "/b", 3),
]


@pytest.mark.parametrize(("about", "rows", "path", "number"), SEEN, ids=[row[0] for row in SEEN])
def test_mount_that_a_path_leads_to(about, rows, path, number):
    found = table(ROOT, DEV, *rows).seen_at(path)
    assert found is not None
    assert found.ident == number


def test_mounts_below_a_chroot_have_no_root():
    found = table((7, 3, "0:7", "/x", "/dev")).seen_at("/dev/vgpu")
    assert found is not None
    assert found.ident == 7
    assert table((7, 3, "0:7", "/x", "/dev")).seen_at("/etc") is None


# columns: the case; mounts that the program sees; whether the program is in the host's mount namespace; expected
# location of the path as (file system, folder)
PLACES: list[tuple[str, list[tuple[int, int, str, str, str]], bool, Place]] = [
    ("on the host", [ROOT, (2, 1, "0:25", "/", "/run")], True, Place("/p", "0:25", "/vgpu/allocations/a/ro")),
    ("in a pod", [ROOT, (2, 1, "0:25", "/vgpu", "/run/vgpu")], False, Place("/p", "0:25", "/vgpu/allocations/a/ro")),
    ("a pod without this mount", [ROOT], False, Place("/p", "", "")),
    ("on the root of the host", [ROOT], True, Place("/p", "0:9", "/run/vgpu/allocations/a/ro")),
]


@pytest.mark.parametrize(("about", "rows", "own_root", "place"), PLACES, ids=[row[0] for row in PLACES])
def test_location_of_the_nodes_path(about, rows, own_root, place):
    assert place_of(table(*rows), "/p", "/run/vgpu/allocations/a/ro", own_root) == place


# Mount lists in the kernel's format. NODE: mounts of the node. TOP: mounts that every container has. NEW: mounts of
# this version in a container. OLD: mounts of a former version.
NODE = """22 1 8:1 / / rw - ext4 /dev/sda1 rw
23 22 0:25 / {run} rw - tmpfs tmpfs rw
24 23 0:50 / {folder}/rw rw - tmpfs vgpu rw
25 23 8:1 {run}/lib {run}/lib rw - ext4 /dev/sda1 rw
"""
TOP = """40 1 0:99 / / rw - overlay overlay rw
41 40 0:5 / /dev rw - tmpfs tmpfs rw
"""
NEW = """49 41 0:25 /root /dev/vgpu ro - tmpfs tmpfs rw
50 49 8:1 {library} /dev/vgpu/lib ro - ext4 /dev/sda1 rw
51 49 0:25 /allocations/aaaa/ro /dev/vgpu/0 ro - tmpfs tmpfs rw
52 51 0:50 /ledger /dev/vgpu/0/ledger rw - tmpfs vgpu rw
53 51 0:50 /tenant /dev/vgpu/0/tenant rw - tmpfs vgpu rw
54 40 0:25 /allocations/aaaa/ro/ld.so.preload /etc/ld.so.preload ro - tmpfs tmpfs rw
"""
OLD = """50 40 8:1 {library}/libvgpu.so /usr/local/lib/vgpu/libvgpu.so ro - ext4 /dev/sda1 rw
51 40 0:25 /allocations/aaaa/limits /etc/vgpu/limits ro - tmpfs tmpfs rw
52 40 0:50 /ledger /run/vgpu/ledger rw - tmpfs vgpu rw
53 40 0:50 /tenant /run/vgpu/tenant rw - tmpfs vgpu rw
54 40 0:25 /allocations/aaaa/ld.so.preload /etc/ld.so.preload ro - tmpfs tmpfs rw
55 40 0:25 /allocations/aaaa/gpu-{uuid} /run/vgpu/gpu-{uuid} ro - tmpfs tmpfs rw
"""
# A mount that a tenant made; {0} is its path.
EVIL = "0:66 /evil {0} rw - tmpfs tmpfs rw\n"


def without(text: str, point: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if f" {point} " not in line)


def over(parent: int, point: str) -> str:
    return f"60 {parent} " + EVIL.format(point)


MOVED = OLD.replace(" /etc/vgpu/limits ", " /etc/o/limits ")
# Mounts of a version in which each allocation had its own folder at /dev/vgpu.
OWN_ROOT = NEW.replace(" /root /dev", " /allocations/aaaa/root /dev")
OTHER_VERSION = NEW.replace("{library}", "{library}x")
# columns: the case, the container's mounts; expected words of the finding (empty means no finding); whether the mounts
# are those of the old version
CONTAINERS: list[tuple[str, str, str, bool]] = [
    ("as the node mounted them", TOP + NEW, "", False),
    ("another version of the library, as before an upgrade", TOP + OTHER_VERSION, "", False),
    ("a library from another folder", TOP + NEW.replace("{library}", "/data/0.1.0"), "/dev/vgpu/lib", False),
    ("a ledger that was replaced meanwhile", TOP + NEW.replace("/ledger /dev", "/ledger//deleted /dev"), "", False),
    ("a volume at another path", TOP + NEW + over(40, "/data"), "", False),
    ("shared memory", TOP + NEW + over(41, "/dev/shm"), "", False),
    ("a file over the limits", TOP + NEW + over(51, "/dev/vgpu/0/limits"), "at /dev/vgpu/0/limits", False),
    ("a folder over the share", TOP + NEW + over(51, "/dev/vgpu/0"), "at /dev/vgpu/0 ", False),
    ("a folder over /dev/vgpu", TOP + NEW + over(49, "/dev/vgpu"), "at /dev/vgpu ", False),
    (
        "a foreign mount under the product's mount",
        TOP + over(41, "/dev/vgpu") + NEW.replace("49 41 ", "49 60 "),
        "",
        False,
    ),
    ("a root that the node does not have", TOP + OWN_ROOT, "at /dev/vgpu ", False),
    (
        "no root folder at /dev/vgpu",
        TOP + without(NEW, "/dev/vgpu").replace(" 49 ", " 41 "),
        "/dev/vgpu our mount is missing",
        False,
    ),
    ("a file over the preload", TOP + NEW + over(54, "/etc/ld.so.preload"), "at /etc/ld.so.preload", False),
    ("a folder over /etc", TOP + NEW + over(40, "/etc"), "/etc/ld.so.preload our mount is missing", False),
    ("a folder over /dev", TOP + NEW + over(41, "/dev"), "at /dev/vgpu our mount is missing", False),
    ("another GPU's page", TOP + NEW + over(51, "/dev/vgpu/0/gpu-x"), "expected nothing", False),
    ("an additional share", TOP + NEW + over(49, "/dev/vgpu/1"), "expected nothing", False),
    ("no preload", TOP + without(NEW, "/etc/ld.so.preload"), "/etc/ld.so.preload our mount is missing", False),
    ("files of another allocation", TOP + NEW.replace("/aaaa/ro /dev", "/cccc/ro /dev"), "/cccc/ro", False),
    ("mounts of the old version", TOP + OLD, "", True),
    (
        "mounts of the old version on a tmpfs at /run",
        TOP + over(40, "/run") + OLD.replace(" 40 0:50", " 60 0:50"),
        "",
        True,
    ),
    ("mounts of the old version, folder renamed by the container", TOP + MOVED, "", True),
    (
        "mounts of the old version, a file over the limits",
        TOP + OLD + over(51, "/etc/vgpu/limits"),
        "at /etc/vgpu/limits",
        True,
    ),
    (
        "mounts of the old version and a volume next to them",
        TOP + OLD + over(40, "/run/vgpu/x"),
        "expected nothing",
        True,
    ),
    ("no product mount, as below chroot", "", "", False),
    ("below chroot, with a mount of the tenant", over(1, "/dev/vgpu/0"), "at /dev/vgpu/0 ", False),
]


@pytest.fixture
def watched(tmp_path) -> Watched:
    out = Watched(tmp_path)
    run = str(tmp_path)
    out.proc.add("self", mnt="mnt:[1]", pid="pid:[2]")
    (out.proc.root / "self" / "mountinfo").write_text(NODE.format(run=run, folder=out.folder))
    return out


def run(watched: Watched, pid: int, listed: str) -> None:
    """Adds a process of the container that has these mounts and uses 100 MiB of GPU memory."""
    watched.proc.add(pid, group=CONTAINER)
    text = listed.format(library=watched.library_folder, uuid=watched.uuid)
    (watched.proc.root / str(pid) / "mountinfo").write_text(text)
    watched.card.running.setdefault(watched.uuid, {})[pid] = 100 * MIB


@pytest.mark.parametrize(("about", "listed", "said", "old"), CONTAINERS, ids=[row[0] for row in CONTAINERS])
def test_mounts_of_a_container(watched, about, listed, said, old):
    # another process of the same container, by which a hidden process is recognised
    run(watched, 19, TOP + (OLD if old else NEW))
    run(watched, 20, listed)
    descriptors = [watched.charge(pid, 100 * MIB, slot=pid) for pid in (19, 20)]
    found = watched.look(2)
    for descriptor in descriptors:
        os.close(descriptor)
    assert found == ([FOREIGN] if said else [])
    if said:
        (finding,) = watched.found
        assert said in finding.text()
        assert [one.pid for one, _used in finding.suspicion.processes] == [20]
    assert [one.allocation for one in watched.watch.state().old_mounts] == (["aaaa"] if old else [])


# columns: the case, the container's mounts; expected words of the finding ("": none)
OWN = [
    ("as the node mounted them", TOP + OWN_ROOT, ""),
    ("the node's root folder", TOP + NEW, "at /dev/vgpu "),
    ("root of another allocation", TOP + OWN_ROOT.replace("aaaa/root", "cccc/root"), "at /dev/vgpu "),
]


@pytest.mark.parametrize(("about", "listed", "said"), OWN, ids=[row[0] for row in OWN])
def test_mounts_of_an_allocation_with_its_own_root(watched, about, listed, said):
    """The container started before an upgrade."""
    root = watched.folder / "root"
    root.unlink()
    for name in ("lib", "0"):
        (root / name).mkdir(parents=True)
    watched.files.make_share(watched.record)  # as this version does with an existing folder
    run(watched, 20, listed)
    descriptor = watched.charge(20, 100 * MIB, slot=20)
    assert watched.look(2) == ([FOREIGN] if said else [])
    os.close(descriptor)
    assert all(said in one.text() for one in watched.found)


STACKED = "".join(f"{n} {n - 1} " + EVIL.format("/dev/vgpu") for n in range(100, 5100)).replace("100 99 ", "100 49 ", 1)
NEXT = "".join(f"{n} 51 " + EVIL.format(f"/dev/vgpu/0/{n}") for n in range(100, 5100))
ELSEWHERE = "".join(f"{n} {n - 1} " + EVIL.format("/dev") for n in range(100, 5100)).replace("100 99 ", "100 41 ", 1)
# Mounts that a tenant makes in its own user namespace to keep the watcher busy, and words of the finding.
MANY = [
    ("each mount over the one before", STACKED, "5006 mounts"),
    ("mounts next to each other", NEXT, "5006 mounts"),
    ("mounts over a parent folder", ELSEWHERE, "at "),
]


@pytest.mark.parametrize(("about", "more", "said"), MANY, ids=[row[0] for row in MANY])
def test_thousands_of_mounts_are_named_without_following_each(watched, monkeypatch, about, more, said):
    followed = []

    class Counting(dict):
        def get(self, *given):
            followed.append(1)
            return super().get(*given)

    made = mounts.Table.__dict__["_above"].func
    monkeypatch.setattr(mounts.Table, "_above", property(lambda one: one.__dict__.setdefault("a", Counting(made(one)))))
    run(watched, 19, TOP + NEW)
    run(watched, 20, TOP + NEW + more)
    assert sorted(watched.look(2)) == [FOREIGN, NO_SLOT]
    found = next(one for one in watched.found if one.suspicion.reason == FOREIGN)
    assert said in found.text()
    # The stack of mounts is followed once for each mount list, and each poll reads two lists.
    assert len(followed) < 2 * 5006


def test_too_long_mount_list_is_reported_and_read_in_part(watched, monkeypatch):
    monkeypatch.setattr(mounts, "LONGEST", 20_000)
    run(watched, 19, TOP + NEW)
    run(watched, 20, TOP + NEW + "".join(f"{n} 40 " + EVIL.format(f"/data/{n}") for n in range(100, 5100)))
    assert sorted(watched.look(2)) == [FOREIGN, NO_SLOT]
    found = next(one for one in watched.found if one.suspicion.reason == FOREIGN)
    assert "longer than 20000 bytes" in found.text()
    assert [one.pid for one, _used in found.suspicion.processes] == [20]
    assert len(watched.watch._processes.table(20).rows) < 2000


def test_later_mount_is_found_and_removed_mount_ends_the_finding(watched):
    run(watched, 20, TOP + NEW)
    descriptor = watched.charge(20, 100 * MIB)
    listed = watched.proc.root / "20" / "mountinfo"
    before = listed.read_text()
    assert watched.look(3) == []
    listed.write_text(before + over(51, "/dev/vgpu/0/limits"))
    assert watched.look() == []
    assert watched.look() == [FOREIGN]
    listed.write_text(before)
    assert watched.look() == []
    os.close(descriptor)


def test_unchanged_mount_lists_are_not_parsed_or_judged_again(watched, monkeypatch):
    parsed, judged = [], []
    monkeypatch.setattr(mounts, "parse", lambda *given, parse=parse: parsed.append(1) or parse(*given))
    foreign = mounts.foreign
    monkeypatch.setattr(mounts, "foreign", lambda *given, **more: judged.append(1) or foreign(*given, **more))
    for pid in range(20, 30):
        run(watched, pid, TOP + NEW)
    watched.look(3)
    assert (len(parsed), len(judged)) == (2, 1), "expected to parse the lists of node and container once"


def test_foreign_mount_is_ended_and_old_mounts_never(watched):
    watched.mode = watch.END
    run(watched, 20, TOP + OLD)
    descriptor = watched.charge(20, 100 * MIB)
    assert watched.look(4) == []
    assert watched.ender.asked == []
    (watched.proc.root / "20" / "mountinfo").open("a").write(over(51, "/etc/vgpu/limits"))
    watched.look(2)
    assert watched.ender.asked == [20]
    os.close(descriptor)


def test_old_mounts_are_reported_until_the_container_restarts(watched):
    run(watched, 20, TOP + OLD)
    watched.look()
    watched.card.running.clear()
    watched.look(3)
    assert [one.allocation for one in watched.watch.state().old_mounts] == ["aaaa"], (
        "the entry stays while no process uses the GPU"
    )
    run(watched, 21, TOP + NEW)
    watched.look()
    assert watched.watch.state().old_mounts == ()
    watched.card.running[watched.uuid] = {20: 1}
    watched.look()
    watched.kind = ""  # the pod's record is removed
    watched.card.running.clear()
    watched.look()
    assert watched.watch.state().old_mounts == ()


def test_node_without_a_mount_list_reports_no_foreign_mount(watched):
    (watched.proc.root / "self" / "mountinfo").unlink()
    run(watched, 20, TOP + NEW + over(51, "/dev/vgpu/0/limits"))
    assert watched.look(3) == [NO_SLOT]


# Makes the product's mounts in a new mount namespace as in a container; with "foreign", also a tenant's mount over one.
LAID_OUT = """
set -e
mount -t tmpfs t "$1/dev"; mkdir -p "$1/dev/vgpu/0" "$1/dev/vgpu/lib"
mount --bind "$2/ro" "$1/dev/vgpu/0"; mount --bind "$2/rw/ledger" "$1/dev/vgpu/0/ledger"
if [ "$3" = foreign ]; then touch "$1/evil"; mount --bind "$1/evil" "$1/dev/vgpu/0/limits"; fi
exec "$4" -c 'print("there", flush=True); import time; time.sleep(60)'
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
@pytest.mark.parametrize("what", ["honest", "foreign"])
def test_real_mounts_of_another_namespace_are_compared(tmp_path, what):
    """The kernel's mount list of another namespace names the node's path as the source of a bind mount."""
    folder, inside = tmp_path / "a b", tmp_path / "root"
    for one in (folder / "ro", folder / "rw", inside / "dev"):
        one.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "t", str(folder / "rw")], check=True)
    try:
        for name in ("ro/limits", "ro/ledger", "rw/ledger"):
            (folder / name).touch()
        words = ["sh", str(inside), str(folder), what, sys.executable]
        with subprocess.Popen(["unshare", "--mount", "sh", "-c", LAID_OUT, *words], stdout=subprocess.PIPE) as one:
            try:
                assert one.stdout is not None
                assert one.stdout.readline() == b"there\n"
                processes = Processes()
                node, found = processes.table("self"), processes.table(one.pid)
                dev = f"{inside}/dev/vgpu"
                listed = ((f"{dev}/0", "ro"), (f"{dev}/0/ledger", "rw/ledger"))
                places: list[Any] = [place_of(node, point, f"{folder}/{name}") for point, name in listed]
                said = mounts.foreign(found, places, (dev,), True)
                assert len(said) == (what == "foreign")
                assert all(f"at {dev}/0/limits the container has" in text for text in said)
            finally:
                one.kill()
    finally:
        subprocess.run(["umount", str(folder / "rw")], check=True)
