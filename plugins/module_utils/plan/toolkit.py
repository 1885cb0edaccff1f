# SPDX-License-Identifier: Apache-2.0
"""Plans the changes of the role nvidia_docker on a host. The role installs NVIDIA's container toolkit, which passes
GPUs to containers. Also warns if the toolkit's options let containers get GPUs past the device plugin. No I/O.
"""

from __future__ import annotations

from typing import Any

from ..config.kinds import Finding, warning
from ..engines import engine_auto, engine_packages
from ..packages.pins import name_of
from ..text import toml_text
from .part import NOTHING, PRESENT, Part, holds, packages, undone

# Keys of the toolkit's config.toml, with their defaults. BY_ENVIRONMENT: whether a container without privileges may
# request GPUs by the variable NVIDIA_VISIBLE_DEVICES. BY_MOUNTS: whether it may request them by its mounts.
BY_ENVIRONMENT = "accept-nvidia-visible-devices-envvar-when-unprivileged"
BY_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"
UNSET = {BY_ENVIRONMENT: "true", BY_MOUNTS: "false"}
VARIABLE = "nvidia_docker_config"
LEAK = "a container that runs with NVIDIA's runtime and sets NVIDIA_VISIBLE_DEVICES gets every GPU, without a limit"


def nvidia_docker(wanted: dict[str, Any], state: dict[str, Any], desired: dict[str, Any]) -> Part:
    if wanted["state"] != PRESENT:
        return Part("the NVIDIA runtime is to be absent", undone(wanted, state))
    changes = packages(wanted["packages"], "", state)
    if changes and wanted["package"] == "auto" and _on_docker(state, desired):
        changes.append("install nvidia-docker2 if a repository has it")
    reason = "packages are missing or of another version"
    path = wanted["config_path"]
    try:
        merged = _merged(wanted, state)[1]
    except toml_text.TomlError as fault:
        return NOTHING._replace(errors=[f"{path}: {fault}"])
    held = _holds(wanted, state)
    if held and not changes:
        reason = "packages are not held as desired"
    if merged and not changes:
        reason = f"{path} differs"
    return Part(reason, [*changes, *held, *(f"{path}: {change}" for change in merged)])


def _holds(wanted: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """Returns the changes of holds. ``nvidia-docker2`` counts also as an optional package, which the role may have
    installed.
    """
    optional = ["nvidia-docker2"] if wanted["package"] == "auto" else []
    names = [*map(name_of, wanted["packages"]), *optional] if wanted["hold"] else []
    return holds(engine_packages.manager_of(state["os"]), names, wanted["record"], state)


def _on_docker(state: dict[str, Any], desired: dict[str, Any]) -> bool:
    """Returns whether docker runs the host's containers. Only a play with the role container_runtime knows this."""
    engine = desired["roles"].get("container_runtime")
    return engine is not None and engine_auto.resolve(engine, state).name == "docker"


def _merged(wanted: dict[str, Any], state: dict[str, Any]) -> tuple[str, list[str]]:
    """Returns the toolkit's file as the role leaves it, and the changes."""
    return toml_text.merge((state.get("texts") or {}).get(wanted["config_path"]), wanted["config"])


def check(desired: dict[str, Any], state: dict[str, Any]) -> list[Finding]:
    """Returns warnings for the toolkit's options on a host whose cards are shared in slices (equal shares).

    Returns no errors, because a host may have containers that are meant to get whole cards by an environment variable.
    """
    wanted = desired["roles"].get("nvidia_docker") or {}
    if desired["sharing"] != "vcuda" or wanted.get("state") != PRESENT:
        return []
    try:
        text = _merged(wanted, state)[0]
        found = {key: toml_text.get(text, key) for key in UNSET}
    except toml_text.TomlError:
        return []  # Give no warning for an unreadable file, because the plan reports it as an error.
    in_force = {key: value or UNSET[key] for key, value in found.items()}
    path = wanted["config_path"]
    shown = {key: f"{value or f'unset, which means {UNSET[key]},'} in {path}" for key, value in found.items()}
    strategy = desired["node_config"]["flags"]["plugin"]["deviceListStrategy"]
    by_environment = strategy == "envvar"
    hidden = in_force[BY_ENVIRONMENT] == "false"
    findings = []
    if not hidden and by_environment:
        way_out = "vgpu_handover: envvar needs this value; set vgpu_handover to auto and the key to false"
        message = f"{BY_ENVIRONMENT} is {shown[BY_ENVIRONMENT]}: {LEAK}; {way_out}"
        findings.append(warning("vgpu_handover", message))
    elif not hidden:
        message = f"expected false, found {shown[BY_ENVIRONMENT]}: {LEAK}; set it to false"
        findings.append(warning(f"{VARIABLE}.{BY_ENVIRONMENT}", message))
    elif by_environment:
        message = f"expected true, found {shown[BY_ENVIRONMENT]}: pods start without their GPU"
        way_out = "vgpu_handover: envvar needs the value true; set vgpu_handover to auto, or the key to true"
        findings.append(warning(f"{VARIABLE}.{BY_ENVIRONMENT}", f"{message}; {way_out}"))
    # With ``auto`` the device plugin hands GPUs over by environment variables if neither CDI nor mounts are declared.
    left = strategy == "auto" and hidden
    if in_force[BY_MOUNTS] != "true" and (left or strategy == "volume-mounts"):
        unless = "unless kubelet and engine pass devices by CDI, " if left else ""
        message = f"expected true, found {shown[BY_MOUNTS]}: {unless}pods start without their GPU; set it to true"
        findings.append(warning(f"{VARIABLE}.{BY_MOUNTS}", message))
    return findings
