# SPDX-License-Identifier: Apache-2.0
"""Tests which installed versions of the library are in use and must not be removed. Memory maps and mounts of processes
and the records of the device plugin show this. /proc is simulated, except for one test with a real mount.
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Host
from ansible_collections.vgpu.fleet.plugins.module_utils.library import users as library_users
from doubles.host import write

ROOT = "/usr/local/lib/vgpu"
# a line of /proc/PID/maps, and a line of /proc/PID/mountinfo
MAPS = "7f00-7f10 r-xp 00000000 {device} {inode}  {path}\n"
MOUNT = "700 690 0:50 {place} {point} ro,relatime - overlay overlay rw\n"


@pytest.fixture
def host(tmp_path):
    for version in ("1", "2"):
        write(tmp_path, f"{ROOT}/{version}/libvgpu.so", version)
    return Host(str(tmp_path))


def process(folder, pid, maps="", mounts="", namespace=None):
    write(folder, f"/proc/{pid}/maps", maps)
    write(folder, f"/proc/{pid}/mountinfo", mounts)
    (folder / f"proc/{pid}/ns").mkdir()
    (folder / f"proc/{pid}/ns/mnt").symlink_to(namespace or f"mnt:[{pid}]")


def device(path):
    status = os.stat(path)
    return {"device": f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", "inode": status.st_ino}


def test_version_without_a_user_is_unused(host, tmp_path):
    process(tmp_path, 7, MAPS.format(device="fd:01", inode=4711, path="/usr/lib/libc.so.6"))
    assert library_users.used(host, ROOT, ["1", "2"]) == []


# In a container, the maps show the path of the mount, which has no version in it. So the inode decides.
def test_a_mapped_file_is_known_by_its_inode(host, tmp_path):
    where = device(tmp_path / "usr/local/lib/vgpu/1/libvgpu.so")
    process(tmp_path, 7, MAPS.format(path=f"{ROOT}/libvgpu.so", **where))
    assert library_users.used(host, ROOT, ["1", "2"]) == ["1"]


def test_a_mapped_file_is_known_by_its_path(host, tmp_path):
    process(tmp_path, 7, MAPS.format(device="00:99", inode=1, path=f"{ROOT}/2/vgpu-arbiter (deleted)"))
    assert library_users.used(host, ROOT, ["1", "2"]) == ["2"]


@pytest.mark.parametrize("place", [f"{ROOT}/1", "/lib/vgpu/1", "/1", f"{ROOT}/1/libvgpu.so", "/1/libvgpu.so"])
def test_mount_is_recognised_by_the_end_of_its_path(host, tmp_path, place):
    """Containers mount the folder of a version; older releases of this collection mounted only the file. The path in
    mountinfo may be relative to the file system, so only its end is compared."""
    process(tmp_path, 7, mounts=MOUNT.format(place=place, point="/dev/vgpu/lib"))
    assert library_users.used(host, ROOT, ["1", "2"]) == ["1"]


def test_mount_of_another_file_does_not_count(host, tmp_path):
    process(tmp_path, 7, mounts=MOUNT.format(place=f"{ROOT}/11/libvgpu.so.old", point="/x"))
    assert library_users.used(host, ROOT, ["1", "2"]) == []


@pytest.mark.parametrize("asked", [ROOT, "/srv/vgpu"])
def test_a_root_behind_a_link_is_the_same_root(tmp_path, asked):
    """If the library root is a symbolic link, the kernel reports the folder that it leads to, while the records of the
    device plugin may have either path. Both must be found."""
    for version in ("1", "2", "3"):
        write(tmp_path, f"/srv/vgpu/{version}/libvgpu.so", version)
    (tmp_path / "usr/local/lib").mkdir(parents=True)
    (tmp_path / ROOT.lstrip("/")).symlink_to(tmp_path / "srv/vgpu")
    process(tmp_path, 7, MAPS.format(device="00:99", inode=1, path="/srv/vgpu/2/vgpu-arbiter"))
    write(tmp_path, library_users.RECORDS, json.dumps({"allocations": [{"library": "/srv/vgpu/1"}]}))
    assert library_users.used(Host(str(tmp_path)), asked, ["1", "2", "3"]) == ["1", "2"]


# columns: text of the device plugin's records; expected versions in use. If the text is unreadable, every version may
# be in use.
RECORDS = [
    (json.dumps({"version": 1, "allocations": [{"id": "a", "library": f"{ROOT}/2"}]}), ["2"]),
    (json.dumps({"version": 1, "allocations": [{"id": "a", "library": ""}]}), []),
    (json.dumps({"version": 1, "allocations": [{"id": "a", "library": "/elsewhere/2"}]}), []),
    (json.dumps({"version": 1, "allocations": []}), []),
    ("torn {", ["1", "2"]),
    ("{}", ["1", "2"]),
    ("", ["1", "2"]),
]


@pytest.mark.parametrize(("text", "versions"), RECORDS)
def test_versions_in_the_records_of_the_plugin_are_used(host, tmp_path, text, versions):
    write(tmp_path, library_users.RECORDS, text)
    assert library_users.used(host, ROOT, ["1", "2"]) == versions


def test_mount_in_another_mount_namespace_is_found(tmp_path):
    root = tmp_path / "lib"
    write(root, "1/libvgpu.so", "one")
    write(root, "2/libvgpu.so", "two")
    (tmp_path / "point").touch()
    script = f"mount --bind {root}/1/libvgpu.so {tmp_path}/point && echo there && read wait"
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        if holder.stdout.readline() != "there\n":
            pytest.skip("this machine refuses new mount namespaces")
        assert library_users.used(Host(), str(root), ["1", "2"]) == ["1"]
        holder.communicate("go\n")
    assert library_users.used(Host(), str(root), ["1", "2"]) == []
