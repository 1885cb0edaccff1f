# SPDX-License-Identifier: Apache-2.0
"""Tests the installation of a set of packages on a simulated RPM host, with their repository and their locks, which
keep upgrades from changing the packages. Also tests the rollback. tests/rpm uses real dnf and zypper.
"""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.packages import rpm_host, rpm_set
from ansible_collections.vgpu.fleet.plugins.module_utils.packages.rpm_host import RpmError
from ansible_collections.vgpu.fleet.plugins.module_utils.packages.rpm_set import Desired, PackageSet

REPOSITORY = {"a": ["1-1", "2-1"], "b": ["1-1"], "liba": ["1-1", "2-1"], rpm_set.LOCKER: ["4-1"]}


class Host:
    """A simulated RPM host with packages and locks in memory and files in a folder. Package ``a`` requires ``liba`` of
    the same version."""

    def __init__(self, folder: Path, manager: str = "dnf") -> None:
        self.folder, self.manager = folder, manager
        self.there = {"theirs": "9-1"}
        self.locked: list[str] = []
        self.broken = self.killed = self.needed = ""
        self.calls: list[str] = []

    def read(self, path: str) -> str | None:
        file = Path(path)
        return file.read_text() if file.exists() else None

    def installed(self) -> dict[str, str]:
        return dict(self.there)

    def keys(self) -> list[str]:
        return []

    def available(self, names: list[str]) -> dict[str, list[str]]:
        return {name: REPOSITORY[name] for name in names if name in REPOSITORY}

    def repository_files(self) -> dict[str, str]:
        return {str(path): path.read_text() for path in self.folder.glob("*.repo")}

    def fetch(self, address: str) -> str:
        self.calls.append(f"fetch {address}")
        return "the key\n"

    def trust(self, path: str) -> None:
        self.calls.append(f"trust {path}")

    def refresh(self, name: str = "") -> None:
        self.calls.append("refresh")
        if self.broken:
            raise RpmError(self.broken)

    def install(self, packages: dict[str, str], files: list[str], keep: list[str]) -> None:
        # As in a real package manager, ``a`` cannot be installed if ``liba`` must keep another version.
        if "a" in packages and "liba" in keep and self.there.get("liba") != packages["a"]:
            raise RpmError(f"a {packages['a']} requires liba {packages['a']}")
        self.calls.append("install " + " ".join(f"{name}={version}" for name, version in sorted(packages.items())))
        self.there.update(packages)
        if "a" in packages:
            self.there["liba"] = packages["a"]
        if self.killed:
            raise KeyboardInterrupt

    def needed_by_others(self, names: list[str]) -> str:
        return self.needed

    def remove(self, names: list[str]) -> None:
        self.calls.append("remove " + " ".join(names))
        for name in names:
            assert name not in self.locked, "a locked package cannot be removed"
            del self.there[name]

    def can_lock(self) -> bool:
        return self.manager == "zypper" or rpm_set.LOCKER in self.there

    def locks(self) -> list[str]:
        return list(self.locked)

    def lock(self, packages: dict[str, str]) -> None:
        self.locked = sorted({*self.locked, *packages})

    def unlock(self, names: list[str]) -> None:
        self.locked = [name for name in self.locked if name not in names]


@pytest.fixture(params=["dnf", "zypper"])
def host(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    folder = tmp_path / "repos"
    folder.mkdir()
    monkeypatch.setattr(rpm_set, "KEYS", str(tmp_path / "keys"))
    monkeypatch.setattr(rpm_set, "REPOSITORIES", {"dnf": str(folder), "zypper": str(folder)})
    return Host(folder, request.param)


def run(host: Host, *packages: str, check: bool = False, state: str = "present", **more: Any) -> PackageSet:
    record = more.pop("record_at", str(host.folder.parent / "record.json"))
    made = PackageSet(Desired(packages=packages, name="ours", record=record, **more), host, check)
    made.present() if state == "present" else made.absent()
    return made


SOURCE = {"baseurl": "https://m.example.com", "key": "https://m.example.com/k", "gpgcheck": True}


def test_set_is_installed_kept_and_removed(host: Host) -> None:
    foretold = run(host, "a=1-1", source=SOURCE, hold=["a"], check=True)
    assert foretold.changed and host.there == {"theirs": "9-1"} and not list(host.folder.iterdir())
    assert "cannot be predicted, because the host does not have their repository" in foretold.warnings[0]
    assert not [line for line in foretold.plan if line.startswith("install")]
    first = run(host, "a=1-1", source=SOURCE, hold=["a"])
    assert first.changed and host.there["a"] == "1-1" and host.locked == ["a"]
    assert first.installed["liba"] == "1-1", "the plan names the dependency"
    host.calls = []
    again = run(host, "a=1-1", source=SOURCE, hold=["a"])
    # The installed key is not fetched again, so that a run without changes needs no network.
    assert not again.changed and host.calls == []
    gone = run(host, state="absent")
    assert gone.changed and host.there == {"theirs": "9-1"} and host.locked == []
    assert not list(host.folder.iterdir()) and not (host.folder.parent / "record.json").exists()
    assert not run(host, state="absent").changed


# columns: optional packages; expected packages on the host, except "theirs", after an installation of ``a``
OPTIONAL = [
    (["b"], {"a", "liba", "b"}),
    (["b=1-*"], {"a", "liba", "b"}),
    (["b=9-*"], {"a", "liba"}),
    (["z"], {"a", "liba"}),
]


@pytest.mark.parametrize(("optional", "came"), OPTIONAL)
def test_optional_packages_are_installed_if_available(host: Host, optional: list[str], came: set) -> None:
    run(host, "a", optional=optional)
    assert {*host.there} == {"theirs", *came}
    assert not run(host, "a", optional=optional).changed
    del host.there["liba"]
    assert not run(host, "a", optional=["liba"]).changed, "an optional package is no reason for a change"


def test_packages_installed_before_stay(host: Host) -> None:
    host.there["a"] = host.there["liba"] = "1-1"
    run(host, "a")
    assert not run(host, state="absent").changed
    assert host.there["a"] == "1-1"


def test_next_run_completes_a_killed_transaction(host: Host) -> None:
    host.killed = "yes"
    with pytest.raises(KeyboardInterrupt):
        run(host, "a=1-1")
    host.killed = ""
    assert not run(host, "a=1-1").changed
    run(host, state="absent")
    assert host.there == {"theirs": "9-1"}, "the dependency was not removed"


def test_a_repository_that_cannot_be_read_leaves_no_trace(host: Host) -> None:
    old = host.folder / "old.repo"
    old.write_text("baseurl=https://nvidia.github.io/nvidia-docker\n")
    host.broken = "404"
    with pytest.raises(RpmError, match=r"404\n.*as they were"):
        run(host, "a", source=SOURCE, stale_sources=["nvidia.github.io/nvidia-docker"])
    assert [path.name for path in host.folder.iterdir()] == ["old.repo"]
    assert not (host.folder.parent / "record.json").exists()
    host.broken = ""
    run(host, "a", source=SOURCE, stale_sources=["nvidia.github.io/nvidia-docker"])
    assert not old.exists()
    run(host, state="absent")
    assert old.exists(), "a moved file is restored"


def test_missing_version_is_searched_again_after_a_refresh(host: Host) -> None:
    with pytest.raises(RpmError, match=r"no version 3; there are 2-1, 1-1"):
        run(host, "a=3")
    assert host.calls == ["refresh"]
    assert host.there == {"theirs": "9-1"}


def test_own_locks_are_updated_and_locks_of_others_kept(host: Host) -> None:
    run(host, "a=1-1", hold=["a"])
    run(host, "a=2-1", hold=["a"])
    assert host.there["a"] == host.there["liba"] == "2-1" and host.locked == ["a"]
    run(host, state="absent")
    host.there.update({"a": "1-1"})
    host.locked = ["a"]
    with pytest.raises(
        RpmError, match=r"another user locked it; release it with: (dnf versionlock delete|zypper removelock) a"
    ):
        run(host, "a=2-1", hold=["a"])
    assert host.there["a"] == "1-1" and host.locked == ["a"]


def test_locks_that_are_no_longer_desired_are_released(host: Host) -> None:
    host.locked = ["theirs"]
    run(host, "a=1-1", hold=["*a", "the*"])
    assert host.locked == ["a", "liba", "theirs"]
    predicted = run(host, "a=1-1", hold=["a"], check=True)
    assert host.locked == ["a", "liba", "theirs"]
    assert run(host, "a=1-1", hold=["a"]).plan == predicted.plan == ["release liba"]
    # An administrator locks the released package, so the set no longer releases it.
    host.locked.append("liba")
    assert run(host, "a=1-1").plan == ["release a"]
    assert host.locked == ["theirs", "liba"]
    assert not run(host, "a=1-1").changed


def test_package_left_out_of_a_lock_can_be_changed_by_its_role(host: Host) -> None:
    """Two roles lock NVIDIA's packages. A package that the first role left out of its lock ("!*a") is free for the
    second role; otherwise the lock of the first role would block it like a stranger's lock."""
    toolkit = str(host.folder.parent / "toolkit.json")
    run(host, "liba=1-1", record_at=toolkit)
    run(host, "theirs=9-1", hold=["the*", "lib*", "!*a"])
    assert host.locked == ["theirs"]
    assert run(host, "liba=2-1", hold=["liba"], record_at=toolkit).changed
    assert (host.there["liba"], host.locked) == ("2-1", ["liba", "theirs"])


def test_dependency_locked_by_others_is_not_changed(host: Host) -> None:
    host.there["liba"] = "1-1"
    host.locked = ["liba", "not-installed"]
    with pytest.raises(RpmError, match=r"a 2-1 requires liba 2-1\n.*as they were"):
        run(host, "a=2-1", hold=["*a"])
    assert host.there == {"theirs": "9-1", "liba": "1-1"} and host.locked == ["liba", "not-installed"]
    host.locked = []
    run(host, "a=2-1", hold=["*a"])
    run(host, "a=1-1", hold=["*a"])
    assert host.there["liba"] == "1-1", "our own lock does not block our packages"


def test_pattern_locked_by_others_keeps_its_packages(host: Host) -> None:
    host.there["liba"] = "1-1"
    host.locked = ["lib*"]
    with pytest.raises(RpmError, match=r"a 2-1 requires liba 2-1\n.*as they were"):
        run(host, "a=2-1")
    with pytest.raises(RpmError, match="liba would change, but another user locked it"):
        run(host, "liba=2-1")
    assert host.there == {"theirs": "9-1", "liba": "1-1"} and host.locked == ["lib*"]


def test_dnf_reads_entries_without_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = tmp_path / "versionlock.list"
    monkeypatch.setattr(rpm_host, "VERSIONLOCK_LIST", str(entries))
    dnf, asked = rpm_host.RpmHost("dnf"), []
    said = "nvidia-driver 3:580-1\nours 1-1\n"
    monkeypatch.setattr(dnf, "run", lambda *words: asked.append(words) or (0, said, ""))
    entries.write_text("# theirs\nours-0:1-1.*\n")
    assert dnf.locks() == ["ours"] and asked == [], "rpm is not called for entries that name their package"
    entries.write_text("# theirs\nnvidia-driver\nours-0:1-1.*\n")
    assert dnf.locks() == ["nvidia-driver", "ours"]
    dnf.unlock(["ours"])
    assert entries.read_text() == "# theirs\nnvidia-driver\n"
    dnf.lock({"ours": "2-1"})
    assert entries.read_text() == "# theirs\nnvidia-driver\nours-0:2-1.*\n"


def test_a_full_disk_leaves_no_trace(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk becomes full after the repository file was written, when the key is written."""
    real = rpm_set.package_manager.write_bytes

    def full(path: str, data: bytes, mode: int = 0o644) -> None:
        if path.endswith(".asc"):
            raise OSError(28, "No space left on device", path)
        real(path, data, mode)

    (host.folder / "old.repo").write_text("baseurl=https://nvidia.github.io/nvidia-docker\n")
    monkeypatch.setattr(rpm_set.package_manager, "write_bytes", full)
    stale = ["nvidia.github.io/nvidia-docker"]
    with pytest.raises(RpmError, match=r"No space left on device: .*\.asc'\n.*as they were"):
        run(host, "a", source=SOURCE, stale_sources=stale)
    assert [path.name for path in host.folder.iterdir()] == ["old.repo"]
    assert not (host.folder.parent / "record.json").exists()


def test_dnf_gets_an_exclude_for_each_kept_package(monkeypatch: pytest.MonkeyPatch) -> None:
    dnf, asked = rpm_host.RpmHost("dnf"), []
    monkeypatch.setattr(dnf, "run", lambda *words: asked.append(words) or (0, "", ""))
    dnf.install({"a": "1-1"}, [], ["liba", "libb"])
    dnf.install({"a": "1-1"}, [], [])
    assert [[word for word in words if "exclude" in word] for words in asked] == [
        ["--exclude=liba", "--exclude=libb"],
        [],
    ]


def test_package_needed_by_others_stays_locked(host: Host) -> None:
    run(host, "a=1-1", hold=["a"])
    host.needed = "liba is needed by theirs"
    with pytest.raises(RpmError, match=r"nothing was removed.*\nliba is needed by theirs"):
        run(host, state="absent")
    assert host.there["a"] == "1-1" and host.locked == ["a"]


def test_record_of_an_earlier_version_is_read(host: Host) -> None:
    host.there.update({"nvidia-x": "1-1", "nvidia-mine": "1-1"})
    host.locked = ["nvidia-mine", "nvidia-x"]
    (host.folder / "ours.repo").write_text("[ours]\n")
    old = {"manager": host.manager, "packages": ["nvidia-x"], "locks": ["*nvidia*"]}
    (host.folder.parent / "record.json").write_text(json.dumps(old))
    run(host, state="absent")
    assert "nvidia-x" not in host.there and "nvidia-mine" in host.there
    assert host.locked == [] and not list(host.folder.iterdir())


def test_a_repository_of_an_earlier_version_goes_as_well(host: Host) -> None:
    """An earlier version wrote a repository file of the same name with another text, and its record does not list the
    file. The file must still be replaced and removed."""
    (host.folder / "ours.repo").write_text("[ours]\n")
    old = {"manager": host.manager, "packages": ["a"], "locks": []}
    (host.folder.parent / "record.json").write_text(json.dumps(old))
    host.broken = "404"
    with pytest.raises(RpmError, match="as they were"):
        run(host, "a=1-1", source=SOURCE)
    assert (host.folder / "ours.repo").read_text() == "[ours]\n"
    assert json.loads((host.folder.parent / "record.json").read_text()) == old
    host.broken = ""
    assert run(host, "a=1-1", source=SOURCE).changed
    run(host, state="absent")
    assert host.there == {"theirs": "9-1"} and not list(host.folder.iterdir())


class Zypper(rpm_host.RpmHost):
    """A simulated zypper. Every command has the same exit status and output."""

    def __init__(self, code: int) -> None:
        super().__init__("zypper")
        self.code = code

    def run(self, *arguments: str) -> tuple[int, str, str]:
        return self.code, '<solvable kind="package" name="a" edition="1-1" repository="r"/>', "said"


# columns: exit status of zypper; expected: whether a search, an installation and a refresh of our repository count as
# successful
ZYPPERS_ENDS = [
    (0, True, True, True),
    (102, True, True, True),
    (104, True, False, False),
    (106, True, True, False),
    (107, False, False, False),
    (4, False, False, False),
]


@pytest.mark.parametrize(("code", "search", "install", "refresh"), ZYPPERS_ENDS)
def test_exit_status_of_zypper_is_interpreted(code: int, search: bool, install: bool, refresh: bool) -> None:
    zypper = Zypper(code)
    for what, fine in (
        (lambda: zypper.available(["a"]), search),
        (lambda: zypper.install({"a": "1-1"}, []), install),
        (lambda: zypper.refresh("ours"), refresh),
    ):
        if fine:
            what()
        else:
            with pytest.raises(RpmError, match=f"exit status {code}"):
                what()


# errors while a web server sends the key, and an invalid address
@pytest.mark.parametrize("fault", [http.client.IncompleteRead(b"-----BEG"), http.client.InvalidURL("a b"), OSError()])
def test_key_that_cannot_be_downloaded_is_named(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    def fails(*_about: Any, **_options: Any) -> None:
        raise fault

    monkeypatch.setattr(rpm_host, "open_url", fails)
    with pytest.raises(RpmError, match=r"the key https://m\.example\.com/k cannot be fetched"):
        rpm_host.RpmHost("dnf").fetch("https://m.example.com/k")


def test_a_host_without_the_package_manager_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = rpm_host.RpmHost("dnf")
    with pytest.raises(RpmError, match=r"this host has no no-such-tool; expected a host with dnf"):
        real.must("asking", "no-such-tool")
