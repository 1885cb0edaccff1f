# SPDX-License-Identifier: Apache-2.0
"""Ends processes by a descriptor of the process itself, so that a number that was given out again is never hit."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from .processes import Process

# Between SIGTERM and SIGKILL, as a kubelet gives a pod thirty: a process beyond its limit harms its neighbours.
GRACE_S = 10.0


class Ender:
    """``look``: the process that a pid is now, None where it is gone."""

    def __init__(self, look: Callable[[int], Process | None]) -> None:
        self._look = look
        # (pid, start) → when SIGTERM was sent; None once it was SIGKILL.
        self._signalled: dict[tuple[int, int], float | None] = {}
        self.sent: dict[str, int] = {}

    def forget(self) -> None:
        """Under another policy nobody's grace runs on."""
        self._signalled.clear()

    def end(self, process: Process, now: float, still: Callable[[Process], bool], begun: float | None = None) -> str:
        """SIGTERM the first time, SIGKILL once the grace is over; the name of what was sent, empty: nothing.

        ``begun``: when the first process got SIGTERM for the same finding: there is one grace for all, or a container
        would live on by a new process every few seconds. ``still`` is asked whether it is the one that is meant while
        the descriptor is held: from there on no other process can have its pid.
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
