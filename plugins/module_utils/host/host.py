# SPDX-License-Identifier: Apache-2.0
"""Reads the hardware, packages, units and processes of a host from files below one root folder.

Every read of /proc, /sys, /etc and /var goes through ``Host``. Tests create a host's files in a folder and pass that
folder as root. ``run`` starts programs; tests replace it by a table of outputs.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from typing import Any, Callable, NamedTuple, Sequence

NVIDIA_VENDOR = "0x10de"
# PCI classes of GPUs: VGA controller, 3D controller, display controller.
DISPLAY_CLASSES = ("0x0300", "0x0302", "0x0380")
# Form in which rpm prints the name and version of a package. It equals QUERY of packages/rpm_host.py, so that the plan
# and the roles compare the same versions.
RPM_QUERY = "%{NAME} %|EPOCH?{%{EPOCH}:}:{}|%{VERSION}-%{RELEASE}\\n"


class Answer(NamedTuple):
    rc: int
    out: str
    err: str


UNIT_ABSENT: dict[str, Any] = {
    "present": False,
    "masked": False,
    "enabled": False,
    "active": False,
    "failed": False,
    "stale": False,
    "started": None,
    "argv": [],
    "exe": "",
    "old_driver": False,
}
# Libraries of the driver. A running program continues to use the library files that it has loaded, so after an upgrade
# it may still use the former driver's files.
DRIVER_LIBRARIES = ("/libnvidia-ml.so", "/libcuda.so")

Runner = Callable[[Sequence[str]], Answer]


def run_program(argv: Sequence[str], timeout: int = 60) -> Answer:
    """Runs a program with a plain environment. Returns the exit status 127 if the program cannot be started, and 124 if
    it hangs.
    """
    environment = dict(os.environ, LC_ALL="C", LANG="C")
    try:
        done = subprocess.run(
            list(argv), stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=timeout, check=False
        )
    except OSError as fault:
        return Answer(127, "", str(fault))
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"{argv[0]} did not answer within {timeout} s")
    return Answer(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


class Host:
    """Reads the host whose root folder is ``root``."""

    def __init__(self, root: str = "/", run: Runner = run_program) -> None:
        self.root = root
        self.run = run

    def path(self, path: str) -> str:
        return os.path.join(self.root, path.lstrip("/"))

    def real(self, path: str) -> str:
        """Returns a path on the host with its links resolved."""
        found, top = os.path.realpath(self.path(path)), os.path.realpath(self.root)
        return found if top == "/" else "/" + os.path.relpath(found, top)

    def text(self, path: str) -> str | None:
        """Returns the text of a file, None if the file is missing."""
        try:
            with open(self.path(path), encoding="utf-8", errors="replace") as stream:
                return stream.read()
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """Returns the names in a folder, sorted; empty for a missing folder."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []

    def link(self, path: str) -> str | None:
        """Returns the target of a symbolic link, None if there is no link."""
        try:
            return os.readlink(self.path(path))
        except OSError:
            return None

    def file(self, path: str) -> dict[str, Any] | None:
        """Returns digest, mode and modification time of a file, None if the file is missing."""
        try:
            with open(self.path(path), "rb") as stream:
                content = stream.read()
                status = os.fstat(stream.fileno())
        except OSError:
            return None
        return {
            "sha256": hashlib.sha256(content).hexdigest(),
            "mode": f"{status.st_mode & 0o7777:04o}",
            "mtime": status.st_mtime,
        }

    def os_release(self) -> dict[str, str]:
        """Returns the fields of os-release that the plan reads, and facts of the machine: kernel, Python, SELinux,
        root.
        """
        text = self.text("/etc/os-release") or self.text("/usr/lib/os-release") or ""
        fields = dict(re.findall(r'^([A-Z_]+)="?([^"\n]*)"?$', text, re.MULTILINE))
        enforced = (self.text("/sys/fs/selinux/enforce") or "").strip()
        return {
            "id": fields.get("ID", ""),
            "id_like": fields.get("ID_LIKE", ""),
            "version_id": fields.get("VERSION_ID", ""),
            "codename": fields.get("VERSION_CODENAME", ""),
            "name": fields.get("PRETTY_NAME", ""),
            "arch": platform.machine(),
            "kernel": platform.release(),
            "python": ".".join(str(part) for part in sys.version_info[:3]),
            "root": str(os.geteuid() == 0).lower(),
            "selinux": {"0": "permissive", "1": "enforcing"}.get(enforced, ""),
        }

    def node_name(self) -> str:
        """Returns the name by which a kubelet registers the host by default. This is the kernel's whole host name in
        lower case, with its domain if it has one; empty if the kernel has no host name.
        """
        return (self.text("/proc/sys/kernel/hostname") or "").strip().lower()

    def memory_mib(self) -> int:
        """Returns all memory of the host in MiB, 0 if the kernel does not report it."""
        found = re.search(r"^MemTotal:\s+(\d+) kB$", self.text("/proc/meminfo") or "", re.MULTILINE)
        return int(found.group(1)) // 1024 if found else 0

    def pci_gpus(self) -> list[dict[str, str]]:
        """Lists NVIDIA's GPUs on the PCI bus, in bus order. Works before any driver is installed."""
        found = []
        for address in self.names("/sys/bus/pci/devices"):
            folder = f"/sys/bus/pci/devices/{address}"
            vendor = (self.text(f"{folder}/vendor") or "").strip()
            kind = (self.text(f"{folder}/class") or "").strip()
            if vendor == NVIDIA_VENDOR and kind[:6] in DISPLAY_CLASSES:
                found.append({"address": address, "device": (self.text(f"{folder}/device") or "").strip()})
        return found

    def driver(self) -> dict[str, Any]:
        """Returns the version of the loaded driver module, and whether nouveau is loaded instead."""
        version = re.search(r"Kernel Module\s+(?:for \S+\s+)?([0-9.]+)", self.text("/proc/driver/nvidia/version") or "")
        modules = re.findall(r"^(\S+) ", self.text("/proc/modules") or "", re.MULTILINE)
        return {"loaded_version": version.group(1) if version else None, "nouveau": "nouveau" in modules}

    def packages(self, names: Sequence[str]) -> dict[str, str | None]:
        """Maps each package to its installed version, or to None if it is not fully installed. A name with ``*`` is a
        pattern; it adds every installed package that matches.
        """
        if not names:
            return {}
        status = self.text("/var/lib/dpkg/status")
        if status is not None:
            return dpkg_versions(status, names)
        return self._rpm_versions(names)

    def held(self) -> list[str]:
        """Returns the packages that dpkg holds at their version; empty for other package managers."""
        return dpkg_held(self.text("/var/lib/dpkg/status") or "")

    def _rpm_versions(self, names: Sequence[str]) -> dict[str, str | None]:
        answer = self.run(["rpm", "-qa", "--qf", RPM_QUERY, *names])
        installed = (line.partition(" ")[::2] for line in answer.out.splitlines())
        return matching({name: version for name, version in installed if version and " " not in version}, names)

    def argv(self, pid: int) -> list[str]:
        """Returns the command line of a running process, empty if the process is gone."""
        return [word for word in (self.text(f"/proc/{pid}/cmdline") or "").split("\0") if word] if pid else []

    def exe(self, pid: int) -> str:
        """Returns the program file of a running process with its links resolved, empty if the process is gone."""
        return (self.link(f"/proc/{pid}/exe") or "") if pid else ""

    def old_driver(self, pid: int) -> bool:
        """Returns whether a process uses a driver library whose file on disk was replaced or removed after the process
        loaded it.
        """
        lines = (self.text(f"/proc/{pid}/maps") or "").splitlines() if pid else []
        return any(line.endswith(" (deleted)") and any(one in line for one in DRIVER_LIBRARIES) for line in lines)

    def units(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Returns the state of systemd units, read in one call. Without systemd every unit is absent."""
        found: dict[str, dict[str, Any]] = {name: dict(UNIT_ABSENT) for name in names}
        if not names:
            return found
        properties = "Id,LoadState,ActiveState,UnitFileState,NeedDaemonReload,MainPID,ExecMainStartTimestampMonotonic"
        answer = self.run(["systemctl", "show", "--no-pager", "-p", properties, *names])
        # systemctl prints one block for each unit, in the order of the arguments. Assign the blocks by this order,
        # because the field Id of an alias has the unit's real name.
        for name, block in zip(names, answer.out.strip().split("\n\n")):
            fields = dict(line.partition("=")[::2] for line in block.splitlines())
            facts = unit_facts(fields)
            if not facts["present"]:
                continue
            started = int(fields.get("ExecMainStartTimestampMonotonic") or 0)
            found[name] = {
                **facts,
                "stale": fields.get("NeedDaemonReload") == "yes",
                # Wall-clock time of the unit's start. It is compared with the modification times of the files that the
                # unit reads at its start.
                "started": time.time() - (time.monotonic() - started / 1e6) if started else None,
                "argv": self.argv(int(fields.get("MainPID") or 0)),
                "exe": self.exe(int(fields.get("MainPID") or 0)),
                "old_driver": self.old_driver(int(fields.get("MainPID") or 0)),
            }
        return found


# States in which a unit counts as enabled: it starts at boot, or it cannot be enabled because another unit starts it.
AT_BOOT = ("enabled", "static", "alias", "indirect", "generated", "transient")


def unit_facts(fields: dict[str, str]) -> dict[str, bool]:
    """Returns a unit's state from the fields that ``systemctl show`` prints."""
    load = fields.get("LoadState") or "not-found"
    return {
        "present": load != "not-found",
        "masked": load == "masked",
        "enabled": fields.get("UnitFileState") in AT_BOOT,
        "active": fields.get("ActiveState") in ("active", "reloading"),
        "failed": fields.get("ActiveState") == "failed",
    }


def dpkg_versions(status: str, names: Sequence[str]) -> dict[str, str | None]:
    """Returns the versions of installed packages from the text of dpkg's status file. A package that dpkg left half
    configured must be installed again, so it counts as absent.
    """
    installed: dict[str, str] = {}
    for block in status.split("\n\n"):
        head = re.match(r"(?:\A|\n*)Package: (\S+)", block)
        if head is None:
            continue
        state = re.search(r"^Status: \S+ \S+ (\S+)$", block, re.MULTILINE)
        version = re.search(r"^Version: (\S+)$", block, re.MULTILINE)
        if state and version and state.group(1) == "installed":
            installed[head.group(1)] = version.group(1)
    return matching(installed, names)


def dpkg_held(status: str) -> list[str]:
    """Returns the packages that dpkg holds at their version."""
    found = (re.match(r"\n*Package: (\S+)\nStatus: hold ", block) for block in status.split("\n\n"))
    return sorted(one.group(1) for one in found if one)


def matching(installed: dict[str, str], names: Sequence[str]) -> dict[str, str | None]:
    """Returns the installed packages that match the names or patterns."""
    versions: dict[str, str | None] = {name: installed.get(name) for name in names if "*" not in name}
    patterns = [re.compile(fnmatch.translate(name)) for name in names if "*" in name]
    versions.update({name: one for name, one in installed.items() if any(p.match(name) for p in patterns)})
    return versions
