# SPDX-License-Identifier: Apache-2.0
"""Compares a node's configuration with the desired one. A node has node.yaml and may have named configurations next to
it; a label of the Kubernetes node chooses the active one.
"""

from __future__ import annotations

from typing import Any

from ..host.digest import sha256
from . import node_config, sharing, slices

# Kinds of allocations that run a user's work. The only other kind, "lease" (a slice withheld from pods for a limited
# time), belongs to an isolation check.
CLAIM = "claim"
OUTSIDE = ("container", "exec")
HOLDERS = ("kubelet", CLAIM, *OUTSIDE)


def held(state: dict[str, Any]) -> list[list[str]]:
    """Returns the slices (shares of a GPU) of each container, whether the kubelet, a claim, docker, podman or ``vgpuctl
    exec`` started it. Slices of an isolation check are left out.
    """
    status = state["plugin"]["status"] or {}
    allocations = status.get("allocations") or []
    found = [list(one.get("slice_ids") or []) for one in allocations if one.get("kind") in HOLDERS]
    # A slice that docker or podman got by its CDI name has no allocation.
    recorded = {name for one in allocations for name in one.get("slice_ids") or []}
    return found + [
        [one["id"]] for one in status.get("slices") or [] if one.get("in_use") and one["id"] not in recorded
    ]


def outside(state: dict[str, Any]) -> list[str]:
    """Returns the names of the containers of docker and podman and the programs of ``vgpuctl exec``, because a drain of
    the Kubernetes node does not move them.
    """
    status = state["plugin"]["status"] or {}
    allocations = status.get("allocations") or []
    named = [
        str(one.get("holder") or f"{one['kind']} {one.get('id')}") for one in allocations if one.get("kind") in OUTSIDE
    ]
    recorded = {name for one in allocations for name in one.get("slice_ids") or []}
    free = [one["id"] for one in status.get("slices") or [] if one.get("in_use") and one["id"] not in recorded]
    return sorted(named) + [f"a container that has slice {one} by its CDI name" for one in sorted(free)]


def claims(state: dict[str, Any]) -> list[str]:
    """Returns the names of the claims whose shares containers of this node use: ``claim default/c``."""
    allocations = (state["plugin"]["status"] or {}).get("allocations") or []
    return sorted({f"claim {one.get('holder') or '?'}" for one in allocations if one.get("kind") == CLAIM})


def active_name(path: str, status: dict[str, Any] | None) -> str:
    """Returns the name of the configuration that the running device plugin uses; empty if the plugin uses node.yaml
    itself.
    """
    loaded = (status or {}).get("config_path") or path
    folder = node_config.configs_folder(path) + "/"
    return loaded[len(folder) : -len(node_config.CONFIG_SUFFIX)] if loaded.startswith(folder) else ""


def is_behind(path: str, state: dict[str, Any]) -> bool:
    """Returns whether the configuration file has changed since the running device plugin loaded it."""
    status = state["plugin"]["status"] or {}
    name = active_name(path, status)
    found = state["node_config"]
    text = (found.get("named") or {}).get(name) if name else found["text"]
    return status.get("config_sha256") not in (None, sha256(text or ""))


def changes(path: str, desired: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """Returns the changes of node.yaml and the named configurations, and the files to remove."""
    found = state["node_config"]
    out = node_yaml_changes(path, desired["node_config"], found["text"])
    named, wanted = found.get("named") or {}, desired.get("node_configs") or {}
    for name in sorted(wanted):
        out += node_yaml_changes(node_config.config_file(path, name), wanted[name], named.get(name))
    out += ["remove " + node_config.config_file(path, name) for name in sorted(named) if name not in wanted]
    return out


def faults(desired: dict[str, Any], kubeconfig: str) -> list[str]:
    """Returns an error for each setting of the configurations that the device plugin cannot apply."""
    way_out = "set device_plugin_kubeconfig to a kubeconfig file on the host"
    named = {"node.yaml": desired["node_config"], **(desired.get("node_configs") or {})}
    return [
        f"vgpu_slice_sizing: requested ({name}) reads the sizes of pods from the API server; {way_out}"
        for name, config in named.items()
        if (slices.vcuda_of(config) or {}).get("sliceSizing") == "requested" and not kubeconfig
    ]


def resources(desired: dict[str, Any]) -> list[str]:
    """Returns the first resource of each configuration that may be active."""
    configs = [desired["node_config"], *(desired.get("node_configs") or {}).values()]
    return sorted({node_config.resource_name(config) for config in configs})


def reshaped(path: str, desired: dict[str, Any], state: dict[str, Any]) -> int:
    """Counts the containers whose slice will change its size or name, or will disappear."""
    name = active_name(path, state["plugin"]["status"])
    wanted = (desired.get("node_configs") or {}).get(name) or desired["node_config"]
    status = state["plugin"]["status"] or {}
    if status.get("resource", node_config.resource_name(wanted)) != node_config.resource_name(wanted):
        return len(held(state))
    pieces = sharing.pieces_for(state["gpus"], wanted)[0]
    after = {one.id: (one.memory_mib, one.sm_percent) for one in pieces}
    before = {one["id"]: (one["memory_mib"], one["sm_percent"]) for one in status.get("slices") or []}
    changed = {name for name, shape in before.items() if after.get(name) != shape}
    return sum(1 for ids in held(state) if changed.intersection(ids))


def node_yaml_changes(path: str, wanted: dict[str, Any], text: str | None) -> list[str]:
    """Returns the changes of node.yaml, key by key. An unreadable node.yaml is written again, because the collection
    owns it.
    """
    if text == node_config.dump(wanted):
        return []
    if text is None:
        return [f"write {path}"]
    try:
        found = node_config.load(text, path)
    except node_config.ConfigError as fault:
        return [f"rewrite {path} ({fault})"]
    before, after = _flat(found), _flat(wanted)
    changes = []
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if old != new:
            changes.append(f"{path}: {key} from {_shown(old)} to {_shown(new)}")
    return changes or [f"write {path} in its normal form"]


def _flat(document: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(document, dict):
        return {path: document}
    flat: dict[str, Any] = {}
    for key, value in document.items():
        flat.update(_flat(value, f"{path}.{key}" if path else key))
    return flat


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)
