# SPDX-License-Identifier: Apache-2.0
"""What the watcher holds against the processes of one container on one GPU: the driver's account against the ledger's.
Pure.

NO_SLOT: a process holds a context or memory on the GPU and has no live slot, so nothing of it is charged. MEMORY: the
driver says that the processes hold more than the ledger charges, by more than is tolerated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .watch_processes import Process

NO_SLOT, MEMORY = "no-slot", "more-memory"
REASONS = (NO_SLOT, MEMORY)
# Between two looks.
INTERVAL_S = 2.0
MIB = 1 << 20
# The library looks again at what the driver took unasked when a process has grown by 32 MiB or 1/32 (unaccounted.c); so
# much may be uncharged at any time, and as much again that is settled with the step after.
STEP_LEAST, STEP_PART = 64 * MIB, 16
# Where contexts do not count the ledger has none of them: the largest of a card of these years, with its modules.
CONTEXT_MOST = 1024 * MIB


@dataclass(frozen=True)
class Account:
    """Of a ledger, one GPU: bytes by owner of a live slot. A namespace of 0: a library that did not write it."""

    slots: Mapping[tuple[int, int], int]
    # Whether contexts and code are charged.
    counted: bool = True
    # What dead processes had lent: whoever imported it holds it on, and is not charged himself.
    lent: int = 0

    @property
    def total(self) -> int:
        return sum(self.slots.values()) + self.lent

    def of(self, process: Process) -> int | None:
        """What a process is charged; None without a slot."""
        for key in (process.own, (0, process.own[1])):
            if key in self.slots:
                return self.slots[key]
        return None


@dataclass(frozen=True)
class Suspicion:
    """Figures in bytes: by the driver, by the ledger, and the difference that is let pass."""

    reason: str
    processes: tuple[tuple[Process, int], ...]
    found: int
    accounted: int
    tolerated: int


def tolerance(used: int, counted: bool) -> int:
    """What one process may hold beyond its charge."""
    return max(STEP_LEAST, used // STEP_PART) + (0 if counted else CONTEXT_MOST)


def judge(seen: Sequence[tuple[Process, int | None]], account: Account) -> list[Suspicion]:
    """``seen``: the processes of the container on the GPU with their bytes by the driver, None: not told."""
    out = []
    strangers = tuple((one, used or 0) for one, used in seen if account.of(one) is None)
    if strangers:
        out.append(Suspicion(NO_SLOT, strangers, sum(used for _one, used in strangers), 0, 0))
    known = [(one, used) for one, used in seen if used is not None and account.of(one) is not None]
    found = sum(used for _one, used in known)
    # The whole account: memory that one process made and another holds is charged to either.
    tolerated = sum(tolerance(used, account.counted) for _one, used in known)
    if known and found > account.total + tolerated:
        worst = sorted(known, key=lambda pair: (account.of(pair[0]) or 0) - pair[1])
        out.append(Suspicion(MEMORY, tuple(worst), found, account.total, tolerated))
    return out
