# SPDX-License-Identifier: Apache-2.0
"""Names the driver's packages in each distribution and repository. No I/O.

``name=version`` pins a version; ``name=*`` allows any version; ``name=@other`` pins the driver version of the package
``other``, because the fabric manager must equal the driver to the last digit.
"""

from __future__ import annotations

import re
from typing import Any

from ..host.distribution import System
from . import repository_keys
from .support import OPEN_FIRST, PREBUILT

CUDA = "https://developer.download.nvidia.com/compute/cuda/repos"
# Maps each Debian release to its driver branches. A branch is mapped to the part by which its package names differ.
DEBIAN = {"12": {535: "", 470: "tesla-470-"}, "13": {550: "", 535: "tesla-535-"}}
# The -server branches in the archive of each Ubuntu release on 2026-11-23. A branch is left out if its packages are
# empty and only install a later branch.
UBUNTU_SERVER = {
    "20.04": (418, 450, 470, 525, 535, 550, 565, 570),
    "22.04": (418, 450, 470, 525, 535, 550, 565, 570, 575, 580, 590, 595, 615),
    "24.04": (470, 535, 550, 565, 570, 575, 580, 590, 595, 615),
    "26.04": (580, 595, 615),
}
# Kernel series of each release. A kernel of another series is a hardware-enablement kernel with other package names.
UBUNTU_KERNEL = {"20.04": "5.4.", "22.04": "5.15.", "24.04": "6.8.", "26.04": "7.0."}
# From this branch on, packages in NVIDIA's repository for Ubuntu have no branch in their names, and a driver consists
# of other packages.
CUDA_UBUNTU_UNVERSIONED = 590
# Maps a release that appeared late to the first branch in NVIDIA's repository for this release.
CUDA_FIRST = {"ubuntu2604": 595}
# Sources whose package names do not contain the branch.
REPOSITORIES = ("cuda", "mirror", "file")
ARCHITECTURES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "sbsa", "arm64": "sbsa"}
DEBIAN_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# Prefixes of the architecture in the names of Debian's kernels for clouds and for realtime.
DEBIAN_FLAVOURS = ("cloud-", "rt-")


def offered(host: System, source: str) -> tuple[int, ...] | None:
    """Returns the driver branches that a source of packages has on this system; None if it may have any branch."""
    if source != "distribution":
        return None
    if host.family == "debian":
        return tuple(sorted(DEBIAN[host.release]))
    return UBUNTU_SERVER[host.release] if host.family == "ubuntu" else ()


def packages(host: System, source: str, branch: int | None, kind: str, prebuilt: bool, version: str) -> list[str]:
    """Returns all packages of the driver without the fabric manager. ``kind``: ``open``, ``proprietary`` or ``none``.

    ``version``: exact or a pattern, for packages that have the driver's version; empty selects the branch's newest.
    """
    names, others = NAMES[host.family](host, source, branch, kind, prebuilt)
    pin = version
    if not pin and branch is not None and source in REPOSITORIES:
        # These sources hold several branches. A dnf stream limits new packages, but does not replace an installed
        # package of another branch.
        pin = f"{branch}.*"
    pinned = [name if not pin or "=" in name else f"{name}={pin}" for name in names]
    return pinned + [name if not pin or "=" in name else f"{name}=*" for name in others]


def _debian(host: System, source: str, branch: int | None, kind: str, prebuilt: bool) -> tuple[list[str], list[str]]:
    if source == "distribution":
        part = DEBIAN[host.release].get(branch or 0, "")
        user = [f"nvidia-{part}smi", f"lib{'nvidia-' if part else ''}{part}cuda1", f"libnvidia-{part}ml1"]
        module = {"open": "nvidia-open-kernel-dkms", "proprietary": f"nvidia-{part}kernel-dkms"}
        if kind == "open":
            # Pin the user space to the open modules' version: Debian updates the user space first, and until the
            # modules follow, they need the former version.
            user = [f"{name}=@{module[kind]}" for name in user]
    else:
        user = ["nvidia-driver-cuda"]
        module = {"open": "nvidia-kernel-open-dkms", "proprietary": "nvidia-kernel-dkms"}
    if kind == "none":
        return user, []
    arch = DEBIAN_ARCHITECTURES.get(host.arch, host.arch)
    # Name two packages that dkms only recommends: the headers of the running kernel, and the package that installs the
    # headers of later kernels.
    flavour = next((one for one in DEBIAN_FLAVOURS if f"-{one}" in host.kernel), "")
    headers = [f"linux-headers-{host.kernel}"] if host.kernel else []
    return [*user, module[kind]], [*headers, f"linux-headers-{flavour}{arch}", "nvidia-persistenced"]


def _ubuntu(host: System, source: str, branch: int | None, kind: str, prebuilt: bool) -> tuple[list[str], list[str]]:
    if source == "cuda" and branch is not None and branch >= CUDA_UBUNTU_UNVERSIONED:
        return _ubuntu_unversioned(host, kind)
    suffix = f"-{branch}-server" if source == "distribution" else f"-{branch}"
    user = [f"nvidia-utils{suffix}", f"libnvidia-compute{suffix}"]
    if kind == "none":
        return user, []
    flavour = ubuntu_flavour(branch, kind).partition("-server")[2]
    # nvidia-persistenced and nvidia-cuda-mps-control are in nvidia-compute-utils.
    user.append(f"nvidia-compute-utils{suffix}")
    if not prebuilt:
        return [*user, f"nvidia-headless{suffix}{flavour}"], [f"linux-headers-{host.kernel}"] if host.kernel else []
    metas = [f"{PREBUILT}{suffix[1:]}{flavour}-{host.kernel}", _ubuntu_meta(host, suffix, flavour)]
    return [*user, f"nvidia-headless-no-dkms{suffix}{flavour}"], metas


def _ubuntu_unversioned(host: System, kind: str) -> tuple[list[str], list[str]]:
    """Returns the packages of a driver whose package names contain no branch. libnvidia-compute includes the tools; the
    persistence daemon is a separate package.
    """
    user = ["libnvidia-compute"]
    if kind == "none":
        return user, []
    module = "nvidia-headless-open" if kind == "open" else "nvidia-headless"
    headers = [f"linux-headers-{host.kernel}"] if host.kernel else []
    return [*user, module, "nvidia-persistenced"], headers


def ubuntu_flavour(branch: int | None, kind: str) -> str:
    """Returns Ubuntu's name for the modules of a branch: ``580-server-open``."""
    return f"{branch}-server" + ("-open" if kind == "open" else "")


def other_branches(host: System, source: str, branch: int | None) -> list[str]:
    """Returns patterns of the packages that must not be installed with this branch. They are needed because in Ubuntu
    the packages of a retired branch can install those of a later branch, although their own version names the retired
    branch.
    """
    if host.family != "ubuntu" or source != "distribution" or branch is None:
        return []
    return ["nvidia-utils-*", "libnvidia-compute-*", f"!*-{branch}-server"]


def _ubuntu_meta(host: System, suffix: str, flavour: str) -> str:
    """Returns the package that installs the signed module for every later kernel of this flavour."""
    return f"{PREBUILT}{suffix[1:]}{flavour}-{_ubuntu_kernel(host)}"


def _ubuntu_kernel(host: System) -> str:
    """Returns the suffix of the packages that follow the newest kernel of this flavour: generic,
    generic-hwe-24.04, aws.
    """
    kernel = re.sub(r"^[\d.]+-\d+-", "", host.kernel)
    newer = f"-hwe-{host.release}" if not host.kernel.startswith(UBUNTU_KERNEL[host.release]) else ""
    return kernel + (newer if kernel == "generic" else "")


def _el(host: System, source: str, branch: int | None, kind: str, prebuilt: bool) -> tuple[list[str], list[str]]:
    user = ["nvidia-driver-cuda"]
    if kind == "none":
        return user, []
    module = "kmod-nvidia-open-dkms" if kind == "open" else "kmod-nvidia-latest-dkms"
    return [*user, module], [*_el_headers(host), "kernel-headers", "nvidia-persistenced"]


def _el_headers(host: System) -> list[str]:
    """Returns the packages that building a module for the running kernel needs. ``kernel-devel-matched`` would install
    the newest kernel instead.

    Empty if the headers exist: rpm keeps several versions of such a package and reports only the newest.
    """
    if host.headers:
        return []
    kernel, _plus, flavour = host.kernel.partition("+")
    version = kernel[: -len(host.arch) - 1] if kernel.endswith("." + host.arch) else kernel
    flavour = "uek" if "uek" in version else flavour
    name = f"kernel-{flavour}-devel" if flavour else "kernel-devel"
    # A kernel that does not come from the distribution has a headers package with another name.
    return [f"{name}={version}" if re.search(r"\.el\d", version) else name]


def _sles(host: System, source: str, branch: int | None, kind: str, prebuilt: bool) -> tuple[list[str], list[str]]:
    user = ["nvidia-compute-utils-G06", "nvidia-compute-G06"]
    if kind == "none":
        return user, []
    flavour = host.kernel.rpartition("-")[2] or "default"
    module = (
        f"nvidia-open-driver-G06-signed-cuda-kmp-{flavour}" if kind == "open" else f"nvidia-driver-G06-kmp-{flavour}"
    )
    return [module, *user], ["nvidia-persistenced"]


NAMES = {"debian": _debian, "ubuntu": _ubuntu, "el": _el, "sles": _sles}


def module_stream(host: System, branch: int | None, kind: str) -> str:
    """Returns the module stream of dnf, empty if the release has none (RHEL 10 and later)."""
    if host.family != "el" or host.release not in ("8", "9"):
        return ""
    if kind == "open":
        return f"{branch}-open" if branch and branch >= OPEN_FIRST else "open-dkms"
    return f"{branch}-dkms" if branch else "latest-dkms"


def fabric_manager(host: System, source: str, branch: int, user_space: str, version: str) -> list[str]:
    """Returns the packages of the fabric manager and its library, pinned to exactly the driver's version.
    ``user_space``: a package that has the driver's version. In Ubuntu's archive, and before branch 580 in NVIDIA's
    repository for apt, both package names contain the branch.
    """
    by_branch = source == "distribution" or branch < 580
    suffix = f"-{branch}" if by_branch and host.manager == "apt" else ""
    manager = "nvidia-fabricmanager" if host.manager == "apt" else "nvidia-fabric-manager"
    pin = f"{version}*" if version and host.manager == "apt" and "*" not in version else version or f"@{user_space}"
    return [f"{manager}{suffix}={pin}", f"libnvidia-nscq{suffix}={pin}"]


def cuda_repository(host: System) -> dict[str, Any]:
    """Returns NVIDIA's CUDA repository for this release, with the address and the fingerprint of its key."""
    base = f"{CUDA}/{host.cuda_name}/{ARCHITECTURES.get(host.arch, host.arch)}/"
    key = repository_keys.CUDA[host.cuda_name]
    signed = {"key_url": base + key.file, "key_fingerprint": key.fingerprint}
    if host.manager == "apt":
        return {"uris": [base], "suites": ["/"], "components": [], **signed}
    return {"baseurl": base, **signed}


def hold_patterns(host: System, names: list[str], kernel: bool) -> list[str]:
    """Returns the packages to hold: exact names for apt and zypper, patterns that include dependencies for dnf.

    ``kernel``: whether to hold also the kernel for which modules were built; if false, the modules follow the kernel
    and are not held. The patterns exclude the container toolkit, because it has its own versions and another role
    manages it.
    """
    if host.manager == "apt":
        held = {name.partition("=")[0] for name in names if not name.startswith("linux-headers-")}
        prebuilt = {name for name in held if name.startswith(PREBUILT)}
        if not kernel:
            # Do not hold the modules, because a newer kernel would then boot without a module, and so without GPUs.
            return sorted(held - prebuilt)
        return sorted(held | {f"linux-{part}{_ubuntu_kernel(host)}" for part in ("", "image-", "headers-") if prebuilt})
    if host.manager == "dnf":
        return ["*nvidia*", "!*nvidia-container*", "!nvidia-docker2"]
    return sorted({name.partition("=")[0] for name in names})
