# SPDX-License-Identifier: Apache-2.0
"""Defines the files that a driver needs on a host in addition to its packages: their paths, and functions without I/O
that return their texts.
"""

from __future__ import annotations

from typing import Any

from ..host.distribution import System
from .facts import NOUVEAU_FILE

# This file keeps the kernel's own GPU drivers from binding the GPUs: nouveau, and nova, which replaces it in new
# kernels.
NOUVEAU_TEXT = """\
# Managed by vgpu.fleet: the GPUs belong to NVIDIA's driver.
blacklist nouveau
options nouveau modeset=0
blacklist nova_core
blacklist nova_drm
"""
GRIDD_FILE = "/etc/nvidia/gridd.conf"
TOKEN_FILE = "/etc/nvidia/ClientConfigToken/client_configuration_token_vgpu.tok"
# NVIDIA's documentation uses 0744, with which every user of the host can read the token. 0600 suffices, because
# nvidia-gridd, which reads it, runs as root.
TOKEN_MODE = "0600"
# Drop-in that turns persistence mode on: Ubuntu's unit starts the daemon with it off, so the driver does not stay
# loaded.
PERSISTENCE_FILE = "/etc/systemd/system/nvidia-persistenced.service.d/vgpu.conf"
PERSISTENCE_TEXT = """\
# Managed by vgpu.fleet: the driver stays loaded while no program uses a GPU.
[Unit]
StopWhenUnneeded=no

[Service]
ExecStart=
ExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced --persistence-mode --verbose
"""
# Files that their service reads only at its start, so a change needs a restart.
REREADS = {"nvidia-gridd.service": [GRIDD_FILE, TOKEN_FILE], "nvidia-persistenced.service": [PERSISTENCE_FILE]}
FEATURE_TYPES = {"unlicensed": 0, "vgpu": 1, "vws": 2, "vcs": 4}
UNSUPPORTED_FILE = "/etc/modprobe.d/vgpu-unsupported.conf"
# This file chooses the cgroup controller with which the driver (branch 615 and newer) accounts GPU memory, to enforce
# limits.
MEMACCT_FILE = "/etc/modprobe.d/vgpu-memacct.conf"
MEMACCT = {"off": 0, "misc": 1, "dmem": 2, "auto": 3}
MEMACCT_BRANCH = 615
# The files of a host that are read before the choice of its driver (choice.py).
FILES = [NOUVEAU_FILE, UNSUPPORTED_FILE, MEMACCT_FILE, GRIDD_FILE, TOKEN_FILE, PERSISTENCE_FILE]


def of_host(
    host: System, wanted: dict[str, Any], kind: str, registry: str
) -> tuple[dict[str, str], list[str], list[str]]:
    """Returns the text of each file by its path, the command that rebuilds the initramfs, and the kernel arguments.
    ``wanted``: the role's settings. ``kind``: ``open``, ``proprietary`` or ``none``. ``registry``: the RegistryDwords
    of the loaded driver.
    """
    files: dict[str, str] = {}
    initramfs: list[str] = []
    arguments: list[str] = []
    if kind != "none":
        files[NOUVEAU_FILE] = NOUVEAU_TEXT
        if host.manager == "apt":
            initramfs = ["update-initramfs", "-u", "-k", "all"]
        else:
            initramfs = ["dracut", "--force", "--regenerate-all"]
            # dracut's initramfs may load nouveau before the root file system, which has the folder modprobe.d, is
            # mounted.
            arguments = ["rd.driver.blacklist=nouveau", "modprobe.blacklist=nouveau"]
    if host.family == "sles" and kind != "none":
        files[UNSUPPORTED_FILE] = "allow_unsupported_modules 1\n"
    # Write no drop-in if the user named the packages, because these may start the persistence daemon in another way.
    if host.family == "ubuntu" and kind != "none" and wanted["persistenced"] and not wanted["packages"]:
        files[PERSISTENCE_FILE] = PERSISTENCE_TEXT
    if wanted["memacct"] and kind != "none":
        files[MEMACCT_FILE] = memacct_conf(wanted["memacct"], registry)
    if wanted["vgpu_guest"]:
        files[GRIDD_FILE] = gridd_conf(wanted)
    return files, initramfs, arguments


def memacct_conf(mode: str, registry: str) -> str:
    """Returns the option line of the kernel module. The line repeats the keys that the loaded driver already has. This
    is needed because only the last of several such lines counts.
    """
    kept = [one for one in registry.split(";") if one and not one.startswith("RmMemacctMode=")]
    words = ";".join([*kept, f"RmMemacctMode={MEMACCT[mode]}"])
    return f'# Managed by vgpu.fleet.\noptions nvidia NVreg_RegistryDwords="{words}"\n'


def gridd_conf(wanted: dict[str, Any]) -> str:
    """Returns the configuration of NVIDIA's licence client in a vGPU guest, with the old licence server if one is set.
    A token of the licence service is a separate file.
    """
    lines = ["# Managed by vgpu.fleet.", f"FeatureType={FEATURE_TYPES[wanted['vgpu_feature']]}"]
    if wanted["vgpu_license_server"]:
        server, _colon, port = str(wanted["vgpu_license_server"]).partition(":")
        lines += [f"ServerAddress={server}", f"ServerPort={port or 7070}"]
    return "\n".join(lines) + "\n"
