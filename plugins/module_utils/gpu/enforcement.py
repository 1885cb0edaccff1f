# SPDX-License-Identifier: Apache-2.0
"""Decides what enforces the memory limit of a slice: the driver by the container's control group (with the kernel's
controller dmem or misc), or the library.

A slice is a container's share of a GPU; the library is libvgpu.so, which intercepts CUDA in the container. The plan and
the device plugin share this rule. They show users the first reason why the driver cannot enforce the limit. No I/O.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

AUTO, DRIVER, LIBRARY = "auto", "driver", "library"
# The reason that is reported if nothing limits memory, for example because this sharing mode does not use the library.
NONE = "none"
CHOICES = (AUTO, DRIVER, LIBRARY)
FIRST_BRANCH = 615
# The OCI runtime crun enables some controllers of control groups for a container, but neither dmem nor misc.
CRUN = "crun"
NOT_TRIED = "the driver's limits have not been probed on this host yet"
# Sharing modes whose containers get a memory limit. A MIG device needs none, because its memory is separate; whole GPUs
# have none.
LIMITED = ("vcuda", "time-slicing", "mps")


class Facts(NamedTuple):
    """Holds the facts of a host on which the decision depends. ``probed``: the result of the probe in
    gpu/memory_limits.py: the controller (dmem or misc) that limits memory, or an empty text and the reason why none
    does; None if no probe ran.

    ``branch``: the driver's branch, 0 if unknown. ``modules``: ``proprietary`` if the driver has proprietary kernel
    modules, else empty. ``cards``: names of the GPUs older than Turing. ``mig``: UUIDs of GPUs in MIG mode.
    ``memacct_mode``: the driver's RmMemacctMode, empty if not set. ``handover``: empty if containers get their GPUs by
    CDI, else the reason why not. ``cgroup2``: whether version 2 of control groups is mounted at their root.
    ``controllers``: dmem and misc, as far as the kernel has them; None if unknown. ``engine``, ``runtime``: the
    container engine and the OCI runtime that it calls; empty if unknown.
    """

    branch: int
    modules: str = ""
    cards: Sequence[str] = ()
    mig: Sequence[str] = ()
    memacct_mode: str = ""
    cgroup2: bool = True
    handover: str = ""
    probed: tuple[str, str] | None = None
    controllers: Sequence[str] | None = None
    engine: str = ""
    runtime: str = ""

    def parts(self) -> str:
        """Returns, in brackets, the known facts of kernel and engine on which the driver's limits depend."""
        said = []
        if self.controllers:
            said.append(f"the kernel has {' and '.join(self.controllers)}")
        if self.runtime:
            by = f"{self.engine} starts containers by {self.runtime}"
            said.append(
                by
                + ((", which enables neither dmem nor misc, so the hook enables them") if self.runtime == CRUN else "")
            )
        return f" ({'; '.join(said)})" if said else ""


class Verdict(NamedTuple):
    """Holds ``active``: ``driver-dmem``, ``driver-misc``, ``library`` or ``none``; ``why``: the reason in one line."""

    active: str
    why: str

    @property
    def by_driver(self) -> bool:
        return self.active not in (LIBRARY, NONE)

    @property
    def backend(self) -> str:
        return self.active.partition("-")[2]

    def line(self) -> str:
        who = {LIBRARY: "the library alone", NONE: "neither driver nor library"}.get(self.active, "the driver")
        return f"memory is enforced by {who}: {self.why}"


def obstacle(facts: Facts, sharing: str = "vcuda", count_context: bool = True) -> str:
    """Returns the first reason why the driver cannot enforce limits; empty if none is known."""
    if sharing not in LIMITED:
        return f"containers have no memory limits with vgpu_sharing: {sharing}"
    if not count_context:
        return "vgpu_count_context is false, and the driver counts contexts in any case"
    if facts.branch and facts.branch < FIRST_BRANCH:
        return f"driver branch {facts.branch} has no memory limits of control groups; they came with {FIRST_BRANCH}"
    if facts.cards:
        return f"{facts.cards[0]} is older than Turing, the first generation whose driver has limits"
    if facts.modules == "proprietary":
        return "the proprietary kernel modules have no such limits; the open kernel modules have them"
    if facts.mig:
        return f"{facts.mig[0]} is in MIG mode, where the driver does not count memory for limits"
    if facts.memacct_mode == "0":
        return "RmMemacctMode=0 turns the driver's limits off"
    if not facts.cgroup2:
        return "this host does not use version 2 of control groups alone"
    if facts.controllers is not None and not facts.controllers:
        return (
            "the driver counts memory by the controller dmem (CONFIG_CGROUP_DMEM) or misc (CONFIG_CGROUP_MISC), and "
            "this kernel has neither"
        )
    if facts.handover:
        return facts.handover
    return ""


def decide(requested: str, facts: Facts, sharing: str = "vcuda", count_context: bool = True) -> Verdict:
    """Decides what enforces the limit. If no known fact keeps the driver from enforcing the limit, the result of the
    probe decides.
    """
    other = LIBRARY if sharing == "vcuda" else NONE
    if requested == LIBRARY:
        return Verdict(other, "vgpu_memory_enforcement is library")
    if requested == AUTO and sharing in ("time-slicing", "mps"):
        # In this sharing mode the library limits no memory. The driver limits it only if the user requests that,
        # because a new limit would break programs that run today.
        return Verdict(other, f"with {sharing} the driver limits memory only if vgpu_memory_enforcement is driver")
    why = obstacle(facts, sharing, count_context)
    if not why and facts.probed is None:
        why = NOT_TRIED
    if not why and facts.probed is not None:
        found, why = facts.probed
        if not why:
            return Verdict(f"{DRIVER}-{found}", f"a limit was set and read back on this host (backend {found})")
    return Verdict(other, why)


def handover_of(strategies: Sequence[str]) -> str:
    """Returns why the hook that sets the driver's limits does not run with this method of device injection; empty if it
    runs.
    """
    if any(one in ("cdi-cri", "cdi-annotations") for one in strategies):
        return ""
    return (
        f"containers get their GPUs by {', '.join(strategies) or 'no way'}, and the hook that sets the limit needs CDI"
    )
