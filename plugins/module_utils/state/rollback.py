# SPDX-License-Identifier: Apache-2.0
"""Saves and reads the rollback point of an upgrade: the state before the upgrade's first change, kept until isolation
is proven.

It is stored on the host, because a play can be killed after it switched to the new version. Without it, the next play
would take that unproven version for the former one.
"""

from __future__ import annotations

import json
import os
from typing import Any, Sequence

from ..config import node_config as configs
from ..gpu import nvml
from ..host import digest
from ..host.files import write_bytes
from ..host.host import Host
from ..library import versions
from . import running_plugin

PATH = "/var/lib/vgpu/upgrade.json"


def persist(
    host: Host,
    library_root: str,
    plugin_root: str,
    node_config: str,
    units: Sequence[str],
    check_mode: bool = False,
    daemonset: str = "",
) -> tuple[dict[str, Any], bool]:
    """Saves the running state as the rollback point, unless an interrupted upgrade has already saved one. Returns the
    rollback point, and whether an earlier run had saved it.
    """
    found = kept(host)
    if found is not None and _there(host, found, library_root, plugin_root) and not proven(host):
        return found, True
    point = {
        "library": versions.version_of(host.link(os.path.join(library_root, "current"))),
        "plugin": versions.version_of(host.link(os.path.join(plugin_root, "current"))),
        "node_config": host.text(node_config),
        "configs": named(host, node_config),
        "units": {path: host.text(path) for path in units},
        "daemonset": {daemonset: host.text(daemonset)} if daemonset else {},
    }
    if not check_mode:
        write_bytes(host.path(PATH), (json.dumps(point, indent=1, sort_keys=True) + "\n").encode("utf-8"), 0o600)
    return point, False


def named(host: Host, node_config: str) -> dict[str, str]:
    """Maps the paths of the named configurations next to node.yaml to their texts, because an upgrade may change
    them.
    """
    folder = configs.configs_folder(node_config)
    shown = [name for name in host.names(folder) if not name.startswith(".")]
    paths = [f"{folder}/{name}" for name in shown if name.endswith(configs.CONFIG_SUFFIX)]
    texts = ((path, host.text(path)) for path in paths)
    return {path: text for path, text in texts if text is not None}


def delete(host: Host, check_mode: bool = False) -> bool:
    """Deletes the rollback point; returns whether there was one."""
    if host.text(PATH) is None:
        return False
    if not check_mode:
        os.unlink(host.path(PATH))
    return True


def kept(host: Host) -> dict[str, Any] | None:
    """Returns the rollback point on the host, None if there is none that can be read."""
    try:
        found = json.loads(host.text(PATH) or "")
    except ValueError:
        return None
    keys = ("library", "plugin", "node_config", "units")
    if not isinstance(found, dict) or not all(key in found for key in keys):
        return None
    # An older version of this collection saved no configs and no daemonset. A rollback to such a point leaves the named
    # configurations and the DaemonSet file unchanged.
    return {**found, "configs": found.get("configs"), "daemonset": found.get("daemonset") or {}}


def proven(host: Host) -> bool:
    """Returns whether isolation was proven for the running state. If so, an older rollback point is outdated, and a new
    upgrade must save the running state.
    """
    gpus = nvml.read()
    runs = digest.fingerprint(running_plugin.status(host), gpus["gpus"], gpus["driver_version"])
    return runs is not None and runs == running_plugin.proof(host)


def _there(host: Host, point: dict[str, Any], library_root: str, plugin_root: str) -> bool:
    """Returns whether the rollback point's versions of library and plugin are still installed on the host."""
    library, plugin = point["library"], point["plugin"]
    whole = library is None or versions.is_whole(host, os.path.join(library_root, library))
    return whole and (plugin is None or plugin in versions.folders(host, plugin_root))
