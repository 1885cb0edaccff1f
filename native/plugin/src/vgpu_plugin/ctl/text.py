# SPDX-License-Identifier: Apache-2.0
"""Makes the text that vgpuctl prints from the plugin's responses, which are passed as plain values, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..allocation.allocation_files import AllocationFiles
from ..errors import counted
from .tables import Row, age, known, table, wide, wrapped

# The reason of an unhealthy GPU begins with this text if the driver no longer finds the GPU.
LOST = "lost: "

HEALTHY = "healthy"
MIB = 1 << 20
# This text is printed as the holder of a slice that a container got by its CDI name, because the plugin does not know
# that container.
OUTSIDE = "a container outside Kubernetes"
STATES = ("free", "in use", "unhealthy")


def gpu_table(status: dict[str, Any], width: int = 0) -> list[str]:
    """Returns a table of all GPUs with their load, and with the number of their slices in each state. For a narrow
    terminal, "NVIDIA" is omitted from the model and reasons are cut after their first words. ``reasons`` returns them
    in full.
    """
    rows: list[Row] = [("GPU", "MODEL", "MiB", "OF MiB", "UTIL %", "°C", "SLICES", "HEALTH")]
    for gpu in status["gpus"]:
        states = [one["state"] for one in status["slices"] if one["uuid"] == gpu["uuid"]]
        sums = ", ".join(f"{states.count(name)} {name}" for name in STATES if name in states)
        total = gpu["memory_mib"] or -1
        figures = [known(one) for one in (gpu["memory_used_mib"], total, gpu["utilisation"], gpu["temperature"])]
        rows.append((gpu["index"], gpu["model"], *figures, sums or "none", gpu["reason"] or HEALTHY))
    if len(rows) == 1:
        return ["this node has no GPU"]
    numbers = (2, 3, 4, 5)
    if wide(whole := table(rows, numbers), width):
        short = [(row[0], str(row[1]).removeprefix("NVIDIA "), *row[2:-1], _first_words(row[-1])) for row in rows[1:]]
        return table([rows[0], *short], numbers, width, 1)
    return whole


def _first_words(reason: object) -> str:
    return str(reason).partition(":")[0]


def reasons(status: dict[str, Any]) -> list[str]:
    """Returns lines that say why GPUs are unhealthy, followed by the warnings. A reason that a warning contains is not
    repeated.
    """
    lines = []
    for gpu in status["gpus"]:
        if gpu["reason"]:
            said = gpu["reason"].removeprefix(LOST)
            if not any(said in one and gpu["uuid"] in one for one in status["warnings"]):
                lines.append(f"GPU {gpu['index']} {gpu['uuid']}: {gpu['reason']}")
    return lines + [f"warning: {one}" for one in status["warnings"]]


def status(answer: dict[str, Any], width: int = 0) -> str:
    state = "registered" if answer["registered"] else f"not registered: {answer['kubelet_error']}"
    if not has_kubelet(answer):
        state = "for docker and podman: this host has no Kubernetes"
    names = ", ".join(answer["resources"]) or answer["resource"]
    head = [
        f"plugin {answer['version']} (pid {answer['pid']}), resource {names}, {state}",
        f"configuration {answer['config_path']} (sha256 {answer['config_sha256'][:12]})",
        f"library {answer['library'] or 'none'}",
        *([f"containers get their GPU by {answer['hand_over']}: {answer['hand_over_reason']}"] * has_kubelet(answer)),
    ]
    states = [one["state"] for one in answer["slices"]]
    sums = ", ".join(f"{states.count(name)} {name}" for name in STATES)
    lines = [f"{counted(len(states), 'slice')}: {sums}; see: vgpuctl slices"]
    for one in answer["allocations"]:
        ids = ", ".join(short_id(answer, name) for name in one["slice_ids"])
        lines.append(f"allocation {one['id']} ({_whose(one)}): {ids}{ends(one)}")
    texts = ["\n".join(head), "\n".join(gpu_table(answer, width)), "\n".join([*lines, *reasons(answer)])]
    return "\n\n".join(wrapped(one, width) for one in texts)


def has_kubelet(status: dict[str, Any]) -> bool:
    """Returns whether the node has a kubelet, running or not. Other hosts have only docker or podman. A node is assumed
    to have a kubelet if its plugin is too old to report that there is none.
    """
    return not status.get("no_kubelet", False)


def short_id(status: dict[str, Any], slice_id: str) -> str:
    """Returns a slice id with the index of its GPU instead of the UUID (0::2). The command explain accepts this form
    too.
    """
    uuid, _colons, number = slice_id.partition("::")
    index = next((gpu["index"] for gpu in status["gpus"] if gpu["uuid"] == uuid), None)
    return slice_id if index is None or not number else f"{index}::{number}"


def _whose(allocation: dict[str, Any]) -> str:
    return f"{allocation['kind']}, {allocation['holder']}" if allocation["holder"] else str(allocation["kind"])


def ends(allocation: dict[str, Any]) -> str:
    """Returns the words at the end of a line that say when an allocation ends. The text is empty for an allocation of
    the kubelet.
    """
    if allocation["kind"] == "kubelet":
        return ""
    if allocation["kind"] == "container" and not allocation["expires_in_s"]:
        return ", as long as the container exists"
    return f", ends in {age(allocation['expires_in_s'])}"


def container(one: dict[str, Any]) -> str:
    """Returns namespace/pod/container. If the allocation has no pod, returns its holder, or its kind if the holder is
    unknown.
    """
    if one["pod"]:
        return "/".join((one["namespace"], one["pod"], one["container"]))
    return str(one.get("holder") or one["kind"])


def watch(answer: dict[str, Any], everything: bool = False, width: int = 0) -> str:
    """Returns the watcher's current findings (processes that bypass their limits), and then the past ones. Some past
    findings are about checks that this host itself ran. These are only counted, unless ``everything`` is set.
    """
    lines = [
        f"policy {answer['policy']}; {counted(answer['looks'], 'poll')}, one every {answer['interval_s']:g} s; a "
        f"finding is reported after {answer['looks_to_name']} polls in a row"
    ]
    lines += [f"warning: {answer['fault']}"] if answer["fault"] else []
    checks = [one for one in answer["past"] if one["kind"] == "lease" and not everything]
    lines += [f"now, for {age(one['age_s'])}  {_finding(one)}" for one in answer["findings"]]
    lines += [
        f"over for {age(max(0.0, one['over_s']))}  {_finding(one)}" for one in answer["past"] if one not in checks
    ]
    if len(lines) == 1:
        lines.append("no process bypasses the library")
    if checks:
        lines.append(
            f"findings of this host's own checks that are over: {len(checks)}, the last for "
            f"{age(max(0.0, min(one['over_s'] for one in checks)))}; see: vgpuctl watch --all"
        )
    for one in answer["old_mounts"]:
        lines.append(
            f"old mounts  {container(one)}  allocation {one['allocation']} mounts single files, as older versions did; "
            "create its pod or container again"
        )
    return wrapped("\n".join(lines), width)


def _finding(one: dict[str, Any]) -> str:
    whose = "a check of this host" if one["kind"] == "lease" else container(one)
    sent = f"; {one['action']} was sent" if one["action"] else ""
    return f"{whose}  {one['reason']}: {one['text']}{sent}"


def slice_rows(
    status: dict[str, Any], usages: list[dict[str, Any]], tenants: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Returns all slices in the form that vgpuctl slices --json prints. ``tenants`` maps allocations to names of
    containers that the plugin does not know.
    """
    tenants = tenants or {}
    # (allocation, GPU UUID) → the current size. After a resize it differs from the slice's size.
    sizes = {
        (one["allocation"], one["uuid"]): (
            *(one["memory_limit"] // MIB, round(100 * one["share_limit"])),
            *(one.get(name, one["memory_limit"]) // MIB for name in ("memory_promised", "memory_most")),
        )
        for one in usages
        if one.get("memory_limit")
    }
    holders = {one: record for record in status["allocations"] for one in record["slice_ids"]}
    pods = {one["allocation"]: container(one) for one in usages if one["pod"]}
    indexes = {gpu["uuid"]: gpu["index"] for gpu in status["gpus"]}
    unnamed = OUTSIDE if has_kubelet(status) else "a container by CDI"
    out = []
    for one in status["slices"]:
        record = holders.get(one["id"])
        held = ""
        if record is not None:
            held = pods.get(record["id"]) or record["holder"] or tenants.get(record["id"], "")
            held = held or f"{record['kind']} {record['id']}"
        elif one["in_use"]:
            held = tenants.get(AllocationFiles.static_name(one["id"]), unnamed)
        kept = ("id", "uuid", "resource", "mode", "memory_mib", "sm_percent", "state", "health", "in_use")
        size = sizes.get((record["id"], one["uuid"])) if record is not None and _alone(one, record) else None
        if size is not None:
            one = {**one, "memory_mib": size[0], "sm_percent": size[1]}
        bounds = size[2:] if size is not None else (one["memory_mib"], one["memory_mib"])
        about = {"gpu": indexes.get(one["uuid"], -1), "held_by": held, "allocation": record["id"] if record else ""}
        about |= {"promised_mib": bounds[0], "most_mib": bounds[1]}
        out.append({**{key: one[key] for key in kept}, **about})
    return out


def _alone(piece: dict[str, Any], record: dict[str, Any]) -> bool:
    """Returns whether the slice is the only slice of its allocation on this GPU."""
    return sum(one.partition("::")[0] == piece["uuid"] for one in record["slice_ids"]) == 1


def slices(rows: list[dict[str, Any]], width: int = 0) -> str:
    several = len({one["resource"] for one in rows}) > 1
    lines: list[Row] = [
        ("GPU", "STATE", "MEM MiB", "SM %", "MODE", *(["RESOURCE"] if several else []), "HELD BY", "SLICE")
    ]
    for one in rows:
        resource = [one["resource"]] if several else []
        figures = one["memory_mib"], one["sm_percent"], one["mode"]
        lines.append((one["gpu"], one["state"], *figures, *resource, one["held_by"] or "-", one["id"]))
    if len(lines) == 1:
        return "this node offers no slice"
    more = [
        bursting(one["held_by"], one["gpu"], one["promised_mib"], one["most_mib"], one["memory_mib"])
        for one in rows
        if one.get("promised_mib", 0) < one.get("most_mib", 0)
    ]
    if wide(whole := table(lines, (2, 3)), width):
        # The slice id is shortened to the index of the GPU and a number. The command explain accepts this form too.
        numbers = [one["id"].partition("::")[2] for one in rows]
        short = [f"{one['gpu']}::{number}" if number else one["id"] for one, number in zip(rows, numbers, strict=True)]
        lines = [lines[0], *((*row[:-1], name) for row, name in zip(lines[1:], short, strict=True))]
        whole = table(lines, (2, 3), width, len(lines[0]) - 2)
    return "\n".join([*whole, *more])


def bursting(name: str, gpu: object, promised: int, most: int, now: int) -> str:
    """Returns a line about a container with burst memory (memory above its promised amount). The figures are in MiB."""
    return f"{name}: {promised} MiB of GPU {gpu} are promised; the limit is {now} MiB now, and at most {most} MiB"


def resized(answer: dict[str, Any], width: int = 0) -> str:
    """Returns the text for the result of a resize, with one line for each GPU."""
    whose = f"allocation {answer['allocation']} ({_whose(answer)})"
    lines = []
    for one in answer["gpus"]:
        sizes = one["memory_mib_before"], one["memory_mib"]
        shares = _share(one["sm_percent_before"]), _share(one["sm_percent"])
        memory = f"{sizes[0]} MiB as before" if sizes[0] == sizes[1] else f"from {sizes[0]} to {sizes[1]} MiB"
        cores = f"{shares[0]} as before" if shares[0] == shares[1] else f"from {shares[0]} to {shares[1]}"
        held = f"; {-(-one['memory_used'] >> 20)} MiB are in use" if one["memory_used"] >= 0 else ""
        lines.append(f"{whose}: GPU {one['uuid']}: {memory}, {cores}{held}")
    if answer["leaving"]:
        lines.append(
            "its processes use more than the new size: each process that does so ends at its next driver call, and its "
            "memory is free then; see: vgpuctl top"
        )
    return wrapped("\n".join(lines), width)


def _share(percent: int) -> str:
    return f"{percent} % of the SMs" if percent else "no limit of the SMs"
