# SPDX-License-Identifier: Apache-2.0
"""Applies desired objects to a cluster by server-side apply, reports the changes, and removes objects.

The caller passes an API object. It has ``get(path)`` (None if there is no such object), ``apply(path, body, dry_run)``
and ``delete(path, version)``, and returns mappings as the API server sends them. If a desired object has a
``resourceVersion``, the API server refuses to write or remove an object with a newer version. Server-side apply does
not change fields that other programs own, such as the certificates that the scheduler writes into its webhooks.
"""

from __future__ import annotations

import copy
import re
from typing import Any, NamedTuple, Sequence

# Fields that the server manages; a difference in these fields is no change.
KEPT = ("managedFields", "resourceVersion", "generation", "creationTimestamp", "uid", "selfLink")
# Maps kinds that end in y to their plural. All other plurals are built by rule.
PLURALS = {
    "NetworkPolicy": "networkpolicies",
    "ClusterPolicy": "clusterpolicies",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
}


class Change(NamedTuple):
    """Describes one object before and after a change that was made or predicted; None means that the object does not
    exist.
    """

    title: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


def path_of(one: dict[str, Any]) -> str:
    """Returns the path of an object on the API server."""
    group, kind, meta = str(one["apiVersion"]), str(one["kind"]), one["metadata"]
    plural = PLURALS.get(kind) or kind.lower() + ("es" if kind.endswith("s") else "s")
    base = ("/apis/" if "/" in group else "/api/") + group
    if meta.get("namespace"):
        base += "/namespaces/" + str(meta["namespace"])
    return f"{base}/{plural}/{meta['name']}"


def title_of(one: dict[str, Any]) -> str:
    meta = one["metadata"]
    return f"{one['kind']} {meta.get('namespace') + '/' if meta.get('namespace') else ''}{meta['name']}"


def shown(one: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns an object without the fields that the server manages."""
    if one is None:
        return None
    out = copy.deepcopy(one)
    out.pop("status", None)
    for name in KEPT:
        out.get("metadata", {}).pop(name, None)
    # Remove this annotation, in which the server counts how often the Deployment was rolled out.
    annotations = out.get("metadata", {}).get("annotations") or {}
    annotations.pop("deployment.kubernetes.io/revision", None)
    if not annotations:
        out.get("metadata", {}).pop("annotations", None)
    return out


def refusals(api: Any, objects: Sequence[dict[str, Any]]) -> str:
    """Returns the API server's objections to these objects, with the remedy; empty if the server would accept all
    objects. Changes nothing.
    """
    refused = [api.refusal(path_of(one), one) for one in objects]
    lines = list(dict.fromkeys(filter(None, refused)))
    way_out = "use the kubeconfig of a cluster administrator, or have these rights granted"
    return "\n".join([f"Nothing was changed: the API server would refuse; {way_out}:", *lines]) if lines else ""


def apply(api: Any, objects: Sequence[dict[str, Any]], check: bool = False) -> list[Change]:
    """Applies every object in order and returns the changes. In check mode the server makes a dry run.

    Check mode reports a missing object as new without a dry run, because its namespace may not exist yet.
    """
    changes = []
    for one in objects:
        path = path_of(one)
        before = api.get(path)
        after = one if check and before is None else api.apply(path, one, check)
        if shown(before) != shown(after):
            changes.append(Change(title_of(one), shown(before), shown(after)))
    return changes


def remove(api: Any, objects: Sequence[dict[str, Any]], check: bool = False) -> list[Change]:
    """Deletes these objects as far as they exist, the last first. Changes no other object."""
    changes = []
    for one in reversed(objects):
        path = path_of(one)
        before = api.get(path)
        if before is not None:
            if not check:
                api.delete(path, one["metadata"].get("resourceVersion", ""))
            former = shown(before)
            if former is not None and one["kind"] == "Secret":
                # Hide the data: a diff appears on screens and in logs.
                former["data"] = dict.fromkeys(former.get("data") or {}, "(not shown)")
            changes.append(Change(title_of(one), former, None))
    return changes


def numbers(version: dict[str, Any]) -> tuple[int, int, int]:
    """Returns major, minor and patch from the reply to ``/version``: v1.34.2, v1.31.4+k3s1, v1.29.8-eks-a18cd3a.

    Raises ValueError if the reply has no such version.
    """
    found = re.match(r"^v?([0-9]+)\.([0-9]+)\.([0-9]+)(?:[-+]|\Z)", str(version.get("gitVersion") or ""))
    if found is None:
        raise ValueError(f"expected a version such as v1.34.2, found {version.get('gitVersion')}")
    major, minor, patch = (int(number) for number in found.groups())
    return major, minor, patch
