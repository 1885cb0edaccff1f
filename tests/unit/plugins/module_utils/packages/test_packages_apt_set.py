# SPDX-License-Identifier: Apache-2.0
"""Tests the installation of a set of packages on a simulated apt, with their source (package repository) and their
holds, which keep upgrades from changing the packages: which apt commands run, when an installation is refused, and that
the rollback restores the host.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.packages.apt_host import AptError
from doubles import apt as apt_double
from doubles.apt import LOCAL, Apt, absent, present, state


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Apt:
    return apt_double.host(tmp_path, monkeypatch)


# columns: who installed the package that apt would remove; expected words of the refusal ("": apt may remove it)
MAKES_WAY = [
    ("our record", ""),
    ("an administrator", "apt would remove containerd"),
    ("another record", "apt would remove containerd"),
]


@pytest.mark.parametrize(("whose", "words"), MAKES_WAY)
def test_packages_of_the_set_may_be_replaced_by_its_new_packages(
    apt: Apt, tmp_path: Path, whose: str, words: str
) -> None:
    """For example, the packages of one driver branch replace those of another branch, which have other names."""
    record = str(tmp_path / "record.json")
    if whose == "an administrator":
        apt.here["containerd"] = "1.0-1"
    else:
        present(apt, packages=["containerd"], record=record if whose == "our record" else str(tmp_path / "other.json"))
    apt.would_remove = ["containerd"]
    if words:
        with pytest.raises(AptError, match=words):
            present(apt, packages=["runc"], record=record)
        assert "runc" not in apt.here
    else:
        assert "remove containerd" in " ".join(present(apt, packages=["runc"], record=record).plan)
        assert "runc" in apt.here
        assert apt.rests == {"containerd"}, "apt removes the package and keeps its settings"
        apt.would_remove = []
        foretold = absent(apt, packages=[], record=record, check=True).plan
        assert absent(apt, packages=[], record=record).plan == foretold
        assert (apt.here, apt.rests) == ({}, set()), "the replaced package left no settings"


# columns: patterns of packages that must not be installed; expected words of the refusal. docker.io depends on runc and
# containerd.
COMPANIONS = [
    (["run*"], "runc would be installed for docker.io"),
    (["*", "!docker.io", "!runc"], "containerd would be installed for docker.io"),
    (["*", "!*"], ""),
    (["nvidia-*"], ""),
]


@pytest.mark.parametrize(("patterns", "words"), COMPANIONS)
def test_forbidden_dependency_stops_the_whole_installation(
    apt: Apt, tmp_path: Path, patterns: list, words: str
) -> None:
    desired = {"packages": ["docker.io"], "refuse": patterns, "record": str(tmp_path / "record.json")}
    before = state(apt)
    if words:
        with pytest.raises(AptError, match=words):
            present(apt, **desired)
        assert state(apt) == before
    else:
        assert present(apt, **desired).changed


# columns: desired packages and source; expected apt commands, whether a source file is written
DESIRED: list[tuple[dict[str, Any], list[str], bool]] = [
    ({"packages": ["docker.io"]}, ["install"], False),
    ({"packages": ["docker.io=1.0*"]}, ["install"], False),
    ({"packages": ["nvidia-smi"], "components": ["non-free"]}, ["update", "install"], True),
    ({"packages": ["nvidia-docker2"], "source": LOCAL}, ["update", "install"], True),
]


@pytest.mark.parametrize(("desired", "calls", "source"), DESIRED)
def test_installation_and_removal_restore_the_host(
    apt: Apt, tmp_path: Path, desired: dict, calls: list, source: bool
) -> None:
    before = state(apt)
    desired = {**desired, "record": str(tmp_path / "record.json")}
    predicted = present(apt, check=True, **desired)
    assert state(apt) == before
    assert apt.calls == ["look"] * source
    apt.calls.clear()
    run = present(apt, **desired)
    assert run.changed
    assert predicted.changed
    assert apt.calls == calls
    assert run.source_changed is source
    name = desired["packages"][0].partition("=")[0]
    assert set(run.transaction.install) == {name, *apt.known()[name]}
    again = present(apt, **desired)
    assert (again.changed, again.plan, again.diff()) == (False, [], [])
    gone = absent(apt, check=True, **desired)
    assert apt.here
    assert absent(apt, **desired).plan == gone.plan
    assert state(apt) == before
    assert not absent(apt, **desired).changed


def test_check_mode_names_every_package_to_install(apt: Apt) -> None:
    assert present(apt, check=True, packages=["docker.io"]).plan == present(apt, packages=["docker.io"]).plan
    assert "install runc 1.0-1" in present(Apt(apt.root), check=True, packages=["docker.io"]).plan


def test_installed_packages_are_reported_instead_of_the_simulated(apt: Apt) -> None:
    """A simulated installation may name an older version than the one that is then installed, if the archive of a
    folder repository was rebuilt in between. The report must name the installed versions."""
    apt.newer = "2.0-1"
    run = present(apt, packages=["nvidia-docker2"], source=LOCAL)
    assert run.transaction.install == {"nvidia-docker2": "2.0-1", "nvidia-container-toolkit": "2.0-1"}


def test_packages_installed_before_stay(apt: Apt, tmp_path: Path) -> None:
    record = str(tmp_path / "record.json")
    apt.here = {"runc": "0.9-1"}
    present(apt, packages=["docker.io"], record=record)
    absent(apt, packages=["docker.io"], record=record)
    assert apt.here == {"runc": "0.9-1"}
    apt.here = {"docker.io": "1.0-1"}
    present(apt, packages=["docker.io"], record=record)
    assert not absent(apt, packages=["docker.io"], record=record).changed
    assert apt.here == {"docker.io": "1.0-1"}


# columns: fault of apt, desired packages and source; expected words of the message
FAULTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"packages": ["nosuch"]}, "on Debian GNU/Linux 12 .*\n- nosuch: no repository"),
    ({}, {"packages": ["docker.io=9*"]}, "no version 9"),
    ({}, {"packages": ["nosuch"], "source": LOCAL}, "nosuch: no repository"),
    ({"unreachable": "file:/opt/apt"}, {"packages": ["nvidia-docker2"], "source": LOCAL}, "as they were"),
    ({"unreachable": "m.test/debian", "age": 1e9}, {"packages": ["nosuch"]}, "Some package lists cannot be read:"),
    ({"would_remove": ["docker-ce"]}, {"packages": ["docker.io"]}, "apt would remove docker-ce"),
    ({"would_remove": ["x"]}, {"packages": ["nvidia-docker2"], "source": LOCAL}, "apt would remove x"),
]


@pytest.mark.parametrize(("fault", "desired", "words"), FAULTS)
def test_refusal_changes_nothing(apt: Apt, tmp_path: Path, fault: dict, desired: dict, words: str) -> None:
    for name, value in fault.items():
        setattr(apt, name, value)
    before = state(apt)
    with pytest.raises(AptError, match=words):
        present(apt, **desired, record=str(tmp_path / "record.json"))
    assert state(apt) == before


# columns: age of apt's package lists in seconds, whether the archive no longer has the listed versions, desired
# packages; expected apt commands
LISTS: list[tuple[float, bool, list[str], list[str]]] = [
    (0.0, False, ["docker.io"], ["install"]),
    (86399.0, False, ["docker.io"], ["install"]),
    (86401.0, False, ["docker.io"], ["update", "install"]),
    (math.inf, False, ["docker.io"], ["update", "install"]),
    (0.0, True, ["docker.io"], ["install", "update", "install"]),
    (86401.0, True, ["docker.io"], ["update", "install"]),
    # no packages are desired, so apt is not called
    (math.inf, True, [], []),
]


@pytest.mark.parametrize(("age", "gone", "packages", "calls"), LISTS)
def test_old_package_lists_are_read_again(apt: Apt, age: float, gone: bool, packages: list, calls: list) -> None:
    apt.age, apt.gone = age, gone
    run = present(apt, packages=packages)
    assert (apt.calls, set(apt.here)) == (calls, {"docker.io", "runc", "containerd"} if packages else set())
    assert run.plan == sorted({*run.plan}), "expected each line of the plan once"
    assert not present(apt, packages=packages).changed
    assert apt.calls == calls


def test_archive_that_misses_listed_files_is_tried_twice(apt: Apt) -> None:
    apt.gone, apt.unreachable = True, "m.test/debian"
    with pytest.raises(AptError, match="404"):
        present(apt, packages=["docker.io"])
    assert (apt.calls, apt.here) == (["install", "update", "install"], {})


@pytest.mark.parametrize("source", [None, LOCAL])
def test_unreadable_unneeded_source_is_a_warning(apt: Apt, source: dict | None) -> None:
    (apt.root / "theirs.list").write_text("deb https://example.com/ stable main\n")
    apt.unreachable, apt.age = "example.com", math.inf
    name = "nvidia-docker2" if source else "docker.io"
    predicted = present(apt, check=True, packages=[name], source=source)
    run = present(apt, packages=[name], source=source)
    assert name in apt.here and predicted.plan == run.plan
    assert "example.com" in "".join(run.warnings)


# columns: fault of apt, desired packages and source; expected words of an error, words of a warning. In no row may
# check mode predict an installation.
UNPREDICTED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {"packages": ["does-not-exist-580"]}, "does-not-exist-580: no repository", ""),
    ({}, {"packages": ["does-not-exist-580"], "source": LOCAL}, "does-not-exist-580: no repository", ""),
    ({}, {"packages": ["docker.io=9*"], "source": LOCAL}, "no version 9", ""),
    ({"age": math.inf}, {"packages": ["does-not-exist-580"]}, "does-not-exist-580: no repository", ""),
    (
        {"unreachable": "file:/opt/apt"},
        {"packages": ["nvidia-docker2"], "source": LOCAL},
        "",
        "cannot be predicted: reading",
    ),
    ({"unreachable": "m.test"}, {"packages": ["nosuch"]}, "", "nosuch cannot be predicted, because some package lists"),
]


@pytest.mark.parametrize(("fault", "desired", "words", "warning"), UNPREDICTED)
def test_check_mode_does_not_predict_a_missing_package(
    apt: Apt, fault: dict, desired: dict, words: str, warning: str
) -> None:
    for name, value in fault.items():
        setattr(apt, name, value)
    before = state(apt)
    if words:
        with pytest.raises(AptError, match=words):
            present(apt, check=True, **desired)
    else:
        run = present(apt, check=True, **desired)
        assert warning in " ".join(run.warnings)
        assert not [line for line in run.plan if line.startswith("install")] and not run.transaction.install
        assert run.changed is bool(desired.get("source")), "only the source file can be predicted"
    assert state(apt) == before and set(apt.calls) <= {"look"}


# columns: desired packages, optional packages; expected installed packages
OPTIONAL: list[tuple[list[str], list[str], set[str]]] = [
    (["containerd"], ["nvidia-docker2"], {"containerd", "nvidia-docker2", "nvidia-container-toolkit"}),
    (["containerd"], ["nvidia-docker2=1.*"], {"containerd", "nvidia-docker2", "nvidia-container-toolkit"}),
    (["containerd"], ["nosuch"], {"containerd"}),
    (["runc"], ["nosuch", "containerd"], {"runc", "containerd"}),
]


@pytest.mark.parametrize(("packages", "optional", "came"), OPTIONAL)
def test_optional_packages_are_installed_if_available(
    apt: Apt, tmp_path: Path, packages: list, optional: list, came: set
) -> None:
    desired = {"packages": packages, "optional": optional, "source": LOCAL, "record": str(tmp_path / "record.json")}
    predicted = present(apt, check=True, **desired)
    run = present(apt, **desired)
    assert (set(apt.here), predicted.plan) == (came, run.plan)
    assert not present(apt, **desired).changed
    apt.here.pop(next(iter(came - {*packages}), ""), None)
    assert not present(apt, **desired).changed or came == {*packages}, "missing optional packages are no fault"
    absent(apt, **desired)
    assert apt.here == {}


def test_an_interrupted_dpkg_is_finished_first(apt: Apt) -> None:
    apt.broken = True
    assert present(apt, check=True, packages=["docker.io"]).plan[0] == "finish the interrupted dpkg"
    present(apt, packages=["docker.io"])
    assert apt.calls == ["configure", "install"]


def test_predecessors_are_removed_and_stale_sources_restored(apt: Apt, tmp_path: Path) -> None:
    stale = apt.root / "nvidia-docker.list"
    stale.write_text("deb https://nvidia.github.io/nvidia-docker/ubuntu18.04/amd64 /\n")
    apt.would_remove = ["nvidia-container-runtime"]
    desired: dict[str, Any] = {
        "packages": ["nvidia-docker2"],
        "source": LOCAL,
        "stale_sources": ["nvidia.github.io/nvidia-docker"],
        "may_remove": ["nvidia-container-runtime"],
        "record": str(tmp_path / "record.json"),
    }
    run = present(apt, **desired)
    assert not stale.exists()
    assert "remove nvidia-container-runtime" in run.plan
    apt.would_remove = []
    absent(apt, **desired)
    assert stale.exists()
    assert [path.name for path in apt.root.iterdir() if path.name.startswith("ours")] == []


def test_removal_that_removes_other_packages_is_refused(apt: Apt, tmp_path: Path) -> None:
    record = str(tmp_path / "record.json")
    present(apt, packages=["docker.io"], record=record)
    apt.would_remove = ["their-tool"]
    with pytest.raises(AptError, match="their-tool would be removed too"):
        absent(apt, packages=["docker.io"], record=record)
    assert "docker.io" in apt.here


def test_preserved_file_survives_the_purge_of_its_package(apt: Apt, tmp_path: Path) -> None:
    kept = tmp_path / "daemon.json"
    kept.write_text('{"theirs": 1}')
    kept.chmod(0o640)
    present(apt, packages=["docker.io"])
    apt.deletes = kept
    absent(apt, packages=["docker.io"], keep_files=[str(kept)])
    assert kept.read_text() == '{"theirs": 1}'
    assert kept.stat().st_mode & 0o777 == 0o640


def test_packages_are_held_and_released(apt: Apt, tmp_path: Path) -> None:
    desired: dict[str, Any] = {
        "packages": ["docker.io"],
        "hold": ["docker.io", "runc", "not-there"],
        "record": str(tmp_path / "record.json"),
    }
    predicted = present(apt, check=True, **desired)
    assert apt.holds == set()
    assert present(apt, **desired).plan == predicted.plan
    assert predicted.plan[-2:] == ["hold docker.io", "hold runc"]
    assert apt.holds == {"docker.io", "runc"}
    assert not present(apt, **desired).changed
    # An administrator released this hold, so the next run sets it again.
    apt.holds.discard("runc")
    assert present(apt, **desired).plan == ["hold runc"]
    absent(apt, **desired)
    assert apt.holds & {*apt.here} == set()


def test_package_installed_before_is_released_and_stays(apt: Apt, tmp_path: Path) -> None:
    desired: dict[str, Any] = {
        "packages": ["docker.io"],
        "hold": ["docker.io"],
        "record": str(tmp_path / "record.json"),
    }
    apt.here, apt.holds = {"docker.io": "1.0-1", "runc": "1"}, {"runc"}
    present(apt, **desired)
    assert apt.holds == {"docker.io", "runc"}
    assert absent(apt, **desired).plan == ["release docker.io"]
    assert (apt.holds, apt.here) == ({"runc"}, {"docker.io": "1.0-1", "runc": "1"})


def test_holds_that_are_no_longer_desired_are_released(apt: Apt, tmp_path: Path) -> None:
    desired: dict[str, Any] = {"packages": ["docker.io"], "record": str(tmp_path / "record.json")}
    apt.here, apt.holds = {"containerd": "1"}, {"containerd"}
    present(apt, hold=["docker.io", "runc", "containerd"], **desired)
    predicted = present(apt, check=True, hold=["docker.io"], **desired)
    assert apt.holds == {"containerd", "docker.io", "runc"}
    assert present(apt, hold=["docker.io"], **desired).plan == predicted.plan == ["release runc"]
    assert not present(apt, hold=["docker.io"], **desired).changed
    # An administrator holds the released package, so the set no longer releases it.
    apt.holds.add("runc")
    assert present(apt, **desired).plan == ["release docker.io"]
    assert apt.holds == {"containerd", "runc"}
    assert not present(apt, **desired).changed


def test_package_held_by_others_is_not_changed(apt: Apt, tmp_path: Path) -> None:
    apt.holds, apt.would_remove = {"their-tool"}, ["their-tool"]
    before = state(apt)
    with pytest.raises(AptError, match="another user holds it; release it with: apt-mark unhold their-tool"):
        present(apt, packages=["docker.io"], may_remove=["their-tool"], record=str(tmp_path / "record.json"))
    assert state(apt) == before
