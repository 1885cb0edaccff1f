# SPDX-License-Identifier: Apache-2.0
"""Tests the facts of the driver that are read from a host. A folder with files simulates the host."""

from __future__ import annotations

import os
import platform

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.driver import facts as driver_facts
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Answer, dpkg_held, matching
from doubles import host as host_double

# Texts of simulated kernels. LOADED and OPEN are contents of /proc/driver/nvidia/version, with a proprietary and with
# an open module. IDLE, DRM and BUSY are contents of /proc/modules. In IDLE (with nvidia_uvm) and DRM (with nvidia_drm)
# only the driver's own modules use the module nvidia; in BUSY a process uses it too.
LOADED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Tue\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.163.01  Release\n"
IDLE = "nvidia_uvm 4 0 - Live 0x0\nnvidia_modeset 3 0 - Live 0x0\nnvidia 2 2 nvidia_uvm,nvidia_modeset, Live 0x0\n"
DRM = "nvidia_drm 5 0 - Live 0x0\nnvidia_modeset 3 1 nvidia_drm, Live 0x0\nnvidia 2 1 nvidia_modeset, Live 0x0\n"
BUSY = IDLE.replace("nvidia 2 2", "nvidia 2 5")
SIGNED, MODULE = (
    "apt-cache pkgnames linux-modules-nvidia-",
    f"linux-modules-nvidia-580-server-open-{platform.release()}",
)
EFI = driver_facts.SECURE_BOOT.lstrip("/")


# columns: files of the host, outputs of programs by command; expected facts of the driver
FACTS = [
    ({}, {}, {"loaded_version": None, "open_module": None, "secure_boot": False, "in_use": [], "modules": []}),
    ({"proc/driver/nvidia/version": LOADED}, {}, {"loaded_version": "535.261.03", "open_module": False}),
    ({"proc/driver/nvidia/version": OPEN}, {}, {"loaded_version": "550.163.01", "open_module": True}),
    (
        {"proc/driver/nvidia/version": LOADED},
        {"modinfo -F version nvidia-current": Answer(0, "535.300.01\n", "")},
        {"disk_version": "535.300.01"},
    ),
    ({}, {}, {"smi": False}),
    ({"usr/bin/nvidia-smi": "x"}, {}, {"smi": True}),
    ({"proc/modules": IDLE}, {}, {"in_use": [], "modules": ["nvidia_modeset", "nvidia_uvm", "nvidia"]}),
    ({"proc/modules": DRM}, {}, {"in_use": []}),
    ({"proc/modules": BUSY}, {}, {"in_use": ["an unknown user in the kernel"]}),
    ({EFI: "\x06\0\0\0\x01"}, {}, {"secure_boot": True, "signing_key": None}),
    ({EFI: "\x06\0\0\0\0"}, {}, {"secure_boot": False, "signing_key": None}),
    (
        {"sys/firmware/efi/fw_vendor": "x"},
        {"mokutil --sb-state": Answer(0, "SecureBoot enabled\n", "")},
        {"secure_boot": True},
    ),
    (
        {"sys/firmware/efi/fw_vendor": "x"},
        {"mokutil --sb-state": Answer(0, "SecureBoot disabled\n", "")},
        {"secure_boot": False},
    ),
    (
        {EFI: "\x06\0\0\0\x01", "var/lib/dkms/mok.pub": "k"},
        {"mokutil --test-key /var/lib/dkms/mok.pub": Answer(1, "/var/lib/dkms/mok.pub is already enrolled\n", "")},
        {"signing_key": "enrolled"},
    ),
    (
        {EFI: "\x06\0\0\0\x01", "var/lib/dkms/mok.pub": "k"},
        {"mokutil --test-key /var/lib/dkms/mok.pub": Answer(0, "/var/lib/dkms/mok.pub is not enrolled\n", "")},
        {"signing_key": "missing"},
    ),
    ({"run/nvidia/driver/usr/bin/nvidia-smi": ""}, {}, {"container": True, "runfile": False}),
    ({"usr/bin/nvidia-uninstall": ""}, {}, {"container": False, "runfile": True}),
    ({f"lib/modules/{platform.release()}/build/Makefile": ""}, {}, {"headers": True}),
    ({"lib/modules/1.2.3/build/Makefile": ""}, {}, {"headers": False}),
    ({"etc/os-release": "ID=debian\n"}, {SIGNED: Answer(0, f"{MODULE}\n", "")}, {"signed_modules": None}),
    ({"etc/os-release": "ID=ubuntu\n"}, {SIGNED: Answer(0, "", "")}, {"signed_modules": None}),
    ({"etc/os-release": "ID=ubuntu\n"}, {SIGNED: Answer(0, f"{MODULE}-hwe\n", "")}, {"signed_modules": []}),
    (
        {"etc/os-release": "ID=ubuntu\n"},
        {SIGNED: Answer(0, f"{MODULE}\n{MODULE.replace('580', '595')}\nlinux-modules-nvidia-590-server-generic\n", "")},
        {"signed_modules": ["580-server-open", "595-server-open"]},
    ),
]


@pytest.mark.parametrize(("files", "answers", "facts"), FACTS)
def test_facts(tmp_path, files, answers, facts):
    """The facts of the driver follow from files of the host and from the output of programs."""
    found = driver_facts.read(host_double.host(tmp_path, files, answers))
    assert {key: found[key] for key in facts} == facts


def test_processes_that_use_the_driver_are_named(tmp_path):
    host = host_double.host(tmp_path, {"proc/modules": BUSY, "proc/41/comm": "python3\n", "proc/42/comm": "bash\n"})
    for pid, target in ((41, "/dev/nvidia0"), (42, "/dev/pts/1")):
        (tmp_path / f"proc/{pid}/fd").mkdir()
        os.symlink(target, tmp_path / f"proc/{pid}/fd/3")
    assert driver_facts.read(host)["in_use"] == ["python3 (41)"]


# columns: control groups of process python3 (41), which has the driver open; expected users of the driver. A reload of
# the modules stops the driver's own services, so these services do not count as users.
GROUPS = [
    ("0::/system.slice/nvidia-persistenced.service\n", []),
    ("4:devices:/system.slice/x\n1:name=systemd:/system.slice/vgpu-mps.service\n", []),
    ("0::/system.slice/vgpu-device-plugin.service/worker\n", []),
    ("0::/user.slice/nvidia-persistenced.service.d\n", ["python3 (41)"]),
    ("0::/kubepods.slice/cri-containerd-5f.scope\n", ["python3 (41)"]),
    ("", ["python3 (41)"]),
]


@pytest.mark.parametrize(("group", "users"), GROUPS)
def test_services_of_the_driver_are_no_users(tmp_path, group, users):
    host = host_double.host(tmp_path, {"proc/modules": BUSY, "proc/41/comm": "python3\n", "proc/41/cgroup": group})
    (tmp_path / "proc/41/fd").mkdir()
    os.symlink("/dev/nvidiactl", tmp_path / "proc/41/fd/3")
    assert driver_facts.read(host)["in_use"] == users


def test_an_initramfs_that_was_made_before_the_blacklist_is_old(tmp_path):
    image = f"boot/initrd.img-{platform.release()}"
    host = host_double.host(tmp_path, {image: "cpio", "etc/modprobe.d/vgpu-nouveau.conf": "blacklist nouveau\n"})
    for when, old in ((1000, True), (3000, False)):
        os.utime(tmp_path / image, (when, when))
        os.utime(tmp_path / "etc/modprobe.d/vgpu-nouveau.conf", (2000, 2000))
        assert driver_facts.read(host)["initramfs_old"] is old


# columns: PCI devices as (vendor, device) by address, product data of an InfiniBand device; expected number of
# NVSwitches
SWITCHES = [
    ({"0000:01:00.0": ("0x10de", "0x1af1"), "0000:02:00.0": ("0x10de", "0x1af1")}, "", 2),
    ({"0000:01:00.0": ("0x10de", "0x22a3")}, "", 1),
    ({"0000:01:00.0": ("0x10de", "0x20b0")}, "", 0),
    ({"0000:01:00.0": ("0x8086", "0x1af1")}, "", 0),
    ({}, "Product SW_MNG switch", 1),
    ({}, "ConnectX-7", 0),
]


@pytest.mark.parametrize(("devices", "vpd", "count"), SWITCHES)
def test_nvswitches_are_counted(tmp_path, devices, vpd, count):
    files = {}
    for address, (vendor, device) in devices.items():
        files.update({f"sys/bus/pci/devices/{address}/vendor": vendor, f"sys/bus/pci/devices/{address}/device": device})
    if vpd:
        files["sys/class/infiniband/mlx5_0/device/vpd"] = vpd
    host = host_double.host(tmp_path, files)
    assert driver_facts.nvswitches(host) == count
    assert driver_facts.read(host)["nvlink5"] is ("SW_MNG" in vpd)


def test_pattern_matches_every_installed_package():
    installed = {"nvidia-smi": "1", "libnvidia-ml1": "2", "bash": "3"}
    assert matching(installed, ["*nvidia*", "gone"]) == {"gone": None, "nvidia-smi": "1", "libnvidia-ml1": "2"}


def test_dpkg_status_lists_held_packages():
    status = "Package: a\nStatus: hold ok installed\nVersion: 1\n\nPackage: b\nStatus: install ok installed\n"
    assert dpkg_held(status) == ["a"]
