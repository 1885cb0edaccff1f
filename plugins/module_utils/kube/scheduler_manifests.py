# SPDX-License-Identifier: Apache-2.0
"""Builds the Kubernetes objects of the scheduler, as plain data: rights, configuration, Deployment, service, webhooks,
a policy that refuses pods which mount over our files, and a policy that protects the scheduler's annotations on pods.
One of these annotations is the plan: the GPUs that the pod gets.

A replica is one pod with an unmodified kube-scheduler and vgpu-scheduler, which is its extender and the admission
webhook. The default scheduler stays unchanged.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple, Sequence

from . import mount_policy, plan_policy

NAME = "vgpu-scheduler"
# Names of two Lease objects: one elects the leading kube-scheduler, the other the leading extender.
LEASES = (NAME, NAME + "-extender")
EXTENDER = "127.0.0.1:8880"
WEBHOOK_PORT, METRICS_PORT = 8443, 9411
# Port at which a kube-scheduler serves its health to all, and its metrics to users that may read them.
KUBE_PORT = 10259
IGNORE_LABELS = ("vgpu.fleet/webhook", "hami.io/webhook")
# Annotation of each pod of the scheduler with the digest of the configuration.
DIGEST = "vgpu.fleet/config"
PLAN, GIVEN = "vgpu.fleet/plan", "vgpu.fleet/given"
# Annotations of a resize, which changes the GPU size of a running pod: the request of the pod's owner, the granted
# request, and the former plan (the pod's GPUs before the resize). Until the node has applied the new plan, the greater
# of the two sizes counts.
RESIZE, RESIZED, FORMER = "vgpu.fleet/resize", "vgpu.fleet/resized", "vgpu.fleet/former"
# Annotation with the memory that a pod is promised, which may be less than its limit. It cannot change after the pod's
# admission.
MEMORY_REQUEST = "vgpu.fleet/memory-request"
# Annotations that only the collection's programs may write.
ANNOTATIONS = (PLAN, GIVEN, RESIZED, FORMER)
# Prefixes of resource names that request GPUs. The webhook matches prefixes, so that it also gets and refuses pods with
# mistyped names.
PREFIXES = ("nvidia.com/", "aliyun.com/gpu", "tencent.com/vcuda")
# ASKING: annotations that request GPUs. NOT_OF: the name of the KAI scheduler. Its pods are excluded, because KAI reads
# these annotations itself.
ASKING, NOT_OF = ("gpu-memory", "gpu-fraction", MEMORY_REQUEST), "kai-scheduler"
ASKING_PREFIX = "nvidia.com/container."
# Label of a namespace. It chooses whether the namespace's pods get GPUs by claims (Dynamic Resource Allocation) or by
# the scheduler's extender.
ALLOCATION, CLAIMS, EXTENDING = "vgpu.fleet/allocation", "dra", "extender"


_BOTH = ("object", "oldObject")


class Desired(NamedTuple):
    """Describes the desired scheduler. ``config``: its configuration file (vgpu_scheduler.settings).
    ``match_conditions``: whether the API server is 1.28 or newer. An older server sends every pod to the webhook, so
    there the webhook fails open. ``webhook_url``: URL of the webhook if the API server does not reach it by its
    Service.
    """

    image: str
    kube_scheduler_image: str
    namespace: str = "kube-system"
    replicas: int = 2
    config: dict[str, Any] = {}
    scheduler_name: str = NAME
    match_conditions: bool = True
    fail_closed: bool = True
    webhook_url: str = ""
    node_selector: dict[str, str] = {}
    tolerations: Sequence[dict[str, Any]] = ()
    options: Sequence[str] = ()
    # Names of the only nodes that may run the scheduler, such as the nodes on which its images were loaded; if empty,
    # all nodes may.
    nodes: Sequence[str] = ()
    # Users that, in addition to nodes, may write the allocated GPUs of a pod, such as the account of the device
    # plugin's DaemonSet.
    may_give: Sequence[str] = ()
    # Whether the kube-scheduler knows the option that kube_options returns.
    wakes: bool = True
    # Whether the API server has ValidatingAdmissionPolicy. If it does not, the webhook does the same checks.
    policies: bool = True
    # Names of namespaces whose pods may read the metrics. If there are none, no port of the pod serves metrics.
    metrics_namespaces: Sequence[str] = ()
    # Log format of vgpu-scheduler: text or json. The kube-scheduler's container keeps its own format.
    log_format: str = "text"


def resource_names(config: dict[str, Any]) -> list[str]:
    """Returns every resource by which a pod may request GPUs, the GPU count first."""
    names = config.get("resourceNames") or {}
    count = names.get("count", "nvidia.com/gpu")
    return [
        count,
        count + ".shared",
        names.get("memory", "nvidia.com/gpumem"),
        names.get("memoryPercentage", "nvidia.com/gpumem-percentage"),
        names.get("cores", "nvidia.com/gpucores"),
        "nvidia.com/cores",
        names.get("priority", "nvidia.com/priority"),
        "aliyun.com/gpu-mem",
        "aliyun.com/gpu-core.percentage",
        "tencent.com/vcuda-core",
        "tencent.com/vcuda-memory",
        "tke.cloud.tencent.com/qgpu-core",
        "tke.cloud.tencent.com/qgpu-memory",
        "volcano.sh/vgpu-number",
        "volcano.sh/vgpu-memory",
        "volcano.sh/vgpu-memory-percentage",
        "volcano.sh/vgpu-cores",
    ]


def extender(config: dict[str, Any], address: str = EXTENDER) -> dict[str, Any]:
    """Returns the entry under ``extenders`` of the kube-scheduler's configuration. Nodes advertise only the GPU count
    and no other resource of a GPU request. So the entry makes the kube-scheduler ignore those other resources.
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
    ours = [_account(desired)]
    both = [*ours, *desired.may_give]
    return {PLAN: ours, GIVEN: both, RESIZED: ours, FORMER: both}


def _account(desired: Desired) -> str:
    return f"system:serviceaccount:{desired.namespace}:{NAME}"


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


def _meta(desired: Desired, name: str = NAME, namespaced: bool = True) -> dict[str, Any]:
    meta: dict[str, Any] = {"name": name, "labels": {"app.kubernetes.io/name": NAME}}
    return dict(meta, namespace=desired.namespace) if namespaced else meta


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
        meta = _meta(desired, name, namespaced=False)
        if namespace:
            meta["namespace"] = namespace
        return {
            "apiVersion": rbac + "/v1",
            "kind": kind,
            "metadata": meta,
            "roleRef": {"apiGroup": rbac, "kind": role_kind, "name": role},
            "subjects": [subject],
        }

    reader = "extension-apiserver-authentication-reader"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _meta(desired)},
        {
            "apiVersion": rbac + "/v1",
            "kind": "ClusterRole",
            "metadata": _meta(desired, namespaced=False),
            "rules": cluster_rules,
        },
        binding("ClusterRoleBinding", NAME, "ClusterRole", NAME),
        # The rights of the kube-scheduler, the other container of each pod.
        binding("ClusterRoleBinding", NAME + "-kube-scheduler", "ClusterRole", "system:kube-scheduler"),
        binding("ClusterRoleBinding", NAME + "-volume-scheduler", "ClusterRole", "system:volume-scheduler"),
        {"apiVersion": rbac + "/v1", "kind": "Role", "metadata": _meta(desired), "rules": rules},
        binding("RoleBinding", NAME, "Role", NAME, desired.namespace),
        binding("RoleBinding", NAME + "-authentication", "Role", reader, "kube-system"),
    ]


def _config_map(desired: Desired) -> dict[str, Any]:
    data = {
        # The files of this ConfigMap contain JSON, which is valid YAML.
        "kube-scheduler.yaml": json.dumps(scheduler_configuration(desired), indent=1, sort_keys=True),
        "config.yaml": json.dumps(desired.config, indent=1, sort_keys=True),
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _meta(desired), "data": data}


def _service(desired: Desired) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(desired),
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
        f"--may-write={_account(desired)}",
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
        "metadata": _meta(desired),
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
        "metadata": _meta(desired),
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
        "metadata": _meta(desired),
        "spec": {
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": NAME}},
            "policyTypes": ["Ingress"],
            "ingress": [calls, *([readers] if desired.metrics_namespaces else [])],
        },
    }


def gpu_condition(config: dict[str, Any]) -> str:
    """Returns a CEL expression: whether a container of the pod names a resource of GPU sharing, or an annotation
    requests GPUs.
    """
    said = config.get("resourceNames") or {}
    # Name each configured resource, even if a prefix covers it, because the Helm chart fills in these names later.
    chosen = {*said.values(), *([said["count"] + ".shared"] if "count" in said else [])}
    names = [name for name in resource_names(config) if name in chosen or not name.startswith(PREFIXES)]
    words = [f"k.startsWith('{prefix}')" for prefix in PREFIXES] + [f"k == '{name}'" for name in names]
    name = " || ".join(words)

    def within(kind: str) -> str:
        return f"(has(c.resources.{kind}) && c.resources.{kind}.exists(k, {name}))"

    asks = f"has(c.resources) && ({within('limits')} || {within('requests')})"
    first = "has(object.spec.initContainers) && object.spec.initContainers"
    asking = " || ".join(f"'{name}' in object.metadata.annotations" for name in ASKING)
    asking += f" || object.metadata.annotations.exists(k, k.startsWith('{ASKING_PREFIX}'))"
    other = f"has(object.spec.schedulerName) && object.spec.schedulerName == '{NOT_OF}'"
    by_annotation = f"has(object.metadata.annotations) && ({asking}) && !({other})"
    return f"object.spec.containers.exists(c, {asks}) || ({first}.exists(c, {asks})) || ({by_annotation})"


def _resize_condition() -> str:
    """Returns a CEL expression: whether the pod's annotation with a request for another size is new or changed."""
    name = f"'{RESIZE}'"
    now, before = (f"(has({one}.metadata.annotations) && {name} in {one}.metadata.annotations)" for one in _BOTH)
    return f"{now} && !({before} && object.metadata.annotations[{name}] == oldObject.metadata.annotations[{name}])"


def webhooks(desired: Desired) -> list[dict[str, Any]]:
    """Returns the webhook configurations. With ``match_conditions`` the API server sends only pods that request GPUs.
    If ``fail_closed`` is also set, such pods are refused while no replica answers. Without ``match_conditions`` the
    server sends every pod, so the webhooks fail open.
    """
    closed = desired.fail_closed and desired.match_conditions
    exempt = [{"key": label, "operator": "NotIn", "values": ["ignore"]} for label in IGNORE_LABELS]

    def hook(
        name: str, path: str, operation: str, condition: str, fail: bool, namespaces: Sequence[Any] = ()
    ) -> dict[str, Any]:
        client: dict[str, Any] = {"service": {"name": NAME, "namespace": desired.namespace, "path": path, "port": 443}}
        if desired.webhook_url:
            client = {"url": desired.webhook_url + path}
        one: dict[str, Any] = {
            "name": name,
            "clientConfig": client,
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": [operation], "resources": ["pods"]}],
            "namespaceSelector": {"matchExpressions": [*exempt, *namespaces]},
            "objectSelector": {"matchExpressions": exempt},
            "failurePolicy": "Fail" if fail else "Ignore",
            "sideEffects": "None",
            "timeoutSeconds": 5,
            "admissionReviewVersions": ["v1"],
        }
        if desired.match_conditions:
            one["matchConditions"] = [{"name": "gpus", "expression": condition}]
        return one

    asks = gpu_condition(desired.config)

    def planned(*pods: str) -> str:
        has = [f"(has({pod}.metadata.annotations) && '{{}}' in {pod}.metadata.annotations)" for pod in pods]
        return " || ".join(one.format(name) for one in has for name in ANNOTATIONS)

    mutating = [hook("pods.vgpu.fleet", "/mutate", "CREATE", asks, closed)]
    if desired.config.get("claims"):
        # An admission review does not contain the labels of the namespace. So there is one webhook for each value of
        # the label, with the value in its URL path.
        is_claims = {"key": ALLOCATION, "operator": "In", "values": [CLAIMS]}
        others = [
            {"key": ALLOCATION, "operator": "Exists"},
            {"key": ALLOCATION, "operator": "NotIn", "values": [CLAIMS, EXTENDING]},
        ]
        mutating = [
            hook("pods.vgpu.fleet", "/mutate", "CREATE", asks, closed, [dict(is_claims, operator="NotIn")]),
            hook("claims.vgpu.fleet", f"/mutate/{CLAIMS}", "CREATE", asks, closed, [is_claims]),
            # This webhook only refuses an unknown value of the label.
            hook("allocation.vgpu.fleet", "/mutate/unknown", "CREATE", asks, closed, others),
        ]
    for one in mutating:
        # The webhook also checks what another webhook changed in the pod after its first call.
        one["reinvocationPolicy"] = "IfNeeded"
    validating = [hook("pods.vgpu.fleet", "/validate", "CREATE", asks, closed)]
    if desired.match_conditions:
        # This webhook only gives an early message. If it is not called, an unreadable request is still refused when the
        # pod is bound.
        resize = hook("resizes.vgpu.fleet", "/validate", "UPDATE", _resize_condition(), False)
        del resize["namespaceSelector"], resize["objectSelector"]
        validating.append(resize)
    # If the API server has ValidatingAdmissionPolicy, a policy checks changes of plans, even while no replica answers.
    # Else these two webhooks do.
    if not desired.policies:
        plans = [
            hook("new-plans.vgpu.fleet", "/validate", "CREATE", planned("object"), closed),
            # This webhook fails open, so that no update of a pod is blocked while no replica answers. A plan that a
            # user changes in that time is written again later.
            hook("plans.vgpu.fleet", "/validate", "UPDATE", planned("oldObject", "object"), False),
        ]
        for one in plans:
            # No label may exclude a pod from this webhook. Otherwise a user who may set labels could write plans, which
            # the scheduler and the device plugins trust.
            del one["namespaceSelector"], one["objectSelector"]
        plans[1]["rules"][0]["resources"] = ["pods", "pods/status"]
        validating += plans
    api = "admissionregistration.k8s.io/v1"
    meta = _meta(desired, namespaced=False)
    return [
        {"apiVersion": api, "kind": "MutatingWebhookConfiguration", "metadata": meta, "webhooks": mutating},
        {"apiVersion": api, "kind": "ValidatingWebhookConfiguration", "metadata": meta, "webhooks": validating},
    ]
