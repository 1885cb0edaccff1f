# SPDX-License-Identifier: Apache-2.0
"""Tests what stays on a host if a change of containerd's configuration file is interrupted, or if containerd does not
start with it: the file, and our record, which has the former text for the rollback.
"""

from __future__ import annotations

import json
import time

import pytest
import tomllib
from ansible_collections.vgpu.fleet.plugins.module_utils.engines.containerd_apply import Applier, Options
from ansible_collections.vgpu.fleet.plugins.module_utils.engines.containerd_text import ConfigError, Desired
from ansible_collections.vgpu.fleet.plugins.module_utils.text import toml_text

MAIN = "version = 2\n"
# An administrator's addition to the file
MIRROR = '\n[plugins."io.containerd.grpc.v1.cri".registry]\nconfig_path = "/etc/containerd/certs.d"\n'
DEFAULT = '\n[plugins."io.containerd.grpc.v1.cri".containerd]\ndefault_runtime_name = "crun"\n'


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
    assert json.loads((host.folder / "record.json").read_text())[str(host.folder / "config.toml")]["former"] == MAIN
    host(absent=True).carry_out()
    assert (host.folder / "config.toml").read_text() == MAIN


def test_a_first_change_that_fails_leaves_no_record(host):
    host.kind.fail_restarts = 1
    with pytest.raises(ConfigError):
        host().carry_out()
    assert ((host.folder / "config.toml").read_text(), (host.folder / "record.json").exists()) == (MAIN, False)


def to_runc(text):
    return text.replace('default_runtime_name = "nvidia"', 'default_runtime_name = "runc"')


# columns: an administrator's edit between two runs, variables of the second run; whether a removal then restores the
# former file byte for byte
EDITS = [
    (str, {"systemd_cgroup": True}, True),
    (lambda text: text + MIRROR, {"systemd_cgroup": True}, False),
    (lambda text: to_runc(text) + MIRROR, {}, False),
    (lambda text: text + MIRROR, {"default": False}, False),
]


@pytest.mark.parametrize(("edit", "second", "exact"), EDITS)
def test_edits_between_two_runs_survive_a_removal(host, edit, second, exact):
    path = host.folder / "config.toml"
    host().carry_out()
    path.write_text(edit(path.read_text()))
    host(**second).carry_out()
    host(absent=True, **second).carry_out()
    left = path.read_text()
    assert (left == MAIN, MIRROR in left, "nvidia" in left) == (exact, not exact, False)
    assert not (host.folder / "record.json").exists()


# keys of a runtime that `containerd config migrate` of containerd 2 writes in addition
MIGRATED = "runtime_path = ''\npod_annotations = []\n"


def migrate(text, folder):
    """Returns the text as `containerd config migrate` of containerd 2 writes it, with the folder that its package
    imports."""
    head = f"version = 3\nimports = ['{folder}/*.toml']\n"
    text = text.replace("version = 2\n", head).replace("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime")
    kind = 'runtime_type = "io.containerd.runc.v2"\n'
    return text.replace(kind, kind + MIGRATED).replace('"', "'")


@pytest.mark.parametrize("imports", [True, False])
def test_removal_after_a_move_to_another_version_and_file(host, imports):
    path, folder = host.folder / "config.toml", host.folder / "conf.d"
    folder.mkdir()
    host().carry_out()
    text = migrate(path.read_text(), folder)
    path.write_text(text if imports else text.replace("imports", "# imports"))
    host(systemd_cgroup=True).carry_out()
    assert host(systemd_cgroup=True).plan() == []
    assert [one.name for one in folder.iterdir()] == ["99-vgpu.toml"] * imports
    removal = host(absent=True)
    assert removal.changes == [
        f"remove NVIDIA's runtime from {one}" for one in [path, folder / "99-vgpu.toml"][: 1 + imports]
    ]
    removal.carry_out()
    assert list(folder.iterdir()) == []
    assert "imports" in path.read_text()
    assert set(toml_text.scan(path.read_text()).entries) <= {("version",), ("imports",)}


def test_failed_removal_restores_every_file(host):
    path, folder = host.folder / "config.toml", host.folder / "conf.d"
    folder.mkdir()
    host().carry_out()
    path.write_text(migrate(path.read_text(), folder))
    host().carry_out()
    before = [one.read_text() for one in (path, folder / "99-vgpu.toml", host.folder / "record.json")]
    host.kind.fail_restarts = 1
    with pytest.raises(ConfigError, match="the former file is back"):
        host(absent=True).carry_out()
    assert [one.read_text() for one in (path, folder / "99-vgpu.toml", host.folder / "record.json")] == before


def test_a_record_of_a_former_version_restores_no_whole_file(host):
    path, record = host.folder / "config.toml", host.folder / "record.json"
    host().carry_out()
    ours = path.read_text() + MIRROR
    path.write_text(ours)
    # Version 0.2.0 recorded the edited text as its own and did not record the edit.
    record.write_text(json.dumps({"target": str(path), "former": MAIN, "ours": ours}))
    host(absent=True).carry_out()
    assert path.read_text().endswith(MIRROR)
    assert "nvidia" not in path.read_text()


@pytest.mark.parametrize("former", [MAIN + MIRROR, MAIN + MIRROR + DEFAULT])
def test_a_record_of_a_former_version_after_a_move_reverts_both_files(host, former):
    path, folder, record = host.folder / "config.toml", host.folder / "conf.d", host.folder / "record.json"
    folder.mkdir()
    path.write_text(former)
    host().carry_out()
    path.write_text(migrate(path.read_text(), folder))
    host().carry_out()
    drop_in = folder / "99-vgpu.toml"
    # Version 0.2.0 kept the main file's former text after the move, but only the drop-in as its target.
    record.write_text(json.dumps({"target": str(drop_in), "former": former, "ours": drop_in.read_text()}))
    host(absent=True).carry_out()
    assert (list(folder.iterdir()), record.exists()) == ([], False)
    left, before = (tomllib.loads(text)["plugins"].popitem()[1] for text in (path.read_text(), former))
    default = [one.pop("containerd", {}).get("default_runtime_name") for one in (left, before)]
    assert (left, default[0], "nvidia" in path.read_text()) == (before, default[1], False)
