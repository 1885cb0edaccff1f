# SPDX-License-Identifier: Apache-2.0
"""The policy of this kubelet's topology manager, as its configuration file names it.

Read by lines and not as YAML, whose library a node program has no memory for: both keys are of the top level. What is
set by a flag or in a folder of drop-ins is not seen; then nothing is published, as by a kubelet without a policy.
"""

from __future__ import annotations

import re
from pathlib import Path

from .._shared.pods.annotations import CONTAINER, NO_POLICY, POD, POLICIES, Topology

MOST_BYTES = 1 << 20


def _value_of(key: str) -> re.Pattern[str]:
    quote = """["']?"""
    # At the begin of a line as YAML has it, or within JSON.
    return re.compile(rf"(?:^{quote}|^\s*\"|[{{,]\s*\"){key}{quote}\s*:\s*{quote}([a-z-]+)", re.MULTILINE)


POLICY, SCOPE = _value_of("topologyManagerPolicy"), _value_of("topologyManagerScope")


def parse(text: str) -> Topology:
    """The kubelet has no policy by default, and the scope container."""
    policy, scope = POLICY.search(text), SCOPE.search(text)
    if policy is None or policy[1] not in POLICIES or policy[1] == POLICIES[0]:
        return NO_POLICY
    return Topology(policy[1], POD if scope is not None and scope[1] == POD else CONTAINER)


class KubeletTopology:
    """Read again when the file changes: the kubelet is started again for that, and this program need not be."""

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
