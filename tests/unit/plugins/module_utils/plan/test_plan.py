# SPDX-License-Identifier: Apache-2.0
"""Tests the plan (a list of steps: the roles to run, with their changes) that follows from the state of a host and the
variables. Each row changes one fact of a converged host, which needs no change.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.engines import engine_auto
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import desired, plan, plugin_python
from plan_samples import BARE, CONVERGED, DAEMON_JSON, DOCKER, NODE_YAML, SILENT, UNIT, VARIABLES, changed, made


def test_converged_host_has_an_empty_plan():
    why = "driver branch 535 has no memory limits of control groups; they came with 615"
    line = {"allocation": "", "memory_enforcement": f"memory is enforced by the library alone: {why}"}
    expected = {"steps": [], "roles": [], "warnings": [], "errors": [], "disturbs": False, "outside": []}
    assert made() == {**expected, **line}


def test_bare_host_runs_every_role_in_order_and_verifies():
    whole = plan.make_plan(desired.collect(VARIABLES), {**CONVERGED, **BARE})
    assert whole["roles"] == [
        "nvidia_driver",
        "nvidia_docker",
        "container_runtime",
        "vcuda",
        "device_plugin",
        "verify",
    ]
    assert whole["disturbs"] is False
    assert all(step["reason"] for step in whole["steps"])
    assert all(step["changes"] for step in whole["steps"][:-1])


RECORD = "/var/lib/vgpu/baseline/nvidia_docker.json"


@pytest.mark.parametrize(
    ("spoiled", "state", "level"),
    [
        ({RECORD: "line 1"}, {}, "warnings"),
        ({RECORD: "line 1"}, {"packages.nvidia-docker2": None}, "errors"),
        ({RECORD: ""}, {"packages.nvidia-docker2": None}, ""),
        # This is the record (the list of changes for the rollback) of a role that does not run.
        ({"/var/lib/vgpu/baseline/mig.json": "line 1"}, {}, ""),
    ],
)
def test_invalid_record_is_an_error_only_if_its_role_would_fail(spoiled, state, level):
    found = made(state={**state, "records": spoiled})
    expected = "nvidia_docker: line 1"
    for name in ("errors", "warnings"):
        assert found[name] == ([expected] if name == level else [])


UNIT_FILE = ("files", "/etc/systemd/system/vgpu-device-plugin.service")
ARBITER = ("units", "vgpu-arbiter.service")
ARBITER_FILE = ("files", "/etc/systemd/system/vgpu-arbiter.service")

# columns: facts of the state that differ; expected role in the plan, words of its changes or its reason
STATES = [
    ({"packages.nvidia-smi": None}, "nvidia_driver", "install nvidia-smi"),
    ({("files", "/run/vgpu-docker-daemon.pending"): {}}, "container_runtime", "interrupted"),
    ({"packages.nvidia-docker2": None}, "nvidia_docker", "install nvidia-docker2"),
    ({("packages", "docker.io"): None}, "container_runtime", "install docker.io"),
    ({"docker.config_text": None}, "container_runtime", 'set default-runtime to "nvidia"'),
    ({"docker.config_text": "{}"}, "container_runtime", "/etc/docker/daemon.json: set"),
    (
        {"docker.config_text": DAEMON_JSON.replace('"default-runtime": "nvidia"', '"default-runtime": "runc"')},
        "container_runtime",
        'change default-runtime from "runc" to "nvidia"',
    ),
    # A run was killed after it wrote daemon.json and before the reload, so the running daemon still has the old
    # settings.
    ({"docker.info.DefaultRuntime": "runc"}, "container_runtime", "the running daemon has default-runtime"),
    ({"docker.info.Runtimes": {"runc": {"path": "runc"}}}, "container_runtime", "runtimes.nvidia"),
    ({"docker.info": None}, "container_runtime", "restart docker.service, which does not answer"),
    # A stopped or disabled docker is the step's reason only if nothing else differs.
    (
        {(*DOCKER, "active"): False, "docker.info": None},
        "container_runtime",
        "docker.service is not running\nstart docker.service",
    ),
    (
        {(*DOCKER, "active"): False, "docker.info": None, ("packages", "docker.io"): None},
        "container_runtime",
        "packages are missing or of another version\ninstall docker.io\nstart docker.service",
    ),
    (
        {(*DOCKER, "enabled"): False},
        "container_runtime",
        "docker.service is not enabled\nenable docker.service",
    ),
    (
        {(*DOCKER, "enabled"): False, ("packages", "docker.io"): None},
        "container_runtime",
        "packages are missing or of another version\ninstall docker.io\nenable docker.service",
    ),
    ({"vcuda.current": "0.1.0-old"}, "vcuda", "switch current from 0.1.0-old to 0.1.0-new"),
    ({"vcuda.current": None, "vcuda.versions": [], "vcuda.whole": []}, "vcuda", "deploy /usr/local/lib/vgpu/0.1.0-new"),
    ({"vcuda.whole": ["0.1.0-old"]}, "vcuda", "differ from its manifest"),
    ({"vcuda.closed": ["0.1.0-new"]}, "vcuda", "let every user read"),
    # The unit of the arbiter is the step's reason only if nothing else differs.
    (
        {ARBITER_FILE: None},
        "vcuda",
        "the unit of the arbiter differs\nwrite /etc/systemd/system/vgpu-arbiter.service",
    ),
    (
        {ARBITER_FILE: None, "vcuda.current": "0.1.0-old"},
        "vcuda",
        "the library is not current\nswitch current from 0.1.0-old to 0.1.0-new\n"
        "write /etc/systemd/system/vgpu-arbiter.service",
    ),
    ({(*ARBITER_FILE, "sha256"): "other"}, "vcuda", "change /etc/systemd/system/vgpu-arbiter.service"),
    # The arbiter (the program that shares out compute time) runs from an older file: a run was killed between the
    # switch of the version and the restart, or the folder of the version was deployed again.
    ({(*ARBITER, "exe"): "/usr/local/lib/vgpu/0.1.0-old/vgpu-arbiter"}, "vcuda", "0.1.0-old/vgpu-arbiter"),
    ({(*ARBITER, "exe"): "/usr/local/lib/vgpu/0.1.0-new/vgpu-arbiter (deleted)"}, "vcuda", "restart vgpu-arbiter"),
    # The library root is a symbolic link now, so the running arbiter is not the program that the link leads to.
    ({"vcuda.real_root": "/srv/vgpu"}, "vcuda", "restart vgpu-arbiter"),
    ({(*UNIT, "old_driver"): True}, "device_plugin", "restart vgpu-device-plugin.service"),
    ({(*ARBITER, "stale"): True}, "vcuda", "reload systemd and restart vgpu-arbiter.service"),
    ({(*ARBITER, "active"): False}, "vcuda", "start vgpu-arbiter.service"),
    ({(*ARBITER, "enabled"): False}, "vcuda", "enable vgpu-arbiter.service"),
    ({(*ARBITER_FILE, "mtime"): 2000.0}, "vcuda", "newer than the running program"),
    ({"plugin.current": "0.0.9-x"}, "device_plugin", "from 0.0.9-x to 0.1.0-plug"),
    ({"plugin.versions": []}, "device_plugin", "install /opt/vgpu/plugin/0.1.0-plug"),
    ({"node_config.text": None}, "device_plugin", "write /etc/vgpu/node.yaml"),
    (
        {"node_config.text": "not json"},
        "device_plugin",
        "rewrite /etc/vgpu/node.yaml (/etc/vgpu/node.yaml: text: not valid JSON",
    ),
    (
        {"node_config.text": NODE_YAML.replace('"splitCount": 3', '"splitCount": 2')},
        "device_plugin",
        "sharing.vcuda.splitCount from 2 to 3",
    ),
    ({UNIT_FILE: None}, "device_plugin", "write /etc/systemd/system/vgpu-device-plugin.service"),
    ({(*UNIT_FILE, "sha256"): "other"}, "device_plugin", "change /etc/systemd/system/vgpu-device-plugin.service"),
    # A run was killed after it wrote its files and before the restart: the files are new, but the running program is
    # not.
    ({(*UNIT, "stale"): True}, "device_plugin", "reload systemd"),
    ({(*UNIT_FILE, "mtime"): 2000.0}, "device_plugin", "newer than the running program"),
    ({"plugin.status.version": "0.0.9"}, "device_plugin", "the running program is version 0.0.9"),
    ({"plugin.status.config_sha256": "other"}, "device_plugin", "older configuration"),
    ({"plugin.status": None}, "device_plugin", "does not answer"),
    ({(*UNIT, "active"): False}, "device_plugin", "start vgpu-device-plugin.service"),
    ({(*UNIT, "enabled"): False}, "device_plugin", "enable vgpu-device-plugin.service"),
]


@pytest.mark.parametrize(("state", "role", "words"), STATES)
def test_one_difference_runs_one_role_and_verifies(state, role, words):
    found = made(state=state)
    assert found["roles"] == [role, "verify", *(["collect"] if "switch current from 0" in words else [])]
    step = found["steps"][0]
    assert words in "\n".join([step["reason"], *step["changes"]])
    assert found["errors"] == []


def test_program_that_started_when_its_unit_file_was_written_is_not_restarted():
    assert made(state={(*UNIT_FILE, "mtime"): 1000.0, (*ARBITER_FILE, "mtime"): 1000.0})["roles"] == []


# columns: variables that differ; expected roles in the plan
DESIRED = [
    ({"vgpu_split_count": 4}, ["device_plugin", "verify"]),
    ({"vgpu_memory_scaling": 2}, ["device_plugin", "verify"]),
    ({"vgpu_devices": [{"match": {"index": 0}, "split_count": 1}]}, ["device_plugin", "verify"]),
    ({"vcuda_version": "0.2.0-x"}, ["vcuda", "verify", "collect"]),
    ({"nvidia_driver_version": "535.261.03-1"}, []),
    ({"nvidia_driver_version": "535.*"}, []),
    ({"nvidia_driver_version": "535.26.*"}, ["nvidia_driver", "device_plugin", "verify"]),  # 535.261 is installed.
    # After another driver is installed, the running device plugin still uses the old driver's files, so it must
    # restart.
    ({"nvidia_driver_version": "550.1-1"}, ["nvidia_driver", "device_plugin", "verify"]),
    ({"nvidia_driver_packages": ["nvidia-smi=535.261.03-1"]}, []),
    ({"nvidia_driver_packages": ["nvidia-smi=550"]}, ["nvidia_driver", "device_plugin", "verify"]),
    ({"__container_runtime_docker_settings": {"default-shm-size": "2G"}}, ["container_runtime", "verify"]),
    ({"vgpu_verify": "always"}, ["verify"]),
    ({"vgpu_verify": "never", "vgpu_split_count": 4}, ["device_plugin"]),
    ({"vgpu_sharing": "none"}, ["device_plugin"]),
    ({"vgpu_sharing": "none", "vcuda_state": "absent"}, ["vcuda", "device_plugin"]),
    ({"vcuda_state": "absent"}, ["vcuda", "verify"]),
    ({"device_plugin_state": "absent"}, ["device_plugin"]),
    ({"nvidia_docker_state": "absent"}, []),  # the device plugin is not managed
    ({"device_plugin_state": None}, []),
]


@pytest.mark.parametrize(("variables", "roles"), DESIRED)
def test_changed_variables_run_their_roles(variables, roles):
    assert made(variables)["roles"] == roles


# columns: variables that differ, facts about the library that differ; expected changes of the step "collect", which
# removes old versions of the library
OLD = "remove /usr/local/lib/vgpu/0.1.0-old"
COLLECTED = [
    ({}, {}, []),  # A container uses the old version, so it stays.
    ({}, {"vcuda.unused": ["0.1.0-old"]}, [OLD]),
    ({}, {"vcuda.current": "0.1.0-old"}, [OLD + " unless a container uses it"]),
    # The variables now select the old installed version, so the other version is removed.
    ({"vcuda_version": "0.1.0-old"}, {"vcuda.unused": ["0.1.0-old"]}, [OLD[:-3] + "new unless a container uses it"]),
    ({"vcuda_state": "absent"}, {"vcuda.unused": ["0.1.0-old"]}, []),
]


@pytest.mark.parametrize(("variables", "state", "changes"), COLLECTED)
def test_old_library_versions_are_removed_last(variables, state, changes):
    steps = made(variables, state)["steps"]
    assert [change for step in steps if step["role"] == "collect" for change in step["changes"]] == changes
    assert "collect" not in [step["role"] for step in steps[:-1]]


@pytest.mark.parametrize("role", ["vcuda", "device_plugin"])
def test_absent_role_that_left_nothing_has_no_step(role):
    found = made({role + "_state": "absent"}, BARE)
    assert role not in found["roles"]
    assert [one for one in found["warnings"] if one.startswith(role)] == []


UNPROVEN = [
    {"proof": None},  # The last isolation check failed or was killed, so it left no proof.
    {"proof": "of something else"},
    {"plugin.status.library": "0.0.9"},
    {"nvml.driver_version": "550.163.01"},
    {"gpus": [dict(CONVERGED["gpus"][0], uuid="GPU-exchanged")]},
]


@pytest.mark.parametrize("state", UNPROVEN)
def test_isolation_is_verified_again_after_a_change(state):
    assert made(state=state)["roles"] == ["verify"]
    assert made({"vgpu_verify": "never"}, state)["roles"] == []


def test_absent_role_runs_if_it_has_a_record():
    record = {("files", "/var/lib/vgpu/baseline/nvidia_docker.json"): {"sha256": "x", "mtime": 1.0}}
    assert made({"nvidia_docker_state": "absent"}, record)["roles"] == ["nvidia_docker", "verify"]
    assert made({"nvidia_docker_state": "present"}, record)["roles"] == []


DISTURBING = [
    ({"nvidia_driver_version": "550.1-1"}, {}, True),  # a driver in use is replaced
    ({"nvidia_driver_version": "550.1-1"}, {"nvml.ok": False}, False),
    ({"vcuda_version": "0.2.0-x"}, {}, False),
    ({"vgpu_split_count": 4}, {}, False),
    # Settings of docker: a reload applies default-shm-size, but log-driver needs a restart, which stops containers.
    ({"__container_runtime_docker_settings": {"default-shm-size": "2G"}}, {"docker.info.ContainersRunning": 3}, False),
    ({"__container_runtime_docker_settings": {"log-driver": "local"}}, {"docker.info.ContainersRunning": 3}, True),
    ({"__container_runtime_docker_settings": {"log-driver": "local"}}, {"docker.info.ContainersRunning": 0}, False),
    (
        {"__container_runtime_docker_settings": {"log-driver": "local"}},
        {
            "docker.info.ContainersRunning": 3,
            "docker.info.LiveRestoreEnabled": True,
            "docker.config_text": DAEMON_JSON.replace("{", '{"live-restore": true, ', 1),
        },
        False,
    ),
]


@pytest.mark.parametrize(("variables", "state", "disturbs"), DISTURBING)
def test_plan_marks_changes_that_disturb_running_work(variables, state, disturbs):
    assert made(variables, state)["disturbs"] is disturbs


NOUVEAU = {**SILENT, "driver.nouveau": True}

# columns: facts of the state that differ, nvidia_driver_kernel_module; expected words of the error, words of the
# warning, whether the role nvidia_driver runs
KERNEL_MODULES = [
    (NOUVEAU, "open", "nouveau uses the GPUs", "", False),
    (NOUVEAU, "none", "", "NVML does not answer: no driver", False),
    (SILENT, "proprietary", "", "", True),
    ({**SILENT, "packages.nvidia-smi": None}, "proprietary", "", "", True),
    ({**NOUVEAU, "packages.nvidia-smi": None}, "proprietary", "nouveau uses the GPUs", "", True),
    ({**SILENT, "driver.loaded_version": "535.1"}, "open", "", "NVML does not answer", False),
    ({**SILENT, "driver.loaded_version": "535.1", "driver.disk_version": "535.2"}, "open", "", "", True),
    ({"driver.nouveau": True}, "open", "", "", False),  # NVML works, so nouveau drives no GPU.
]


@pytest.mark.parametrize(("state", "module", "fault", "note", "runs"), KERNEL_MODULES)
def test_driver_role_runs_only_if_it_can_load_the_module(state, module, fault, note, runs):
    found = made({"nvidia_driver_kernel_module": module}, state)
    assert ("nvidia_driver" in found["roles"]) is runs
    for words, told in ((fault, found["errors"]), (note, found["warnings"])):
        about = [text for text in told if text.startswith("nvidia_driver")]
        assert len(about) == bool(words)
        assert words in "".join(about)


# columns: facts of the state that differ; expected words of the error
@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"os.root": "false"}, "set become: true"),
        ({"os.id": "fedora", "os.name": "Fedora 41"}, "Fedora 41 is not supported"),
        ({"os.id": "", "os.name": ""}, "an unknown distribution is not supported"),
    ],
)
def test_a_host_that_cannot_be_changed_is_refused(state, words):
    assert words in made(state=state)["errors"][0]


@pytest.mark.parametrize("like", [{"os.id": "ubuntu"}, {"os.id": "linuxmint", "os.id_like": "ubuntu debian"}])
def test_debian_derivatives_are_accepted(like):
    assert made(state=like)["errors"] == []


# columns: the difference in the host's GPUs, exceptions (entries for single GPUs); expected (level, path) of each
# finding
GPU_ROWS = [
    ({}, [{"match": {"index": 5}, "split_count": 1}], [("error", "sharing.vcuda.devices[0].match")]),
    ({}, [{"match": {"model": "T4"}, "split_count": 1}], [("error", "sharing.vcuda.devices[0].match")]),
    ({}, [{"match": {"index": 1}, "split_count": 1}], []),
    ({"gpus": []}, [], [("warning", "sharing")]),
    # Without a driver only the bus is known: an index can be checked, a model and a uuid cannot.
    (
        {"nvml.ok": False, "pci_gpus": [{}, {}]},
        [{"match": {"index": 2}}],
        [("error", "sharing.vcuda.devices[0].match")],
    ),
    (
        {"nvml.ok": False, "pci_gpus": [{}, {}]},
        [{"match": {"index": 1}}, {"match": {"model": "T4"}}, {"match": {"uuid": "GPU-c", "index": 0}}],
        [("warning", "sharing.vcuda.devices[1].match"), ("warning", "sharing.vcuda.devices[2].match")],
    ),
]


@pytest.mark.parametrize(("state", "devices", "expected"), GPU_ROWS)
def test_exceptions_must_match_the_gpus(state, devices, expected):
    wanted = desired.collect({**VARIABLES, "vgpu_devices": devices})
    found = plan.check_gpus(wanted, changed(CONVERGED, state))
    assert [(finding.level, finding.path) for finding in found] == expected


@pytest.mark.parametrize(("index", "expected"), [(1, []), (5, [("error", "vgpu_configs.big")])])
def test_named_configuration_must_match_the_gpus(index, expected):
    configs = {"big": {"devices": [{"match": {"index": index}, "split_count": 1}]}}
    found = plan.check_gpus(desired.collect({**VARIABLES, "vgpu_configs": configs}), CONVERGED)
    assert [(finding.level, finding.path) for finding in found] == expected


def test_plan_reads_what_it_compares():
    options = desired.reads(desired.collect({**VARIABLES, "nvidia_driver_packages": ["nvidia-smi=535", "libcuda1"]}))
    named = ["docker.io", "libcuda1", "nvidia-docker2", "nvidia-smi"]
    assert options["packages"] == sorted([*named, *plugin_python.EVERY_PACKAGE])
    # For engine auto the plan needs the state of every engine.
    engines = ["containerd", "crio", "docker", "k3s-agent", "k3s", "kubelet", "rke2-agent", "rke2-server"]
    services = [*engines, "vgpu-arbiter", "vgpu-device-plugin"]
    assert options["units"] == [f"{name}.service" for name in services]
    assert options["files"] == [
        "/var/lib/vgpu/baseline/nvidia_docker.json",
        "/run/vgpu-docker-daemon.pending",
        *engine_auto.DROP_INS.values(),
        "/etc/systemd/system/vgpu-arbiter.service",
        "/etc/systemd/system/vgpu-device-plugin.service",
        "/etc/vgpu/daemonset.json",
    ]


def test_the_plan_is_shown_with_reasons_and_marks():
    state = changed(CONVERGED, {"vcuda.current": "0.1.0-old"})
    wanted = desired.collect({**VARIABLES, "nvidia_driver_version": "550.1-1"})
    text = "\n".join(plan.describe(plan.make_plan(wanted, state), state))
    assert "2 GPUs: 2 x Tesla V100-SXM2-16GB 16160 MiB" in text
    assert "1. nvidia_driver: driver packages are missing or of another version  [disturbs running work]" in text
    assert "     - switch current from 0.1.0-old to 0.1.0-new" in text
    assert plan.describe(made(), CONVERGED)[-1] == "nothing to do"
    lost = changed(CONVERGED, {"nvml.lost": [{"index": 2, "error": "a GPU has fallen off the bus"}]})
    assert plan.describe(made(), lost)[0] == "2 of 3 GPUs: 2 x Tesla V100-SXM2-16GB 16160 MiB"
