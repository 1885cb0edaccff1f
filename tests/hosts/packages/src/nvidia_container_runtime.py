# SPDX-License-Identifier: Apache-2.0
"""Replaces NVIDIA's nvidia-container-runtime on the simulated hosts: an OCI runtime that injects GPUs by CDI (Container
Device Interface) and then executes runc.

Does what NVIDIA's program does in its CDI mode: reads NVIDIA_VISIBLE_DEVICES of the container, resolves each device in
the CDI specifications of the host, edits the bundle's config.json and executes the real runtime with the same
arguments. Unlike NVIDIA's program, it also mounts the simulated driver's profile and state in each container that has
the driver (``simulation_mounts``), because ``vgpuctl run`` mounts the driver's libraries itself.
tests/integration/test_container_runtime_twin.py compares it with NVIDIA's own program on the same bundle.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import sys
import time
from pathlib import Path
from typing import Any

CONFIG = Path(os.environ.get("XDG_CONFIG_HOME") or "/etc") / "nvidia-container-runtime" / "config.toml"
KIND = "nvidia.com/gpu"
# A container may request a GPU by a mount of /dev/null at a path in this folder. An image cannot make such a request,
# and an unprivileged user cannot forge it.
VOLUMES = "/var/run/nvidia-container-devices"
# runc's global options that take a value as the next word.
VALUED = {"--root", "--log", "--log-format", "--criu", "--rootless"}


class RuntimeFault(Exception):
    """A container's request cannot be satisfied."""


def setting(name: str, default: str) -> str:
    """Returns one key of config.toml as text. Sections are ignored: no two sections share a key that is read here."""
    with contextlib.suppress(OSError):
        found = re.search(rf"^\s*{re.escape(name)}\s*=\s*(.+?)\s*$", CONFIG.read_text(), re.MULTILINE)
        if found:
            return found.group(1)
    return default


def listed(name: str, default: str) -> list[str]:
    """Returns one key of config.toml that is a list of strings, on one line."""
    return re.findall(r'"([^"]+)"', setting(name, default))


def spec_dirs() -> list[Path]:
    return [Path(folder) for folder in listed("spec-dirs", '["/etc/cdi", "/var/run/cdi"]')]


def command_of(words: list[str]) -> tuple[str, str, str | None]:
    """Returns the command, the bundle's folder and runc's log file, from runc's command line."""
    command, log = "", None
    place = 0
    while place < len(words):
        word = words[place]
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            command = word
            break
        if name in VALUED and not equals:
            place += 1
            value = words[place] if place < len(words) else ""
        if name == "--log":
            log = value
        place += 1
    bundle = os.getcwd()
    rest = words[place + 1 :]
    for index, word in enumerate(rest):
        name, equals, value = word.partition("=")
        if name in ("--bundle", "-b"):
            bundle = value if equals else (rest[index + 1] if index + 1 < len(rest) else bundle)
    return command, bundle, log


def requested(config: dict[str, Any]) -> list[str]:
    """Returns the device names that the container requests: by its mounts if the configuration accepts such requests,
    else by its variable. Returns None if the variable is unset, empty, ``void`` or ``none``.
    """
    mounted = by_mounts(config)
    if mounted:
        return mounted
    value = ""
    for variable in config.get("process", {}).get("env", []):
        name, _equals, text = variable.partition("=")
        if name == "NVIDIA_VISIBLE_DEVICES":
            value = text
    names = [name.strip() for name in value.split(",") if name.strip()]
    if not names or names[0] in ("void", "none"):
        return []
    if setting("accept-nvidia-visible-devices-envvar-when-unprivileged", "true") == "false" and not privileged(config):
        return []
    prefix = KIND + "="
    return [name[len(prefix) :] if name.startswith(prefix) else name for name in names]


def by_mounts(config: dict[str, Any]) -> list[str]:
    """Returns the devices named by mounts of /dev/null, if the configuration accepts such mounts."""
    if setting("accept-nvidia-visible-devices-as-volume-mounts", "false") != "true":
        return []
    found = []
    for mount in config.get("mounts", []):
        path = os.path.normpath(mount.get("destination", ""))
        if mount.get("source") == "/dev/null" and path.startswith(VOLUMES + "/"):
            found.append(path[len(VOLUMES) + 1 :])
    return [name for name in found if name != "all"] or found


def privileged(config: dict[str, Any]) -> bool:
    return "CAP_SYS_ADMIN" in config.get("process", {}).get("capabilities", {}).get("bounding", [])


def specifications() -> list[dict[str, Any]]:
    """Returns the CDI specifications of the kind nvidia.com/gpu. Only specifications in JSON (which is also YAML) are
    read, because nodes have no YAML parser."""
    found = []
    for folder in spec_dirs():
        for path in sorted(folder.glob("*")):
            if path.suffix not in (".json", ".yaml"):
                continue
            try:
                spec = json.loads(path.read_text())
            except (OSError, ValueError) as fault:
                print(f"nvidia-container-runtime: {path} is ignored: {fault}", file=sys.stderr)
                continue
            if isinstance(spec, dict) and spec.get("kind") == KIND:
                found.append(spec)
    return found


def edits_for(names: list[str], specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the container edits of the devices. As CDI requires, a device's edits come before the edits of its
    specification."""
    edits, specs_used = [], []
    for name in dict.fromkeys(names):
        for spec in specs:
            device = next((one for one in spec.get("devices", []) if one["name"] == name), None)
            if device is not None:
                edits.append(device.get("containerEdits", {}))
                if spec not in specs_used:
                    specs_used.append(spec)
                break
        else:
            known = ", ".join(one["name"] for spec in specs for one in spec.get("devices", [])) or "none"
            raise RuntimeFault(
                f"unresolvable CDI device {KIND}={name}: the specifications in {', '.join(map(str, spec_dirs()))} "
                f"have {known}; create the specifications again with: systemctl restart nvidia-cdi-refresh"
            )
    return edits + [spec.get("containerEdits", {}) for spec in specs_used]


def apply(config: dict[str, Any], edit: dict[str, Any]) -> None:
    """Applies one set of CDI container edits to an OCI configuration."""
    process = config.setdefault("process", {})
    # Appended even if the variable is set already: runc sets them in order, so the last value counts.
    process["env"] = [*process.get("env", []), *edit.get("env", [])]
    for node in edit.get("deviceNodes", []):
        add_device(config, node)
    for mount in edit.get("mounts", []):
        mounts = [one for one in config.get("mounts", []) if one["destination"] != mount["containerPath"]]
        mounts.append(
            {
                "destination": mount["containerPath"],
                "source": mount["hostPath"],
                "type": mount.get("type", "bind"),
                "options": mount.get("options", []),
            }
        )
        config["mounts"] = mounts
    for hook in edit.get("hooks", []):
        hooks = config.setdefault("hooks", {}).setdefault(hook["hookName"], [])
        hooks.append({key: hook[key] for key in ("path", "args", "env", "timeout") if key in hook})


def add_device(config: dict[str, Any], node: dict[str, Any]) -> None:
    path = node["path"]
    host = node.get("hostPath", path)
    try:
        status = os.stat(host)
    except OSError as fault:
        raise RuntimeFault(f"device node {host}: {fault.strerror}; is the driver loaded?") from None
    kind = "b" if stat.S_ISBLK(status.st_mode) else "c"
    major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
    linux = config.setdefault("linux", {})
    device = {"path": path, "type": kind, "major": major, "minor": minor}
    device["fileMode"] = node.get("fileMode", stat.S_IMODE(status.st_mode))
    linux["devices"] = [one for one in linux.get("devices", []) if one["path"] != path] + [device]
    rule = {"allow": True, "type": kind, "major": major, "minor": minor, "access": node.get("permissions", "rwm")}
    linux.setdefault("resources", {}).setdefault("devices", []).append(rule)


def simulation_mounts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the mounts of the simulated driver's profile and state that a container with the driver lacks."""
    destinations = {one["destination"] for one in config.get("mounts", [])}
    if not any(os.path.basename(one) == "libcuda.so.1" for one in destinations):
        return []
    profile = os.environ.get("GPUSIM_PROFILE", "/etc/gpusim/host.profile")
    state = os.environ.get("GPUSIM_STATE", "/dev/shm/gpusim.state")
    return [
        {"hostPath": path, "containerPath": path, "options": [mode, "nosuid", "nodev", "rbind", "rprivate"]}
        for path, mode in ((profile, "ro"), (state, "rw"))
        if os.path.exists(path) and path not in destinations
    ]


def inject(bundle: str) -> None:
    """Edits the bundle's config.json; leaves it unchanged if the container requests no GPU and has no driver."""
    path = Path(bundle) / "config.json"
    config = json.loads(path.read_text())
    names = requested(config)
    edits = edits_for(names, specifications()) if names else []
    for edit in edits:
        apply(config, edit)
    simulated = simulation_mounts(config)
    if not edits and not simulated:
        return
    apply(config, {"mounts": simulated})
    fresh = path.with_name("config.json.nvidia")
    fresh.write_text(json.dumps(config))
    shutil.copymode(path, fresh)
    fresh.replace(path)


def low_level_runtime() -> str:
    names = listed("runtimes", '["runc", "crun"]')
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    raise RuntimeFault(f"none of the runtimes {', '.join(names)} is in PATH; install runc")


def main(words: list[str]) -> None:
    command, bundle, log = command_of(words)
    try:
        if command in ("create", "run"):
            inject(bundle)
        runtime = low_level_runtime()
    except (RuntimeFault, OSError, ValueError, KeyError) as fault:
        message = f"nvidia-container-runtime: {fault}"
        print(message, file=sys.stderr)
        if log:  # containerd's shim shows the user the last line of this file, and not stderr.
            record = {"level": "error", "msg": message, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            with contextlib.suppress(OSError), open(log, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")
        sys.exit(1)
    os.execv(runtime, [runtime, *words])


if __name__ == "__main__":
    main(sys.argv[1:])
