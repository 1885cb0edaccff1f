# SPDX-License-Identifier: Apache-2.0
"""Reduces memory and wakeups of the programs: the allocator's arenas, and the timers of gRPC's threads on
an idle host.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import threading
from collections.abc import Callable

M_ARENA_MAX = -8
CHECK_PERIOD, QUIET_S = "_DEALLOCATED_SERVER_CHECK_PERIOD_S", 60.0
# Names of threads of gRPC's core, and the timer slack that they get, in ns; the default is 50 µs.
CORE, COARSE_NS = ("event_engine", "grpc_global_tim"), 500_000_000
PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30

log = logging.getLogger(__name__)


def with_quiet_servers() -> None:
    """Slows down a check in each gRPC server's thread, which wakes every second to test whether its server object was
    deleted. Here that never happens before the server is stopped, and the check was a third of an idle node program's
    cost.
    """
    server = importlib.import_module("grpc._server")
    if hasattr(server, CHECK_PERIOD):
        setattr(server, CHECK_PERIOD, QUIET_S)


def with_few_arenas() -> None:
    """Limits malloc to one arena: an arena for each of gRPC's threads would keep unused memory."""
    try:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    except AttributeError:
        return  # not glibc


def own_timers() -> Callable[[], None]:
    """Returns a function that gives a thread the timer slack of this function's caller. A thread inherits the slack of
    its creator: workers are created by a server's thread, and after CoarseTimers has changed that thread they would
    sleep up to half a second too long.
    """
    try:
        prctl = ctypes.CDLL(None).prctl
    except AttributeError:
        return lambda: None  # not glibc
    own = prctl(PR_GET_TIMERSLACK)

    def take() -> None:
        if own > 0:
            prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(own))

    return take


class CoarseTimers:
    """Lets gRPC's threads wait up to half a second longer than they ask for, so that the kernel combines many of their
    wakeups. They wake some 900 times a minute on an idle node: a server's thread every 200 ms, to check for signals,
    and those of the core with growing pauses after each tick of its clock. An event still wakes them at once.

    Only after the first call of a client: before that, gRPC sometimes misses an event and notices it only at the end of
    a wait. Not for the core's lifeguard thread, which starts more threads when all are busy.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._known: frozenset[str] = frozenset()

    def look(self) -> None:
        """Changes the timers of threads that were started since the last call, selected by name. Without CAP_SYS_NICE
        nothing changes.
        """
        try:
            tasks = frozenset(os.listdir(f"{self._proc}/self/task"))
            if tasks == self._known:
                return
            servers = {str(one.native_id) for one in threading.enumerate() if one.name.endswith("(_serve)")}
            for task in tasks - self._known:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                    with open(f"{self._proc}/self/task/{task}/comm") as stream:
                        name = stream.read().strip()
                    if task in servers or name in CORE:
                        with open(f"{self._proc}/{task}/timerslack_ns", "w") as stream:
                            stream.write(str(COARSE_NS))
        except OSError as fault:
            log.debug("timers stay as they are: %s", fault)
            return
        self._known = tasks
