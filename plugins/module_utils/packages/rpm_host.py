# SPDX-License-Identifier: Apache-2.0
"""Runs the programs rpm, dnf and zypper on this host. Tests replace this object by another one. dnf's Python library is
not used, because it works only with the system's own Python, which on RHEL 8 is too old for Ansible.
"""

from __future__ import annotations

import contextlib
import glob
import http.client
import os
from typing import Container, Sequence

from ansible.module_utils.urls import open_url

from ..host.files import write_bytes
from . import manager as package_manager
from . import rpm_text

KEYS = "/etc/pki/rpm-gpg"
MODULES = "/etc/dnf/modules.d"
VERSIONLOCK_CONF = "/etc/dnf/plugins/versionlock.conf"
VERSIONLOCK_LIST = "/etc/dnf/plugins/versionlock.list"
ZYPPER_LOCKS = "/etc/zypp/locks"
REPOSITORIES = {"dnf": "/etc/yum.repos.d", "zypper": "/etc/zypp/repos.d"}
# zypper's exit statuses that are no failure. They mean success, available updates, or an advised reboot or restart.
ZYPPER_FINE = (0, 100, 101, 102, 103)
ZYPPER_NOTHING_FOUND = 104
# zypper's exit status if it skipped an unreadable repository and the request succeeded.
ZYPPER_LEFT_OUT = 106
QUERY = "%{NAME} %|EPOCH?{%{EPOCH}:}:{}|%{VERSION}-%{RELEASE}\\n"


class RpmError(package_manager.PackageError):
    """dnf, zypper or rpm refused; the text gives the reason and the remedy."""


class RpmHost:
    """Runs the package manager. ``manager``: ``dnf`` or ``zypper``; ``auto`` chooses by os-release."""

    def __init__(self, manager: str, lock_timeout: int = 300) -> None:
        self.lock_timeout = lock_timeout
        self.manager = manager if manager != "auto" else rpm_text.manager_of(self.read("/etc/os-release") or "")

    def run(self, *arguments: str) -> tuple[int, str, str]:
        try:
            return package_manager.run(*arguments, environment={"ZYPP_LOCK_TIMEOUT": str(self.lock_timeout)})
        except FileNotFoundError:
            raise RpmError(f"this host has no {arguments[0]}; expected a host with {self.manager}") from None

    def must(self, what: str, *arguments: str) -> str:
        code, out, fault = self.run(*arguments)
        # For a refresh the status ZYPPER_LEFT_OUT (a repository was skipped) is an error, because the call names only
        # one repository.
        fine = ZYPPER_FINE if "refresh" in arguments else (*ZYPPER_FINE, ZYPPER_LEFT_OUT)
        if code != 0 and not (arguments[0] == "zypper" and code in fine):
            said = rpm_text.faults_of(out + "\n" + fault)
            raise RpmError(f"{what} failed ({arguments[0]}, exit status {code}):\n{said}")
        return out

    def installed(self) -> dict[str, str]:
        """Returns every installed package with its version. If several versions of a package are installed, such as of
        a kernel, returns the newest.
        """
        text = self.must("asking rpm for the packages", "rpm", "-qa", "--qf", QUERY)
        return {name: rpm_text.newest(found) for name, found in rpm_text.parse_versions(text).items()}

    def keys(self) -> list[str]:
        """Returns the public keys that rpm trusts, as packages gpg-pubkey-<id>-<date>."""
        return sorted(self.run("rpm", "-q", "gpg-pubkey")[1].split()) if "gpg-pubkey" in self.installed() else []

    def available(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Maps each name to the versions in the repositories; locked versions are included."""
        if not names:
            return {}
        if self.manager == "dnf":
            # dnf 5 adds no line breaks; dnf 4 does, and its empty lines are skipped.
            query = ["repoquery", "--qf", "%{name} %{evr}\\n", *names]
            return rpm_text.parse_versions(self.must("asking dnf for the packages", "dnf", *self.quiet(), *query))
        arguments = [
            "zypper",
            "--non-interactive",
            "--xmlout",
            "search",
            "-s",
            "--match-exact",
            "-t",
            "package",
            *names,
        ]
        code, out, fault = self.run(*arguments)
        if code not in (*ZYPPER_FINE, ZYPPER_NOTHING_FOUND, ZYPPER_LEFT_OUT):
            said = rpm_text.faults_of(out + "\n" + fault)
            raise RpmError(f"asking zypper for the packages failed (exit status {code}):\n{said}")
        return rpm_text.parse_zypper_search(out)

    def of_files(self, paths: Sequence[str]) -> dict[str, str]:
        """Maps the name of the package in each of these files to its version."""
        text = self.must("reading the package files", "rpm", "-qp", "--nosignature", "--qf", QUERY, *paths)
        return {name: found[0] for name, found in rpm_text.parse_versions(text).items()}

    def repository_files(self) -> dict[str, str]:
        """Returns the text of every repository file, by path."""
        found = {}
        for path in sorted(glob.glob(REPOSITORIES[self.manager] + "/*.repo")):
            with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="surrogateescape") as stream:
                found[path] = stream.read()
        return found

    def read(self, path: str) -> str | None:
        return package_manager.read_text(path)

    def fetch(self, address: str) -> str:
        """Fetches a key: from the web with the proxies of the environment, or from a file of this host."""
        if address.startswith("file://"):
            address = address[len("file://") :]
        if address.startswith("/"):
            text = self.read(address)
            if text is None:
                raise RpmError(f"the key {address} is not on this host")
            return text
        try:
            return bytes(open_url(address, timeout=30).read()).decode("utf-8", "replace")
        except (OSError, ValueError, http.client.HTTPException) as fault:
            raise RpmError(f"the key {address} cannot be fetched: {fault}") from None

    def quiet(self) -> list[str]:
        """Returns the options that disable the versionlock plugin, because our locks must not prevent our own
        transactions.
        """
        return ["-y", "-q", "--disableplugin=versionlock"]

    def refresh(self, name: str = "") -> None:
        """Refreshes the index of one repository, or of all."""
        what = f"reading the repository {name}" if name else "reading the repositories"
        if self.manager == "dnf":
            # dnf.conf may make dnf skip an unreadable repository silently, so switch that off.
            only = ["--disablerepo=*", f"--enablerepo={name}", f"--setopt={name}.skip_if_unavailable=0"] if name else []
            # Do not use --quiet, because only the full output has the reason of a failure, such as a 404.
            loud = [word for word in self.quiet() if word != "-q"]
            self.must(what, "dnf", *loud, *only, "--refresh", "makecache")
        else:
            # Do not use --gpg-auto-import-keys, because it accepts any key that the repository offers.
            self.must(what, "zypper", "--non-interactive", "refresh", "--force", *([name] if name else []))

    def trust(self, path: str) -> None:
        self.must(f"importing the key {path}", "rpm", "--import", path)

    def distrust(self, key: str) -> None:
        self.must(f"removing the key {key}", "rpm", "-e", "--allmatches", key)

    def install(self, packages: dict[str, str], files: Sequence[str], keep: Sequence[str] = ()) -> None:
        """Installs exactly these versions in one transaction, newer or older, without recommended packages.

        ``keep``: packages that must not change their version. Only dnf needs this list: its versionlock plugin is off,
        because the plugin would also lock our own packages. zypper respects its own locks.
        """
        what = "installing " + ", ".join(f"{name} {version}" for name, version in sorted(packages.items()))
        if self.manager == "dnf":
            words = [*self.quiet(), "--setopt=install_weak_deps=False", "install"]
            words[:0] = [f"--exclude={name}" for name in keep]
            self.must(what, "dnf", *words, *(files or [f"{name}-{version}" for name, version in packages.items()]))
            return
        words = ["--non-interactive", "install", "--auto-agree-with-licenses", "--no-recommends", "--oldpackage"]
        words += ["--allow-unsigned-rpm"] if files else []
        self.must(what, "zypper", *words, *(files or [f"{name}={version}" for name, version in packages.items()]))

    def needed_by_others(self, names: Sequence[str]) -> str:
        """Returns rpm's objections to the removal of these packages, empty if no other package needs them."""
        code, out, fault = self.run("rpm", "-e", "--test", *names)
        return "" if code == 0 else rpm_text.faults_of(out + "\n" + fault)

    def remove(self, names: Sequence[str]) -> None:
        if self.manager == "dnf":
            words = [*self.quiet(), "--setopt=clean_requirements_on_remove=False", "remove"]
            self.must(f"removing {', '.join(names)}", "dnf", *words, *names)
        else:
            self.must(f"removing {', '.join(names)}", "zypper", "--non-interactive", "remove", *names)

    def module(self, verb: str, spec: str) -> None:
        """Changes a module of dnf; ``verb`` is ``enable`` or ``reset``."""
        self.must(f"dnf module {verb} of {spec}", "dnf", *self.quiet(), "module", verb, spec)

    def can_lock(self) -> bool:
        return self.manager == "zypper" or self.read(VERSIONLOCK_CONF) is not None

    def locks(self) -> list[str]:
        """Returns the names of the packages that are locked at their version."""
        if self.manager == "zypper":
            return rpm_text.locked_by_zypper(self.read(ZYPPER_LOCKS))
        return [name for _line, name in self._locked() if name]

    def lock(self, packages: dict[str, str]) -> None:
        """Locks these packages at these versions; removes an older entry of the same package."""
        if self.manager == "zypper":
            self.must("locking the packages", "zypper", "--non-interactive", "addlock", *sorted(packages))
            return
        lines = self._lines_without(packages)
        lines += [rpm_text.lock_line(name, version) for name, version in sorted(packages.items())]
        write_bytes(VERSIONLOCK_LIST, ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape"))

    def unlock(self, names: Sequence[str]) -> None:
        """Removes the locks of these packages; a missing lock is no fault."""
        if self.manager == "zypper":
            self.must("releasing the packages", "zypper", "--non-interactive", "removelock", *names)
            if self.read(ZYPPER_LOCKS) == "":
                # Delete the empty file: zypper creates it with the first lock and does not delete it.
                os.unlink(ZYPPER_LOCKS)
        elif self.read(VERSIONLOCK_LIST) is not None:
            text = "".join(line + "\n" for line in self._lines_without(names))
            write_bytes(VERSIONLOCK_LIST, text.encode("utf-8", "surrogateescape"))

    def _lines_without(self, names: Container[str]) -> list[str]:
        return [line for line, name in self._locked() if not name or name not in names]

    def _locked(self) -> list[tuple[str, str]]:
        """Returns each line of the versionlock list with its package."""
        lines = (self.read(VERSIONLOCK_LIST) or "").splitlines()
        there = self.installed() if any(rpm_text.is_loose(line) for line in lines) else {}
        return [(line, rpm_text.lock_name(line, there)) for line in lines]
