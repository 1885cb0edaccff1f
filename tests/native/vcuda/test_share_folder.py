# SPDX-License-Identifier: Apache-2.0
"""The node mounts a container's limits file and its ledger, the record of its GPU memory, at /dev/vgpu. If a tenant
forges files there, the library allows no context and logs the reason.

In further tests a user preloads the library by hand, outside a container; its ledger is then in /tmp."""

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
    """Writes a limits file that permits the whole card, as a tenant could. Returns its path."""
    devices = [{"uuid": uuid, "memory_bytes": 16000 * MIB} for uuid in host.uuids]
    path.write_bytes(layouts.pack_limits({"allocation": allocation, "devices": devices}))
    return path


LIMITS = "/dev/vgpu/0/limits"
READ_ONLY = "mount -o remount,bind,ro /dev/vgpu/0"


ALL = ("umount /dev/vgpu/0/ledger", "umount /dev/vgpu/0", "umount /dev/vgpu")
BELOW = ALL[:2]
NOT_MOUNTED = "/dev/vgpu is none that the node mounted"
# The tenant mounts a pod volume, which another container can write, at /dev/vgpu. The folder 0 exists there, but is not
# a mount.
VOLUME = (*ALL, "mount --bind {shown} /dev/vgpu", "mount -o remount,bind,ro /dev/vgpu")

# In the commands, {evil} is a tenant's folder with limits for the whole card, and {shown} is a folder that contains
# such a folder with the name 0. Columns: the case; the tenant's commands; the expected log text.
FORGED = [
    ("no mount at /dev/vgpu", (*ALL, "mkdir /dev/vgpu/0", "cp {evil}/limits /dev/vgpu/0/limits"), NOT_MOUNTED),
    (
        "symbolic link at /dev/vgpu",
        (*ALL, "rmdir /dev/vgpu", "ln -s {shown} /dev/vgpu"),
        "the folder /dev/vgpu cannot be opened",
    ),
    ("plain folder below the root mount", BELOW, "/dev/vgpu/0 is a plain folder"),
    ("missing folder", (*ALL,), "/dev/vgpu/0 cannot be opened: No such file"),
    ("writable root mount", ("mount -o remount,bind,rw /dev/vgpu",), NOT_MOUNTED),
    ("a plain folder in a read-only volume", VOLUME, "/dev/vgpu/0 is a plain folder"),
    (
        "a link in a read-only volume",
        ("mv {shown}/0 {shown}/1", "ln -s 1 {shown}/0", *VOLUME),
        "/dev/vgpu/0 cannot be opened",
    ),
    ("writable share folder", ("mount --bind {evil} /dev/vgpu/0",), "/dev/vgpu/0 is mounted writable"),
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
def test_forged_limits_allow_no_context_and_are_logged(host: Host, about: str, commands: tuple, reason: str) -> None:
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
def test_limits_of_another_allocation_than_the_ledger_allow_no_context(host: Host, allocation: str) -> None:
    """The mounted limits file is valid, but belongs to another allocation than the ledger."""
    generous(host, host.limits, allocation)
    puppet = assert_closed(host, wrapper=container(host, PRELOAD), **FORCED)
    lines = [line for line in puppet.errors().splitlines() if "no context is created" in line]
    assert lines and all(line.split("ledger ")[-1].startswith("/dev/vgpu/0/ledger: it is of another") for line in lines)


def test_outside_a_container_a_plain_folder_is_accepted(host: Host) -> None:
    """If a user preloads the library outside a container, it accepts limits in a plain folder that is no mount."""
    plain = (*ALL, "mkdir /dev/vgpu/0", f"cp {host.limits} /dev/vgpu/0/limits")
    puppet = host.puppet(wrapper=container(host, "/nothing/of/ours.so", then=plain), limits=False).start()
    assert puppet.say("info")[2] == LIMIT


# --- the ledger in /tmp of a library that is preloaded by hand -----------------------------------------------------


# A user ID that no test machine uses.
USER = 54321
LEDGER = Path(f"/tmp/vgpu-ledger-{USER}")
# Runs a program as USER. The program keeps the capability to read the test's files, which belong to root.
AS_USER = ("setpriv", f"--reuid={USER}", "--clear-groups", "--inh-caps=+dac_override", "--ambient-caps=+dac_override")
CONTENTS = {"no ledger": None, "empty ledger": b"", "valid ledger": layouts.pack_ledger([], "")}


@pytest.fixture
def by_hand(host: Host):
    """Yields options for a puppet program that runs as USER. Its environment sets a limit, and names neither a limits
    file nor a ledger."""
    LEDGER.unlink(missing_ok=True)
    yield {"wrapper": AS_USER, "limits": False, "CUDA_DEVICE_MEMORY_LIMIT": "2g", "CUDA_DEVICE_MEMORY_SHARED_CACHE": ""}
    LEDGER.unlink(missing_ok=True)


@pytest.mark.parametrize("content", CONTENTS)
def test_library_creates_or_uses_the_users_ledger(host: Host, by_hand: dict, content: str) -> None:
    if CONTENTS[content] is not None:
        LEDGER.write_bytes(CONTENTS[content])
        os.chown(LEDGER, USER, USER)
    puppet = host.puppet(**by_hand).start()
    assert puppet.say("info") == [OK, 2048 * MIB - host.on_card(), 2048 * MIB]
    found = LEDGER.stat()
    assert (found.st_uid, found.st_size) == (USER, layouts.LEDGER_FILE_SIZE)
    # A ledger that the library created must not be writable by other users.
    assert content != "no ledger" or found.st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", ["empty ledger", "valid ledger"])
def test_ledger_of_another_user_allows_no_context(host: Host, by_hand: dict, content: str) -> None:
    LEDGER.write_bytes(CONTENTS[content])
    LEDGER.chmod(0o666)
    puppet = assert_closed(host, **by_hand)
    lines = [line for line in puppet.errors().splitlines() if "no context is created" in line]
    assert lines and all(f"ledger {LEDGER}: it belongs to another user" in line for line in lines)
    assert LEDGER.read_bytes() == CONTENTS[content]
