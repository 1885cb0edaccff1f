# SPDX-License-Identifier: Apache-2.0
"""Installs the packages of a role, with the apt source (repository) that has them, and removes both without a trace. A
record (a file on the host) lists the installed packages and changed files, so that a removal reverts only these.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any, NamedTuple, Sequence

from ..host.files import read_bytes, write_bytes
from . import apt_index, apt_keys, apt_text
from . import manager as package_manager
from .apt_host import KEYRINGS, SOURCES, TRUSTED, AptError, AptHost
from .apt_text import Source, Transaction
from .pins import matching, split_pin

# Words with which a line of the plan begins if it is about a change of a package.
CHANGES = ("install ", "change ", "remove ")


class Desired(NamedTuple):
    packages: Sequence[str]
    name: str
    source: dict[str, Any] | None = None
    components: Sequence[str] = ()
    stale_sources: Sequence[str] = ()
    stale_keys: Sequence[str] = ()
    may_remove: Sequence[str] = ()
    refuse: Sequence[str] = ()
    keep_files: Sequence[str] = ()
    hold: Sequence[str] = ()
    record: str | None = None
    # Packages that are installed in addition, if a repository has them.
    optional: Sequence[str] = ()
    # If the package lists are older than this many seconds, they are read again before an installation.
    cache_valid_time: int = 86400


class PackageSet:
    """Makes the changes of one run. Afterwards the attributes show the changes that were made, or in check mode
    predicted.
    """

    def __init__(self, desired: Desired, host: AptHost, check_mode: bool = False) -> None:
        self.desired, self.host, self.check_mode = desired, host, check_mode
        self.transaction = Transaction({}, {}, [])
        self.plan: list[str] = []
        self.warnings: list[str] = []
        self.updated = False
        self.unread = ""
        self.record_before: str | None = None
        self.files_before: dict[str, str | None] = {}
        self.files_after: dict[str, str | None] = {}

    @property
    def source_changed(self) -> bool:
        return self.files_before != self.files_after

    @property
    def changed(self) -> bool:
        return bool(self.plan)

    def diff(self) -> list[dict[str, str]]:
        """Returns one diff entry for each file of apt's sources and one for the packages."""
        entries = []
        for path, before in self.files_before.items():
            after = self.files_after.get(path)
            if before != after:
                entries.append(package_manager.difference(path, shown(before), shown(after)))
        moved = self.transaction
        if moved.lines():
            gone = [f"{name}\n" for name in sorted(moved.remove)]
            old = gone + [f"{name} {old}\n" for name, (old, _new) in sorted(moved.change.items())]
            new = [f"{name} {new}\n" for name, (_old, new) in sorted(moved.change.items())]
            new += [f"{name} {version}\n" for name, version in sorted(moved.install.items())]
            entries.append(package_manager.difference("packages", "".join(old), "".join(new)))
        return entries

    def present(self) -> None:
        self.heal()
        self.record_before = package_manager.read_text(self.desired.record)
        policy = self.policy()
        wanted_files = self.wanted_files(policy)
        missing = self.missing(policy, ())
        self.put_files(wanted_files)
        if missing:
            self.install_missing(missing, policy)
        self.hold()

    def missing(self, policy: dict[str, dict[str, Any]], optional: Sequence[str]) -> list[str]:
        known = [one for one in optional if not apt_text.unavailable([one], policy)]
        wanted = apt_text.same_version([*self.desired.packages, *known], policy)
        return [one for one in wanted if not apt_text.satisfied(one, installed(policy, one))]

    def install_missing(self, missing: list[str], policy: dict[str, dict[str, Any]]) -> None:
        old = self.host.lists_age() > self.desired.cache_valid_time
        ask = self.source_changed or old or bool(apt_text.unavailable(missing, policy))
        if self.check_mode and ask:
            with self.host.with_sources(self.files_after):
                self.predict(missing)
            return
        if ask and not self.updated:
            self.update()
        try:
            self.install_known()
        except AptError as fault:
            if self.check_mode or self.updated or not apt_text.is_outdated(str(fault)):
                raise
            self.update()
            self.transaction = Transaction({}, {}, [])
            self.plan = [line for line in self.plan if not line.startswith(CHANGES)]
            self.install_known()

    def predict(self, missing: Sequence[str]) -> None:
        """Predicts the installation in check mode. The package lists are read into a temporary folder, so that the host
        stays unchanged.
        """
        names = ", ".join(split_pin(one)[0] for one in missing)
        try:
            self.unread = self.host.update(self.addresses())
        except AptError as fault:
            self.warnings.append(f"{names} cannot be predicted: {fault}")
            return
        policy = self.policy()
        if self.unread and apt_text.unavailable(self.missing(policy, ()), policy):
            self.warnings.append(
                f"{names} cannot be predicted, because some package lists cannot be read:\n{self.unread}"
            )
            return
        self.install_known()

    def install_known(self) -> None:
        """Installs missing packages from the lists that apt has already read."""
        policy = self.policy()
        missing = self.missing(policy, self.desired.optional)
        self.refuse_unavailable(missing, policy)
        self.install([apt_text.resolve(one, policy) for one in missing])

    def policy(self) -> dict[str, dict[str, Any]]:
        return self.host.policy([split_pin(one)[0] for one in (*self.desired.packages, *self.desired.optional)])

    def update(self, needed: Sequence[str] = ()) -> None:
        """Reads the package lists. An unreadable source that this set does not need gives a warning."""
        self.updated = True
        self.unread = self.host.update(needed)
        if self.unread:
            self.warnings.append(f"some package lists cannot be read, and apt uses older ones:\n{self.unread}")

    def addresses(self) -> list[str]:
        """Returns the addresses of the sources that must be readable. These are the addresses of this set's source; if
        a key or an index is removed, those of all sources.
        """
        if any(text is None and not path.endswith((".list", ".sources")) for path, text in self.files_after.items()):
            return ["://", "file:", "cdrom:", "copy:"]
        ours = self.files_after.get(f"{SOURCES}/{self.desired.name}.sources")
        return [uri for source in apt_text.parse_deb822(ours or "") for uri in source.uris]

    def heal(self) -> None:
        self.host.wait_for_lock()
        if self.host.half_done():
            self.plan.append("finish the interrupted dpkg")
            if not self.check_mode:
                self.host.finish_half_done()

    def refuse_unavailable(self, missing: Sequence[str], policy: dict[str, dict[str, Any]]) -> None:
        unavailable = apt_text.unavailable(missing, policy)
        if unavailable:
            self.take_files_back()
            unread = f"\nSome package lists cannot be read:\n{self.unread}" if self.unread else ""
            raise AptError(
                f"on {self.host.os_name()} these packages cannot be installed:\n- " + "\n- ".join(unavailable) + unread
            )

    def install(self, missing: Sequence[str]) -> None:
        try:
            self.simulate("install", missing)
            self.refuse_removals()
            self.refuse_companions(missing)
        except AptError:
            self.take_files_back()
            raise
        self.plan += self.transaction.lines()
        if self.check_mode:
            return
        self.remember({"packages": sorted(self.transaction.install)})
        with self.kept_files():
            self.host.change("install", missing, simulate=False, held=self.own_holds != [])
        # Read the versions that are now installed, because a repository in a folder may have changed after apt read its
        # lists.
        came = self.host.policy(sorted(self.transaction.install)) if self.transaction.install else {}
        versions = {name: installed(came, name) or version for name, version in self.transaction.install.items()}
        self.transaction = self.transaction._replace(install=versions)

    @property
    def own_holds(self) -> list[str]:
        """Returns the held packages that the collection itself put on hold, so that it may change them."""
        return list(self.load_record().get("holds", []))

    def simulate(self, verb: str, packages: Sequence[str]) -> None:
        """Simulates a transaction. Raises AptError if it changes a package that another user holds."""
        ours = self.own_holds
        self.transaction = apt_text.parse_simulation(self.host.change(verb, packages, simulate=True, held=ours != []))
        touched = {*self.transaction.change, *self.transaction.remove}
        foreign = sorted(touched & {*self.host.held()} - {*ours}) if touched else []
        if foreign:
            raise AptError(
                f"nothing was changed: {', '.join(foreign)} would change, but another user holds it; release it with: "
                f"apt-mark unhold {' '.join(foreign)}"
            )

    def hold(self) -> None:
        """Holds the packages against upgrades of the whole system. Releases the other packages that this set held."""
        self.release({*self.own_holds} - {*self.desired.hold})
        if not self.desired.hold:
            return
        there = {name for name, known in self.host.policy(self.desired.hold).items() if known.get("installed")}
        there.update(name for name in self.desired.hold if name in self.transaction.install)
        changed = set(self.transaction.change) if not self.check_mode else set()
        todo = sorted(there - {*self.host.held()} | there & changed)
        lines = [f"hold {name}" for name in todo if name not in changed]
        self.plan += lines
        if todo and not self.check_mode:
            self.remember({"holds": todo})
            self.host.mark("hold", todo)

    def release(self, names: set[str]) -> None:
        """Releases those of these packages that are held, and removes them from the record. So a hold that another user
        sets later stays.
        """
        held = sorted(names & {*self.host.held()} - {*self.transaction.remove}) if names else []
        self.plan += [f"release {name}" for name in held]
        if held and not self.check_mode:
            self.host.mark("unhold", held)
        if names and not self.check_mode:
            package_manager.forget(self.desired.record, "holds", names)

    def refuse_removals(self) -> None:
        # apt may remove packages that this set installed earlier, because the new packages may replace them, such as
        # those of another driver branch.
        ours = self.load_record().get("packages", [])
        foreign = [name for name in self.transaction.remove if name not in self.desired.may_remove and name not in ours]
        if foreign:
            raise AptError(
                f"nothing was installed: apt would remove {', '.join(foreign)} for this installation; remove or hold "
                "them by hand, or choose compatible versions"
            )

    def refuse_companions(self, missing: Sequence[str]) -> None:
        came = matching(self.transaction.install, self.desired.refuse)
        if came:
            asked = ", ".join(split_pin(one)[0] for one in missing)
            raise AptError(
                f"nothing was installed: {', '.join(came)} would be installed for {asked}, because this archive "
                "replaces the requested packages; request the replacement by its own name, or use another source"
            )

    def wanted_files(self, policy: dict[str, dict[str, Any]]) -> dict[str, str | None]:
        """Returns every file of apt's sources that must change, with its text; None if it must be removed."""
        files = self.host.source_files()
        ours = f"{SOURCES}/{self.desired.name}.sources"
        stale = [
            path
            for path, text in files.items()
            if path != ours and any(mark in text for mark in self.desired.stale_sources)
        ]
        # Remove the keys before the source files that name them. So after a kill in between the next run still finds
        # the remaining keys.
        wanted: dict[str, str | None] = dict.fromkeys([*self.stale_keys(files, stale), *stale])
        if self.desired.source is not None:
            source, more = self.own_source(self.desired.source)
            wanted[ours] = apt_text.source_file([source])
            wanted.update(more)
        elif ours not in files and any(candidate(policy, one) is None for one in self.desired.packages):
            entries = [one for path, text in files.items() for one in apt_text.parse_sources(path, text)]
            added = apt_text.missing_components(entries, self.host.codename(), self.desired.components)
            if added:
                wanted[ours] = apt_text.source_file(added)
        return wanted

    def stale_keys(self, files: dict[str, str], stale: Sequence[str]) -> list[str]:
        """Returns the key files to remove. Such a file holds only stale keys, and either a stale source names it, or
        apt trusts it for every source. A key file that a remaining source names stays. The key files for every source
        also stay if a remaining source may need them: a flat source that names no key, such as NVIDIA's or a site's
        copy of it.
        """
        if not self.desired.stale_keys:
            return []
        given = self.desired.source or {"trusted": True}
        named: dict[bool, set[str]] = {True: set(), False: {str(given.get("key") or "")}}
        unnamed = not (given.get("key") or given["trusted"] or given.get("files")) and flat(given["suites"])
        for path, text in files.items():
            entries = apt_text.parse_sources(path, text)
            named[path in stale].update(one.signed_by for one in entries)
            if path not in stale and path != f"{SOURCES}/{self.desired.name}.sources":
                unnamed = unnamed or any(not one.signed_by and not one.trusted and flat(one.suites) for one in entries)
        everywhere = {os.path.join(TRUSTED, name) for name in os.listdir(TRUSTED)} if os.path.isdir(TRUSTED) else set()
        found = []
        for path in sorted((everywhere | {one for one in named[True] if one.startswith("/")}) - named[False]):
            ids = apt_keys.key_ids(read_bytes(path) or b"") if os.path.isfile(path) else []
            if ids and {*ids} <= {*self.desired.stale_keys} and not (unnamed and path in everywhere):
                found.append(path)
        return found

    def own_source(self, given: dict[str, Any]) -> tuple[Source, dict[str, str]]:
        """Returns the entry of our repository, and the text of its files: the key, or the index of package files."""
        key, more = str(given.get("key") or "").strip(), {}
        uris, suites, trusted = tuple(given["uris"] or ()), tuple(given["suites"]), bool(given["trusted"])
        if key.startswith("-----BEGIN"):
            more[f"{KEYRINGS}/{self.desired.name}.asc"] = key + "\n"
            key = f"{KEYRINGS}/{self.desired.name}.asc"
        if given.get("files"):
            uri, suite, index = apt_index.build(self.desired.name, given["files"], self.host.control)
            more[f"{apt_index.FOLDER}/{self.desired.name}/Packages"] = index
            uris, suites, trusted = (uri,), (suite,), True
        return Source(("deb",), uris, suites, tuple(given["components"]), key, trusted), more

    def put_files(self, wanted: dict[str, str | None]) -> None:
        """Writes and removes source files and refreshes the lists; restores all files if the lists cannot be read."""
        for path, text in wanted.items():
            now = package_manager.read_text(path)
            if now != text:
                self.files_before[path], self.files_after[path] = now, text
                self.plan.append(f"{'remove' if text is None else 'write'} {path}")
        if self.check_mode or not self.source_changed:
            return
        self.remember({"files": self.files_before})
        try:
            self.write_files(self.files_after)
            self.update(self.addresses())
        except AptError as fault:
            self.take_files_back()
            raise AptError(f"{fault}\nThe sources of apt are as they were.") from None

    def write_files(self, files: dict[str, str | None]) -> None:
        package_manager.write_texts(files)
        for path, text in files.items():
            if text is None and path.startswith(apt_index.FOLDER):
                with contextlib.suppress(OSError):
                    os.removedirs(os.path.dirname(path))

    def take_files_back(self) -> None:
        if self.source_changed and not self.check_mode:
            self.write_files(self.files_before)
            self.write_files({str(self.desired.record): self.record_before} if self.desired.record else {})
            with contextlib.suppress(AptError):
                self.host.update()

    def absent(self) -> None:
        self.heal()
        record = self.load_record()
        if self.desired.record:
            # A package without an entry in the record was installed before this set, and stays.
            names = list(record.get("packages", []))
        else:
            names = [split_pin(one)[0] for one in self.desired.packages]
        policy = self.host.policy(names) if names else {}
        there = [name for name in names if policy.get(name, {}).get("installed") is not None]
        # Also purge packages of this set that other packages of this set have replaced: they are removed, but their
        # configuration files remain.
        there += self.host.leftovers([name for name in record.get("packages", []) if name not in there])
        if there:
            self.remove(there)
        self.release({*record.get("holds", [])})
        files = dict(record.get("files", {f"{SOURCES}/{self.desired.name}.sources": None}))
        wanted = {path: text for path, text in files.items() if text is None or read_bytes(path) is None}
        for path, text in wanted.items():
            now = package_manager.read_text(path)
            if now != text:
                self.files_before[path], self.files_after[path] = now, text
                self.plan.append(f"{'remove' if text is None else 'restore'} {path}")
        if self.check_mode:
            return
        if self.source_changed:
            self.write_files(self.files_after)
            try:
                self.update()
            except AptError as fault:
                self.warnings.append(str(fault))
        if self.desired.record:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.desired.record)

    def remove(self, there: list[str]) -> None:
        self.simulate("purge", there)
        foreign = [
            name for name in self.transaction.remove if name not in there and name not in self.desired.may_remove
        ]
        if foreign:
            raise AptError(
                f"nothing was removed: {', '.join(foreign)} would be removed too, but this role did not install them; "
                "remove them first if they are not needed"
            )
        self.plan += self.transaction.lines()
        if not self.check_mode:
            with self.kept_files():
                self.host.change("purge", there, simulate=False, held=self.own_holds != [])

    def load_record(self) -> dict[str, Any]:
        return package_manager.read_record(self.desired.record)

    def remember(self, more: dict[str, Any]) -> None:
        """Adds an entry to the record, before the change that it describes. So a kill in between loses nothing."""
        if not self.desired.record:
            return
        record = self.load_record()
        record["packages"] = sorted({*record.get("packages", []), *more.get("packages", [])})
        record["holds"] = sorted({*record.get("holds", []), *more.get("holds", [])})
        record["files"] = {**more.get("files", {}), **record.get("files", {})}
        package_manager.write_record(self.desired.record, record)

    @contextlib.contextmanager
    def kept_files(self) -> Any:
        """Restores bytes and mode of each kept file that the transaction changed or deleted."""
        held = {}
        for path in self.desired.keep_files:
            data = read_bytes(path)
            if data is not None:
                held[path] = (data, stat.S_IMODE(os.stat(path).st_mode))
        try:
            yield
        finally:
            for path, (data, mode) in held.items():
                if read_bytes(path) != data:
                    write_bytes(path, data, mode)


def flat(suites: Sequence[str]) -> bool:
    """Returns whether a source is flat, a folder of packages without the suites of a distribution."""
    return any(suite.endswith("/") for suite in suites)


def shown(text: str | None) -> str:
    """Returns a file's text for a diff; a key without armour is not text."""
    if text is None:
        return ""
    return "(not a text)\n" if any("\udc80" <= one <= "\udcff" for one in text) else text


def candidate(policy: dict[str, dict[str, Any]], package: str) -> str | None:
    version = policy.get(split_pin(package)[0], {}).get("candidate")
    return None if version is None else str(version)


def installed(policy: dict[str, dict[str, Any]], package: str) -> str | None:
    version = policy.get(split_pin(package)[0], {}).get("installed")
    return None if version is None else str(version)
