# SPDX-License-Identifier: Apache-2.0
"""Admission of pods: completes a pod that requests GPUs before it is stored, or refuses it with reasons.

It computes the response to a review from the request and the present nodes, and writes nothing. Every replica answers,
not only the one that holds the Lease for writing. A pod is admitted unchanged if it requests no GPU, names another
scheduler or has the label ``vgpu.fleet/webhook: ignore`` (or HAMi's). But any pod is refused if it contains a forged
plan (the annotation with a pod's GPUs) or mounts something over our files. The latter is checked by the shared core's
``pods/mounts``, for API servers without ValidatingAdmissionPolicy.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from vgpu_plugin._shared.config.kinds import Finding
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods import burst, resizes
from vgpu_plugin._shared.pods.bounds import excess, sentence
from vgpu_plugin._shared.pods.claim_requests import CLAIMS, way_of
from vgpu_plugin._shared.pods.mounts import conflicting_mounts
from vgpu_plugin._shared.pods.preferences import Preferences
from vgpu_plugin._shared.pods.requests import Config, DialectError, PodAsk, admission_findings, read_pod
from vgpu_plugin._shared.pods.resources import MIB, resource_names

from . import claim_admission, wire
from .runtime_classes import RuntimeClasses
from .settings import REFUSE

IGNORE = ("vgpu.fleet/webhook", "hami.io/webhook")
DEFAULT_SCHEDULER = "default-scheduler"
PRIORITY_VARIABLE = "CUDA_TASK_PRIORITY"
# Annotations that only our programs may write.
OURS = (pod_annotations.PLAN, pod_annotations.GIVEN, resizes.RESIZED, resizes.FORMER)


# (namespace, uid, request) → "" or why the quota of the namespace is exceeded.
Quota = Callable[[str, str, PodAsk], str]


class Nodes(Protocol):
    """The current nodes. The class Ledger implements this protocol."""

    @property
    def shapes(self) -> Collection[tuple[int, int]]:
        """Returns (number of GPUs, MiB of the largest GPU) for each kind of node."""

    def most_gpus(self, preferences: Preferences) -> tuple[str, int]:
        """Returns the node with the most GPUs that match the preferences, and their number; ("", 0) if there is no such
        GPU.
        """


class Settings(NamedTuple):
    """Settings of admission. ``may_write``: users that may change the scheduler's annotations, in addition to kubelets
    and their plugins. ``too_many``: what happens to a pod with more GPUs than any node has: settings.REFUSE, or WAIT
    for clusters where larger nodes join on demand.
    """

    config: Config = Config()
    scheduler_name: str = "vgpu-scheduler"
    runtime_class: str = ""
    may_write: tuple[str, ...] = ()
    # Service accounts of device plugins, in the form system:serviceaccount:<namespace>:<name>.
    may_give: tuple[str, ...] = ()
    too_many: str = REFUSE
    # Whether this scheduler is configured to give pods GPUs by claims.
    claims: bool = False


class Way(NamedTuple):
    """What, besides the pod's labels, decides whether this scheduler plans a pod's GPUs or the pod gets claims (Dynamic
    Resource Allocation). ``of_namespace``: the namespace's label vgpu.fleet/allocation, "" if missing. ``first``:
    whether this is the mutating review, which may change the pod, and not the validating review after it.
    """

    of_namespace: str = ""
    first: bool = False


def mutate(
    request: wire.AdmissionRequest,
    settings: Settings,
    nodes: Nodes | None = None,
    quota: Quota | None = None,
    classes: RuntimeClasses | None = None,
    way: Way | None = None,
) -> dict[str, Any]:
    """Returns the response to a review. ``quota`` is called last, for a pod that passes all other checks. ``nodes``:
    the current nodes; None if they are unknown. If a pod requests more GPUs than any node has, it is refused, so that
    its owner notices at once. With the setting ``too_many`` = WAIT it gets a warning instead, and waits. If it requests
    a larger GPU than any node has, it always gets a warning and waits. Without ``nodes`` these two checks are left out.
    Without ``classes`` no pod with a RuntimeClass is admitted.
    """
    if request.operation == "UPDATE":
        return _update(request, settings)
    pod = request.object or {}
    metadata, spec = pod.get("metadata") or {}, pod.get("spec") or {}
    labels = metadata.get("labels") or {}
    found = whatever_the_labels_say(pod, settings)
    if found:
        return refuse(request, found)
    if any(labels.get(name) == "ignore" for name in IGNORE):
        return _answer(request)
    try:
        ask = read_pod(pod, settings.config)
    except DialectError as fault:
        return refuse(request, fault.findings)
    if not ask.wants_gpus:
        return _answer(request)
    # The RuntimeClass is checked whichever scheduler the pod names.
    pod_name = f"{request.namespace}/{metadata.get('name') or metadata.get('generateName') or '?'}"
    runtime_class = str(spec.get("runtimeClassName") or settings.runtime_class)
    untried = (classes or RuntimeClasses()).refusal(pod_name, runtime_class)
    if untried:
        return refuse(request, [Finding("error", "spec.runtimeClassName", untried)])
    findings: list[Finding] = []
    way = way or Way()
    if way_of(labels, way.of_namespace, findings) == CLAIMS and not findings:
        return _claims(request, ask, settings, way.first)
    if findings:
        return refuse(request, findings)
    scheduler = spec.get("schedulerName") or DEFAULT_SCHEDULER
    if scheduler not in (DEFAULT_SCHEDULER, settings.scheduler_name):
        text = f'spec.schedulerName: "{scheduler}" does not plan GPUs of vgpu.fleet; the pod stays unchanged'
        return _answer(request, warnings=[text])
    many = too_many(ask, nodes) if nodes else []
    findings += admission_findings(pod, ask) + (many if settings.too_many == REFUSE else [])
    if findings:
        return refuse(request, findings)
    over = quota(request.namespace, str(metadata.get("uid") or ""), ask) if quota else ""
    if over:
        # The status is the same as that of Kubernetes' own quotas, so that controllers retry.
        return {"uid": request.uid, "allowed": False, "status": {"code": 403, "reason": "Forbidden", "message": over}}
    warnings = [f"{one}; the pod waits" for one in many]
    warnings += [str(one) for one in ask.warnings] + (too_large(ask, nodes.shapes) if nodes else [])
    return _answer(request, changes(spec, ask, settings), warnings)


def whatever_the_labels_say(pod: dict[str, Any], settings: Settings) -> list[Finding]:
    """Returns the faults for which a pod is refused whatever its labels and its scheduler are. The ledger and the
    device plugins trust the annotations of every pod, and every pod could mount something over a device plugin's files.
    """
    text = "is written by the scheduler alone; leave it out"
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    forged = [Finding("error", f'metadata.annotations["{name}"]', text) for name in OURS if name in annotations]
    found = forged or excess(pod) or resize_findings(pod)
    if found:
        return found
    conflicts = conflicting_mounts(pod.get("spec") or {}, resource_names(settings.config))
    return [Finding("error", f"container {one.container}", one.reason) for one in conflicts]


def changes(spec: dict[str, Any], ask: PodAsk, settings: Settings) -> list[dict[str, Any]]:
    """Returns the JSON patch that completes the pod; empty for a pod that is already complete."""
    patch: list[dict[str, Any]] = []
    if spec.get("schedulerName") != settings.scheduler_name:
        patch.append({"op": "add", "path": "/spec/schedulerName", "value": settings.scheduler_name})
    if settings.runtime_class and not spec.get("runtimeClassName"):
        patch.append({"op": "add", "path": "/spec/runtimeClassName", "value": settings.runtime_class})
    asks = {one.container: one for one in ask.asks}
    for kind in ("initContainers", "containers"):
        for n, container in enumerate(spec.get(kind) or []):
            one = asks.get(container.get("name"))
            if one is None:
                continue
            where = f"/spec/{kind}/{n}"
            limits = dict((container.get("resources") or {}).get("limits") or {})
            requests = dict((container.get("resources") or {}).get("requests") or {})
            named = {**requests, **limits}
            added = {} if settings.config.gpu in named else {settings.config.gpu: str(one.gpus)}
            memory_names = {settings.config.memory, settings.config.memory_percentage}
            if one.dialect == "hami" and one.memory.kind == MIB and not memory_names & named.keys():
                limit, rest = divmod(one.memory.amount + one.burst_mib, settings.config.memory_factor)
                # Only the default may be no whole number of units. It is left out, because it applies without a name.
                if not rest:
                    added[settings.config.memory] = str(limit)
            if added:
                resources = dict(container.get("resources") or {}, limits={**limits, **added})
                # Kubernetes requires a request equal to the limit. The API server sets missing requests to the limits
                # before it calls us, but perhaps not again after our change.
                resources["requests"] = {**requests, **added}
                patch.append({"op": "add", "path": f"{where}/resources", "value": resources})
            variables = container.get("env") or []
            if ask.priority is not None and all(each.get("name") != PRIORITY_VARIABLE for each in variables):
                value = [*variables, {"name": PRIORITY_VARIABLE, "value": str(ask.priority)}]
                patch.append({"op": "add", "path": f"{where}/env", "value": value})
    return patch


def _claims(request: wire.AdmissionRequest, ask: PodAsk, settings: Settings, first: bool) -> dict[str, Any]:
    """Returns the response for a pod that gets claims instead of its requests. Such a pod is not planned by this
    scheduler.
    """
    pod = request.object or {}
    findings = claim_admission.unavailable(settings.claims, first) or admission_findings(pod, ask)
    claims = claim_admission.read_claims(ask, findings)
    if findings:
        return refuse(request, findings)
    patch = claim_admission.changes(request.uid, pod, claims, settings.config, settings.scheduler_name)
    return _answer(request, patch, [str(one) for one in (*ask.warnings, *claims.warnings)])


def too_many(ask: PodAsk, nodes: Nodes) -> list[Finding]:
    """Returns a finding for each container that requests more distinct GPUs than any node has. Returns none if no node
    with a GPU for the pod is known.
    """
    most = max(one.gpus for one in ask.asks)
    name, count = nodes.most_gpus(ask.preferences) if most > 1 else ("", 0)
    if not name or most <= count:
        return []
    taken = " that the pod's annotations accept" if ask.preferences.selects else ""
    found = []
    for one in ask.asks:
        if one.gpus > count:
            text = f"container {one.container} asks for {one.gpus} different GPUs, and the node with most, {name}, has "
            found.append(Finding("error", one.where, f"{text}{count}{taken}; ask for at most {count}"))
    return found


def too_large(ask: PodAsk, shapes: Collection[tuple[int, int]]) -> list[str]:
    """Returns a warning for each request that is larger than every current GPU; the pod waits until a
    larger GPU joins.
    """
    largest = max((memory for _count, memory in shapes), default=0)
    if not largest:
        return []
    found = []
    for one in ask.asks:
        if one.memory.kind == MIB and one.memory.amount > largest:
            size = f"{one.memory.amount} MiB of a GPU"
            found.append(f"{one.where}: asks for {size}, and the largest has {largest}; the pod waits")
    return found


def _update(request: wire.AdmissionRequest, settings: Settings) -> dict[str, Any]:
    """Refuses invalid changes of a pod's annotations. Annotations that our programs write may be changed only by
    kubelets and the users in ``settings``, because other pods' GPUs depend on them.
    """
    user = str((request.userInfo or {}).get("username") or "")
    both = (*settings.may_write, *settings.may_give)
    allowed = {pod_annotations.PLAN: settings.may_write, pod_annotations.GIVEN: both}
    allowed |= {resizes.RESIZED: settings.may_write, resizes.FORMER: both}
    before, after = (
        ((one or {}).get("metadata") or {}).get("annotations") or {} for one in (request.oldObject, request.object)
    )
    findings = []
    for name, users in allowed.items():
        if before.get(name) != after.get(name) and user not in users and not user.startswith("system:node:"):
            findings.append(
                Finding("error", f'metadata.annotations["{name}"]', f"the user {user} may not change this annotation")
            )
    if before.get(burst.REQUEST) != after.get(burst.REQUEST):
        text = "stays as it was admitted; create the pod again to change it"
        findings.append(Finding("error", f'metadata.annotations["{burst.REQUEST}"]', text))
    if before.get(resizes.RESIZE) != after.get(resizes.RESIZE):
        findings += resize_findings(request.object or {})
    return refuse(request, findings) if findings else _answer(request)


def resize_findings(pod: dict[str, Any]) -> list[Finding]:
    """Returns the faults of the resize request in a pod's annotation. Whether room and quota suffice is checked later,
    before it is granted.
    """
    metadata, spec = pod.get("metadata") or {}, pod.get("spec") or {}
    text = (metadata.get("annotations") or {}).get(resizes.RESIZE)
    if text is None:
        return []
    where = f'metadata.annotations["{resizes.RESIZE}"]'
    containers = [
        str(one.get("name"))
        for kind in ("initContainers", "containers")
        for one in spec.get(kind) or []
        if isinstance(one, dict)
    ]
    try:
        request = resizes.read_request(text)
        plan = pod_annotations.read_annotations(metadata.get("annotations") or {})
        if plan is not None:
            resizes.applied(plan, request)
    except pod_annotations.PlanError as fault:
        return [Finding("error", where, str(fault))]
    unknown = [name for name in request if name not in containers]
    shown = ", ".join(containers[:10])
    return [
        Finding("error", where, f"{name[:64]}: no container of the pod has this name; expected {shown}")
        for name in unknown
    ]


def _answer(
    request: wire.AdmissionRequest, patch: Sequence[dict[str, Any]] = (), warnings: Sequence[str] = ()
) -> dict[str, Any]:
    response: dict[str, Any] = {"uid": request.uid, "allowed": True}
    if patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(msgspec.json.encode(patch)).decode()
    if warnings:
        response["warnings"] = [text[:250] for text in warnings]
    return response


def refuse(request: wire.AdmissionRequest, findings: Sequence[Finding]) -> dict[str, Any]:
    message = sentence(findings)
    return {"uid": request.uid, "allowed": False, "status": {"code": 422, "reason": "Invalid", "message": message}}
