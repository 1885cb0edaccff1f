# SPDX-License-Identifier: Apache-2.0
"""Sets up what a driver needs on a host in addition to its packages, and reverts that setup: modprobe files, initramfs,
kernel arguments, kernel modules and services. Each step is derived from the host's state, so the next run completes an
interrupted run. A record, a file on the host, lists the changes to revert.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Container, Iterable, Mapping, NamedTuple, Sequence

from ..host.files import read_bytes, write_bytes
from ..host.host import Host
from . import facts as driver_facts

# Folder of the modprobe files, which the initramfs also contains, and folder of the systemd units.
MODPROBE, UNITS = "/etc/modprobe.d/", "/etc/systemd/system/"
CDI_REFRESH = "nvidia-cdi-refresh.service"
# Key of the record with the services that were stopped for a reload of the modules and are not started again yet.
STOPPED = "stopped"


class SetupError(Exception):
    """A step failed; the text says which step, what was found, and what to do."""


class Desired(NamedTuple):
    files: dict[str, str]
    initramfs: Sequence[str] = ()
    kernel_arguments: Sequence[str] = ()
    modules: Sequence[str] = ()
    services: Sequence[str] = ()
    rereads: dict[str, Sequence[str]] = {}
    record: str | None = None


def newer(paths: Sequence[str], files: dict[str, Any], started: float | None) -> list[str]:
    """Returns those of ``files`` (in the form of host_state) that changed after the time ``started``."""
    if not started:
        return []
    return [path for path in paths if files.get(path) and files[path]["mtime"] > started]


def no_longer_desired(
    former: Mapping[str, str | None], files: Container[str], initramfs: Sequence[str]
) -> dict[str, str | None]:
    """Returns the modprobe files that the role wrote and no longer needs, with the text that each had before (None: no
    file). ``former``: all recorded files. ``files``, ``initramfs``: as in Desired. Without a command for the initramfs
    the role leaves the kernel modules alone, so it keeps their files.
    """
    return {
        path: text for path, text in former.items() if initramfs and path.startswith(MODPROBE) and path not in files
    }


class Setup:
    """Makes the changes of one run. Afterwards ``plan``, ``reboot`` and ``files`` (before and after) show the changes
    that were made, or in check mode predicted.
    """

    def __init__(self, desired: Desired, host: Host, check_mode: bool = False) -> None:
        self.desired, self.host, self.check_mode = desired, host, check_mode
        self.plan: list[str] = []
        self.warnings: list[str] = []
        self.reboot = ""
        self.files: dict[str, tuple[str | None, str | None]] = {}

    def present(self) -> None:
        facts = driver_facts.read(self.host)
        self._start_stopped()
        former = no_longer_desired(self._record().get("files", {}), self.desired.files, self.desired.initramfs)
        self._write({**former, **self.desired.files})
        self._read_units(self.desired.files)
        if self.desired.initramfs and (former or self._wrote(MODPROBE) or facts["initramfs_old"]):
            if not self.check_mode:
                self._remember("initramfs", {"argv": list(self.desired.initramfs)})
            self._do("rebuild the initramfs", self.desired.initramfs)
        if former and not self.check_mode:
            # Only now, so that the next run after a kill still finds that the initramfs is outdated.
            self._forget_files(former)
        self._arguments()
        self._modules(facts)
        self._services()

    def absent(self) -> None:
        self._start_stopped()
        record = self._record()
        former, initramfs = record.get("files", {}), record.get("initramfs", {})
        argv = initramfs.get("argv")
        late = [path for path, text in former.items() if path.startswith(MODPROBE) and self.host.text(path) != text]
        if argv and not self.check_mode and late:
            # Record this before the files are restored, because afterwards nothing else shows that the initramfs is
            # outdated.
            self._remember("initramfs", {"due": True})
        self._write(former)
        for unit in self._read_units(former):
            self._do(f"restart {unit}, if it runs", ["systemctl", "try-restart", unit])
        if argv and (late or initramfs.get("due")):
            self._do("rebuild the initramfs", argv)
        added = record.get("kernel_arguments", [])
        if added:
            self._do(f"remove {' '.join(added)} from the kernel's arguments", self._grubby("remove-args", added))
        for name in record.get("services", []):
            if self.host.units([name])[name]["enabled"]:
                self._do(f"disable and stop {name}", ["systemctl", "disable", "--now", name])
        if self.desired.record and not self.check_mode and os.path.exists(self.host.path(self.desired.record)):
            os.unlink(self.host.path(self.desired.record))

    def _write(self, wanted: dict[str, str | None]) -> None:
        for path, text in wanted.items():
            before = self.host.text(path)
            if before != text:
                self.files[path] = (before, text)
                verb = "remove" if text is None else "write" if before is None else "change"
                self.plan.append(f"{verb} {path}")
        if self.check_mode or not self.files:
            return
        self._remember("files", {path: before for path, (before, _after) in self.files.items()})
        for path, (_before, after) in self.files.items():
            if after is None:
                os.unlink(self.host.path(path))
                if path.startswith(UNITS):
                    # Also remove the folder of a unit's drop-ins if it is empty.
                    with contextlib.suppress(OSError):
                        os.rmdir(os.path.dirname(self.host.path(path)))
            else:
                write_bytes(self.host.path(path), after.encode("utf-8"), 0o644)

    def _wrote(self, folder: str) -> bool:
        return any(path.startswith(folder) for path in self.files)

    def _read_units(self, paths: Iterable[str]) -> list[str]:
        """Reloads systemd if it has not read one of these drop-ins yet; returns the units of the drop-ins. Does not
        reload systemd without need, because a reload removes the GPUs from containers that got them in NVIDIA's legacy
        mode.
        """
        drop_ins = {path: os.path.basename(os.path.dirname(path))[:-2] for path in paths if path.startswith(UNITS)}
        found = self.host.units(sorted(set(drop_ins.values())))
        units = sorted({unit for path, unit in drop_ins.items() if path in self.files or found[unit]["stale"]})
        if units:
            self._do(f"let systemd read the unit files of {', '.join(units)}", ["systemctl", "daemon-reload"])
        return units

    def _arguments(self) -> None:
        """Adds kernel arguments by grubby, which every release of RHEL has; warns on hosts without it."""
        wanted = list(self.desired.kernel_arguments)
        if not wanted:
            return
        shown = self.host.run(["grubby", "--info=ALL"])
        if shown.rc != 0:
            words = " ".join(wanted)
            if any(word not in (self.host.text("/proc/cmdline") or "") for word in wanted):
                self.warnings.append(
                    f"add {words} to the kernel's arguments of the boot loader; this host has no grubby"
                )
            return
        lines = [line for line in shown.out.splitlines() if line.startswith("args=")]
        missing = [word for word in wanted if not lines or any(word not in line for line in lines)]
        if missing:
            if not self.check_mode:
                self._remember("kernel_arguments", missing)
            self._do(f"add {' '.join(missing)} to the kernel's arguments", self._grubby("args", missing))

    @staticmethod
    def _grubby(option: str, words: Sequence[str]) -> list[str]:
        return ["grubby", "--update-kernel=ALL", f"--{option}={' '.join(words)}"]

    def _modules(self, facts: dict[str, Any]) -> None:
        """Loads the driver's modules from disk. If older modules are loaded, replaces them unless a process
        uses them.
        """
        if not self.desired.modules or not (self.host.pci_gpus() or facts["loaded_version"]):
            return
        if facts["nouveau"]:
            self.reboot = "nouveau uses the GPUs and cannot be unloaded, because the console uses it"
            return
        loaded, on_disk = facts["loaded_version"], facts["disk_version"]
        if loaded is None:
            self._load("load the kernel modules")
        elif on_disk is not None and on_disk != loaded:
            self._reload(loaded, on_disk)

    def _reload(self, loaded: str, on_disk: str) -> None:
        # Check which processes use the driver before any service stops, because CUDA programs fail when their fabric
        # manager stops.
        modules = driver_facts.loaded_modules(self.host)
        if self._in_use(loaded, driver_facts.users(self.host, modules, driver_facts.HOLDERS)):
            return
        self.plan.append(f"reload the kernel modules, from {loaded} to {on_disk}")
        if self.check_mode:
            return
        stopped = [name for name, unit in self.host.units(driver_facts.HOLDERS).items() if unit["active"]]
        if stopped:
            self._remember(STOPPED, stopped)
            self._run("stopping the services that use the driver", ["systemctl", "stop", *stopped])
        try:
            self._swap(loaded)
        except SetupError:
            # Report this failure, and not the services that cannot start because of it. The next run starts these
            # services.
            if stopped and self.host.run(["systemctl", "start", *stopped]).rc == 0:
                self._forget(STOPPED)
            raise
        if stopped:
            self._start_again(stopped)
        if not self.reboot and self.host.units([CDI_REFRESH])[CDI_REFRESH]["enabled"]:
            # This service does its work once and ends. Run it again, because the files that it wrote name libraries of
            # the former driver.
            answer = self.host.run(["systemctl", "restart", CDI_REFRESH])
            if answer.rc != 0:
                self.warnings.append(
                    f"{CDI_REFRESH} failed, so CDI files may name the former driver: {answer.err.strip()}"
                )

    def _in_use(self, loaded: str, users: Sequence[str]) -> bool:
        if users:
            self.reboot = f"driver {loaded} is loaded and in use by {', '.join(users)}"
        return bool(users)

    def _swap(self, loaded: str) -> None:
        """Unloads the modules from the kernel and loads the modules on disk."""
        modules = driver_facts.loaded_modules(self.host)
        if self._in_use(loaded, driver_facts.users(self.host, modules)):
            return
        there = [name for name in driver_facts.MODULES if name in modules]
        # Modules of other products, such as GPUDirect's, are unloaded first and loaded again in reverse order.
        others = [name for name in reversed(there) if name not in self.desired.modules]
        for name in there:
            if self.host.run(["rmmod", name]).rc != 0:
                self.reboot = f"the kernel cannot unload the module {name} of driver {loaded}"
                # Unloading failed, so load the unloaded modules again. Loading them fails too if a module that stayed
                # loaded has another version than the files on disk.
                for one in [*self.desired.modules, *others]:
                    self.host.run(["modprobe", one])
                return
        for name in self.desired.modules:
            self._run(f"loading the kernel module {name}", ["modprobe", name])
        for name in others:
            if self.host.run(["modprobe", name]).rc != 0:
                self.warnings.append(
                    f"the kernel module {name} was loaded with driver {loaded} and does not load with the new driver; "
                    "check dkms status and dmesg"
                )

    def _start_again(self, stopped: Sequence[str]) -> None:
        argv = ["systemctl", "start", *stopped]
        if not self.reboot:
            self._run("starting the services that use the driver", argv)
        elif self.host.run(argv).rc != 0:
            # This is no error: the programs of these services are newer than the loaded module, so they start only
            # after the reboot that this host needs.
            self.warnings.append(
                f"{', '.join(stopped)} did not start again; they need the driver that the next reboot loads"
            )
        self._forget(STOPPED)

    def _start_stopped(self) -> None:
        """Starts the services that an interrupted run stopped for a reload and did not start again."""
        stopped = self._record().get(STOPPED, [])
        if not stopped:
            return
        found = self.host.units(stopped)
        idle = [name for name in stopped if found[name]["present"] and not found[name]["active"]]
        if idle:
            self._do(f"start {' '.join(idle)}, which an interrupted run had stopped", ["systemctl", "start", *idle])
        if not self.check_mode:
            self._forget(STOPPED)

    def _load(self, line: str) -> None:
        self.plan.append(line)
        if self.check_mode:
            return
        for name in self.desired.modules:
            self._run(f"loading the kernel module {name}", ["modprobe", name])

    def _services(self) -> None:
        for name, unit in self.host.units(list(self.desired.services)).items():
            if not unit["present"]:
                if not self.check_mode:
                    self.warnings.append(f"the requested unit {name} does not exist; its package may have another name")
            elif not (unit["enabled"] and unit["active"]):
                if not unit["enabled"] and not self.check_mode:
                    self._remember("services", [name])
                # If the host needs a reboot, only enable the service: it cannot start before the reboot loads the
                # module.
                now = [] if self.reboot else ["--now"]
                verb = "enable" if self.reboot else "enable and start"
                if not (self.reboot and unit["enabled"]):
                    self._do(f"{verb} {name}", ["systemctl", "enable", *now, name])
            else:
                self._reread(name, unit)

    def _reread(self, name: str, unit: dict[str, Any]) -> None:
        """Restarts a service that reads its files only at its start, if one of the files changed after that start."""
        paths = list(self.desired.rereads.get(name, ()))
        late = [path for path in paths if path in self.files]
        late = late or newer(paths, {path: self.host.file(path) for path in paths}, unit["started"])
        if late:
            self._do(f"restart {name}, which has not read {late[0]}", ["systemctl", "restart", name])

    def _do(self, line: str, argv: Sequence[str]) -> None:
        self.plan.append(line)
        if not self.check_mode:
            self._run(line, argv)

    def _run(self, what: str, argv: Sequence[str]) -> None:
        answer = self.host.run(list(argv))
        if answer.rc == 0:
            return
        said = "\n".join((answer.err.strip() or answer.out.strip()).splitlines()[-6:])
        hint = ""
        if "Key was rejected" in said or "Required key not available" in said:
            hint = "; Secure Boot is on and the kernel does not know this module's key: enrol it with mokutil --import"
        elif argv[0] == "modprobe":
            hint = "; check dkms status and dmesg"
        raise SetupError(f"{what} failed ({' '.join(argv)}, exit status {answer.rc}): {said}{hint}")

    def _record(self) -> dict[str, Any]:
        raw = read_bytes(self.host.path(self.desired.record)) if self.desired.record else None
        try:
            return {} if raw is None else dict(json.loads(raw.decode("utf-8")))
        except (ValueError, TypeError) as fault:
            raise SetupError(
                f"the record {self.desired.record} cannot be read ({fault}); restore it or remove it"
            ) from None

    def _remember(self, key: str, more: Any) -> None:
        """Adds an entry to the record; call it before the change that the entry describes. The first recorded state of
        a file is kept.
        """
        if not self.desired.record:
            return
        record = self._record()
        if isinstance(more, dict):
            record[key] = {**more, **record.get(key, {})}
        else:
            record[key] = sorted({*record.get(key, []), *more})
        self._keep(record)

    def _forget(self, key: str) -> None:
        record = self._record()
        if record.pop(key, None) is not None:
            self._keep(record)

    def _forget_files(self, paths: Container[str]) -> None:
        record = self._record()
        record["files"] = {path: text for path, text in record["files"].items() if path not in paths}
        self._keep(record)

    def _keep(self, record: dict[str, Any]) -> None:
        write_bytes(
            self.host.path(str(self.desired.record)),
            (json.dumps(record, indent=1, sort_keys=True) + "\n").encode("utf-8"),
            0o600,
        )
