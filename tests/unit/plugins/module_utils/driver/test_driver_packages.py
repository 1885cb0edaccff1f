# SPDX-License-Identifier: Apache-2.0
"""Tests which packages, repositories and holds (packages that upgrades must not change) of the driver follow from the
facts of a host and the variables nvidia_driver_*.

Debian's package names were read from the archives of bookworm and trixie, the other names from the vendors' pages.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.driver import choice as driver_choice
from ansible_collections.vgpu.fleet.plugins.module_utils.packages import pins
from driver_samples import (
    A30,
    A100,
    B200,
    H100,
    H200,
    K80,
    L4,
    P100,
    T4,
    V100,
    chosen,
    state,
)

# "=@NAME" after a package means "in the version of the package NAME". Debian 12's archive has a newer version of the
# user space than of the open modules, so the user space must follow the modules.
FOLLOWS = "@nvidia-open-kernel-dkms"
# columns: host, GPUs, variables nvidia_driver_*; expected branch, kind of kernel modules, packages in order
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
        f"nvidia-smi={FOLLOWS} libcuda1={FOLLOWS} libnvidia-ml1={FOLLOWS} nvidia-open-kernel-dkms "
        "linux-headers-6.1.0-37-cloud-amd64 "
        "linux-headers-cloud-amd64 nvidia-persistenced",
    ),
    (
        "debian12rt",
        [T4],
        {},
        535,
        "proprietary",
        "nvidia-smi libcuda1 libnvidia-ml1 nvidia-kernel-dkms linux-headers-6.1.0-37-rt-amd64 "
        "linux-headers-rt-amd64 nvidia-persistenced",
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
    # Kepler needs branch 470, which Debian 12 packages under separate names.
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
        f"nvidia-smi={FOLLOWS} libcuda1={FOLLOWS} libnvidia-ml1={FOLLOWS} nvidia-open-kernel-dkms "
        "linux-headers-6.12.43+deb13-amd64 "
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
    # Ubuntu's archive has a signed module of this branch for the running kernel. So DKMS, which builds modules on the
    # host, is not needed.
    (
        "ubuntu24",
        [H100],
        {"driver": {"signed_modules": ["580-server-open", "595-server"]}},
        580,
        "open",
        "nvidia-utils-580-server libnvidia-compute-580-server nvidia-compute-utils-580-server "
        "nvidia-headless-no-dkms-580-server-open linux-modules-nvidia-580-server-open-6.8.0-84-generic "
        "linux-modules-nvidia-580-server-open-generic",
    ),
    (
        "ubuntu24",
        [H100],
        {"driver": {"signed_modules": ["580-server", "595-server-open"]}},
        580,
        "open",
        "nvidia-utils-580-server libnvidia-compute-580-server nvidia-compute-utils-580-server "
        "nvidia-headless-580-server-open linux-headers-6.8.0-84-generic",
    ),
    (
        "ubuntu24new",
        [B200],
        {"branch": "615"},
        615,
        "open",
        "nvidia-utils-615-server libnvidia-compute-615-server nvidia-compute-utils-615-server "
        "nvidia-headless-no-dkms-615-server-open linux-modules-nvidia-615-server-open-7.0.0-44-generic "
        "linux-modules-nvidia-615-server-open-generic-hwe-24.04",
    ),
    (
        "ubuntu26",
        [H100],
        {},
        580,
        "open",
        "nvidia-utils-580-server libnvidia-compute-580-server nvidia-compute-utils-580-server "
        "nvidia-headless-no-dkms-580-server-open linux-modules-nvidia-580-server-open-7.0.0-44-generic "
        "linux-modules-nvidia-580-server-open-generic",
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
    # NVIDIA's repository for Ubuntu has names without a branch from 590 on.
    (
        "ubuntu24",
        [H100],
        {"source": "cuda", "branch": "590"},
        590,
        "open",
        "libnvidia-compute=590.* nvidia-headless-open=590.* nvidia-persistenced=590.* linux-headers-6.8.0-84-generic=*",
    ),
    (
        "ubuntu24",
        [A100],
        {"source": "cuda", "branch": "595", "kernel_module": "proprietary"},
        595,
        "proprietary",
        "libnvidia-compute=595.* nvidia-headless=595.* nvidia-persistenced=595.* linux-headers-6.8.0-84-generic=*",
    ),
    (
        "ubuntu26",
        [H100],
        {"source": "cuda", "kernel_module": "none"},
        595,
        "none",
        "libnvidia-compute=595.*",
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


@pytest.mark.parametrize(("host", "gpus", "wanted", "branch", "kind", "packages"), PACKAGES)
def test_packages(host, gpus, wanted, branch, kind, packages):
    """Branch, kernel modules and packages follow from the host, its GPUs and the variables."""
    found = chosen(host, gpus, **wanted)
    assert found.refusals == []
    assert (found.branch, found.kernel_module, " ".join(found.packages)) == (branch, kind, packages)


# columns: signed modules in the archive for the running kernel (None: unknown), nvidia_driver_prebuilt, whether Secure
# Boot is on; expected words of the refusal, words of the warning ("": none)
NO_MODULE = [
    (["580-server-open"], "auto", False, "", ""),
    (None, "auto", False, "", ""),
    (None, True, False, "", ""),
    (["595-server-open"], "auto", False, "", "has no signed module of 580-server-open for kernel 6.8.0-84-generic"),
    (["595-server-open"], False, False, "", ""),
    (
        ["595-server-open"],
        True,
        False,
        ("install a kernel that has a signed module and reboot, or set nvidia_driver_prebuilt"),
        "",
    ),
    (
        ["595-server-open"],
        "auto",
        True,
        "and Secure Boot refuses a module that DKMS builds: install",
        "",
    ),
]


@pytest.mark.parametrize(("signed", "prebuilt", "secure", "refusal", "warning"), NO_MODULE)
def test_refusal_for_a_missing_signed_module_names_the_remedies(signed, prebuilt, secure, refusal, warning):
    driver = {"signed_modules": signed, "secure_boot": secure}
    found = chosen("ubuntu24", [H100], driver=driver, prebuilt=prebuilt)
    assert (refusal in " | ".join(found.refusals)) and bool(found.refusals) == bool(refusal)
    assert not warning or warning in " | ".join(found.warnings)
    dkms = any(name.startswith("nvidia-headless-580") for name in found.packages)
    assert dkms == (not refusal and (prebuilt is False or bool(warning)))


# columns: running kernel, architecture, whether the headers of this kernel are installed; expected header packages on
# RHEL 9
EL_HEADERS = [
    ("4.18.0-553.el8_10.x86_64", "x86_64", False, ["kernel-devel=4.18.0-553.el8_10"]),
    ("5.14.0-570.12.1.el9_6.x86_64", "x86_64", False, ["kernel-devel=5.14.0-570.12.1.el9_6"]),
    ("5.14.0-570.12.1.el9_6.x86_64", "x86_64", True, []),
    ("5.14.0-570.12.1.el9_6.aarch64+64k", "aarch64", False, ["kernel-64k-devel=5.14.0-570.12.1.el9_6"]),
    ("5.15.0-310.184.5.2.el9uek.x86_64", "x86_64", False, ["kernel-uek-devel=5.15.0-310.184.5.2.el9uek"]),
    ("6.1.0-37-amd64", "x86_64", False, ["kernel-devel=*"]),
]


@pytest.mark.parametrize(("kernel", "arch", "there", "packages"), EL_HEADERS)
def test_headers_are_those_of_the_running_kernel_alone(kernel, arch, there, packages):
    host = state("rhel9", driver={"headers": there}, arch=arch)
    host["os"]["kernel"] = kernel
    found = driver_choice.choose(host, {"source": "cuda"})
    assert [name for name in found.packages if "devel" in name] == packages


# columns: host, variables; expected packages of the list SERVER that the installation must not pull in, because they
# belong to other branches. In Ubuntu 24.04, for example, version 535.309.01 is an empty package that pulls in branch
# 580.
SERVER = ["nvidia-utils-535-server", "libnvidia-compute-535-server", "nvidia-utils-580-server", "nvidia-utils-570"]
COMPANIONS = [
    ("ubuntu24", {"branch": "535"}, ["nvidia-utils-570", "nvidia-utils-580-server"]),
    ("ubuntu24", {"branch": "580"}, ["libnvidia-compute-535-server", "nvidia-utils-535-server", "nvidia-utils-570"]),
    ("ubuntu24", {"branch": "535", "packages": ["theirs"]}, []),
    ("ubuntu22", {"source": "cuda", "branch": "570"}, []),
    ("debian12", {}, []),
]


@pytest.mark.parametrize(("host", "wanted", "refused"), COMPANIONS)
def test_packages_of_a_branch_install_no_other_branch(host, wanted, refused):
    found = chosen(host, [T4], **wanted)
    assert found.refusals == []
    assert pins.matching(SERVER, found.refuse) == refused
    assert pins.matching([name.partition("=")[0] for name in found.packages], found.refuse) == []


# columns: host, variables, number of NVSwitches; expected packages of the fabric manager (the service for NVSwitches),
# words of the refusal
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
    # In Ubuntu's archive these package names contain the branch, for every branch. In the CUDA repository they contain
    # it only up to branch 570.
    (
        "ubuntu24",
        {},
        4,
        "nvidia-fabricmanager-580=@nvidia-utils-580-server libnvidia-nscq-580=@nvidia-utils-580-server",
        "",
    ),
    (
        "ubuntu22",
        {"branch": "595"},
        8,
        "nvidia-fabricmanager-595=@nvidia-utils-595-server libnvidia-nscq-595=@nvidia-utils-595-server",
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
    (
        "ubuntu24",
        {"source": "cuda", "branch": "595"},
        8,
        "nvidia-fabricmanager=@libnvidia-compute libnvidia-nscq=@libnvidia-compute",
        "",
    ),
    (
        "rhel9",
        {"source": "cuda"},
        4,
        "nvidia-fabric-manager=@nvidia-driver-cuda libnvidia-nscq=@nvidia-driver-cuda",
        "",
    ),
    (
        "rhel9",
        {"source": "cuda", "version": "580.*"},
        4,
        "nvidia-fabric-manager=@nvidia-driver-cuda libnvidia-nscq=@nvidia-driver-cuda",
        "",
    ),
    (
        "sles15",
        {"source": "cuda"},
        4,
        "nvidia-fabric-manager=@nvidia-compute-utils-G06 libnvidia-nscq=@nvidia-compute-utils-G06",
        "",
    ),
    ("ubuntu22", {"source": "mirror", "repository": {"uris": ["x"]}}, 4, "", "set nvidia_driver_branch"),
]


@pytest.mark.parametrize(("host", "wanted", "switches", "packages", "words"), FABRIC)
def test_fabric_manager_has_the_version_of_the_driver(host, wanted, switches, packages, words):
    found = chosen(host, [A100], nvswitches=switches, **wanted)
    if words:
        assert words in " | ".join(found.refusals)
        return
    assert found.refusals == []
    names = [name for name in found.packages if "fabric" in name or "nscq" in name]
    assert " ".join(names) == packages
    assert ("nvidia-fabricmanager.service" in found.services) == bool(packages)


# columns: host, architecture; expected folder of the CUDA repository, expected dnf module stream for each (branch, kind
# of kernel modules)
REPOSITORIES = [
    ("debian12", "x86_64", "debian12/x86_64", {("580", "open"): ""}),
    ("ubuntu22", "aarch64", "ubuntu2204/sbsa", {("580", "open"): ""}),
    ("rhel8", "x86_64", "rhel8/x86_64", {("580", "open"): "580-open", ("580", "proprietary"): "580-dkms"}),
    ("rocky9", "aarch64", "rhel9/sbsa", {("575", "open"): "575-open"}),
    ("rhel10", "x86_64", "rhel10/x86_64", {("580", "open"): ""}),
    ("sles15", "x86_64", "sles15/x86_64", {("580", "open"): ""}),
]


@pytest.mark.parametrize(("host", "arch", "folder", "streams"), REPOSITORIES)
def test_repository_of_cuda_and_stream_of_dnf(host, arch, folder, streams):
    for (branch, kind), stream in streams.items():
        found = chosen(host, [T4], arch=arch, source="cuda", branch=branch, kernel_module=kind)
        address = (found.repository.get("uris") or [found.repository.get("baseurl")])[0]
        assert address == f"https://developer.download.nvidia.com/compute/cuda/repos/{folder}/"
        assert found.module_stream == stream


def test_configured_repository_is_used_unchanged():
    own = {"uris": ["https://mirror.example.com/nvidia"], "key": "/k.asc"}
    found = chosen("debian12", [T4], source="mirror", repository=own, branch="580")
    assert (found.repository, found.components) == (own, [])


def test_holds_name_the_packages_and_not_the_headers():
    assert chosen("debian12", [T4]).holds == [
        "libcuda1",
        "libnvidia-ml1",
        "nvidia-kernel-dkms",
        "nvidia-persistenced",
        "nvidia-smi",
    ]
    assert chosen("debian12", [T4], hold=False).holds == []


HELD = {"hold_kernel": True}
# columns: Ubuntu host, variables; expected kernel packages on hold
KERNEL_HOLDS = [
    ("ubuntu24", {}, []),
    ("ubuntu24", HELD, ["linux-generic", "linux-headers-generic", "linux-image-generic"]),
    (
        "ubuntu22hwe",
        {"branch": "535", **HELD},
        ["linux-generic-hwe-22.04", "linux-headers-generic-hwe-22.04", "linux-image-generic-hwe-22.04"],
    ),
    ("ubuntu24aws", HELD, ["linux-aws", "linux-headers-aws", "linux-image-aws"]),
    ("ubuntu24", {"prebuilt": False, **HELD}, []),  # no hold, because DKMS builds a module for each new kernel
    ("ubuntu24", {"kernel_module": "none", **HELD}, []),
    ("ubuntu24", {"hold": False, **HELD}, []),
]


@pytest.mark.parametrize(("host", "wanted", "kernel"), KERNEL_HOLDS)
def test_kernel_hold_includes_its_prebuilt_module(host, wanted, kernel):
    found = chosen(host, [T4], **wanted)
    assert [name for name in found.holds if name.startswith("linux-") and "nvidia" not in name] == kernel
    modules = [name for name in found.packages if name.startswith("linux-modules-nvidia-")]
    # Kernel and module are held together, because a new kernel without the held module would start without a driver.
    assert [name for name in modules if name in found.holds] == (modules if kernel else [])


def test_rhel_locks_the_driver_and_not_the_container_toolkit():
    driver = ["kmod-nvidia-open-dkms", "libnvidia-cfg", "libnvidia-ml", "nvidia-driver-cuda", "nvidia-persistenced"]
    toolkit = ["libnvidia-container1", "nvidia-container-toolkit-base", "nvidia-container-runtime", "nvidia-docker2"]
    holds = chosen("rhel9", [T4], source="cuda").holds
    assert pins.matching([*driver, *toolkit, "kernel-devel"], holds) == driver
