# SPDX-License-Identifier: Apache-2.0
"""Decides, before any installation, which NVIDIA driver a host gets, with which packages and files. This file does no
I/O: ``choose`` gets the state that ``host_state`` read, and the role's variables. If a combination cannot work,
``choose`` returns a refusal, a sentence with the cause, the found state and the remedy.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from ..host import distribution
from ..host.distribution import System
from . import host_files
from . import packages as driver_packages
from . import support as driver_support

SOURCES = ("distribution", "cuda", "mirror", "file", "present")
SUBNET_MANAGER = "nvlsm"
# Modules to load, in this order; the kernel loads NVIDIA's other modules as their dependencies.
MODULES = ["nvidia", "nvidia_uvm", "nvidia_modeset"]
# All these units and packages, and host_files.FILES, are read before ``choose`` runs, because only ``choose`` decides
# which of them matter on this host.
UNITS = ["nvidia-persistenced.service", "nvidia-fabricmanager.service", "nvidia-gridd.service"]
PACKAGE_PATTERNS = ["*nvidia*", "libcuda1", "linux-*", "kernel-devel*", "kernel-*-devel", "kernel-headers", "nvlsm"]

DEFAULTS: dict[str, Any] = {
    "source": "distribution",
    "branch": "",
    "version": "",
    "kernel_module": "auto",
    "prebuilt": "auto",
    "memacct": "",
    "packages": [],
    "repository": {},
    "files": [],
    "persistenced": True,
    "fabric_manager": "auto",
    "hold": True,
    "hold_kernel": False,
    "vgpu_guest": False,
    "vgpu_feature": "vcs",
    "vgpu_license_server": "",
    "vgpu_token_file": "",
    "vgpu_token_sha256": "",
}


class Choice(NamedTuple):
    """Describes the changes that the role makes. With empty ``refusals`` the role may start. Every
    part is plain data.
    """

    branch: int | None
    kernel_module: str
    manager: str
    packages: list[str]
    repository: dict[str, Any]
    files_of_packages: list[str]
    module_stream: str
    components: list[str]
    holds: list[str]
    files: dict[str, str]
    initramfs: list[str]
    kernel_arguments: list[str]
    services: list[str]
    rereads: dict[str, list[str]]
    modules: list[str]
    reboot: str
    warnings: list[str]
    refusals: list[str]
    # Packages that must not be installed as dependencies.
    refuse: Sequence[str] = ()


NOTHING = Choice(None, "none", "", [], {}, [], "", [], [], {}, [], [], [], {}, [], "", [], [])


def choose(state: dict[str, Any], wanted: dict[str, Any]) -> Choice:
    """Returns the changes for a host. ``state``: ``os``, ``pci_gpus``, ``nvswitches``, ``driver`` of host_state.
    ``wanted``: the role's settings, with the keys of DEFAULTS.
    """
    wanted = {**DEFAULTS, **{key: value for key, value in wanted.items() if key in DEFAULTS}}
    refusals = inputs(wanted)
    host = distribution.system(state["os"])
    if refusals:
        return NOTHING._replace(refusals=refusals)
    if wanted["source"] == "present":
        return _present(state, wanted)
    if host is None:
        name = state["os"].get("name") or state["os"].get("id") or "an unknown system"
        if wanted["packages"]:
            kind = str(wanted["kernel_module"])
            reboot = reboot_reason(state["driver"], kind, str(wanted["version"]))
            modules = [] if kind == "none" else MODULES
            return NOTHING._replace(packages=_pinned(wanted), kernel_module=kind, modules=modules, reboot=reboot)
        return NOTHING._replace(
            refusals=[f"{name} has no known driver packages; supported systems: {distribution.SUPPORTED}"]
        )
    return _install(host, state, wanted)


def inputs(wanted: dict[str, Any]) -> list[str]:
    """Returns the errors of the role's settings that do not depend on the host."""
    said = []
    source, version, branch = wanted["source"], str(wanted["version"]), str(wanted["branch"])
    if source not in SOURCES:
        said.append(f"nvidia_driver_source: expected one of {', '.join(SOURCES)}, found {source}")
    if driver_support.too_old(version) or (branch.isdigit() and int(branch) < driver_support.OLDEST_DRIVER[0]):
        which = "version" if version else "branch"
        said.append(f"nvidia_driver_{which} {version or branch} is too old; expected 384.81 or newer")
    if branch and not branch.isdigit():
        said.append(f"nvidia_driver_branch: expected a number such as 580, found {branch}")
    of_version = driver_support.branch_of(version) if version else None
    if branch.isdigit() and of_version is not None and of_version != int(branch):
        said.append(
            f"nvidia_driver_version {version} does not belong to nvidia_driver_branch {branch}; set only one of them"
        )
    if source in ("mirror", "file") and not (wanted["repository"] or wanted["files"]):
        need = "nvidia_driver_files" if source == "file" else "nvidia_driver_repository"
        said.append(f"nvidia_driver_source is {source} and {need} is empty; set it to the place of the packages")
    if wanted["vgpu_guest"] and source in ("distribution", "cuda"):
        said.append(
            "nvidia_driver_vgpu_guest: a vGPU guest needs NVIDIA's guest driver of its host's branch, and no public "
            "repository has that driver; set nvidia_driver_source to mirror or file"
        )
    if wanted["memacct"] not in ("", *host_files.MEMACCT):
        said.append(
            f"nvidia_driver_memacct: expected one of {', '.join(host_files.MEMACCT)}, found {wanted['memacct']}"
        )
    elif wanted["memacct"] and branch.isdigit() and int(branch) < host_files.MEMACCT_BRANCH:
        said.append(
            f"nvidia_driver_memacct has no effect on branch {branch}; expected {host_files.MEMACCT_BRANCH} or newer"
        )
    if wanted["vgpu_feature"] not in host_files.FEATURE_TYPES:
        features = ", ".join(host_files.FEATURE_TYPES)
        said.append(f"nvidia_driver_vgpu_feature: expected one of {features}, found {wanted['vgpu_feature']}")
    return said


def _present(state: dict[str, Any], wanted: dict[str, Any]) -> Choice:
    """Handles a driver that the collection does not install, because an image or a driver container brings it. Only
    checks that the driver is present and new enough.
    """
    loaded = state["driver"].get("loaded_version") or state.get("nvml", {}).get("driver_version")
    if loaded is None and wanted["kernel_module"] != "none":
        found = "nvidia_driver_source is present and no driver is loaded; start the driver, or choose another source"
        return NOTHING._replace(refusals=[found])
    if loaded and driver_support.too_old(loaded):
        return NOTHING._replace(refusals=[f"driver {loaded} is loaded and too old; expected 384.81 or newer"])
    branch = driver_support.branch_of(loaded or "")
    return NOTHING._replace(branch=branch)


def _install(host: System, state: dict[str, Any], wanted: dict[str, Any]) -> Choice:
    driver, gpus = state["driver"], state.get("pci_gpus") or []
    host = host._replace(headers=bool(driver.get("headers")))
    found = driver_support.generations(gpus)
    warnings = [
        f"the GPU {device} is not in the table of known GPUs, so its supported branches are unknown"
        for device in driver_support.unknown_gpus(gpus)
    ]
    branch, refusals = _branch(host, wanted, found)
    kind = str(wanted["kernel_module"])
    if kind == "auto":
        kind = driver_support.modules_for(branch, found)
    if branch is not None:
        refusals += driver_support.unsupported(branch, found)
    if kind != "none":
        refusals += driver_support.wrong_modules(kind, branch, found)
    if kind != "none" and not gpus:
        refusals.append(
            "no NVIDIA GPU is on the PCI bus of this host, so it needs no driver; remove the host from the group, or "
            "set nvidia_driver_kernel_module: none if the GPU is not a PCI device"
        )
    refusals += _in_the_way(host, driver)
    refusals += _sources(host, wanted, kind, branch)
    prebuilt = _prebuilt(host, wanted)
    if prebuilt and kind != "none" and not refusals:
        prebuilt, more, less = _signed(host, wanted, driver, driver_packages.ubuntu_flavour(branch, kind))
        refusals += more
        warnings += less
    if not refusals:
        refusals += _secure_boot(host, driver, kind, prebuilt)
    names = _pinned(wanted)
    if not names and wanted["files"]:
        names = [package_of(path) for path in wanted["files"]]
    elif not names:
        names = driver_packages.packages(host, wanted["source"], branch, kind, prebuilt, str(wanted["version"]))
    services = ["nvidia-persistenced.service"] if kind != "none" and wanted["persistenced"] else []
    if _wants_fabric_manager(state, wanted):
        more, said = _fabric_manager(host, wanted, branch, names)
        names += more
        refusals += said
        services.append("nvidia-fabricmanager.service")
        if driver.get("nvlink5") and not (state.get("packages") or {}).get(SUBNET_MANAGER):
            warnings.append(
                f"the NVSwitches of this host use NVLink 5, so the fabric manager also needs {SUBNET_MANAGER} and "
                "infiniband-diags (CUDA repository) and the kernel module ib_umad; this role does not install them"
            )
    files, initramfs, arguments = host_files.of_host(host, wanted, kind, str(driver.get("registry") or ""))
    if wanted["vgpu_guest"]:
        services.append("nvidia-gridd.service")
    if refusals:
        return NOTHING._replace(branch=branch, kernel_module=kind, warnings=warnings, refusals=refusals)
    return Choice(
        branch=branch,
        kernel_module=kind,
        manager=host.manager,
        packages=names,
        repository=_repository(host, wanted),
        files_of_packages=list(wanted["files"]),
        module_stream=driver_packages.module_stream(host, branch, kind) if wanted["source"] == "cuda" else "",
        components=_components(host, wanted),
        holds=driver_packages.hold_patterns(host, names, bool(wanted["hold_kernel"])) if wanted["hold"] else [],
        files=files,
        initramfs=initramfs,
        kernel_arguments=arguments,
        services=services,
        rereads={name: files for name, files in host_files.REREADS.items() if name in services},
        modules=[] if kind == "none" else MODULES,
        reboot=reboot_reason(driver, kind, str(wanted["version"])),
        warnings=warnings,
        refusals=[],
        refuse=driver_packages.other_branches(host, wanted["source"], branch) if not wanted["packages"] else [],
    )


def _pinned(wanted: dict[str, Any]) -> list[str]:
    """Returns the packages that the user named. An entry without a version gets the version that the user set for all
    packages.
    """
    version = str(wanted["version"])
    return [name if "=" in name or not version else f"{name}={version}" for name in wanted["packages"]]


def package_of(path: str) -> str:
    """Returns the package of a file's name: ``name_version_arch.deb`` or ``name-version-release.arch.rpm``."""
    base = path.rpartition("/")[2]
    return base.partition("_")[0] if base.endswith(".deb") else base.rsplit("-", 2)[0]


def _branch(
    host: System, wanted: dict[str, Any], found: Sequence[tuple[str, driver_support.Generation]]
) -> tuple[int | None, list[str]]:
    """Returns the requested driver branch, or the newest branch that drives every GPU of the host."""
    offered = driver_packages.offered(host, wanted["source"])
    asked = int(wanted["branch"]) if wanted["branch"] else driver_support.branch_of(str(wanted["version"]))
    if offered == ():
        way_out = "set nvidia_driver_source to cuda, mirror or file"
        return asked, [f"{host.name} has no NVIDIA driver in its own repositories; {way_out}"]
    if asked is not None:
        if offered is not None and asked not in offered and not wanted["packages"]:
            have = ", ".join(str(one) for one in offered)
            return asked, [
                f"{host.name} has the branches {have} and not {asked}; choose one of these, or "
                "set nvidia_driver_source to cuda or mirror"
            ]
        return asked, []
    if wanted["source"] in ("mirror", "file"):
        return None, []
    first = driver_packages.CUDA_FIRST.get(host.cuda_name, 0) if wanted["source"] == "cuda" else 0
    usual = offered or [one for one in driver_support.BRANCHES if one >= first]
    if host.family == "debian" and wanted["source"] == "distribution" and not found:
        return next(one for one, part in driver_packages.DEBIAN[host.release].items() if not part), []
    branch = driver_support.newest_branch(found, usual)
    if branch is None:
        kinds = ", ".join(sorted({one.name for _address, one in found}))
        where = f"{host.name} has" if offered else "NVIDIA has"
        return None, [
            f"{where} no branch that drives all GPUs of this host together ({kinds}); move some GPUs to another host, "
            "or choose another nvidia_driver_source"
        ]
    return branch, []


def _in_the_way(host: System, driver: dict[str, Any]) -> list[str]:
    """Finds a driver that was installed by another method, which must not be mixed with the chosen method."""
    said = []
    if driver.get("container"):
        said.append(
            "a driver container provides the driver below /run/nvidia/driver; set nvidia_driver_source to present, or "
            "remove the container first"
        )
    if driver.get("runfile"):
        said.append(
            "NVIDIA's runfile installed a driver here (/usr/bin/nvidia-uninstall belongs to no package); run "
            "nvidia-uninstall first, or set nvidia_driver_source to present"
        )
    return said


def _sources(host: System, wanted: dict[str, Any], kind: str, branch: int | None) -> list[str]:
    """Returns a refusal if no packages exist for this combination of system, source and kernel modules."""
    if wanted["packages"]:
        return []
    source, said = wanted["source"], []
    if source == "distribution" and host.family == "debian":
        part = driver_packages.DEBIAN[host.release].get(branch or 0, "")
        if part and kind == "open":
            said.append(
                f"{host.name} has branch {branch} with proprietary kernel modules only; set "
                "nvidia_driver_kernel_module: proprietary or nvidia_driver_source: cuda"
            )
    if source == "cuda" and host.family == "ubuntu" and host.release == "20.04" and branch and branch > 570:
        said.append(
            f"the CUDA repository of Ubuntu 20.04 is frozen and ends with branch 570; it does not have branch {branch}"
        )
    if source == "cuda" and host.family == "debian" and branch is not None and branch < 560:
        said.append(
            f"the CUDA repository of Debian has compute-only packages from branch 560 on, not of branch {branch}"
        )
    return said


def _prebuilt(host: System, wanted: dict[str, Any]) -> bool:
    """Returns whether the distribution ships kernel modules that are already built and signed. Otherwise DKMS builds
    them on the host.
    """
    if host.family != "ubuntu" or wanted["source"] != "distribution" or not host.kernel:
        return False
    return wanted["prebuilt"] in ("auto", True)


def _signed(
    host: System, wanted: dict[str, Any], driver: dict[str, Any], flavour: str
) -> tuple[bool, list[str], list[str]]:
    """Returns (whether to use Ubuntu's signed modules for the running kernel, refusals, warnings). ``flavour``: their
    kind, such as ``580-server-open``. Ubuntu's archive keeps them only for kernels of the last months. If the host has
    not read the archive's lists (``signed_modules`` is None), the modules count as available.
    """
    there = driver.get("signed_modules")
    if there is None or flavour in there:
        return True, [], []
    missing = f"{host.name} has no signed module of {flavour} for kernel {host.kernel}"
    kernel = "install a kernel that has a signed module and reboot"
    if wanted["prebuilt"] is True:
        return (
            True,
            [f"{missing}: {kernel}, or set nvidia_driver_prebuilt to auto or false to build the module by DKMS"],
            [],
        )
    if driver.get("secure_boot") and driver.get("signing_key") != "enrolled":
        key = "/var/lib/shim-signed/mok/MOK.der"
        way_out = f"{kernel}; or mokutil --import {key}, reboot, and confirm it on the console"
        return True, [f"{missing}, and Secure Boot refuses a module that DKMS builds: {way_out}"], []
    return False, [], [f"{missing}, so DKMS builds the module on the host; for a signed module, {kernel}"]


def _secure_boot(host: System, driver: dict[str, Any], kind: str, prebuilt: bool) -> list[str]:
    """Returns a refusal if the kernel would not load the modules because of Secure Boot, which admits only modules
    whose signer is trusted. So the fault is found before the installation.
    """
    if kind == "none" or not driver.get("secure_boot") or prebuilt:
        return []
    if host.family == "sles" and kind == "open":
        return []
    signing = driver.get("signing_key")
    if signing == "enrolled":
        return []
    key = "/var/lib/shim-signed/mok/MOK.der" if host.family == "ubuntu" else "/var/lib/dkms/mok.pub"
    enrol = f"mokutil --import {key}, reboot, and confirm it on the console"
    if host.family == "ubuntu":
        enrol = f"set nvidia_driver_prebuilt to auto for modules that Ubuntu signed; or {enrol}"
    state = "no signing key exists yet (dkms generate_mok makes one)" if signing is None else "its key is not enrolled"
    return [
        f"Secure Boot is on, the kernel modules are built on the host, and {state}; the kernel would refuse them. "
        f"{enrol}; or switch Secure Boot off"
    ]


def _wants_fabric_manager(state: dict[str, Any], wanted: dict[str, Any]) -> bool:
    if wanted["kernel_module"] == "none" or wanted["fabric_manager"] is False:
        return False
    return wanted["fabric_manager"] is True or bool(state.get("nvswitches"))


def _fabric_manager(
    host: System, wanted: dict[str, Any], branch: int | None, names: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Returns the fabric manager's packages, and refusals. On machines with NVSwitch CUDA fails with error 802 without
    a fabric manager of exactly the driver's version.
    """
    why = "this host has NVSwitch, which needs a fabric manager of exactly the driver's version"
    if host.family == "debian" and wanted["source"] == "distribution":
        return [], [f"{why}, and Debian has none; set nvidia_driver_source to cuda"]
    if branch is None:
        return [], [f"{why}; set nvidia_driver_branch, because the name of its package contains the branch"]
    version = str(wanted["version"])
    # Pin the fabric manager to a package that has the driver's version. Do not use a kmp package of SLES, because its
    # version also names the kernel.
    user = next((name.partition("=")[0] for name in names if "-kmp-" not in name), "")
    return driver_packages.fabric_manager(
        host, wanted["source"], branch, user, version if "*" not in version else ""
    ), []


def _repository(host: System, wanted: dict[str, Any]) -> dict[str, Any]:
    if wanted["repository"]:
        return dict(wanted["repository"])
    return driver_packages.cuda_repository(host) if wanted["source"] == "cuda" else {}


def _components(host: System, wanted: dict[str, Any]) -> list[str]:
    if wanted["source"] != "distribution":
        return []
    # Ubuntu keeps branches that NVIDIA no longer supports in its component multiverse.
    ubuntu = ["restricted", "multiverse"]
    return {"debian": ["contrib", "non-free", "non-free-firmware"], "ubuntu": ubuntu}.get(host.family, [])


def touches_host(wanted: dict[str, Any]) -> bool:
    """Returns whether the host needs more than packages: files, modules or services."""
    return wanted["kernel_module"] != "none" or bool(wanted.get("vgpu_guest"))


def reboot_reason(driver: dict[str, Any], kind: str, version: str = "") -> str:
    """Returns why only a reboot can load the driver on disk; empty if reloading the modules may suffice."""
    if kind == "none":
        return ""
    if driver.get("nouveau"):
        return "nouveau uses the GPUs and cannot be unloaded, because the console uses it"
    if not driver.get("loaded_version"):
        return ""
    users = driver.get("in_use") or []
    replaced = version and "*" not in version and driver["loaded_version"] != driver_support.upstream(version)
    on_disk = driver.get("disk_version")
    if (replaced or (on_disk and on_disk != driver["loaded_version"])) and users:
        return f"driver {driver['loaded_version']} is loaded and in use by {', '.join(users)}"
    return ""
