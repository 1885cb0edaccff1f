# SPDX-License-Identifier: Apache-2.0
"""Keeps the programs small and still: the memory of the allocator's arenas, and how often gRPC's threads wake an idle
host.
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
# Threads of gRPC's core, as it names them; and their slack, which is 50 µs otherwise.
CORE, COARSE_NS = ("event_engine", "grpc_global_tim"), 500_000_000
PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30

log = logging.getLogger(__name__)


def with_quiet_servers() -> None:
    """The thread of each gRPC server wakes every second to see whether its server object is gone, which never happens
    before it was stopped: a third of what an idle node program costs.
    """
    server = importlib.import_module("grpc._server")
    if hasattr(server, CHECK_PERIOD):
        setattr(server, CHECK_PERIOD, QUIET_S)


def with_few_arenas() -> None:
    """An arena of malloc for each of gRPC's threads keeps memory that nobody uses."""
    try:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    except AttributeError:
        return  # another libc


def own_timers() -> Callable[[], None]:
    """What gives a thread the slack of the one that calls this. A thread begins with that of the one that made it: a
    server makes its workers, and once CoarseTimers took it over they would sleep half a second longer than they ask.
    """
    try:
        prctl = ctypes.CDLL(None).prctl
    except AttributeError:
        return lambda: None  # another libc
    own = prctl(PR_GET_TIMERSLACK)

    def take() -> None:
        if own > 0:
            prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(own))

    return take


class CoarseTimers:
    """Lets gRPC's threads wait up to half a second longer than they ask for, so that the kernel ends many of their
    waits by one interrupt. They wake some 900 times a minute on an idle node: the thread of a server every 200 ms, to
    look for signals, those of the core with growing pauses after each tick of its clock. An event wakes them at once.

    Not before the first call: until then gRPC misses events now and then, and finds them only when a wait is over. Not
    the core's lifeguard, which starts threads where all are busy.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._known: frozenset[str] = frozenset()

    def look(self) -> None:
        """Takes over threads that were started since the last look, by their names. Where the system forbids it, which
        asks for CAP_SYS_NICE, all stays as it is.
        """
        try:
            tasks = frozenset(os.listdir(f"{self._proc}/self/task"))
            if tasks == self._known:
                return
            servers = {str(one.native_id) for one in threading.enumerate() if one.name.endswith("(_serve)")}
            for task in tasks - self._known:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    with open(f"{self._proc}/self/task/{task}/comm") as stream:
                        name = stream.read().strip()
                    if task in servers or name in CORE:
                        with open(f"{self._proc}/{task}/timerslack_ns", "w") as stream:
                            stream.write(str(COARSE_NS))
        except OSError as fault:
            log.debug("timers stay as they are: %s", fault)
            return
        self._known = tasks
