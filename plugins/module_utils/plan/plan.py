# SPDX-License-Identifier: Apache-2.0
"""Makes the plan: the ordered steps from a host's state to its desired state, each with its reason. The functions do no
I/O.

A step is derived only from the host's state, never from what an earlier run remembers. So after a play was killed at
any point, the next plan finds the remaining steps. For example, a unit that started before its file changed gets a step
that restarts it.
"""

from __future__ import annotations

from typing import Any, Sequence

from ..config import named_configs, sharing, slices
from ..config.kinds import Finding, error, errors, warning
from ..engines import engine_packages
from ..gpu import lost as lost_gpus
from ..host import distribution
from ..host.digest import fingerprint, sha256
from ..kube import version as kube_version
from ..state import conflicting_on_host
from . import claims, enforcement, host_memory, plugin_python
from .desired import ROLES, records
from .driver import nvidia_driver, replaces
from .engine import container_runtime
from .modes import gpus_after_mig, mig, mps_part, time_slicing
from .part import NOTHING, PRESENT, Part, undone
from .toolkit import nvidia_docker

# Value of device_plugin_deploy that runs the device plugin as a DaemonSet instead of a systemd service.
DAEMONSET = "daemonset"
# SELinux gives a warning and no error, because docker and containerd start containers unconfined by default.
CONFINED = (
    "SELinux is enforcing; slices are untested with it. The files of a slice have the label of containers. A container "
    "that SELinux confines may need `setsebool -P container_use_devices on` for its GPU; check `ausearch -m avc` after "
    "the first pod (docs/unverified.md)"
)
# Roles that interrupt running work on the GPUs.
OF_THE_CARD = ("nvidia_driver", "mig", "mps")
# Names of the two steps that are no roles: the check of isolation, and the removal of old library versions after it.
VERIFY, COLLECT = "verify", "collect"


def make_plan(desired: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Returns ``{steps, roles, warnings, errors, disturbs, outside, memory_enforcement, allocation}``. ``roles``: the
    names of the steps. ``disturbs``: whether a step disturbs running work. ``outside``: holders of slices (GPU shares)
    that no drain moves. ``memory_enforcement``: a line on what enforces memory, empty if no device plugin is to run.
    ``allocation``: a line on claims, empty if the device plugin allocates GPUs.
    """
    steps: list[dict[str, Any]] = []
    warnings: list[str] = []
    faults = refusals(desired, state)
    if state["os"].get("selinux") == "enforcing" and "device_plugin" in desired["roles"]:
        warnings.append(CONFINED)
    warnings += [
        f"GPU {lost_gpus.name(one)} is lost: {one['reason']}; {lost_gpus.remedy(one)}; this run does not change that"
        for one in _lost(state)
    ]
    for role in ROLES:
        wanted = desired["roles"].get(role)
        if wanted is None:
            continue
        part = PARTS[role](wanted, state, desired)
        # A role's records are the files from which it restores former settings. An unreadable record is an error if the
        # role changes something, because the role would fail in the middle of the run when it reads the record.
        (faults if part.changes else warnings).extend(f"{role}: {text}" for text in _spoiled(wanted, state))
        warnings += [f"{role}: {text}" for text in part.warnings]
        faults += [f"{role}: {text}" for text in part.errors]
        if part.changes:
            steps.append(
                {"role": role, "reason": part.reason, "changes": list(part.changes), "disturbs": part.disturbs}
            )
    outside = named_configs.outside(state)
    if outside:
        ends = f"this step ends containers that no drain moves: {', '.join(outside)}; stop them first"
        warnings += [f"{step['role']}: {ends}" for step in steps if step["disturbs"] and step["role"] in OF_THE_CARD]
    steps += _after_driver(desired, state, steps)
    faults += _without_driver(desired, state, [step["role"] for step in steps])
    memory = enforcement.verdict(desired, state)
    faults += enforcement.faults(desired, memory)
    reason = why_prove(desired, state, bool(steps))
    if reason:
        steps.append({"role": VERIFY, "reason": reason, "changes": [], "disturbs": False})
    steps += _collect(desired, state)
    return {
        "steps": steps,
        "roles": [step["role"] for step in steps],
        "warnings": warnings,
        "errors": faults,
        "disturbs": any(step["disturbs"] for step in steps),
        "outside": outside,
        "memory_enforcement": memory.line() if memory is not None else "",
        "allocation": claims.line(desired) if memory is not None else "",
    }


def _spoiled(wanted: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """Returns the unreadable records of a role."""
    found = state.get("records") or {}
    return [found[path] for path in records(wanted) if found.get(path)]


def _lost(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the GPUs that the host has lost. Returns none if the driver does not answer, which is another fault."""
    if not state["nvml"]["ok"]:
        return []
    return lost_gpus.find(state["gpus"], state["nvml"]["lost"], state["plugin"]["status"])


def refusals(desired: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """Returns the reasons why no role can run on this host."""
    found: list[str] = []
    host = state["os"]
    if not desired["roles"]:
        return found
    if host["root"] != "true":
        found.append("the connection to the host has no root rights, and every role needs them; set become: true")
    if not engine_packages.family_of(host):
        name = host["name"] or host["id"] or "an unknown distribution"
        found.append(f"{name} is not supported; supported systems: {distribution.SUPPORTED}")
    return found


def _after_driver(
    desired: dict[str, Any], state: dict[str, Any], steps: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the step that restarts a running device plugin after a change of the driver, because the plugin keeps the
    driver's library that it loaded at its start.
    """
    wanted = desired["roles"].get("device_plugin") or {}
    changes = {step["role"]: step["changes"] for step in steps}
    driver = changes.get("nvidia_driver", [])
    # If the change of the driver disturbs running work, a new package also counts as a replacement, because the
    # packages of another branch may have other names.
    replaced = any(map(replaces, driver))
    disturbed = any(step["role"] == "nvidia_driver" and step["disturbs"] for step in steps)
    replaced = replaced or (disturbed and any(change.startswith("install ") for change in driver))
    running = wanted.get("state") == PRESENT and (state["units"].get(wanted["unit"]) or {}).get("active")
    if not (replaced and running) or "device_plugin" in changes:
        return []
    todo = ["restart {}".format(wanted["unit"])]
    return [
        {
            "role": "device_plugin",
            "reason": "the driver changes while the plugin runs",
            "changes": todo,
            "disturbs": False,
        }
    ]


def _without_driver(desired: dict[str, Any], state: dict[str, Any], roles: Sequence[str]) -> list[str]:
    """Returns an error if the plan would restart the device plugin although NVML does not answer and no step repairs
    it. The plugin would not start again.
    """
    wanted = desired["roles"].get("device_plugin") or {}
    waits = not desired["node_config"]["flags"]["failOnInitError"]
    mended = "nvidia_driver" in roles or state["nvml"]["ok"]
    if wanted.get("state") != PRESENT or "device_plugin" not in roles or mended or waits:
        return []
    fault = state["nvml"]["error"]
    way_out = "check nvidia-smi and dmesg, repair the driver, then run again"
    return [
        f"device_plugin: the plugin could not start, because NVML does not answer ({fault}) and no step repairs it; "
        f"{way_out}"
    ]


def why_prove(desired: dict[str, Any], state: dict[str, Any], changes: bool) -> str:
    """Returns why isolation is checked at the end of the run, empty if it is not checked. Even a host in the desired
    state may need the check, because an earlier run may have failed or been killed before its check.
    """
    plugin = desired["roles"].get("device_plugin") or {}
    if desired["verify"] == "never" or desired["sharing"] != "vcuda" or plugin.get("state") != PRESENT:
        return ""
    if desired["verify"] == "always":
        return "vgpu_verify is always"
    if changes:
        return "the plan changes the host"
    runs = fingerprint(state["plugin"]["status"], state["gpus"], state["nvml"]["driver_version"])
    return "isolation is not proven for the running versions" if runs != state["proof"] else ""


def _collect(desired: dict[str, Any], state: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the last step: after the isolation check of the new library version it removes the versions that no
    process uses.
    """
    wanted, found = desired["roles"].get("vcuda"), state["vcuda"]
    if not wanted or wanted["state"] != PRESENT:
        return []
    root, version = wanted["root"], wanted["version"]
    changes = [f"remove {root}/{one}" for one in found["unused"] if one != version]
    if found["current"] not in (None, version):
        changes.append("remove {}/{} unless a container uses it".format(root, found["current"]))
    step = {"role": COLLECT, "reason": "older versions of the library are left", "changes": changes, "disturbs": False}
    return [step] if changes else []


def check_gpus(desired: dict[str, Any], state: dict[str, Any]) -> list[Finding]:
    """Returns the findings of the desired state for the host's GPUs. Without a driver only their number on the bus is
    known.
    """
    config, gpus = desired["node_config"], state["gpus"]
    if state["nvml"]["ok"]:
        if not gpus:
            return [warning("sharing", "NVML answers and lists no GPU; the host has nothing to share")]
        after = gpus_after_mig(desired, state)
        found = sharing.pieces_for(after, config)[1] + host_memory.findings(after, config, state.get("memory_mib") or 0)
        for name, other in sorted((desired.get("node_configs") or {}).items()):
            found += [
                fault._replace(path=f"vgpu_configs.{name}", message=str(fault))
                for fault in errors(sharing.pieces_for(after, other)[1])
            ]
        return found
    findings = []
    on_bus = len(state["pci_gpus"])
    for n, exception in enumerate((slices.vcuda_of(config) or {}).get("devices") or []):
        where = f"sharing.vcuda.devices[{n}].match"
        index = exception["match"].get("index")
        later = [key for key in ("uuid", "model") if key in exception["match"]]
        if index is not None and on_bus and index >= on_bus:
            findings.append(error(where, f"no GPU with index {index}; the host has {on_bus} on its PCI bus"))
        elif later:
            findings.append(warning(where, f"{' and '.join(later)} can be checked only when the driver answers"))
    return findings


def vcuda(wanted: dict[str, Any], state: dict[str, Any], desired: dict[str, Any]) -> Part:
    found, version, root = state["vcuda"], wanted["version"], wanted["root"]
    unit = state["units"].get(wanted["arbiter_unit"]) or {}
    if wanted["state"] != PRESENT:
        changes = [f"remove {root}/{one}" for one in found["versions"]]
        if unit.get("present"):
            changes.append("remove {}".format(wanted["arbiter_unit"]))
        held = len(named_configs.held(state)) if changes else 0
        notes = [f"containers that mount the library and cannot be started again: {held}"] if held else []
        return Part("the library is to be absent", changes, bool(held), notes)
    changes = []
    reason = "the library is not current"
    if version not in found["versions"]:
        changes.append(f"deploy {root}/{version}")
    elif version not in found["whole"]:
        changes.append(f"deploy {root}/{version} again, because its files differ from its manifest")
        reason = "the library is damaged"
    elif version in found["closed"]:
        changes.append(f"let every user read {root}/{version}")
        reason = "users of containers cannot read the library's folder"
    if found["current"] != version:
        changes.append("switch current from {} to {}".format(found["current"] or "nothing", version))
    text, path = wanted["arbiter_unit_text"], wanted["arbiter_unit_path"]
    on_disk = state["files"].get(path)
    if not text:
        return Part(reason, changes)
    if on_disk is None or on_disk["sha256"] != sha256(text):
        changes.append("{} {}".format("write" if on_disk is None else "change", path))
        reason = "the unit of the arbiter differs" if len(changes) == 1 else reason
    return Part(reason, changes) if changes else _arbiter_running(wanted, unit, on_disk, found["real_root"])


def _arbiter_running(wanted: dict[str, Any], unit: dict[str, Any], on_disk: Any, real_root: str) -> Part:
    """Checks whether the running arbiter (the service that divides a GPU's time between containers) was started from
    the files on disk. A restart is harmless: until the arbiter is back, each container keeps its own compute share.
    """
    name = wanted["arbiter_unit"]
    program = "{}/{}/vgpu-arbiter".format(real_root, wanted["version"])
    behind = _service_behind(name, unit, on_disk)
    if behind:
        return behind
    if unit.get("exe") != program:
        return Part("the running arbiter is {}".format(unit.get("exe") or "not known"), [f"restart {name}"])
    return NOTHING


def _service_behind(name: str, unit: dict[str, Any], on_disk: Any) -> Part | None:
    """Returns the reason and the change if a service does not run as its unit file says; None if it does."""
    if unit.get("stale"):
        return Part("systemd has not read the unit file", [f"reload systemd and restart {name}"])
    if not unit.get("enabled"):
        return Part(f"{name} is not enabled", [f"enable {name}"])
    if not unit.get("active"):
        return Part(f"{name} is not running", [f"start {name}"])
    if unit.get("started") and on_disk and on_disk["mtime"] > unit["started"]:
        return Part("the unit file is newer than the running program", [f"restart {name}"])
    return None


def device_plugin(wanted: dict[str, Any], state: dict[str, Any], desired: dict[str, Any]) -> Part:
    found, unit = state["plugin"], state["units"].get(wanted["unit"]) or {}
    root, unit_name = wanted["root"], wanted["unit"]
    if wanted["state"] != PRESENT:
        changes = [f"remove {root}/{one}" for one in found["versions"]]
        if unit.get("present"):
            changes.append(f"remove {unit_name}")
        if state["files"].get(wanted["daemonset_path"]):
            changes.append("remove this node from the DaemonSet")
        changes += undone(wanted, state)
        held = len(named_configs.held(state)) if changes else 0
        notes = [f"containers that use slices, and whose allocations end: {held}"] if held else []
        faults = claims.faults_of_absence(state) if changes else []
        return Part("the device plugin is to be absent", changes, bool(held), notes, faults)
    resources = named_configs.resources(desired)
    conflicts, others = conflicting_on_host.findings(found.get("conflicting_plugins") or [], resources)
    if wanted["conflicting_plugins"] == "ignore" or wanted["conflicting_plugins_remove"]:
        # Conflicting device plugins are no error here. The role removes those that the user named, through the
        # cluster's API, and fails if others remain.
        conflicts, others = [], [*conflicts, *others]
    kubelet = kube_version.refusal(state.get("kubelet"), "the kubelet of this host")
    by_pod = wanted["deploy"] == DAEMONSET
    faults = [*named_configs.faults(desired, "in-cluster" if by_pod else wanted["kubeconfig"]), *conflicts]
    faults += [kubelet] if kubelet else []
    faults += claims.faults(desired, wanted, state)
    if wanted["version"] not in found["versions"]:
        old = plugin_python.refusal(state["os"], _python(wanted, state))
        faults += [old] if old else []
    if not by_pod and state["files"].get(wanted["daemonset_path"]):
        faults.append(
            "this node runs the device plugin as a DaemonSet, and device_plugin_deploy is systemd; remove the node "
            "from the DaemonSet first: device_plugin_state: absent with device_plugin_deploy: daemonset"
        )
    if faults:
        return NOTHING._replace(errors=faults)
    part = _device_plugin(wanted, state, desired)
    return part._replace(warnings=[*part.warnings, *claims.warnings(desired, state), *others])


def _device_plugin(wanted: dict[str, Any], state: dict[str, Any], desired: dict[str, Any]) -> Part:
    found, unit = state["plugin"], state["units"].get(wanted["unit"]) or {}
    version, root = wanted["version"], wanted["root"]
    changes = []
    if version not in found["versions"]:
        missing = plugin_python.missing(_python(wanted, state), state["packages"])
        changes += [*(f"install {name}" for name in missing), f"install {root}/{version}"]
    if found["current"] != version:
        changes.append("switch the device plugin from {} to {}".format(found["current"] or "nothing", version))
    changes += named_configs.changes(wanted["config_path"], desired, state)
    kind = "daemonset" if wanted["deploy"] == DAEMONSET else "unit"
    path, text = wanted[kind + "_path"], wanted[kind + "_text"]
    on_disk = state["files"].get(path)
    if on_disk is None:
        changes.append(f"write {path}")
    elif text and on_disk["sha256"] != sha256(text):
        changes.append(f"change {path}")
    if kind == "daemonset" and unit.get("present"):
        changes.append(f"replace {wanted['unit']} by the DaemonSet")
    if changes:
        held = named_configs.reshaped(wanted["config_path"], desired, state)
        notes = [f"containers that keep slices of their former size until they end: {held}"] if held else []
        return Part("the device plugin or its configuration differs", changes, warnings=notes)
    return _plugin_running(wanted, unit, state, on_disk)


def _python(wanted: dict[str, Any], state: dict[str, Any]) -> plugin_python.Choice:
    return plugin_python.choose(state["os"], wanted["python"], wanted["packages"])


def _plugin_running(wanted: dict[str, Any], unit: dict[str, Any], state: dict[str, Any], on_disk: Any) -> Part:
    """Checks whether the running device plugin was started with the files on disk. Called only if all files are in the
    desired state.
    """
    name, status = wanted["unit"], state["plugin"]["status"]
    if wanted["deploy"] == DAEMONSET:
        name = "the pod of the DaemonSet"
    else:
        behind = _service_behind(name, unit, on_disk)
        if behind:
            return behind
        if unit.get("old_driver"):
            return Part("the running program holds a driver that was replaced", [f"restart {name}"])
    if status is None:
        return Part("the device plugin does not answer vgpuctl", [f"restart {name}"])
    if status.get("version") not in (None, wanted["version"]):
        return Part(f"the running program is version {status['version']}", [f"restart {name}"])
    if named_configs.is_behind(wanted["config_path"], state):
        return Part("the running program has an older configuration", [f"restart {name}"])
    return NOTHING


def describe(plan: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """Returns the plan as lines that a person reads before the plan is carried out."""
    here, lost = len(state["gpus"]), len(_lost(state))
    count = f"{here} of {here + lost}" if lost else str(here)
    lines = [f"{count} GPUs: {_models(state['gpus'])}"]
    lines += [plan[key] for key in ("allocation", "memory_enforcement") if plan.get(key)]
    if not plan["steps"]:
        lines.append("nothing to do")
    for number, step in enumerate(plan["steps"], 1):
        mark = "  [disturbs running work]" if step["disturbs"] else ""
        lines.append(f"{number}. {step['role']}: {step['reason']}{mark}")
        lines += [f"     - {change}" for change in step["changes"]]
    lines += [f"warning: {text}" for text in plan["warnings"]]
    lines += [f"error: {text}" for text in plan["errors"]]
    return lines


def _models(gpus: Sequence[dict[str, Any]]) -> str:
    counts: dict[str, int] = {}
    for gpu in gpus:
        name = "{} {} MiB".format(gpu["model"], gpu["memory_mib"])
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{number} x {name}" for name, number in counts.items()) or "none that NVML lists"


PARTS = {
    "nvidia_driver": nvidia_driver,
    "nvidia_docker": nvidia_docker,
    "container_runtime": container_runtime,
    "vcuda": vcuda,
    "mig": mig,
    "mps": mps_part,
    "time_slicing": time_slicing,
    "device_plugin": device_plugin,
}
