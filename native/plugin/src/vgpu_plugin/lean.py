# SPDX-License-Identifier: Apache-2.0
"""Reduces the memory and the wakeups of the programs that run on every node. It limits malloc's arenas. On an idle host
it also makes the timers of gRPC's threads less exact, so that the kernel can combine wakeups.
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
# The beginnings of the names of gRPC's core threads, and the timer slack that these threads get, in nanoseconds. The
# kernel may delay a thread's timers by its slack, which is 50 µs by default.
CORE, COARSE_NS = ("event_engine", "grpc_global_tim"), 500_000_000
PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30

log = logging.getLogger(__name__)


def with_quiet_servers() -> None:
    """Makes a check in the thread of each gRPC server less frequent. The check wakes the thread every second to test
    whether the Python object of the server was deleted. In this program the object is never deleted before the server
    is stopped. The check used a third of the processor time of an idle node program.
    """
    server = importlib.import_module("grpc._server")
    if hasattr(server, CHECK_PERIOD):
        setattr(server, CHECK_PERIOD, QUIET_S)


def with_few_arenas() -> None:
    """Limits malloc to one arena, because an arena for each of gRPC's threads would keep unused memory."""
    try:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    except AttributeError:
        return  # This C library is not glibc and has no arenas to limit.


def own_timers() -> Callable[[], None]:
    """Returns a function that gives the calling thread the timer slack that the current thread has now.

    Each new worker thread calls it, because a thread inherits the slack of its creator, here the server's thread. After
    CoarseTimers has changed the server's thread, new workers would otherwise sleep up to half a second too long.
    """
    try:
        prctl = ctypes.CDLL(None).prctl
    except AttributeError:
        return lambda: None  # This C library has no prctl.
    own = prctl(PR_GET_TIMERSLACK)

    def take() -> None:
        if own > 0:
            prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(own))

    return take


class CoarseTimers:
    """Lets gRPC's threads sleep up to half a second longer than they ask for, so that the kernel combines many of their
    wakeups. An event still wakes them at once.

    On an idle node these threads wake some 900 times a minute. A server's thread wakes every 200 ms to check for
    signals, and the threads of gRPC's core wake with growing pauses after each tick of its clock.

    The timers are changed only after the first call of a client. Before that call gRPC sometimes misses an event, and
    notices it only at the end of a wait.

    The lifeguard thread of gRPC's core is left unchanged, because it starts more threads when all are busy.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._known: frozenset[str] = frozenset()

    def look(self) -> None:
        """Sets the timer slack of gRPC's threads that were started since the last call. The threads are recognised by
        their names. Without the capability CAP_SYS_NICE nothing changes.
        """
        try:
            tasks = frozenset(os.listdir(f"{self._proc}/self/task"))
            if tasks == self._known:
                return
            servers = {str(one.native_id) for one in threading.enumerate() if one.name.endswith("(_serve)")}
            for task in tasks - self._known:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # The thread has ended.
                    with open(f"{self._proc}/self/task/{task}/comm") as stream:
                        name = stream.read().strip()
                    if task in servers or name in CORE:
                        with open(f"{self._proc}/{task}/timerslack_ns", "w") as stream:
                            stream.write(str(COARSE_NS))
        except OSError as fault:
            log.debug("timers stay as they are: %s", fault)
            return
        self._known = tasks
