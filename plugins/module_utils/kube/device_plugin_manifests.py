# SPDX-License-Identifier: Apache-2.0
"""Builds the Kubernetes objects of the device plugin as a DaemonSet, as plain data: rights, configurations, pods. "The
program" is the device plugin in such a pod.

One pod runs on each node with our label. The pod mounts some of the host's folders under the same paths as on the host,
because the kubelet, the runtime and containers use these paths. The rest of the host is mounted read-only below /host.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Mapping, NamedTuple, Sequence

NAME = "vgpu-device-plugin"
# Name of the ConfigMap. Its keys are named configurations; a node selects one by the label
# nvidia.com/device-plugin.config.
CONFIGS = "vgpu-configs"
NODE_LABEL = "vgpu.fleet/device-plugin"
LABEL_VALUE = "daemonset"
# Annotation of each pod with the digest of its template.
TEMPLATE = "vgpu.fleet/template"
# Update strategies of the DaemonSet. Either Kubernetes replaces the pods of an old template, or the user who applied
# the new template replaces them node by node.
ROLLING, ON_DELETE = "RollingUpdate", "OnDelete"
# Annotations, conditions and taint that the program writes on its node or reads from it.
ANNOTATIONS = ("vgpu.fleet/gpus", "vgpu.fleet/drained-gpus", "vgpu.fleet/resources")
CONDITIONS = ("VgpuConfiguration", "VgpuGpusHealthy")
TAINT = "vgpu.fleet/gpu-unhealthy"
# Node annotation that names the labels that the program set, without their prefix LABELS_PREFIX.
LABELS, LABELS_PREFIX = "vgpu.fleet/labels", "nvidia.com/"
# Node annotation that names the resources that the program added to the node's capacity.
CAPACITY = "vgpu.fleet/capacity"
HOST = "/host"
LISTEN = "--metrics-listen"
LOOPBACK = ("127.0.0.1", "[::1]", "localhost")
PROGRAM = "/opt/vgpu/plugin/current/bin/vgpu-device-plugin"
RBAC = "rbac.authorization.k8s.io"
# First Kubernetes version in which a policy can see, from a service account's token, on which node the token's pod
# runs.
KNOWS_NODES = (1, 30, 0)
NODE_OF_TOKEN = "authentication.kubernetes.io/node-name"
# Characters that the kubelet accepts in a key of a ConfigMap, and therefore in a file name.
KEY = re.compile(r"^[-._a-zA-Z0-9]{1,253}\Z")


class Desired(NamedTuple):
    """Describes the desired DaemonSet. ``configs`` maps file name to text of the named configurations. ``options``:
    options of the program. ``kubelet_dir``: the kubelet's folder on the host. ``restrict``: add the policy that
    restricts each pod to its own node; needs an API server of 1.30 or newer.
    """

    image: str
    namespace: str = "kube-system"
    configs: Mapping[str, str] = {}
    options: Sequence[str] = ()
    config_path: str = "/etc/vgpu/node.yaml"
    library_root: str = "/usr/local/lib/vgpu"
    kubelet_dir: str = "/var/lib/kubelet"
    tolerations: Sequence[dict[str, Any]] = ()
    environment: Mapping[str, str] = {}
    pull_policy: str = "IfNotPresent"
    restrict: bool = True
    rollout: str = ROLLING


class ConfigsError(Exception):
    """One ConfigMap cannot hold these named configurations; the text names them and the hosts."""


def union(by_host: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Returns the named configurations of all hosts as one map from file name to text. Raises ConfigsError if two hosts
    have different texts for one name, because the cluster has one ConfigMap, or if a name cannot be a key of a
    ConfigMap.
    """
    out: dict[str, str] = {}
    said_by: dict[str, str] = {}
    for host in sorted(by_host):
        for name, text in sorted(by_host[host].items()):
            if not KEY.match(name):
                raise ConfigsError(f'vgpu_configs of {host}: "{name}" cannot be a key of a ConfigMap')
            if out.setdefault(name, text) != text:
                raise ConfigsError(
                    f"vgpu_configs: {name} is not the same on {said_by[name]} and {host}, and a DaemonSet has one "
                    f"ConfigMap {CONFIGS} for all nodes; give the two different names"
                )
            said_by.setdefault(name, host)
    return out


def manifests(desired: Desired) -> list[dict[str, Any]]:
    """Returns the objects in the order of their application; they are removed in reverse order."""
    return [
        *_rights(desired),
        *(_restriction(desired) if desired.restrict else []),
        config_map(desired),
        _daemon_set(desired),
    ]


def node(name: str, present: bool = True) -> dict[str, Any]:
    """Returns a Node object with the label that gives the node a pod, for server-side apply. With ``present`` false,
    the object has no label, and applying it removes the label.
    """
    labels = {NODE_LABEL: LABEL_VALUE} if present else {}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}


def trace(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Returns the patches that remove everything that the program wrote on a node, as (path below the node, patch);
    empty if there is nothing to remove.
    """
    out: list[tuple[str, dict[str, Any]]] = []
    annotations = found["metadata"].get("annotations") or {}
    ours = [name for name in ANNOTATIONS if name in annotations]
    if ours:
        out.append(("", {"metadata": {"annotations": dict.fromkeys(ours)}}))
    if LABELS in annotations:
        # Do not remove labels that node-feature-discovery sets now.
        theirs = ",".join(str(text) for name, text in annotations.items() if name.endswith("feature-labels")).split(",")
        named = [name for name in str(annotations[LABELS]).split(",") if name]
        names = {name if "/" in name else LABELS_PREFIX + name for name in named} - set(theirs)
        gone = {name: None for name in sorted(names) if name in (found["metadata"].get("labels") or {})}
        out.append(("", {"metadata": dict({"labels": gone} if gone else {}, annotations={LABELS: None})}))
    status = found.get("status") or {}
    if CAPACITY in annotations:
        # Remove the resources and the annotation in one patch, so that the node never has a resource of ours that the
        # annotation does not list.
        listed = set(str(annotations[CAPACITY]).split(","))
        parts = {key: sorted(listed & set(status.get(key) or {})) for key in ("capacity", "allocatable")}
        taken = {key: dict.fromkeys(part) for key, part in parts.items() if part}
        body: dict[str, Any] = {"metadata": {"annotations": {CAPACITY: None}}}
        out.append(("/status", dict(body, status=taken) if taken else body))
    conditions = [one.get("type") for one in status.get("conditions") or []]
    gone_ones = [{"$patch": "delete", "type": one} for one in CONDITIONS if one in conditions]
    if gone_ones:
        out.append(("/status", {"status": {"conditions": gone_ones}}))
    taints = (found.get("spec") or {}).get("taints") or []
    others = [one for one in taints if one.get("key") != TAINT]
    if len(others) < len(taints):
        out.append(("", {"spec": {"taints": others or None}}))
    return out


def _meta(desired: Desired, name: str = NAME, namespaced: bool = True) -> dict[str, Any]:
    meta: dict[str, Any] = {"name": name, "labels": {"app.kubernetes.io/name": NAME}}
    return dict(meta, namespace=desired.namespace) if namespaced else meta


def _rights(desired: Desired) -> list[dict[str, Any]]:
    def rule(resources: str, verbs: str) -> dict[str, Any]:
        return {"apiGroups": [""], "resources": resources.split(), "verbs": verbs.split()}

    rules = [
        rule("nodes", "get watch patch"),
        rule("nodes/status", "patch"),
        rule("pods", "get list watch"),
        rule("pods/status", "patch"),
        rule("events", "create"),
    ]
    subject = {"kind": "ServiceAccount", "name": NAME, "namespace": desired.namespace}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _meta(desired)},
        {
            "apiVersion": RBAC + "/v1",
            "kind": "ClusterRole",
            "metadata": _meta(desired, namespaced=False),
            "rules": rules,
        },
        {
            "apiVersion": RBAC + "/v1",
            "kind": "ClusterRoleBinding",
            "metadata": _meta(desired, namespaced=False),
            "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": NAME},
            "subjects": [subject],
        },
    ]


def _restriction(desired: Desired) -> list[dict[str, Any]]:
    """Returns a policy by which a pod of the DaemonSet may write only its own node and the pods there. RBAC cannot
    express this.
    """
    api = "admissionregistration.k8s.io/v1"
    user = f"system:serviceaccount:{desired.namespace}:{NAME}"
    mine = f"request.userInfo.extra['{NODE_OF_TOKEN}'][0]"
    known = f"has(request.userInfo.extra) && '{NODE_OF_TOKEN}' in request.userInfo.extra"
    nodes = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["nodes", "nodes/status"]}
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["pods/status"]}
    of_node = f"request.resource.resource != 'nodes' || ({known} && object.metadata.name == {mine})"
    of_pod = f"request.resource.resource != 'pods' || ({known} && oldObject.spec.nodeName == {mine})"
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [nodes, pods]},
        "matchConditions": [{"name": "ours", "expression": f"request.userInfo.username == '{user}'"}],
        "validations": [
            {"expression": of_node, "message": f"{NAME} may change the node that its pod runs on, and no other"},
            {"expression": of_pod, "message": f"{NAME} may change pods of the node that it runs on, and no others"},
        ],
    }
    meta = _meta(desired, namespaced=False)
    binding = {"policyName": NAME, "validationActions": ["Deny"]}
    return [
        {"apiVersion": api, "kind": "ValidatingAdmissionPolicy", "metadata": meta, "spec": spec},
        {"apiVersion": api, "kind": "ValidatingAdmissionPolicyBinding", "metadata": meta, "spec": binding},
    ]


def config_map(desired: Desired) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _meta(desired, CONFIGS), "data": dict(desired.configs)}


def arguments(desired: Desired) -> list[str]:
    return [
        f"--config={desired.config_path}",
        f"--host-root={HOST}",
        "--in-container",
        f"--kubelet-dir={desired.kubelet_dir}/device-plugins",
        "--kubeconfig=in-cluster",
        *desired.options,
    ]


def metrics_port(options: Sequence[str]) -> int | None:
    """Returns the port at which other hosts can read the metrics; None if no port is open to them. If the option is
    given several times, the last counts.
    """
    listens = [one.partition("=")[2] for one in options if one.startswith(LISTEN + "=")]
    address, _colon, port = (listens[-1] if listens else "").rpartition(":")
    return int(port) if port.isdigit() and address not in LOOPBACK else None


def _volumes(desired: Desired) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Returns (name, volume, mount) of each volume."""

    def host(name: str, path: str, kind: str = "DirectoryOrCreate", **mount: Any) -> tuple:
        return name, {"hostPath": {"path": path, "type": kind}}, {"mountPath": path, **mount}

    folder = desired.config_path.rpartition("/")[0] or "/"
    out = [
        ("host", {"hostPath": {"path": "/", "type": "Directory"}}, {"mountPath": HOST, "readOnly": True}),
        # Mount the whole folder with the GPUs' device nodes, because a driver that is loaded later creates them.
        host("dev", "/dev", "Directory"),
        host("device-plugins", desired.kubelet_dir + "/device-plugins", "Directory"),
        host("pod-resources", desired.kubelet_dir + "/pod-resources"),
        # The program mounts a tmpfs for each allocation in this folder; the containers of pods must see these mounts.
        host("run", "/run/vgpu", mountPropagation="Bidirectional"),
        host("state", "/var/lib/vgpu"),
        host("cdi", "/var/run/cdi"),
        host("library", desired.library_root, readOnly=True),
        # The program does not write to this folder, but the runtime creates the next mount point in it.
        host("etc", folder),
    ]
    configs = {"configMap": {"name": CONFIGS}}
    out.append(("configs", configs, {"mountPath": folder.rstrip("/") + "/configs", "readOnly": True}))
    if "--labels" in desired.options:
        out.append(host("features", "/etc/kubernetes/node-feature-discovery/features.d"))
    return out


def _daemon_set(desired: Desired) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": NAME}
    volumes = _volumes(desired)
    environment: list[dict[str, Any]] = [
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        # NVIDIA's runtime must not add anything to the container, because the program uses the driver's library of the
        # host.
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"},
    ]
    environment += [{"name": name, "value": str(value)} for name, value in sorted(desired.environment.items())]
    container = {
        "name": NAME,
        "image": desired.image,
        "imagePullPolicy": desired.pull_policy,
        # Set this path: the default is in /dev, where the pod has the host's /dev, so the runtime would create the file
        # on the host.
        "terminationMessagePath": "/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "command": [PROGRAM, *arguments(desired)],
        "env": environment,
        # The pod is privileged, because it needs the GPUs' device nodes, and because other containers must see its
        # mounts: Kubernetes permits the mount propagation Bidirectional only in privileged pods.
        "securityContext": {"privileged": True},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "volumeMounts": [dict(mount, name=name) for name, _volume, mount in volumes],
    }
    spec: dict[str, Any] = {
        "serviceAccountName": NAME,
        "priorityClassName": "system-node-critical",
        # The pod sees the host's pids, because the driver reports processes by these pids.
        "hostPID": True,
        # The pod uses the host's network, which reaches the API server before the network plugin runs.
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "terminationGracePeriodSeconds": 10,
        "nodeSelector": {NODE_LABEL: LABEL_VALUE},
        "tolerations": [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "CriticalAddonsOnly", "operator": "Exists"},
            # The program's own taint keeps users' pods away from the node, but must not keep this pod away.
            {"key": TAINT, "operator": "Exists", "effect": "NoSchedule"},
            *desired.tolerations,
        ],
        "containers": [container],
        "volumes": [dict(volume, name=name) for name, volume, _mount in volumes],
    }
    port = metrics_port(desired.options)
    if port is not None:
        # The pod uses the network of its host. A PodMonitor selects the port by this name.
        container["ports"] = [{"name": "metrics", "containerPort": port, "protocol": "TCP"}]
    # maxSurge is 0, because two pods must never run on one node: the program locks its state, so a second pod would end
    # at once.
    strategy: dict[str, Any] = {"type": ROLLING, "rollingUpdate": {"maxUnavailable": "10%"}}
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode("utf-8")).hexdigest()[:16]
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": _meta(desired),
        "spec": {
            "selector": {"matchLabels": labels},
            "updateStrategy": strategy if desired.rollout == ROLLING else {"type": desired.rollout},
            "template": {"metadata": {"labels": labels, "annotations": {TEMPLATE: digest}}, "spec": spec},
        },
    }


def node_of(pod: Mapping[str, Any]) -> str:
    """Returns the node of a DaemonSet's pod, even if the pod is not bound yet because it waits for free resources
    there.
    """
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or []
    meant = [
        name
        for term in terms
        for field in term.get("matchFields") or []
        if field.get("key") == "metadata.name"
        for name in field.get("values") or []
    ]
    return str(pod["spec"].get("nodeName") or (meant[0] if meant else ""))


def stale(pods: Sequence[Mapping[str, Any]], desired: Desired, nodes: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the DaemonSet's pods on these nodes that were created from another template and do not end yet."""
    template = _daemon_set(desired)["spec"]["template"]["metadata"]["annotations"][TEMPLATE]
    return [
        dict(pod)
        for pod in pods
        if node_of(pod) in nodes
        and not pod["metadata"].get("deletionTimestamp")
        and (pod["metadata"].get("annotations") or {}).get(TEMPLATE) != template
    ]
