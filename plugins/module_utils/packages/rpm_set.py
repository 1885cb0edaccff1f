# SPDX-License-Identifier: Apache-2.0
"""Installs the packages of a role on an RPM system, with the repository that has them, and removes both without a
trace. It makes one transaction, writes a record (a file that lists what to revert) before each change, and restores the
former state after a failure.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, NamedTuple, Sequence

from . import manager as package_manager
from . import rpm_text
from .pins import matching, split_pin
from .rpm_host import KEYS, MODULES, REPOSITORIES, RpmError, RpmHost

# The package of dnf's versionlock plugin, on systems where it is a separate package.
LOCKER = "python3-dnf-plugin-versionlock"


class Desired(NamedTuple):
    packages: Sequence[str]
    name: str
    source: dict[str, Any] | None = None
    files: Sequence[str] = ()
    module_stream: str = ""
    stale_sources: Sequence[str] = ()
    hold: Sequence[str] = ()
    record: str | None = None
    # Packages that are installed in addition, if a repository has them.
    optional: Sequence[str] = ()


class PackageSet:
    """Makes the changes of one run. Afterwards the attributes show the changes that were made, or in check mode
    predicted.
    """

    def __init__(self, desired: Desired, host: RpmHost, check_mode: bool = False) -> None:
        self.desired, self.host, self.check_mode = desired, host, check_mode
        self.plan: list[str] = []
        self.warnings: list[str] = []
        self.before: dict[str, str] = {}
        self.after: dict[str, str] = {}
        self.files_before: dict[str, str | None] = {}
        self.files_after: dict[str, str | None] = {}
        self.keys_before: list[str] = []
        self.stream_before: dict[str, str | None] = {}
        self.stream_switched = False
        self.record_before: str | None = None

    @property
    def source_changed(self) -> bool:
        return self.files_before != self.files_after

    @property
    def changed(self) -> bool:
        return bool(self.plan)

    @property
    def installed(self) -> dict[str, str]:
        return {name: version for name, version in self.after.items() if self.before.get(name) != version}

    @property
    def removed(self) -> list[str]:
        return sorted(set(self.before) - set(self.after))

    def diff(self) -> list[dict[str, str]]:
        """Returns one diff entry for each file and one for the packages."""
        entries = []
        for path, before in self.files_before.items():
            entries.append(package_manager.difference(path, before or "", self.files_after.get(path) or ""))
        moved = {*self.installed, *self.removed} - {"gpg-pubkey"}
        sides = (self.before, self.after)
        texts = ["".join(f"{one} {there[one]}\n" for one in sorted(moved & {*there})) for there in sides]
        entries.append(package_manager.difference("packages", *texts))
        return [entry for entry in entries if entry["before"] != entry["after"]]

    def present(self) -> None:
        self.record_before = package_manager.read_text(self.desired.record)
        self.before = self.host.installed()
        self.keys_before = self.host.keys()
        self.settle()
        self.after = dict(self.before)
        packages = [*self.desired.packages]
        if self.desired.hold and self.host.manager == "dnf" and not self.host.can_lock():
            packages.append(LOCKER)
        if self.desired.files:
            self.refuse_missing_files()
        try:
            self.put_files()
            self.switch_stream()
            self.install(packages)
        except (package_manager.PackageError, OSError) as fault:
            if self.check_mode or not self.take_back():
                raise
            raise RpmError(f"{fault}\nRepositories, keys and packages are as they were.") from None
        self.hold()

    def install(self, packages: Sequence[str]) -> None:
        if self.desired.files:
            wanted = self.host.of_files(self.desired.files)
            more = [one for one in packages if split_pin(one)[0] == LOCKER]
            todo = {name: version for name, version in wanted.items() if self.before.get(name) != version}
            if todo:
                self.change(todo, self.desired.files)
            packages = more
        names = [split_pin(one)[0] for one in packages]
        missing = rpm_text.missing(rpm_text.follow(packages, self.before, {}), self.before)
        if not missing:
            return
        if self.check_mode and (self.source_changed or self.stream_switched):
            # dnf and zypper cannot query a repository whose file is not written yet.
            unknown = ", ".join(split_pin(one)[0] for one in missing)
            why = (
                "the host does not have their repository yet" if self.source_changed else "their stream is not enabled"
            )
            self.warnings.append(f"{unknown} cannot be predicted, because {why}")
            return
        names += [split_pin(one)[0] for one in self.desired.optional]
        names += [name for name in self.load_record().get("packages", []) if name not in names and name in self.before]
        known = self.host.available(names)
        if not self.source_changed and rpm_text.unavailable(missing, known) and not self.check_mode:
            self.host.refresh(self.desired.name if self.desired.source else "")
            known = self.host.available(names)
        packages = [*packages, *(one for one in self.desired.optional if not rpm_text.unavailable([one], known))]
        missing = rpm_text.missing(rpm_text.follow(packages, self.before, known), self.before)
        unavailable = rpm_text.unavailable(missing, known)
        if unavailable:
            raise RpmError("these packages cannot be installed:\n- " + "\n- ".join(unavailable))
        changes = rpm_text.resolve(missing, known)
        self.change({**rpm_text.companions(changes, self.before, known), **changes}, ())

    def change(self, packages: dict[str, str], files: Sequence[str]) -> None:
        """Installs these versions. Refuses to change a package that another user locked."""
        ours = matching(self.host.locks(), self.load_record().get("locks", []))
        # Compare by matching(), because a lock of another user may be a pattern of names.
        keep = sorted({*matching(self.before, set(self.host.locks()) - set(ours))} - {*ours})
        foreign = [name for name in keep if name in packages]
        if foreign:
            release = "dnf versionlock delete" if self.host.manager == "dnf" else "zypper removelock"
            raise RpmError(
                f"nothing was installed: {', '.join(foreign)} would change, but another user locked it; release it "
                f"with: {release} {' '.join(foreign)}"
            )
        self.predict(packages)
        if self.check_mode:
            return
        # The transaction decides which dependencies it installs. Record all installed packages before it. Then the next
        # run can find the new dependencies, even if this run is killed.
        self.remember({"packages": sorted(set(packages) - set(self.before)), "unsettled": sorted(self.before)})
        blocking = sorted(set(ours) & set(packages)) if self.host.manager == "zypper" else []
        if blocking:
            self.host.unlock(blocking)
        try:
            self.host.install(packages, files, keep)
        finally:
            if blocking:
                self.host.lock({name: packages[name] for name in blocking})
            self.after = self.host.installed()
        self.note_keys()
        self.settle()

    def predict(self, packages: dict[str, str]) -> None:
        for name, version in sorted(packages.items()):
            old = self.before.get(name)
            self.plan.append(f"{'change' if old else 'install'} {name} {old + ' to ' if old else ''}{version}".rstrip())
            self.after[name] = version

    def settle(self) -> None:
        """Records the dependencies that a transaction of this set installed, in this run or in a killed one."""
        record = self.load_record()
        if "unsettled" in record and not self.check_mode:
            there = self.after or self.before
            came = set(_without_keys(there)) - set(record["unsettled"])
            self.remember({"packages": sorted(came), "unsettled": None})

    def hold(self) -> None:
        """Locks the packages against upgrades of the whole system. Releases the other packages that this set locked."""
        recorded = self.load_record().get("locks", [])
        self.release([one for one in recorded if not matching([one], self.desired.hold)])
        names = matching(_without_keys(self.after), self.desired.hold)
        ours = matching(self.host.locks(), self.load_record().get("locks", []))
        moved = [name for name in self.installed if name in ours]
        todo = sorted((set(names) - set(self.host.locks())) | set(moved))
        self.plan += [f"lock {name}" for name in todo if name not in moved]
        if todo and not self.check_mode:
            self.remember({"locks": todo})
            if self.host.manager == "dnf" or set(todo) - set(moved):
                self.host.lock({name: self.after[name] for name in todo if name in self.after})

    def release(self, recorded: Sequence[str]) -> None:
        """Releases the locks of these recorded packages, and removes them from the record. So a lock that another user
        sets later stays.
        """
        locked = matching(self.host.locks(), recorded) if recorded else []
        self.plan += [f"release {name}" for name in locked]
        if locked and not self.check_mode:
            self.host.unlock(locked)
        if recorded and not self.check_mode:
            package_manager.forget(self.desired.record, "locks", recorded)

    def refuse_missing_files(self) -> None:
        missing = [path for path in self.desired.files if not os.path.exists(path)]
        if missing:
            raise RpmError(f"these package files are not on the host: {', '.join(missing)}")

    def put_files(self) -> None:
        """Writes and removes repository files, and reads the repository's index. If one of these steps fails, the
        caller reverts all by ``take_back``.
        """
        files = self.host.repository_files()
        ours, key_path = f"{REPOSITORIES[self.host.manager]}/{self.desired.name}.repo", ""
        wanted: dict[str, str | None] = {
            path: None
            for path, text in files.items()
            if path != ours and any(mark in text for mark in self.desired.stale_sources)
        }
        if self.desired.source:
            key_path = f"{KEYS}/{self.desired.name}.asc" if self.desired.source.get("key") else ""
            wanted[ours] = rpm_text.repository_file(self.desired.name, self.desired.source, key_path)
            if key_path:
                wanted[key_path] = self.key_text(files.get(ours) == wanted[ours], key_path)
        for path, text in wanted.items():
            now = self.host.read(path)
            if now != text:
                self.files_before[path], self.files_after[path] = now, text
                self.plan.append(f"{'remove' if text is None else 'write'} {path}")
        if self.check_mode or not self.source_changed:
            return
        # Record a file with the collection's name as new (None), so that a later removal deletes it. A file of this
        # name that existed before was written by an earlier version of the collection.
        mine = {ours, key_path}
        self.remember({"files": {path: None if path in mine else text for path, text in self.files_before.items()}})
        package_manager.write_texts(self.files_after)
        if self.desired.source:
            # zypper refuses the repository's key unless rpm already trusts it; then zypper asks nothing.
            if self.desired.source.get("key") and self.host.manager == "zypper":
                self.host.trust(f"{KEYS}/{self.desired.name}.asc")
            self.host.refresh(self.desired.name)
            self.note_keys()

    def key_text(self, same: bool, key_path: str) -> str:
        """Returns the text of the repository's key. A key that has an address is fetched again only if the repository
        changed.
        """
        key = str((self.desired.source or {})["key"]).strip()
        there = self.host.read(key_path)
        if key.startswith("-----BEGIN"):
            return key + "\n"
        return there if same and there is not None else self.host.fetch(key)

    def note_keys(self) -> None:
        came = sorted(set(self.host.keys()) - set(self.keys_before))
        if came:
            self.remember({"keys": came})

    def switch_stream(self) -> None:
        if not self.desired.module_stream:
            return
        module, _colon, stream = self.desired.module_stream.partition(":")
        path = f"{MODULES}/{module}.module"
        text = self.host.read(path)
        now = rpm_text.stream_of(text, module)
        if now == stream:
            return
        self.plan.append(f"enable the stream {self.desired.module_stream}" + (f" instead of {now}" if now else ""))
        self.stream_switched = True
        if self.check_mode:
            return
        self.stream_before = {path: text}
        self.remember({"stream": self.stream_before})
        if now:
            # Reset the module first, because dnf refuses to enable a second stream of a module.
            self.host.module("reset", module)
        self.host.module("enable", f"{module}:{stream}")

    def take_back(self) -> bool:
        """Reverts files, keys and the module stream. If packages were already installed or removed, changes nothing and
        returns False; then the next run continues.
        """
        if _without_keys(self.host.installed()) != _without_keys(self.before):
            return False
        for key in sorted(set(self.host.keys()) - set(self.keys_before)):
            self.host.distrust(key)
        package_manager.write_texts({**self.stream_before, **self.files_before})
        if self.desired.record:
            package_manager.write_texts({self.desired.record: self.record_before})
        return True

    def absent(self) -> None:
        self.before = self.host.installed()
        self.after = dict(self.before)
        self.settle()
        record = self.load_record()
        names = (
            record.get("packages", []) if self.desired.record else [split_pin(one)[0] for one in self.desired.packages]
        )
        there = [name for name in names if name in self.before]
        self.refuse_dependents(there)
        # Release the locks before the packages are removed, because a lock prevents the removal.
        self.release(record.get("locks", []))
        if there:
            self.plan += [f"remove {name} {self.before[name]}" for name in sorted(there)]
            self.after = {name: version for name, version in self.before.items() if name not in there}
            if not self.check_mode:
                self.host.remove(there)
                self.after = self.host.installed()
        self.absent_source(record)
        if self.desired.record and not self.check_mode:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.desired.record)

    def refuse_dependents(self, there: Sequence[str]) -> None:
        needed = self.host.needed_by_others(there) if there else ""
        if needed:
            raise RpmError(f"nothing was removed, because other packages need what this role installed:\n{needed}")

    def absent_source(self, record: dict[str, Any]) -> None:
        for path, text in (record.get("stream") or {}).items():
            if self.host.read(path) != text:
                self.plan.append(f"{'remove' if text is None else 'restore'} {path}")
                if not self.check_mode:
                    package_manager.write_texts({path: text})
        for key in sorted(set(record.get("keys", [])) & set(self.host.keys())):
            self.plan.append(f"distrust {key}")
            if not self.check_mode:
                self.host.distrust(key)
        files = dict(record.get("files", {f"{REPOSITORIES[self.host.manager]}/{self.desired.name}.repo": None}))
        for path, text in files.items():
            now_text = self.host.read(path)
            # Keep a file that another program has changed since.
            if now_text != text and (text is None or now_text is None):
                self.files_before[path], self.files_after[path] = now_text, text
                self.plan.append(f"{'remove' if text is None else 'restore'} {path}")
        if not self.check_mode:
            package_manager.write_texts(self.files_after)

    def load_record(self) -> dict[str, Any]:
        return package_manager.read_record(self.desired.record)

    def remember(self, more: dict[str, Any]) -> None:
        """Adds an entry to the record, before the change that it describes. The first recorded state of a file or
        stream is kept.
        """
        if not self.desired.record:
            return
        record = self.load_record()
        for part in ("packages", "locks", "keys"):
            record[part] = sorted({*record.get(part, []), *more.get(part, [])})
        record["files"] = {**more.get("files", {}), **record.get("files", {})}
        if "stream" in more:
            record.setdefault("stream", more["stream"])
        if "unsettled" in more:
            if more["unsettled"] is None:
                record.pop("unsettled", None)
            else:
                record["unsettled"] = more["unsettled"]
        package_manager.write_record(self.desired.record, record)


def _without_keys(packages: dict[str, str]) -> dict[str, str]:
    """Leaves out the public keys, which rpm lists among the packages under the name gpg-pubkey."""
    return {name: version for name, version in packages.items() if name != "gpg-pubkey"}
