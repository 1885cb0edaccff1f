# SPDX-License-Identifier: Apache-2.0
"""Tests the drop-in file that the role container_runtime writes for CRI-O, with a stand-in for systemctl. If the engine
fails with the new file, the former file must be restored and the engine must run with it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import Run, Workplace

SYSTEMCTL = """\
#!/bin/sh
# It has one unit, crio.service, which does not start while its file contains the text in {folder}/hates.
cd {folder}
verb=$1
[ "$verb" = show ] || echo "$@" >> calls
case $verb in
show)
    for unit in "$@"; do case $unit in *.service)
        printf 'Id=%s\\nLoadState=loaded\\nActiveState=%s\\nUnitFileState=enabled\\n' "$unit" "$(cat state)"
        printf 'NeedDaemonReload=no\\nMainPID=0\\nExecMainStartTimestampMonotonic=%s\\n\\n' "$(cat started)"
    esac; done ;;
restart)
    awk '{{printf "%.0f", $1 * 1000000}}' /proc/uptime > started
    if grep -q -f hates {path} 2>/dev/null; then
        cat dies > state
        grep -q failed dies && {{ echo "Job for $2 failed" >&2; exit 1; }}
    else
        echo active > state
    fi ;;
is-active) cat state; grep -qx active state ;;
esac
exit $?
"""
NEW, FORMER = "[crio.runtime]\ndefault_runtime = nvidia\n", "# former\n"


class Engine:
    def __init__(self, place: Workplace, folder: Path) -> None:
        self.place, self.folder, self.path = place, folder, folder / "crio.conf.d" / "99-vgpu.conf"
        (folder / "bin").mkdir()
        program = folder / "bin" / "systemctl"
        program.write_text(SYSTEMCTL.format(folder=folder, path=self.path))
        program.chmod(0o755)
        for name, text in (("state", "active\n"), ("started", "0"), ("hates", "nothing of it\n"), ("dies", "failed\n")):
            (folder / name).write_text(text)
        place.hosts({"some": ["one"]})

    def play(self, **variables: str) -> Run:
        (self.folder / "calls").write_text("")
        choice = {"drop_in": {"engine": "crio", "path": str(self.path), "text": NEW}}
        given = {"__container_runtime": {"choice": choice}, **variables}
        role = {"name": "vgpu.fleet.container_runtime", "tasks_from": "drop_in"}
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        tasks = [{"ansible.builtin.import_role": role, "vars": given}]
        return self.place.play([{"hosts": "all", "gather_facts": False, "environment": {"PATH": path}, "tasks": tasks}])

    def calls(self) -> list[str]:
        return [line.split()[0] for line in (self.folder / "calls").read_text().splitlines()]

    def text(self) -> str | None:
        return self.path.read_text() if self.path.exists() else None


@pytest.fixture
def engine(place: Workplace, tmp_path: Path) -> Engine:
    return Engine(place, tmp_path)


def test_engine_restarts_only_for_a_changed_file(engine: Engine) -> None:
    first: Run = engine.play()
    assert (first.code, engine.text(), engine.calls()) == (0, NEW, ["restart", "is-active"]), first.output
    again = engine.play()
    assert (again.code, engine.calls()) == (0, []) and "changed=0" in again.output, again.output
    gone = engine.play(container_runtime_state="absent")
    assert (gone.code, engine.text(), engine.calls()) == (0, None, ["restart", "is-active"]), gone.output


# columns: the file before the run (None means no file); the state that systemd reports for an engine that fails with
# the new file
FAULTS = [
    (None, "failed\n"),
    (FORMER, "activating\n"),  # The engine starts and exits in a loop.
]


@pytest.mark.parametrize("before, dies", FAULTS)
def test_engine_that_fails_runs_with_the_former_file(engine: Engine, before: str | None, dies: str) -> None:
    (engine.folder / "hates").write_text("nvidia\n")
    (engine.folder / "dies").write_text(dies)
    if before is not None:
        engine.path.parent.mkdir()
        engine.path.write_text(before)
    run = engine.play()
    assert run.code != 0 and "crio.service did not start after" in run.output, run.output
    assert "The former file is restored" in run.output and "the engine runs with it" in " ".join(run.output.split())
    assert engine.text() == before
    assert (engine.folder / "state").read_text() == "active\n", "expected the engine to run with the former file"
    assert engine.calls()[-2:] == ["reset-failed", "restart"]
