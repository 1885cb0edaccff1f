# SPDX-License-Identifier: Apache-2.0
"""The label by which SELinux lets a confined container at the files of its allocation.

A kubelet does not relabel what a device plugin names, and below /run files are the host's alone: a container would find
its limits unreadable and get no context. Which container may read which file is not the label's business: each has its
own files mounted and no other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

log = logging.getLogger(__name__)

# What the kernel knows, with selinuxfs while it enforces or only reports. Where that is mounted, /sys/fs/selinux, is
# the host's alone: a container, the plugin's own of a DaemonSet too, has a /sys of its own without it.
KNOWN = "/proc/filesystems"
ATTRIBUTE = "security.selinux"
# As engines label what all containers of a host may use (`:z`): no category, which every container's own include.
LABEL = b"system_u:object_r:container_file_t:s0\0"


class Labeller:
    """Labels open files; what the kernel refuses, as where no policy for containers is installed, is logged once."""

    def __init__(self, setxattr: Callable[[int, str, bytes], None] = os.setxattr) -> None:
        self._setxattr = setxattr
        self._reported = False

    def __call__(self, descriptor: int) -> None:
        try:
            self._setxattr(descriptor, ATTRIBUTE, LABEL)
        except OSError as fault:
            if not self._reported:
                log.warning(
                    "SELinux did not take the label container_file_t for the files of an allocation (%s); a container "
                    "that its engine confines gets no context; is the package container-selinux installed?",
                    fault,
                )
            self._reported = True


def labeller(known: str = KNOWN) -> Labeller | None:
    """None on a host without SELinux."""
    try:
        with open(known, encoding="ascii", errors="replace") as stream:
            found = "selinuxfs" in stream.read().split()
    except OSError:
        found = False
    return Labeller() if found else None
