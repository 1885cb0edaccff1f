# SPDX-License-Identifier: Apache-2.0
"""``vgpuctl explain pod NAMESPACE/NAME``: says why a pod waits, or which GPUs it holds. It works without a running
device plugin.

The scheduler vgpu-scheduler knows most, so it is asked first. It listens only on the loopback address of its pod. If
vgpuctl runs elsewhere, it asks the API server instead for the pod's requests, for the plan that the scheduler wrote on
the pod, and for the events about it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .._shared.pods import annotations as pod_annotations
from .._shared.pods import requests, resizes
from ..errors import Fatal
from ..node import kube_access, kube_api

SCHEDULER = "127.0.0.1:8880"
# Paths at which a kubeconfig that may read pods can be. The first file that exists is used.
KUBECONFIGS = (
    "~/.kube/config",
    "/etc/kubernetes/admin.conf",
    "/etc/rancher/k3s/k3s.yaml",
    "/etc/kubernetes/kubelet.conf",
)
WRITERS = ("vgpu-scheduler", "vgpu-device-plugin", "default-scheduler", "kubelet")
ANSWER_S = 30.0


def explain(given: argparse.Namespace) -> int:
    """Prints the explanation, and returns the exit status. The status is 1 if neither the scheduler nor the API server
    responds, and 2 if no pod is named."""
    namespace, _slash, name = given.pod.rpartition("/")
    namespace = namespace or "default"
    if not name:
        print("vgpuctl: explain pod needs a name: vgpuctl explain pod NAMESPACE/NAME", file=sys.stderr)
        return 2
    try:
        lines = of_scheduler(given.scheduler, namespace, name)
        if lines is None:
            api = kube_api.Api(kube_access.read(kubeconfig(given.kubeconfig)), ANSWER_S)
            lines = of_api(api, namespace, name)
    except (kube_api.ApiError, Fatal, OSError, ValueError) as fault:
        print(f"vgpuctl: pod {namespace}/{name}: {' '.join(str(fault).split())}", file=sys.stderr)
        return 1
    print(json.dumps({"pod": f"{namespace}/{name}", "lines": lines}, indent=1) if given.json else "\n".join(lines))
    return 0


def of_scheduler(address: str, namespace: str, name: str) -> list[str] | None:
    """Returns the scheduler's explanation, or None if no scheduler listens at the address. If the response is an error,
    raises ValueError with its text.
    """
    host, _colon, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]") or "127.0.0.1", int(port), timeout=ANSWER_S)
    try:
        connection.request("GET", f"/explain/{quote(namespace)}/{quote(name)}")
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    if answer.status != 200:
        raise ValueError(text.strip())
    return text.rstrip().splitlines()


def kubeconfig(named: str) -> str:
    """Returns the path of the kubeconfig to use. Raises Fatal if there is none."""
    candidates = [named] if named else [os.environ.get("KUBECONFIG", "").split(os.pathsep)[0], *KUBECONFIGS]
    for one in filter(None, candidates):
        path = Path(one).expanduser()
        if path.exists() or named:
            return str(path)
    raise Fatal(
        f"the scheduler does not respond, and no kubeconfig is at {', '.join(KUBECONFIGS)}; name one with --kubeconfig"
    )


def of_api(api: Any, namespace: str, name: str) -> list[str]:
    """Returns the explanation that follows from the API server's responses. Raises ApiError."""
    folder = f"/api/v1/namespaces/{quote(namespace)}"
    pod = api.get(f"{folder}/pods/{quote(name)}")
    meta, spec, status = (pod.get(key) or {} for key in ("metadata", "spec", "status"))
    lines = [f"{namespace}/{name}: {status.get('phase') or 'Unknown'}, on {spec.get('nodeName') or 'no node'}"]
    try:
        ask = requests.read_pod(pod)
        lines += [f"  {line}" for line in (requests.asked(ask) if ask.wants_gpus else ["requests no GPU"])]
    except requests.DialectError as fault:
        lines += ["  its GPU request is invalid:", *(f"    {one}" for one in fault.findings)]
    if spec.get("schedulerName"):
        lines.append(f"  scheduler {spec['schedulerName']}")
    lines += plan(meta.get("annotations") or {})
    for one in status.get("conditions") or []:
        if one.get("status") == "False" and one.get("message"):
            lines.append(f"  {one.get('type')}: {one['message']}")
    selector = quote(f"involvedObject.uid={meta.get('uid')}", safe="")
    try:
        found = api.get(f"{folder}/events?fieldSelector={selector}").get("items") or []
    except kube_api.ApiError as fault:
        return [*lines, f"  its events cannot be read: {fault}"]
    return lines + events(found)


def plan(annotations: dict[str, str]) -> list[str]:
    try:
        parts = pod_annotations.read_annotations(annotations)
    except pod_annotations.PlanError as fault:
        return [f"  {fault}"]
    if parts is None:
        return ["  no plan of its GPUs yet"]
    source = "assigned by the kubelet, not as planned" if pod_annotations.GIVEN in annotations else "planned"
    source = "assigned, resized" if resizes.RESIZED in annotations else source
    lines = [f"  {source}:"]
    for part in parts:
        for device in part.devices:
            compute = f"{device.cores} %" if device.cores else "the compute that others leave"
            lines.append(f"    container {part.container}: {device.uuid}: {device.memory_mib} MiB, {compute}")
    return [*lines, *(f"  {one}" for one in resizes.under_way(annotations))]


def events(found: list[dict[str, Any]]) -> list[str]:
    """Returns a line for each of the last ten events of the pod, the newest last. Only warnings, and events of
    schedulers, of the device plugin and of the kubelet, are included.
    """

    def when(one: dict[str, Any]) -> str:
        return str(one.get("lastTimestamp") or one.get("eventTime") or one["metadata"].get("creationTimestamp") or "")

    def writer(one: dict[str, Any]) -> str:
        return str((one.get("source") or {}).get("component") or one.get("reportingComponent") or "")

    shown = [one for one in sorted(found, key=when) if one.get("type") == "Warning" or writer(one) in WRITERS]
    return [f"  {when(one)} {writer(one)}: {one.get('reason')}: {one.get('message')}" for one in shown[-10:]]
