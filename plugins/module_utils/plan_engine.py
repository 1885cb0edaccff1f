# SPDX-License-Identifier: Apache-2.0
"""The plan's step for engines other than docker: containerd, CRI-O, k3s and RKE2. Pure."""

from __future__ import annotations

import re
from typing import Any

from . import containerd_text, toml_text
from .containerd_text import ConfigError, Wish
from .node_state import sha256
from .wish import ENGINE_UNITS


def absent(wanted: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """What is left of a file of our own; what records hold is the plan's own business."""
    path = wanted["drop_in_path"]
    return [f"remove {path}"] if path and state["files"].get(path) is not None else []


def look(wanted: dict[str, Any], state: dict[str, Any]) -> tuple[str, list[str], list[str]]:
    """The reason, the changes, and the errors that stop this host."""
    engine = wanted["engine"]
    try:
        changes, written = _containerd(wanted, state) if engine == "containerd" else _drop_in(wanted, state)
    except (ConfigError, toml_text.TomlError) as fault:
        return "", [], ["{}: {}".format(wanted["containerd_config"], fault)]
    units = {name: state["units"].get(name) or {} for name in ENGINE_UNITS[engine]}
    active = [name for name, unit in units.items() if unit.get("active")]
    if changes:
        if active and wanted["restart"] == "never":
            way_out = f"{active[0]} must be restarted to read it, and container_runtime_restart is never; allow it"
            return "", [], [f"{changes[0]}: {way_out}"]
        return "the configuration of the engine differs", changes, []
    for name in active:
        if written and units[name].get("started") and written > units[name]["started"]:
            return "the configuration is newer than the running engine", [f"restart {name}"], []
    if engine == "containerd" and units["containerd.service"].get("present") and not active:
        return "containerd.service is not running", ["start containerd.service"], []
    return "", [], []


def _containerd(wanted: dict[str, Any], state: dict[str, Any]) -> tuple[list[str], float]:
    path, found = wanted["containerd_config"], state["containerd"]
    runtime = (wanted["runtimes"].get("nvidia") or {}).get("path") or Wish().path
    wish = Wish(path=runtime, default=wanted["default_runtime"] == "nvidia")
    record = state["files"].get(wanted["containerd_record"]) or {}
    text = found["config_text"]
    if text is None:
        return [f"write {path} with NVIDIA's runtime"], 0.0
    installed = state["packages"].get("containerd") or state["packages"].get("containerd.io") or ""
    faults = containerd_text.problems(text, version(installed))
    if faults:
        raise ConfigError("; ".join(faults))
    target = containerd_text.place(path, text)
    if target == path:
        changes = [f"{path}: {change}" for change in containerd_text.merge(text, wish)[1]]
    else:
        changes = [] if found["drop_in_text"] == containerd_text.drop_in(text, wish) else [f"write {target}"]
    return changes, float(record.get("mtime") or 0.0)


def _drop_in(wanted: dict[str, Any], state: dict[str, Any]) -> tuple[list[str], float]:
    path = wanted["drop_in_path"]
    on_disk = state["files"].get(path)
    if on_disk is None:
        return [f"write {path}"], 0.0
    changed = on_disk["sha256"] != sha256(wanted["drop_in_text"])
    return [f"change {path}"] if changed else [], float(on_disk["mtime"])


def version(package: str) -> tuple[int, ...]:
    """The version of a package as numbers, empty where there is none."""
    found = re.match(r"(?:\d+:)?(\d+)\.(\d+)", package)
    return tuple(int(one) for one in found.groups()) if found else ()
