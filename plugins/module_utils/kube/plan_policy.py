# SPDX-License-Identifier: Apache-2.0
"""Makes the ValidatingAdmissionPolicy that protects the annotations of scheduler and device plugin (promised and
allocated GPUs of a pod): no other user may write, change or remove them, by any resource or subresource.

It is evaluated inside the API server, so that there is no moment without it. API servers before 1.30 have the webhook
instead, which lets changes pass while no replica answers.
"""

from __future__ import annotations

import json
from typing import Any, Mapping, Sequence

API = "admissionregistration.k8s.io/v1"
NAME = "vgpu-scheduler-plans"
# A Binding's annotations become the pod's; and a subresource takes annotations too, pods/status for one.
RULES = (
    ("CREATE", ("pods", "pods/binding", "bindings")),
    ("UPDATE", ("pods", "pods/status", "pods/resize", "pods/ephemeralcontainers")),
)
NODE = "system:node:"


def manifests(writers: Mapping[str, Sequence[str]], fixed: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The policy and its binding, in the order in which they are applied; removed in the other. ``writers``: annotation
    → users that may write it. Nodes may write all of them, for the kubelet's own credentials are a device plugin's.
    ``fixed``: those that the creator of a pod may give it, and that no user changes later."""
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
        # Most pods have none of them: the rest is not evaluated then.
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
                # A Binding brings its annotations to the pod too, and is created.
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
    """Returns a string of CEL; JSON writes it the same."""
    return json.dumps(text)


def _has(one: str, name: str) -> str:
    # A request that creates an object has no oldObject.
    return f"({one} != null && has({one}.metadata.annotations) && {_text(name)} in {one}.metadata.annotations)"


def _value(one: str, name: str) -> str:
    """A list, so that an empty annotation differs from none."""
    return f"({_has(one, name)} ? [{one}.metadata.annotations[{_text(name)}]] : [])"


def _same(name: str) -> str:
    return f"{_value('object', name)} == {_value('oldObject', name)}"


def _user_in(users: Sequence[str]) -> str:
    return f"request.userInfo.username in {json.dumps(list(users))}"
