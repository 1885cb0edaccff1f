# SPDX-License-Identifier: Apache-2.0
"""Builds the webhook configurations of the scheduler, as plain data, and the CEL conditions by which the API server
chooses the pods that it sends to the webhooks.
"""

from __future__ import annotations

from typing import Any, Sequence

from .scheduler_desired import (
    ALLOCATION,
    ANNOTATIONS,
    ASKING,
    ASKING_PREFIX,
    CLAIMS,
    EXTENDING,
    IGNORE_LABELS,
    NAME,
    NOT_OF,
    PREFIXES,
    RESIZE,
    Desired,
    meta,
    resource_names,
)

_BOTH = ("object", "oldObject")


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
    named = meta(desired, namespaced=False)
    return [
        {"apiVersion": api, "kind": "MutatingWebhookConfiguration", "metadata": named, "webhooks": mutating},
        {"apiVersion": api, "kind": "ValidatingWebhookConfiguration", "metadata": named, "webhooks": validating},
    ]
