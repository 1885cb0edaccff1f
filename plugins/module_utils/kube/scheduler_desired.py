# SPDX-License-Identifier: Apache-2.0
"""Describes the desired scheduler: the settings of its Kubernetes objects, the names that these objects share, and the
resource names and annotations by which a pod requests GPUs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

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
    # Log format of vgpu-scheduler: ``text`` or ``json``. The kube-scheduler's container keeps its own format.
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


def account(desired: Desired) -> str:
    """Returns the user name of the scheduler's service account."""
    return f"system:serviceaccount:{desired.namespace}:{NAME}"


def meta(desired: Desired, name: str = NAME, namespaced: bool = True) -> dict[str, Any]:
    """Returns the metadata of an object of the scheduler, with its namespace unless the object has none."""
    found: dict[str, Any] = {"name": name, "labels": {"app.kubernetes.io/name": NAME}}
    return dict(found, namespace=desired.namespace) if namespaced else found
