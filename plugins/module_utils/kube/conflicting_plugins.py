# SPDX-License-Identifier: Apache-2.0
"""Finds device plugins of other products for the same GPUs, and removes those that the user named. The search goes
through the API server, because only the cluster shows a plugin's owner (such as a DaemonSet), which would start the
plugin again. On a host, state/conflicting_on_host.py finds the plugin's socket and process. All I/O goes through an API
object with ``get(path)``, ``delete(path)`` and ``apply(path, body, dry_run)``.
"""

from __future__ import annotations

import re
import time
from typing import Any, Callable, Iterable, NamedTuple, Sequence
from urllib.parse import quote

# Maps a pattern of image names to the plugin's vendor and its default resources. The first match counts.
OWNERS = (
    (re.compile(r"volcano-vgpu-device-plugin"), "Volcano's vGPU plugin", ("volcano.sh/vgpu-number",)),
    (re.compile(r"gpushare-(?:device-)?plugin"), "Alibaba's gpushare plugin", ("aliyun.com/gpu-mem",)),
    (
        re.compile(r"(?:^|/)gpu-manager\b"),
        "Tencent's gpu-manager",
        ("tencent.com/vcuda-core", "tencent.com/vcuda-memory"),
    ),
    (re.compile(r"(?:^|/)(?:projecthami/)?hami(?:[:@]|\Z)"), "HAMi's plugin", ("nvidia.com/gpu",)),
    (re.compile(r"4pdosc/k8s-(?:device-plugin|vdevice)"), "4paradigm's plugin", ("nvidia.com/gpu",)),
    (re.compile(r"(?:^|/)k8s-device-plugin(?:[:@]|\Z)"), "NVIDIA's plugin", ("nvidia.com/gpu",)),
)
# Images whose names also match, but which hold plugins for devices of other vendors.
FOREIGN = re.compile(r"(?:^|/)(?:rocm|amd|intel|mellanox|xilinx)(?:/|-)")
# Programs in matching images that are no device plugins: NVIDIA's discovery and its helpers, HAMi's scheduler and
# monitor.
NO_PLUGIN = ("gpu-feature-discovery", "config-manager", "mps-control-daemon", "scheduler", "vGPUmonitor")
RESOURCE_OPTION = re.compile(r"\A--resource-name[= ](\S+)\Z")
RESOURCE_VARIABLE = "RESOURCE_NAME"
OURS = "vgpu-device-plugin"
MIRROR = "kubernetes.io/config.mirror"
OVER = ("Succeeded", "Failed")
# Seconds between two polls of ending pods.
PAUSE = 1.0


class ConflictingPlugin(NamedTuple):
    """Describes the owner of a conflicting plugin. ``title``: the name by which the user permits its removal, such as
    "DaemonSet kube-system/x", "ClusterPolicy y", "Pod default/z" or "static pod kube-system/z-node". ``path``: of the
    object on the API server; empty if the API server cannot remove it.
    """

    title: str
    owner: str
    resources: tuple
    nodes: tuple
    path: str
    remedy: str


class ConflictError(Exception):
    """Conflicting device plugins run, or their pods did not end in time; the text names each plugin."""


def find(api: Any, nodes: Iterable[str]) -> list[ConflictingPlugin]:
    """Returns the owners of other products' device plugins on these nodes, each once."""
    found: dict[str, ConflictingPlugin] = {}
    for node in nodes:
        selector = quote(f"spec.nodeName={node}", safe="")
        pods = (api.get(f"/api/v1/pods?fieldSelector={selector}") or {}).get("items") or []
        for pod in pods:
            who = _whose(pod)
            if who is None or (pod.get("status") or {}).get("phase") in OVER:
                continue
            title, path, remedy = _keeper(api, pod, node)
            before = found.get(title)
            resources = tuple(sorted({*who[1], *(before.resources if before else ())}))
            found[title] = ConflictingPlugin(
                title, who[0], resources, (*(before.nodes if before else ()), node), path, remedy
            )
    return [found[title] for title in sorted(found)]


def _whose(pod: dict[str, Any]) -> tuple[str, tuple] | None:
    """Returns the vendor and the resources of the device plugin that a pod runs; None if it runs none."""
    if (pod["metadata"].get("labels") or {}).get("app.kubernetes.io/name") == OURS:
        return None
    for container in pod["spec"].get("containers") or []:
        image = str(container.get("image") or "")
        if FOREIGN.search(image) or _program(container) in NO_PLUGIN:
            continue
        for pattern, owner, resources in OWNERS:
            if pattern.search(image):
                return owner, _said(container) or resources
    return None


def _words(container: dict[str, Any]) -> list[str]:
    return [str(one) for one in [*(container.get("command") or []), *(container.get("args") or [])]]


def _program(container: dict[str, Any]) -> str:
    """Returns the first word of a container's command, without its folder; empty if the container names no command."""
    return "".join(_words(container)[:1]).rpartition("/")[2]


def _said(container: dict[str, Any]) -> tuple:
    """Returns the resource name that the plugin's command-line options or environment variables set."""
    words = _words(container)
    for number, word in enumerate(words):
        match = RESOURCE_OPTION.match(word if "=" in word else " ".join(words[number : number + 2]))
        if match:
            return (match.group(1),)
    for one in container.get("env") or []:
        if one.get("name") == RESOURCE_VARIABLE and one.get("value"):
            return (str(one["value"]),)
    return ()


def _keeper(api: Any, pod: dict[str, Any], node: str) -> tuple[str, str, str]:
    """Follows a pod's owners to the topmost owner, which would start the pod again. Returns this owner's title, path
    and remedy.
    """
    meta = pod["metadata"]
    name = f"{meta['namespace']}/{meta['name']}"
    if MIRROR in (meta.get("annotations") or {}):
        return f"static pod {name}", "", f"remove its manifest from the folder of static pods on node {node}"
    owner = _controller(meta)
    if owner is None:
        return f"Pod {name}", f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}", "delete it"
    path = f"/apis/{owner['apiVersion']}/namespaces/{meta['namespace']}/{owner['kind'].lower()}s/{owner['name']}"
    title = f"{owner['kind']} {meta['namespace']}/{owner['name']}"
    above = _controller((api.get(path) or {}).get("metadata") or {})
    if above is not None and above["kind"] == "ClusterPolicy":
        policy = f"/apis/{above['apiVersion']}/clusterpolicies/{above['name']}"
        remedy = "set devicePlugin.enabled=false in it, because the GPU operator would start its plugin again"
        return f"ClusterPolicy {above['name']}", policy, remedy
    return title, path, "delete it"


def _controller(meta: dict[str, Any]) -> dict[str, Any] | None:
    owners = meta.get("ownerReferences") or []
    return next((one for one in owners if one.get("controller")), None)


def judge(
    conflicts: Sequence[ConflictingPlugin], resources: Sequence[str], consent: Sequence[str], ignore: bool
) -> tuple[list[ConflictingPlugin], list[str], list[str]]:
    """Returns (plugins to remove, errors, warnings). Only a plugin that offers one of ``resources`` is an error. A
    plugin that ``consent`` names is removed, whatever it offers.
    """
    remove, faults, notes = [], [], []
    for one in conflicts:
        said = "{} ({}) offers {} on {}".format(one.title, one.owner, ", ".join(one.resources), ", ".join(one.nodes))
        if one.title in consent and one.path:
            remove.append(one)
        elif one.title in consent:
            faults.append(f"{said}; the API server cannot remove it: {one.remedy}")
        elif set(one.resources) & set(resources) and not ignore:
            faults.append(
                f"{said}; our plugin offers this too, and the kubelet keeps only the last plugin. Either "
                f"{one.remedy}, or "
                f'put "{one.title}" into device_plugin_conflicting_plugins_remove, or set '
                "device_plugin_conflicting_plugins: ignore"
            )
        else:
            notes.append(f"{said}; vgpu.fleet does not count its allocations of these GPUs")
    gone = [title for title in consent if title not in {one.title for one in conflicts}]
    notes += [f'device_plugin_conflicting_plugins_remove: "{title}" runs on none of these nodes' for title in gone]
    return remove, faults, notes


def remove(
    api: Any,
    conflicts: Sequence[ConflictingPlugin],
    nodes: Sequence[str],
    timeout: int,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Removes these objects and waits until their pods have left the nodes. Raises ConflictError."""
    for one in conflicts:
        if one.title.startswith("ClusterPolicy "):
            name = one.title.partition(" ")[2]
            version = one.path.partition("/apis/")[2].rpartition("/clusterpolicies/")[0]
            off = {"apiVersion": version, "kind": "ClusterPolicy", "metadata": {"name": name}}
            api.apply(one.path, dict(off, spec={"devicePlugin": {"enabled": False}}), False)
        else:
            api.delete(one.path)
    titles = {one.title for one in conflicts}
    left: list[str] = []
    for _look in range(max(1, int(timeout / PAUSE))):
        left = [f"{one.title} on {', '.join(one.nodes)}" for one in find(api, nodes) if one.title in titles]
        if not left:
            return
        sleep(PAUSE)
    raise ConflictError(f"after {timeout} s pods of {'; '.join(left)} still run; check why they do not end")
