# SPDX-License-Identifier: Apache-2.0
"""Tests how a changed daemon.json is written and applied on a simulated dockerd: when the daemon is reloaded, restarted
or left alone, and what the file contains after each fault.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.engines import daemon_apply, daemon_json
from ansible_collections.vgpu.fleet.plugins.module_utils.engines.daemon_apply import Applier, ApplyError, Options
from ansible_collections.vgpu.fleet.plugins.module_utils.engines.docker_host import DockerHostError

NVIDIA = {"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime"}}}


class Daemon:
    """A simulated dockerd. Like the real one, it reads daemon.json when it starts and when it is reloaded. Its
    attributes make a step fail."""

    service = "docker"

    def __init__(self, path: Path, running: bool = True, installed: bool = True) -> None:
        self.path, self.running, self.installed = path, running, installed
        self.calls: list[str] = []
        self.programs = {"/usr/bin/nvidia-container-runtime"}
        self.names: list[str] = []
        self.command_line = ["dockerd", "-H", "fd://"]
        self.complaint: str | None = None
        self.fails_with: str | None = None  # If daemon.json has this key, dockerd does not start.
        self.at_boot = True
        self.masked = False
        self.deaf = False  # deaf: a reload changes no setting of dockerd.
        self.silent = False  # silent: dockerd runs but does not respond.
        self.state = self.read() if running else {}

    def read(self) -> dict:
        return json.loads(self.path.read_text() or "{}") if self.path.exists() else {}

    def facts(self) -> dict[str, bool]:
        return {
            "present": self.installed,
            "masked": self.masked,
            "enabled": self.at_boot,
            "active": self.running,
            "failed": False,
        }

    def enable(self) -> None:
        self.calls.append("enable")
        self.at_boot = True

    def argv(self) -> list[str]:
        return self.command_line if self.running else []

    def info(self) -> dict | None:
        if not self.running or self.silent:
            return None
        runtimes = {"runc": {"path": "runc"}, **self.state.get("runtimes", {})}
        return {
            "DefaultRuntime": self.state.get("default-runtime", "runc"),
            "Runtimes": runtimes,
            "LiveRestoreEnabled": self.state.get("live-restore", False),
        }

    def containers(self, answers: bool = True) -> list[str]:
        return [] if answers and self.silent else self.names

    def is_program(self, path: str) -> bool:
        return path in self.programs

    def validate(self, path: str, argv: list[str]) -> str | None:
        json.loads(Path(path).read_text())
        return self.complaint

    def reload(self) -> None:
        self.calls.append("reload")
        if not self.deaf:
            # After a reload, dockerd keeps its former value for a key that the file no longer has.
            self.state = {**self.state, **self.read()}

    def restart(self) -> None:
        self.calls.append("restart")
        self.silent = False
        self.running = self.fails_with is None or self.fails_with not in self.read()
        if not self.running:
            raise DockerHostError("systemctl restart docker: exit status 1")
        self.state = self.read()

    def wait(self, condition: object, timeout: float) -> dict:
        info = self.info()
        if info is None or not condition(info):  # type: ignore[operator]
            raise DockerHostError("the daemon answers, but has not applied the file")
        return info


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "etc" / "docker"
    folder.mkdir(parents=True)
    return folder / "daemon.json"


def run(path: Path, daemon: Daemon, settings: dict, **more: object) -> Applier:
    options = Options(str(path), settings, marker=str(path.parent / "pending"), **more)  # type: ignore[arg-type]
    applier = Applier(options, daemon)  # type: ignore[arg-type]
    applier.prepare()
    if not options.check_mode:
        applier.carry_out()
    return applier


def leavings(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir())


# columns: text of daemon.json before (None: no file), settings; expected calls to the daemon
APPLIED = [
    (None, NVIDIA, ["reload"]),
    ('{"bridge": "none"}', NVIDIA, ["reload"]),
    (json.dumps(NVIDIA), NVIDIA, []),
    ("{}", {"log-driver": "local"}, ["restart"]),
    ("{}", {**NVIDIA, "log-driver": "local"}, ["restart"]),
]


@pytest.mark.parametrize(("before", "settings", "calls"), APPLIED)
def test_applied_file_causes_these_calls(path: Path, before: str | None, settings: dict, calls: list) -> None:
    if before is not None:
        path.write_text(before)
    daemon = Daemon(path)
    applier = run(path, daemon, settings)
    assert daemon.calls == calls
    assert applier.applied == (calls[0] if calls else "none")
    assert {**daemon.state, **settings} == daemon.state
    assert leavings(path) == ["daemon.json"]
    again = Daemon(path)
    assert run(path, again, settings).plan() == []
    assert again.calls == []


@pytest.mark.parametrize(("before", "settings", "calls"), APPLIED)
def test_check_mode_predicts_and_changes_nothing(path: Path, before: str | None, settings: dict, calls: list) -> None:
    if before is not None:
        path.write_text(before)
    predicted = run(path, Daemon(path), settings, check_mode=True)
    assert (path.read_text() if path.exists() else None) == before
    real = run(path, Daemon(path), settings)
    assert (predicted.plan(), predicted.applied, predicted.after) == (real.plan(), real.applied, real.after)


def test_a_bare_host_in_check_mode_warns_of_the_missing_program(path: Path) -> None:
    daemon = Daemon(path, running=False, installed=False)
    daemon.programs = set()
    applier = run(path, daemon, NVIDIA, check_mode=True)
    assert applier.changes
    assert "no program" in applier.warnings[0]
    with pytest.raises(ApplyError, match="no program"):
        run(path, daemon, NVIDIA)
    assert not path.exists()


def test_a_program_that_the_plan_installs_gives_no_warning_in_check_mode(path: Path) -> None:
    daemon = Daemon(path, running=False, installed=False)
    daemon.programs = set()
    planned = ["/usr/bin/nvidia-container-runtime"]
    assert run(path, daemon, NVIDIA, check_mode=True, planned_programs=planned).warnings == []
    assert run(path, daemon, NVIDIA, check_mode=True, planned_programs=["/usr/bin/other"]).warnings != []
    with pytest.raises(ApplyError, match="no program"):
        run(path, daemon, NVIDIA, planned_programs=planned)


def test_a_stopped_daemon_is_started_with_the_file(path: Path) -> None:
    daemon = Daemon(path, running=False)
    assert run(path, daemon, NVIDIA).applied == "start"
    assert daemon.running
    assert daemon.state == NVIDIA


def test_a_masked_daemon_is_refused_before_anything_is_written(path: Path) -> None:
    daemon = Daemon(path, running=False)
    daemon.masked = True
    with pytest.raises(ApplyError, match=r"docker.service is masked; systemctl unmask docker.service"):
        run(path, daemon, NVIDIA)
    assert (daemon.calls, path.exists()) == ([], False)


def test_a_daemon_that_would_not_start_at_boot_is_enabled(path: Path) -> None:
    path.write_text(json.dumps(NVIDIA))
    daemon = Daemon(path)
    daemon.at_boot = False
    assert run(path, daemon, NVIDIA, check_mode=True).plan() == ["enable docker"]
    assert run(path, daemon, NVIDIA).plan() == ["enable docker"]
    assert daemon.calls == ["enable"]
    assert run(path, daemon, NVIDIA).plan() == []


# columns: settings, changed attributes of the daemon; expected words of the refusal. The file stays unchanged, and the
# daemon gets no call.
REFUSED = [
    ({"default-runtime": "nvidia"}, {}, "does not define"),
    ({"hosts": ["unix:///x"]}, {}, "command line"),
    ({"runtimes": {"x": {"path": "/nowhere"}}}, {}, "no program"),
    ({"debug": True}, {"complaint": "unknown key"}, "dockerd --validate says: unknown key"),
    ({"log-driver": "local"}, {"names": ["job"]}, "would stop the running containers job"),
]


@pytest.mark.parametrize(("settings", "state", "words"), REFUSED)
def test_fault_leaves_the_file_unchanged(path: Path, settings: dict, state: dict, words: str) -> None:
    path.write_text('{"a": 1}')
    daemon = Daemon(path)
    for name, value in state.items():
        setattr(daemon, name, value)
    with pytest.raises(ApplyError, match=words):
        run(path, daemon, settings)
    assert path.read_text() == '{"a": 1}'
    assert daemon.calls == []
    assert leavings(path) == ["daemon.json"]


# columns: restart policy, running containers, whether live-restore keeps containers alive; expected: whether the daemon
# is restarted
POLICIES = [
    ("if_idle", [], False, True),
    ("if_idle", ["job"], False, False),
    ("if_idle", ["job"], True, True),
    ("always", ["job"], False, True),
    ("never", [], False, False),
]


@pytest.mark.parametrize(("policy", "names", "alive", "done"), POLICIES)
def test_restart_policy_decides_whether_docker_restarts(
    path: Path, policy: str, names: list, alive: bool, done: bool
) -> None:
    path.write_text(json.dumps({"live-restore": True} if alive else {}))
    daemon = Daemon(path)
    daemon.names = names
    if done:
        applier = run(path, daemon, {"log-driver": "local"}, restart=policy)
        assert daemon.calls == ["restart"]
        assert applier.containers == names
    else:
        with pytest.raises(ApplyError, match="nothing was written"):
            run(path, daemon, {"log-driver": "local"}, restart=policy)
        assert daemon.calls == []


@pytest.mark.parametrize(("policy", "names", "_alive", "done"), [row for row in POLICIES if not row[2]])
def test_restart_policy_of_a_daemon_that_does_not_answer(
    path: Path, policy: str, names: list, _alive: bool, done: bool
) -> None:
    path.write_text("{}")
    daemon = Daemon(path)
    daemon.names, daemon.silent = names, True
    if done:
        assert run(path, daemon, {}, restart=policy).containers == names
        assert daemon.calls == ["restart"]
    else:
        with pytest.raises(ApplyError, match="keys: of a daemon that does not answer"):
            run(path, daemon, {}, restart=policy)
        assert daemon.calls == []


def test_a_reload_that_changes_nothing_becomes_a_restart(path: Path) -> None:
    daemon = Daemon(path)
    daemon.deaf = True
    assert run(path, daemon, NVIDIA).applied == "restart"
    assert daemon.calls == ["reload", "restart"]


# columns: restart policy, running containers, whether the daemon stops responding after the reload; expected calls
DEAF = [
    ("if_idle", ["job"], False, ["reload", "reload"]),
    ("never", [], False, ["reload", "reload"]),
    ("if_idle", ["job"], True, ["reload", "restart"]),  # a dead daemon must restart
    ("always", ["job"], False, ["reload", "restart"]),
]


@pytest.mark.parametrize(("policy", "names", "dies", "calls"), DEAF)
def test_reload_without_effect_follows_the_restart_policy(
    path: Path, policy: str, names: list, dies: bool, calls: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("{}")
    daemon = Daemon(path)
    daemon.deaf, daemon.names = True, names

    def reload() -> None:
        daemon.calls.append("reload")
        daemon.silent = dies

    monkeypatch.setattr(daemon, "reload", reload)
    monkeypatch.setattr(daemon, "containers", lambda answers=True: names)
    if policy == "always":
        run(path, daemon, NVIDIA, restart=policy)
        assert json.loads(path.read_text()) == NVIDIA
    else:
        with pytest.raises(ApplyError, match="the former file is back; docker runs with it"):
            run(path, daemon, NVIDIA, restart=policy)
        assert path.read_text() == "{}"
    assert daemon.calls == calls
    assert leavings(path) == ["daemon.json"]


@pytest.mark.parametrize("former", [None, '{"bridge":"none"}\n'])
def test_former_file_is_restored_if_the_daemon_does_not_start(path: Path, tmp_path: Path, former: str | None) -> None:
    if former is not None:
        path.write_text(former)
    record = tmp_path / "record.json"
    daemon = Daemon(path)
    daemon.fails_with = "log-driver"
    with pytest.raises(ApplyError, match="the former file is back; docker runs with it"):
        run(path, daemon, {"log-driver": "nosuch"}, record=str(record))
    assert (path.read_text() if path.exists() else None) == former
    assert daemon.running
    assert not record.exists()
    assert leavings(path) == ([] if former is None else ["daemon.json"])


def test_run_killed_before_the_reload_is_completed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("{}")
    daemon = Daemon(path)

    def killed(self: object) -> None:
        raise KeyboardInterrupt

    settings = {"default-shm-size": "2G"}  # no response of the daemon shows this key
    with monkeypatch.context() as patched:
        patched.setattr(Applier, "follow", killed)
        with pytest.raises(KeyboardInterrupt):
            run(path, daemon, settings)
    assert json.loads(path.read_text()) == settings
    assert daemon.calls == []
    assert run(path, daemon, settings).plan() == ["reload docker"]
    assert daemon.calls == ["reload"]
    assert run(path, daemon, settings).plan() == []


def test_daemon_without_the_runtime_of_its_file_is_reloaded(path: Path) -> None:
    daemon = Daemon(path)
    path.write_text(json.dumps(NVIDIA))
    applier = run(path, daemon, NVIDIA)
    assert daemon.calls == ["reload"]
    assert not applier.changes
    assert any("default-runtime" in line for line in applier.plan())


def test_mode_owner_and_link_stay(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere.json"
    real.write_text("{}")
    real.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(real, 1234, 4321)
    path.symlink_to(real)
    run(path, Daemon(path), NVIDIA)
    assert path.is_symlink()
    assert json.loads(real.read_text()) == NVIDIA
    status = real.stat()
    assert status.st_mode & 0o777 == 0o640
    if os.geteuid() == 0:
        assert (status.st_uid, status.st_gid) == (1234, 4321)


# texts of daemon.json before the first run (None: no file)
@pytest.mark.parametrize("original", [None, "", '{ "bridge" : "none" }'])
def test_absent_gives_the_same_bytes(path: Path, tmp_path: Path, original: str | None) -> None:
    if original is not None:
        path.write_text(original)
    record = tmp_path / "state" / "record.json"
    run(path, Daemon(path), NVIDIA, record=str(record))
    assert record.stat().st_mode & 0o777 == 0o600
    daemon = Daemon(path)
    applier = run(path, daemon, {}, absent=True, record=str(record))
    assert applier.applied == "restart"
    assert (path.read_text() if path.exists() else None) == original
    assert not record.exists()
    assert daemon.info()["DefaultRuntime"] == "runc"
    assert run(path, Daemon(path), {}, absent=True, record=str(record)).plan() == []


def test_setting_that_is_no_longer_desired_is_reverted(path: Path, tmp_path: Path) -> None:
    record = str(tmp_path / "record.json")
    daemon = Daemon(path)
    run(path, daemon, {**NVIDIA, "default-shm-size": "2G"}, record=record)
    predicted = run(path, daemon, NVIDIA, record=record, check_mode=True).plan()
    # A reload would keep the value of a removed key.
    assert predicted == ['remove default-shm-size (was "2G")', "restart docker"]
    assert run(path, daemon, NVIDIA, record=record).plan() == predicted
    assert json.loads(path.read_text()) == NVIDIA
    assert run(path, daemon, NVIDIA, record=record).plan() == []
    run(path, daemon, {}, absent=True, record=record)
    assert not path.exists()


def test_value_of_another_program_stays_if_no_run_changed_the_file_since(path: Path, tmp_path: Path) -> None:
    record, daemon = tmp_path / "record.json", Daemon(path)
    run(path, daemon, {**NVIDIA, "default-shm-size": "2G"}, record=str(record))
    path.write_text(path.read_text().replace("2G", "8G"))
    before = record.read_text()
    assert run(path, daemon, NVIDIA, record=str(record), check_mode=True).plan() == []
    assert record.read_text() == before
    run(path, daemon, NVIDIA, record=str(record))
    assert "default-shm-size" not in record.read_text().split('"members"')[1]
    run(path, daemon, {**NVIDIA, "default-shm-size": "2G"}, record=str(record))
    run(path, daemon, {}, absent=True, record=str(record))
    assert json.loads(path.read_text()) == {"default-shm-size": "8G"}


def test_invalid_json_is_not_touched(path: Path) -> None:
    text = '{\n  "runtimes": {}\n  "default-shm-size": "2G"\n}\n'
    path.write_text(text)
    daemon = Daemon(path, running=False)
    with pytest.raises(daemon_json.DaemonJsonError) as caught:
        run(path, daemon, NVIDIA)
    assert (caught.value.line, caught.value.column) == (3, 3)
    assert path.read_text() == text
    assert daemon.calls == []


def test_a_write_that_fails_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("{}")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(daemon_apply.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        daemon_apply.write_text(str(path), '{"a": 1}')
    assert path.read_text() == "{}"
    assert leavings(path) == ["daemon.json"]
