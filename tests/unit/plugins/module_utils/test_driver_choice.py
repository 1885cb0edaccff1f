# SPDX-License-Identifier: Apache-2.0
"""Facts of a host x wish -> driver.

The facts are os-release, kernel names and PCI ids as such hosts report them; package names of Debian were read from the
archives of bookworm and trixie, the others from the vendors' pages.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils import driver_choice, driver_packages, driver_support, rpm_text

# id, id_like, version_id, name, kernel as each release reports them
HOSTS = {
    "debian12": ("debian", "", "12", "Debian GNU/Linux 12 (bookworm)", "6.1.0-37-amd64"),
    "debian12cloud": ("debian", "", "12", "Debian GNU/Linux 12 (bookworm)", "6.1.0-37-cloud-amd64"),
    "debian13": ("debian", "", "13", "Debian GNU/Linux 13 (trixie)", "6.12.43+deb13-amd64"),
    "debian11": ("debian", "", "11", "Debian GNU/Linux 11 (bullseye)", "5.10.0-35-amd64"),
    "ubuntu20": ("ubuntu", "debian", "20.04", "Ubuntu 20.04.6 LTS", "5.4.0-216-generic"),
    "ubuntu22": ("ubuntu", "debian", "22.04", "Ubuntu 22.04.5 LTS", "5.15.0-153-generic"),
    "ubuntu22hwe": ("ubuntu", "debian", "22.04", "Ubuntu 22.04.5 LTS", "6.8.0-84-generic"),
    "ubuntu24": ("ubuntu", "debian", "24.04", "Ubuntu 24.04.3 LTS", "6.8.0-84-generic"),
    "ubuntu24aws": ("ubuntu", "debian", "24.04", "Ubuntu 24.04.3 LTS", "6.8.0-1035-aws"),
    "rhel8": ("rhel", "fedora", "8.10", "Red Hat Enterprise Linux 8.10 (Ootpa)", "4.18.0-553.el8_10.x86_64"),
    "rocky8": ("rocky", "rhel centos fedora", "8.10", "Rocky Linux 8.10", "4.18.0-553.el8_10.x86_64"),
    "rhel9": ("rhel", "fedora", "9.6", "Red Hat Enterprise Linux 9.6 (Plow)", "5.14.0-570.12.1.el9_6.x86_64"),
    "rocky9": ("rocky", "rhel centos fedora", "9.6", "Rocky Linux 9.6", "5.14.0-570.12.1.el9_6.x86_64"),
    "rocky10": ("rocky", "rhel centos fedora", "10.0", "Rocky Linux 10.0", "6.12.0-55.12.1.el10_0.x86_64"),
    "rhel10": ("rhel", "fedora", "10.0", "Red Hat Enterprise Linux 10.0", "6.12.0-55.12.1.el10_0.x86_64"),
    "sles15": ("sles", "suse", "15.6", "SUSE Linux Enterprise Server 15 SP6", "6.4.0-150600.23.60-default"),
    "fedora": ("fedora", "", "42", "Fedora Linux 42", "6.14.0-63.fc42.x86_64"),
}
K80, M60, P100, V100, T4, A100, A30 = "0x102d", "0x13f2", "0x15f8", "0x1db4", "0x1eb8", "0x20b0", "0x20b7"
L4, H100, H200, GH200, B200, GTX1080TI, NEW = "0x27b8", "0x2330", "0x2335", "0x2342", "0x2901", "0x1b06", "0x9999"
NO_DRIVER = {"loaded_version": None, "nouveau": False, "secure_boot": False, "signing_key": None, "in_use": []}


def state(host, gpus=(T4,), driver=None, arch="x86_64", nvswitches=0):
    name, like, version, pretty, kernel = HOSTS[host]
    return {
        "os": {"id": name, "id_like": like, "version_id": version, "name": pretty, "kernel": kernel, "arch": arch},
        "pci_gpus": [{"address": f"0000:{n:02x}:00.0", "device": gpu} for n, gpu in enumerate(gpus)],
        "nvswitches": nvswitches,
        "driver": {**NO_DRIVER, **(driver or {})},
        "nvml": {"driver_version": None},
    }


def chosen(host, gpus=(T4,), driver=None, arch="x86_64", nvswitches=0, **wanted):
    return driver_choice.choose(state(host, gpus, driver, arch, nvswitches), wanted)


# host, GPUs, wish, branch, kernel modules, packages (all of them, in order)
PACKAGES = [
    (
        "debian12",
        [T4],
        {},
        535,
        "proprietary",
        "nvidia-smi libcuda1 libnvidia-ml1 nvidia-kernel-dkms linux-headers-6.1.0-37-amd64 linux-headers-amd64 "
        "nvidia-persistenced",
    ),
    (
        "debian12cloud",
        [T4],
        {"kernel_module": "open"},
        535,
        "open",
        "nvidia-smi libcuda1 libnvidia-ml1 nvidia-open-kernel-dkms linux-headers-6.1.0-37-cloud-amd64 "
        "linux-headers-cloud-amd64 nvidia-persistenced",
    ),
    ("debian12", [T4], {"kernel_module": "none"}, 535, "none", "nvidia-smi libcuda1 libnvidia-ml1"),
    ("debian12", [], {"kernel_module": "none"}, 535, "none", "nvidia-smi libcuda1 libnvidia-ml1"),
    (
        "debian12",
        [T4],
        {"kernel_module": "none", "version": "535.261.03-1"},
        535,
        "none",
        "nvidia-smi=535.261.03-1 libcuda1=535.261.03-1 libnvidia-ml1=535.261.03-1",
    ),
    # Kepler needs 470, which Debian 12 carries under names of its own.
    (
        "debian12",
        [K80],
        {"kernel_module": "auto"},
        470,
        "proprietary",
        "nvidia-tesla-470-smi libnvidia-tesla-470-cuda1 libnvidia-tesla-470-ml1 nvidia-tesla-470-kernel-dkms "
        "linux-headers-6.1.0-37-amd64 linux-headers-amd64 nvidia-persistenced",
    ),
    (
        "debian13",
        [A100, L4],
        {"kernel_module": "open"},
        550,
        "open",
        "nvidia-smi libcuda1 libnvidia-ml1 nvidia-open-kernel-dkms linux-headers-6.12.43+deb13-amd64 "
        "linux-headers-amd64 "
        "nvidia-persistenced",
    ),
    (
        "debian13",
        [B200],
        {"source": "cuda"},
        580,
        "open",
        "nvidia-driver-cuda=580.* nvidia-kernel-open-dkms=580.* linux-headers-6.12.43+deb13-amd64=* "
        "linux-headers-amd64=* "
        "nvidia-persistenced=*",
    ),
    (
        "ubuntu24",
        [H100],
        {},
        580,
        "open",
        "nvidia-utils-580-server libnvidia-compute-580-server nvidia-compute-utils-580-server "
        "nvidia-headless-no-dkms-580-server-open linux-modules-nvidia-580-server-open-6.8.0-84-generic "
        "linux-modules-nvidia-580-server-open-generic",
    ),
    (
        "ubuntu24aws",
        [V100],
        {},
        580,
        "proprietary",
        "nvidia-utils-580-server libnvidia-compute-580-server nvidia-compute-utils-580-server "
        "nvidia-headless-no-dkms-580-server "
        "linux-modules-nvidia-580-server-6.8.0-1035-aws linux-modules-nvidia-580-server-aws",
    ),
    (
        "ubuntu22hwe",
        [T4],
        {"branch": "535"},
        535,
        "proprietary",
        "nvidia-utils-535-server libnvidia-compute-535-server nvidia-compute-utils-535-server "
        "nvidia-headless-no-dkms-535-server "
        "linux-modules-nvidia-535-server-6.8.0-84-generic linux-modules-nvidia-535-server-generic-hwe-22.04",
    ),
    (
        "ubuntu22",
        [T4],
        {"prebuilt": False, "branch": "550"},
        550,
        "proprietary",
        "nvidia-utils-550-server libnvidia-compute-550-server nvidia-compute-utils-550-server "
        "nvidia-headless-550-server "
        "linux-headers-5.15.0-153-generic",
    ),
    (
        "ubuntu20",
        [P100],
        {},
        570,
        "proprietary",
        "nvidia-utils-570-server libnvidia-compute-570-server nvidia-compute-utils-570-server "
        "nvidia-headless-no-dkms-570-server "
        "linux-modules-nvidia-570-server-5.4.0-216-generic linux-modules-nvidia-570-server-generic",
    ),
    (
        "ubuntu22",
        [A100],
        {"source": "cuda", "version": "570.172.08"},
        570,
        "open",
        "nvidia-utils-570=570.172.08 libnvidia-compute-570=570.172.08 nvidia-compute-utils-570=570.172.08 "
        "nvidia-headless-570-open=570.172.08 linux-headers-5.15.0-153-generic=*",
    ),
    (
        "rhel9",
        [H200],
        {"source": "cuda"},
        580,
        "open",
        "nvidia-driver-cuda=580.* kmod-nvidia-open-dkms=580.* kernel-devel=5.14.0-570.12.1.el9_6 kernel-headers=* "
        "nvidia-persistenced=*",
    ),
    (
        "rocky8",
        [V100],
        {"source": "cuda"},
        580,
        "proprietary",
        "nvidia-driver-cuda=580.* kmod-nvidia-latest-dkms=580.* kernel-devel=4.18.0-553.el8_10 kernel-headers=* "
        "nvidia-persistenced=*",
    ),
    (
        "rocky10",
        [A30],
        {"source": "cuda"},
        580,
        "open",
        "nvidia-driver-cuda=580.* kmod-nvidia-open-dkms=580.* kernel-devel=6.12.0-55.12.1.el10_0 kernel-headers=* "
        "nvidia-persistenced=*",
    ),
    (
        "rocky10",
        [A30],
        {"source": "cuda", "kernel_module": "none"},
        580,
        "none",
        "nvidia-driver-cuda=580.*",
    ),
    (
        "sles15",
        [L4],
        {"source": "cuda"},
        580,
        "open",
        "nvidia-open-driver-G06-signed-cuda-kmp-default=580.* nvidia-compute-utils-G06=580.* "
        "nvidia-compute-G06=580.* nvidia-persistenced=*",
    ),
    ("fedora", [T4], {"packages": ["akmod-nvidia"]}, None, "auto", "akmod-nvidia"),
    (
        "ubuntu22",
        [T4],
        {"source": "file", "vgpu_guest": True, "files": ["/srv/nvidia-linux-grid-535_535.161.07_amd64.deb"]},
        None,
        "proprietary",
        "nvidia-linux-grid-535",
    ),
    (
        "rhel9",
        [T4],
        {"source": "file", "files": ["/srv/nvidia-linux-grid-535-535.161.07-1.x86_64.rpm"]},
        None,
        "proprietary",
        "nvidia-linux-grid-535",
    ),
    ("debian12", [T4], {"packages": ["a", "b=2"], "version": "535.1*"}, 535, "proprietary", "a=535.1* b=2"),
]


@pytest.mark.parametrize("host, gpus, wanted, branch, kind, packages", PACKAGES)
def test_packages(host, gpus, wanted, branch, kind, packages):
    found = chosen(host, gpus, **wanted)
    assert found.refusals == []
    assert (found.branch, found.kernel_module, " ".join(found.packages)) == (branch, kind, packages)


# kernel that runs, architecture, whether its headers are there -> packages of headers of an RPM system
EL_HEADERS = [
    ("4.18.0-553.el8_10.x86_64", "x86_64", False, ["kernel-devel=4.18.0-553.el8_10"]),
    ("5.14.0-570.12.1.el9_6.x86_64", "x86_64", False, ["kernel-devel=5.14.0-570.12.1.el9_6"]),
    ("5.14.0-570.12.1.el9_6.x86_64", "x86_64", True, []),
    ("5.14.0-570.12.1.el9_6.aarch64+64k", "aarch64", False, ["kernel-64k-devel=5.14.0-570.12.1.el9_6"]),
    ("5.15.0-310.184.5.2.el9uek.x86_64", "x86_64", False, ["kernel-uek-devel=5.15.0-310.184.5.2.el9uek"]),
    ("6.1.0-37-amd64", "x86_64", False, ["kernel-devel=*"]),
]


@pytest.mark.parametrize("kernel, arch, there, packages", EL_HEADERS)
def test_headers_are_those_of_the_running_kernel_and_bring_no_other_one(kernel, arch, there, packages):
    host = state("rhel9", driver={"headers": there}, arch=arch)
    host["os"]["kernel"] = kernel
    found = driver_choice.choose(host, {"source": "cuda"})
    assert [name for name in found.packages if "devel" in name] == packages


# host, wish -> of these, what must not come along. Ubuntu 24.04 has 535.309.01 as an empty package that brings 580.
SERVER = ["nvidia-utils-535-server", "libnvidia-compute-535-server", "nvidia-utils-580-server", "nvidia-utils-570"]
COMPANIONS = [
    ("ubuntu24", {"branch": "535"}, ["nvidia-utils-570", "nvidia-utils-580-server"]),
    ("ubuntu24", {"branch": "580"}, ["libnvidia-compute-535-server", "nvidia-utils-535-server", "nvidia-utils-570"]),
    ("ubuntu24", {"branch": "535", "packages": ["theirs"]}, []),
    ("ubuntu22", {"source": "cuda", "branch": "570"}, []),
    ("debian12", {}, []),
]


@pytest.mark.parametrize("host, wanted, refused", COMPANIONS)
def test_a_branch_does_not_bring_another_one(host, wanted, refused):
    found = chosen(host, [T4], **wanted)
    assert found.refusals == []
    assert rpm_text.matching(SERVER, found.refuse) == refused
    assert rpm_text.matching([name.partition("=")[0] for name in found.packages], found.refuse) == []


# host, GPUs, facts of the driver, wish, words of the refusal
REFUSED = [
    ("debian12", [T4], {}, {"version": "384.80"}, "384.80 is too old; the first that works here is 384.81"),
    ("debian12", [T4], {}, {"branch": "375"}, "too old"),
    ("debian12", [T4], {}, {"branch": "five"}, "expected a number such as 580, found five"),
    ("debian12", [T4], {}, {"branch": "535", "version": "550.54.15"}, "is not of nvidia_driver_branch 535"),
    ("debian12", [T4], {}, {"source": "internet"}, "expected one of distribution, cuda, mirror, file, present"),
    ("debian12", [T4], {}, {"source": "mirror"}, "nvidia_driver_repository is empty"),
    ("debian12", [T4], {}, {"source": "file"}, "nvidia_driver_files is empty"),
    ("debian12", [T4], {}, {"branch": "580"}, "has the branches 470, 535 and not 580"),
    ("debian11", [T4], {}, {}, "supported are Debian 12 and 13"),
    ("fedora", [T4], {}, {}, "Fedora Linux 42 has no driver packages that are known"),
    ("rocky9", [T4], {}, {}, "has no NVIDIA driver of its own; set nvidia_driver_source to cuda"),
    ("sles15", [T4], {}, {}, "has no NVIDIA driver of its own"),
    # GPUs that a branch no longer, or not yet, drives
    (
        "ubuntu22",
        [K80],
        {},
        {"branch": "535"},
        "no longer supports the Kepler GPU at 0000:00:00.0; the last one that does is 470",
    ),
    ("debian13", [K80], {}, {}, "no branch that drives all GPUs of this host together (Kepler)"),
    ("ubuntu24", [M60], {}, {"source": "mirror", "repository": {"uris": ["x"]}, "branch": "590"}, "Maxwell GPU"),
    (
        "rhel9",
        [P100],
        {},
        {"source": "cuda", "branch": "590"},
        "Pascal GPU at 0000:00:00.0; the last one that does is 580",
    ),
    ("rhel9", [T4, V100], {}, {"source": "cuda", "branch": "595"}, "Volta GPU at 0000:01:00.0"),
    ("debian12", [B200], {}, {}, "no branch that drives all GPUs of this host together (Blackwell)"),
    ("ubuntu22", [B200], {}, {"branch": "550"}, "is older than the Blackwell GPU at 0000:00:00.0, which needs 570"),
    ("ubuntu22", [H200], {}, {"branch": "535"}, "which needs 550"),
    ("ubuntu24", [K80, H100], {}, {}, "split them"),
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
        "has no open kernel modules; they came with 515",
    ),
    ("debian12", [T4], {}, {"kernel_module": "open", "branch": "470"}, "470 has no open kernel modules"),
    (
        "rhel9",
        [T4],
        {},
        {"source": "cuda", "kernel_module": "proprietary", "branch": "620"},
        "open kernel modules alone",
    ),
    ("debian13", [T4], {}, {"kernel_module": "open", "branch": "535"}, "proprietary kernel modules alone"),
    # Secure Boot
    ("debian12", [T4], {"secure_boot": True}, {}, "Secure Boot is on"),
    ("debian12", [T4], {"secure_boot": True, "signing_key": "missing"}, {}, "its key is not enrolled"),
    ("rhel9", [T4], {"secure_boot": True}, {"source": "cuda"}, "no signing key is there yet"),
    ("ubuntu22", [T4], {"secure_boot": True}, {"prebuilt": False}, "set nvidia_driver_prebuilt to auto"),
    # what must not be mixed
    ("debian12", [T4], {"container": True}, {}, "a driver container provides the driver"),
    ("debian12", [T4], {"runfile": True}, {}, "run nvidia-uninstall first"),
    ("debian12", [T4], {}, {"source": "present"}, "no driver is loaded"),
    ("debian12", [T4], {"loaded_version": "367.57"}, {"source": "present"}, "too old"),
    # repositories
    ("ubuntu20", [T4], {}, {"source": "cuda", "branch": "580"}, "frozen and ends with branch 570"),
    ("ubuntu24", [T4], {}, {"source": "cuda", "branch": "590"}, "not known to this version"),
    ("debian12", [T4], {}, {"source": "cuda", "branch": "535"}, "compute-only packages from branch 560 on"),
    # virtual GPUs
    ("ubuntu22", [T4], {}, {"vgpu_guest": True}, "no public repository has"),
    ("ubuntu22", [T4], {}, {"vgpu_feature": "gaming"}, "expected one of unlicensed, vgpu, vws, vcs"),
]


@pytest.mark.parametrize("host, gpus, driver, wanted, words", REFUSED)
def test_refusals(host, gpus, driver, wanted, words):
    found = chosen(host, gpus, driver, **wanted)
    assert words in " | ".join(found.refusals)
    assert (found.packages, found.files, found.services) == ([], {}, []), "a refused host is left as it is"


# The nearest that is not refused: each row differs from one above in the fact that decides.
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


@pytest.mark.parametrize("host, gpus, driver, wanted", ALLOWED)
def test_what_is_allowed(host, gpus, driver, wanted):
    assert chosen(host, gpus, driver, **wanted).refusals == []


def test_a_gpu_that_no_table_knows_is_said_and_not_refused():
    found = chosen("ubuntu24", [NEW])
    assert found.refusals == []
    assert found.branch == 580
    assert "0x9999 is not in the table" in found.warnings[0]


# host, wish, switches, fabric manager's packages, words of the refusal
FABRIC = [
    (
        "ubuntu22",
        {"branch": "535"},
        6,
        "nvidia-fabricmanager-535=@nvidia-utils-535-server libnvidia-nscq-535=@nvidia-utils-535-server",
        "",
    ),
    (
        "ubuntu22",
        {"branch": "535", "version": "535.216.01"},
        6,
        "nvidia-fabricmanager-535=535.216.01* libnvidia-nscq-535=535.216.01*",
        "",
    ),
    (
        "ubuntu24",
        {"source": "cuda", "branch": "580"},
        4,
        "nvidia-fabricmanager=@nvidia-utils-580 libnvidia-nscq=@nvidia-utils-580",
        "",
    ),
    (
        "debian13",
        {"source": "cuda"},
        4,
        "nvidia-fabricmanager=@nvidia-driver-cuda libnvidia-nscq=@nvidia-driver-cuda",
        "",
    ),
    (
        "rhel9",
        {"source": "cuda", "version": "580.65.06"},
        4,
        "nvidia-fabric-manager=580.65.06 libnvidia-nscq=580.65.06",
        "",
    ),
    ("ubuntu22", {}, 0, "", ""),
    ("ubuntu22", {"fabric_manager": False}, 6, "", ""),
    ("ubuntu22", {"kernel_module": "none"}, 6, "", ""),
    ("debian12", {}, 6, "", "Debian has none; set nvidia_driver_source to cuda"),
    ("rhel9", {"source": "cuda"}, 4, "", "set nvidia_driver_version to an exact one"),
    ("ubuntu22", {"source": "mirror", "repository": {"uris": ["x"]}}, 4, "", "set nvidia_driver_branch"),
]


@pytest.mark.parametrize("host, wanted, switches, packages, words", FABRIC)
def test_fabric_manager_of_exactly_the_drivers_version(host, wanted, switches, packages, words):
    found = chosen(host, [A100], nvswitches=switches, **wanted)
    if words:
        assert words in " | ".join(found.refusals)
        return
    assert found.refusals == []
    names = [name for name in found.packages if "fabric" in name or "nscq" in name]
    assert " ".join(names) == packages
    assert ("nvidia-fabricmanager.service" in found.services) == bool(packages)


# host, wish, files, initramfs, kernel arguments, services
HOST_SIDE = [
    ("debian12", {}, {"/etc/modprobe.d/vgpu-nouveau.conf"}, "update-initramfs", False, ["nvidia-persistenced.service"]),
    ("ubuntu24", {"persistenced": False}, {"/etc/modprobe.d/vgpu-nouveau.conf"}, "update-initramfs", False, []),
    (
        "ubuntu24",
        {},
        {"/etc/modprobe.d/vgpu-nouveau.conf", driver_choice.PERSISTENCE_FILE},
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
    (
        "ubuntu22",
        {"vgpu_guest": True, "source": "file", "files": ["/x.deb"]},
        {"/etc/modprobe.d/vgpu-nouveau.conf", "/etc/nvidia/gridd.conf", driver_choice.PERSISTENCE_FILE},
        "update-initramfs",
        False,
        ["nvidia-persistenced.service", "nvidia-gridd.service"],
    ),
]


@pytest.mark.parametrize("host, wanted, files, initramfs, arguments, services", HOST_SIDE)
def test_what_comes_beside_the_packages(host, wanted, files, initramfs, arguments, services):
    found = chosen(host, [T4], **wanted)
    assert set(found.files) == files
    assert (found.initramfs[:1] or [""])[0] == initramfs
    assert bool(found.kernel_arguments) == arguments
    assert found.services == services


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


def test_ubuntus_persistence_daemon_is_started_as_its_unit_does_and_with_the_mode_on():
    (theirs,) = [line for line in UBUNTU_UNIT.splitlines() if line.startswith("ExecStart=")]
    lines = chosen("ubuntu24", [T4]).files[driver_choice.PERSISTENCE_FILE].splitlines()
    # The empty one takes theirs away: a service of this type has one command.
    assert lines[-2:] == ["ExecStart=", theirs.replace("--no-persistence-mode", "--persistence-mode")]
    assert "StopWhenUnneeded=no" in lines[: lines.index("[Service]")]
    assert chosen("ubuntu24", [T4]).rereads["nvidia-persistenced.service"] == [driver_choice.PERSISTENCE_FILE]


# host, architecture, repository of CUDA, stream of dnf for (branch, modules)
REPOSITORIES = [
    ("debian12", "x86_64", "debian12/x86_64", {("580", "open"): ""}),
    ("ubuntu22", "aarch64", "ubuntu2204/sbsa", {("580", "open"): ""}),
    ("rhel8", "x86_64", "rhel8/x86_64", {("580", "open"): "580-open", ("580", "proprietary"): "580-dkms"}),
    ("rocky9", "aarch64", "rhel9/sbsa", {("575", "open"): "575-open"}),
    ("rhel10", "x86_64", "rhel10/x86_64", {("580", "open"): ""}),
    ("sles15", "x86_64", "sles15/x86_64", {("580", "open"): ""}),
]


@pytest.mark.parametrize("host, arch, folder, streams", REPOSITORIES)
def test_repositories(host, arch, folder, streams):
    for (branch, kind), stream in streams.items():
        found = chosen(host, [T4], arch=arch, source="cuda", branch=branch, kernel_module=kind)
        address = (found.repository.get("uris") or [found.repository.get("baseurl")])[0]
        assert address == f"https://developer.download.nvidia.com/compute/cuda/repos/{folder}/"
        assert found.module_stream == stream


def test_a_repository_of_ones_own_is_taken_as_it_is():
    own = {"uris": ["https://mirror.example.com/nvidia"], "key": "/k.asc"}
    found = chosen("debian12", [T4], source="mirror", repository=own, branch="580")
    assert (found.repository, found.components) == (own, [])


# loaded, on disk, in use, nouveau, wanted version -> words of the reason to reboot
REBOOT = [
    ({}, "", ""),
    ({"nouveau": True}, "", "nouveau holds the GPUs"),
    ({"loaded_version": "535.1", "disk_version": "535.1", "in_use": ["python (7)"]}, "", ""),
    ({"loaded_version": "535.1", "disk_version": "535.2", "in_use": []}, "", ""),  # a reload of modules will do
    ({"loaded_version": "535.1", "disk_version": "535.2", "in_use": ["python (7)"]}, "", "in use by python (7)"),
    ({"loaded_version": "535.1", "in_use": ["python (7)"]}, "535.2-1", "in use by python (7)"),
    ({"loaded_version": "535.1", "in_use": ["python (7)"]}, "535.1-1", ""),
    ({"loaded_version": "535.1", "in_use": ["python (7)"]}, "535.*", ""),
]


@pytest.mark.parametrize("driver, version, words", REBOOT)
def test_reasons_to_reboot(driver, version, words):
    reason = driver_choice.reboot_reason({**NO_DRIVER, **driver}, "open", version)
    assert words in reason
    assert bool(words) == bool(reason)
    assert driver_choice.reboot_reason({**NO_DRIVER, **driver}, "none", version) == ""


def test_holds_name_the_packages_and_not_the_headers():
    assert chosen("debian12", [T4]).holds == [
        "libcuda1",
        "libnvidia-ml1",
        "nvidia-kernel-dkms",
        "nvidia-persistenced",
        "nvidia-smi",
    ]
    assert chosen("debian12", [T4], hold=False).holds == []


# Ubuntu's host, wish -> what is held of its kernel
KERNEL_HOLDS = [
    ("ubuntu24", {}, ["linux-generic", "linux-headers-generic", "linux-image-generic"]),
    (
        "ubuntu22hwe",
        {"branch": "535"},
        ["linux-generic-hwe-22.04", "linux-headers-generic-hwe-22.04", "linux-image-generic-hwe-22.04"],
    ),
    ("ubuntu24aws", {}, ["linux-aws", "linux-headers-aws", "linux-image-aws"]),
    ("ubuntu24", {"prebuilt": False}, []),  # DKMS builds a module for each kernel that comes
    ("ubuntu24", {"kernel_module": "none"}, []),
    ("ubuntu24", {"hold": False}, []),
]


@pytest.mark.parametrize("host, wanted, kernel", KERNEL_HOLDS)
def test_a_kernel_is_held_with_the_module_that_was_built_for_it(host, wanted, kernel):
    found = chosen(host, [T4], **wanted)
    assert [name for name in found.holds if name.startswith("linux-") and "nvidia" not in name] == kernel
    modules = [name for name in found.packages if name.startswith("linux-modules-nvidia-")]
    assert set(modules) <= set(found.holds) or not wanted.get("hold", True)
    assert bool(kernel) <= bool(modules)


def test_what_is_locked_on_rhel_is_the_driver_and_not_the_container_toolkit():
    driver = ["kmod-nvidia-open-dkms", "libnvidia-cfg", "libnvidia-ml", "nvidia-driver-cuda", "nvidia-persistenced"]
    toolkit = ["libnvidia-container1", "nvidia-container-toolkit-base", "nvidia-container-runtime", "nvidia-docker2"]
    holds = chosen("rhel9", [T4], source="cuda").holds
    assert rpm_text.matching([*driver, *toolkit, "kernel-devel"], holds) == driver


# PCI device id -> generation, first and last branch
GENERATIONS = [
    (K80, "Kepler", 0, 470), ("0x1023", "Kepler", 0, 470), ("0x0ff2", "Kepler", 0, 470), ("0x11bf", "Kepler", 0, 470),
    ("0x06d1", "Fermi", 0, 390), ("0x1091", "Fermi", 0, 390),
    (M60, "Maxwell", 0, 580), ("0x17fd", "Maxwell", 0, 580), ("0x13bd", "Maxwell", 0, 580),
    (P100, "Pascal", 375, 580), (GTX1080TI, "Pascal", 375, 580), ("0x1bb3", "Pascal", 375, 580),
    (V100, "Volta", 384, 580), ("0x1df6", "Volta", 384, 580),
    (T4, "Turing", 410, 0), ("0x1e04", "Turing", 410, 0), ("0x2187", "Turing", 410, 0),
    (A100, "Ampere", 450, 0), (A30, "Ampere", 460, 0), ("0x2235", "Ampere", 450, 0), ("0x25b6", "Ampere", 450, 0),
    (L4, "Ada", 525, 0), ("0x26b9", "Ada", 525, 0),
    (H100, "Hopper", 525, 0), (H200, "Hopper", 550, 0), (GH200, "Grace Hopper", 535, 0),
    (B200, "Blackwell", 570, 0), ("0x2b85", "Blackwell", 570, 0), ("0x3182", "Blackwell", 580, 0),
]  # fmt: skip


@pytest.mark.parametrize("device, name, first, last", GENERATIONS)
def test_generations(device, name, first, last):
    found = driver_support.generation(driver_support.device_id(device))
    assert (found.name, found.first, found.last) == (name, first, last)


@pytest.mark.parametrize("device", [NEW, "0x0020", "", "zz", "0x123456"])
def test_what_is_no_known_gpu_has_no_generation(device):
    assert driver_support.generation(driver_support.device_id(device)) is None


@pytest.mark.parametrize(
    "version, branch, plain",
    [
        ("535.261.03-1", 535, "535.261.03"),
        ("1:580.65.06", 580, "580.65.06"),
        ("535.216.01-0ubuntu0.22.04.1", 535, "535.216.01"),
        ("535.*", 535, "535.*"),
        ("470.256.02-1~deb12u1", 470, "470.256.02"),
        ("1.2", None, "1.2"),
        ("", None, ""),
    ],
)
def test_versions(version, branch, plain):
    assert (driver_support.branch_of(version), driver_support.upstream(version)) == (branch, plain)


def test_rows_of_one_generation_do_not_overlap_but_for_grace_hopper():
    rows = sorted(driver_support.RANGES)
    for (_low, high, one), (low, _high, other) in zip(rows, rows[1:]):
        assert high < low or "Grace Hopper" in (one.name, other.name)


def test_every_system_that_is_promised_is_known():
    for name in HOSTS:
        known = driver_packages.system(state(name)["os"])
        assert (known is None) == (name in ("debian11", "fedora"))
