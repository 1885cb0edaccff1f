# SPDX-License-Identifier: Apache-2.0
"""What a request needs of RBAC, and what the manifests of an account grant: by the rules of the API server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
SERVICE_ACCOUNT = "ServiceAccount"


class Access(NamedTuple):
    """A request, or a grant: there an empty namespace or name is every one. ``resource`` has its subresource."""

    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""


def access_of(method: str, target: str) -> Access | None:
    """None for what is no resource, such as /version."""
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
    """Every right of a service account by roles that the manifests have; those of built-in roles are not among them."""
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
    """The roles of an account that the manifests do not have."""
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
    """The names of those that any binding gives a right."""
    return {
        each["name"]
        for one in manifests
        if one["kind"] in ("RoleBinding", "ClusterRoleBinding")
        for each in one["subjects"]
    }


def covers(grant: Access, asked: Access) -> bool:
    """As in RBAC, a create has no name that a rule could limit, but one of a subresource has."""
    return grant[:3] == asked[:3] and grant.namespace in ("", asked.namespace) and grant.name in ("", asked.name)


def missing(granted: Iterable[Access], asked: Iterable[Access]) -> set[Access]:
    """Requests that no grant covers."""
    known = list(granted)
    return {one for one in asked if not any(covers(grant, one) for grant in known)}


def unused(granted: Iterable[Access], asked: Iterable[Access]) -> set[Access]:
    """Grants that no request needs."""
    made = list(asked)
    return {grant for grant in granted if not any(covers(grant, one) for one in made)}
