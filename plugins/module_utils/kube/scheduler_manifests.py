# SPDX-License-Identifier: Apache-2.0
"""Builds the Kubernetes objects of the scheduler, as plain data: rights, configuration, Deployment, service, webhooks,
a policy that refuses pods which mount over our files, and a policy that protects the scheduler's annotations on pods.
One of these annotations is the plan: the GPUs that the pod gets.

A replica is one pod with an unmodified kube-scheduler and vgpu-scheduler. vgpu-scheduler is the kube-scheduler's
extender and the admission webhook. The default scheduler stays unchanged.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Sequence

from . import mount_policy, plan_policy
from .scheduler_desired import (
    DIGEST,
    EXTENDER,
    FORMER,
    GIVEN,
    KUBE_PORT,
    LEASES,
    MEMORY_REQUEST,
    METRICS_PORT,
    NAME,
    PLAN,
    RESIZED,
    WEBHOOK_PORT,
    Desired,
    account,
    meta,
    resource_names,
)
from .scheduler_webhooks import webhooks


def extender(config: dict[str, Any], address: str = EXTENDER) -> dict[str, Any]:
    """Returns the entry under ``extenders`` of the kube-scheduler's configuration. Nodes advertise only the GPU count.
    So the entry makes the kube-scheduler ignore the other resources of a GPU request, such as memory.
    """
    count, *others = resource_names(config)
    managed = [{"name": count, "ignoredByScheduler": False}]
    managed += [{"name": name, "ignoredByScheduler": True} for name in others]
    return {
        "urlPrefix": f"http://{address}",
        "filterVerb": "filter",
        "prioritizeVerb": "prioritize",
        "bindVerb": "bind",
        "preemptVerb": "preempt",
        # With this weight the extender's score exceeds the sum of the scores that the kube-scheduler's own plugins give
        # for CPU and memory.
        "weight": 10,
        "nodeCacheCapable": True,
        "httpTimeout": "10s",
        "managedResources": managed,
    }


def kube_options(desired: Desired) -> list[str]:
    """Returns the option that makes the kube-scheduler retry a waiting pod after one minute instead of five.

    The kube-scheduler also wakes a waiting pod when a node joins or grows, but only if the node has all resources of
    the pod, even those that the extender manages. No node has these, so a pod that names memory would stay asleep.
    """
    return ["--pod-max-in-unschedulable-pods-duration=60s"] if desired.wakes else []


def scheduler_configuration(desired: Desired) -> dict[str, Any]:
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {
            "leaderElect": True,
            "resourceName": NAME,
            "resourceNamespace": desired.namespace,
            "leaseDuration": "15s",
            "renewDeadline": "10s",
            "retryPeriod": "2s",
        },
        "profiles": [{"schedulerName": desired.scheduler_name}],
        "extenders": [extender(desired.config)],
    }


def manifests(desired: Desired) -> list[dict[str, Any]]:
    """Returns the objects in the order of their application; they are removed in reverse order."""
    return [
        *_rights(desired),
        _config_map(desired),
        _service(desired),
        _deployment(desired),
        _budget(desired),
        _network_policy(desired),
        *webhooks(desired),
        *(_policies(desired) if desired.policies else []),
    ]


def _policies(desired: Desired) -> list[dict[str, Any]]:
    return [
        *mount_policy.manifests(mount_policy.OF_SCHEDULER, resource_names(desired.config)),
        *plan_policy.manifests(_writers(desired), (MEMORY_REQUEST,)),
    ]


def _writers(desired: Desired) -> dict[str, Sequence[str]]:
    """Maps each annotation to the users that may write it; nodes may write all of them."""
    ours = [account(desired)]
    both = [*ours, *desired.may_give]
    return {PLAN: ours, GIVEN: both, RESIZED: ours, FORMER: both}


def secret(desired: Desired) -> dict[str, Any]:
    """Returns the Secret for the webhook's certificates, which the program makes itself."""
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": NAME + "-tls", "namespace": desired.namespace}}


def leases(desired: Desired) -> list[dict[str, Any]]:
    """Returns the leases that the programs create at run time."""
    return [
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": n, "namespace": desired.namespace},
        }
        for n in LEASES
    ]


def _rule(groups: str, resources: str, verbs: str, names: Sequence[str] = ()) -> dict[str, Any]:
    rule: dict[str, Any] = {
        "apiGroups": ["" if group == "core" else group for group in groups.split()],
        "resources": resources.split(),
        "verbs": verbs.split(),
    }
    return dict(rule, resourceNames=list(names)) if names else rule


def _rights(desired: Desired) -> list[dict[str, Any]]:
    hooks = "mutatingwebhookconfigurations validatingwebhookconfigurations"
    rbac = "rbac.authorization.k8s.io"
    cluster_rules = [
        _rule("core", "pods", "get list watch"),
        _rule("core", "nodes resourcequotas", "list watch"),
        _rule("node.k8s.io", "runtimeclasses", "list watch"),
        # The right to patch pods/status suffices to restore the annotation of a lost plan and to write a preemption.
        # The right to patch pods is not granted, because with it any pod could get another image.
        _rule("core", "pods/status", "patch"),
        _rule("core", "pods/binding", "create"),
        # The extender evicts pods of lower priority if GPU memory is short. It does not delete them, because that would
        # bypass disruption budgets.
        _rule("core", "pods/eviction", "create"),
        _rule("policy", "poddisruptionbudgets", "list"),
        _rule("core", "events", "create"),
        _rule("admissionregistration.k8s.io", hooks, "get patch", (NAME,)),
    ]
    if desired.config.get("claims"):
        # Claims are created in the namespaces of pods, which are not known before; see vgpu_scheduler.pod_claims.
        cluster_rules.append(_rule("resource.k8s.io", "resourceclaims", "get create"))
    rules = [
        # This rule is not limited to the names of objects, because Kubernetes cannot limit create requests by name.
        _rule("core", "secrets", "create"),
        _rule("core", "secrets", "get update", (NAME + "-tls",)),
        _rule("coordination.k8s.io", "leases", "create"),
        # The leases of the kube-schedulers and of vgpu-scheduler. A replica of vgpu-scheduler takes the lease when a
        # kube-scheduler calls it.
        _rule("coordination.k8s.io", "leases", "get update", LEASES),
        _rule("coordination.k8s.io", "leases", "patch", LEASES[1:]),
    ]
    subject = {"kind": "ServiceAccount", "name": NAME, "namespace": desired.namespace}

    def binding(kind: str, name: str, role_kind: str, role: str, namespace: str = "") -> dict[str, Any]:
        named = meta(desired, name, namespaced=False)
        if namespace:
            named["namespace"] = namespace
        return {
            "apiVersion": rbac + "/v1",
            "kind": kind,
            "metadata": named,
            "roleRef": {"apiGroup": rbac, "kind": role_kind, "name": role},
            "subjects": [subject],
        }

    reader = "extension-apiserver-authentication-reader"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta(desired)},
        {
            "apiVersion": rbac + "/v1",
            "kind": "ClusterRole",
            "metadata": meta(desired, namespaced=False),
            "rules": cluster_rules,
        },
        binding("ClusterRoleBinding", NAME, "ClusterRole", NAME),
        # The rights of the kube-scheduler, the other container of each pod.
        binding("ClusterRoleBinding", NAME + "-kube-scheduler", "ClusterRole", "system:kube-scheduler"),
        binding("ClusterRoleBinding", NAME + "-volume-scheduler", "ClusterRole", "system:volume-scheduler"),
        {"apiVersion": rbac + "/v1", "kind": "Role", "metadata": meta(desired), "rules": rules},
        binding("RoleBinding", NAME, "Role", NAME, desired.namespace),
        binding("RoleBinding", NAME + "-authentication", "Role", reader, "kube-system"),
    ]


def _config_map(desired: Desired) -> dict[str, Any]:
    data = {
        # The files of this ConfigMap contain JSON, which is valid YAML.
        "kube-scheduler.yaml": json.dumps(scheduler_configuration(desired), indent=1, sort_keys=True),
        "config.yaml": json.dumps(desired.config, indent=1, sort_keys=True),
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta(desired), "data": data}


def _service(desired: Desired) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta(desired),
        "spec": {
            "selector": {"app.kubernetes.io/name": NAME},
            "ports": [{"name": "webhook", "port": 443, "targetPort": WEBHOOK_PORT, "protocol": "TCP"}],
        },
    }


def _deployment(desired: Desired) -> dict[str, Any]:
    config = _config_map(desired)["data"]
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    confined = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    mounts = [{"name": "config", "mountPath": "/etc/vgpu-scheduler", "readOnly": True}]
    options = [
        "--config=/etc/vgpu-scheduler/config.yaml",
        f"--scheduler-name={desired.scheduler_name}",
        f"--extender={EXTENDER}",
        f"--webhook=:{WEBHOOK_PORT}",
        f"--lease={desired.namespace}/{LEASES[1]}",
        f"--secret={desired.namespace}/{NAME}-tls",
        f"--names={NAME}.{desired.namespace}.svc",
        f"--webhook-configuration={NAME}",
        f"--may-write={account(desired)}",
        *([f"--metrics=:{METRICS_PORT}"] if desired.metrics_namespaces else []),
        *([f"--may-give={','.join(desired.may_give)}"] if desired.may_give else []),
        *(["--log-format=json"] if desired.log_format == "json" else []),
        *desired.options,
    ]
    probe = {"scheme": "HTTPS", "port": WEBHOOK_PORT}
    ports = [("webhook", WEBHOOK_PORT), *([("metrics", METRICS_PORT)] if desired.metrics_namespaces else [])]
    ours = {
        "name": NAME,
        "image": desired.image,
        "command": ["vgpu-scheduler", *options],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports],
        "readinessProbe": {"httpGet": dict(probe, path="/readyz"), "periodSeconds": 2},
        "livenessProbe": {"httpGet": dict(probe, path="/healthz"), "initialDelaySeconds": 30, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": confined,
        # The program loads its certificates from a temporary file in /tmp.
        "volumeMounts": [*mounts, {"name": "tmp", "mountPath": "/tmp"}],
    }
    kube = {
        "name": "kube-scheduler",
        "image": desired.kube_scheduler_image,
        "command": [
            *("kube-scheduler", "--config=/etc/vgpu-scheduler/kube-scheduler.yaml"),
            *kube_options(desired),
        ],
        "ports": [{"name": "kube-scheduler", "containerPort": KUBE_PORT, "protocol": "TCP"}],
        # There is no readinessProbe, because the webhook in the same pod must serve even if the kube-scheduler is not
        # ready.
        "livenessProbe": {
            "httpGet": {"scheme": "HTTPS", "port": KUBE_PORT, "path": "/healthz"},
            "initialDelaySeconds": 30,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}},
        "securityContext": confined,
        "volumeMounts": mounts,
    }
    spec: dict[str, Any] = {
        "serviceAccountName": NAME,
        "priorityClassName": "system-cluster-critical",
        "containers": [ours, kube],
        "volumes": [
            {"name": "config", "configMap": {"name": NAME}},
            {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
        ],
        "nodeSelector": dict(desired.node_selector),
        "tolerations": list(desired.tolerations),
        "affinity": {
            **_on_nodes(desired.nodes),
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 100,
                        "podAffinityTerm": {
                            "topologyKey": "kubernetes.io/hostname",
                            "labelSelector": {"matchLabels": {"app.kubernetes.io/name": NAME}},
                        },
                    }
                ]
            },
        },
    }
    template = {
        # The digest in the template replaces the pods when the configuration changes.
        "metadata": {"labels": {"app.kubernetes.io/name": NAME}, "annotations": {DIGEST: digest}},
        "spec": spec,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta(desired),
        "spec": {
            "replicas": desired.replicas,
            "selector": {"matchLabels": {"app.kubernetes.io/name": NAME}},
            # An update replaces pods one by one, so that at least one replica always answers admission requests.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": template,
        },
    }


def _on_nodes(names: Sequence[str]) -> dict[str, Any]:
    """Selects nodes by name, so that no node needs a label of the collection."""
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]} for name in names]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"nodeAffinity": required} if terms else {}


def _budget(desired: Desired) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": meta(desired),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app.kubernetes.io/name": NAME}}},
    }


def _network_policy(desired: Desired) -> dict[str, Any]:
    """Returns a policy that allows calls of the webhook from anywhere, because no pod selector can match the API
    server. The metrics may be read only by pods of these namespaces. The policy works only if the cluster's network
    supports policies.
    """
    names = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": sorted(desired.metrics_namespaces)}
    readers = {
        "from": [{"namespaceSelector": {"matchExpressions": [names]}}],
        "ports": [{"port": port, "protocol": "TCP"} for port in (METRICS_PORT, KUBE_PORT)],
    }
    calls: dict[str, Any] = {"ports": [{"port": WEBHOOK_PORT, "protocol": "TCP"}]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": meta(desired),
        "spec": {
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": NAME}},
            "policyTypes": ["Ingress"],
            "ingress": [calls, *([readers] if desired.metrics_namespaces else [])],
        },
    }
