# SPDX-License-Identifier: Apache-2.0
"""Tests the choice of a driver from the facts of a host and the variables nvidia_driver_*: which drivers are allowed or
refused, which packages belong to them, and when a reboot is needed.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.driver import choice as driver_choice
from ansible_collections.vgpu.fleet.plugins.module_utils.driver import host_files
from ansible_collections.vgpu.fleet.plugins.module_utils.host import distribution
from driver_samples import (
    A100,
    B200,
    GH200,
    H100,
    H200,
    HOSTS,
    K80,
    L4,
    M60,
    NEW,
    NO_DRIVER,
    P100,
    T4,
    V100,
    chosen,
    state,
)

# columns: host, GPUs, facts of the host's driver, variables nvidia_driver_*; expected words of the refusal
REFUSED = [
    ("debian12", [T4], {}, {"version": "384.80"}, "384.80 is too old; expected 384.81 or newer"),
    ("debian12", [T4], {}, {"branch": "375"}, "too old"),
    ("debian12", [T4], {}, {"branch": "five"}, "expected a number such as 580, found five"),
    ("debian12", [T4], {}, {"branch": "535", "version": "550.54.15"}, "does not belong to nvidia_driver_branch 535"),
    ("debian12", [T4], {}, {"source": "internet"}, "expected one of distribution, cuda, mirror, file, present"),
    ("debian12", [T4], {}, {"source": "mirror"}, "nvidia_driver_repository is empty"),
    ("debian12", [T4], {}, {"source": "file"}, "nvidia_driver_files is empty"),
    ("debian12", [T4], {}, {"branch": "580"}, "has the branches 470, 535 and not 580"),
    ("debian12", [T4], {}, {"memacct": "cgroup"}, "nvidia_driver_memacct: expected one of off, misc, dmem, auto"),
    ("debian12", [T4], {}, {"memacct": "misc", "branch": "580"}, "nvidia_driver_memacct has no effect on branch 580"),
    ("debian11", [T4], {}, {}, "supported systems: Debian 12 and 13"),
    ("fedora", [T4], {}, {}, "Fedora Linux 42 has no known driver packages"),
    ("debian12", [], {}, {}, "no NVIDIA GPU is on the PCI bus of this host"),
    (
        "ubuntu24",
        [],
        {},
        {"source": "cuda"},
        "remove the host from the group, or set nvidia_driver_kernel_module: none",
    ),
    ("rocky9", [T4], {}, {}, "has no NVIDIA driver in its own repositories; set nvidia_driver_source to cuda"),
    ("sles15", [T4], {}, {}, "has no NVIDIA driver in its own repositories"),
    # GPUs that a branch no longer supports, or does not support yet
    (
        "ubuntu22",
        [K80],
        {},
        {"branch": "535"},
        "no longer supports the Kepler GPU at 0000:00:00.0; the last branch with support is 470",
    ),
    ("debian13", [K80], {}, {}, "no branch that drives all GPUs of this host together (Kepler)"),
    ("ubuntu24", [M60], {}, {"source": "mirror", "repository": {"uris": ["x"]}, "branch": "590"}, "Maxwell GPU"),
    (
        "rhel9",
        [P100],
        {},
        {"source": "cuda", "branch": "590"},
        "Pascal GPU at 0000:00:00.0; the last branch with support is 580",
    ),
    ("rhel9", [T4, V100], {}, {"source": "cuda", "branch": "595"}, "Volta GPU at 0000:01:00.0"),
    ("debian12", [B200], {}, {}, "no branch that drives all GPUs of this host together (Blackwell)"),
    ("ubuntu22", [B200], {}, {"branch": "550"}, "is older than the Blackwell GPU at 0000:00:00.0, which needs 570"),
    ("ubuntu22", [H200], {}, {"branch": "535"}, "which needs 550"),
    ("ubuntu24", [K80, H100], {}, {}, "move some GPUs to another host"),
    # kernel modules
    ("debian12", [V100], {}, {"kernel_module": "open"}, "open modules drive Turing and later"),
    ("ubuntu24", [B200], {}, {"kernel_module": "proprietary"}, "do not drive the Blackwell GPU"),
    ("ubuntu24", [GH200], {}, {"kernel_module": "proprietary"}, "Grace Hopper"),
    ("ubuntu24", [V100, B200], {}, {}, "do not drive the Blackwell GPU"),
    (
        "ubuntu22",
        [A100],
        {},
        {"kernel_module": "open", "branch": "470"},
        "has no open kernel modules; 515 is the first with them",
    ),
    ("debian12", [T4], {}, {"kernel_module": "open", "branch": "470"}, "470 has no open kernel modules"),
    (
        "rhel9",
        [T4],
        {},
        {"source": "cuda", "kernel_module": "proprietary", "branch": "620"},
        "only open kernel modules",
    ),
    ("debian13", [T4], {}, {"kernel_module": "open", "branch": "535"}, "proprietary kernel modules only"),
    # Secure Boot
    ("debian12", [T4], {"secure_boot": True}, {}, "Secure Boot is on"),
    ("debian12", [T4], {"secure_boot": True, "signing_key": "missing"}, {}, "its key is not enrolled"),
    ("rhel9", [T4], {"secure_boot": True}, {"source": "cuda"}, "no signing key exists yet"),
    ("ubuntu22", [T4], {"secure_boot": True}, {"prebuilt": False}, "set nvidia_driver_prebuilt to auto"),
    # other driver installations that would conflict with the packages
    ("debian12", [T4], {"container": True}, {}, "a driver container provides the driver"),
    ("debian12", [T4], {"runfile": True}, {}, "run nvidia-uninstall first"),
    ("debian12", [T4], {}, {"source": "present"}, "no driver is loaded"),
    ("debian12", [T4], {"loaded_version": "367.57"}, {"source": "present"}, "too old"),
    # repositories
    ("ubuntu20", [T4], {}, {"source": "cuda", "branch": "580"}, "frozen and ends with branch 570"),
    ("debian12", [T4], {}, {"source": "cuda", "branch": "535"}, "compute-only packages from branch 560 on"),
    # virtual GPUs
    ("ubuntu22", [T4], {}, {"vgpu_guest": True}, "no public repository has"),
    ("ubuntu22", [T4], {}, {"vgpu_feature": "gaming"}, "expected one of unlicensed, vgpu, vws, vcs"),
]


@pytest.mark.parametrize(("host", "gpus", "driver", "wanted", "words"), REFUSED)
def test_refusals(host, gpus, driver, wanted, words):
    """A driver that does not fit the host is refused with a reason, and the host stays unchanged."""
    found = chosen(host, gpus, driver, **wanted)
    assert words in " | ".join(found.refusals)
    assert (found.packages, found.files, found.services) == ([], {}, []), "a refused host is left as it is"


# columns: host, GPUs, facts of the host's driver, variables nvidia_driver_*. None of these is refused. Each row differs
# from a row of REFUSED only in the fact that caused the refusal.
ALLOWED = [
    ("debian12", [T4], {}, {"version": "535.261.03-1"}),
    ("ubuntu22", [K80], {}, {"branch": "470"}),
    ("rhel9", [P100], {}, {"source": "cuda", "branch": "580"}),
    ("rhel9", [T4], {}, {"source": "cuda", "branch": "595"}),
    ("debian12", [T4], {}, {"kernel_module": "open"}),
    ("ubuntu24", [GH200], {}, {"kernel_module": "open"}),
    ("debian12", [T4], {"secure_boot": True, "signing_key": "enrolled"}, {}),
    ("debian12", [T4], {"secure_boot": True}, {"kernel_module": "none"}),
    ("ubuntu22", [T4], {"secure_boot": True}, {}),
    ("sles15", [L4], {"secure_boot": True}, {"source": "cuda"}),
    ("debian12", [T4], {"container": True, "loaded_version": "550.54.15"}, {"source": "present"}),
    ("debian12", [T4], {"loaded_version": "384.81"}, {"source": "present"}),
    ("ubuntu22", [T4], {}, {"vgpu_guest": True, "source": "file", "files": ["/x.deb"]}),
]


@pytest.mark.parametrize(("host", "gpus", "driver", "wanted"), ALLOWED)
def test_allowed_driver_has_no_refusal(host, gpus, driver, wanted):
    assert chosen(host, gpus, driver, **wanted).refusals == []


def test_gpu_missing_in_the_table_is_a_warning():
    found = chosen("ubuntu24", [NEW])
    assert found.refusals == []
    assert found.branch == 580
    assert "0x9999 is not in the table" in found.warnings[0]


# columns: whether the host has NVLink 5 switches, variables, packages on the host; whether a warning is expected that
# packages for these switches are missing
NVLINK5 = [
    (True, {}, {}, True),
    (True, {}, {"nvlsm": "2025.03.1-1"}, False),
    (True, {"fabric_manager": False}, {}, False),
    (False, {}, {}, False),
]


@pytest.mark.parametrize(("switches", "wanted", "packages", "told"), NVLINK5)
def test_nvlink_5_switches_need_packages_besides_the_fabric_manager(switches, wanted, packages, told):
    host = {**state("ubuntu24", [B200], {"nvlink5": switches}, nvswitches=4), "packages": packages}
    found = driver_choice.choose(host, {"source": "cuda", "branch": "580", **wanted})
    assert found.refusals == []
    assert ["nvlsm and infiniband-diags" in text for text in found.warnings] == [True] * told


# columns: host, variables; expected files, program that builds the initramfs, whether kernel arguments are set,
# services
HOST_SIDE = [
    ("debian12", {}, {"/etc/modprobe.d/vgpu-nouveau.conf"}, "update-initramfs", False, ["nvidia-persistenced.service"]),
    ("ubuntu24", {"persistenced": False}, {"/etc/modprobe.d/vgpu-nouveau.conf"}, "update-initramfs", False, []),
    (
        "ubuntu24",
        {},
        {"/etc/modprobe.d/vgpu-nouveau.conf", host_files.PERSISTENCE_FILE},
        "update-initramfs",
        False,
        ["nvidia-persistenced.service"],
    ),
    (
        "ubuntu22",
        {"source": "cuda", "branch": "580", "packages": ["theirs"]},
        {"/etc/modprobe.d/vgpu-nouveau.conf"},
        "update-initramfs",
        False,
        ["nvidia-persistenced.service"],
    ),
    (
        "rhel9",
        {"source": "cuda"},
        {"/etc/modprobe.d/vgpu-nouveau.conf"},
        "dracut",
        True,
        ["nvidia-persistenced.service"],
    ),
    (
        "sles15",
        {"source": "cuda"},
        {"/etc/modprobe.d/vgpu-nouveau.conf", "/etc/modprobe.d/vgpu-unsupported.conf"},
        "dracut",
        True,
        ["nvidia-persistenced.service"],
    ),
    ("debian12", {"kernel_module": "none"}, set(), "", False, []),
    ("debian12", {"kernel_module": "none", "memacct": "misc"}, set(), "", False, []),
    (
        "debian12",
        {"memacct": "misc"},
        {"/etc/modprobe.d/vgpu-nouveau.conf", "/etc/modprobe.d/vgpu-memacct.conf"},
        "update-initramfs",
        False,
        ["nvidia-persistenced.service"],
    ),
    (
        "ubuntu22",
        {"vgpu_guest": True, "source": "file", "files": ["/x.deb"]},
        {"/etc/modprobe.d/vgpu-nouveau.conf", "/etc/nvidia/gridd.conf", host_files.PERSISTENCE_FILE},
        "update-initramfs",
        False,
        ["nvidia-persistenced.service", "nvidia-gridd.service"],
    ),
]


@pytest.mark.parametrize(("host", "wanted", "files", "initramfs", "arguments", "services"), HOST_SIDE)
def test_files_services_and_kernel_arguments_of_a_driver(host, wanted, files, initramfs, arguments, services):
    found = chosen(host, [T4], **wanted)
    assert set(found.files) == files
    assert (found.initramfs[:1] or [""])[0] == initramfs
    assert bool(found.kernel_arguments) == arguments
    assert found.services == services


@pytest.mark.parametrize(
    ("mode", "registry", "words"),
    [
        ("off", "", "RmMemacctMode=0"),
        ("misc", "", "RmMemacctMode=1"),
        ("dmem", "PowerMizerEnable=0x1;RmMemacctMode=1", "PowerMizerEnable=0x1;RmMemacctMode=2"),
        ("auto", "RmMemacctMode=0;A=b", "A=b;RmMemacctMode=3"),
    ],
)
def test_controller_mode_keeps_other_registry_keys(mode, registry, words):
    """A second run, which reads the new registry keys, writes the same file."""
    text = host_files.memacct_conf(mode, registry)
    assert text.splitlines()[1] == f'options nvidia NVreg_RegistryDwords="{words}"'
    assert host_files.memacct_conf(mode, words) == text


# The unit of nvidia-compute-utils-580-server 580.178.04-0ubuntu0.24.04.1.
UBUNTU_UNIT = """\
[Unit]
Description=NVIDIA Persistence Daemon
Wants=syslog.target
StopWhenUnneeded=true
Before=systemd-backlight@backlight:nvidia_0.service

[Service]
Type=forking
ExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced --no-persistence-mode --verbose
ExecStopPost=/bin/rm -rf /var/run/nvidia-persistenced
"""


def test_drop_in_starts_ubuntus_persistence_daemon_with_the_mode_on():
    (theirs,) = [line for line in UBUNTU_UNIT.splitlines() if line.startswith("ExecStart=")]
    lines = chosen("ubuntu24", [T4]).files[host_files.PERSISTENCE_FILE].splitlines()
    # The empty line removes the unit's own command, because a service of this type may have only one.
    assert lines[-2:] == ["ExecStart=", theirs.replace("--no-persistence-mode", "--persistence-mode")]
    assert "StopWhenUnneeded=no" in lines[: lines.index("[Service]")]
    assert chosen("ubuntu24", [T4]).rereads["nvidia-persistenced.service"] == [host_files.PERSISTENCE_FILE]


# columns: facts of the driver, configured version; expected words of the reason to reboot
REBOOT = [
    ({}, "", ""),
    ({"nouveau": True}, "", "nouveau uses the GPUs"),
    ({"loaded_version": "535.1", "disk_version": "535.1", "in_use": ["python (7)"]}, "", ""),
    ({"loaded_version": "535.1", "disk_version": "535.2", "in_use": []}, "", ""),  # a reload of the modules is enough
    ({"loaded_version": "535.1", "disk_version": "535.2", "in_use": ["python (7)"]}, "", "in use by python (7)"),
    ({"loaded_version": "535.1", "in_use": ["python (7)"]}, "535.2-1", "in use by python (7)"),
    ({"loaded_version": "535.1", "in_use": ["python (7)"]}, "535.1-1", ""),
    ({"loaded_version": "535.1", "in_use": ["python (7)"]}, "535.*", ""),
]


@pytest.mark.parametrize(("driver", "version", "words"), REBOOT)
def test_reasons_to_reboot(driver, version, words):
    reason = driver_choice.reboot_reason({**NO_DRIVER, **driver}, "open", version)
    assert words in reason
    assert bool(words) == bool(reason)
    assert driver_choice.reboot_reason({**NO_DRIVER, **driver}, "none", version) == ""


def test_every_supported_system_is_known():
    for name in HOSTS:
        known = distribution.system(state(name)["os"])
        assert (known is None) == (name in ("debian11", "fedora"))
