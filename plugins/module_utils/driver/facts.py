# SPDX-License-Identifier: Apache-2.0
"""Reads the driver's state on a host: loaded modules, modules on disk, conflicting installations, trusted keys."""

from __future__ import annotations

import os
import re
from typing import Any, Sequence

from ..host.host import NVIDIA_VENDOR, Host
from . import support as driver_support

SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
# Paths of the keys with which tools sign the modules that they build: dkms, and Ubuntu's tool.
SIGNING_KEYS = ("/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub")
DRIVER_CONTAINER = "/run/nvidia/driver"
RUNFILE = "/usr/bin/nvidia-uninstall"
# Paths at which packages and runfiles install the program nvidia-smi.
SMI = ("/usr/bin/nvidia-smi", "/usr/local/bin/nvidia-smi", "/opt/bin/nvidia-smi")
# The file that blocks nouveau; the initramfs must have a copy.
NOUVEAU_FILE = "/etc/modprobe.d/vgpu-nouveau.conf"
CONTROLLERS = ("dmem", "misc")
# The driver's modules in the order in which they must be unloaded: each before the modules that it uses.
MODULES = ("nvidia_drm", "nvidia_modeset", "nvidia_peermem", "nvidia_fs", "gdrdrv", "nvidia_uvm", "nvidia")
# Services that use the driver in addition to users' programs. A reload of the modules stops these services and starts
# them again, so they are no reason for a reboot. The first of them, a systemd path unit, loads a new module as soon as
# the module appears on disk. Such a load would race with the unloading.
HOLDERS = (
    "nvidia-cdi-refresh.path",
    "nvidia-cdi-refresh.service",
    "nvidia-persistenced.service",
    "nvidia-fabricmanager.service",
    "nvidia-imex.service",
    "nvidia-gridd.service",
    "nvidia-topologyd.service",
    "nvidia-dcgm.service",
    "vgpu-mps.service",
    "vgpu-device-plugin.service",
)


def read(host: Host) -> dict[str, Any]:
    """Returns the driver's state, which host_state returns under the key ``driver``."""
    found = host.driver()
    text = host.text("/proc/driver/nvidia/version") or ""
    modules = loaded_modules(host)
    secure = secure_boot(host)
    controllers = host.text("/sys/fs/cgroup/cgroup.controllers")
    return {
        **found,
        "open_module": "Open Kernel Module" in text if found["loaded_version"] else None,
        "disk_version": disk_version(host) if found["loaded_version"] or host.pci_gpus() else None,
        "modules": [name for name in MODULES if name in modules],
        "in_use": users(host, modules, HOLDERS),
        "secure_boot": secure,
        "signing_key": signing_key(host) if secure else None,
        "container": bool(host.names(DRIVER_CONTAINER)),
        "runfile": host.file(RUNFILE) is not None,
        "smi": any(os.path.exists(host.path(one)) for one in SMI),
        "initramfs_old": initramfs_old(host, NOUVEAU_FILE),
        "nvlink5": nvlink5(host),
        "signed_modules": signed_modules(host),
        # Facts that show whether the driver can limit memory. cgroup2: only version 2 of control groups is mounted.
        # controllers: which of dmem and misc the kernel has and does not disable, None if unknown. registry holds the
        # driver's setting RmMemacctMode.
        "cgroup2": controllers is not None,
        "controllers": None if controllers is None else [one for one in CONTROLLERS if one in controllers.split()],
        "registry": registry(host),
        # The link ``build`` belongs to the kernel's package, so it exists even without the headers. Its target belongs
        # to the package of the headers, so only files in that folder prove that the headers are installed.
        "headers": bool(host.names(f"/lib/modules/{host.os_release()['kernel']}/build")),
    }


def registry(host: Host) -> str:
    """Returns NVreg_RegistryDwords of the loaded driver, empty if it has none."""
    found = re.search(r"^RegistryDwords:\s*(.*)$", host.text("/proc/driver/nvidia/params") or "", re.MULTILINE)
    return found.group(1).strip().strip('"') if found else ""


def loaded_modules(host: Host) -> dict[str, tuple[int, list[str]]]:
    """Returns reference count and direct users of each loaded NVIDIA module."""
    found = {}
    for line in (host.text("/proc/modules") or "").splitlines():
        fields = line.split()
        if len(fields) >= 3 and fields[0] in MODULES and fields[2].isdigit():
            by = fields[3].rstrip(",").split(",") if len(fields) > 3 and fields[3] != "-" else []
            found[fields[0]] = (int(fields[2]), [name for name in by if name])
    return found


def busy(modules: dict[str, tuple[int, list[str]]]) -> bool:
    """Returns whether a process uses one of the modules. Such a module has more references than modules that use it."""
    return any(count > len(by) for count, by in modules.values())


def users(host: Host, modules: dict[str, tuple[int, list[str]]], besides: Sequence[str] = ()) -> list[str]:
    """Returns the processes that use the driver, as ``name (pid)``. If the modules are in use but no process is found,
    returns one entry that says so. ``besides``: names of units whose processes do not count.
    """
    if not busy(modules):
        return []
    found, holders = [], 0
    for pid in host.names("/proc"):
        if not pid.isdigit():
            continue
        links = (host.link(f"/proc/{pid}/fd/{number}") or "" for number in host.names(f"/proc/{pid}/fd"))
        if not any(link.startswith("/dev/nvidia") for link in links):
            continue
        if {*re.split("[/\n]", host.text(f"/proc/{pid}/cgroup") or "")} & {*besides}:
            holders += 1
        else:
            found.append(f"{(host.text(f'/proc/{pid}/comm') or '?').strip()} ({pid})")
    return found if found or holders else ["an unknown user in the kernel"]


def disk_version(host: Host) -> str | None:
    """Returns the version of the module that modprobe would load; Debian's alternatives call it nvidia-current."""
    for name in ("nvidia", "nvidia-current"):
        answer = host.run(["modinfo", "-F", "version", name])
        version = answer.out.strip()
        if answer.rc == 0 and re.match(r"^\d+\.\d+", version):
            return version
    return None


def initramfs_old(host: Host, path: str) -> bool:
    """Returns whether the running kernel's initramfs is older than a file that it must contain."""
    kernel = host.os_release()["kernel"]
    names = (f"/boot/initrd.img-{kernel}", f"/boot/initramfs-{kernel}.img", f"/boot/initrd-{kernel}")
    images = [one for one in (host.file(name) for name in names) if one is not None]
    wanted = host.file(path)
    return wanted is not None and any(image["mtime"] < wanted["mtime"] for image in images)


def secure_boot(host: Host) -> bool:
    """Returns whether the firmware enforces Secure Boot; False on a host that did not boot by EFI."""
    value = host.text(SECURE_BOOT)
    if value is not None:
        return value.endswith("\x01")
    if not host.names("/sys/firmware/efi"):
        return False
    return "SecureBoot enabled" in host.run(["mokutil", "--sb-state"]).out


def signing_key(host: Host) -> str | None:
    """Returns whether the firmware trusts the key that signs modules built on this host: ``enrolled`` or ``missing``;
    None if there is no key.
    """
    for path in SIGNING_KEYS:
        if host.file(path) is not None:
            answer = host.run(["mokutil", "--test-key", path])
            return "enrolled" if "already enrolled" in answer.out + answer.err else "missing"
    return None


def signed_modules(host: Host) -> list[str] | None:
    """Returns the driver flavours (such as ``580-server-open``) for which Ubuntu's archive has a module for the running
    kernel. Returns None on other systems, and if the package lists name no such module for any kernel, because then the
    host has not read the lists yet.
    """
    system = host.os_release()
    if system["id"] != "ubuntu":
        return None
    names = host.run(["apt-cache", "pkgnames", driver_support.PREBUILT]).out.split()
    ending = "-" + system["kernel"]
    found = [name[len(driver_support.PREBUILT) : -len(ending)] for name in names if name.endswith(ending)]
    return sorted(found) if names else None


def nvswitches(host: Host) -> int:
    """Returns how many NVSwitches the host has: as PCI bridges, or (with NVLink 5) behind an InfiniBand device."""
    count = 0
    for address in host.names("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{address}"
        if (host.text(f"{folder}/vendor") or "").strip() == NVIDIA_VENDOR:
            device = driver_support.device_id(host.text(f"{folder}/device") or "")
            count += device in driver_support.NVSWITCH_IDS
    return count + _behind_infiniband(host)


def nvlink5(host: Host) -> bool:
    """Returns whether there are NVSwitches of NVLink 5. A subnet manager must route them before the
    fabric manager runs.
    """
    return _behind_infiniband(host) > 0


def _behind_infiniband(host: Host) -> int:
    vpds = (host.text(f"/sys/class/infiniband/{name}/device/vpd") or "" for name in host.names("/sys/class/infiniband"))
    return sum("SW_MNG" in vpd for vpd in vpds)
