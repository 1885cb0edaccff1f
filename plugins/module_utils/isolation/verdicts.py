# SPDX-License-Identifier: Apache-2.0
"""Judges the isolation of a slice (share of a GPU) from the reports of the probe (a program in the slice that tries to
exceed the limits), of nvidia-smi in the slice, and of the host. No I/O. Verdicts: ``passed``; ``violated``;
``not-run``; ``open``: the probe bypassed the library in a way that user space cannot prevent, so the slice does not
fail; ``detected``: the node's watcher, which looks for bypasses, named the bypass while it ran.

A check is ``{name, verdict, expected, found, unit, detail, left_out}``. ``left_out``: the check did not run because the
time for the slice was over. docs/threat-model.md lists the bypasses that may be open; the report shows them. If the
watcher could see a bypass and did not name it, the verdict is ``violated``.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, Sequence

PASSED, VIOLATED, NOT_RUN, OPEN, DETECTED = "passed", "violated", "not-run", "open", "detected"
# The probe's verdicts.
VERDICTS = (PASSED, VIOLATED, NOT_RUN, OPEN)
# Probes before version 0.1.0 used this word for "passed". A node has such a probe until its upgrade, and again after a
# rollback.
FORMER = "held"
MIB = 1 << 20
# The driver may exceed a slice's limit by this many bytes. It grows a memory pool in steps of 32 MiB; a step that does
# not fit is given back by the library. It also rounds pieces of each process up to 2 MiB. Measured on an H200 with
# driver 580: 16 MiB beyond a slice of 35 942 MiB.
DRIVER_STEP = 64 * MIB

# The checks that the probe must report when all are requested.
PROBE_CHECKS = (
    "totals",
    "limit-exact",
    "private-context",
    "every-allocator",
    "four-processes",
    "dlsym-route",
    "getprocaddress-route",
    "visible-devices",
    "freed",
    "neighbours",
    "graphics",
    "share",
)
# The bypasses that the probe must report. The host does not compare their memory with the limit, because some of them
# cannot be prevented.
PROBE_BYPASSES = (
    "bypass-path",
    "bypass-copy",
    "bypass-renamed",
    "bypass-namespace",
    "bypass-symbol-table",
    "bypass-own-loader",
    "bypass-leader",
    "bypass-covered",
    "bypass-covered-preload",
    "bypass-folder",
    "bypass-no-preload",
    "bypass-other-preload",
    "bypass-own-limits",
    "bypass-setuid",
    "bypass-other-libcuda",
    "bypass-more-devices",
    "bypass-own-files",
    "bypass-descriptors",
    "bypass-ipc-kept",
    "bypass-handle-kept",
    "bypass-pool-kept",
    "bypass-array-kept",
    "bypass-ledger-removed",
    "bypass-ledger-grown",
    "bypass-ledger-emptied",
    "bypass-ledger-spoiled",
    "bypass-ledger-lie",
    "bypass-ledger-boast",
)
# Names of the probe's check of a slice's compute share, and of the same check in two slices at once; the unit of both
# checks.
SHARE, BESIDE, PERCENT = "share", "share-beside", "percent"
# IMPORT: the check whether a slice can import memory of a second slice. EXPORT: the probe's check in the second slice.
IMPORT, EXPORT = "import-beside", "export-beside"
# Percent of the GPU's time by which a measured share may exceed its limit, as in the probe.
SHARE_TOLERANCE = 5
# Checks of the limits that the driver itself enforces; driver_checks.py makes them.
DRIVER_CHECKS = (
    "driver-limit",
    "driver-refuses",
    "driver-limit-children",
    "driver-limit-restart",
    "driver-limit-root",
    "managed-raw",
    "dead-creator",
    "driver-limit-beside",
)
OWN = (
    "mounts",
    "device-nodes",
    "gpu-as-leased",
    "limit-as-configured",
    "outside-memory",
    *DRIVER_CHECKS,
    "nvidia-smi",
    "nvidia-ml-py",
    BESIDE,
    IMPORT,
)
# Checks of the probe that fill all memory of the slice.
FILLS = ("limit-exact", "four-processes")
# A poll of the host's NVML must have seen this percentage of the memory that the probe filled; else the polls prove
# nothing.
SEEN_PERCENT = 90
# Checks whose requirements some hosts do not meet. On such a host they do not run, and the slice's verdict ignores
# them.
OPTIONAL = (
    *("private-context", "device-nodes", "outside-memory", "nvidia-smi", "nvidia-ml-py", BESIDE, IMPORT),
    *(one for one in DRIVER_CHECKS if one not in ("driver-limit", "driver-limit-restart")),
)
# Prefix of the bypasses' names. Each bypass has its own requirements, for example a setuid program or free GPU memory.
BYPASS = "bypass-"
# The only bypasses that may be open, as docs/threat-model.md lists them. If the probe reports another bypass as open,
# it is a violation.
MAY_BE_OPEN = tuple(
    BYPASS + one
    for one in (
        "namespace",
        "symbol-table",
        "own-loader",
        "leader",
        "covered",
        "covered-preload",
        "ledger-lie",
        "ledger-boast",
    )
)
# This bypass must use more than the slice's memory, so it runs alone, while no other slice of the GPU is in use.
PAST_THE_SLICE = BYPASS + "ledger-boast"
# The only finding of the watcher that proves this bypass, because other findings of its process may have another cause.
NAMED_FOR = {BYPASS + "covered": "foreign-mount"}
# This check may be open but allocates nothing: the probe only reports which libraries can be loaded. So the watcher has
# nothing to name.
GRAPHICS = "graphics"


# An older probe that does not know a check or an option ends with this exit status and a message that begins with these
# texts.
BAD_ARGUMENTS, USAGE = 64, "usage: vgpu-probe"
NO_CHECK = re.compile(r"there is (no check '[^']*')")


class Expected(NamedTuple):
    """Describes the leased slice as the device plugin reports it."""

    uuid: str
    memory_mib: int


def check(
    name: str, verdict: str, expected: Any, found: Any, unit: str = "", detail: str = "", late: bool = False
) -> dict[str, Any]:
    """Returns a check with its figures as text, so that every check has the same types. ``late``: whether the time for
    the slice was over before the check could run.
    """
    return {
        "name": name,
        "verdict": verdict,
        "expected": str(expected),
        "found": str(found),
        "unit": unit,
        "detail": detail,
        "left_out": late,
    }


def equal(name: str, expected: Any, found: Any, unit: str = "", detail: str = "") -> dict[str, Any]:
    return check(name, PASSED if expected == found else VIOLATED, expected, found, unit, detail)


def of_mounts(missing: list[str] | None, expected: Sequence[str]) -> dict[str, Any]:
    """Judges whether the process sees every file that the device plugin's Allocate reply mounts. ``missing``: paths
    that it does not see; None if the process had ended.
    """
    if missing is None:
        return check(
            "mounts", NOT_RUN, ", ".join(expected), "", detail=("the process ended before the host read its mounts")
        )
    present = [path for path in expected if path not in missing]
    detail = f"the slice does not show the host's file at {', '.join(missing)}" if missing else ""
    return check("mounts", VIOLATED if missing else PASSED, ", ".join(expected), ", ".join(present), detail=detail)


def of_device_nodes(found: Sequence[str] | None, gpus: int) -> dict[str, Any]:
    """Judges the number of GPU device nodes that the process has; gpu-as-leased compares the UUID. ``found``: the names
    of the nodes, None if the process had ended.
    """
    wanted = f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"
    if not found:
        why = (
            "this host has no device nodes of GPUs"
            if found == []
            else ("the process ended before the host read its devices")
        )
        return check("device-nodes", NOT_RUN, wanted, "", detail=why)
    return check("device-nodes", VIOLATED if len(found) > gpus else PASSED, wanted, ", ".join(found))


def of_probe(
    rc: int, out: str, err: str, timed_out: bool, expected: Expected, wanted: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns the checks that the probe reports. Also compares the probe's figures with the configuration."""
    try:
        report = json.loads(out)
        devices, own = list(report["devices"]), [dict(one) for one in report["checks"]]
    except (ValueError, KeyError, TypeError):
        if rc == BAD_ARGUMENTS and USAGE in err:
            return [check("probe", NOT_RUN, "a report", "none", detail=_older(err))]
        said = " ".join((err or out).split())[-400:]
        detail = "the probe exceeded its time limit" if timed_out else f"exit status {rc}: {said}"
        return [check("probe", VIOLATED, "a report", "none", detail=detail)]
    checks = [_clean(one) for one in own]
    seen = {one["name"] for one in checks}
    checks += [
        check(name, NOT_RUN, "a result", "none", detail="the probe did not report it")
        for name in wanted
        if name not in seen
    ]
    if timed_out or rc < 0:
        detail = "the probe exceeded its time limit" if timed_out else f"the probe was ended by signal {-rc}"
        checks.append(check("probe", VIOLATED, "exit status 0", rc, detail=detail))
    uuids = [str(one.get("uuid", "")) for one in devices]
    checks.append(equal("gpu-as-leased", expected.uuid, ", ".join(uuids)))
    limit = expected.memory_mib * MIB
    totals = {name: [one.get(name) for one in devices] for name in ("total_cuda", "total_nvml")}
    as_wanted = all(found == [limit] for found in totals.values())
    shown = ", ".join(f"{name} {found[0] if len(found) == 1 else found}" for name, found in totals.items())
    checks.append(check("limit-as-configured", PASSED if as_wanted else VIOLATED, limit, shown, "bytes"))
    return checks


def _older(err: str) -> str:
    """Returns the reason and the next step from ``err``, the stderr of a probe that lacks a check or an option."""
    found = NO_CHECK.search(err)
    what = found[1] if found else "no such option"
    return f"the probe of this node knows {what}; the node's library has another version: run upgrade.yml first"


def _clean(one: dict[str, Any]) -> dict[str, Any]:
    """Returns a check of the probe in the form of ``check``. An unknown verdict is a violation."""
    verdict = PASSED if one.get("verdict") == FORMER else one.get("verdict")
    detail = str(one.get("detail") or "")
    if verdict not in VERDICTS:
        verdict, detail = VIOLATED, f"the probe reported the unknown verdict {verdict!r}; {detail}"
    name = str(one.get("name", "?"))
    if verdict == OPEN and name not in (*MAY_BE_OPEN, GRAPHICS):
        verdict, detail = VIOLATED, f"{detail}; this bypass must be prevented"
    return check(
        name,
        verdict,
        one.get("expected", ""),
        one.get("found", ""),
        str(one.get("unit", "")),
        detail,
        verdict == NOT_RUN and one.get("left_out") is True,
    )


def of_namespace(checks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the probe's checks of a run without a container. An open check of graphics gets a note: the libraries
    that the probe found are the host's.
    """
    why = (
        "the probe ran in a namespace of the host, with the host's libraries; a container has the libraries that "
        "its runtime mounts"
    )
    return [
        dict(one, detail=f"{one['detail']}; {why}") if (one["name"], one["verdict"]) == (GRAPHICS, OPEN) else one
        for one in checks
    ]


def filled(checks: Sequence[dict[str, Any]]) -> int:
    """Returns the most bytes that the probe reports as allocated at once; 0 if the probe filled nothing."""
    said = [one["found"] for one in checks if one["name"] in FILLS and one["unit"] == "bytes"]
    return max((int(one) for one in said if one.isdigit()), default=0)


def seen(most_bytes: int | None, filled_bytes: int) -> bool:
    """Returns whether a poll of the host saw the slice filled. If none did, the polls prove nothing about the limit,
    because the slice was hardly filled when they ran.
    """
    return most_bytes is not None and 0 < SEEN_PERCENT * filled_bytes <= 100 * most_bytes


def of_outside(most_bytes: int | None, polls: int, fault: str, expected: Expected, filled_bytes: int) -> dict[str, Any]:
    """Compares the memory that the driver reports for the slice's processes with the limit plus ``DRIVER_STEP``. More
    memory is a violation, whatever the probe reports. Other figures pass only if a poll saw the slice filled as the
    probe reports.
    """
    limit = expected.memory_mib * MIB + DRIVER_STEP
    wanted = f"at most {limit} ({expected.memory_mib} MiB, and {DRIVER_STEP // MIB} MiB for rounding by the driver)"
    if most_bytes is None:
        detail = fault or f"NVML on the host listed no process of the slice in {polls} polls"
        return check("outside-memory", NOT_RUN, wanted, "", "bytes", detail)
    verdict, detail = PASSED if most_bytes <= limit else VIOLATED, f"the greatest figure of {polls} polls"
    if verdict == PASSED and not seen(most_bytes, filled_bytes):
        verdict, detail = (
            NOT_RUN,
            (f"{detail}, and no poll saw the {filled_bytes} bytes that the probe reports as filled"),
        )
    return check("outside-memory", verdict, wanted, most_bytes, "bytes", detail)


def of_watcher(
    one: dict[str, Any], named_s: float | None, polls: int, needed: int, fault: str, text: str = ""
) -> dict[str, Any]:
    """Judges an open bypass by the watcher's findings. ``named_s``: seconds until the watcher named the bypass, None if
    it did not. ``polls``: the watcher's polls while the bypass ran; ``needed``: how many polls suffice to name it.
    ``fault``: why the watcher cannot see the bypass.
    """
    wanted = "named by the watcher"
    if named_s is not None:
        return check(one["name"], DETECTED, wanted, f"after {named_s:.1f} s", "", text)
    if fault or polls < needed:
        why = fault or f"the watcher polled {polls} times while the bypass ran, and needs {needed} polls to name it"
        return dict(one, detail=f"{one['detail']}; not detected: {why}")
    return check(one["name"], VIOLATED, wanted, f"not named in {polls} polls", "", one["detail"])


def left_out(name: str, duration: int) -> dict[str, Any]:
    """Returns a check that did not run because the time for the slice was over. It does not pass, and the report shows
    it.
    """
    detail = f"left out: the {duration} s of this slice had passed"
    return check(name, NOT_RUN, "a result", "none", detail=detail, late=True)


def kernel_ns(out: str) -> int:
    """Returns, from the probe's ``share`` report, how many nanoseconds a GPU kernel takes undisturbed; 0 if that was
    not measured.
    """
    try:
        measures = json.loads(out)["measures"]
        return next((int(one["value"]) for one in measures if one["name"] == "kernel"), 0)
    except (ValueError, KeyError, TypeError):
        return 0


def of_beside(ours: str, theirs: str) -> dict[str, Any]:
    """Judges the compute shares that two slices of a GPU got at once, from the report of the probe's ``share`` in each
    slice: no slice may get more than its own share. If a probe did not report a share, the check does not pass. A probe
    computes its share from the number of its kernels and the measured duration of one kernel. If the other slice was
    busy during that measurement, the duration is too long and the share too large. So the shorter of the two durations
    is used for both slices, which run on the same GPU.
    """
    took = [kernel_ns(one) for one in (ours, theirs)]
    verdicts, expected, got, said = [], [], [], []
    for text, its_ns in zip((ours, theirs), took):
        try:
            one = _clean(next(one for one in json.loads(text)["checks"] if one["name"] == SHARE))
        except (ValueError, KeyError, TypeError, StopIteration):
            one = check(SHARE, NOT_RUN, "a result", "none", detail="the probe did not report it")
        share = one["found"]
        if one["verdict"] == VIOLATED and one["unit"] == PERCENT and all(took):
            share = str(round(float(share) * min(took) / its_ns))
            if float(share) <= float(one["expected"]) + SHARE_TOLERANCE:
                one["verdict"] = PASSED
        verdicts.append(one["verdict"])
        expected.append(one["expected"])
        got.append(share)
        said.append(one["detail"])
    verdict = VIOLATED if VIOLATED in verdicts else PASSED if verdicts == [PASSED, PASSED] else NOT_RUN
    return check(BESIDE, verdict, " and ".join(expected), " and ".join(got), PERCENT, "; ".join(said))


def _one(out: str, name: str) -> dict[str, Any] | None:
    try:
        return _clean(next(one for one in json.loads(out)["checks"] if one["name"] == name))
    except (ValueError, KeyError, TypeError, StopIteration):
        return None


def of_import(ours: str, theirs: str, said: str) -> dict[str, Any]:
    """Returns the importing probe's verdict on whether a slice can import another slice's memory. If that probe could
    not judge, the exporting probe's detail is added. ``ours``, ``theirs``: the reports of the importing and the
    exporting probe; ``said``: their stderr.
    """
    taken, made = _one(ours, IMPORT), _one(theirs, EXPORT)
    if taken is None:
        detail = _older(said) if USAGE in said else " ".join(said.split())[-200:] or "the probe did not report it"
        return check(IMPORT, NOT_RUN, "a result", "none", detail=detail)
    if taken["verdict"] == NOT_RUN and made:
        taken["detail"] = f"{taken['detail']}; in the other slice: {made['detail']}"
    return taken


def neighbours_in_use(name: str) -> dict[str, Any]:
    """Returns the check of a bypass that did not run, because it uses memory beyond its slice and other slices of the
    GPU are in use.
    """
    detail = "other slices of the GPU are in use, and this bypass takes memory beyond its own slice"
    return check(name, NOT_RUN, "a result", "none", detail=detail)


def open_way(name: str) -> dict[str, Any]:
    """Returns the check of an open bypass whose run was ended before the probe reported it. The bypass had got
    memory.
    """
    return check(name, OPEN, "0", "", "bytes")


def of_reader(name: str, rc: int, out: str, err: str, expected: Expected) -> dict[str, Any]:
    """Judges the output of an NVIDIA program inside the slice: one line ``uuid, MiB`` for each GPU. Exit statuses 126
    and 127: the program does not exist there.
    """
    wanted = f"{expected.uuid}, {expected.memory_mib}"
    if rc in (126, 127):
        return check(name, NOT_RUN, wanted, "", "MiB", f"the slice has no program {name}")
    found = "; ".join(line.strip() for line in out.splitlines() if line.strip())
    detail = "" if rc == 0 else f"exit status {rc}: {' '.join(err.split())[-200:]}"
    return check(name, PASSED if rc == 0 and found == wanted else VIOLATED, wanted, found, "MiB", detail)


def optional(name: str) -> bool:
    """Returns whether the slice's verdict ignores this check if the check did not run."""
    return name in OPTIONAL or name.startswith(BYPASS)


def overall(checks: Sequence[dict[str, Any]]) -> str:
    """Returns one verdict for a slice: violated if one check is violated, else not-run if one did not run, else passed.
    Open and detected checks are ignored. A slice without a check is not-run.
    """
    verdicts = [
        one["verdict"]
        for one in checks
        if one["verdict"] not in (OPEN, DETECTED) and not (one["verdict"] == NOT_RUN and optional(one["name"]))
    ]
    if VIOLATED in verdicts:
        return VIOLATED
    return NOT_RUN if NOT_RUN in verdicts or not verdicts else PASSED


def worst(verdicts: Sequence[str]) -> str:
    """Returns one verdict for a host from those of its slices: violated if one is violated, else not-run if one is
    not-run, else passed. Without any slice it is not-run.
    """
    if VIOLATED in verdicts:
        return VIOLATED
    return NOT_RUN if NOT_RUN in verdicts or not verdicts else PASSED
