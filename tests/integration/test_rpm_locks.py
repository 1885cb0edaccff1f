# SPDX-License-Identifier: Apache-2.0
"""What nvidia_driver locks on RPM systems, and that its inverse takes the locks away: on doubles of rpm, zypper and dnf
that keep packages and locks in files. No such host has been at hand; what the doubles answer is what manuals say."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, Workplace

# Packages and locks are the lines of two files; a locked package is not removed, as with the real tools.
DOUBLE = """\
#!/bin/sh
cd {folder}
tool=${{0##*/}}
echo "$tool $*" >> calls
case "$tool $*" in
rpm*) shift 3; for name; do grep -Fx "$name" packages || {{ echo "package $name is not installed"; bad=1; }}; done
      exit ${{bad:-0}} ;;
esac
[ "$1" = --non-interactive ] && shift
[ "$1" = -y ] && shift
[ "$1" = --gpg-auto-import-keys ] && shift
what=$1; shift
[ "$what" = versionlock ] && {{ what=$1$what; shift; }}
for name; do
    case $name in --*) continue ;; esac
    case $what in
    install) grep -qFx "$name" packages || echo "$name" >> packages ;;
    remove) grep -qFx "$name" locks && {{ echo "$name is locked"; exit 1; }}
            grep -vFx "$name" packages > fresh; mv fresh packages ;;
    addlock) echo "$name" >> locks; echo "Specified lock has been successfully added." ;;
    removelock | deleteversionlock)
        if grep -qFx "$name" locks; then
            grep -vFx "$name" locks > fresh; mv fresh locks
            [ $what = removelock ] && echo "1 lock has been successfully removed."
            [ $what = removelock ] || echo "Deleting versionlock for: $name"
        fi ;;
    esac
done
exit 0
"""
CHOICE = {
    "manager": "zypper",
    "packages": ["nvidia-compute", "nvidia-utils"],
    "holds": ["nvidia-compute", "nvidia-utils"],
    "repository": {},
    "module_stream": "",
}


@pytest.fixture
def rpm_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "host"
    folder.mkdir()
    for tool in ("rpm", "zypper", "dnf"):
        (folder / tool).write_text(DOUBLE.format(folder=folder))
        (folder / tool).chmod(0o755)
    (folder / "packages").write_text("theirs\nnvidia-utils\n")
    (folder / "locks").write_text("theirs\n")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def tasks_from(place: Workplace, name: str, record: Path, **variables: Any) -> Run:
    place.hosts({"some": ["one"]})
    role = {"ansible.builtin.import_role": {"name": "vgpu.fleet.nvidia_driver", "tasks_from": name}}
    options = {"nvidia_driver_record": str(record), "__nvidia_driver": {"choice": CHOICE}, **variables}
    return place.play([{"hosts": "all", "gather_facts": False, "tasks": [{**role, "vars": options}]}])


def lines(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text().split()


def test_what_zypper_locked_is_unlocked_before_it_is_removed(place: Workplace, rpm_host: Path) -> None:
    record = rpm_host / "record" / "driver.json"
    run = tasks_from(place, "rpm", record)
    assert run.code == 0, run.output
    assert lines(rpm_host, "locks") == ["theirs", "nvidia-compute", "nvidia-utils"]
    assert lines(rpm_host, "packages") == ["theirs", "nvidia-utils", "nvidia-compute"]
    back = tasks_from(place, "rpm_absent", record)
    assert back.code == 0, back.output
    assert lines(rpm_host, "locks") == ["theirs"]
    # What was there before stays, and is free again.
    assert lines(rpm_host, "packages") == ["theirs", "nvidia-utils"]
    assert not record.exists()
    again = tasks_from(place, "rpm_absent", record)
    assert "changed=0 " in again.output, again.output


# What the record of a dnf host holds -> locks and packages after the way back.
RECORDS = [
    ({"locks": ["nvidia-driver"], "packages": ["nvidia-driver", "python3-dnf-plugin-versionlock"]}, ["theirs"], []),
    # Killed after the locks went.
    ({"locks": ["gone"], "packages": ["nvidia-driver"]}, ["theirs", "nvidia-driver"], None),
    # Written by a version that locked and kept no account of it.
    ({"packages": []}, ["theirs", "nvidia-driver"], ["nvidia-driver", "python3-dnf-plugin-versionlock"]),
]


@pytest.mark.parametrize("kept, locks, packages", RECORDS)
def test_dnf_forgets_its_locks(
    place: Workplace, rpm_host: Path, kept: dict[str, Any], locks: list[str], packages: list[str] | None
) -> None:
    record = rpm_host / "driver.json"
    record.write_text(json.dumps({"manager": "dnf", **kept}))
    (rpm_host / "packages").write_text("nvidia-driver\npython3-dnf-plugin-versionlock\n")
    (rpm_host / "locks").write_text("theirs\nnvidia-driver\n")
    run = tasks_from(place, "rpm_absent", record)
    assert lines(rpm_host, "locks") == locks
    if packages is None:
        # The double keeps what is locked, as dnf does: a lock that was not taken away is a fault that is seen.
        assert run.code != 0
        assert "nvidia-driver is locked" in run.output
    else:
        assert run.code == 0, run.output
        assert lines(rpm_host, "packages") == packages
