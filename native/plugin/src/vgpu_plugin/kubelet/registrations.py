# SPDX-License-Identifier: Apache-2.0
"""The registrations with the kubelet, one for each resource of the node. They are started and stopped when the
configuration changes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from .registration import Registration

JOIN_S = 10.0

log = logging.getLogger(__name__)


class Registrations:
    """Starts and stops registrations, each in a thread of its own. It is thread-safe. ``make`` creates the registration
    of a resource.
    """

    def __init__(self, make: Callable[[str], Registration]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._running: dict[str, tuple[Registration, threading.Thread]] = {}
        self._stopped = False

    def bring_in_line(self, resources: Sequence[str]) -> None:
        """Starts the missing registrations, and then ends those of other resources. In this order pods always find a
        resource.

        After ``stop`` it does nothing: a registration that a late change of the configuration started would never be
        stopped.
        """
        with self._lock:
            if self._stopped:
                return
            for resource in resources:
                if resource not in self._running:
                    one = self._make(resource)
                    thread = threading.Thread(target=one.run, name=f"registration {resource}", daemon=True)
                    self._running[resource] = one, thread
                    thread.start()
            for resource in [one for one in self._running if one not in resources]:
                log.info("%s is no longer offered by this node", resource)
                self._end(*self._running.pop(resource))

    @staticmethod
    def _end(one: Registration, thread: threading.Thread) -> None:
        one.stop()
        thread.join(JOIN_S)

    def wait_for_first_attempts(self, seconds: float) -> None:
        for one, _thread in list(self._running.values()):
            one.first_attempt.wait(seconds)

    def state(self) -> tuple[bool, str]:
        """Returns whether all resources are registered, and the first error if they are not."""
        states = [one.state() for one, _thread in list(self._running.values())]
        faults = [fault for registered, fault in states if not registered]
        return bool(states) and not faults, faults[0] if faults else ""

    def no_kubelet(self) -> bool:
        """Returns whether this host never had a kubelet."""
        return any(one.no_kubelet() for one, _thread in list(self._running.values()))

    def any_registered(self) -> bool:
        """Returns whether the kubelet can allocate any resource now."""
        return any(one.registered() for one, _thread in list(self._running.values()))

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            running, self._running = list(self._running.values()), {}
        for one, _thread in running:
            one.stop()
        for _one, thread in running:
            thread.join(JOIN_S)
