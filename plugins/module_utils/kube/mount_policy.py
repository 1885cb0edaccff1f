# SPDX-License-Identifier: Apache-2.0
"""Makes ValidatingAdmissionPolicies that refuse pods whose mounts conflict with our files. pods/mounts.py explains the
rule; here it is written in CEL. The API server evaluates the policies itself, so the rule always applies. There are up
to three policies. OF_SCHEDULER covers the resource names of the scheduler's configuration. OF_DEVICE_PLUGIN covers the
resources of the role device_plugin; an annotation lists its nodes and their resources. OF_CLAIMS covers containers with
claims (Dynamic Resource Allocation). Policies may overlap without harm.
"""

from __future__ import annotations

import json
from typing import Any, Mapping, Sequence

from ..pods import mounts

API = "admissionregistration.k8s.io/v1"
# The first Kubernetes version that has ValidatingAdmissionPolicy in API version v1.
KNOWS_POLICIES = (1, 30, 0)
OF_DEVICE_PLUGIN = "vgpu-device-plugin-mounts"
OF_SCHEDULER = "vgpu-scheduler-mounts"
OF_CLAIMS = "vgpu-claim-mounts"
# Annotation of the device plugin's policy: JSON that maps each node to the resources by which containers get limited
# slices (shares of a GPU) there.
NODES = "vgpu.fleet/nodes"
MESSAGE = f"a volume of this pod lies at, above or below a path {mounts.ADVICE}"


def manifests(
    name: str, resources: Sequence[str], annotations: Mapping[str, str] | None = None, claims: bool = False
) -> list[dict[str, Any]]:
    """Returns the policy and its binding in the order of their application; they are removed in reverse order.
    ``resources``: names by which a container requests a slice. ``claims``: whether the policy also covers every
    container with a claim. It must cover all claims, because a pod's spec does not show which driver's devices a claim
    is for.
    """
    meta: dict[str, Any] = {"name": name, "labels": {"app.kubernetes.io/name": name}}
    asks = _asks(resources, claims)
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "resourceRules": [_rule("CREATE", "pods"), _rule("UPDATE", "pods/ephemeralcontainers")],
        },
        "matchConditions": [{"name": "gpus", "expression": _any_container(asks)}],
        "variables": [
            {"name": "guarded", "expression": _texts(mounts.GUARDED)},
            {"name": "asking", "expression": f"({_all_containers()}).filter(c, {asks})"},
            {"name": "conflicts", "expression": _conflicts()},
        ],
        "validations": [
            {
                "expression": "size(variables.conflicts) == 0",
                "message": MESSAGE,
                "messageExpression": "variables.conflicts.join('; ') + " + _text(f", {mounts.ADVICE}"),
            }
        ],
    }
    return [
        {
            "apiVersion": API,
            "kind": "ValidatingAdmissionPolicy",
            "metadata": dict(meta, annotations=dict(annotations)) if annotations else meta,
            "spec": spec,
        },
        {
            "apiVersion": API,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": meta,
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        },
    ]


def of_claims(extended_resource: str = "") -> list[dict[str, Any]]:
    """Returns the policy for containers with claims. In such a container the library looks for shares at a fixed list
    of mount points, so a volume at an unused mount point would count as a share.
    """
    return manifests(OF_CLAIMS, [extended_resource] if extended_resource else [], claims=True)


def of_nodes(nodes: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Returns the device plugin's policy for these nodes and the resources of each."""
    resources = sorted({name for names in nodes.values() for name in names})
    return manifests(OF_DEVICE_PLUGIN, resources, {NODES: json.dumps(nodes, sort_keys=True)})


def ground() -> dict[str, Any]:
    """Returns a device plugin's policy that refuses nothing and names no node. A controller creates it before it adds
    the first nodes. Each later write names the resourceVersion that was read, so if two controllers write at once, the
    API server refuses one of the writes.
    """
    policy = of_nodes({})[0]
    spec = {"matchConstraints": policy["spec"]["matchConstraints"], "validations": [{"expression": "true"}]}
    return {**policy, "metadata": {"name": OF_DEVICE_PLUGIN}, "spec": spec}


def nodes_with(policy: Mapping[str, Any] | None, nodes: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Returns the nodes that an existing policy lists, with the entries of ``nodes`` replaced; ``policy`` is None if
    there is no policy. Omits nodes without resources.
    """
    annotations = ((policy or {}).get("metadata") or {}).get("annotations") or {}
    try:
        known = json.loads(annotations.get(NODES) or "{}")
    except ValueError:
        known = {}
    merged = {**(known if isinstance(known, dict) else {}), **nodes}
    return {name: sorted(set(names)) for name, names in merged.items() if names}


def _rule(operation: str, resource: str) -> dict[str, Any]:
    return {"apiGroups": [""], "apiVersions": ["v1"], "operations": [operation], "resources": [resource]}


# ---- CEL


def _text(text: str) -> str:
    """Returns a string in CEL's notation, which is that of JSON."""
    return json.dumps(text)


def _texts(texts: Sequence[str]) -> str:
    return "[" + ", ".join(_text(one) for one in texts) + "]"


def _asks(resources: Sequence[str], claims: bool) -> str:
    """Returns a CEL expression: whether the container c names one of the resources, or a claim."""
    names = _texts(resources)
    within = " || ".join(
        f"(has(c.resources.{kind}) && c.resources.{kind}.exists(r, r in {names}))" for kind in ("limits", "requests")
    )
    claimed = " || (has(c.resources.claims) && size(c.resources.claims) > 0)" if claims else ""
    return f"has(c.resources) && ({within}{claimed})"


def _containers(kind: str) -> str:
    """Returns a CEL expression: the pod's containers of a kind. Every pod has ``containers``; the lists of other kinds
    may be absent.
    """
    if kind == "containers":
        return "object.spec.containers"
    return f"(has(object.spec.{kind}) ? object.spec.{kind} : [])"


def _any_container(condition: str) -> str:
    return " || ".join(f"{_containers(kind)}.exists(c, {condition})" for kind in mounts.KINDS)


def _all_containers() -> str:
    # dyn() removes the type. Without it CEL could not join the lists, because ephemeral containers have another type.
    return " + ".join(f"dyn({_containers(kind)})" for kind in mounts.KINDS)


def _paths() -> str:
    """Returns a CEL expression: every path of the container c that becomes a mount point or a device."""
    lists = [
        f"(has(c.{kind}) ? c.{kind}.map(m, m.{field}) : [])"
        for kind, field in (("volumeMounts", "mountPath"), ("volumeDevices", "devicePath"))
    ]
    lists.append("(has(c.terminationMessagePath) ? [c.terminationMessagePath] : [])")
    return "(" + " + ".join(lists) + ")"


def _conflicts() -> str:
    """Returns a CEL expression: for each container that requests GPUs, a text with one sentence for each path that
    conflicts with ``mounts.GUARDED``. ``[place].exists(q, …)`` serves as a variable: without it a path would be split
    again for each guarded path, and the API server limits the cost of an expression.
    """
    place = "'/' + p.split('/').filter(s, s != '' && s != '.').map(s, s + '/').join()"

    def meets(found: str) -> str:
        near = "q.startsWith(g + '/') || (g + '/').startsWith(q)"
        return f"[{place}].exists(q, {found.format(near)})"

    first = f"variables.guarded.filter(g, '..' in p.split('/') || {meets('{}')})[0]"
    wrong = f"p != '' && ('..' in p.split('/') || {meets('variables.guarded.exists(g, {})')})"
    sentence = f"'container ' + c.name + ': \"' + p + '\" lies at, above or below ' + {first}"
    one = f"{_paths()}.filter(p, {wrong}).map(p, {sentence}).join('; ')"
    return f"variables.asking.map(c, {one}).filter(text, text != '')"
