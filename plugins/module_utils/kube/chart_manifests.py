# SPDX-License-Identifier: Apache-2.0
"""Builds the Kubernetes objects for nodes that no playbook prepares: a DaemonSet that installs the library
(libvgpu.so), the arbiter (which divides a GPU's time between containers) and the settings. A node needs only its driver
and an engine that supports CDI or NVIDIA's runtime. ``tools/chart`` writes the Helm chart and the Kustomize base from
these objects.
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any, Mapping, NamedTuple, Sequence

from . import device_plugin_manifests as plugin
from . import mount_policy, scheduler_desired, scheduler_manifests

# Value of the node's label that makes the second DaemonSet remove all files of the collection from that node.
ABSENT = "absent"
REMOVAL = plugin.NAME + "-removal"
VARIABLES, VARIABLES_FILE = "vgpu-variables", "variables.json"
# Annotation of each pod with the digest of the variables. If a variable changes, Kubernetes therefore replaces the
# pods.
DIGEST = "vgpu.fleet/variables"
SETUP, ARBITER = "vgpu-node-setup", "vgpu-arbiter"
SETUP_PROGRAM = "/opt/vgpu/plugin/current/bin/vgpu-node-setup"
# Path of the library's archive in the image.
ARCHIVES = "/opt/vgpu/library"
# Capabilities of the arbiter. It must open the shared memory pages of every user, and raise its own CPU priority.
ARBITER_RIGHTS = ("DAC_OVERRIDE", "SYS_NICE")


class Carried(NamedTuple):
    """Describes the settings of the DaemonSet. ``variables``: the text of a JSON object with ``vgpu_*`` variables, from
    which the pod makes node.yaml. ``digest``: digest of that text, empty to compute it. ``limited``: names of
    resources; a pod that requests one of these must not mount over our files.
    """

    variables: str
    digest: str = ""
    node_selector: Mapping[str, str] = {plugin.NODE_LABEL: plugin.LABEL_VALUE}
    pull_secrets: Sequence[str] = ()
    limited: Sequence[str] = ("nvidia.com/gpu",)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def node_manifests(desired: plugin.Desired, carried: Carried) -> list[dict[str, Any]]:
    """Returns the objects in the order of their application.

    The program's configuration is a file of the pod, made from the variables; ``desired.configs`` is not used.
    """
    *others, daemon_set = plugin.manifests(desired)
    return [
        *(one for one in others if one["kind"] != "ConfigMap"),
        *mount_policy.manifests(mount_policy.OF_DEVICE_PLUGIN, carried.limited),
        variables_map(desired, carried),
        _carrying(desired, carried, daemon_set),
        _removing(desired, carried, daemon_set),
    ]


def scheduler_objects(
    desired: scheduler_desired.Desired, config: str, pull_secrets: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Returns the scheduler's objects. ``config``: ``desired.config`` as one text. Its digest is an annotation of the
    pods, so that a changed configuration replaces them.
    """
    objects = scheduler_manifests.manifests(desired)
    for one in objects:
        if one["kind"] == "ConfigMap":
            one["data"]["config.yaml"] = config
        if one["kind"] == "Deployment":
            template = one["spec"]["template"]
            template["metadata"]["annotations"] = {scheduler_desired.DIGEST: digest(config)}
            _pull_by(template["spec"], pull_secrets)
    return objects


def variables_map(desired: plugin.Desired, carried: Carried) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": VARIABLES,
            "namespace": desired.namespace,
            "labels": {"app.kubernetes.io/name": plugin.NAME},
        },
        "data": {VARIABLES_FILE: carried.variables},
    }


def _carrying(desired: plugin.Desired, carried: Carried, daemon_set: dict[str, Any]) -> dict[str, Any]:
    """Returns the DaemonSet of the plugin with everything that an unprepared node needs: the configuration in the pod,
    an init container that puts the library on the host, and the arbiter.
    """
    made = copy.deepcopy(daemon_set)
    template = made["spec"]["template"]
    template["metadata"]["annotations"] = {DIGEST: carried.digest or digest(carried.variables)}
    spec = template["spec"]
    folder = desired.config_path.rpartition("/")[0]
    (program,) = spec["containers"]
    # Leave out these volumes of the plugin's DaemonSet, folders of the host and of a ConfigMap, because this pod makes
    # its own configuration.
    spec["volumes"] = [one for one in spec["volumes"] if one["name"] not in ("etc", "configs")]
    spec["volumes"] += [
        {"name": "etc", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
        {"name": "variables", "configMap": {"name": VARIABLES}},
    ]
    program["volumeMounts"] = [one for one in program["volumeMounts"] if one["name"] != "configs"]
    spec["initContainers"] = [_setup(desired, folder)]
    spec["containers"] = [program, _arbiter(desired)]
    spec["nodeSelector"] = dict(carried.node_selector)
    spec["affinity"] = {"nodeAffinity": _unless_absent()}
    _pull_by(spec, carried.pull_secrets)
    return made


def _unless_absent() -> dict[str, Any]:
    term = {"matchExpressions": [{"key": plugin.NODE_LABEL, "operator": "NotIn", "values": [ABSENT]}]}
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}


def _setup(desired: plugin.Desired, folder: str) -> dict[str, Any]:
    """Returns the init container that unpacks the library into a folder for its version, writes node.yaml, and removes
    library versions that no process uses any more.
    """
    return {
        **_container(desired, SETUP),
        "command": [
            SETUP_PROGRAM,
            "install",
            f"--archives={ARCHIVES}",
            f"--library-root={desired.library_root}",
            f"--variables=/etc/{VARIABLES}/{VARIABLES_FILE}",
            f"--config={desired.config_path}",
        ],
        # The program needs privileges, because it inspects every process of the node for library versions in use. If it
        # could not see a process, it would remove that process's version.
        "securityContext": {"privileged": True},
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "256Mi"}},
        "volumeMounts": [
            {"name": "variables", "mountPath": f"/etc/{VARIABLES}", "readOnly": True},
            {"name": "etc", "mountPath": folder},
            {"name": "library", "mountPath": desired.library_root},
            # This folder has the records of allocations, which name the versions in use.
            {"name": "state", "mountPath": "/var/lib/vgpu", "readOnly": True},
        ],
    }


def _arbiter(desired: plugin.Desired) -> dict[str, Any]:
    """Returns the container of the arbiter, the program that divides the time of each GPU between containers. A restart
    of the plugin's container does not affect it.
    """
    program = f"{desired.library_root}/current/vgpu-arbiter"
    return {
        **_container(desired, ARBITER),
        # The arbiter's systemd unit on a host sets the same CPU priority.
        "command": ["nice", "-n", "-10", program, "--run", "/run/vgpu"],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": list(ARBITER_RIGHTS)},
        },
        "resources": {"requests": {"cpu": "10m", "memory": "8Mi"}, "limits": {"memory": "64Mi"}},
        "volumeMounts": [
            # Each allocation's folder is a mount on the host. The container must also see mounts that are made after
            # its start.
            {"name": "run", "mountPath": "/run/vgpu", "mountPropagation": "HostToContainer"},
            {"name": "library", "mountPath": desired.library_root, "readOnly": True},
        ],
    }


def _container(desired: plugin.Desired, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "image": desired.image,
        "imagePullPolicy": desired.pull_policy,
        # Set this path: the default is in /dev, where the container has the host's /dev, so the runtime would create
        # the file on the host.
        "terminationMessagePath": "/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        # NVIDIA's runtime must not add devices or libraries to this container.
        "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}],
    }


def _removing(desired: plugin.Desired, carried: Carried, daemon_set: dict[str, Any]) -> dict[str, Any]:
    """Returns the DaemonSet that removes our files from each node whose label has the value ABSENT. Its pod is ready
    when the node is clean.
    """
    made = copy.deepcopy(daemon_set)
    labels = {"app.kubernetes.io/name": REMOVAL}
    made["metadata"].update(name=REMOVAL, labels=labels)
    made["spec"]["selector"] = {"matchLabels": labels}
    # An update may replace all pods at once, because no workload depends on them.
    made["spec"]["updateStrategy"] = {"type": plugin.ROLLING, "rollingUpdate": {"maxUnavailable": "100%"}}
    made["spec"]["template"]["metadata"] = {"labels": labels}
    spec = made["spec"]["template"]["spec"]
    (program,) = spec["containers"]
    program.pop("ports", None)
    # The first container needs only the folders in which it removes files; the second removes the rest on the host.
    kept = [one for one in program["volumeMounts"] if one["name"] in ("run", "state", "cdi", "features")]
    spec["volumes"] = [one for one in spec["volumes"] if one["name"] in {"host", *(mount["name"] for mount in kept)}]
    purge = {**program, "name": "purge", "command": [*program["command"], "--purge"], "volumeMounts": kept}
    purge["resources"] = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}
    remove = {
        **_container(desired, "remove"),
        "command": [
            SETUP_PROGRAM,
            "remove",
            f"--host-root={plugin.HOST}",
            f"--library-root={desired.library_root}",
        ],
        "securityContext": {"privileged": True},
        "volumeMounts": [{"name": "host", "mountPath": plugin.HOST}],
    }
    rest = {
        **_container(desired, "removed"),
        "command": ["sleep", "infinity"],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {"requests": {"cpu": "1m", "memory": "2Mi"}, "limits": {"memory": "16Mi"}},
    }
    spec["initContainers"], spec["containers"] = [purge, remove], [rest]
    spec["terminationGracePeriodSeconds"] = 1
    spec["nodeSelector"] = {plugin.NODE_LABEL: ABSENT}
    _pull_by(spec, carried.pull_secrets)
    return made


def _pull_by(spec: dict[str, Any], secrets: Sequence[str]) -> None:
    if secrets:
        spec["imagePullSecrets"] = [{"name": one} for one in secrets]
