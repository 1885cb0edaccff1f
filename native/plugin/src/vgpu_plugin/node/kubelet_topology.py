# SPDX-License-Identifier: Apache-2.0
"""Reads the policy of this kubelet's topology manager, which places a container's devices and CPUs on NUMA nodes. The
source is the kubelet's configuration file.

The file is parsed with regular expressions and not as YAML. A YAML library takes too much memory, and the two keys to
read (policy and scope) are at the top level of the file.

Command line flags and drop-in files of the kubelet are not read. If the policy is set only in those, this program
publishes none, as if the kubelet had no policy.
"""

from __future__ import annotations

import re
from pathlib import Path

from .._shared.pods.annotations import CONTAINER, NO_POLICY, POD, POLICIES, Topology

MOST_BYTES = 1 << 20


def _value_of(key: str) -> re.Pattern[str]:
    quote = """["']?"""
    # Matches a key at the beginning of a YAML line, or a key in JSON.
    return re.compile(rf"(?:^{quote}|^\s*\"|[{{,]\s*\"){key}{quote}\s*:\s*{quote}([a-z-]+)", re.MULTILINE)


POLICY, SCOPE = _value_of("topologyManagerPolicy"), _value_of("topologyManagerScope")


def parse(text: str) -> Topology:
    """Returns the policy and its scope. The kubelet's defaults are the policy ``none`` and the scope ``container``."""
    policy, scope = POLICY.search(text), SCOPE.search(text)
    if policy is None or policy[1] not in POLICIES or policy[1] == POLICIES[0]:
        return NO_POLICY
    return Topology(policy[1], POD if scope is not None and scope[1] == POD else CONTAINER)


class KubeletTopology:
    """Provides the policy, and reads the file again only after it has changed. The kubelet itself uses a new policy
    only after its restart.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] = ()
        self._found = NO_POLICY

    def read(self) -> Topology:
        try:
            status = self._path.stat()
            seen = status.st_mtime_ns, status.st_ino, status.st_size
            if seen != self._seen:
                with self._path.open(errors="replace") as file:
                    self._found = parse(file.read(MOST_BYTES))
                self._seen = seen
        except OSError:
            self._seen, self._found = (), NO_POLICY
        return self._found
