# SPDX-License-Identifier: Apache-2.0
"""Plans the changes of the role container_runtime on a host: docker, containerd, CRI-O, k3s and RKE2. Does no I/O."""

from __future__ import annotations

import json
import re
from typing import Any

from ..engines import (
    containerd_text,
    daemon_check,
    daemon_json,
    daemon_record,
    docker_variants,
    engine_auto,
    engine_packages,
    kubelet_engine,
)
from ..engines.containerd_text import ConfigError, Desired
from ..engines.engine_packages import DOCKER_UNIT, ENGINE_UNITS
from ..host.digest import sha256
from ..text import toml_text
from .part import NOTHING, PRESENT, Part, packages, undone

# FIRST_WITH_CDI: the first docker with CDI devices, if its CDI feature is switched on. FIRST_BY_ITSELF: the first
# docker in which this feature is on by default.
FIRST_WITH_CDI, FIRST_BY_ITSELF = (25, 0), (28, 2)


def container_runtime(wanted: dict[str, Any], state: dict[str, Any], desired: dict[str, Any]) -> Part:
    docker, unit = state["docker"], state["units"].get(DOCKER_UNIT) or {}
    if wanted["state"] != PRESENT:
        changes = [*undone(wanted, state), *absent(wanted, state)]
        return Part("the container runtime's changes are to be undone", changes)
    found = engine_auto.resolve(wanted, state)
    asked, wanted = wanted["engine"], {**wanted, "engine": found.name}
    engine = engine_packages.choose(state, wanted)
    if engine.refusal:
        return NOTHING._replace(errors=[engine.refusal])
    units = ENGINE_UNITS.get(wanted["engine"], [DOCKER_UNIT])
    there = any((state["units"].get(name) or {}).get("present") for name in units)
    others, kubelet = kubelet_engine.findings(state.get("kubelet_engine"), asked, there)
    if others:
        return NOTHING._replace(errors=others)
    if wanted["engine"] != "docker":
        missing = packages(engine.packages, "", state)
        reason, changes, faults = differences(wanted, state)
        reason = found.reason or "packages are missing or of another version" if missing else reason
        return Part(reason, [*missing, *changes], warnings=kubelet, errors=faults)
    if unit.get("masked"):
        way_out = f"systemctl unmask {DOCKER_UNIT}, or remove the role container_runtime from the play"
        return NOTHING._replace(errors=[f"{DOCKER_UNIT} is masked, so docker cannot start; {way_out}"])
    faults, notes = docker_variants.findings(docker["kinds"])
    if faults:
        return NOTHING._replace(errors=faults)
    changes = packages(engine.packages, "", state)
    reason = found.reason or "packages are missing or of another version"
    path = wanted["docker_config"]
    try:
        text, merged = daemon_record.merge(docker["config_text"], _record(wanted, state), wanted["docker_settings"])
        document = daemon_json.parse(text)
    except daemon_json.DaemonJsonError as fault:
        return NOTHING._replace(errors=[f"{path}: {fault}"])
    argv = unit.get("argv") or []
    faults = daemon_check.problems(document, argv)
    if faults:
        return NOTHING._replace(errors=[f"{path}: {fault}" for fault in faults])
    todo: list[Any] = list(merged)
    if merged:
        changes += [f"{path}: {change}" for change in merged]
        reason = f"{path} differs"
    elif docker["info"] is not None:
        todo = daemon_json.unapplied(docker["info"], document, argv)
        if todo:
            changes += [str(lack) for lack in todo]
            reason = f"the running daemon has not applied {path}"
    elif unit.get("active"):
        changes.append(f"restart {DOCKER_UNIT}, which does not answer")
        reason = f"{DOCKER_UNIT} is active but does not answer on its socket"
    if not todo and state["files"].get(daemon_json.PENDING) is not None:
        changes.append("finish an interrupted change of the running daemon")
        reason = f"a run was interrupted before docker had applied {path}"
    if unit.get("present") and not unit.get("active"):
        changes.append(f"start {DOCKER_UNIT}")
        reason = f"{DOCKER_UNIT} is not running" if len(changes) == 1 else reason
    if unit.get("present") and not unit.get("enabled"):
        changes.append(f"enable {DOCKER_UNIT}")
        reason = f"{DOCKER_UNIT} is not enabled" if len(changes) == 1 else reason
    part = Part(reason, changes, warnings=[*kubelet, *notes, *_by_device(document, state, desired)])
    return _docker_restart(part, wanted, state, daemon_json.needs_restart(todo)) if unit.get("active") else part


def _record(wanted: dict[str, Any], state: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the record of the keys that earlier runs set in daemon.json. None if there is no record, or if it cannot
    be read, which the role's module reports.
    """
    try:
        record = json.loads((state.get("texts") or {}).get(wanted["docker_record"]) or "null")
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _by_device(document: dict[str, Any], state: dict[str, Any], desired: dict[str, Any]) -> list[str]:
    """Returns a warning if docker, on a host without Kubernetes, is new enough to start containers by the CDI name of a
    slice (share of a GPU), but its feature ``cdi`` is off.
    """
    found = version(str((state["docker"]["info"] or {}).get("ServerVersion") or ""))
    plugin = desired["roles"].get("device_plugin") or {}
    if state.get("kubelet") or plugin.get("state") != PRESENT or not FIRST_WITH_CDI <= found < FIRST_BY_ITSELF:
        return []
    if "cdi" in (document.get("features") or {}):
        return []
    shown = ".".join(map(str, found))
    return [
        f"docker {shown} cannot start containers by --device vgpu.fleet/slice=…, because its feature cdi is off; "
        "vgpuctl run works. To enable it, set container_runtime_docker_extra: {features: {cdi: true}}, which restarts "
        "docker; {cdi: false} hides this warning"
    ]


def _docker_restart(part: Part, wanted: dict[str, Any], state: dict[str, Any], keys: list[str]) -> Part:
    """Returns the role's part of the plan. If docker must be restarted and this stops containers, the part gets a
    warning about them. If the role may not restart docker, the part gets an error instead.
    """
    info = state["docker"]["info"]
    pending = state["files"].get(daemon_json.PENDING) or {}
    if not keys and pending.get("sha256") == sha256("restart\n"):
        keys = ["the changes of an interrupted run"]
    if not keys and info is None:
        keys = ["a daemon that does not answer"]
    if not keys:
        return part
    names = ", ".join(keys)
    if wanted["restart"] == "never":
        return part._replace(
            errors=[
                f"a restart of docker is needed for {names}, and container_runtime_restart is never; set it to another "
                "value"
            ]
        )
    if info is None:
        return part._replace(
            disturbs=True, warnings=[*part.warnings, "docker does not answer, so its containers are unknown"]
        )
    running = int(info.get("ContainersRunning") or 0)
    if not running or info.get("LiveRestoreEnabled"):
        return part
    called = state["docker"].get("containers") or []
    stops = f"a restart of docker for {names} stops {running} running containers"
    stops += f" ({', '.join(called)})" if called else ""
    if wanted["restart"] == "always":
        return part._replace(disturbs=True, warnings=[*part.warnings, stops])
    way_out = "stop them, set live-restore, or allow it with container_runtime_restart: always"
    return part._replace(disturbs=True, errors=[f"{stops}, and container_runtime_restart is if_idle; {way_out}"])


def absent(wanted: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """Returns the changes that remove the collection's drop-in files. What else the role changed is in its records on
    the host; ``undone`` returns how to reverse that.
    """
    return [f"remove {path}" for path in engine_auto.files(wanted["engine"]) if state["files"].get(path) is not None]


def differences(wanted: dict[str, Any], state: dict[str, Any]) -> tuple[str, list[str], list[str]]:
    """Returns the reason for the changes ("": none), the changes, and the errors that stop the plan of this host."""
    engine = wanted["engine"]
    try:
        changes, written = _containerd(wanted, state) if engine == "containerd" else _drop_in(wanted, state)
    except (ConfigError, toml_text.TomlError) as fault:
        return "", [], ["{}: {}".format(wanted["containerd_config"], fault)]
    units = {name: state["units"].get(name) or {} for name in ENGINE_UNITS[engine]}
    active = [name for name, unit in units.items() if unit.get("active")]
    if changes:
        if active and wanted["restart"] == "never":
            way_out = (
                f"{active[0]} must be restarted to read it, and container_runtime_restart is never; set it to "
                "another value"
            )
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
    runtime = (wanted["runtimes"].get("nvidia") or {}).get("path") or Desired().path
    cgroup = containerd_text.systemd_cgroup(wanted["systemd_cgroup"], state.get("kubelet_engine"), found["config_text"])
    desired = Desired(path=runtime, default=wanted["default_runtime"] == "nvidia", systemd_cgroup=cgroup)
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
        changes = [f"{path}: {change}" for change in containerd_text.merge(text, desired)[1]]
    else:
        changes = [] if found["drop_in_text"] == containerd_text.drop_in(text, desired) else [f"write {target}"]
    return changes, float(record.get("mtime") or 0.0)


def _drop_in(wanted: dict[str, Any], state: dict[str, Any]) -> tuple[list[str], float]:
    path, text = engine_auto.drop_in(wanted["engine"], wanted)
    on_disk = state["files"].get(path)
    if on_disk is None:
        return [f"write {path}"], 0.0
    changed = on_disk["sha256"] != sha256(text)
    return [f"change {path}"] if changed else [], float(on_disk["mtime"])


def version(package: str) -> tuple[int, ...]:
    """Returns the major and minor version of a package as numbers; an empty tuple if the text has none."""
    found = re.match(r"(?:\d+:)?(\d+)\.(\d+)", package)
    return tuple(int(one) for one in found.groups()) if found else ()
