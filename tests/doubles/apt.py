# SPDX-License-Identifier: Apache-2.0
"""A double of apt, and functions that install and remove sets of packages with it. The double computes its package
lists from files of apt sources.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.packages import apt_set
from ansible_collections.vgpu.fleet.plugins.module_utils.packages.apt_host import AptError
from ansible_collections.vgpu.fleet.plugins.module_utils.packages.apt_set import Desired, PackageSet

DEBIAN = "Types: deb\nURIs: http://m.test/debian\nSuites: bookworm\nComponents: main\nSigned-By: /k.gpg\n"

# Text in a source file → the packages that this source offers, each with the dependencies that apt installs too.
WORLD: dict[str, dict[str, list[str]]] = {
    "Components: main": {"docker.io": ["runc", "containerd"], "runc": [], "containerd": []},
    "non-free": {"nvidia-smi": ["libnvidia-ml1"], "libnvidia-ml1": []},
    "file:/opt/apt": {"nvidia-docker2": ["nvidia-container-toolkit"], "nvidia-container-toolkit": []},
}
LOCAL = {"uris": ["file:/opt/apt"], "suites": ["./"], "components": [], "key": "", "trusted": True}


class Apt:
    """The double of apt. ``update`` copies the files of apt sources into the package lists."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.here: dict[str, str] = {}
        self.rests: set[str] = set()  # Packages that are removed but not purged.
        self.holds: set[str] = set()
        self.calls: list[str] = []
        self.broken = False  # broken: whether a run of dpkg was interrupted.
        self.unreachable = ""  # unreachable: sources whose address contains this text cannot be read.
        self.would_remove: list[str] = []  # would_remove: additional packages that a change would remove.
        self.age = 0.0  # age: the age of the package lists in seconds.
        self.newer = ""  # newer: the version that an install gets if the archive is newer than the package lists.
        self.gone = False  # gone: whether the archive no longer has the listed packages.
        self.elsewhere: str | None = None  # elsewhere: sources that replace the host's, if set.
        self.private = ""  # private: the package lists of the sources ``elsewhere``.
        self.deletes: Path | None = None  # deletes: a file that a purge deletes.
        (root / "debian.sources").write_text(DEBIAN)
        self.lists = self.texts()

    def texts(self) -> str:
        return "\n".join(self.source_files().values())

    def source_files(self) -> dict[str, str]:
        return {
            str(path): path.read_text()
            for path in sorted(self.root.glob("*.sources")) + sorted(self.root.glob("*.list"))
        }

    def known(self) -> dict[str, list[str]]:
        lists = self.lists if self.elsewhere is None else self.private
        return {name: more for mark, world in WORLD.items() if mark in lists for name, more in world.items()}

    def os_name(self) -> str:
        return "Debian GNU/Linux 12"

    def codename(self) -> str:
        return "bookworm"

    def wait_for_lock(self) -> None:
        pass

    def half_done(self) -> bool:
        return self.broken

    def finish_half_done(self) -> None:
        self.calls.append("configure")
        self.broken = False

    def policy(self, names: list[str]) -> dict[str, dict[str, Any]]:
        known = self.known()
        return {
            name: {
                "installed": self.here.get(name),
                "candidate": "1.0-1" if name in known else self.here.get(name),
                "versions": ["1.0-1"] if name in known else [],
            }
            for name in names
        }

    def leftovers(self, names: list[str]) -> list[str]:
        return [name for name in names if name in self.rests]

    def lists_age(self) -> float:
        return self.age

    def update(self, needed: Sequence[str] = ()) -> str:
        sources = self.elsewhere if self.elsewhere is not None else self.texts()
        self.calls.append("update" if self.elsewhere is None else "look")
        broken = bool(self.unreachable) and self.unreachable in sources
        fault = f"E: Failed to fetch https://{self.unreachable}"
        if broken and any(address in fault for address in needed):
            raise AptError("reading the package lists failed: 404")
        # If a source cannot be read, apt keeps the lists that it read earlier from that source.
        texts = sources.replace(self.unreachable, "") if broken else sources
        if self.elsewhere is None:
            self.lists, self.gone, self.age = texts, self.gone and broken, 0.0
        else:
            self.private = texts
        return fault if broken else ""

    @contextlib.contextmanager
    def with_sources(self, changed: Mapping[str, str | None]) -> Iterator[None]:
        texts = {**self.source_files(), **changed}
        self.elsewhere = "\n".join(text for text in texts.values() if text is not None)
        self.private = self.lists
        try:
            yield
        finally:
            self.elsewhere = None

    def held(self) -> list[str]:
        return sorted(self.holds)

    def mark(self, verb: str, names: list[str]) -> None:
        self.calls.append(f"{verb} {' '.join(names)}")
        for name in names:
            (self.holds.add if verb == "hold" else self.holds.discard)(name)

    def change(self, verb: str, packages: list[str], simulate: bool, held: bool = False) -> str:
        if not simulate:
            self.calls.append(verb)
            if verb == "install" and self.gone:
                raise AptError(
                    "the install failed\nE: Failed to fetch http://m.test/x.deb  404  Not Found [IP: 127.0.0.1]"
                )
        names = [package.partition("=")[0] for package in packages]
        if verb == "purge":
            going = [*names, *self.would_remove]
            if not simulate:
                for name in names:
                    self.here.pop(name, None)
                    self.rests.discard(name)
                if self.deletes is not None:
                    self.deletes.unlink()
            return "".join(f"Purg {name} [1.0-1]\n" for name in going)
        listed = [more for name in names for more in [name, *self.known()[name]]]
        coming = [name for name in dict.fromkeys(listed) if name not in self.here]
        if not simulate:
            self.here.update(dict.fromkeys(coming, self.newer or "1.0-1"))
            self.rests |= {name for name in self.would_remove if self.here.pop(name, None)}
        lines = [f"Remv {name} [1]\n" for name in self.would_remove]
        return "".join(lines + [f"Inst {name} (1.0-1 Test [amd64])\n" for name in coming])


def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Apt:
    """Returns an apt double. Moves the folders of sources and keys below the test's folder."""
    folder = tmp_path / "sources.list.d"
    folder.mkdir()
    monkeypatch.setattr(apt_set, "SOURCES", str(folder))
    monkeypatch.setattr(apt_set, "KEYRINGS", str(tmp_path / "keyrings"))
    monkeypatch.setattr(apt_set, "TRUSTED", str(tmp_path / "trusted"))
    return Apt(folder)


def present(apt: Apt, check: bool = False, **desired: Any) -> PackageSet:
    run = PackageSet(Desired(name="ours", **desired), apt, check)  # type: ignore[arg-type]
    run.present()
    return run


def absent(apt: Apt, check: bool = False, **desired: Any) -> PackageSet:
    run = PackageSet(Desired(name="ours", **desired), apt, check)  # type: ignore[arg-type]
    run.absent()
    return run


def state(apt: Apt) -> tuple:
    return dict(apt.here), apt.source_files(), sorted(str(path) for path in apt.root.parent.rglob("*"))
