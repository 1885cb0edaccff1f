# SPDX-License-Identifier: Apache-2.0
"""Judges the isolation of a slice by three witnesses: the probe inside, nvidia-smi inside, the host outside. Pure.

A check is ``{name, verdict, expected, found, unit, detail, left_out}``; the verdict is held, violated, not-run, open or
detected; ``left_out`` says that it was not run for want of time.
Open is what docs/threat-model.md says cannot be stopped from user space; it spoils nothing, and is told.
Detected is one that the node's watcher named while it was gone; one that it could see and did not name is violated.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, Sequence

HELD, VIOLATED, NOT_RUN, OPEN, DETECTED = "held", "violated", "not-run", "open", "detected"
# What the probe may say.
VERDICTS = (HELD, VIOLATED, NOT_RUN, OPEN)
MIB = 1 << 20

# The checks that the probe must report when all are asked for.
PROBE_CHECKS = (
    "totals",
    "limit-exact",
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
# And the ways round. Some may be open, so nobody looks from outside at how much they get.
PROBE_BYPASSES = (
    "bypass-path",
    "bypass-copy",
    "bypass-namespace",
    "bypass-symbol-table",
    "bypass-own-loader",
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
)
# Checks of this module.
SHARE, BESIDE, PERCENT = "share", "share-beside", "percent"
# What a second slice made, and what the probe there is asked for.
IMPORT, LEND = "import-beside", "export-beside"
# Of the GPU's time, in percent, that a share may be found larger, as in the probe.
SHARE_TOLERANCE = 5
OWN = (
    "mounts",
    "device-nodes",
    "gpu-as-leased",
    "limit-as-configured",
    "outside-memory",
    "nvidia-smi",
    "nvidia-ml-py",
    BESIDE,
    IMPORT,
)
# Checks of the probe that take all memory of the slice.
FILLS = ("limit-exact", "four-processes")
# The part of a fill that a look must have hit.
SEEN_PERCENT = 90
# A host may lack what these need; that alone does not spoil the verdict.
OPTIONAL = ("device-nodes", "outside-memory", "nvidia-smi", "nvidia-ml-py", BESIDE, IMPORT)
# Names of the ways round begin so. Each needs something of its own: a setuid program, room on the card.
BYPASS = "bypass-"
# The only ones that may be open, as docs/threat-model.md says; the probe is not believed about others.
MAY_BE_OPEN = tuple(BYPASS + one for one in ("namespace", "symbol-table", "own-loader", "ledger-lie"))
# Open too, and nothing is gone by it: what can be loaded is told, and the watcher has nothing to name.
GRAPHICS = "graphics"


# How a probe answers that does not know what it is asked: one of an older library.
BAD_ARGUMENTS, USAGE = 64, "usage: vgpu-probe"
NO_CHECK = re.compile(r"there is (no check '[^']*')")


class Expected(NamedTuple):
    """What the plugin says the leased slice is."""

    uuid: str
    memory_mib: int


def check(
    name: str, verdict: str, expected: Any, found: Any, unit: str = "", detail: str = "", late: bool = False
) -> dict[str, Any]:
    """The figures as text, so that every check has the same types. ``late``: it was left out for want of time."""
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
    return check(name, HELD if expected == found else VIOLATED, expected, found, unit, detail)


def of_mounts(missing: list[str] | None, expected: Sequence[str]) -> dict[str, Any]:
    """Whether the process sees every file of the Allocate answer."""
    if missing is None:
        return check("mounts", NOT_RUN, ", ".join(expected), "", detail="the process ended before the host could look")
    present = [path for path in expected if path not in missing]
    detail = f"not the host's file inside: {', '.join(missing)}" if missing else ""
    return check("mounts", VIOLATED if missing else HELD, ", ".join(expected), ", ".join(present), detail=detail)


def of_device_nodes(found: Sequence[str] | None, gpus: int) -> dict[str, Any]:
    """``found``: names of the device nodes of GPUs that the process has. Which GPU it is, its UUID says."""
    wanted = f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"
    if not found:
        why = "this host has no device nodes of GPUs" if found == [] else "the process ended before the host could look"
        return check("device-nodes", NOT_RUN, wanted, "", detail=why)
    return check("device-nodes", VIOLATED if len(found) > gpus else HELD, wanted, ", ".join(found))


def of_probe(
    rc: int, out: str, err: str, timed_out: bool, expected: Expected, wanted: Sequence[str]
) -> list[dict[str, Any]]:
    """The probe's own checks, and what its figures say when held against the configuration."""
    try:
        report = json.loads(out)
        devices, own = list(report["devices"]), [dict(one) for one in report["checks"]]
    except (ValueError, KeyError, TypeError):
        if rc == BAD_ARGUMENTS and USAGE in err:
            return [check("probe", NOT_RUN, "a report", "none", detail=_older(err))]
        said = " ".join((err or out).split())[-400:]
        detail = "it ran past its time" if timed_out else f"exit status {rc}: {said}"
        return [check("probe", VIOLATED, "a report", "none", detail=detail)]
    checks = [_clean(one) for one in own]
    seen = {one["name"] for one in checks}
    checks += [
        check(name, NOT_RUN, "a result", "none", detail="the probe did not report it")
        for name in wanted
        if name not in seen
    ]
    if timed_out or rc < 0:
        detail = "it ran past its time" if timed_out else f"it was ended by signal {-rc}"
        checks.append(check("probe", VIOLATED, "exit status 0", rc, detail=detail))
    uuids = [str(one.get("uuid", "")) for one in devices]
    checks.append(equal("gpu-as-leased", expected.uuid, ", ".join(uuids)))
    limit = expected.memory_mib * MIB
    totals = {name: [one.get(name) for one in devices] for name in ("total_cuda", "total_nvml")}
    as_wanted = all(found == [limit] for found in totals.values())
    shown = ", ".join(f"{name} {found[0] if len(found) == 1 else found}" for name, found in totals.items())
    checks.append(check("limit-as-configured", HELD if as_wanted else VIOLATED, limit, shown, "bytes"))
    return checks


def _older(err: str) -> str:
    """``err``: of a probe that did not know what it was asked."""
    found = NO_CHECK.search(err)
    what = found[1] if found else "no such option"
    return f"the probe of this node knows {what}; its library is of another version: run playbooks/upgrade.yml first"


def _clean(one: dict[str, Any]) -> dict[str, Any]:
    """A check of the probe. A verdict that is none of the three words is no pass."""
    verdict = one.get("verdict")
    detail = str(one.get("detail") or "")
    if verdict not in VERDICTS:
        verdict, detail = VIOLATED, f"the probe's verdict is {verdict!r}; {detail}"
    name = str(one.get("name", "?"))
    if verdict == OPEN and name not in (*MAY_BE_OPEN, GRAPHICS):
        verdict, detail = VIOLATED, f"{detail}; this way must not be open"
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
    """The probe's checks where no container was made: there the libraries are the host's, whatever a container gets."""
    why = "this was a namespace of the host, with its libraries; a container has those that its runtime hands in"
    return [
        dict(one, detail=f"{one['detail']}; {why}") if (one["name"], one["verdict"]) == (GRAPHICS, OPEN) else one
        for one in checks
    ]


def filled(checks: Sequence[dict[str, Any]]) -> int:
    """The most that the probe says it held at once, 0 where it filled nothing."""
    said = [one["found"] for one in checks if one["name"] in FILLS and one["unit"] == "bytes"]
    return max((int(one) for one in said if one.isdigit()), default=0)


def seen(most_bytes: int | None, filled_bytes: int) -> bool:
    """Whether a look from outside hit the fill: what is hardly held while the host looks shows nothing of the limit."""
    return most_bytes is not None and 0 < SEEN_PERCENT * filled_bytes <= 100 * most_bytes


def of_outside(most_bytes: int | None, looks: int, fault: str, expected: Expected, filled_bytes: int) -> dict[str, Any]:
    """The driver's account of the slice's processes against the limit. More is a violation, whatever the probe says;
    that it is not more counts only where a look hit what the probe says it filled.
    """
    limit = expected.memory_mib * MIB
    if most_bytes is None:
        detail = fault or f"NVML on the host named no process of the slice in {looks} looks"
        return check("outside-memory", NOT_RUN, f"at most {limit}", "", "bytes", detail)
    verdict, detail = HELD if most_bytes <= limit else VIOLATED, f"greatest of {looks} looks"
    if verdict == HELD and not seen(most_bytes, filled_bytes):
        verdict, detail = NOT_RUN, f"{detail}, and none hit the {filled_bytes} bytes that the probe says it filled"
    return check("outside-memory", verdict, f"at most {limit}", most_bytes, "bytes", detail)


def of_watcher(
    one: dict[str, Any], named_s: float | None, looks: int, needed: int, fault: str, text: str = ""
) -> dict[str, Any]:
    """What becomes of a way round that is open. ``named_s``: seconds until the watcher named it, None: it did not.

    ``looks`` of the watcher while it was held, of which ``needed`` would have done; ``fault``: why it cannot see.
    """
    wanted = "named by the watcher"
    if named_s is not None:
        return check(one["name"], DETECTED, wanted, f"after {named_s:.1f} s", "", text)
    if fault or looks < needed:
        why = fault or f"the watcher looked {looks} times meanwhile, {needed} were needed"
        return dict(one, detail=f"{one['detail']}; not detected: {why}")
    return check(one["name"], VIOLATED, wanted, f"not in {looks} looks", "", one["detail"])


def left_out(name: str, duration: int) -> dict[str, Any]:
    """A check that was not tried for want of time; it is no pass, and told."""
    detail = f"left out: the {duration} s of this slice had passed"
    return check(name, NOT_RUN, "a result", "none", detail=detail, late=True)


def kernel_ns(out: str) -> int:
    """What the kernel of the probe's share takes by itself, as the probe measured it; 0 where it did not."""
    try:
        measures = json.loads(out)["measures"]
        return next((int(one["value"]) for one in measures if one["name"] == "kernel"), 0)
    except (ValueError, KeyError, TypeError):
        return 0


def of_beside(ours: str, theirs: str) -> dict[str, Any]:
    """The share that two slices of a GPU got at once, by the reports of the probe's ``share`` in each: neither may get
    more than its own. What the probe of one did not report is no pass.

    A probe counts kernels, and measures what one takes; where the other was busy at that moment it takes one for
    longer than it is, and its share for larger. So the shorter of both measures counts for both, of one GPU.
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
                one["verdict"] = HELD
        verdicts.append(one["verdict"])
        expected.append(one["expected"])
        got.append(share)
        said.append(one["detail"])
    verdict = VIOLATED if VIOLATED in verdicts else HELD if verdicts == [HELD, HELD] else NOT_RUN
    return check(BESIDE, verdict, " and ".join(expected), " and ".join(got), PERCENT, "; ".join(said))


def _one(out: str, name: str) -> dict[str, Any] | None:
    try:
        return _clean(next(one for one in json.loads(out)["checks"] if one["name"] == name))
    except (ValueError, KeyError, TypeError, StopIteration):
        return None


def of_import(ours: str, theirs: str, said: str) -> dict[str, Any]:
    """What a slice could take of what another one made, by the reports of the probes in both. The one that takes it
    judges; where it could not, the other may say why. ``said``: by a probe on its stderr.
    """
    taken, made = _one(ours, IMPORT), _one(theirs, LEND)
    if taken is None:
        detail = _older(said) if USAGE in said else " ".join(said.split())[-200:] or "the probe did not report it"
        return check(IMPORT, NOT_RUN, "a result", "none", detail=detail)
    if taken["verdict"] == NOT_RUN and made:
        taken["detail"] = f"{taken['detail']}; in the other slice: {made['detail']}"
    return taken


def open_way(name: str) -> dict[str, Any]:
    """A way round that was granted memory, as far as its run got."""
    return check(name, OPEN, "0", "", "bytes")


def of_reader(name: str, rc: int, out: str, err: str, expected: Expected) -> dict[str, Any]:
    """What a program of NVIDIA's own shows inside the slice: a line ``uuid, MiB`` for each GPU. 126, 127: not there."""
    wanted = f"{expected.uuid}, {expected.memory_mib}"
    if rc in (126, 127):
        return check(name, NOT_RUN, wanted, "", "MiB", f"{name} is not there")
    found = "; ".join(line.strip() for line in out.splitlines() if line.strip())
    detail = "" if rc == 0 else f"exit status {rc}: {' '.join(err.split())[-200:]}"
    return check(name, HELD if rc == 0 and found == wanted else VIOLATED, wanted, found, "MiB", detail)


def optional(name: str) -> bool:
    """Whether a check that did not run leaves the verdict as it is."""
    return name in OPTIONAL or name.startswith(BYPASS)


def overall(checks: Sequence[dict[str, Any]]) -> str:
    """One word for a slice: violated beats not-run beats held, and nothing checked is not a pass.

    Open and detected say nothing.
    """
    verdicts = [
        one["verdict"]
        for one in checks
        if one["verdict"] not in (OPEN, DETECTED) and not (one["verdict"] == NOT_RUN and optional(one["name"]))
    ]
    if VIOLATED in verdicts:
        return VIOLATED
    return NOT_RUN if NOT_RUN in verdicts or not verdicts else HELD


def worst(verdicts: Sequence[str]) -> str:
    """One word for a host."""
    if VIOLATED in verdicts:
        return VIOLATED
    return NOT_RUN if NOT_RUN in verdicts or not verdicts else HELD
