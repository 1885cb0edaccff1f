# SPDX-License-Identifier: Apache-2.0
"""Compares the nodes' resources in Kubernetes with the resources that the nodes themselves advertise. It works on
objects as the API returns them and does no I/O.

The kubelet reports changes to the API server only periodically, by default every ten seconds. The caller must wait for
that report before the comparison.
"""

from __future__ import annotations

from typing import Any, Iterable

from .running import entry

ENDED = ("Succeeded", "Failed")
READY = "Ready"


def asked(pod: dict[str, Any], resource: str) -> int:
    """Returns how many units of an extended resource a pod uses. This is the greater of two numbers: the sum of its
    containers, and the most that an init container uses together with the sidecars started before it.
    """
    spec = pod.get("spec") or {}
    running = sum(_limit(one, resource) for one in spec.get("containers") or [])
    most = sidecars = 0
    for one in spec.get("initContainers") or []:
        if one.get("restartPolicy") == "Always":
            sidecars += _limit(one, resource)
            most = max(most, sidecars)
        else:
            most = max(most, sidecars + _limit(one, resource))
    return max(running + sidecars, most)


def _limit(container: dict[str, Any], resource: str) -> int:
    value = ((container.get("resources") or {}).get("limits") or {}).get(resource)
    return int(str(value)) if str(value).isdigit() else 0


def facts(node: dict[str, Any] | None, pods: Iterable[dict[str, Any]], resources: Iterable[str]) -> dict[str, Any]:
    """Returns what Kubernetes reports of a node: ``{found, ready, resources: {name: {capacity, allocatable,
    allocated}}, pods}``. An entry of ``pods`` is ``{pod, resource, count, phase}``.
    """
    status = (node or {}).get("status") or {}
    ready = [one.get("status") for one in status.get("conditions") or [] if one.get("type") == READY]
    living = [pod for pod in pods if ((pod.get("status") or {}).get("phase")) not in ENDED]
    rows, sums = [], {}
    for resource in resources:
        held = [(pod, asked(pod, resource)) for pod in living]
        rows += [
            {
                "pod": "{namespace}/{name}".format(**pod["metadata"]),
                "resource": resource,
                "count": count,
                "phase": (pod.get("status") or {}).get("phase"),
            }
            for pod, count in held
            if count
        ]
        sums[resource] = {
            "capacity": _whole((status.get("capacity") or {}).get(resource)),
            "allocatable": _whole((status.get("allocatable") or {}).get(resource)),
            "allocated": sum(count for _pod, count in held),
        }
    return {"found": node is not None, "ready": ready == ["True"], "resources": sums, "pods": rows}


def _whole(value: Any) -> int | None:
    return int(value) if str(value).isdigit() else None


def compare(name: str, seen: dict[str, Any], offered: dict[str, Any]) -> list[dict[str, str]]:
    """Returns where the resources of a node in Kubernetes (``seen``, from ``facts``) differ from those that the node
    reports (``offered``: ``{resources: {name: count}, withheld: count}``). ``withheld`` counts the expected slices
    (equal shares of a GPU) that the node does not advertise now, for example unhealthy ones.
    """
    if not seen["found"]:
        remedy = "give the name that kubectl get nodes lists (device_plugin_node_name), or join the host to the cluster"
        return [entry("Kubernetes", name, "a node", "no node of this name", remedy)]
    out = []
    if not seen["ready"]:
        remedy = "kubectl describe node; systemctl status kubelet"
        out.append(entry("Kubernetes", name, "Ready", "not Ready", remedy))
    for resource, count in sorted(offered["resources"].items()):
        shown = seen["resources"][resource]
        if shown["capacity"] != count:
            remedy = (
                "wait for the kubelet's next report; if the difference stays: systemctl restart vgpu-device-plugin "
                "kubelet"
            )
            found = "none" if shown["capacity"] is None else shown["capacity"]
            out.append(entry("Kubernetes capacity", f"{name} {resource}", count, found, remedy))
        elif shown["allocatable"] is not None and shown["allocatable"] < count - int(offered.get("withheld") or 0):
            remedy = "the kubelet lists some slices as unhealthy; see: vgpuctl slices, journalctl -u kubelet"
            expected = f"at least {count - int(offered.get('withheld') or 0)}"
            out.append(entry("Kubernetes allocatable", f"{name} {resource}", expected, shown["allocatable"], remedy))
        if shown["allocated"] > count:
            remedy = "pods use slices that no longer exist: evict the newest of these pods"
            out.append(
                entry("Kubernetes allocated", f"{name} {resource}", f"at most {count}", shown["allocated"], remedy)
            )
    return out


def offered(capacity: dict[str, Any]) -> dict[str, Any]:
    """Returns the resources that a node advertises, from the result of vgpu_capacity_info. A node whose pods get GPUs
    by claims has slices but no resource.
    """
    pieces = [piece["resource"] for piece in capacity.get("expected") or []]
    counts = {name: pieces.count(name) for name in capacity.get("resources") or []}
    withheld = len({one["id"] for one in capacity.get("expected") or []} - set(capacity.get("advertised") or []))
    return {"resources": counts, "withheld": withheld}
