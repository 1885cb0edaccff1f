# SPDX-License-Identifier: Apache-2.0
"""Tests the plan (the roles to run, with their changes) of hosts with docker: restarts of docker that the variables do
not allow, faults in daemon.json, and unusual installations of docker.
"""

from __future__ import annotations

import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.host.digest import sha256
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import desired
from plan_samples import DAEMON_JSON, DOCKER, VARIABLES, made

LOCAL_LOGS = {"__container_runtime_docker_settings": {"log-driver": "local"}}  # This setting needs a restart of docker.
BUSY = {"docker.info.ContainersRunning": 3}
LIVE = {
    **BUSY,
    "docker.info.LiveRestoreEnabled": True,
    "docker.config_text": DAEMON_JSON.replace("{", '{"live-restore": true, ', 1),
}
PENDING = ("files", "/run/vgpu-docker-daemon.pending")

# columns: variables that differ, facts of the state that differ, container_runtime_restart; expected words of the
# error, words of the warning
RESTARTS = [
    (
        LOCAL_LOGS,
        BUSY,
        "if_idle",
        "log-driver stops 3 running containers, and container_runtime_restart is if_idle",
        "",
    ),
    (LOCAL_LOGS, {**BUSY, "docker.containers": ["c1", "web", "db"]}, "if_idle", "containers (c1, web, db), and", ""),
    (LOCAL_LOGS, {**BUSY, "docker.containers": ["c1", "web", "db"]}, "always", "", "containers (c1, web, db)"),
    (LOCAL_LOGS, BUSY, "never", "needed for log-driver, and container_runtime_restart is never", ""),
    (LOCAL_LOGS, BUSY, "always", "", "log-driver stops 3 running containers"),
    (LOCAL_LOGS, LIVE, "if_idle", "", ""),
    (LOCAL_LOGS, LIVE, "never", "container_runtime_restart is never", ""),
    (LOCAL_LOGS, {}, "if_idle", "", ""),
    (LOCAL_LOGS, {}, "never", "container_runtime_restart is never", ""),
    # Docker is stopped, so the policy "never" does not apply: nothing is interrupted.
    (LOCAL_LOGS, {(*DOCKER, "active"): False, "docker.info": None}, "never", "", ""),
    # A reload applies this key, so no restart is planned.
    ({"__container_runtime_docker_settings": {"default-shm-size": "2G"}}, BUSY, "never", "", ""),
    ({}, {"docker.info": None}, "if_idle", "", "its containers are unknown"),
    ({}, {"docker.info": None}, "never", "a daemon that does not answer", ""),
    ({}, {**BUSY, PENDING: {"sha256": sha256("restart\n")}}, "if_idle", "the changes of an interrupted run", ""),
    ({}, {**BUSY, PENDING: {"sha256": sha256("reload\n")}}, "never", "", ""),
]


@pytest.mark.parametrize(("variables", "state", "allowed", "fault", "note"), RESTARTS)
def test_a_restart_that_is_not_allowed_is_refused_before_any_change(variables, state, allowed, fault, note):
    found = made({**variables, "container_runtime_restart": allowed}, state)
    assert found["roles"] != []
    for words, told in ((fault, found["errors"]), (note, found["warnings"])):
        assert len(told) == bool(words)
        assert words in "".join(told)
    # An allowed restart that stops or may stop containers is marked as a disturbance.
    marked = [step["disturbs"] for step in found["steps"] if step["role"] == "container_runtime"]
    assert fault or marked == [bool(note)]


RECORD = "/var/lib/vgpu/baseline/daemon.json"
WITH_SIZE = DAEMON_JSON.replace("{", '{"default-shm-size": "2G", ', 1)
MEMBER = {"path": ["default-shm-size"], "had": False, "ours": "2G", "ours_removed": False}
# columns: text of the record (None: no record), running containers; expected change, words of the error
SIZES = [
    (json.dumps({"members": [MEMBER]}), 0, 'remove default-shm-size (was "2G")', ""),
    (
        json.dumps({"members": [MEMBER]}),
        3,
        'remove default-shm-size (was "2G")',
        "a restart of docker for default-shm-",
    ),
    # The administrator set this key himself, or the record cannot be read, which the role reports.
    (json.dumps({"members": []}), 0, "", ""),
    (None, 0, "", ""),
    ("torn", 0, "", ""),
    ("[]", 0, "", ""),
]


@pytest.mark.parametrize(("record", "running", "change", "fault"), SIZES)
def test_setting_that_is_no_longer_desired_is_planned(record, running, change, fault):
    state = {"docker.config_text": WITH_SIZE, ("texts",): {RECORD: record}, "docker.info.ContainersRunning": running}
    found = made({"__container_runtime_docker_record": RECORD}, state)
    changes = [one for step in found["steps"] if step["role"] == "container_runtime" for one in step["changes"]]
    assert changes == ([f"/etc/docker/daemon.json: {change}"] if change else [])
    assert [fault in one for one in found["errors"]] == [True] * bool(fault)


def test_record_of_docker_is_read():
    wanted = desired.collect({**VARIABLES, "__container_runtime_docker_record": RECORD})
    assert RECORD in desired.reads(wanted)["texts"]


# invalid, because line 3 has no comma at its end
BAD_DAEMON_JSON = """\
{
  "default-runtime": "nvidia",
  "runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime"}}
  "default-shm-size": "2G"
}
"""


def test_a_broken_daemon_json_is_an_error_of_this_host_with_line_and_column():
    found = made(state={"docker.config_text": BAD_DAEMON_JSON})
    assert found["roles"] == []
    (fault,) = found["errors"]
    assert "/etc/docker/daemon.json" in fault
    assert "line 4, column 3" in fault


# columns: unusual installation of docker, its value in the state; expected words of the error, words of the warning
KINDS = [
    ("snap", True, "remove it with: snap remove docker", ""),
    ("podman", True, "package podman-docker", ""),
    ("rootless", ["ann", "1001"], "", "rootless for the users ann, 1001"),
]


@pytest.mark.parametrize(("kind", "value", "fault", "note"), KINDS)
def test_a_docker_that_daemon_json_does_not_configure_is_named(kind, value, fault, note):
    wanted = {"__container_runtime_docker_settings": {"default-shm-size": "2G"}}
    found = made(wanted, {f"docker.kinds.{kind}": value})
    for words, told in ((fault, found["errors"]), (note, found["warnings"])):
        assert len(told) == bool(words)
        assert words in "".join(told)


def test_a_docker_that_is_masked_is_an_error_of_this_host():
    found = made(state={(*DOCKER, "masked"): True, (*DOCKER, "active"): False, "docker.info": None})
    assert found["roles"] == []
    assert "docker.service is masked" in found["errors"][0]
    assert "systemctl unmask docker.service" in found["errors"][0]
    # The removal of our changes does not need a docker that can start.
    assert made({"container_runtime_state": "absent"}, {(*DOCKER, "masked"): True})["errors"] == []


def test_an_option_on_the_command_line_too_is_an_error_of_this_host():
    found = made(state={(*DOCKER, "argv"): ["/usr/sbin/dockerd", "--default-runtime=nvidia"]})
    assert "default-runtime" in found["errors"][0]
    assert "command line" in found["errors"][0]


# daemon.json that sets the feature cdi
ASKED = DAEMON_JSON.replace("{", '{"features": {"cdi": %s}, ', 1)
KUBELET = [1, 34]


@pytest.mark.parametrize(
    ("version", "more", "said"),
    [
        ("20.10.24+dfsg1", {}, False),  # docker 20.10 has no CDI.
        ("24.0.9", {}, False),
        ("25.0.0", {}, True),
        ("26.1.5+dfsg1", {}, True),
        ("28.1.1", {}, True),
        ("28.2.0", {}, False),  # docker 28.2 enables CDI by default.
        ("29.1.0", {}, False),
        ("", {}, False),
        ("26.1.5", {"docker.config_text": ASKED % "true"}, False),
        ("26.1.5", {"docker.config_text": ASKED % "false"}, False),
        ("26.1.5", {"kubelet": KUBELET}, False),
    ],
)
def test_docker_that_can_enable_cdi_gets_a_hint(version, more, said):
    found = made(state={"docker.info.ServerVersion": version, **more})
    lines = [one for one in found["warnings"] if "--device vgpu.fleet/slice" in one]
    assert len(lines) == said and all("features: {cdi: true}" in one and "vgpuctl run" in one for one in lines)
