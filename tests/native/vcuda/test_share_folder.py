# SPDX-License-Identifier: Apache-2.0
"""What looks like the node's files in a container and is not: no context, and one line that says why. And the ledger of
a library that is preloaded by hand, in a folder that all users write.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import layouts
import pytest
from conftest import LIMIT, MIB, OK, PRELOAD, Host
from test_files import FORCED, assert_closed, container

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")


def generous(host: Host, path: Path, allocation: str) -> Path:
    """Limits that a tenant wrote: the whole card."""
    devices = [{"uuid": uuid, "memory_bytes": 16000 * MIB} for uuid in host.uuids]
    path.write_bytes(layouts.pack_limits({"allocation": allocation, "devices": devices}))
    return path


LIMITS = "/dev/vgpu/0/limits"
READ_ONLY = "mount -o remount,bind,ro /dev/vgpu/0"


ALL = ("umount /dev/vgpu/0/ledger", "umount /dev/vgpu/0", "umount /dev/vgpu")
BELOW = ALL[:2]
NOT_MOUNTED = "/dev/vgpu is none that the node mounted"
# As a volume of a pod at /dev/vgpu, into which another container writes: the folder is there, and no mount.
VOLUME = (*ALL, "mount --bind {shown} /dev/vgpu", "mount -o remount,bind,ro /dev/vgpu")

# {evil}: a folder of the tenant's with limits for the whole card; {shown}: with such a folder in it, named 0.
FORGED = [
    ("no mount at all", (*ALL, "mkdir /dev/vgpu/0", "cp {evil}/limits /dev/vgpu/0/limits"), NOT_MOUNTED),
    ("a link", (*ALL, "rmdir /dev/vgpu", "ln -s {shown} /dev/vgpu"), "the folder /dev/vgpu cannot be opened"),
    ("an empty root", BELOW, "/dev/vgpu/0 is a plain folder"),
    ("no folder", (*ALL,), "/dev/vgpu/0 cannot be opened: No such file"),
    ("a writable root", ("mount -o remount,bind,rw /dev/vgpu",), NOT_MOUNTED),
    ("a plain folder in a read-only volume", VOLUME, "/dev/vgpu/0 is a plain folder"),
    (
        "a link in a read-only volume",
        ("mv {shown}/0 {shown}/1", "ln -s 1 {shown}/0", *VOLUME),
        "/dev/vgpu/0 cannot be opened",
    ),
    ("a writable folder", ("mount --bind {evil} /dev/vgpu/0",), "/dev/vgpu/0 is mounted writable"),
    (
        "a file of another file system on the limits",
        ("mount -t tmpfs none {room}", "cp {evil}/limits {room}/limits", "mount --bind {room}/limits " + LIMITS),
        "another file is mounted on it",
    ),
    (
        "a file of the same file system on the limits",
        ("mount --bind {evil}/limits " + LIMITS,),
        "another file is mounted",
    ),
    (
        "a link in a mounted folder",
        ("ln -s {evil}/limits {room}/limits", "mount --bind {room} /dev/vgpu/0", READ_ONLY),
        "it cannot be opened",
    ),
]


@pytest.mark.parametrize(("about", "commands", "reason"), FORGED, ids=[one[0] for one in FORGED])
def test_forged_limits_fail_closed_with_a_line(host: Host, about: str, commands: tuple, reason: str) -> None:
    places = {name: host.folder / name for name in ("evil", "room", "shown")}
    for one in places.values():
        one.mkdir()
    (places["shown"] / "0").mkdir()
    for folder in (places["evil"], places["shown"] / "0"):
        generous(host, folder / "limits", "test")
    then = tuple(one.format(**places) for one in commands)
    puppet = assert_closed(host, wrapper=container(host, PRELOAD, then=then), **FORCED)
    lines = [line for line in puppet.errors().splitlines() if "no context is created" in line]
    assert lines and all("/dev/vgpu/0/limits: " in line and re.search(reason, line) for line in lines), puppet.errors()
    assert host.charged() == 0


@pytest.mark.parametrize("allocation", ["other", ""])
def test_limits_of_another_allocation_than_the_ledger(host: Host, allocation: str) -> None:
    """As a folder that somebody mounted, with everything right about it."""
    generous(host, host.limits, allocation)
    puppet = assert_closed(host, wrapper=container(host, PRELOAD), **FORCED)
    lines = [line for line in puppet.errors().splitlines() if "no context is created" in line]
    assert lines and all(line.split("ledger ")[-1].startswith("/dev/vgpu/0/ledger: it is of another") for line in lines)


def test_outside_a_container_a_plain_folder_will_do(host: Host) -> None:
    """A library preloaded by hand, with limits at the usual place: nobody has mounted anything, and it is no tenant."""
    plain = (*ALL, "mkdir /dev/vgpu/0", f"cp {host.limits} /dev/vgpu/0/limits")
    puppet = host.puppet(wrapper=container(host, "/nothing/of/ours.so", then=plain), limits=False).start()
    assert puppet.say("info")[2] == LIMIT


# --- the ledger in /tmp of a library that is preloaded by hand -----------------------------------------------------


# Nobody's on any machine that tests run on.
USER = 54321
LEDGER = Path(f"/tmp/vgpu-ledger-{USER}")
# May read the files of the test, which are root's; no more.
AS_USER = ("setpriv", f"--reuid={USER}", "--clear-groups", "--inh-caps=+dac_override", "--ambient-caps=+dac_override")
CONTENTS = {"none": None, "empty": b"", "whole": layouts.pack_ledger([], "")}


@pytest.fixture
def by_hand(host: Host):
    """Options of a puppet of that user whose environment limits it and names no files."""
    LEDGER.unlink(missing_ok=True)
    yield {"wrapper": AS_USER, "limits": False, "CUDA_DEVICE_MEMORY_LIMIT": "2g", "CUDA_DEVICE_MEMORY_SHARED_CACHE": ""}
    LEDGER.unlink(missing_ok=True)


@pytest.mark.parametrize("content", CONTENTS)
def test_the_ledger_of_a_user(host: Host, by_hand: dict, content: str) -> None:
    if CONTENTS[content] is not None:
        LEDGER.write_bytes(CONTENTS[content])
        os.chown(LEDGER, USER, USER)
    puppet = host.puppet(**by_hand).start()
    assert puppet.say("info") == [OK, 2048 * MIB - host.on_card(), 2048 * MIB]
    found = LEDGER.stat()
    assert (found.st_uid, found.st_size) == (USER, layouts.LEDGER_FILE_SIZE)
    # One that the library made is nobody else's to cut short.
    assert content != "none" or found.st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", ["empty", "whole"])
def test_the_ledger_of_another_user_fails_closed_with_a_line(host: Host, by_hand: dict, content: str) -> None:
    LEDGER.write_bytes(CONTENTS[content])
    LEDGER.chmod(0o666)
    puppet = assert_closed(host, **by_hand)
    lines = [line for line in puppet.errors().splitlines() if "no context is created" in line]
    assert lines and all(f"ledger {LEDGER}: it belongs to another user" in line for line in lines)
    assert LEDGER.read_bytes() == CONTENTS[content]
