# SPDX-License-Identifier: Apache-2.0
"""Judges whether the driver enforces the memory limit of a container's control group. The observations come from the
host and from tenants, which here are test processes in the group without libvgpu.so. The device plugin reports what
enforces the limit (``driver-dmem``, ``driver-misc``: the driver, by the kernel's controller dmem or misc). If the
plugin reports the driver, but the driver does not enforce the limit, that is a violation. Figures are bytes. No I/O.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .verdicts import MIB, NOT_RUN, OPEN, PASSED, VIOLATED, Expected, check

LIMIT, REFUSES, CHILDREN, RESTART = "driver-limit", "driver-refuses", "driver-limit-children", "driver-limit-restart"
ROOT, MANAGED, ORPHAN, BESIDE = "driver-limit-root", "managed-raw", "dead-creator", "driver-limit-beside"
# Checks that use a tenant without libvgpu.so while the container waits.
OF_TENANTS = (REFUSES, CHILDREN, ROOT, MANAGED, ORPHAN)
# The driver may refuse memory when this many bytes of the limit are still free, because of its allocation granularity
# or because a context no longer fits.
SLACK = 64 * MIB
# An account must show at least this percentage of an allocation.
SHOWN_PERCENT = 90
NO_PERMISSION, OUT_OF_MEMORY = 4, 2
CAP_SYS_ADMIN = 1 << 21


class DriverLimit(NamedTuple):
    """Describes the driver's limit of a control group, seen from the host. ``hard``: None if there is no limit,
    ``fault`` gives the reason. ``own``: whether the limit was set on this group and not on a group above it. ``card``:
    memory of the GPU, 0 if unknown. ``inode``: inode of the group's folder, 0 if unknown.
    """

    group: str = ""
    soft: int = 0
    hard: int | None = None
    own: bool = True
    card: int = 0
    fault: str = ""
    inode: int = 0


class Sum(NamedTuple):
    """Holds how much the tenants of a group allocated until the driver refused. ``taken``: the sum by their own
    count; ``used``: the sum by the driver's count; ``room``: the card's free memory at that time; ``fault``: why
    nothing was measured.
    """

    taken: int = 0
    used: int = 0
    room: int = 0
    fault: str = ""


class Deltas(NamedTuple):
    """Holds the growth of used memory after an allocation of ``size``. ``group`` and ``card``: the growth of the
    group's and of the card's used memory by the driver's account. ``ordinary``: the group's growth after an ordinary
    allocation of the same size. ``fault``: why nothing was measured.
    """

    size: int
    group: int = 0
    card: int = 0
    ordinary: int = 0
    fault: str = ""


def of_driver(claimed: str, seen: DriverLimit, expected: Expected, name: str = LIMIT) -> dict[str, Any]:
    """Judges the driver's limit of the container's own control group. ``claimed``: the enforcement that the device
    plugin reports. If the driver does not have a claimed limit, that is a violation, even if the library enforces the
    limit.
    """
    wanted = f"soft 0, hard {expected.memory_mib * MIB}"
    if seen.hard is None:
        return check(name, VIOLATED, wanted, "none", "bytes", f"the device plugin reports {claimed}, but {seen.fault}")
    at_most_card = min(expected.memory_mib * MIB, seen.card or expected.memory_mib * MIB)
    held = (seen.soft, seen.hard) == (0, at_most_card) and seen.own
    detail = f"{claimed}, group {seen.group}" + ("" if seen.own else ", but the limit was set on a group above it")
    return check(name, PASSED if held else VIOLATED, wanted, f"soft {seen.soft}, hard {seen.hard}", "bytes", detail)


def of_restart(claimed: str, first: DriverLimit, again: DriverLimit, expected: Expected) -> dict[str, Any]:
    """Judges the limit of the group that a restarted container has before its program runs."""
    found = of_driver(claimed, again, expected, RESTART)
    which = "the same group" if first.inode and first.inode == again.inode else "a new group"
    return dict(found, detail=f"{found['detail']}; read after the second start, in {which}, before its program ran")


def of_bypass(one: dict[str, Any], claimed: str, hard: int | None = None, most: int | None = None) -> dict[str, Any]:
    """Judges a bypass that the driver should refuse. ``most``: the greatest memory sum of the control group while the
    bypass ran, by the driver's account and its list of processes. ``hard``: the limit. Granted memory is a violation
    only if the driver did not count it or the sum exceeds the limit, because an oversold slice is partly in host memory
    and leaves room on the card.
    """
    if one["verdict"] != OPEN:
        return one
    granted = int(one["found"]) if str(one["found"]).isdigit() else 0
    if hard is None or most is None:
        return dict(one, verdict=VIOLATED, detail=f"{one['detail']}; {claimed}, but the driver refused nothing")
    report = f"{one['detail']}; the group used at most {most} bytes, the driver's limit is {hard} bytes"
    if most < granted:
        return dict(one, verdict=VIOLATED, detail=f"{report}: the driver did not count the granted memory")
    verdict = VIOLATED if most > hard else PASSED
    return check(one["name"], verdict, f"at most {hard} in the group", most, "bytes", f"{report} ({claimed})")


def of_sum(name: str, claimed: str, hard: int, found: Sum) -> dict[str, Any]:
    """Judges whether the memory that tenants without libvgpu.so allocated together stays within the hard limit of their
    group.
    """
    wanted, most = f"at most {hard}", max(found.taken, found.used)
    report = f"{claimed}: the driver granted {found.taken} bytes and counts {found.used} bytes"
    if most > hard:
        return check(name, VIOLATED, wanted, most, "bytes", report)
    if found.fault:
        return check(name, NOT_RUN, wanted, "", "bytes", found.fault)
    if not most:
        return check(name, NOT_RUN, wanted, most, "bytes", f"{claimed}: the driver refused even a context")
    if most + SLACK < hard and found.room < SLACK:
        return check(
            name, NOT_RUN, wanted, most, "bytes", (f"{report}; the card was full before the limit was reached")
        )
    return check(name, PASSED, wanted, most, "bytes", f"{report}; it refused the rest")


def of_root(claimed: str, code: int, call: str, capabilities: int) -> dict[str, Any]:
    """Judges the driver's reply when root of the container sets the limit of the container's group."""
    wanted, found = f"code {NO_PERMISSION}, no permission", f"code {code}"
    if code == NO_PERMISSION:
        return check(ROOT, PASSED, wanted, found, detail=claimed)
    if code != 0:
        return check(ROOT, NOT_RUN, wanted, found, detail=f"the limit could not be set for the test: {call}")
    if capabilities & CAP_SYS_ADMIN:
        detail = (
            "the container has CAP_SYS_ADMIN, so its root may raise the limit: start the container without --privileged"
        )
        return check(ROOT, OPEN, wanted, found, detail=detail)
    return check(ROOT, VIOLATED, wanted, found, detail=f"{claimed}: root without CAP_SYS_ADMIN may set the limit")


def of_managed(claimed: str, found: Deltas) -> dict[str, Any]:
    """Judges whether managed memory on the card is charged to the group. Driver 615 charges it to no group, which gives
    the verdict ``open`` and no violation.
    """
    wanted = f"{found.size} charged to the group"
    if found.fault:
        return check(MANAGED, NOT_RUN, wanted, "", "bytes", found.fault)
    if 100 * found.ordinary < SHOWN_PERCENT * found.size:
        detail = f"{claimed}: the driver charges not even ordinary memory to the group"
        return check(MANAGED, VIOLATED, wanted, found.ordinary, "bytes", detail)
    report = f"{claimed}: {found.card} of {found.size} bytes of managed memory were placed on the card"
    if 100 * found.group >= SHOWN_PERCENT * found.size:
        return check(MANAGED, PASSED, wanted, found.group, "bytes", report)
    if 100 * found.card < SHOWN_PERCENT * found.size:
        return check(MANAGED, NOT_RUN, wanted, found.group, "bytes", report)
    detail = f"{report}, not charged to the group; libvgpu.so counts them in programs that load it"
    return check(MANAGED, OPEN, wanted, found.group, "bytes", detail)


def of_orphan(claimed: str, code: int, call: str, found: Deltas) -> dict[str, Any]:
    """Judges whether the driver charges or refuses memory that a child allocates by the driver descriptor of its ended
    parent.
    """
    wanted = f"{found.size} charged to the group, or refused"
    if found.fault:
        return check(ORPHAN, NOT_RUN, wanted, "", "bytes", found.fault)
    if code == OUT_OF_MEMORY:
        return check(ORPHAN, PASSED, wanted, "refused", "", claimed)
    if code != 0:
        detail = (
            f"{call or 'libcuda'} returned {code} to the child, so no request reached the driver; the check does "
            "not try raw ioctl calls"
        )
        return check(ORPHAN, NOT_RUN, wanted, "", "bytes", detail)
    charged = 100 * found.group >= SHOWN_PERCENT * found.size
    detail = f"{claimed}: {found.size} bytes were granted in the name of a process that has ended"
    return check(ORPHAN, PASSED if charged else VIOLATED, wanted, found.group, "bytes", detail)


def of_beside(claimed: str, filled: dict[str, Any], seen: dict[str, tuple[int, int, int]]) -> dict[str, Any]:
    """Judges whether the limit and the account of the neighbour (another slice) stay unchanged while this slice is
    filled. ``seen``: the neighbour's (soft, hard, used) ``before``, ``while`` and ``after`` the fill; ``filled``: the
    check of that fill.
    """
    wanted = "the neighbour's limit and account unchanged"
    if len(seen) < len(("before", "while", "after")):
        return check(BESIDE, NOT_RUN, wanted, "", detail=filled["detail"])
    report = "; ".join(f"{when} soft {one[0]}, hard {one[1]}, used {one[2]}" for when, one in seen.items())
    if len(set(seen.values())) > 1:
        return check(BESIDE, VIOLATED, wanted, report, "bytes", f"{claimed}: {filled['detail']}")
    if filled["verdict"] != PASSED:
        return check(BESIDE, filled["verdict"], wanted, report, "bytes", f"this slice: {filled['detail']}")
    return check(BESIDE, PASSED, wanted, report, "bytes", claimed)
