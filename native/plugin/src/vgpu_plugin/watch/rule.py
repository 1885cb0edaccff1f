# SPDX-License-Identifier: Apache-2.0
"""The rules by which the watcher judges the processes of one container on one GPU. It reads and writes nothing outside
its arguments.

The limit comes from the node's record (its saved data about the container), and the driver's usage is always compared
with the limit. The tenant can write the ledger, the file in which our library in the container counts memory. So a
ledger that shows less than the driver is a reason for suspicion, but no ledger can hide usage above the limit.

These are the reasons of a suspicion. NO_SLOT: a process has a context or memory on the GPU, but no slot (entry of a
live process) in the ledger, so its memory is not counted. MEMORY: the driver reports more memory for the processes than
the limit or the ledger plus a tolerance. MORE_TIME: the processes used more of the GPU's time than their share.
FOREIGN: another file is mounted at one of our paths. UNPLACED: a process on the GPU belongs neither to the host nor to
a known container.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .processes import Process

NO_SLOT, MEMORY, MORE_TIME = "no-slot", "more-memory", "more-time"
FOREIGN, UNPLACED = "foreign-mount", "unplaced"
REASONS = (NO_SLOT, MEMORY, MORE_TIME, FOREIGN, UNPLACED)
# Reasons for which a process may be killed. MORE_TIME is not one of them: a program whose kernels run for many seconds
# cannot be limited to its share, so it would be killed through no fault of its own.
ENDED_FOR = frozenset((NO_SLOT, MEMORY, FOREIGN))
# Seconds between two polls.
INTERVAL_S = 2.0
MIB = 1 << 20
# The library compares the ledger with the driver's figure when a process's allocations have changed by a step: 1/32 of
# them, at least 32 MiB (unaccounted.c). Until then a step may be uncounted. The tolerance is two steps, because the
# comparison may be postponed.
STEP_LEAST, STEP_PART = 64 * MIB, 16
# Tolerance if contexts are not counted: the size of the largest context of current GPUs, with its modules.
CONTEXT_MOST = 1024 * MIB


@dataclass(frozen=True)
class Account:
    """The usage of one GPU according to a ledger. ``slots``: (pid namespace, pid) → bytes, for each slot (the ledger's
    entry of a live process). An older library writes 0 as namespace.
    """

    slots: Mapping[tuple[int, int], int]
    # Memory limit of the allocation on this GPU, from the node's record.
    limit: int
    # Whether the ledger also counts the memory of contexts and code.
    counted: bool = True
    # Bytes that processes exported before they ended. A process that imported them still uses them, but its slot does
    # not count them.
    exported: int = 0

    @property
    def ledger(self) -> int:
        """Returns the container's total usage by its ledger."""
        return sum(self.slots.values()) + self.exported

    def of(self, process: Process) -> int | None:
        """Returns the bytes counted for a process; None if it has no slot."""
        for key in (process.own, (0, process.own[1])):
            if key in self.slots:
                return self.slots[key]
        return None


def together(owners: Mapping[int, frozenset[str]]) -> dict[str, frozenset[str]]:
    """Returns allocation → all allocations of the same container. A container may have several, for example one for
    each of its claims.
    """
    out: dict[str, frozenset[str]] = {}
    for mine in owners.values():
        for one in mine:
            out[one] = out.get(one, frozenset()) | mine
    return out


def sum_of(accounts: Sequence[Account]) -> Account:
    """Adds up the allocations of one container on one GPU. Each allocation has a ledger, and a process has a slot in
    each of these ledgers.
    """
    slots: dict[tuple[int, int], int] = {}
    for account in accounts:
        for key, used in account.slots.items():
            slots[key] = slots.get(key, 0) + used
    return Account(
        slots,
        sum(one.limit for one in accounts),
        all(one.counted for one in accounts),
        sum(one.exported for one in accounts),
    )


@dataclass(frozen=True)
class Suspicion:
    """A suspicion about processes of one container. ``found``: the bytes that the driver reports for them. For MEMORY
    this is more than ``accounted`` plus ``tolerated``. ``accounted``: the bytes of the limit if ``limited``, else of
    the ledger. ``detail``: text of a suspicion that is not about memory.
    """

    reason: str
    processes: tuple[tuple[Process, int], ...]
    found: int = 0
    accounted: int = 0
    tolerated: int = 0
    limited: bool = False
    detail: str = ""


def tolerance(used: int, counted: bool) -> int:
    """Returns the bytes that one process may use beyond its counted memory."""
    return max(STEP_LEAST, used // STEP_PART) + (0 if counted else CONTEXT_MOST)


def judge(seen: Sequence[tuple[Process, int | None]], account: Account) -> list[Suspicion]:
    """Returns the suspicions about a container. ``seen``: the container's processes on the GPU, each with the bytes
    that the driver reports for it (None: the driver does not know the bytes).
    """
    out = []
    strangers = tuple((one, used or 0) for one, used in seen if account.of(one) is None)
    if strangers:
        out.append(Suspicion(NO_SLOT, strangers, sum(used for _one, used in strangers)))
    every = [(one, used) for one, used in seen if used is not None]
    known = [(one, used) for one, used in every if account.of(one) is not None]
    # The limit is compared for all processes, with or without a slot, so a forged ledger changes nothing.
    for limited, listed, most in ((True, every, account.limit), (False, known, account.ledger)):
        found = sum(used for _one, used in listed)
        # The sum of all processes is compared, because memory that one process allocated and another uses may be
        # counted for either.
        tolerated = sum(tolerance(used, account.counted) for _one, used in listed)
        if listed and found > most + tolerated:
            worst = sorted(listed, key=lambda pair: ((account.of(pair[0]) or 0) - pair[1], -pair[1]))
            out.append(Suspicion(MEMORY, tuple(worst), found, most, tolerated, limited))
            break
    return out


def to_end(suspicion: Suspicion, counted: bool = True) -> list[Process]:
    """Returns the processes to kill, the worst first. For MEMORY these are as many as needed until the others are
    within the limit, for other reasons all.
    """
    if suspicion.reason not in ENDED_FOR:
        return []
    if suspicion.reason != MEMORY:
        return [one for one, _used in suspicion.processes]
    out: list[Process] = []
    found, tolerated = suspicion.found, suspicion.tolerated
    for process, used in suspicion.processes:
        if out and found <= suspicion.accounted + tolerated:
            break
        out.append(process)
        found -= used
        tolerated -= tolerance(used, counted)
    return out
