# SPDX-License-Identifier: Apache-2.0
"""Sets the SELinux label with which a confined container may use the files of its allocation (the GPU slices that it
has).

Without the label, SELinux denies containers all files below /run, and the kubelet does not relabel the files that a
device plugin mounts. So a container could not read its limits, and could create no CUDA context.

The label does not separate containers from each other. That is not needed, because each container has only its own
files mounted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

log = logging.getLogger(__name__)

# If SELinux is on (enforcing or permissive), the kernel lists selinuxfs in this file. The folder /sys/fs/selinux does
# not show this everywhere: a container, such as the plugin's own in a DaemonSet, has a /sys without it.
KNOWN = "/proc/filesystems"
ATTRIBUTE = "security.selinux"
# The label that container engines use for files shared by all containers of a host (`:z`). It has no category, so every
# container may use the files.
LABEL = b"system_u:object_r:container_file_t:s0\0"


class Labeller:
    """Sets the label on open files. If the kernel refuses, for example because no policy for containers is installed,
    only the first refusal is logged.
    """

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
                    "that its engine confines gets no CUDA context; is the package container-selinux installed?",
                    fault,
                )
            self._reported = True


def labeller(known: str = KNOWN) -> Labeller | None:
    """Returns the function that labels open files, or None on a host without SELinux."""
    try:
        with open(known, encoding="ascii", errors="replace") as stream:
            found = "selinuxfs" in stream.read().split()
    except OSError:
        found = False
    return Labeller() if found else None
