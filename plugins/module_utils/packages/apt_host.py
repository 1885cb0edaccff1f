# SPDX-License-Identifier: Apache-2.0
"""Runs apt and dpkg of this host. Tests replace this object by another one."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import math
import os
import tempfile
import time
from typing import Any, Iterator, Mapping, Sequence

from . import apt_scratch, apt_text
from . import manager as package_manager

SOURCES = "/etc/apt/sources.list.d"
MAIN_LIST = "/etc/apt/sources.list"
KEYRINGS = "/etc/apt/keyrings"
# Folder of keys that apt trusts for any source.
TRUSTED = "/etc/apt/trusted.gpg.d"
PREFERENCES = "/etc/apt/preferences"
LOCK = "/var/lib/dpkg/lock-frontend"


class AptError(package_manager.PackageError):
    """apt refused, or would make an unrequested change; the text gives the reason and the remedy."""


class AptHost:
    def __init__(self, lock_timeout: int = 300) -> None:
        self.lock_timeout = lock_timeout
        # Options that make apt read other sources and lists than the host's.
        self.elsewhere: list[str] = []

    def run(self, *arguments: str) -> tuple[int, str]:
        quiet = {"DEBIAN_FRONTEND": "noninteractive", "APT_LISTCHANGES_FRONTEND": "none", "NEEDRESTART_SUSPEND": "1"}
        try:
            done = package_manager.run(*arguments, environment=quiet, together=True)
        except FileNotFoundError:
            raise AptError(
                f"this host has no {arguments[0]} ({self.os_name()}); supported systems are Debian and Ubuntu"
            ) from None
        return done.code, done.out

    def must(self, what: str, *arguments: str) -> str:
        code, text = self.run(*arguments)
        if code != 0:
            raise AptError(f"{what} failed ({arguments[0]}, exit status {code}):\n{faults_of(text)}")
        return text

    def os_release(self) -> dict[str, str]:
        fields: dict[str, str] = {}
        with contextlib.suppress(OSError), open("/etc/os-release", encoding="utf-8") as stream:
            for line in stream:
                key, equals, value = line.strip().partition("=")
                if equals:
                    fields[key] = value.strip("\"'")
        return fields

    def os_name(self) -> str:
        fields = self.os_release()
        return fields.get("PRETTY_NAME") or fields.get("ID") or "unknown system"

    def codename(self) -> str:
        return self.os_release().get("VERSION_CODENAME", "")

    def source_files(self) -> dict[str, str]:
        """Returns the text of every source file, by path."""
        found = {}
        for path in [MAIN_LIST, *sorted(glob.glob(SOURCES + "/*.list") + glob.glob(SOURCES + "/*.sources"))]:
            with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="surrogateescape") as stream:
                found[path] = stream.read()
        return found

    def policy(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        return apt_text.parse_policy(
            self.must("asking apt for the packages", "apt-cache", *self.elsewhere, "policy", *names)
        )

    def leftovers(self, names: Sequence[str]) -> list[str]:
        """Returns the packages that are removed, but whose configuration files dpkg still has."""
        # dpkg fails if one package is unknown to it, but still reports the other packages.
        text = self.run("dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\\n", *names)[1] if names else ""
        return [name for name in names if f"{name} config-files" in text.splitlines()]

    def control(self, path: str) -> str:
        """Returns the control file of a package file."""
        return self.must(f"reading the package file {path}", "dpkg-deb", "--field", path)

    def wait_for_lock(self) -> None:
        """Waits until no other process changes packages. Such a process may come from a killed play."""
        end = time.monotonic() + self.lock_timeout
        with open(LOCK, "a", encoding="ascii") as stream:
            while True:
                try:
                    fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except OSError:
                    if time.monotonic() >= end:
                        raise AptError(
                            f"another program has held {LOCK} for {self.lock_timeout} s; inspect with: fuser -v {LOCK}"
                        ) from None
                    time.sleep(0.5)

    def half_done(self) -> bool:
        """Returns whether an interrupted dpkg left packages unpacked and not configured."""
        return bool(self.run("dpkg", "--audit")[1].strip()) or bool(glob.glob("/var/lib/dpkg/updates/[0-9]*"))

    def finish_half_done(self) -> None:
        """Configures unpacked packages; lets apt install missing dependencies (a full disk can cause both)."""
        configure = ("dpkg", "--configure", "-a", "--force-confdef", "--force-confold")
        if self.run(*configure)[0] == 0:
            return
        what = "finishing an interrupted apt"
        words = ["apt-get", "-q", "-y", *self.options(), "--no-install-recommends", "--no-auto-remove"]
        words += ["-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold", "--fix-broken"]
        going = apt_text.parse_simulation(self.must(what, *words, "--simulate", "install")).remove
        unfinished = self.run("dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n")[1]
        whole = [name for name in going if f"{name} installed" in unfinished.splitlines()]
        if whole:
            raise AptError(
                f"{what} would remove {', '.join(whole)}; inspect with: dpkg --audit, and repair it by hand with: "
                "apt-get --fix-broken install"
            )
        self.must(what, *words, "install")
        self.must(what, *configure)

    def lists_age(self) -> float:
        """Returns the seconds since apt read the package lists; infinity if it never did."""
        # Use the modification time of this folder: apt changes it at every update, even if no list has changed.
        times = [os.stat(path).st_mtime for path in (f"{apt_scratch.LISTS}/partial",) if os.path.isdir(path)]
        return max(0.0, time.time() - max(times)) if times else math.inf

    def update(self, needed: Sequence[str] = ()) -> str:
        """Reads the package lists. ``needed``: addresses of sources that must be readable. Raises AptError if one of
        them cannot be read. Returns the faults of all other sources, empty if there are none.
        """
        # Without this option apt silently uses old lists if a source cannot be fetched, and reports no fault.
        strict = ["-o", "APT::Update::Error-Mode=any"]
        code, text = self.run("apt-get", "-q", *self.options(), *self.elsewhere, *strict, "update")
        if code == 0:
            return ""
        if apt_text.is_fatal(text, needed):
            raise AptError(f"reading the package lists failed (apt-get, exit status {code}):\n{faults_of(text)}")
        return faults_of(text)

    @contextlib.contextmanager
    def with_sources(self, changed: Mapping[str, str | None]) -> Iterator[None]:
        """Runs apt as if these source files were written (or removed, if the text is None), with separate lists."""
        with tempfile.TemporaryDirectory(prefix="vgpu-apt-", dir="/var/tmp") as folder:
            self.elsewhere = apt_scratch.lay_out(folder, self.source_files(), changed, MAIN_LIST)
            try:
                yield
            finally:
                self.elsewhere = []

    def options(self) -> list[str]:
        return ["-o", f"DPkg::Lock::Timeout={self.lock_timeout}"]

    def held(self) -> list[str]:
        """Returns the packages that are held at their version."""
        return self.must("asking for held packages", "apt-mark", "showhold").split()

    def mark(self, verb: str, names: Sequence[str]) -> None:
        """Holds or releases packages; ``verb`` is ``hold`` or ``unhold``."""
        self.must(f"apt-mark {verb} of {', '.join(names)}", "apt-mark", verb, *names)

    def change(self, verb: str, packages: Sequence[str], simulate: bool, held: bool = False) -> str:
        """Runs one transaction; ``verb`` is ``install`` or ``purge``. ``held``: whether the transaction may also change
        packages that are held.
        """
        words = ["apt-get", "-q", "-y", *self.options(), "--no-install-recommends", "--no-auto-remove"]
        words += ["-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold"]
        if simulate:
            words += ["--simulate", *self.elsewhere]
        if held:
            words.append("--allow-change-held-packages")
        what = ("simulating " if simulate else "") + f"the {verb} of {', '.join(packages)}"
        pins = apt_text.preferences(packages)
        if verb != "install" or not pins:
            return self.must(what, *words, verb, *packages)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="apt-preferences-") as stream:
            with contextlib.suppress(OSError), open(PREFERENCES, encoding="utf-8") as own:
                stream.write(own.read() + "\n")
            stream.write(pins)
            stream.flush()
            # This option replaces only the file preferences; apt still reads the folder preferences.d.
            words += ["--allow-downgrades", "-o", f"Dir::Etc::Preferences={stream.name}"]
            return self.must(what, *words, verb, *packages)


def faults_of(text: str) -> str:
    """Returns the lines of apt's or dpkg's output that describe the fault."""
    lines = text.splitlines()
    for place, line in enumerate(lines):
        if line.endswith("unmet dependencies:"):
            # Return the following lines, because they name the conflicting versions. The line that begins with E: does
            # not.
            return "\n".join(lines[place : place + 12])
    faults = []
    for place, line in enumerate(lines):
        if line.startswith(("E:", "W:", "dpkg:", "Err:")):
            faults.append(line)
            # The next line has the reason: "(No space left on device)", "404  Not Found".
            if (
                line.startswith(("dpkg: error", "Err:"))
                and lines[place + 1 : place + 2]
                and lines[place + 1].startswith(" ")
            ):
                faults.append(lines[place + 1])
    return "\n".join((faults or lines)[-8:])
