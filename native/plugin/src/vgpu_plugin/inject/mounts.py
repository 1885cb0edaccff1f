# SPDX-License-Identifier: Apache-2.0
"""Calls mount(2) and umount2(2). No other module changes the host's mounts, so tests need to replace only this one."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Protocol

MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x2, 0x4, 0x8
MNT_DETACH = 0x2


class Mounter(Protocol):
    def mount_tmpfs(self, target: Path, size: int) -> None:
        """Mounts a tmpfs of at most ``size`` bytes on an existing folder. Raises OSError."""

    def unmount(self, target: Path) -> None:
        """Unmounts a folder, even if files in it are open. If nothing is mounted there, this is no error. Raises
        OSError."""

    def is_mount(self, target: Path) -> bool: ...


class KernelMounter:
    """Calls the kernel through libc. The program /bin/mount is not used, because each allocation (slices of one
    container) would need a process for it."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def mount_tmpfs(self, target: Path, size: int) -> None:
        # noexec is set because a tenant (a container's user) writes files here, and the host must never execute them.
        # With mode 0700 the files can be reached only through bind mounts.
        options = f"size={size},nr_inodes=16,mode=0700".encode()
        flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
        if self._libc.mount(b"vgpu", os.fsencode(target), b"tmpfs", ctypes.c_ulong(flags), options) != 0:
            self._raise("mount a tmpfs on", target)

    def unmount(self, target: Path) -> None:
        if not self.is_mount(target):
            return
        if self._libc.umount2(os.fsencode(target), MNT_DETACH) != 0:
            self._raise("unmount", target)

    def is_mount(self, target: Path) -> bool:
        return os.path.ismount(target)

    @staticmethod
    def _raise(what: str, target: Path) -> None:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot {what} {target}: {os.strerror(number)}")
