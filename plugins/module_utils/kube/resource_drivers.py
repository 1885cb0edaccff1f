# SPDX-License-Identifier: Apache-2.0
"""Finds traces of other drivers of dynamic resource allocation (DRA): DeviceClasses that map one of our resource names,
and ResourceSlices that offer the NVIDIA GPUs of our nodes. All I/O goes through an API object with ``get(path,
refusals)``.
"""

from __future__ import annotations

from typing import Any, Iterable, Sequence
from urllib.parse import quote

GROUP = "/apis/resource.k8s.io"
# API versions of the group, the newest first. A server before 1.32 has none of these versions.
VERSIONS = ("v1", "v1beta2", "v1beta1")
# HTTP statuses of a user who may not read these objects.
REFUSALS = (401, 403)
OF_NVIDIA = ("GPU-", "MIG-")
DRIVERS = ("gpu.nvidia.com",)
OUR_DRIVER, OUR_CLASS = "gpu.vgpu.fleet", "vgpu"


def notes(api: Any, nodes: Iterable[str], resources: Sequence[str]) -> list[str]:
    """Returns notes for a person, one sentence each. Returns no notes if the server has no such API."""
    for version in VERSIONS:
        classes = api.get(f"{GROUP}/{version}/deviceclasses", REFUSALS)
        if classes is None:
            continue
        if not classes:
            return ["DeviceClasses of resource.k8s.io may not be read by this user; other drivers were not searched"]
        found = [_class_note(one, resources) for one in classes.get("items") or []]
        return [one for one in found if one] + _slice_notes(api, version, nodes)
    return []


def _class_note(one: dict[str, Any], resources: Sequence[str]) -> str:
    mapped = (one.get("spec") or {}).get("extendedResourceName")
    if mapped not in resources or one["metadata"]["name"] == OUR_CLASS:
        return ""
    return (
        f"DeviceClass {one['metadata']['name']} maps {mapped}, which our plugin offers too: on nodes without "
        "our plugin, the driver of the class serves pods that request this resource, without limits. If no "
        "pod needs the class, remove its extendedResourceName"
    )


def _slice_notes(api: Any, version: str, nodes: Iterable[str]) -> list[str]:
    offered: dict[str, list[str]] = {}
    for node in nodes:
        selector = quote(f"spec.nodeName={node}", safe="")
        answer = api.get(f"{GROUP}/{version}/resourceslices?fieldSelector={selector}", REFUSALS)
        if not answer:
            return [
                "ResourceSlices of resource.k8s.io may not be read by this user; the GPUs of other drivers were "
                "not searched"
            ]
        drivers = {one["spec"]["driver"] for one in answer.get("items") or [] if _of_nvidia(one["spec"])}
        for driver in sorted(drivers - {OUR_DRIVER}):
            offered.setdefault(driver, []).append(node)
    return [
        f"the DRA driver {driver} offers NVIDIA GPUs on {', '.join(where)}; vgpu.fleet does not count its "
        "allocations of these GPUs: remove this driver from these nodes"
        for driver, where in sorted(offered.items())
    ]


def _of_nvidia(spec: dict[str, Any]) -> bool:
    """Returns whether a ResourceSlice has an NVIDIA GPU. In v1beta1 a device's attributes are one level lower."""
    if spec["driver"] in DRIVERS:
        return bool(spec.get("devices"))
    for device in spec.get("devices") or []:
        attributes = (device.get("basic") or device).get("attributes") or {}
        for name, value in attributes.items():
            if name.rpartition("/")[2] == "uuid" and str((value or {}).get("string")).startswith(OF_NVIDIA):
                return True
    return False
