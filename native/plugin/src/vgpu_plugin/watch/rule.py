# SPDX-License-Identifier: Apache-2.0
"""What the watcher holds against the processes of one container on one GPU. Pure.

The limit is the node's own figure, and what the driver shows is compared with it whatever else is so. The ledger, which
the tenant writes, can only accuse: where it says less than the driver does.

NO_SLOT: a process holds a context or memory on the GPU and has no live slot, so nothing of it is charged. MEMORY: the
driver says that the processes hold more than the limit, or more than the ledger charges, by more than is tolerated.
MORE_TIME: they took more of the GPU's time than their share. FOREIGN: something else is mounted where our files belong.
UNPLACED: a process on the GPU is neither the host's nor of any container that is known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .processes import Process

NO_SLOT, MEMORY, MORE_TIME = "no-slot", "more-memory", "more-time"
FOREIGN, UNPLACED = "foreign-mount", "unplaced"
REASONS = (NO_SLOT, MEMORY, MORE_TIME, FOREIGN, UNPLACED)
# For these a process may be ended. Not for time: a program whose kernels run for many seconds cannot be held to its
# share by anybody, and looks the same.
ENDED_FOR = frozenset((NO_SLOT, MEMORY, FOREIGN))
# Between two polls.
INTERVAL_S = 2.0
MIB = 1 << 20
# The library settles what the driver took unasked when a process has grown by 32 MiB or 1/32 (unaccounted.c): so
# much may be uncharged at any time, and as much again that the next step settles.
STEP_LEAST, STEP_PART = 64 * MIB, 16
# Where contexts do not count the ledger has none: the largest context of present cards, with its modules.
CONTEXT_MOST = 1024 * MIB


@dataclass(frozen=True)
class Account:
    """Of a ledger, one GPU: bytes by owner of a live slot. A namespace of 0: a library that did not write it."""

    slots: Mapping[tuple[int, int], int]
    # Of the allocation on this GPU, by the node's own record.
    limit: int
    # Whether contexts and code are charged.
    counted: bool = True
    # Memory that dead processes had exported: the importing process keeps it and is not charged for it.
    exported: int = 0

    @property
    def ledger(self) -> int:
        """What the tenant says of itself."""
        return sum(self.slots.values()) + self.exported

    def of(self, process: Process) -> int | None:
        """What a process is charged; None without a slot."""
        for key in (process.own, (0, process.own[1])):
            if key in self.slots:
                return self.slots[key]
        return None


def together(owners: Mapping[int, frozenset[str]]) -> dict[str, frozenset[str]]:
    """Allocation → all that its processes are of: those of a container with several shares are of each of them."""
    out: dict[str, frozenset[str]] = {}
    for mine in owners.values():
        for one in mine:
            out[one] = out.get(one, frozenset()) | mine
    return out


def sum_of(accounts: Sequence[Account]) -> Account:
    """Of the shares of one container, of one GPU: a process has a slot in each ledger."""
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
    """Figures in bytes: by the driver, by the ledger or, where that was passed, the limit (``limited``), and the
    difference that is let pass. ``detail``: what is held against them, where it is no memory.
    """

    reason: str
    processes: tuple[tuple[Process, int], ...]
    found: int = 0
    accounted: int = 0
    tolerated: int = 0
    limited: bool = False
    detail: str = ""


def tolerance(used: int, counted: bool) -> int:
    """What one process may hold beyond its charge."""
    return max(STEP_LEAST, used // STEP_PART) + (0 if counted else CONTEXT_MOST)


def judge(seen: Sequence[tuple[Process, int | None]], account: Account) -> list[Suspicion]:
    """``seen``: the processes of the container on the GPU with their bytes by the driver, None: not known."""
    out = []
    strangers = tuple((one, used or 0) for one, used in seen if account.of(one) is None)
    if strangers:
        out.append(Suspicion(NO_SLOT, strangers, sum(used for _one, used in strangers)))
    every = [(one, used) for one, used in seen if used is not None]
    known = [(one, used) for one, used in every if account.of(one) is not None]
    # All of them, with a slot or without: whatever is written into a ledger between two polls changes nothing here.
    for limited, listed, most in ((True, every, account.limit), (False, known, account.ledger)):
        found = sum(used for _one, used in listed)
        # The whole account: memory that one process made and another holds is charged to either.
        tolerated = sum(tolerance(used, account.counted) for _one, used in listed)
        if listed and found > most + tolerated:
            worst = sorted(listed, key=lambda pair: ((account.of(pair[0]) or 0) - pair[1], -pair[1]))
            out.append(Suspicion(MEMORY, tuple(worst), found, most, tolerated, limited))
            break
    return out


def to_end(suspicion: Suspicion, counted: bool = True) -> list[Process]:
    """Who is to be ended, the worst first: for memory so many that the others keep within what is theirs, for another
    reason all.
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
