# SPDX-License-Identifier: Apache-2.0
"""Builds a cluster's objects for claims (Dynamic Resource Allocation, Kubernetes 1.36): the device classes, and two
policies. One policy refuses parameters that our driver would refuse, the other refuses mounts over our files. If the
driver runs as a DaemonSet, the objects include its rights. A driver that runs as a service of the node uses the
kubelet's credentials, which may read the claims of the node's pods and write the ResourceSlices of the node.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from . import mount_policy, resource_drivers

API = "resource.k8s.io/v1"
ADMISSION = "admissionregistration.k8s.io/v1"
DRIVER = resource_drivers.OUR_DRIVER
CLASS, MIG_CLASS = resource_drivers.OUR_CLASS, "vgpu-mig"
PARAMETERS_POLICY, SLICES_POLICY, ROLE = "vgpu-claim-parameters", "vgpu-slices-of-their-node", "vgpu-claims"
PARAMETERS_VERSION, PARAMETERS_KIND = "vgpu.fleet/v1", "Share"
# Maps each key of the parameters to its allowed values. The driver has an equal table; a test compares both.
PARAMETERS: dict[str, tuple[Any, ...]] = {
    "corePolicy": ("disable", "default", "force"),
    "priority": (0, 1),
    "oomKiller": (False, True),
    "oversubscribe": (False, True),
    "logLevel": (0, 1, 2, 3, 4, 5),
}
NODE_NAME = "authentication.kubernetes.io/node-name"


class Desired(NamedTuple):
    """Describes the desired objects. ``extended_resource``: name of the resource by which pods without a claim get a
    default share; empty if there is none. ``namespace``, ``account``: of the driver's DaemonSet; empty if the driver is
    a service of each node.
    """

    extended_resource: str = ""
    namespace: str = ""
    account: str = ""


def manifests(desired: Desired) -> list[dict[str, Any]]:
    """Returns the objects in the order of their application; they are removed in reverse order."""
    out = [*classes(desired.extended_resource), *parameters_policy()]
    out += mount_policy.of_claims(desired.extended_resource)
    if desired.account:
        out += [*rights(desired.namespace, desired.account), *slices_policy(desired.namespace, desired.account)]
    return out


def classes(extended_resource: str = "") -> list[dict[str, Any]]:
    """Returns the device classes. The class of shares (parts of a GPU) gets an extended resource only if the user sets
    one. If two classes have the same extended resource, Kubernetes uses the younger class, so another driver's class
    could lose its resource.
    """
    shares = _device_class(CLASS, "gpu")
    if extended_resource:
        shares["spec"]["extendedResourceName"] = extended_resource
    return [shares, _device_class(MIG_CLASS, "mig")]


def _device_class(name: str, kind: str) -> dict[str, Any]:
    expression = f"device.driver == {_text(DRIVER)} && device.attributes[{_text(DRIVER)}].type == {_text(kind)}"
    spec: dict[str, Any] = {"selectors": [{"cel": {"expression": expression}}]}
    return {"apiVersion": API, "kind": "DeviceClass", "metadata": _meta(name), "spec": spec}


# ---- the policy for parameters of claims


def parameters_policy() -> list[dict[str, Any]]:
    """Returns the policy that refuses invalid parameters. Without it the API server accepts any parameters, and the pod
    waits until the driver reports the fault. The policy names only v1 of these objects, because the API server converts
    other versions to v1.
    """
    resources = ["resourceclaims", "resourceclaimtemplates", "deviceclasses"]
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": _constraints("resource.k8s.io", resources, ["CREATE", "UPDATE"]),
        "variables": [
            {"name": "config", "expression": _CONFIG},
            {
                "name": "ours",
                "expression": f"variables.config.filter(c, has(c.opaque) && c.opaque.driver == {_text(DRIVER)})",
            },
        ],
        "validations": [
            {
                "expression": f"variables.ours.all(c, {_has_kind('c.opaque.parameters')})",
                "message": f"parameters of {DRIVER} have apiVersion {PARAMETERS_VERSION} and kind {PARAMETERS_KIND}",
            },
            {
                "expression": "variables.ours.all(c, c.opaque.parameters.all(key, key in "
                f"{json.dumps(['apiVersion', 'kind', *PARAMETERS])}))",
                "message": f"parameters of {DRIVER} are {', '.join(PARAMETERS)}, and no others",
            },
            *(
                {
                    "expression": f"variables.ours.all(c, !({_text(key)} in c.opaque.parameters) || "
                    f"c.opaque.parameters[{_text(key)}] in {json.dumps(list(allowed))})",
                    "message": f"{key} of {DRIVER} is one of {', '.join(json.dumps(one) for one in allowed)}",
                }
                for key, allowed in PARAMETERS.items()
            ),
        ],
    }
    return _policy(PARAMETERS_POLICY, spec)


# A CEL expression that returns the configurations of the object. The object may be a claim template, a claim or a
# device class.
_CONFIG = (
    "has(object.spec.spec) ? (has(object.spec.spec.devices.config) ? object.spec.spec.devices.config : []) : "
    "has(object.spec.devices) ? (has(object.spec.devices.config) ? object.spec.devices.config : []) : "
    "(has(object.spec.config) ? object.spec.config : [])"
)


def _has_kind(place: str) -> str:
    pairs = (("apiVersion", PARAMETERS_VERSION), ("kind", PARAMETERS_KIND))
    return " && ".join(f"{_text(key)} in {place} && {place}.{key} == {_text(value)}" for key, value in pairs)


# ---- objects for the driver as a DaemonSet


def rights(namespace: str, account: str) -> list[dict[str, Any]]:
    """Returns the role and its binding with exactly the rights that the driver needs at the API server."""
    rules = [
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"]},
        {
            "apiGroups": ["resource.k8s.io"],
            "resources": ["resourceslices"],
            "verbs": ["list", "watch", "create", "update", "delete"],
        },
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
    ]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": ROLE}
    subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
    api = "rbac.authorization.k8s.io/v1"
    return [
        {"apiVersion": api, "kind": "ClusterRole", "metadata": _meta(ROLE), "rules": rules},
        {
            "apiVersion": api,
            "kind": "ClusterRoleBinding",
            "metadata": _meta(ROLE),
            "roleRef": role,
            "subjects": [subject],
        },
    ]


def slices_policy(namespace: str, account: str) -> list[dict[str, Any]]:
    """Returns the policy that lets each pod of the driver write only the ResourceSlices of the node that its token
    names. An RBAC role cannot express this.
    """
    user = f"system:serviceaccount:{namespace}:{account}"
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": _constraints("resource.k8s.io", ["resourceslices"], ["CREATE", "UPDATE", "DELETE"]),
        "matchConditions": [{"name": "driver", "expression": f"request.userInfo.username == {_text(user)}"}],
        "variables": [
            {
                "name": "node",
                "expression": f"request.userInfo.?extra[{_text(NODE_NAME)}][0].orValue('')",
            },
            {"name": "slice", "expression": "request.operation == 'DELETE' ? oldObject : object"},
        ],
        "validations": [
            {
                "expression": "variables.node != '' && has(variables.slice.spec.nodeName) && "
                "variables.slice.spec.nodeName == variables.node",
                "message": f"the driver writes slices of its own node alone; its token names that in {NODE_NAME}",
            },
            {
                "expression": f"variables.slice.spec.driver == {_text(DRIVER)}",
                "message": f"the driver writes slices of {DRIVER} alone",
            },
        ],
    }
    return _policy(SLICES_POLICY, spec)


def _constraints(group: str, resources: list[str], operations: list[str]) -> dict[str, Any]:
    rule = {"apiGroups": [group], "apiVersions": ["v1"], "operations": operations, "resources": resources}
    return {"matchPolicy": "Equivalent", "resourceRules": [rule]}


def _policy(name: str, spec: dict[str, Any]) -> list[dict[str, Any]]:
    binding = {"policyName": name, "validationActions": ["Deny"]}
    return [
        {"apiVersion": ADMISSION, "kind": "ValidatingAdmissionPolicy", "metadata": _meta(name), "spec": spec},
        {"apiVersion": ADMISSION, "kind": "ValidatingAdmissionPolicyBinding", "metadata": _meta(name), "spec": binding},
    ]


def _meta(name: str) -> dict[str, Any]:
    return {"name": name, "labels": {"app.kubernetes.io/name": name}}


def _text(text: str) -> str:
    """Returns a string in CEL's notation, which is that of JSON."""
    return json.dumps(text)
