# SPDX-License-Identifier: Apache-2.0
"""The results of the watcher, which looks for processes that use a GPU beyond their limits: findings about containers,
and the watcher's own state. Messages name the ledger of an allocation: the file in which our library counts the GPU
memory of a container, with a slot for each process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from . import rule
from .processes import Process
from .rule import Suspicion

STATIC_KIND, UNKNOWN = "static", "unknown"
# The allocation of a finding whose processes belong to no known allocation.
NONE = ""
# Processes on a GPU with the bytes that each uses, the largest first.
Programs = tuple[tuple[Process, int], ...]


@dataclass(frozen=True)
class Finding:
    """A finding about one allocation (the slices of one container) on one GPU, with one reason. ``looks``: number of
    polls in a row with this finding; ``since``: when it began; ``named``: when it was reported, 0 if not yet. Times are
    in seconds of the monotonic clock.
    """

    allocation: str
    kind: str
    uuid: str
    suspicion: Suspicion
    looks: int
    since: float
    named: float = 0.0
    action: str = ""
    # When the first signal was sent because of this finding.
    ending: float | None = None
    # When the finding ended, None while it lasts.
    over: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.allocation, self.uuid, self.suspicion.reason

    def text(self) -> str:
        suspicion = self.suspicion
        one, used = suspicion.processes[0]
        more = len(suspicion.processes) - 1
        who = f"process {one.pid} ({one.name})" + (f" and {more} more" if more else "")
        if suspicion.reason == rule.UNPLACED:
            where = "in no container with a slice, and not on the host"
            return f"{who} uses {self.uuid} and runs {where}: {suspicion.detail}"
        if suspicion.detail:
            return f"{who} of allocation {self.allocation} on {self.uuid}: {suspicion.detail}"
        if suspicion.reason == rule.NO_SLOT:
            return (
                f"{who} holds {used >> 20} MiB of {self.uuid} without a live slot in the ledger of allocation "
                f"{self.allocation}: it bypasses libvgpu.so"
            )
        accounted = f"{suspicion.accounted >> 20} MiB"
        if suspicion.limited:
            against = f"for allocation {self.allocation}, its limit is {accounted}"
        else:
            against = f"the ledger of allocation {self.allocation} counts {accounted}"
        return (
            f"{who}: the driver reports {suspicion.found >> 20} MiB of {self.uuid}, {against}; up to "
            f"{suspicion.tolerated >> 20} MiB more are tolerated"
        )


@dataclass(frozen=True)
class OldMounts:
    """An allocation whose container was created by an older version of this program, which mounted single files instead
    of folders. It has these mounts until it is created again.
    """

    allocation: str
    kind: str


@dataclass(frozen=True)
class State:
    """The watcher's state. ``fault``: why the last poll was incomplete. ``totals``: (reason, kind of allocation) →
    count of findings. ``ended``: name of a signal → how often it was sent. ``looks``: number of polls so far. ``past``:
    findings that ended. ``unplaced``: GPU → number of processes in unknown containers. ``shown``: (allocation, GPU) →
    bytes that the driver reports; ``programs``: the processes that use these bytes.
    """

    policy: str
    interval_s: float
    looks: int
    fault: str
    findings: tuple[Finding, ...]
    past: tuple[Finding, ...]
    totals: Mapping[tuple[str, str], int]
    ended: Mapping[str, int]
    old_mounts: tuple[OldMounts, ...] = ()
    unplaced: Mapping[str, int] = field(default_factory=dict)
    shown: Mapping[tuple[str, str], int] = field(default_factory=dict)
    # GPU → bytes that the driver reports for processes of which the node has no record.
    unaccounted: Mapping[str, int] = field(default_factory=dict)
    # GPU → programs that run on the host itself, outside containers. No slice limits them.
    host: Mapping[str, Programs] = field(default_factory=dict)
    programs: Mapping[tuple[str, str], Programs] = field(default_factory=dict)

    @property
    def host_bytes(self) -> dict[str, int]:
        """Returns GPU → bytes that the driver reports for programs of the host."""
        return {uuid: sum(used for _process, used in seen) for uuid, seen in self.host.items()}
