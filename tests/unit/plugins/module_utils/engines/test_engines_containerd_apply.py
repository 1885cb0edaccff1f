# SPDX-License-Identifier: Apache-2.0
"""Tests what stays on a host if a change of containerd's configuration file is interrupted, or if containerd does not
start with it: the file, and our record, which has the former text for the rollback.
"""

from __future__ import annotations

import json
import time

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.engines.containerd_apply import Applier, Options
from ansible_collections.vgpu.fleet.plugins.module_utils.engines.containerd_text import ConfigError, Desired

MAIN = "version = 2\n"


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Returns a function that configures a running, simulated containerd, which accepts every file. Its attribute
    ``calls`` lists the restarts of this containerd."""
    program = tmp_path / "runtime"
    program.write_text("")
    program.chmod(0o755)
    (tmp_path / "config.toml").write_text(MAIN)
    started = [time.time() - 60]
    calls: list[str] = []

    class Run(Applier):
        fail_restarts = 0

        def version(self):
            return ()

        def unit(self):
            return {"present": True, "active": True, "started": started[0]}

        def restart(self):
            calls.append("restart")
            if Run.fail_restarts:
                Run.fail_restarts -= 1
                return "bad file"
            started[0] = time.time() + 1
            return ""

    def run(absent=False, **desired):
        options = Options(
            str(tmp_path / "config.toml"), Desired(path=str(program), **desired), absent, str(tmp_path / "record.json")
        )
        applier = Run(options)
        applier.prepare()
        return applier

    run.kind, run.calls, run.folder = Run, calls, tmp_path
    return run


def test_removal_killed_before_the_restart_is_completed(host, monkeypatch):
    host().carry_out()
    killed = host(absent=True)
    monkeypatch.setattr(host.kind, "restart", lambda self: (unused for unused in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        killed.carry_out()
    monkeypatch.undo()
    assert (host.folder / "config.toml").read_text() == MAIN
    # The file is restored, but containerd still runs with the NVIDIA runtime, whose program the next step would remove.
    # So the next run must restart containerd.
    again = host(absent=True)
    assert again.plan() == ["restart containerd"]
    host.calls.clear()
    again.carry_out()
    assert (host.calls, (host.folder / "record.json").exists()) == (["restart"], False)
    assert host(absent=True).plan() == []


def test_failed_second_change_keeps_the_record_of_the_first(host):
    host().carry_out()
    first = (host.folder / "config.toml").read_text()
    host.kind.fail_restarts = 1
    with pytest.raises(ConfigError, match="the former file is back, and containerd runs with it"):
        host(systemd_cgroup=True).carry_out()
    assert (host.folder / "config.toml").read_text() == first
    assert json.loads((host.folder / "record.json").read_text())["former"] == MAIN
    host(absent=True).carry_out()
    assert (host.folder / "config.toml").read_text() == MAIN


def test_a_first_change_that_fails_leaves_no_record(host):
    host.kind.fail_restarts = 1
    with pytest.raises(ConfigError):
        host().carry_out()
    assert ((host.folder / "config.toml").read_text(), (host.folder / "record.json").exists()) == (MAIN, False)
