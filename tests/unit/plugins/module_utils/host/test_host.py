# SPDX-License-Identifier: Apache-2.0
"""Tests the facts that are read from a host. A folder with files simulates the host."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.host import host as hardware
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Answer, Host, unit_facts
from ansible_collections.vgpu.fleet.plugins.module_utils.packages import rpm_host
from doubles import host as host_double

# dpkg's status file with four packages: installed, half-configured, removed, and one whose name only begins like the
# first. A line of a description looks like a package.
DPKG = """\
Package: nvidia-smi
Status: install ok installed
Architecture: amd64
Version: 535.261.03-1
Description: a tool
 Package: not-a-package

Package: docker.io
Status: install ok half-configured
Version: 20.10.24

Package: removed
Status: deinstall ok config-files
Version: 1.0

Package: nvidia-smi-extra
Status: install ok installed
Version: 9
"""


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("nvidia-smi", "535.261.03-1"),
        ("docker.io", None),  # A half-configured package counts as missing, so it is installed again.
        ("removed", None),
        ("absent", None),
        ("not-a-package", None),
    ],
)
def test_dpkg_lists_only_fully_installed_packages(tmp_path, name, version):
    host = host_double.host(tmp_path, {"var/lib/dpkg/status": DPKG})
    assert host.packages([name]) == {name: version}


def test_rpm_is_used_without_dpkg(tmp_path):
    asked = []

    def run(argv):
        asked.append(list(argv))
        return Answer(1, "docker-ce 3:27.1-1.el9\npackage nvidia-smi is not installed\n", "")

    host = Host(str(tmp_path), run)
    assert host.packages(["docker-ce", "nvidia-smi"]) == {"docker-ce": "3:27.1-1.el9", "nvidia-smi": None}
    assert asked == [["rpm", "-qa", "--qf", rpm_host.QUERY, "docker-ce", "nvidia-smi"]]


# systemctl's output, in one call for all units
SYSTEMCTL = """\
Id=docker.service
LoadState=loaded
ActiveState=active
UnitFileState=enabled
NeedDaemonReload=no
MainPID=7
ExecMainStartTimestampMonotonic=1000000

Id=gone.service
LoadState=not-found
ActiveState=inactive
UnitFileState=
NeedDaemonReload=no
MainPID=0
ExecMainStartTimestampMonotonic=0

Id=vgpu-device-plugin.service
LoadState=loaded
ActiveState=failed
UnitFileState=disabled
NeedDaemonReload=yes
MainPID=0
ExecMainStartTimestampMonotonic=0
"""


def test_units_are_read_in_one_call(tmp_path):
    asked = []

    def run(argv):
        asked.append(argv)
        return Answer(0, SYSTEMCTL, "")

    host_double.host(tmp_path, {"proc/7/cmdline": "/usr/bin/dockerd\0-H\0fd://\0"})
    names = ["docker.service", "gone.service", "vgpu-device-plugin.service"]
    units = Host(str(tmp_path), run).units(names)
    assert len(asked) == 1
    wanted = {
        "docker.service": (True, True, True, False, False),
        "gone.service": (False, False, False, False, False),
        "vgpu-device-plugin.service": (True, False, False, True, True),
    }
    for name, flags in wanted.items():
        unit = units[name]
        found = (unit["present"], unit["enabled"], unit["active"], unit["failed"], unit["stale"])
        assert found == flags, name
    assert units["docker.service"]["argv"] == ["/usr/bin/dockerd", "-H", "fd://"]
    assert units["docker.service"]["started"] is not None
    assert units["vgpu-device-plugin.service"]["started"] is None


# columns: name of the mapped file, whether the file is replaced; expected: whether the process is reported
@pytest.mark.parametrize(
    ("name", "replaced", "old"),
    [
        ("libnvidia-ml.so.535.1", True, True),
        ("libcuda.so.1", True, True),
        ("libnvidia-ml.so.535.1", False, False),
        ("libother.so.1", True, False),
    ],
)
def test_process_that_maps_a_replaced_driver_library_is_found(tmp_path, name, replaced, old):
    """The test replaces the file while a process maps it, as an upgrade by a package manager does. The process then
    still uses the old driver library."""
    library = tmp_path / name
    library.write_bytes(b"\x7fELF" * 1024)
    script = f"import mmap, sys; f = open({str(library)!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); "
    script += "print('mapped', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "mapped\n"
        if replaced:
            fresh = tmp_path / "fresh"
            fresh.write_bytes(b"new")
            fresh.replace(library)
        assert Host().old_driver(holder.pid) is old
        holder.communicate()
    assert Host().old_driver(0) is False


# columns: LoadState, UnitFileState and ActiveState of systemd; expected (present, masked, enabled, active)
UNIT_FACTS = [
    ("loaded", "enabled", "active", (True, False, True, True)),
    ("loaded", "disabled", "reloading", (True, False, False, True)),
    ("loaded", "static", "inactive", (True, False, True, False)),
    # A unit is enabled-runtime only until the next boot.
    ("loaded", "enabled-runtime", "active", (True, False, False, True)),
    ("loaded", "linked", "inactive", (True, False, False, False)),
    ("masked", "masked", "inactive", (True, True, False, False)),
    ("masked", "masked-runtime", "active", (True, True, False, True)),
    ("not-found", "", "inactive", (False, False, False, False)),
]


@pytest.mark.parametrize(("load", "file_state", "active", "expected"), UNIT_FACTS)
def test_flags_of_a_unit_follow_systemd(load, file_state, active, expected):
    fields = {"LoadState": load, "UnitFileState": file_state, "ActiveState": active}
    found = unit_facts(fields)
    assert (found["present"], found["masked"], found["enabled"], found["active"]) == expected


def test_without_systemd_every_unit_is_absent(tmp_path):
    units = host_double.host(tmp_path, {}).units(["docker.service"])
    assert units["docker.service"]["present"] is False


def test_gpus_on_the_bus_are_nvidia_display_and_compute_devices(tmp_path):
    devices = {
        "0000:00:04.0": ("0x10de", "0x030200", "0x1eb8"),
        "0000:00:05.0": ("0x10de", "0x030000", "0x1b06"),
        "0000:00:05.1": ("0x10de", "0x040300", "0x10ef"),  # the audio device of a graphics card is no GPU
        "0000:00:06.0": ("0x8086", "0x030000", "0x1234"),
    }
    files = {}
    for address, (vendor, kind, device) in devices.items():
        folder = f"sys/bus/pci/devices/{address}"
        files.update({f"{folder}/vendor": vendor + "\n", f"{folder}/class": kind + "\n", f"{folder}/device": device})
    found = host_double.host(tmp_path, files).pci_gpus()
    assert [(gpu["address"], gpu["device"]) for gpu in found] == [
        ("0000:00:04.0", "0x1eb8"),
        ("0000:00:05.0", "0x1b06"),
    ]


# columns: text of /proc/driver/nvidia/version (None: no such file), text of /proc/modules; expected version of the
# loaded driver, whether nouveau is loaded
@pytest.mark.parametrize(
    ("version_text", "modules", "loaded", "nouveau"),
    [
        (None, "", None, False),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Tue\n", "nvidia 1 0\n", "535.261.03", False),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.163.01  Release\n", "", "550.163.01", False),
        (None, "drm 1 1 nouveau,\nnouveau 2 0\n", None, True),
        (None, "drm 1 1 nouveau,\n", None, False),
    ],
)
def test_loaded_driver_is_read_from_the_kernel(tmp_path, version_text, modules, loaded, nouveau):
    files = {"proc/modules": modules}
    if version_text:
        files["proc/driver/nvidia/version"] = version_text
    assert host_double.host(tmp_path, files).driver() == {"loaded_version": loaded, "nouveau": nouveau}


def test_digest_and_mode_of_a_file(tmp_path):
    host = host_double.host(tmp_path, {"etc/x": "hello"})
    (tmp_path / "etc/x").chmod(0o640)
    facts = host.file("/etc/x")
    assert (facts["sha256"], facts["mode"]) == (hashlib.sha256(b"hello").hexdigest(), "0640")
    assert host.file("/etc/y") is None


def test_os_release_names_system_and_version(tmp_path):
    text = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\n'
    found = host_double.host(tmp_path, {"etc/os-release": text}).os_release()
    assert (found["id"], found["version_id"], found["codename"]) == ("debian", "12", "bookworm")


@pytest.mark.parametrize(
    ("kernel", "name"), [("gpu-1\n", "gpu-1"), ("GPU-1.Site.Example\n", "gpu-1.site.example"), (None, "")]
)
def test_node_name_of_a_kubelet(tmp_path, kernel, name):
    assert host_double.host(tmp_path, {"proc/sys/kernel/hostname": kernel} if kernel else {}).node_name() == name


@pytest.mark.parametrize(("text", "mode"), [("1", "enforcing"), ("0", "permissive"), (None, "")])
def test_mode_of_selinux(tmp_path, text, mode):
    files = {} if text is None else {"sys/fs/selinux/enforce": text}
    assert host_double.host(tmp_path, files).os_release()["selinux"] == mode


def test_a_program_that_is_absent_answers_127():
    assert hardware.run_program(["/nonexistent/program"]).rc == 127
