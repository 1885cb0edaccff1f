# SPDX-License-Identifier: Apache-2.0
"""Kills processes through a pidfd, so that a signal never reaches another process that got a reused pid."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from .processes import Process

# Seconds between SIGTERM and SIGKILL. The kubelet gives a pod thirty seconds, but a process beyond its limit harms its
# neighbours, so it gets less time.
GRACE_S = 10.0


class Ender:
    """Sends signals and remembers which process got one. ``look`` returns the process that has a pid now, None if there
    is none.
    """

    def __init__(self, look: Callable[[int], Process | None]) -> None:
        self._look = look
        # (pid, start time) → time at which the process got SIGTERM; None once it got SIGKILL.
        self._signalled: dict[tuple[int, int], float | None] = {}
        self.sent: dict[str, int] = {}

    def forget(self) -> None:
        """Discards running grace periods. It is called while the policy is not to kill."""
        self._signalled.clear()

    def end(self, process: Process, now: float, still: Callable[[Process], bool], begun: float | None = None) -> str:
        """Sends SIGTERM at the first call for a process, and SIGKILL after the grace period. Returns the name of the
        signal; empty if none was sent.

        A finding is one reason for which processes of one container are killed. ``begun``: when the first process of
        the finding got SIGTERM. All processes of a finding share one grace period, because otherwise a container could
        survive by starting a new process every few seconds. ``still`` checks, while the pidfd is open, that the process
        still belongs to the finding's container.
        """
        key = process.pid, process.start
        self._signalled = {one: then for one, then in self._signalled.items() if self._alive(one)}
        if key in self._signalled:
            then = self._signalled[key]
            if then is None or now - then < GRACE_S:
                return ""
        late = begun is not None and now - begun >= GRACE_S
        number = signal.SIGKILL if key in self._signalled or late else signal.SIGTERM
        try:
            descriptor = os.pidfd_open(process.pid)
        except OSError:
            return ""
        try:
            found = self._look(process.pid)
            if found is None or found.start != process.start or not still(process):
                return ""
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
        self._signalled[key] = None if number == signal.SIGKILL else now
        self.sent[number.name] = self.sent.get(number.name, 0) + 1
        return number.name

    def _alive(self, key: tuple[int, int]) -> bool:
        found = self._look(key[0])
        return found is not None and found.start == key[1]
