# SPDX-License-Identifier: Apache-2.0
"""Plans the changes of the role nvidia_driver on a host: packages, host files, kernel modules, reboot. No I/O."""

from __future__ import annotations

import re
from typing import Any

from ..driver import choice as driver_choice
from ..driver import host_files
from ..driver import setup as driver_setup
from ..driver.choice import Choice
from ..driver.setup import STOPPED
from ..driver.support import branch_of
from ..host.digest import sha256
from .part import NOTHING, PRESENT, Part, holds, packages, recorded, undone

# Packages that fit a driver of any branch, so a change of them replaces no driver.
BESIDE = re.compile(r"(install|change) (linux-headers-|kernel-|nvidia-persistenced\b)")
# Names of the packages with the driver's user space, in all repositories.
USER_SPACE = re.compile(
    r"(nvidia-utils-\d|libnvidia-compute-\d|nvidia-driver-cuda\Z|nvidia-(tesla-\d+-)?smi\Z|nvidia-compute-G)"
)
# Packages that install nvidia-smi.
WITH_SMI = re.compile(r"nvidia-utils-\d|nvidia-driver-cuda\Z|nvidia-(tesla-\d+-)?smi\Z|nvidia-compute-utils-G")


def nvidia_driver(wanted: dict[str, Any], state: dict[str, Any], desired: dict[str, Any]) -> Part:
    if wanted["state"] != PRESENT:
        changes = undone(wanted, state)
        return Part("the driver is to be absent", changes, disturbs=bool(changes and state["nvml"]["ok"]))
    choice = driver_choice.choose(state, wanted)
    if choice.refusals:
        return NOTHING._replace(errors=choice.refusals, warnings=choice.warnings)
    changes = packages(choice.packages, "", state)
    replaced = any(map(replaces, changes)) or _takes_over(changes, choice, wanted, state)
    kernel, reboot = _kernel_side(choice, wanted, state, replaced)
    host = [
        *_host_files(choice, wanted, state),
        *_token(wanted, state),
        *(holds(choice.manager, choice.holds, wanted["record"], state) if choice.manager else []),
        *_services(choice, state),
        *kernel,
        *_cut_off(wanted, state),
    ]
    faults = _reboot_faults(reboot, wanted)
    notes = list(choice.warnings)
    if not (changes or host or faults or state["nvml"]["ok"]):
        notes.append("NVML does not answer: " + state["nvml"]["error"])
    if not reboot and wanted.get("reboot") == "always" and (changes or host):
        reboot = "nvidia_driver_reboot is always"
    notes += _of_others(changes, choice, wanted, state)
    notes += [] if changes else _without_smi(state)
    if replaced and state["nvml"]["ok"] and _other_branch(choice, state) and not _named(wanted):
        runs = state["nvml"]["driver_version"]
        notes.append(
            f"driver {runs} runs, and {choice.branch} is the newest branch for these GPUs here; no branch is set, so "
            f'this branch replaces the driver; to keep {runs}, set nvidia_driver_branch: "{branch_of(runs)}"'
        )
    if choice.refuse and choice.modules and _other_branch(choice, state) and not (changes or host):
        runs = state["driver"]["loaded_version"]
        notes.append(
            f"branch {choice.branch} is requested and installed, but driver {runs} runs; if the packages of "
            f"{choice.branch} here install another branch, set that branch, or choose another source"
        )
    if reboot and not faults:
        host.append(f"reboot, for {reboot}")
    # Replacing the files under a loaded driver breaks running CUDA programs ("version mismatch").
    disturbs = bool(reboot and not faults) or (state["nvml"]["ok"] and replaced)
    reason = "the driver is installed but not active as desired"
    if changes:
        reason = "driver packages are missing or of another version"
    return Part(reason, changes + host, disturbs, notes, faults)


def _without_smi(state: dict[str, Any]) -> list[str]:
    """Returns a warning if nvidia-smi is missing although its package is installed. A comparison of packages does not
    find this, because the package database does not show that a file was deleted.
    """
    there = sorted(name for name, version in state["packages"].items() if version and WITH_SMI.match(name))
    if not there or state["driver"].get("smi", True):
        return []
    name = there[0]
    again = f"apt-get install --reinstall {name}, dnf reinstall {name} or zypper install --force {name}"
    return [f"nvidia-smi is missing, though its package {name} is installed; install it again: {again}"]


def replaces(change: str) -> bool:
    """Returns whether a change replaces the version of one of the driver's own packages. ``change``: a line of the plan
    about a package or a file.
    """
    foreign = change.startswith(("change /", "change the mode ")) or BESIDE.match(change) is not None
    return change.startswith("change ") and not foreign


def _other_branch(choice: Choice, state: dict[str, Any]) -> bool:
    """Returns whether a driver of another branch runs. The role replaces its packages, which may have other names."""
    runs = state["driver"].get("loaded_version") or state["nvml"].get("driver_version") or ""
    branch = branch_of(runs)
    return choice.branch is not None and branch is not None and branch != choice.branch


def _named(wanted: dict[str, Any]) -> bool:
    """Returns whether the user chose the branch by a variable."""
    return any(wanted.get(name) for name in ("branch", "version", "packages"))


def _takes_over(changes: list[str], choice: Choice, wanted: dict[str, Any], state: dict[str, Any]) -> bool:
    """Returns whether an installation replaces a running driver of another branch, under other package names."""
    if wanted.get("packages") and not wanted.get("branch"):
        # If the user named the packages, their branch is unknown. In this case only changed versions count; see
        # ``replaces``.
        return False
    return _other_branch(choice, state) and any(not BESIDE.match(text) for text in changes)


def _of_others(changes: list[str], choice: Choice, wanted: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """Returns a warning if the running driver comes from packages with other names than the chosen ones."""
    ours = {text.partition("=")[0] for text in choice.packages}
    if not state["nvml"]["ok"] or not changes or state["files"].get(wanted.get("record") or ""):
        return []
    if wanted.get("packages"):
        # Give no warning if the user named the packages, because these may have installed the others as dependencies.
        return []
    there = sorted(name for name, version in state["packages"].items() if version and USER_SPACE.match(name))
    others = [name for name in there if name not in ours]
    if not others or any(name in ours for name in there):
        return []
    return [
        f"driver {state['nvml']['driver_version']} runs and was installed by {', '.join(others)}; to keep it, set "
        "nvidia_driver_source: present; to replace it, remove those packages first"
    ]


def _host_files(choice: Choice, wanted: dict[str, Any], state: dict[str, Any]) -> list[str]:
    former = recorded(wanted["setup_record"], state).get("files") or {}
    reverted = driver_setup.no_longer_desired(former, choice.files, choice.initramfs)
    changes = []
    for path, text in {**reverted, **choice.files}.items():
        found = state["files"].get(path)
        if text is not None and found is None:
            changes.append(f"write {path}")
        elif found is not None and (text is None or found["sha256"] != sha256(text)):
            changes.append(f"{'remove' if text is None else 'change'} {path}")
        elif path in reverted:
            changes.append(f"rebuild the initramfs, which may still have {path} of the role")
    # Do not list the initramfs if a file of modprobe.d changes, because that change rebuilds it anyway.
    if state["driver"].get("initramfs_old") and not any(driver_setup.MODPROBE in text for text in changes):
        changes.append("rebuild the initramfs, which is older than the file that blocks nouveau")
    return changes


def _token(wanted: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """Compares the licence token of a vGPU guest with the desired token. Only their digests are compared."""
    if not (wanted.get("vgpu_guest") and wanted.get("vgpu_token_sha256")):
        return []
    found = state["files"].get(host_files.TOKEN_FILE)
    if found is None:
        return [f"write {host_files.TOKEN_FILE}"]
    if found["sha256"] != wanted["vgpu_token_sha256"]:
        return [f"change {host_files.TOKEN_FILE}"]
    if found["mode"] != host_files.TOKEN_MODE:
        return [f"change the mode of {host_files.TOKEN_FILE} from {found['mode']} to {host_files.TOKEN_MODE}"]
    return []


def _services(choice: Choice, state: dict[str, Any]) -> list[str]:
    """Returns changes for units that do not run, are not enabled, or have not read a changed file. Ignores units that
    are not installed yet.
    """
    changes = []
    for name in choice.services:
        unit = state["units"].get(name) or {}
        if unit.get("present") and not (unit.get("active") and unit.get("enabled")):
            changes.append(f"enable and start {name}")
        elif unit.get("present"):
            newer = driver_setup.newer(choice.rereads.get(name, []), state["files"], unit.get("started"))
            changes += [f"restart {name}, which has not read {path}" for path in newer[:1]]
    return changes


def _cut_off(wanted: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """Returns changes that start services again. A killed run had stopped them for a reload of the kernel modules."""
    stopped = recorded(wanted["setup_record"], state).get(STOPPED) or []
    return [f"start {name}, which an interrupted run had stopped" for name in stopped]


def _kernel_side(
    choice: Choice, wanted: dict[str, Any], state: dict[str, Any], replaced: bool
) -> tuple[list[str], str]:
    """Returns two values: the changes of the kernel modules, and the reason why these need a reboot (empty if they need
    none).
    """
    driver = state["driver"]
    if choice.kernel_module == "none" or wanted.get("source") == "present":
        return [], ""
    if state["nvml"]["ok"]:
        users = ", ".join(driver.get("in_use") or [])
        if not replaced or driver["loaded_version"] is None:
            return [], ""
        busy = f"driver {driver['loaded_version']} is loaded and in use by {users}" if users else ""
        return ([] if busy else ["reload the kernel modules"]), busy
    if choice.reboot:
        return [], choice.reboot
    loaded, on_disk = driver["loaded_version"], driver.get("disk_version")
    if loaded is not None:
        reload = replaced or (on_disk is not None and on_disk != loaded)
        return (["reload the kernel modules"] if reload else []), ""
    if not state["pci_gpus"]:
        return [], ""
    return ["load the kernel modules"], ""


def _reboot_faults(reboot: str, wanted: dict[str, Any]) -> list[str]:
    """Returns an error if a reboot is needed but not allowed. The error stops the host before its first change."""
    if not reboot or wanted.get("reboot", "never") != "never":
        return []
    way_out = "set it to if_required on a host that may be rebooted"
    if "nouveau" in reboot:
        way_out += ", or write 'blacklist nouveau' to /etc/modprobe.d, rebuild the initramfs and reboot it yourself"
    return [f"{reboot}; this needs a reboot, and nvidia_driver_reboot is never; {way_out}"]
