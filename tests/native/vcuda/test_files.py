# SPDX-License-Identifier: Apache-2.0
"""If the limits file or the ledger (the container's record of its memory) is invalid, the library allows no context and
logs the reason.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import layouts
import pytest
from conftest import LIMIT, MIB, NOT_PERMITTED, OK, OOM, PRELOAD, Host


def set_field(path: Path, name: str, value: int, crc: bool = True) -> None:
    data = bytearray(path.read_bytes())
    offset, fmt = layouts.fields.LIMITS_FIELDS[name]
    if name == "devices":
        offset, fmt = offset + layouts.fields.LIMITS_DEVICE_FIELDS["sm_percent"][0], "I"
    struct.pack_into("<" + fmt, data, offset, value)
    if crc and name != "crc32":
        struct.pack_into("<I", data, layouts.fields.LIMITS_FIELDS["crc32"][0], layouts.limits_crc(data))
    path.write_bytes(data)


# Keys: faults. Values: functions that damage a valid limits file in this way. With each fault no context is created.
BAD_LIMITS: dict = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated in the header": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "truncated in the devices": lambda path: path.write_bytes(path.read_bytes()[:200]),
    "content of another file type": lambda path: path.write_bytes(b"#!/bin/sh\n" * 500),
    "content changed without a new CRC": lambda path: set_field(path, "priority", 0, crc=False),
    "CRC changed": lambda path: set_field(path, "crc32", 1),
    "odd sequence": lambda path: set_field(path, "sequence", 3),
    "requires a newer reader": lambda path: set_field(path, "min_reader", 2),
    "version 0": lambda path: set_field(path, "version", 0),
    "too many devices": lambda path: set_field(path, "device_count", 17),
    "devices past the end": lambda path: set_field(path, "device_offset", 4090),
    "unknown policy": lambda path: set_field(path, "core_policy", 7),
    "more than all SMs": lambda path: set_field(path, "devices", 101),
    "a folder instead of the file": lambda path: (path.unlink(), path.mkdir()),
    "deny flag set": lambda path: path.write_bytes(
        layouts.pack_limits(dict(plain(layouts.parse_limits(path.read_bytes())), deny=True))
    ),
}


def plain(limits: dict) -> dict:
    return {key: value for key, value in limits.items() if key not in ("version", "min_reader")}


def assert_closed(host: Host, **options: object) -> None:
    puppet = host.puppet(**options)  # type: ignore[arg-type]
    assert puppet.result("init") == OK
    for verb, arguments in (("ctx", (0,)), ("retain", (0,)), ("create", (MIB, 0))):
        assert puppet.refused(verb, *arguments) == NOT_PERMITTED, verb
    assert host.on_card() == 0
    return puppet


@pytest.mark.parametrize("fault", BAD_LIMITS)
def test_bad_limits_allow_no_context_and_are_logged(host: Host, fault: str) -> None:
    good = host.limits.read_bytes()
    BAD_LIMITS[fault](host.limits)
    puppet = assert_closed(host)
    lines = [line for line in puppet.errors().splitlines() if "no context" in line]
    assert lines and all("libvgpu.so" in line and str(host.limits) in line for line in lines)
    # A repaired file takes effect without a restart of the program.
    if host.limits.is_dir():
        host.limits.rmdir()
    if (
        fault == "deny flag set"
    ):  # The program has mapped this valid file, so the test changes it in place, as the node's software does.
        layouts.rewrite_limits(str(host.limits), plain(layouts.parse_limits(good)))
    else:
        host.limits.write_bytes(good)
    puppet.get("ctx", 0)


def test_limits_of_a_later_version_are_enforced(host: Host) -> None:
    set_field(host.limits, "version", 2)
    puppet = host.puppet().start()
    assert puppet.say("info")[2] == LIMIT


def test_half_written_limits_keep_the_last_limits(host: Host) -> None:
    puppet = host.puppet().start()
    with host.limits.open("r+b") as limits:
        limits.seek(layouts.fields.LIMITS_FIELDS["sequence"][0])
        limits.write(struct.pack("<I", 1))
    assert puppet.refused("alloc", LIMIT) == OOM
    puppet.get("alloc", MIB)
    assert puppet.refused("ctx", 0) == NOT_PERMITTED
    assert "torn" in puppet.errors()


# Keys: faults. Values: functions that damage the ledger in this way. With each fault no context is created.
BAD_LEDGERS: dict = {
    "content of another file type": lambda path: path.write_bytes(b"not a ledger" * 40000),
    "truncated": lambda path: os.truncate(path, 4096 + 320),
    "later version": lambda path: patch(path, layouts.fields.LEDGER_FIELDS["min_reader"][0], 9),
    "different slot count": lambda path: patch(path, layouts.fields.LEDGER_FIELDS["slot_count"][0], 2),
    "different slot size": lambda path: patch(path, layouts.fields.LEDGER_FIELDS["slot_size"][0], 1),
    "a folder instead of the file": lambda path: (path.unlink(), path.mkdir()),
    "a symbolic link instead of the file": lambda path: (
        path.rename(path.with_suffix(".real")),
        path.symlink_to(path.with_suffix(".real")),
    ),
}


def patch(path: Path, offset: int, value: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(struct.pack("<I", value))


@pytest.mark.parametrize("fault", BAD_LEDGERS)
def test_bad_ledgers_allow_no_context_and_are_logged(host: Host, fault: str) -> None:
    BAD_LEDGERS[fault](host.ledger)
    puppet = assert_closed(host)
    assert any(str(host.ledger) in line and "no context" in line for line in puppet.errors().splitlines())


def test_replaced_ledger_drops_no_charge_of_a_live_process(host: Host) -> None:
    """Each process of the container holds a lock in the ledger while it lives. If the ledger is replaced by a new file,
    the locks of the new file must not decide which users of the old file are alive."""
    first, second = host.puppet().start(), host.puppet().start()
    first.get("alloc", 2500 * MIB)
    held = host.on_card()
    host.ledger.rename(host.folder / "old")
    host.ledger.write_bytes(layouts.pack_ledger(host.uuids, "test"))
    assert second.refused("alloc", LIMIT - held + 1) == OOM
    assert host.on_card() == held
    second.get("alloc", LIMIT - held)
    assert second.say("info") == [OK, 0, LIMIT]
    assert "another file" in second.errors()


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"\0" * layouts.fields.LEDGER_FILE_SIZE])
def test_empty_ledger_is_initialised(host: Host, content: bytes) -> None:
    host.ledger.write_bytes(content)
    puppet = host.puppet().start()
    assert host.charged() == host.on_card() > 0
    assert layouts.parse_ledger(host.ledger.read_bytes())["devices"] == host.uuids
    puppet.end()
    assert host.charged() == 0


def in_namespace(*commands: str) -> tuple:
    """Returns words to put before a command line. They create a mount namespace and run first ``commands`` there, then
    the command line."""
    script = "set -e; mount --make-rprivate /; " + "; ".join(commands) + '; exec "$@"'
    return ("unshare", "--mount", "sh", "-c", script, "sh")


def test_full_file_system_allows_no_context(host: Host) -> None:
    room = host.folder / "room"
    room.mkdir()
    wrapper = in_namespace(
        f"mount -t tmpfs -o size=64k none {room}", f"head -c 60000 /dev/zero > {room}/filler", f": > {room}/ledger"
    )
    puppet = assert_closed(host, wrapper=wrapper, CUDA_DEVICE_MEMORY_SHARED_CACHE=str(room / "ledger"))
    assert "No space left" in puppet.errors()


def test_read_only_ledger_file_allows_no_context(host: Host) -> None:
    wrapper = in_namespace(f"mount --bind {host.ledger} {host.ledger}", f"mount -o remount,ro,bind {host.ledger}")
    puppet = assert_closed(host, wrapper=wrapper)
    assert "Read-only" in puppet.errors()


# --- in a container: ld.so.preload loads the library -------------------------------------------------------------


def container(
    host: Host, preload: str, limits: bool = True, ledger: bool = True, folder: str = "root", then: tuple = ()
) -> tuple:
    """Returns words to put before a command line, which then runs in a mount namespace with a container's
    /etc/ld.so.preload and /dev/vgpu. ``then`` are shell commands that a tenant runs there first."""
    root, share = host.folder / folder, host.folder / folder / "share"
    for one in ("etc", "dev", "share", "above/0"):
        (root / one).mkdir(parents=True)
    commands = [
        # The overlay makes /etc writable here, so that ld.so.preload can be created without changing the host.
        f"mount -t tmpfs none {root}/etc",
        f"mkdir {root}/etc/up {root}/etc/work",
        f"mount -t overlay none -o lowerdir=/etc,upperdir={root}/etc/up,workdir={root}/etc/work /etc",
        f"printf '%s\\n' '{preload}' > /etc/ld.so.preload",
        f"mount -t tmpfs none {root}/dev",
        f"for one in null zero urandom; do : > {root}/dev/$one; mount --bind /dev/$one {root}/dev/$one; done",
        f"mkdir -p {root}/dev/shm {root}/dev/vgpu",
        f"mount --bind {root}/above {root}/dev/vgpu",
        f"mount -o remount,bind,ro {root}/dev/vgpu",
        f": > {share}/tenant",
    ]
    if limits:
        commands += [f"ln {host.limits} {share}/limits"]
    if ledger:
        commands += [f": > {share}/ledger"]
    commands += [f"mount --bind {share} {root}/dev/vgpu/0", f"mount -o remount,bind,ro {root}/dev/vgpu/0"]
    if ledger:
        commands += [f"mount --bind {host.ledger} {root}/dev/vgpu/0/ledger"]
    commands += [f"mount --move {root}/dev /dev"]
    return in_namespace(*commands, *then)


FORCED = {"preload": False, "limits": False}


def test_in_a_container_the_mounted_files_set_the_limits(host: Host) -> None:
    puppet = host.puppet(wrapper=container(host, PRELOAD), **FORCED).start()
    assert puppet.say("info") == [OK, LIMIT - host.on_card(), LIMIT]
    assert host.charged() == host.on_card() > 0
    assert puppet.refused("alloc", LIMIT) == OOM


def test_in_a_container_variables_name_no_other_files(host: Host) -> None:
    """The library ignores limits files and ledgers that a tenant names, and higher limits that a tenant sets in the
    environment."""
    own = host.folder / "own"
    own.mkdir()
    generous = layouts.pack_limits(
        {"allocation": "own", "devices": [{"uuid": uuid, "memory_bytes": 16000 * MIB} for uuid in host.uuids]}
    )
    (own / "limits").write_bytes(generous)
    puppet = host.puppet(
        wrapper=container(host, PRELOAD),
        **FORCED,
        VGPU_LIMITS_FILE=str(own / "limits"),
        CUDA_DEVICE_MEMORY_SHARED_CACHE=str(own / "ledger"),
        CUDA_DEVICE_MEMORY_LIMIT="15g",
        CUDA_DISABLE_CONTROL="true",
    ).start()
    assert puppet.say("info") == [OK, LIMIT - host.on_card(), LIMIT]
    assert host.charged() == host.on_card()
    assert not (own / "ledger").exists()


def test_in_a_container_a_process_without_descriptors_gets_no_context(host: Host) -> None:
    """The process has no descriptors left, so the library cannot open /etc/ld.so.preload. It must not conclude that the
    file is missing."""
    own = host.folder / "own"
    own.mkdir()
    generous = [{"uuid": uuid, "memory_bytes": 16000 * MIB} for uuid in host.uuids]
    (own / "limits").write_bytes(layouts.pack_limits({"allocation": "own", "devices": generous}))
    wrapper = container(host, PRELOAD)
    variables = {"VGPU_LIMITS_FILE": str(own / "limits"), "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(own / "ledger")}
    puppet = host.puppet(wrapper=wrapper, **FORCED, **variables)
    assert puppet.result("init") == OK
    assert puppet.result("nofile 3") == OK
    assert puppet.refused("ctx", 0) == NOT_PERMITTED
    assert puppet.result("nofile 256") == OK
    puppet.get("ctx", 0)
    assert puppet.say("info") == [OK, LIMIT - host.on_card(), LIMIT]
    assert host.charged() == host.on_card() > 0
    assert not (own / "ledger").exists()


@pytest.mark.parametrize("missing", ["limits", "ledger"])
def test_in_a_container_a_missing_file_allows_no_context(host: Host, missing: str) -> None:
    puppet = assert_closed(host, wrapper=container(host, PRELOAD, **{missing: False}), **FORCED)
    assert any(f"/dev/vgpu/0/{missing}" in line for line in puppet.errors().splitlines())


def test_in_a_container_a_live_change_of_the_limits_takes_effect(host: Host) -> None:
    puppet = host.puppet(wrapper=container(host, PRELOAD), **FORCED).start()
    changed = plain(layouts.parse_limits(host.limits.read_bytes()))
    for device in changed["devices"]:
        device["memory_bytes"] = 2048 * MIB
    layouts.rewrite_limits(str(host.limits), changed)
    assert puppet.say("info")[2] == 2048 * MIB
    assert puppet.refused("alloc", 2048 * MIB) == OOM


def test_without_limits_and_preload_file_the_library_does_nothing(host: Host) -> None:
    puppet = host.puppet(limits=False).start()
    puppet.get("alloc", LIMIT + MIB)
    assert host.charged() == 0
    assert puppet.errors() == ""
