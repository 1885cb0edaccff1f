# SPDX-License-Identifier: Apache-2.0
"""What vgpuctl prints for people, from the plain values of the plugin's answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Of the table of top: columns of numbers, and how short names may become.
NUMBERS = (2, 3, 4, 5, 6, 7, 8)
SHORT_GPU, SHORT_NAME = 13, 12
# With names as short as that it has 80 columns.
SHORT_HEAD = ("CONTAINER", "GPU", "MEM MiB", "OF MiB", "MEM %", "SM %", "GRANT %", "GOT %", "PROCS")


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def table(rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> list[str]:
    """Aligned columns; the first row is the head. ``right``: columns of numbers."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[n]) for row in texts) for n in range(len(texts[0]))]
    return [
        "  ".join(
            cell.rjust(width) if n in right else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in texts
    ]


def mib(size: int) -> str:
    return f"{size / (1 << 20):.0f}"


def percent(share: float) -> str:
    return "-" if share < 0 else f"{100 * share:.0f}"


def top(
    usages: Sequence[dict[str, Any]],
    before: dict[tuple[str, str], float] | None = None,
    seconds: float = 0.0,
    width: int = 0,
) -> str:
    """``before``: device seconds of each (allocation, uuid) ``seconds`` ago, for the share that was got since.
    ``width``: of the terminal; 0: any.
    """
    rows: list[Sequence[object]] = [
        ("CONTAINER", "GPU", "MEMORY MiB", "LIMIT MiB", "MEM %", "SM %", "GRANTED %", "GOT %", "PROCESSES")
    ]
    for one in usages:
        name = "/".join((one["namespace"], one["pod"], one["container"])) if one["pod"] else f"({one['allocation']})"
        limit = one["memory_limit"]
        # What it says of itself, or what the driver shows where that is more.
        used = max(one["memory_used"], one.get("memory_driver", -1))
        got = "-"
        then = (before or {}).get((one["allocation"], one["uuid"]))
        if then is not None and seconds > 0:
            got = percent(max(0.0, one["device_seconds"] - then) / seconds)
        rows.append(
            (
                name,
                one["uuid"],
                mib(used),
                mib(limit) if limit else "-",
                percent(used / limit) if limit else "-",
                percent(one["share_limit"]),
                percent(one["share_granted"]),
                got,
                one["processes"],
            )
        )
    if len(rows) == 1:
        return "no container holds a limited slice"
    lines = table(rows, NUMBERS)
    if width and max(map(len, lines)) > width:
        # The figures are what this table is for: names give way, the GPU's first.
        rows = [SHORT_HEAD, *((row[0], shortened(str(row[1]), SHORT_GPU), *row[2:]) for row in rows[1:])]
        over = max(map(len, table(rows, NUMBERS))) - width
        room = max(SHORT_NAME, max(len(str(row[0])) for row in rows) - max(0, over))
        rows = [(shortened(str(row[0]), room), *row[1:]) for row in rows]
        lines = [line[:width] for line in table(rows, NUMBERS)]
    return "\n".join(lines)


def container(one: dict[str, Any]) -> str:
    """The name of a pod's container; of another allocation its kind."""
    return "/".join((one["namespace"], one["pod"], one["container"])) if one["pod"] else str(one["kind"])


def watch(answer: dict[str, Any]) -> str:
    """The findings of now, then those that are over."""
    lines = [
        f"policy {answer['policy']}; {answer['looks']} looks, one each {answer['interval_s']:g} s; a finding is named "
        f"in {answer['looks_to_name']} looks in a row"
    ]
    lines += [f"warning: {answer['fault']}"] if answer["fault"] else []
    for title, findings in (("now", answer["findings"]), ("before", answer["past"])):
        for one in findings:
            sent = f"; {one['action']} was sent" if one["action"] else ""
            lines.append(f"{title}  {container(one)}  {one['reason']}: {one['text']}{sent}")
    if not answer["findings"] and not answer["past"] and not answer["fault"]:
        lines.append("no process bypasses the library")
    for one in answer["old_mounts"]:
        lines.append(
            f"old mounts  {container(one)}  allocation {one['allocation']} has the single files of a former version; "
            "create its pod or container again"
        )
    return "\n".join(lines)


def slices(status: dict[str, Any]) -> str:
    holders = {one: record for record in status["allocations"] for one in record["slice_ids"]}
    rows: list[Sequence[object]] = [("SLICE", "RESOURCE", "MODE", "MEMORY MiB", "SM %", "HEALTH", "HELD BY")]
    for one in status["slices"]:
        record = holders.get(one["id"])
        held = f"{record['kind']} {record['id']}" if record else ("somebody else" if one["in_use"] else "-")
        rows.append(
            (one["id"], one["resource"], one["mode"], one["memory_mib"], one["sm_percent"], health(status, one), held)
        )
    return "\n".join(table(rows, (3, 4))) if len(rows) > 1 else "this node offers no slice"


def health(status: dict[str, Any], piece: dict[str, Any]) -> str:
    """A slice in use may be withheld from the kubelet as unhealthy: what is in use on a healthy GPU is healthy."""
    gpu = next((one for one in status["gpus"] if one["uuid"] == piece["uuid"]), None)
    return "Healthy" if piece["in_use"] and gpu is not None and not gpu["reason"] else str(piece["health"])


def explain(status: dict[str, Any], wanted: str) -> list[str]:
    """Why a GPU (index or UUID), a slice, or all of the node is as it is; empty where ``wanted`` is nothing here."""
    gpus = [gpu for gpu in status["gpus"] if wanted in ("", gpu["uuid"], str(gpu["index"]))]
    pieces = [one for one in status["slices"] if wanted == one["id"]]
    lines: list[str] = []
    for gpu in gpus:
        lines += explain_gpu(status, gpu)
    for piece in pieces:
        lines += explain_slice(status, piece)
    if not wanted:
        if not status["registered"]:
            lines.append(f"the kubelet hands nothing out: {status['kubelet_error']}")
        if not status["library"] and any(one["mode"] == "vcuda" for one in status["slices"]):
            lines.append("no container can start with a slice: the library is not installed; run playbooks/site.yml")
        lines.append(f"containers get their GPU by {status['hand_over']}: {status['hand_over_reason']}")
    mine = [one for one in status["warnings"] if not wanted or any(gpu["uuid"] in one for gpu in gpus)]
    return lines + [f"warning: {one}" for one in mine]


def explain_gpu(status: dict[str, Any], gpu: dict[str, Any]) -> list[str]:
    name = f"GPU {gpu['index']} ({gpu['model']}, {gpu['uuid']})"
    pieces = [one for one in status["slices"] if one["uuid"] == gpu["uuid"]]
    lines = []
    if not gpu["healthy"]:
        remedy = "it comes back after a clean period, once the driver answers for it; see the kernel log for Xid"
        lines.append(f"{name} is unhealthy: {gpu['reason']}; {remedy}")
    kinds = [(one["resource"], one["mode"], one["memory_mib"], one["sm_percent"]) for one in pieces]
    for kind in dict.fromkeys(kinds):
        used = sum(one["in_use"] for one, other in zip(pieces, kinds, strict=True) if other == kind)
        resource, mode, memory_mib, sm_percent = kind
        lines.append(
            f"{name}: {kinds.count(kind)} of {resource} by {mode}, {memory_mib} MiB and {sm_percent} % of the SMs "
            f"each; {used} in use"
        )
    return lines or [f"{name} offers nothing: the configuration {status['config_path']} leaves it out"]


def explain_slice(status: dict[str, Any], piece: dict[str, Any]) -> list[str]:
    gpu = next(one for one in status["gpus"] if one["uuid"] == piece["uuid"])
    sizes = [
        one["memory_mib"] for one in status["slices"] if one["uuid"] == piece["uuid"] and one["mode"] == piece["mode"]
    ]
    lines = [
        f"slice {piece['id']}: {piece['memory_mib']} MiB, one of {len(sizes)} of a GPU of {gpu['memory_mib']} MiB "
        f"({sum(sizes)} MiB sold), {piece['sm_percent']} % of the SMs, by {piece['mode']} of {status['config_path']}"
    ]
    holder = next((one for one in status["allocations"] if piece["id"] in one["slice_ids"]), None)
    if holder is not None:
        lines.append(f"held by allocation {holder['id']} ({holder['kind']})")
    elif piece["in_use"]:
        lines.append("held by a container outside Kubernetes, or by one that the kubelet alone knows")
    if piece["health"] != "Healthy":
        leased = holder is not None and holder["kind"] == "lease"
        why = gpu["reason"] or ("it is leased to a check" if leased else "it is used outside Kubernetes")
        lines.append(f"the kubelet may not give it out: {why}")
    return lines
