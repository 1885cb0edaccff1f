# SPDX-License-Identifier: Apache-2.0
"""Defines the chart's default values, and makes its Kubernetes objects with the functions that the roles use too."""

from __future__ import annotations

import copy
import json
from typing import Any, NamedTuple

from plugins.module_utils.config import node_config
from plugins.module_utils.config import variables as schema
from plugins.module_utils.kube import chart_manifests, device_plugin_manifests, scheduler_desired
from plugins.module_utils.pods.resources import Config

# Group variables that only Ansible's controller or a playbook run uses. The chart does not take them.
NOT_IN_A_CHART = (
    "vgpu_verify",
    "vgpu_kubeconfig",
    "vgpu_kube_context",
    "vgpu_package_environment",
    "vgpu_other_names",
    *(schema.PREFIX + name for name in schema.ONLY_FOR_THE_HOST),
)
# columns: key in the scheduler's configuration, key in vgpu_resource_names, default resource name
NAMES = (
    ("count", "count", Config().gpu),
    ("memory", "memory", Config().memory),
    ("memoryPercentage", "memory_percentage", Config().memory_percentage),
    ("cores", "cores", Config().cores),
    ("priority", "priority", Config().priority),
)
LISTEN = schema.VARIABLES["vgpu_metrics_listen"].default
LABELS = schema.VARIABLES["vgpu_labels"].default
TOLERATIONS = [
    {"key": "node-role.kubernetes.io/control-plane", "operator": "Exists", "effect": "NoSchedule"},
    {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
]


class Images(NamedTuple):
    """Names of our two images, each with the version of its sources as the tag."""

    plugin: str
    scheduler: str


def defaults(images: Images) -> dict[str, Any]:
    desired = device_plugin_manifests.Desired(images.plugin)
    return {
        "image": images.plugin,
        "imagePullPolicy": desired.pull_policy,
        "imagePullSecrets": [],
        "nodeSelector": {device_plugin_manifests.NODE_LABEL: device_plugin_manifests.LABEL_VALUE},
        "tolerations": [],
        "kubeletDir": desired.kubelet_dir,
        "libraryRoot": desired.library_root,
        "environment": {},
        "options": [],
        "variables": {},
        "scheduler": {
            "enabled": False,
            "image": images.scheduler,
            "kubeSchedulerImage": "",
            "replicas": 2,
            "nodeSelector": {},
            "tolerations": TOLERATIONS,
            "metricsNamespaces": ["monitoring"],
            "options": [],
            "config": {},
        },
    }


def merged(images: Images, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the defaults overridden by ``given``: mappings are merged, other values replaced, as in Helm."""

    def over(base: Any, more: Any) -> Any:
        if not (isinstance(base, dict) and isinstance(more, dict)):
            return copy.deepcopy(more)
        return {key: over(base.get(key), more[key]) if key in more else base[key] for key in {**base, **more}}

    found: dict[str, Any] = over(defaults(images), given)
    return found


def compact(content: Any) -> str:
    """Returns JSON exactly as Helm's toJson writes it, so that digests in pod annotations equal those of Helm."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def names(values: dict[str, Any]) -> dict[str, str]:
    said = values["variables"].get("vgpu_resource_names") or {}
    return {name: said.get(key) or default for name, key, default in NAMES}


def node_objects(values: dict[str, Any], namespace: str) -> list[dict[str, Any]]:
    """Returns the objects of the device plugin, in the order in which they are applied."""
    variables = values["variables"]
    listen = variables.get("vgpu_metrics_listen", LISTEN)
    options = [*([f"{device_plugin_manifests.LISTEN}={listen}"] if listen else [])]
    taint = variables.get("vgpu_unhealthy_taint", "none")
    options += [*(["--node-labels"] if variables.get("vgpu_labels", LABELS) else [])]
    options += [*([f"--unhealthy-taint={taint}"] if taint != "none" else []), *values["options"]]
    desired = device_plugin_manifests.Desired(
        values["image"],
        namespace,
        options=options,
        config_path=node_config.PATH,
        library_root=values["libraryRoot"],
        kubelet_dir=values["kubeletDir"],
        tolerations=values["tolerations"],
        environment=values["environment"],
        pull_policy=values["imagePullPolicy"],
    )
    carried = chart_manifests.Carried(
        compact(variables),
        node_selector=values["nodeSelector"],
        pull_secrets=values["imagePullSecrets"],
        limited=[names(values)["count"]],
    )
    return chart_manifests.node_manifests(desired, carried)


def scheduler_objects(values: dict[str, Any], namespace: str) -> list[dict[str, Any]]:
    """Returns the objects of the scheduler, even if ``scheduler.enabled`` is false."""
    own = values["scheduler"]
    config = {**own["config"], "resourceNames": names(values)}
    desired = scheduler_desired.Desired(
        own["image"],
        own["kubeSchedulerImage"],
        namespace,
        replicas=own["replicas"],
        config=config,
        node_selector=own["nodeSelector"],
        tolerations=own["tolerations"],
        options=own["options"],
        may_give=[f"system:serviceaccount:{namespace}:{device_plugin_manifests.NAME}"],
        metrics_namespaces=own["metricsNamespaces"],
    )
    return chart_manifests.scheduler_objects(desired, compact(config), values["imagePullSecrets"])
