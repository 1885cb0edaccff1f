# SPDX-License-Identifier: Apache-2.0
"""Reduces the memory and the wakeups of the programs that run on every node: limits malloc's arenas, and makes the
timers of gRPC's threads coarse on an idle host.
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
# Names of threads of gRPC's core, and the timer slack that they get, in nanoseconds. The kernel may delay a thread's
# timers by its slack, which is 50 µs by default.
CORE, COARSE_NS = ("event_engine", "grpc_global_tim"), 500_000_000
PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30

log = logging.getLogger(__name__)


def with_quiet_servers() -> None:
    """Makes a check in the thread of each gRPC server less frequent. The check wakes the thread every second to test
    whether its server object was deleted. In this program that never happens before the server is stopped, and the
    check was a third of an idle node program's processor time.
    """
    server = importlib.import_module("grpc._server")
    if hasattr(server, CHECK_PERIOD):
        setattr(server, CHECK_PERIOD, QUIET_S)


def with_few_arenas() -> None:
    """Limits malloc to one arena, because an arena for each of gRPC's threads would keep unused memory."""
    try:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    except AttributeError:
        return  # this C library is not glibc and has no arenas to limit


def own_timers() -> Callable[[], None]:
    """Returns a function that gives the thread which calls it the timer slack of the current thread. It is needed
    because a thread inherits the slack of its creator: a server's thread creates the worker threads, and after
    CoarseTimers has changed that thread, the workers would sleep up to half a second too long.
    """
    try:
        prctl = ctypes.CDLL(None).prctl
    except AttributeError:
        return lambda: None  # this C library has no prctl
    own = prctl(PR_GET_TIMERSLACK)

    def take() -> None:
        if own > 0:
            prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(own))

    return take


class CoarseTimers:
    """Lets gRPC's threads sleep up to half a second longer than they ask for, so that the kernel combines many of their
    wakeups. On an idle node they wake some 900 times a minute: a server's thread every 200 ms, to check for signals,
    and the threads of gRPC's core with growing pauses after each tick of its clock. An event still wakes them at once.

    This is done only after the first call of a client, because before that call gRPC sometimes misses an event and
    notices it only at the end of a wait. The lifeguard thread of gRPC's core is left unchanged, because it starts more
    threads when all are busy.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._known: frozenset[str] = frozenset()

    def look(self) -> None:
        """Sets the timer slack of the threads of gRPC, selected by name, that were started since the last call. Without
        CAP_SYS_NICE nothing changes.
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
