# SPDX-License-Identifier: Apache-2.0
"""The SELinux label that lets a confined container use the files of its allocation.

The kubelet does not relabel a device plugin's files, and SELinux denies containers all files below /run: a container
could not read its limits and could create no CUDA context. The label does not separate containers; each container has
only its own files mounted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

log = logging.getLogger(__name__)

# The kernel lists selinuxfs here, in enforcing and permissive mode. /sys/fs/selinux cannot be used: a container, such
# as the plugin's own in a DaemonSet, has a /sys without it.
KNOWN = "/proc/filesystems"
ATTRIBUTE = "security.selinux"
# The label that engines use for files shared by all containers of a host (`:z`): no category, so that every container
# may use them.
LABEL = b"system_u:object_r:container_file_t:s0\0"


class Labeller:
    """Labels open files. The first refusal of the kernel is logged, for example because no policy for containers is
    installed.
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
                    "that its engine confines gets no context; is the package container-selinux installed?",
                    fault,
                )
            self._reported = True


def labeller(known: str = KNOWN) -> Labeller | None:
    """Returns a labeller; None on a host without SELinux."""
    try:
        with open(known, encoding="ascii", errors="replace") as stream:
            found = "selinuxfs" in stream.read().split()
    except OSError:
        found = False
    return Labeller() if found else None
