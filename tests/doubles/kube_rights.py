# SPDX-License-Identifier: Apache-2.0
"""Computes the RBAC right that a request needs and the rights that manifests grant, by the API server's rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
SERVICE_ACCOUNT = "ServiceAccount"


class Access(NamedTuple):
    """A right that is requested or granted. In a grant, an empty namespace or name matches all. ``resource`` may name a
    subresource, such as "pods/log".
    """

    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""


def access_of(method: str, target: str) -> Access | None:
    """Returns the right that a request needs, or None if the path is not a resource, such as /version."""
    url = urlsplit(target)
    words = url.path.strip("/").split("/")
    if words[0] not in ("api", "apis") or len(words) < 3:
        return None
    group, rest = ("", words[2:]) if words[0] == "api" else (words[1], words[3:])
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    resource, name, subresource = [*rest, "", "", ""][:3]
    verb = VERBS.get(method) or ("get" if name else "list")
    if verb == "list" and dict(parse_qsl(url.query)).get("watch") in ("1", "true"):
        verb = "watch"
    return Access(verb, group, f"{resource}/{subresource}" if subresource else resource, namespace, name)


def grants(manifests: Sequence[Mapping[str, Any]], account: str) -> set[Access]:
    """Returns all rights that roles in the manifests grant a service account. Built-in roles are not included."""
    roles = {(one["kind"], one["metadata"]["name"]): one for one in manifests if one["kind"] in ("Role", "ClusterRole")}
    found: set[Access] = set()
    for one in bindings(manifests, account):
        role = roles.get((one["roleRef"]["kind"], one["roleRef"]["name"]))
        for rule in role["rules"] if role else ():
            found |= {
                Access(verb, group, resource, one["metadata"].get("namespace", ""), name)
                for verb in rule["verbs"]
                for group in rule["apiGroups"]
                for resource in rule["resources"]
                for name in rule.get("resourceNames") or [""]
            }
    return found


def built_in(manifests: Sequence[Mapping[str, Any]], account: str) -> set[str]:
    """Returns the names of an account's roles that the manifests do not define."""
    roles = {(one["kind"], one["metadata"]["name"]) for one in manifests if one["kind"] in ("Role", "ClusterRole")}
    bound = {(one["roleRef"]["kind"], one["roleRef"]["name"]) for one in bindings(manifests, account)}
    return {name for _kind, name in bound - roles}


def bindings(manifests: Sequence[Mapping[str, Any]], account: str) -> list[Mapping[str, Any]]:
    return [
        one
        for one in manifests
        if one["kind"] in ("RoleBinding", "ClusterRoleBinding")
        and any(each["kind"] == SERVICE_ACCOUNT and each["name"] == account for each in one["subjects"])
    ]


def accounts(manifests: Iterable[Mapping[str, Any]]) -> set[str]:
    """Returns the names of all subjects of the bindings."""
    return {
        each["name"]
        for one in manifests
        if one["kind"] in ("RoleBinding", "ClusterRoleBinding")
        for each in one["subjects"]
    }


def covers(grant: Access, asked: Access) -> bool:
    """Returns whether a grant covers a request. As in RBAC, a create request has a name only for a subresource."""
    return grant[:3] == asked[:3] and grant.namespace in ("", asked.namespace) and grant.name in ("", asked.name)


def missing(granted: Iterable[Access], asked: Iterable[Access]) -> set[Access]:
    """Returns the requests that no grant covers."""
    known = list(granted)
    return {one for one in asked if not any(covers(grant, one) for grant in known)}


def unused(granted: Iterable[Access], asked: Iterable[Access]) -> set[Access]:
    """Returns the grants that no request needs."""
    made = list(asked)
    return {grant for grant in granted if not any(covers(grant, one) for one in made)}
