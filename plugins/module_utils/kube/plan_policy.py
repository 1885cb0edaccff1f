# SPDX-License-Identifier: Apache-2.0
"""Makes the ValidatingAdmissionPolicy that protects the annotations with the promised and allocated GPUs of a pod. Only
the scheduler and the device plugin may write, change or remove them, through any resource or subresource. The API
server evaluates the policy itself, so the protection never pauses. On API servers before 1.30 the scheduler's webhook
protects the annotations instead, but not while no replica of the scheduler answers.
"""

from __future__ import annotations

import json
from typing import Any, Mapping, Sequence

API = "admissionregistration.k8s.io/v1"
NAME = "vgpu-scheduler-plans"
# Requests to check. A Binding's annotations are copied to the pod, and subresources such as pods/status accept
# annotations too.
RULES = (
    ("CREATE", ("pods", "pods/binding", "bindings")),
    ("UPDATE", ("pods", "pods/status", "pods/resize", "pods/ephemeralcontainers")),
)
NODE = "system:node:"


def manifests(writers: Mapping[str, Sequence[str]], fixed: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Returns the policy and its binding in the order of their application; they are removed in reverse order.
    ``writers`` maps each annotation to the users that may write it. Nodes may write all annotations, because a device
    plugin may use the kubelet's credentials. ``fixed``: annotations that the creator of a pod may set, and that no user
    may change later.
    """
    meta: dict[str, Any] = {"name": NAME, "labels": {"app.kubernetes.io/name": NAME}}
    names, kept = sorted(writers), sorted(fixed)
    has = " || ".join(_has(one, name) for one in _BOTH for name in (*names, *kept))
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "resourceRules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": [operation], "resources": list(resources)}
                for operation, resources in RULES
            ]
        },
        # If a pod has none of these annotations, which is the usual case, the API server skips the other expressions.
        "matchConditions": [
            {"name": "annotated", "expression": has},
            {"name": "not-a-node", "expression": f"!request.userInfo.username.startsWith({_text(NODE)})"},
        ],
        "validations": [
            {
                "expression": f"{_user_in(writers[name])} || {_same(name)}",
                "messageExpression": f"{_text(_message(name))} + request.userInfo.username",
                "message": _message(name),
            }
            for name in names
        ]
        + [
            {
                # Only the creator of a Pod may set these annotations. So check the kind, because the creation of a
                # Binding also adds annotations to the pod.
                "expression": f'(oldObject == null && request.kind.kind == "Pod") || {_same(name)}',
                "message": f'metadata.annotations["{name}"] stays as it was admitted; create the pod again',
            }
            for name in kept
        ],
    }
    return [
        {"apiVersion": API, "kind": "ValidatingAdmissionPolicy", "metadata": meta, "spec": spec},
        {
            "apiVersion": API,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": meta,
            "spec": {"policyName": NAME, "validationActions": ["Deny"]},
        },
    ]


def _message(name: str) -> str:
    return f'metadata.annotations["{name}"] is written by vgpu.fleet alone; leave it as it is. The user is '


# ---- CEL

_BOTH = ("object", "oldObject")


def _text(text: str) -> str:
    """Returns a string in CEL's notation, which is that of JSON."""
    return json.dumps(text)


def _has(one: str, name: str) -> str:
    # A request that creates an object has no oldObject.
    return f"({one} != null && has({one}.metadata.annotations) && {_text(name)} in {one}.metadata.annotations)"


def _value(one: str, name: str) -> str:
    """Returns a CEL expression: a list with the annotation's value, or an empty list if the annotation is missing. So
    an empty annotation differs from a missing one.
    """
    return f"({_has(one, name)} ? [{one}.metadata.annotations[{_text(name)}]] : [])"


def _same(name: str) -> str:
    return f"{_value('object', name)} == {_value('oldObject', name)}"


def _user_in(users: Sequence[str]) -> str:
    return f"request.userInfo.username in {json.dumps(list(users))}"
