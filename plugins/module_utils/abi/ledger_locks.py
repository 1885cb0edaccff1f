# SPDX-License-Identifier: Apache-2.0
"""Finds which processes of a ledger (the file that records the GPU memory of a container's processes) are alive.

Each process that has a slot, or has imported memory of a slot, holds a kernel lock on the file. Any descriptor of the
file finds the lock, in every pid namespace.
"""

from __future__ import annotations

import fcntl
import os
import struct

from .fields import LEDGER_ALIVE_BASE, LEDGER_FIELDS, LEDGER_SLOTS, get_field

# Value from <fcntl.h>; the module fcntl has no name for it before Python 3.9.
F_OFD_GETLK = 36


def is_locked(fd: int, first: int, count: int) -> bool:
    """Returns whether a lock that was taken through another descriptor than ``fd`` covers any of these bytes."""
    # F_WRLCK also works on a read-only descriptor, because GETLK only queries.
    probe = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
    answer = fcntl.fcntl(fd, F_OFD_GETLK, probe)
    return bool(struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK)


def slot_is_alive(fd: int, slot: int) -> bool:
    """Returns whether a process holds this slot of the open ledger. The kernel's list of locks decides, so the result
    is valid in every pid namespace.
    """
    return is_locked(fd, LEDGER_ALIVE_BASE + slot, 1)


def any_slot_is_alive(fd: int) -> bool:
    """Returns whether any process holds a slot of the open ledger."""
    return is_locked(fd, LEDGER_ALIVE_BASE, LEDGER_SLOTS)


def handle_is_open(fd: int, head: bytes) -> bool:
    """Returns whether any process has an open descriptor for exported memory of this ledger. Returns True if
    /proc/locks cannot be read. shareable.c makes the same test in the library and documents the byte ranges. It opens
    the file with these locks by the file's name in the ledger. A tenant could write any name into the ledger, so this
    function reads the kernel's list of locks instead.
    """
    if not get_field(head, 0, len(head), LEDGER_FIELDS, "shareable").startswith(b"/"):
        return False
    inode = get_field(head, 0, len(head), LEDGER_FIELDS, "shareable_file")[1]
    status = os.fstat(fd)
    mixed = ((status.st_dev * 0x9E3779B97F4A7C15 ^ status.st_ino) * 0xFF51AFD7ED558CCD) & 0xFFFFFFFFFFFFFFFF
    first = 1 << 62 | (mixed >> 34) << 32
    try:
        with open("/proc/locks", encoding="ascii", errors="replace") as stream:
            lines = stream.readlines()
    except OSError:
        return True
    for line in lines:
        words = line.split()
        if "OFDLCK" not in words or words[-3].rpartition(":")[2] != str(inode) or not words[-2].isdigit():
            continue
        if first <= int(words[-2]) < first + (1 << 32):
            return True
    return False
