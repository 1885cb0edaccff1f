# SPDX-License-Identifier: Apache-2.0
"""The messages of the kube-scheduler and the API server, with only the fields that this program uses.

The extender's types have no JSON names in Go, so they are spelled here as in Go. Unknown fields are skipped while
parsing, which keeps a list of a hundred thousand pods small.
"""

from __future__ import annotations

from typing import Any

import msgspec

ENDED = ("Succeeded", "Failed")


class Meta(msgspec.Struct):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    creationTimestamp: str | None = None
    resourceVersion: str = ""
    deletionTimestamp: str | None = None


class PodSpec(msgspec.Struct):
    """The containers are kept as undecoded text. Only the few pods without a node need them decoded, and there may be a
    hundred thousand pods.
    """

    nodeName: str | None = None
    priority: int | None = None
    containers: msgspec.Raw = msgspec.Raw()
    initContainers: msgspec.Raw = msgspec.Raw()


class PodStatus(msgspec.Struct):
    phase: str | None = None
    nominatedNodeName: str | None = None


class Pod(msgspec.Struct):
    metadata: Meta
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


def lean(pod: Pod) -> Pod:
    """Drops the text of containers that will not be decoded, and copies the other text: text that is not copied
    refers to its page of a list and keeps the whole page in memory.
    """
    if pod.spec.nodeName or pod.status.phase in ENDED:
        pod.spec.containers = pod.spec.initContainers = msgspec.Raw()
    else:
        pod.spec.containers, pod.spec.initContainers = pod.spec.containers.copy(), pod.spec.initContainers.copy()
    return pod


def plain(pod: Pod) -> dict[str, Any]:
    """Returns labels, annotations and containers of a pod as a dict, as ``read_pod`` expects it."""
    meta = {"labels": pod.metadata.labels or {}, "annotations": pod.metadata.annotations or {}}
    kinds = {"containers": pod.spec.containers, "initContainers": pod.spec.initContainers}
    return {"metadata": meta, "spec": {name: msgspec.json.decode(text) for name, text in kinds.items() if bytes(text)}}


class Node(msgspec.Struct):
    metadata: Meta


class QuotaSpec(msgspec.Struct):
    hard: dict[str, Any] | None = None


class Quota(msgspec.Struct):
    """A ResourceQuota of the API server."""

    metadata: Meta
    spec: QuotaSpec = msgspec.field(default_factory=QuotaSpec)


class Requirement(msgspec.Struct):
    key: str = ""
    operator: str = ""
    values: list[str] | None = None


class Selector(msgspec.Struct):
    matchLabels: dict[str, str] | None = None
    matchExpressions: list[Requirement] | None = None


class BudgetSpec(msgspec.Struct):
    selector: Selector | None = None
    unhealthyPodEvictionPolicy: str | None = None


class BudgetStatus(msgspec.Struct):
    disruptionsAllowed: int = 0
    currentHealthy: int = 0
    desiredHealthy: int = 0


class Budget(msgspec.Struct):
    """A PodDisruptionBudget of the API server."""

    spec: BudgetSpec = msgspec.field(default_factory=BudgetSpec)
    status: BudgetStatus = msgspec.field(default_factory=BudgetStatus)


class ListMeta(msgspec.Struct):
    resourceVersion: str = ""
    # The field is not named ``continue``, because that is a Python keyword.
    more: str = msgspec.field(default="", name="continue")


class RuntimeClass(msgspec.Struct):
    metadata: Meta
    handler: str = ""


class PodClaim(msgspec.Struct):
    resourceClaimName: str | None = None


class ClaimingSpec(msgspec.Struct):
    nodeName: str | None = None
    resourceClaims: list[PodClaim] | None = None


class ClaimingPod(msgspec.Struct):
    """A pod with only the fields that concern claims."""

    metadata: Meta
    spec: ClaimingSpec = msgspec.field(default_factory=ClaimingSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class ClaimingPodList(msgspec.Struct):
    metadata: ListMeta
    items: list[ClaimingPod] | None = None


class PodList(msgspec.Struct):
    metadata: ListMeta
    items: list[Pod] | None = None


class ObjectList(msgspec.Struct):
    metadata: ListMeta
    items: list[dict[str, Any]] | None = None


class NodeList(msgspec.Struct):
    metadata: ListMeta
    items: list[Node] | None = None


class QuotaList(msgspec.Struct):
    metadata: ListMeta
    items: list[Quota] | None = None


class BudgetList(msgspec.Struct):
    metadata: ListMeta
    items: list[Budget] | None = None


class RuntimeClassList(msgspec.Struct):
    metadata: ListMeta
    items: list[RuntimeClass] | None = None


class Event(msgspec.Struct):
    """An event of a watch. ``object`` is decoded later, depending on the type of the event."""

    type: str
    object: msgspec.Raw


class Status(msgspec.Struct):
    """The object of an event with the type ERROR."""

    message: str | None = None
    code: int | None = None


class ExtenderArgs(msgspec.Struct):
    Pod: dict[str, Any]
    NodeNames: list[str] | None = None
    Nodes: Any = None


class FilterResult(msgspec.Struct):
    NodeNames: list[str] | None = None
    FailedNodes: dict[str, str] | None = None
    FailedAndUnresolvableNodes: dict[str, str] | None = None
    Error: str = ""


class HostPriority(msgspec.Struct):
    Host: str
    Score: int


class BindArgs(msgspec.Struct):
    PodName: str
    PodNamespace: str
    PodUID: str
    Node: str


class BindResult(msgspec.Struct):
    Error: str = ""


class MetaPod(msgspec.Struct):
    UID: str = ""


class MetaVictims(msgspec.Struct):
    Pods: list[MetaPod] | None = None
    NumPDBViolations: int = 0


class FullVictims(msgspec.Struct):
    Pods: list[Pod] | None = None
    NumPDBViolations: int = 0


class PreemptArgs(msgspec.Struct):
    Pod: dict[str, Any]
    NodeNameToMetaVictims: dict[str, MetaVictims] | None = None
    NodeNameToVictims: dict[str, FullVictims] | None = None


class PreemptResult(msgspec.Struct):
    NodeNameToMetaVictims: dict[str, MetaVictims]


class AdmissionRequest(msgspec.Struct):
    uid: str
    operation: str = "CREATE"
    namespace: str = ""
    object: dict[str, Any] | None = None
    oldObject: dict[str, Any] | None = None
    userInfo: dict[str, Any] | None = None
    dryRun: bool | None = None


class AdmissionReview(msgspec.Struct):
    request: AdmissionRequest
    apiVersion: str = ""
    kind: str = ""


encode = msgspec.json.Encoder().encode
